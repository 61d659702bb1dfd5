"""Teachers that a function of the user's returns, named in a flag: as passed in Python, in loops and both trainers."""

import copy

import distillation_steps
import pytest
import torch
import torch.nn.functional as F
from commands import user_module
from promise_drivers import run_accelerate, run_bare, run_fabric, run_hf, run_lightning
from promise_table import make_teacher
from torch import nn

from shared_core.distillation import DistillConfig
from shared_core.errors import CheckpointError, ConfigError

STEPS = 4
CODE = """
import torch
from promise_table import make_teacher as digits

def build():
    torch.manual_seed(1)
    return torch.nn.Linear(5, 3), torch.ones(1, 5)

def another():
    torch.manual_seed(2)
    return torch.nn.Linear(5, 3)

def other_each_time(seeds=iter(range(9))):
    torch.manual_seed(next(seeds))
    return torch.nn.Linear(5, 3)

def nothing():
    return None
"""
FRONT_ENDS = {"hf": run_hf, "lightning": run_lightning, "accelerate": run_accelerate, "fabric": run_fabric}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "my_teachers", CODE)


class Run(distillation_steps.Run):
    def __init__(self, teacher, state=None):
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 3), {"distill": {"teacher": teacher}}, STEPS, state)

    def backward(self):
        x, y = distillation_steps.batch(self.taken)
        self.session.loss(F.cross_entropy(self.model(x), y)).backward()


def trained(run):
    while run.taken < STEPS:
        run.step()
    run.session.finish()
    return run.model.weight.detach()


@pytest.mark.parametrize("name", ["my_teachers:build", "my_teachers.py:build"])
def test_it_teaches_as_the_same_module_does_and_leaves_random_numbers_alone(name):
    torch.manual_seed(1)
    teacher = nn.Linear(5, 3)
    torch.manual_seed(0)
    nn.Linear(5, 3)  # as the run draws
    random = torch.get_rng_state()
    run = Run(name)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(trained(run), trained(Run(teacher)))
    assert not torch.equal(trained(Run(name)), trained(Run("my_teachers:another")))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_every_front_end_takes_it_as_it_takes_a_module(front_end, tmp_path):
    results = []
    for number, teacher in enumerate([make_teacher(), "my_teachers:digits"]):
        results.append(FRONT_ENDS[front_end]({"distill": {"teacher": teacher}}, tmp_path / str(number)).weights)
    for name, value in run_bare({"distill": {"teacher": "my_teachers:digits"}}).weights.items():
        assert torch.equal(results[0][name], results[1][name])
        torch.testing.assert_close(results[1][name], value, atol=1e-5, rtol=0)


def test_a_resumed_run_has_the_same_teacher_or_stops():
    whole = Run("my_teachers:build")
    for _ in range(2):
        whole.step()
    state = copy.deepcopy(whole.state())
    expected = trained(whole)
    assert torch.equal(trained(Run("my_teachers:build", state)), expected)
    trained(Run("my_teachers:another", state))  # a changed recipe is told, not refused
    started = Run("my_teachers:other_each_time")
    started.step()
    with pytest.raises(CheckpointError, match="other_each_time must return the model that the run started with"):
        Run("my_teachers:other_each_time", started.state())


@pytest.mark.parametrize(
    ("name", "told"),
    [("no_such_module:build", "no module no_such_module"), ("nowhere.py:build", "no file nowhere.py")],
)
def test_a_module_that_is_not_there_is_told_before_training(name, told):
    with pytest.raises(ConfigError, match=f"distill: teacher .*{told}"):
        DistillConfig(teacher=name).check_files()
    DistillConfig(teacher="my_teachers:build, my_teachers.py:another").check_files()


@pytest.mark.parametrize(
    ("name", "told"),
    [("my_teachers:nothing", "must return a model, got NoneType"), ("my_teachers:biuld", "did you mean 'build'")],
)
def test_what_is_not_a_model_is_refused(name, told):
    with pytest.raises(ConfigError, match=told):
        Run(name)
