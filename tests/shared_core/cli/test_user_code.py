"""What rises in code of the user's that a command runs is one line with the option, the function and the place."""

import json
import sys

import pytest
from commands import user_module

from shared_core.cli import main
from shared_core.errors import ConfigError
from shared_core.files.user_code import function

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
            "--eval my_code:score failed: KeyError: 'accuracy' at my_code.py:11 in score",
        ),
        (
            ["--criterion", "wanda", "--calibration", "my_code:batches"],  # an OSError, and of a generator
            "--calibration my_code:batches failed: FileNotFoundError: [Errno 2] No such file or directory: "
            "'data.csv' at my_code.py:18 in read",
        ),
    ],
)
def test_an_exception_of_the_users_is_one_line(eff, arguments, told):
    assert eff(*COMMAND, *arguments) == (1, f"error: eff prune: {told}; EFF_TRACEBACK=1 shows the whole traceback")


def test_what_a_function_returned_raises_later(eff):
    told = "error: eff: your own code failed: ValueError: no row at my_code.py:28 in __getitem__; EFF_TRACEBACK=1"
    code, errors = eff(*COMMAND, "--criterion", "wanda", "--calibration", "my_code:loader")
    assert code == 1
    assert errors.startswith(told)


def test_the_model_cannot_be_built(eff):
    code, errors = eff("prune", "my_code:narrow", *COMMAND[2:])
    assert code == 1
    assert errors.startswith("error: eff prune: MODEL my_code:narrow failed: TypeError: Linear.__init__() missing")
    assert "at my_code.py:8 in narrow" in errors


@pytest.mark.parametrize(("code", "told"), [
    ("import json\nx = json.loads('{')\n", " at my_code.py:2 in <module>; fix it"),
    ("def build(:\n    pass\n", "SyntaxError: invalid syntax at my_code.py:1; fix it"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported(eff, tmp_path, code, told):
    (tmp_path / "my_code.py").write_text(code)
    assert eff(*COMMAND)[0] == 2
    assert eff(*COMMAND)[1].endswith(told)


def test_a_function_is_named_by_its_file_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges" / "beside_judge.py").write_text("RIGHT = 3\n")
    text = "import beside_judge\ndef accuracy(model):\n    return beside_judge.RIGHT\n"
    # the second is no name that can be imported, the third one of another module
    for name in ("judge_file", "my-judge", "json"):
        (tmp_path / "judges" / f"{name}.py").write_text(text)
        for path in (f"judges/{name}.py", str(tmp_path / "judges" / f"{name}.py")):
            found = function(f"{path}:accuracy", "eff: --eval", "model")
            assert found(None) == 3
            assert function(f"{path}:accuracy", "eff: --eval", "model") is found
    assert function("judge_file:accuracy", "eff: --eval", "model").__code__.co_filename.endswith("judge_file.py")
    assert json.loads("3") == 3
    with pytest.raises(ConfigError, match=r"there is no file judges/nothing\.py"):
        function("judges/nothing.py:accuracy", "eff: --eval", "model")
    (tmp_path / "judges" / "broken.py").write_text("import json\nx = json.loads('{')\n")
    with pytest.raises(ConfigError, match=r"broken\.py:2 in <module>; fix it"):
        function("judges/broken.py:accuracy", "eff: --eval", "model")


def test_the_traceback_is_there_when_asked_for(eff, monkeypatch):
    monkeypatch.setenv("EFF_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["eff", *COMMAND, "--eval", "my_code:score"])
    with pytest.raises(KeyError, match="accuracy"):
        main()
