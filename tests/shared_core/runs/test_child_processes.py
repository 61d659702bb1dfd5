"""What a script starts carries the recipe: the modules of trainers are waited for, steps that none saw are refused."""

import os
import subprocess
import sys

import pytest

from shared_core.engine.recipe import Recipe
from shared_core.errors import CompatibilityError
from shared_core.front_ends.after_import import after_import
from shared_core.front_ends.unseen_steps import UnseenSteps
from shared_core.runs.child_processes import handed_on

RECIPE = Recipe.from_dict({"prune": {"sparsity": 0.5}})


class Waits:
    modules = ("sched",)


def child(code, **variables):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=120)


def test_a_process_that_does_not_train_imports_nothing_of_ours_but_the_hook(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with handed_on(RECIPE, "train.py", [Waits()]) as was_taken:
        done = child("import sys; print(own, 'torch' in sys.modules, sys.modules['sitecustomize'].__file__)")
        assert not was_taken()
    assert done.stdout.split() == ["1", "False", str(tmp_path / "sitecustomize.py")], done.stderr
    assert done.stderr == ""
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_without_a_sitecustomize_of_the_environment_nothing_is_said(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with handed_on(RECIPE, "train.py", [Waits()]):
        done = child("print(1)")
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert "PYTHONPATH" not in os.environ


@pytest.mark.slow
def test_front_ends_get_the_recipe_once_a_module_of_theirs_is_there(tmp_path, monkeypatch):
    # torchrun and others start a process of a process
    code = (
        "import subprocess, sys\n"
        "code = '''import shared_core.runs.child_processes as ours\\n"
        "class End:\\n    modules = (1,)\\n    def install(self, recipe): print(type(recipe).__name__, dict(recipe))\\n"
        "ours.front_ends = lambda: [End()]\\nprint(1)\\nimport sched\\nimport turtle_is_none\\n'''\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)\n"
    )
    with handed_on(RECIPE, "train.py", [Waits()]):
        lines = child(code).stdout.split("\n")
    assert lines[0] == "1"
    assert lines[1].startswith("Recipe {'prune': ")


@pytest.mark.slow
def test_steps_that_no_front_end_sees_are_refused_in_a_child():
    train = (
        "import torch\np = torch.nn.Parameter(torch.ones(2))\no = torch.optim.SGD([p], lr=1)\n"
        "p.sum().backward()\no.step()\nprint('trained')\n"
    )
    with handed_on(RECIPE, "train.py", [Waits()]) as was_taken:
        done = child(train)
        assert not was_taken()
    assert done.returncode == 1
    assert "eff run: train.py must train with the Hugging Face Trainer" in done.stderr
    assert done.stdout == ""


def test_who_waits_is_told_once_the_first_step_was_seen():
    import torch

    class End:
        seen = False

        def used(self):
            return self.seen

    end, told = End(), []
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    handle = UnseenSteps(lambda: [end], "train.py", lambda: told.append(1))
    try:
        with pytest.raises(CompatibilityError, match="an optimizer stepped before any of them"):
            optimizer.step()
        end.seen = True
        optimizer.step()
        optimizer.step()
    finally:
        handle.remove()
    assert told == [1]


def test_two_that_wait_for_one_module_are_both_called(monkeypatch):
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    called = []
    after_import("sched", lambda module: called.append((1, module.scheduler().empty())))
    after_import("sched", lambda module: called.append((2, module.__name__)))
    import sched

    assert sorted(called) == [(1, True), (2, "sched")]
    after_import("sched", lambda module: called.append(module))
    assert called[-1] is sched
