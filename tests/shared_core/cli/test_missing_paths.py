"""A path or module that does not exist is refused before torch is imported, by every command that reads one."""

import json
import subprocess
import sys

import pytest

from shared_core.cli.arguments import CommandOptions
from shared_core.cli.export import ExportOptions
from shared_core.cli.smaller_models import ShrinkOptions

BUILT = "os:getcwd"  # a function of a module that exists; none of the commands comes to call it
WRONG = [
    ("report", "nope"), ("report", "nope", "train.py"), ("run", "nope.py", "--prune_sparsity", "0.5"),
    ("run", "nope.train", "--prune_sparsity", "0.5"), ("run", "train.py", "--eff_recipe", "nope.yaml"),
    ("try", "nope.train", "--prune_sparsity", "0.5"), ("try", "nope.py", "--prune_sparsity", "0.5"),
    ("lottery", "--out", "x", "--", "python", "nope.py"),
    ("chain", "--students", "a", "--out", "x", "--", "python", "nope.py"),
    ("search", "nope", "--calibration", BUILT, "--out", "x", "--", "python", "train.py"),
    ("search", BUILT, "--calibration", "nope:data", "--out", "x", "--", "python", "train.py"),
    ("search", BUILT, "--calibration", BUILT, "--out", "x", "--", "python", "nope.py"),
    ("init", "--goal", "smaller", "--model", "nope", "--out", "x.yaml"),
    ("init", "--goal", "smaller", "--model", "nope:build", "--out", "x.yaml"),
    ("explain", "nope.yaml"), ("explain", "recipe.yaml", "--model", "nope"),
    ("explain", "recipe.yaml", "--model", "nope:build"), ("plan", "nope.yaml", "--params", "1e9"),
    ("plan", "--model", "nope"), ("compress", "nope", "--out", "x.eff"), ("decompress", "nope.eff", "--out", "x"),
    ("soup", "nope", "train.py", "--kind", "uniform", "--out", "x"),
    ("soup", ".", "train.py", "--eval", "nope:judge", "--out", "x"),
    ("soup", ".", "train.py", "--eval", BUILT, "--model", "nope:build", "--out", "x"),
    ("soup", ".", "train.py", "--task", "accuracy", "--data", "nope.jsonl", "--out", "x"),
    ("soup", ".", "train.py", "--kind", "ties", "--density", "0.5", "--base", "nope", "--out", "x"),
    ("cache-teacher", "./nope", "--data", BUILT, "--out", "x"),
    ("cache-teacher", "nope:build", "--data", BUILT, "--out", "x"),
    ("cache-teacher", BUILT, "--data", "nope.jsonl", "--out", "x"),
    ("cache-teacher", BUILT, "--data", "nope:data", "--out", "x"),
    ("cache-teacher", BUILT, "--data", BUILT, "--tokenizer", "nope", "--out", "x"),
    ("quantize", BUILT, "--plan", "nope.yaml", "--out", "x"), ("quantize", BUILT, "--attack", "nope:x", "--out", "x"),
    ("quantize", BUILT, "--qat", "nope", "--eval", BUILT, "--out", "x"),
    ("shrink", BUILT, "--inputs", "nope:inputs", "--out", "x"),
    ("prune", BUILT, "--sparsity", "0.5", "--calibration", BUILT, "--loss", "nope:loss", "--out", "x"),
    *((command, *words, *more, "--out", "x.onnx")
      for command, *more in (("export",), ("quantize",), ("shrink",), ("prune", "--sparsity", "0.5"),
                             ("low-rank", "--rank", "4"))
      for words in (("nope",), ("nope:build",), ("nope.py:build",), (BUILT, "--weights", "nope"))),
    *((command, BUILT, "--calibration", "nope:data", *more, "--out", "x.onnx")
      for command, *more in (("export",), ("quantize",), ("prune", "--sparsity", "0.5"), ("low-rank", "--rank", "4"))),
    *((command, BUILT, "--eval", "nope:judge", *more, "--out", "x")
      for command, *more in (("quantize",), ("prune", "--sparsity", "0.5"), ("low-rank", "--rank", "4"))),
]  # fmt: skip
CODE = """
import json, sys
from typer.testing import CliRunner
from shared_core.cli import app
found = []
for words in json.load(sys.stdin):
    done = CliRunner().invoke(app, words)
    found.append((type(done.exception).__name__, str(done.exception), "torch" in sys.modules))
    if found[-1][2]:
        break
print(json.dumps(found))
"""


def test_what_does_not_exist_is_refused_without_torch(tmp_path):
    (tmp_path / "recipe.yaml").write_text("prune: {sparsity: 0.5}\n")
    (tmp_path / "train.py").write_text("def batches(): return []\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE], input=json.dumps(WRONG), cwd=tmp_path, text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    for words, (error, told, has_torch) in zip(WRONG, json.loads(done.stdout), strict=False):
        assert error in ("ConfigError", "CheckpointError"), (words, error, told)
        assert "nope" in told, (words, told)
        assert not has_torch, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "train.py"]


@pytest.mark.parametrize("options", [ExportOptions, ShrinkOptions])
def test_an_option_declared_again_still_says_what_it_reads(options):
    for base in options.__mro__[1:]:
        for name, field in getattr(base, "__dataclass_fields__", {}).items():
            assert options.__dataclass_fields__[name].metadata.get("reads") == field.metadata.get("reads"), name


def test_every_function_and_input_of_a_command_is_looked_for():
    def below(options):
        return {options}.union(*(below(one) for one in options.__subclasses__()))

    written = {"out", "report", "journal", "plot"}
    for options in below(CommandOptions):
        if not options.__module__.startswith("shared_core."):
            continue  # another test's
        for name, field in options.__dataclass_fields__.items():
            names_one = "Path" in str(field.type) or "module:function" in field.metadata.get("help", "")
            own = "check_files" in vars(options) and name in ("model", "teacher", "data")
            assert not names_one or name in written or field.metadata.get("reads") or own, (options.key, name)
