"""Deep mutual learning against a loop written from the paper, and what becomes of the other students."""

import copy

import distillation_steps
import pytest
import torch
import torch.nn.functional as F
from distillation_steps import batch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shared_core.distillation.mutual import redrawn
from shared_core.engine.services import Services
from shared_core.errors import CompatibilityError, ConfigError, EffError, MatchError, TrainingError

STEPS = 5


class Net(nn.Module):
    """Returns its loss, as Transformers models do."""

    def __init__(self, width=8, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})


class Run(distillation_steps.Run):
    def __init__(self, options=None, state=None, model=None, services=None, optimizer=None, recipe=None):
        recipe = {"distill": {"teacher": "mutual", **(options or {})}, **(recipe or {})}
        super().__init__(model or Net(dropout=0.3), recipe, STEPS, state, optimizer, services)

    def backward(self, micro=1):
        dtype = next(self.model.parameters()).dtype
        x, y = batch(self.taken, dtype)
        for part_x, part_y in zip(x.chunk(micro), y.chunk(micro), strict=True):
            loss = self.session.loss(self.model(part_x, labels=part_y)["loss"]) / micro
            loss.backward()
        return loss


def equal(first, second):
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


class TestUpdate:
    @pytest.mark.parametrize("students", [2, 3])
    def test_every_step_of_every_student_is_the_papers(self, students):
        alpha, temperature = 0.4, 3.0
        run = Run(
            {"peers": students, "alpha": alpha, "temperature": temperature},
            model=Net().double(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        )  # fmt: skip
        nets = [copy.deepcopy(each) for each in (run.model, *run.technique.peers)]
        for net in nets:
            net.requires_grad_(True).train()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
        for step in range(STEPS):
            printed = run.step()
            x, y = batch(step, torch.float64)
            said = [net(x)["logits"] for net in nets]
            losses = []
            for mine in said:
                task = -torch.log_softmax(mine, -1)[range(8), y].mean()
                others = [torch.softmax(other.detach() / temperature, -1) for other in said if other is not mine]
                log_p = torch.log_softmax(mine / temperature, -1)
                kl = sum((p * (p.log() - log_p)).sum(-1).mean() for p in others) / (students - 1)
                losses.append(alpha * task + (1 - alpha) * temperature**2 * kl)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            torch.testing.assert_close(printed, losses[0], rtol=0, atol=1e-14)  # the student's alone
            for ours, reference in zip((run.model, *run.technique.peers), nets, strict=True):
                for name, value in reference.state_dict().items():
                    torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=1e-12)

    def test_micro_batches_equal_one_batch(self):
        def trained(micro):
            model = Net()
            model.body[1] = nn.Identity()
            run = Run(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
            for _ in range(STEPS):
                run.step(micro)
            return run

        one, four = trained(1), trained(4)
        for ours, theirs in zip((one.model, *one.technique.peers), (four.model, *four.technique.peers), strict=True):
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)

    def test_a_loop_that_computes_its_loss_outside_gives_it_as_a_service(self):
        class Loss(Services):
            def task_loss(self, model, forward):
                return F.cross_entropy(forward()["logits"], self.labels)

        services, inside = Loss(), Run()
        outside = Run(services=services)
        for step in range(STEPS):
            torch.manual_seed(step)
            inside.step()
            torch.manual_seed(step)
            x, services.labels = batch(step)
            task = F.cross_entropy(outside.model(x)["logits"], services.labels)
            outside.session.loss(task).backward()
            outside.optimizer.step()
            outside.session.after_step()
            outside.model.zero_grad()
        assert equal(inside.model, outside.model)
        assert equal(inside.technique.peers[0], outside.technique.peers[0])

    def test_a_loss_that_nobody_gives_is_refused(self):
        run = Run()
        x, y = batch(0)
        with pytest.raises(TrainingError, match=r"Net returned no loss .* whose task_loss"):
            run.session.loss(F.cross_entropy(run.model(x)["logits"], y))

    def test_a_skipped_step_leaves_no_gradient_to_the_next(self):
        run = Run()
        run.backward()
        run.session.after_step(applied=False)
        assert all(weight.grad is None for weight in run.technique.peers[0].parameters())

    def test_each_student_is_clipped_by_its_own_norm(self):
        run = Run({"peers": 3})
        run.backward()
        everyone = [weight for group in run.optimizer.param_groups for weight in group["params"]]
        students = [run.model, *run.technique.peers]
        raw = [torch.cat([weight.grad.flatten() for weight in each.parameters()]) for each in students]
        run.technique.one_by_one(lambda: clip_grad_norm_(everyone, 0.01))
        for each, before in zip(students, raw, strict=True):
            after = torch.cat([weight.grad.flatten() for weight in each.parameters()])
            torch.testing.assert_close(after, before * 0.01 / (before.norm() + 1e-6))


class TestOptimizer:
    def test_peers_follow_the_groups_of_the_student(self):
        def grouped(parameters):
            matrices, others = [], []
            for each in parameters:
                (matrices if each.ndim > 1 else others).append(each)
            return torch.optim.SGD([{"params": matrices, "lr": 0.1}, {"params": others, "lr": 0.0}], lr=0.5)

        run = Run({"peers": [Net(width=16, seed=9)]}, optimizer=grouped)
        (peer,) = run.technique.peers
        before = copy.deepcopy(peer)
        run.step()
        moved = {name: not torch.equal(value, peer.get_parameter(name)) for name, value in before.named_parameters()}
        assert moved == {name: value.ndim > 1 for name, value in peer.named_parameters()}

    def test_what_it_saves_is_the_students_alone_and_it_is_given_back_without_peers(self):
        run, plain = Run(), torch.optim.AdamW(Net().parameters(), lr=0.01)
        run.step()
        saved = run.optimizer.state_dict()
        plain.load_state_dict(saved)
        named = dict(zip(saved["state"], run.model.parameters(), strict=True))
        assert all(saved["state"][key]["exp_avg"].shape == weight.shape for key, weight in named.items())
        assert "head.weight" in run.session.state_dict()["techniques"]["distill"]["teachers"]["peers"][0]["optimizer"]
        run.session.finish()
        assert run.optimizer.param_groups[0]["params"] == list(run.model.parameters())
        assert len(run.optimizer.state) == len(list(run.model.parameters()))
        assert set(run.model.state_dict()) == set(Net().state_dict())

    def test_an_optimizer_of_something_else_is_refused(self):
        with pytest.raises(TrainingError, match="must be trained by the student's optimizer"):
            Run(optimizer=lambda parameters: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "Adafactor", "SGD"])
def test_resume_is_exact(kind, stop):
    def optimizer(parameters):
        return getattr(torch.optim, kind)(parameters, lr=0.01)

    whole = Run({"peers": 3, "alpha_end": 0.1}, optimizer=optimizer)
    torch.manual_seed(5)
    for taken in range(STEPS):
        if taken == stop:
            state = whole.state()
        whole.step()
    again = Run({"peers": 3, "alpha_end": 0.1}, state, optimizer=optimizer)
    while again.taken < STEPS:
        again.step()
    for ours, theirs in zip((whole.model, *whole.technique.peers), (again.model, *again.technique.peers), strict=True):
        assert equal(ours, theirs)
    for ours, theirs in zip(*(run.technique.state_dict()["teachers"]["peers"] for run in (whole, again)), strict=True):
        assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    assert whole.session.receipt()["techniques"] == again.session.receipt()["techniques"]


class TestRedraw:
    def test_trained_weights_are_new_and_frozen_ones_the_students(self):
        net = Net()
        net.body[0].requires_grad_(False)
        net.body[1].running_mean.fill_(3.0)
        random = torch.get_rng_state()
        other = redrawn(net, 1)
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.equal(other.body[0].weight, net.body[0].weight)
        assert not torch.equal(other.head.weight, net.head.weight)
        assert other.body[1].running_mean.count_nonzero() == 0
        assert other.head.weight.std().item() == pytest.approx(net.head.weight.std().item(), rel=0.5)
        assert torch.equal(redrawn(net, 1).head.weight, other.head.weight)

    def test_tied_weights_stay_tied(self):
        net = nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 4)])
        net[1].weight = net[0].weight
        other = redrawn(net, 1)
        assert other[1].weight is other[0].weight

    def test_a_weight_that_nothing_draws_is_an_error(self):
        net = Net()
        net.token = nn.Parameter(torch.zeros(3))
        with pytest.raises(MatchError, match=r"token; .*reset_parameters"):
            Run(model=net)

    def test_transformers_models_draw_by_their_own_rule(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            initializer_range=0.5,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        other = redrawn(model, 1)
        assert not any(
            torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True) if a.ndim > 1
        )
        assert other.bert.encoder.layer[0].output.dense.weight.std().item() == pytest.approx(0.5, rel=0.1)


class TestPeers:
    def test_other_architectures_join_and_are_trained_in_place(self):
        peer = Net(width=16, seed=3)
        before = copy.deepcopy(peer)
        run = Run({"peers": [peer]})
        run.step()
        assert run.technique.peers == [peer]
        assert not torch.equal(peer.head.weight, before.head.weight)

    def test_a_peer_takes_the_place_of_the_submodule_that_is_the_student(self):
        class Whole(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def forward(self, x, labels=None):
                return self.net(x, labels=labels)

        class OfWhole(Services):
            def task_loss(self, model, forward):
                return model(x, labels=y)["loss"]

        x, y = batch(0)
        peer = Net(width=16, seed=3)
        run = Run({"peers": [peer], "student": "net"}, model=Whole(Net()), services=OfWhole())
        run.step()
        assert isinstance(run.technique.peers[0], Whole)
        assert run.technique.peers[0].net is peer

    def test_the_receipt_ranks_the_students_and_weights_lie_beside_it(self, tmp_path):
        run = Run({"peers": 3})
        for _ in range(STEPS):
            run.step()
        assert run.session.figures()["distill/peer_task_loss"] > 0
        run.session.finish()
        receipt = run.session.receipt()
        told = receipt["techniques"]["distill"]
        assert told["teacher"] == "mutual learning of 3 students"
        assert set(told["task_losses"]) == {"student", "peer 1", "peer 2"}
        assert told["task_losses"][told["best"]] == min(told["task_losses"].values())
        receipt.write(tmp_path)
        for number, peer in enumerate(run.technique.peers, 1):
            plain = Net()
            plain.load_state_dict(load_file(tmp_path / f"eff_peer_{number}.safetensors"))
            assert equal(plain, peer)
            assert not peer.training

    def test_they_are_not_what_other_techniques_make_of_the_student(self):
        run = Run(recipe={"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}})
        for _ in range(STEPS):
            run.step()
        run.session.finish()
        (peer,) = run.technique.peers
        assert type(peer.head) is nn.Linear
        assert (run.model.head.weight == 0).any()
        assert not (peer.head.weight == 0).any()
        codes = peer.head.weight / (peer.head.weight.abs().amax(1, keepdim=True) / 127)
        assert not torch.allclose(codes, codes.round(), atol=1e-3)

    def test_modes_are_the_students(self):
        net = Net().eval()
        run = Run(model=net)
        net.train()
        net.body[1].eval()
        run.backward()
        (peer,) = run.technique.peers
        assert peer.training
        assert not peer.body[1].training


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"peers": [Net()]}, "peer 1 has the same weights as another student"),
        ({"peers": [Net(seed=4), Net(seed=4)]}, "peer 2 has the same weights as another student"),
        ({"peers": [Net(seed=4).requires_grad_(False)]}, "weights, got none in peer 1"),
    ],
)
def test_what_makes_no_sense_is_refused_at_start(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Run(options)


def test_what_cannot_be_right_is_refused():
    net = Net()
    with pytest.raises(MatchError, match="student must name a submodule, got 'boddy'; did you mean"):
        Run({"student": "boddy"})
    with pytest.raises(CompatibilityError, match=r"share.* weights"):
        Run({"peers": [net]}, model=net)
    for key, options in (("lora", {"rank": 2}), ("primary_weights", {"kind": "fp32_copy"})):
        with pytest.raises(EffError, match=f"mutual cannot be combined with {key}"):
            Run(recipe={key: options})
    run = Run({"peers": [Net(seed=4)]})
    run.model.head = nn.Linear(8, 4)
    with pytest.raises(ConfigError, match="classes"):
        run.backward()
