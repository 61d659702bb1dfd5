"""Running averages in a run: when they move, where they are put, what is saved, and what the end leaves."""

import math

import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn
from torch.optim import swa_utils

from shared_core import Session
from shared_core.engine.services import Services
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, EffError, MatchError, TrainingError
from shared_core.weight_average import AverageConfig, RunningAverage, ema_decay


class LoopServices(Services):
    """Calibrates on a fixed batch, and remembers what was said."""

    def __init__(self, model):
        self.model, self.said, self.num_calibrations = model, [], 0

    def calibrate(self, num_batches):
        self.num_calibrations += 1
        training = self.model.training
        self.model.train()
        with torch.no_grad():
            for number in range(num_batches):
                self.model(inputs(100 + number))
        self.model.train(training)

    def say(self, text):
        self.said.append(text)


def inputs(seed):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(seed))


def make_model(dtype=torch.float32, norm=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Linear(4, 2)).to(dtype)


class Run:
    """A bare loop whose steps can be taken one by one."""

    def __init__(self, model=None, total=20, state=None, more=None, **options):
        self.model = model or make_model()
        self.services = LoopServices(self.model)
        self.session = Session({"average": {"kind": "ema", **options}, **(more or {})}, services=self.services)
        self.session.attach(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if state is not None:
            self.session.load_state_dict(state)
        self.session.begin([self.optimizer], total_steps=total)
        self.technique = self.session.techniques["average"]

    def step(self, count=1, skipped=False):
        for _ in range(count):
            seed = self.session.step + self.session.skipped
            x = inputs(seed).to(next(self.model.parameters()).dtype)
            self.session.loss(self.model(x).square().mean()).backward()
            if skipped:
                self.session.before_step()
                self.session.after_step(applied=False)
                self.optimizer.zero_grad()
            else:
                plain_step(self.session, self.optimizer)
        return self

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def averaged(self):
        with self.session.swapped("evaluate"):
            return self.weights()


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_run_has_the_average_of_torch(kind):
    run = Run(kind=kind, begin=1, **({"decay": 0.8, "warmup": False} if kind == "ema" else {}))
    multi = swa_utils.get_ema_multi_avg_fn(0.8) if kind == "ema" else swa_utils.get_swa_multi_avg_fn()
    torchs = swa_utils.AveragedModel(run.model, multi_avg_fn=multi, use_buffers=False)
    for _ in range(12):
        run.step()
        torchs.update_parameters(run.model)
    ours = run.averaged()
    for name, value in torchs.module.named_parameters():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)


def test_updates_come_at_begin_and_every_so_many_steps_and_never_for_a_skipped_one():
    run, updates = Run(begin=4, every=3), []
    for number in range(14):
        run.step(skipped=number in (4, 9))
        updates.append(run.technique.figures()["average/updates"])
    #                 steps 1  2  3  4  skip 5  6  7  8  skip 9 10 11 12
    assert updates == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]


def test_without_begin_the_first_update_is_that_of_the_first_interval():
    run = Run(every=5).step(4)
    assert run.technique.report()["updates"] == 0
    assert run.step(1).technique.report()["updates"] == 1
    assert Run(kind="swa").technique.report()["first_update_step"] == 15


@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_validation_sees_the_average_and_training_nothing_of_it(kind, dtype):
    whole, run = (Run(make_model(dtype), kind=kind, begin=2) for _ in range(2))
    whole.step(9)
    run.step(5)
    before, addresses = run.weights(), [value.data_ptr() for value in run.model.parameters()]
    with run.session.swapped("evaluate"), run.session.swapped("evaluate"):  # several evaluation sets
        for name in ("0.weight", "2.weight", "2.bias"):
            assert not torch.equal(run.model.state_dict()[name], before[name]), name
        assert {value.dtype for value in run.model.parameters()} == {dtype}
        assert run.model[1].num_batches_tracked == 5
    assert_equal(before, run.weights())
    assert addresses == [value.data_ptr() for value in run.model.parameters()]
    run.step(4)
    assert_equal(whole.weights(), run.weights())
    assert_equal(whole.averaged(), run.averaged())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_validation_puts_the_weights_back(error):
    run = Run().step(4)
    before = run.weights()
    with pytest.raises(error), run.session.swapped("evaluate"):
        raise error
    assert_equal(before, run.weights())


def test_detaching_inside_validation_puts_the_weights_back():
    run = Run().step(4)
    before = run.weights()
    run.session.swaps.begin_evaluation()
    run.session.detach()
    assert_equal(before, run.weights())


def test_lightning_validates_in_inference_mode_and_may_be_interrupted_out_of_it():
    run = Run(make_model(torch.bfloat16)).step(4)
    before = run.weights()
    with torch.inference_mode():
        run.session.swaps.begin_evaluation()
    run.session.swaps.leave_evaluation()
    assert_equal(before, run.weights())
    run.step(1)


@pytest.mark.parametrize("kind", ["ema", "last_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_inside_validation_is_what_is_saved_outside(kind, dtype):
    run = Run(make_model(dtype), kind=kind).step(4)
    weights, average = run.weights(), run.averaged()
    with run.session.swapped("checkpoint"):
        state = run.session.state_dict()["techniques"]["average"]["kept"]
        outside = [{name: value.clone() for name, value in kept.items()} for kept in state]
        baked = {name: value.clone() for name, value in run.session.files.bake(run.model.state_dict()).items()}
    assert_equal(baked, average)
    with run.session.swapped("evaluate"):
        loose = run.session.state_dict()["techniques"]["average"]["kept"]
        for one, other in zip(loose, outside, strict=True):
            assert_equal(one, other)
        with run.session.swapped("checkpoint"), run.session.swapped("checkpoint"):
            assert_equal(run.weights(), weights)
            inside = run.session.state_dict()["techniques"]["average"]["kept"]
            for one, other in zip(inside, outside, strict=True):
                assert_equal(one, other)
            assert_equal(dict(run.session.files.bake(run.model.state_dict())), average)
        assert_equal(run.weights(), average)
        with run.session.swapped("export"):
            assert_equal(run.weights(), average)
            assert_equal(dict(run.session.files.bake(run.model.state_dict())), average)
    with run.session.swapped("export"):
        assert_equal(run.weights(), average)
    assert_equal(run.weights(), weights)


@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_average_goes_on_bit_for_bit(kind, stop):
    options = {"kind": kind, "begin": 2, "every": 2, **({"k": 2} if kind == "last_k" else {})}
    whole, first = Run(**options).step(10), Run(**options).step(stop)
    model = make_model()
    model.load_state_dict(first.weights())
    again = Run(model, state=first.session.state_dict(), **options).step(10 - stop)
    assert_equal(whole.averaged(), again.averaged())
    whole.session.finish()
    again.session.finish()
    assert_equal(whole.weights(), again.weights())


def test_fewer_weights_are_kept_after_a_resume_that_asks_for_fewer():
    first = Run(kind="last_k", k=4).step(6)
    state, kept = first.session.state_dict(), first.technique._running.kept
    first.session.detach()
    again = Run(first.model, kind="last_k", k=2, state=state)
    assert_equal(again.technique._running.kept[0], kept[2])
    again.step()
    assert len(again.technique._running.kept) == 2


def test_a_saved_average_of_another_kind_or_of_other_weights_is_refused():
    state = Run().step(3).session.state_dict()
    with pytest.raises(CheckpointError, match="must be of kind swa, got ema"):
        Run(kind="swa", begin=1, state=state)
    with pytest.raises(CheckpointError, match=r"a difference at 1\.bias"):
        Run(make_model(norm=False), state=state)
    wide = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(CheckpointError, match=r"a difference at 0\.bias"):
        Run(wide, state=state)


def test_the_end_leaves_the_average_and_gives_its_memory_back():
    run = Run(kind="swa", begin=1).step(6)
    average, weights = run.averaged(), run.weights()
    run.session.finish()
    assert_equal(average, run.weights())
    report = run.technique.report()
    assert (report["updates"], report["norms"], report["validations_of_average"]) == (6, 1, 1)
    assert (report["parameters"], report["elements"]) == (6, 34)
    assert report["bytes"] == 4 * (34 + 8)  # with mean and variance of four channels
    live = torch.cat([weights[name].flatten() for name, _ in run.model.named_parameters()]).double()
    mean = torch.cat([average[name].flatten() for name, _ in run.model.named_parameters()]).double()
    assert math.isclose(report["distance"], float((mean - live).norm() / live.norm()), rel_tol=1e-6)
    assert not run.session.state_dict()["techniques"]["average"]["kept"]


def test_what_was_never_updated_is_never_put_in():
    run = Run(begin=10, total=20).step(3)
    weights = run.weights()
    assert_equal(run.averaged(), weights)
    run.averaged()
    assert len(run.services.said) == 1
    assert "begins at step 10" in run.services.said[0]
    assert_equal(dict(run.session.files.bake(run.model.state_dict())), weights)
    run.session.finish()
    assert "never updated" in run.services.said[-1]
    assert_equal(run.weights(), weights)
    report = run.technique.report()
    assert (report["validations_of_average"], report["validations_of_weights"]) == (0, 2)


def test_validation_of_the_weights_on_request():
    run = Run(evaluate=False).step(4)
    weights = run.weights()
    assert_equal(run.averaged(), weights)
    run.session.finish()
    assert any(not torch.equal(value, weights[name]) for name, value in run.weights().items())


def test_batch_norms_are_estimated_for_the_average_once_an_update():
    run = Run(kind="swa", begin=1, bn_batches=3).step(5)
    weights, average = run.weights(), run.averaged()
    mean = torch.stack(
        [nn.functional.linear(inputs(100 + n), average["0.weight"], average["0.bias"]) for n in range(3)]
    )
    torch.testing.assert_close(average["1.running_mean"], mean.mean(1).mean(0))
    assert average["1.num_batches_tracked"] == 3
    assert_equal(run.weights(), weights)
    assert_equal(run.averaged(), average)
    assert run.services.num_calibrations == 1
    state = run.session.state_dict()
    assert_equal(dict(run.session.files.bake(run.model.state_dict())), average)
    run.session.detach()
    again = Run(run.model, kind="swa", begin=1, bn_batches=3, state=state)
    assert_equal(again.averaged(), average)
    assert again.services.num_calibrations == 0
    again.step()
    assert not torch.equal(again.averaged()["1.running_mean"], average["1.running_mean"])
    again.session.finish()
    assert again.services.num_calibrations == 1


def test_an_error_while_norms_are_estimated_puts_the_weights_back():
    run = Run(bn_batches=2).step(3)
    weights = run.weights()

    def fail(num_batches):
        run.model[1].running_mean.fill_(7)
        raise RuntimeError("no data")

    run.services.calibrate = fail
    with pytest.raises(RuntimeError, match="no data"):
        run.session.swaps.begin_evaluation()
    assert_equal(run.weights(), weights)


def test_tied_frozen_and_integer_tensors():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.outer.weight = self.inner.weight
            self.frozen.requires_grad_(False)
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("mask", torch.full((2,), -torch.inf))

        def forward(self, x):
            self.count += 1
            return self.frozen(self.outer(self.inner(x)))

    run = Run(Tied()).step(4)
    average, baked = run.averaged(), run.session.files.bake(run.model.state_dict())
    assert_equal(average, dict(baked))
    assert torch.equal(average["inner.weight"], average["outer.weight"])
    assert average["count"] == 4
    assert run.technique.report()["parameters"] == 3
    run.session.finish()
    assert run.model.outer.weight is run.model.inner.weight


@pytest.mark.parametrize("every", [1, 8])
@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
def test_pruned_weights_are_zero_in_an_average_that_began_earlier(kind, every):
    model, x = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)), torch.randn(8, 20)
    average, prune = {"begin": 1, "every": every}, {"sparsity": 0.5, "schedule": "one_shot", "begin": 5}
    session, optimizer = begun_session({"average": {"kind": kind, **average}, "prune": prune}, model, 8)
    for _ in range(8):
        model(x).square().mean().backward()
        plain_step(session, optimizer)
    dead = {name: value == 0 for name, value in model.named_parameters() if name.endswith("weight")}
    assert sum(int(mask.sum()) for mask in dead.values()) == 220
    baked = session.files.bake(model.state_dict())
    with session.swapped("evaluate"):
        assert all(bool((model.state_dict()[name][mask] == 0).all()) for name, mask in dead.items())
    session.finish()
    for name, mask in dead.items():
        assert torch.equal(model.state_dict()[name] == 0, mask)
        assert torch.equal(baked[name] == 0, mask)


def test_merged_adapters_are_saved_as_the_average_also_inside_validation():
    pytest.importorskip("peft")
    run = Run(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), more={"lora": {"rank": 2, "base": "none"}}).step(5)
    weights, average = run.weights(), run.averaged()
    assert not torch.equal(weights["1.weight"], average["1.weight"])
    assert_equal(dict(run.session.files.bake(run.model.state_dict())), average)
    with run.session.swapped("evaluate"):
        with run.session.swapped("checkpoint"):
            assert_equal(dict(run.session.files.bake(run.model.state_dict())), average)
            assert_equal(run.weights(), weights)
        assert_equal(run.weights(), average)
    assert_equal(run.weights(), weights)
    run.session.finish()
    assert_equal(run.weights(), average)


def test_what_cannot_be_right_is_refused():
    with pytest.raises(MatchError, match="trainable"):
        Run(make_model().requires_grad_(False))
    with pytest.raises(MatchError, match="without BatchNorm"):
        Run(make_model(norm=False), bn_batches=2)
    for options in ({"every": 30}, {"begin": 30}):
        with pytest.raises(ConfigError, match=r"within the 20 steps of this run, got .*30"):
            Run(**options)
    with pytest.raises(ConfigError, match=r"decay must be in \[0\.0, 1\.0\), got 1\.0"):
        AverageConfig(kind="ema", decay=1.0)
    for kind, options in (("swa", {"decay": 0.9}), ("last_k", {"warmup": False}), ("ema", {"k": 3})):
        with pytest.raises(ConfigError, match=f"kind=.*, got kind={kind}; leave it out"):
            AverageConfig(kind=kind, **options)
    with pytest.raises(CompatibilityError, match="learned scales"):
        Run(more={"qat": {"scheme": "int8", "range": "lsq"}})
    with pytest.raises(EffError, match="rewound at step k"):
        Run(more={"lottery": {"ticket": "t", "out": "o"}})
    with pytest.raises(CompatibilityError, match="wanda"):
        Run(bn_batches=1, more={"prune": {"sparsity": 0.5, "criterion": "wanda"}})
    run = Run().step(2)
    run.model[0].bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(TrainingError, match=r"0\.bias must stay in the model .* replaced by step 3"):
        run.step().averaged()


@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
def test_what_is_unfrozen_later_is_averaged_as_if_its_first_value_had_been_there_before(kind):
    options = {"kind": kind, "begin": 1, **({"k": 3} if kind == "last_k" else {})}
    model = make_model(norm=False)
    model[2].requires_grad_(False)
    run = Run(model, **options).step(2)
    state = run.session.state_dict()
    model[2].requires_grad_(True)
    mean = RunningAverage(kind, decay=run.technique.config.decay, k=3)
    run.step()
    for _ in range(2):
        mean.update({"": model[2].weight.detach()})
    mean.update({"": model[2].weight.detach()})
    mean.update({"": run.step().model[2].weight.detach()})
    assert torch.equal(run.averaged()["2.weight"], mean.average(""))
    assert run.technique.report()["parameters"] == 4
    # the checkpoint before, put back when more trains: the layers that it has not are at the values of now
    values, average, both = run.weights(), run.averaged(), run.session.state_dict()
    run.session.detach()
    again = Run(model, state=state, **options)
    assert torch.equal(again.averaged()["2.weight"], values["2.weight"])
    again.session.detach()
    # and one of all, put back when fewer train
    model[0].requires_grad_(False)
    assert_equal(Run(model, state=both, **options).averaged(), average)


def test_steps_after_the_planned_ones_are_told_and_averaged():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    recipe = {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}, "average": {"kind": "swa", "begin": 1}}
    session, optimizer = begun_session(recipe, model, 3)
    seen = []
    for _ in range(6):
        plain_step(session, optimizer, model(torch.randn(2, 8)).square().mean())
        assert int((model.weight == 0).sum()) == 16
        seen.append(model.weight.detach().double())
        with session.swapped("evaluate"):
            torch.testing.assert_close(model.weight.double(), torch.stack(seen).mean(0))
    session.finish()
    torch.testing.assert_close(model.weight.double(), torch.stack(seen).mean(0))
    receipt = session.receipt()
    assert receipt["steps"]["applied"] == 6
    assert sum("training continues after the 3 planned steps" in note for note in receipt["notes"]) == 1


def values(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)} for _ in range(count)]


def reference(kind, seen, *, decay=0.9, warmup=True, k=3):
    """The definitions, in float64."""
    seen = [value["w"].double() for value in seen]
    if kind != "ema":
        return torch.stack(seen[-k:] if kind == "last_k" else seen).mean(0)
    mean = seen[0]
    for number, value in enumerate(seen[1:], 1):
        d = min(decay, (1 + number) / (10 + number)) if warmup else decay
        mean = d * mean + (1 - d) * value
    return mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kind", "warmup"), [("ema", True), ("ema", False), ("swa", True), ("last_k", True)])
def test_averages_are_the_definitions_in_float64(kind, warmup, dtype):
    seen, running = values(40, dtype), RunningAverage(kind, decay=0.9, warmup=warmup, k=3)
    for number, value in enumerate(seen, 1):
        running.update(value)
        mean = running.average("w")
        assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        tolerance = 1e-14 if dtype == torch.float64 else 2e-6
        expected = reference(kind, seen[:number], warmup=warmup)
        torch.testing.assert_close(mean.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_equal_values_is_that_value_to_the_bit(kind, dtype):
    value, running = values(1, dtype)[0], RunningAverage(kind, decay=0.999, k=7)
    for _ in range(16):
        running.update(value)
    assert torch.equal(running.average("w"), value["w"].float())


def test_the_last_values_are_the_only_ones_kept():
    running = RunningAverage("last_k", k=3)
    for value in values(10):
        running.update(value)
    assert (running.num_updates, len(running.kept), running.nbytes) == (10, 3, 3 * 15 * 4)


def test_warm_up_starts_low_and_ends_at_the_decay():
    assert ema_decay(0.9, 1) == 2 / 11
    assert ema_decay(0.9, 80) == 0.9
    assert ema_decay(0.0, 5) == 0.0
