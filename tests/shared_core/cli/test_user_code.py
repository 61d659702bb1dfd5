"""What rises in code of the user's that a command runs is one line with the option, the function and the place."""

import sys

import pytest
from commands import user_module

from shared_core.cli import main

CODE = """
import torch

def build():
    return torch.nn.Linear(4, 2)

def narrow():
    return torch.nn.Linear(4)

def score(model):
    return {}["accuracy"]

def batches():
    yield torch.ones(2, 4)
    read()

def read():
    open("data.csv")

def loader():
    return torch.utils.data.DataLoader(Rows())

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise ValueError("no row\\nof many words")
"""
COMMAND = ["prune", "my_code:build", "--sparsity", "0.5", "--out", "out"]


@pytest.fixture
def eff(tmp_path, monkeypatch, capsys):
    """Run a command line in a folder of its own; return exit code and what it wrote to stderr."""
    user_module(tmp_path, monkeypatch, "my_code", CODE)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["eff", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err.strip()

    return run


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--eval", "my_code:score"],
            "--eval my_code:score must run, got KeyError: 'accuracy' at my_code.py:11 in score",
        ),
        (
            ["--criterion", "wanda", "--calibration", "my_code:batches"],  # an OSError, and of a generator
            "--calibration my_code:batches must run, got FileNotFoundError: [Errno 2] No such file or directory: "
            "'data.csv' at my_code.py:18 in read",
        ),
    ],
)
def test_an_exception_of_the_users_is_one_line(eff, arguments, told):
    assert eff(*COMMAND, *arguments) == (1, f"error: eff prune: {told}; EFF_TRACEBACK=1 shows the whole traceback")


def test_what_a_function_returned_raises_later(eff):
    told = "error: eff: your own code must run, got ValueError: no row at my_code.py:28 in __getitem__; EFF_TRACEBACK=1"
    code, errors = eff(*COMMAND, "--criterion", "wanda", "--calibration", "my_code:loader")
    assert code == 1
    assert errors.startswith(told)


def test_the_model_cannot_be_built(eff):
    code, errors = eff("prune", "my_code:narrow", *COMMAND[2:])
    assert code == 1
    assert errors.startswith(
        "error: eff prune: MODEL my_code:narrow must run, got TypeError: Linear.__init__() missing"
    )
    assert "at my_code.py:8 in narrow" in errors


@pytest.mark.parametrize(("code", "told"), [
    ("import json\nx = json.loads('{')\n", " at my_code.py:2 in <module>; mend it"),
    ("def build(:\n    pass\n", "SyntaxError: invalid syntax at my_code.py:1; mend it"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported(eff, tmp_path, code, told):
    (tmp_path / "my_code.py").write_text(code)
    assert eff(*COMMAND)[0] == 2
    assert eff(*COMMAND)[1].endswith(told)


def test_the_traceback_is_there_when_asked_for(eff, monkeypatch):
    monkeypatch.setenv("EFF_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["eff", *COMMAND, "--eval", "my_code:score"])
    with pytest.raises(KeyError, match="accuracy"):
        main()
