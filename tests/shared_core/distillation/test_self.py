"""Teacher self: the student's own weights as the run started, whatever other techniques do to the student."""

import copy

import distillation_steps
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core import Session
from shared_core.distillation import DistillConfig
from shared_core.errors import CheckpointError, ConfigError

STEPS = 4
BESIDE = {
    "alone": {},
    "qat": {"qat": {"weights": "int4", "group_size": 8, "weight_bits": 3}},
    "lora": {"lora": {"rank": 2, "save": "merged"}},
    "lora-qat": {"lora": {"rank": 2, "save": "merged"}, "qat": {"scheme": "int8_weight"}},
    "prune": {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}},
    "low_rank": {"low_rank": {"rank": 3, "force": True, "min_size": 0}},
}


def make(seed=0):
    torch.manual_seed(seed)
    sizes = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 3))
    model = nn.Sequential(*sizes).double()
    model[1].running_mean.uniform_(-0.1, 0.1)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=generator, dtype=torch.double)
    return x, torch.randint(3, (12,), generator=generator)


class Run(distillation_steps.Run):
    """A plain loop; `expected` is the loss of its latest step against `start`."""

    def __init__(self, beside=(), model=None, state=None, start=None, **options):
        model = model or make()
        self.start = (start or copy.deepcopy(model)).eval()
        self.options = {"teacher": "self", **options}
        super().__init__(model, {"distill": self.options, **dict(beside)}, STEPS, state)

    def backward(self):
        x, y = batch(self.taken)
        with self.session.forward():
            logits = self.model(x)
            task = F.cross_entropy(logits, y)
            loss = self.session.loss(task)
        loss.backward()
        temperature, alpha = self.options.get("temperature", 2.0), self.options.get("alpha", 0.0)
        with torch.no_grad():
            aim = F.softmax(self.start(x) / temperature, -1)
            soft = F.kl_div(F.log_softmax(logits / temperature, -1), aim, reduction="batchmean")
            self.expected = alpha * task + (1 - alpha) * temperature**2 * soft
        return loss.detach()


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("options", [{}, {"alpha": 0.3, "temperature": 1.0}], ids=["default", "given"])
def test_the_loss_is_the_divergence_from_the_model_before_any_technique(name, options):
    run = Run(BESIDE[name], **options)
    for _ in range(STEPS):
        torch.testing.assert_close(run.step(), run.expected, rtol=1e-9, atol=1e-12)
    assert run.expected > 0
    assert run.session.receipt()["techniques"]["distill"]["alpha"] == options.get("alpha", 0.0)


def test_only_the_student_is_trained():
    run = Run(BESIDE["qat"])
    before = copy.deepcopy(run.start.state_dict())
    run.step()
    held = {id(value) for group in run.optimizer.param_groups for value in group["params"]}
    assert held == {id(value) for value in run.model.parameters()}
    run.session.finish()
    changed = [name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])]
    assert "0.weight" in changed
    assert list(run.model.state_dict()) == list(before)


@pytest.mark.parametrize("name", ["qat", "lora", "prune"])
def test_a_resumed_run_learns_from_the_start_of_the_run_and_not_of_the_checkpoint(name):
    whole, states = Run(BESIDE[name], alpha=0.2), []
    for _ in range(STEPS):
        states.append(whole.state())
        whole.step()
    whole.session.finish()
    again = Run(BESIDE[name], alpha=0.2, state=states[2])
    while again.taken < STEPS:
        again.step()
    again.session.finish()
    assert all(torch.equal(value, again.model.state_dict()[key]) for key, value in whole.model.state_dict().items())


def test_a_checkpoint_holds_no_copy():
    run = Run(BESIDE["qat"])
    run.step()
    saved = run.session.state_dict()["techniques"]["distill"]
    assert not any(isinstance(value, Tensor) for value in (*saved.values(), *saved["teachers"].values()))


@pytest.mark.parametrize("model", [make(1), "checkpoint"], ids=["other", "checkpoint"])
def test_a_run_that_starts_from_other_weights_does_not_resume(model):
    run = Run()
    run.step()
    state = run.state()
    if model == "checkpoint":
        model = make()
        model.load_state_dict(state["model"])
    with pytest.raises(CheckpointError, match="weights that the run started with"):
        Run(model=model, state=state)


def test_a_second_run_learns_from_its_own_start():
    first = Run(alpha=0.5)
    for _ in range(STEPS):
        first.step()
    first.session.finish()
    second = Run(model=first.model)
    torch.testing.assert_close(second.step(), second.expected, rtol=1e-9, atol=1e-12)
    assert second.expected > 0


def test_the_copy_may_have_16_bits_and_says_what_it_costs():
    model = make().float()
    session = Session({"distill": {"teacher": "self", "teacher_dtype": "bfloat16", "alpha": 0.0}})
    start = copy.deepcopy(model).bfloat16().eval()
    size = sum(value.nbytes for value in start.state_dict().values())
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters())], total_steps=1)
    x, y = batch(0)
    logits = model(x.float())
    loss = session.loss(F.cross_entropy(logits, y))
    aim = F.softmax(start(x.bfloat16()).float() / 2, -1)
    expected = 4 * F.kl_div(F.log_softmax(logits / 2, -1), aim, reduction="batchmean")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    told = session.receipt()["techniques"]["distill"]
    assert told["teacher_mib"] == pytest.approx(size / 2**20, abs=1e-3)
    assert any(f"{told['teacher_mib']} MiB" in note for note in session.notes)
    assert model[0].weight.dtype == torch.float32


def test_features_of_the_start_are_matched():
    run = Run(hidden=["4=4"], hidden_weight=2.0)
    run.step()  # the start's features equal the student's, but for dropout and batch norm
    x, _ = batch(run.taken)
    torch.manual_seed(3)
    found = run.backward()
    torch.manual_seed(3)
    twin = copy.deepcopy(run.model)
    expected = run.expected + 2 * F.mse_loss(twin[:5](x), run.start[:5](x))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"teacher": "self,ema"},
        {"teacher": ["self", make()]},
        {"teacher": "self,runs/teacher"},
        {"teacher": "mutual,self"},
        {"teacher": "self", "init_layers": "even"},
        {"teacher": "self", "peers": 3},
        {"teacher": "self", "teacher_dtype": "nf4"},
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused(options):
    with pytest.raises(ConfigError, match="distill"):
        DistillConfig(**options)


@pytest.mark.parametrize("teacher", ["ema", "mutual", make()], ids=["ema", "mutual", "model"])
def test_other_teachers_keep_half_of_the_task_loss(teacher):
    assert DistillConfig(teacher=teacher).task_weight == 0.5
    assert DistillConfig(teacher="self").task_weight == 0


@pytest.mark.slow
def test_processes_share_the_start_of_the_main_one(tmp_path):
    first, second = saved_by_two_ranks(__file__, tmp_path)
    for kind, found in first.items():
        assert found["digest"] == second[kind]["digest"]
        assert all(torch.equal(value, second[kind]["weights"][name]) for name, value in found["weights"].items())
        torch.testing.assert_close(found["loss"], found["expected"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(second[kind]["loss"], second[kind]["expected"], rtol=1e-9, atol=1e-12)


def rank_of_two(rank, folder):
    """Train where the second process has drawn other weights, or has not read any."""
    results = {}
    for kind in ("drawn", "meta"):
        start = make(0)
        model = make(rank)
        if kind == "meta" and rank:
            model.to("meta")
        session = Session({"distill": {"teacher": "self"}, **BESIDE["qat"]})
        session.attach(model)
        if kind == "meta":  # as Accelerate fills the model before the run begins
            model.to_empty(device="cpu") if rank else None
            for value in model.state_dict().values():
                dist.broadcast(value, src=0)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.begin([optimizer], total_steps=1)
        x, y = batch(rank)
        logits = wrapped(x)
        loss = session.loss(F.cross_entropy(logits, y))
        loss.backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        aim = F.softmax(start.eval()(x) / 2, -1)
        expected = 4 * F.kl_div(F.log_softmax(logits / 2, -1), aim, reduction="batchmean")
        digest = session.state_dict()["techniques"]["distill"]["teachers"]["digest"]
        session.finish()
        weights = {name: value.detach() for name, value in model.named_parameters()}
        results[kind] = {"weights": weights, "digest": digest, "loss": loss.detach(), "expected": expected.detach()}
    return results


if __name__ == "__main__":
    be_a_rank(rank_of_two)
