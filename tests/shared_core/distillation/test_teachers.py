"""Several teachers, the student's own average, schedules, confidence, hidden pairs, and fewer bits, in whole runs."""

import copy

import distillation_steps
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core import Session
from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.distillation.teachers import change_dtype_
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, ConfigError, MatchError, MissingExtraError, TrainingError

STEPS = 6


def make(width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


class Run(distillation_steps.Run):
    def __init__(self, options, state=None):
        super().__init__(make(8, 0), {"distill": {"teacher": [make(16, 1)], **options}}, STEPS, state)

    def batch(self):
        return distillation_steps.batch(self.taken)

    def loss(self):
        x, y = self.batch()
        return self.session.loss(F.cross_entropy(self.model(x), y))

    def backward(self):
        self.loss().backward()


VARIANTS = {
    "several": {"teacher": [make(16, 1), make(4, 2)], "teacher_weights": [3, 1]},
    "ema": {"teacher": "ema", "ema_decay": 0.9},
    "schedule": {"alpha": 1.0, "alpha_end": 0.2, "temperature": 4.0, "temperature_end": 1.0},
    "jsd": {"divergence": "jsd", "beta": 0.3, "confidence": 0.4},
    "hidden": {"hidden": ["2=2"], "hidden_weight": 0.5},
    "relations": {"hidden": ["2=2", "3=3"], "hidden_loss": "rkd"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_stopped_anywhere_and_resumed_is_the_run_never_stopped(name):
    whole = Run(copy.deepcopy(VARIANTS[name]))
    states = []
    for _ in range(STEPS):
        states.append(whole.state())
        whole.step()
    whole.session.finish()
    assert list(whole.model.state_dict()) == list(make(8, 0).state_dict())
    for state in states[1:]:
        resumed = Run(copy.deepcopy(VARIANTS[name]), state)
        while resumed.taken < STEPS:
            resumed.step()
        resumed.session.finish()
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[key]), (state["taken"], key)


def test_several_teachers_are_the_mean_of_their_probabilities():
    run = Run(copy.deepcopy(VARIANTS["several"]))
    x, y = run.batch()
    student = copy.deepcopy(run.model).double()
    teachers = [copy.deepcopy(teacher).double() for teacher in VARIANTS["several"]["teacher"]]
    mean = sum(w * F.softmax(t.eval()(x.double()) / 2, -1) for w, t in zip((0.75, 0.25), teachers, strict=True))
    logits = student.train()(x.double())
    soft = 4 * F.kl_div(F.log_softmax(logits / 2, -1), mean, reduction="batchmean")
    expected = 0.5 * F.cross_entropy(logits, y) + 0.5 * soft
    torch.testing.assert_close(run.loss().double(), expected, rtol=1e-5, atol=1e-6)


def test_the_average_follows_applied_steps_alone():
    run = Run({"teacher": "ema", "ema_decay": 0.75})
    expected = run.model[0].weight.detach().clone()
    average = run.technique._comparison.teachers.modules[0]
    for number in range(5):
        run.step()
        decay = min(0.75, 1 - 1 / (number + 2))
        expected = decay * expected + (1 - decay) * run.model[0].weight.detach()
    torch.testing.assert_close(average[0].weight.detach(), expected)
    assert torch.equal(average[1].running_mean, run.model[1].running_mean)
    before = average[0].weight.detach().clone()
    run.loss().backward()
    run.session.before_step()
    run.session.after_step(applied=False)
    assert torch.equal(average[0].weight.detach(), before)
    assert not any(parameter.requires_grad for parameter in average.parameters())


def test_alpha_and_temperature_walk_evenly_from_begin_to_end():
    run = Run(dict(VARIANTS["schedule"]))
    found = []
    for _ in range(STEPS):
        run.step()
        logged = run.session.figures()
        found.append((logged["distill/alpha"], logged["distill/temperature"]))
    torch.testing.assert_close(torch.tensor(found)[:, 0], torch.linspace(1.0, 0.2, STEPS))
    torch.testing.assert_close(torch.tensor(found)[:, 1], torch.linspace(4.0, 1.0, STEPS))


def test_only_confident_positions_count():
    run = Run({"confidence": 0.45, "alpha": 0.0, "temperature": 1.0})
    x, _ = run.batch()
    teacher, student = run.technique._comparison.teachers.modules[0], copy.deepcopy(run.model)
    wanted, found = F.log_softmax(teacher(x), -1), F.log_softmax(student(x), -1)
    confident = wanted.exp().amax(-1) >= 0.45
    sure = int(confident.sum())
    assert 0 < sure < 8
    each = (wanted.exp() * (wanted - found)).sum(-1)
    assert run.loss().item() == pytest.approx(float(each[confident].sum() / 8), rel=1e-5)
    run = Run({"confidence": 0.45})
    run.step()
    assert run.session.receipt()["techniques"]["distill"]["positions"] == sure


def test_projections_learn_and_no_checkpoint_holds_them():
    run = Run(dict(VARIANTS["hidden"]))
    (projection,) = run.technique._pairs["hidden"]._projections.values()
    first = projection.detach().clone()
    assert projection.shape == (16, 8)
    for _ in range(3):
        run.step()
    assert not torch.equal(projection, first)
    assert list(run.model.state_dict()) == list(make(8, 0).state_dict())
    run.session.finish()
    assert [name for name, _ in run.model.named_parameters()] == [name for name, _ in make(8, 0).named_parameters()]


def test_the_hidden_term_is_the_mean_squared_error_of_projected_features():
    run = Run({"hidden": ["2=2"], "hidden_weight": 2.0, "alpha": 1.0})
    x, y = run.batch()
    student, teacher = copy.deepcopy(run.model), run.technique._comparison.teachers.modules[0]
    (projection,) = run.technique._pairs["hidden"]._projections.values()
    features = student[:3](x) @ projection.T
    expected = F.cross_entropy(student(x), y) + 2 * F.mse_loss(features, teacher[:3](x))
    # the copy's batch norm has seen x once more, which train mode does not look at
    torch.testing.assert_close(run.loss(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pair", "whose"), [("9=2", "student"), ("2=layer.9", "teacher")])
def test_pairs_of_what_is_not_there_are_refused(pair, whose):
    with pytest.raises(MatchError, match=f"not found in the {whose}"):
        Run({"hidden": [pair]})


def test_regression_and_independent_labels():
    x = torch.randn(8, 5)
    for divergence, target, task in (
        ("logit_mse", torch.randn(8, 3), F.mse_loss),
        ("bernoulli_kl", torch.rand(8, 3).round(), F.binary_cross_entropy_with_logits),
    ):
        run = Run({"divergence": divergence, "temperature": 1.0})
        run.technique.labels = target
        loss = run.session.loss(task(run.model(x), target))
        assert loss.isfinite()
        assert run.session.figures()["distill/soft_loss"] > 0


def test_a_cached_teacher_teaches_what_the_teacher_would(tmp_path):
    live = Run({"alpha": 0.3})
    batches = []
    for step in range(STEPS):
        live.taken = step
        batches.append(live.batch()[0])
    live.taken = 0
    write_teacher_cache(make(16, 1).eval(), batches, tmp_path / "cache", temperature=2.0, dtype="float32")
    cached = Run({"alpha": 0.3, "teacher": f"cache:{tmp_path / 'cache'}"})
    for _ in range(STEPS):
        live.step()
        cached.step()
    for name, value in live.model.state_dict().items():
        torch.testing.assert_close(cached.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert cached.session.receipt()["techniques"]["distill"]["discarded_mass"] == 0
    with pytest.raises(CheckpointError, match="temperature must be the 2"):
        Run({"temperature": 3.0, "teacher": f"cache:{tmp_path / 'cache'}"})


class TakesTwo(nn.Module):
    def forward(self, x, y):
        return x + y


class Broken(nn.Module):
    def forward(self, x):
        return x + None


def test_a_teacher_of_other_inputs_is_named():
    with pytest.raises(
        TrainingError, match=r"takes the student's inputs \(1 by position\), got TakesTwo: missing .*'y'"
    ):
        Run({"teacher": [TakesTwo()]}).loss()


def test_a_teacher_that_fails_by_itself_fails_with_its_own_error():
    with pytest.raises(TypeError, match="NoneType"):
        Run({"teacher": [Broken()]}).loss()


BOUNDS = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.003, "int8": 0.02, "nf4": 0.2}


def make_net(width=64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 4))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_teacher_says_nearly_the_same_in_fewer_bits(dtype):
    teacher = make_net()
    # blocks of other scales, four rows each
    teacher[0].weight.data *= torch.logspace(-2, 0, 64)[:, None]
    x = torch.randn(32, 16)
    with torch.no_grad():
        exact = teacher(x)
        change_dtype_(teacher, dtype)
        found = teacher(x.to(next(p.dtype for p in teacher.parameters() if p.is_floating_point()))).float()
    error = ((found - exact).norm() / exact.norm()).item()
    assert error <= BOUNDS[dtype]
    assert (error > 0) == (dtype != "float32")


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_run_attaches_twice_and_trains_from_float_inputs(dtype):
    losses = []
    for _ in range(2):
        student, teacher = make_net(8), make_net(seed=1)
        session = Session(Recipe.from_dict({"distill": {"teacher": teacher, "teacher_dtype": dtype, "alpha": 0.0}}))
        session.attach(student)
        session.detach()
        session.attach(student)
        session.begin([torch.optim.SGD(student.parameters())], total_steps=1)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
        loss = session.loss(nn.functional.cross_entropy(student(x), torch.zeros(8, dtype=torch.int64)))
        loss.backward()
        losses.append(loss.item())
        told = session.receipt()["techniques"]["distill"]
        assert told["teacher_dtype"] == dtype
        assert told["teacher_parameters"] == sum(p.numel() for p in make_net().parameters())
    assert losses[0] == losses[1] > 0


def test_the_output_head_is_not_quantized():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

        def get_output_embeddings(self):
            return self.head

    model = Model()
    before = copy.deepcopy(model.head.weight)
    change_dtype_(model, "nf4")
    assert model.body.weight.dtype == torch.uint8
    assert torch.equal(model.head.weight, before)


def test_what_cannot_be_quantized_is_refused(monkeypatch):
    with pytest.raises(MatchError, match="needs a linear layer"):
        change_dtype_(nn.Conv1d(1, 1, 1), "int8")
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"efftrain\[bnb\]"):
        change_dtype_(make_net(), "nf4")


class ActivationLast(nn.Module):
    """Its activation is registered after a layer of another width."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.activation = nn.Linear(5, 8), nn.Linear(8, 3), nn.Tanh()

    def forward(self, x):
        return self.head(self.activation(self.first(x)))


def test_features_of_another_width_than_that_of_the_layer_before_are_refused():
    session = Session({"distill": {"teacher": make(16, 1), "hidden": ["activation=2"]}})
    session.attach(model := ActivationLast())
    session.begin([torch.optim.SGD(model.parameters())], total_steps=1)
    with pytest.raises(ConfigError, match="the layer registered last before them, 3, got 8; name the layer or"):
        session.loss(model(torch.randn(8, 5)).square().mean())
