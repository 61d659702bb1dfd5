"""Teachers in fewer bits: what they say, what they hold, and that a run with one is repeatable."""

import copy

import pytest
import torch
from torch import nn

from shared_core.distillation import DistillConfig
from shared_core.distillation.teachers import change_dtype_
from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session
from shared_core.errors import ConfigError, MatchError, MissingExtraError

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


def test_the_output_head_is_not_quantised():
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


def test_what_cannot_be_quantised_is_refused(monkeypatch):
    with pytest.raises(MatchError, match="needs a linear layer"):
        change_dtype_(nn.Conv1d(1, 1, 1), "int8")
    with pytest.raises(ConfigError, match="teacher_dtype must be"):
        DistillConfig(teacher="runs/teacher", teacher_dtype="int3")
    with pytest.raises(ConfigError, match="teacher_dtype must come with another teacher than ema or mutual"):
        DistillConfig(teacher="ema", teacher_dtype="int8")
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"efftrain\[bnb\]"):
        change_dtype_(make_net(), "nf4")
