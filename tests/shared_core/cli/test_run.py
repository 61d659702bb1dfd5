"""`eff run` leaves a script its own help, errors and flags."""

import runpy
import subprocess
import sys

import pytest
import torch
from commands import eff

from shared_core import Recipe, Session
from shared_core.engine.registry import REGISTRY
from shared_core.engine.saving.state_file import save_state
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MissingExtraError
from shared_core.front_ends.flags import check_spelling, take_flags

HELP = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
OWN_OPTIMIZER = """import torch
class Own:
    def __init__(self, parameters): self.parameters = list(parameters)
    def step(self):
        for one in self.parameters: one.data -= 0.1 * one.grad
model = torch.nn.Linear(3, 2)
optimizer = Own(model.parameters())
for step in range(5):
    model(torch.ones(3)).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""
TAKES_ALL = "import sys\nprint(len(sys.argv) - 1)\n"
FAILS = "def main():\n    open('/nowhere/data.csv')\n\n\nmain()\n"


class Taken:
    name, libraries, recipe = "taken", (), None

    def install(self, recipe):
        self.recipe = recipe

    def used(self):
        return True


@pytest.fixture
def run(tmp_path, monkeypatch):
    front_end = Taken()
    monkeypatch.setattr(sys.modules["shared_core.cli.trainings"], "front_ends", lambda: [front_end])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # typer leaves its own in a process
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(text, *arguments):
        (tmp_path / "train.py").write_text(text)
        return eff("run", tmp_path / "train.py", *arguments), front_end

    return call


@pytest.mark.parametrize(("flag", "key"), [("--lora_rank", "lora"), ("--dp_noise_multiplier", "dp")])
def test_a_library_that_a_technique_needs_is_missed_before_the_script_runs(run, monkeypatch, flag, key):
    config = REGISTRY[key].config_class
    monkeypatch.setattr(config, "libraries", dict.fromkeys(["no_such_library"], *config.libraries.values()))
    with pytest.raises(MissingExtraError, match="no_such_library") as missing:
        run("raise AssertionError", flag, "1")
    assert "efftrain[" in str(missing.value)


@pytest.mark.parametrize("form", ["--resume_from_checkpoint {}", "--resume-from-checkpoint={}"])
def test_a_checkpoint_of_techniques_is_not_resumed_without_them(run, tmp_path, form):
    model = torch.nn.Linear(4, 2)
    session = Session(Recipe.from_dict({"prune": {"sparsity": 0.5, "end": 1.0}}))
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters(), 0.1)], total_steps=4)
    save_state(tmp_path, session.state_dict())
    arguments = form.format(tmp_path).split()
    with pytest.raises(CheckpointError, match="prune"):
        run(TAKES_ALL, *arguments)
    run(TAKES_ALL, *arguments, "--prune_sparsity", "0.5")
    run(TAKES_ALL, "--resume_from_checkpoint", str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["0.0", "no_such_module", "json.no_such_module", "no.such"])
@pytest.mark.parametrize("flags", [(), ("--prune_sparsity", "0.5")])
@pytest.mark.usefixtures("run")
def test_a_module_that_does_not_exist_is_refused(name, flags):
    with pytest.raises(ConfigError, match=f"script must be a file or a module, got '{name}'"):
        eff("run", name, *flags)


@pytest.mark.parametrize("flags", [(), ("--prune_sparsity", "0.5")])
def test_help_is_that_of_the_script(run, flags, monkeypatch):
    monkeypatch.setattr(Taken, "used", lambda self: False)  # as nothing trains
    result, front_end = run(HELP, *flags, "--help")
    assert result.exit_code == 0
    assert "--lr" in result.output
    assert "eff flags" in result.output
    assert bool(front_end.recipe) == bool(flags)
    assert "no technique" not in result.stderr


def test_an_error_of_the_script_is_told_as_without_eff_run(run):
    result, _ = run(FAILS, "--prune_sparsity", "0.5")
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith(("Traceback", "  File"))]
    assert [line.rpartition(", ")[2] for line in lines[1:]] == ["in <module>", "in main"]
    assert "FileNotFoundError" in result.stderr


def test_a_script_that_ends_by_itself_and_trained_nothing_is_told_so(run, monkeypatch):
    assert run("import sys\nsys.exit(0)", "--prune_sparsity", "0.5")[0].exit_code == 0
    monkeypatch.setattr(Taken, "used", lambda self: False)
    with pytest.raises(CompatibilityError, match="none of them trained anything"):
        run("import sys\nsys.exit()", "--prune_sparsity", "0.5")


def test_a_loop_with_an_optimizer_of_its_own_ends_before_it_saves(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Taken, "used", lambda self: False)
    with pytest.raises(CompatibilityError, match=r"but Own updated the weights .* no technique was applied"):
        run(OWN_OPTIMIZER, "--prune_sparsity", "0.5")
    assert not (tmp_path / "model.pt").exists()


def test_errors_of_ours_stay_errors_of_ours(run):
    with pytest.raises(ConfigError, match="from a technique"):
        run("from shared_core.errors import ConfigError\nraise ConfigError('from a technique')", "--qat_scheme", "int8")


def test_a_flag_before_the_script_is_refused():
    with pytest.raises(ConfigError, match="script must come before"):
        eff("run", "--prune_sparsity", "0.5", "train.py")


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "/nowhere/srun"])
def test_a_launcher_in_place_of_the_script_is_refused(launcher):
    with pytest.raises(ConfigError, match="put the launcher first"):
        eff("run", launcher, "--nproc-per-node", "2", "train.py", "--prune_sparsity", "0.5")


def test_the_package_is_the_command_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["efftrain", "run", "torchrun"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("efftrain", run_name="__main__", alter_sys=True)
    assert "error: eff run: script must be a file or a module, got 'torchrun'" in capsys.readouterr().err


def test_flags_of_published_scripts_that_begin_like_ours_are_the_scripts():
    flags = ["--average_tokens_across_devices", "--checkpointing_steps", "4"]
    assert take_flags(flags) == ({}, flags)
    check_spelling([*flags, "--distillation_alpha", "0.5"], "train.py", "eff run")


def test_a_typo_names_the_flags_of_its_technique_alone():
    with pytest.raises(ConfigError, match=r"known: --comm_begin, --comm_hook, --comm_rank; put the script's own"):
        take_flags(["--comm_zzz", "1"])


@pytest.mark.parametrize("flags", [
    ["--pruning_sparsity", "0.5"], ["--distil-teacher=runs/t"], ["--prune", "0.5"], ["--distill=runs/t"],
    ["--average_kind", "ema", "--prun_sparsity", "0.3"],
])  # fmt: skip
def test_a_misspelt_flag_of_ours_is_not_the_scripts(run, flags):
    with pytest.raises(ConfigError, match=r"did you mean '--(prune_sparsity|distill_teacher)'"):
        run(TAKES_ALL, *flags)
    assert run(TAKES_ALL, "--", *flags)[0].exit_code == 0


def test_a_run_without_a_technique_is_that_of_the_script(run):
    # these resemble --dp_seed, --lora_rank, --fp8_backend and --checkpointing_...
    flags = ["--seed", "3", "--local_rank=0", "--ddp_backend", "gloo", "--gradient_checkpointing", "--sparsity", "1"]
    check_spelling(flags, "train.py", "eff run")
    result, front_end = run(TAKES_ALL, *flags)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(len(flags))]
    assert "no technique is switched on" in result.stderr
    assert front_end.recipe is None


DECLARES = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--prune_often", "--prune-often", type=int)
parser.add_argument("--lora_rank", type=int)
print(parser.parse_args())
"""
DATACLASS = """from dataclasses import dataclass
@dataclass
class Arguments:
    prune_often: int = 0
    lora_rank: int = 0
"""


@pytest.mark.parametrize("text", [DECLARES, DATACLASS])
def test_a_flag_that_the_script_declares_is_never_taken_for_ours(run, text):
    result, front_end = run(text, "--prune_often", "2")
    assert result.exit_code == 0, result.output
    assert front_end.recipe is None
    with pytest.raises(ConfigError, match=r"--lora_rank is a flag of both .*train.py and efftrain.*after `--`"):
        run(text, "--lora_rank", "4", "--prune_sparsity", "0.5")
    result, front_end = run(text, "--prune_sparsity", "0.5", "--", "--lora_rank", "4")
    assert result.exit_code == 0, result.output
    assert list(front_end.recipe) == ["prune"]


PAIR = ["--qat_scheme", "int8", "--fp8_recipe", "tensorwise"]


@pytest.mark.parametrize(("arguments", "told"), [
    (["run", "train.py", *PAIR], "qat cannot be combined with fp8"),
    (["run", "train.py", "--distill_teacher", "runs/of/nobody"], "must be an existing folder"),
    (["run", "train.py", "--distill_teacher", "cache:nowhere"], "eff cache-teacher"),
    (["run", "train.py", "--lottery_out", "out", "--lottery_ticket", "nowhere"], "ticket file"),
    (["run", "train.py", "--prune_sparsity", "80"], "80 % is written 0.8"),
    (["run", "train.py"], "no technique is switched on"),
    (["try", "train.py", "--distill_teacher", "./nowhere"], "must be an existing folder"),
    (["chain", "--out", "out", "--", "python", "train.py", "{out}", *PAIR], "qat cannot be combined with fp8"),
    (["lottery", "--out", "out", "--", "python", "train.py", *PAIR], "qat cannot be combined with fp8"),
])  # fmt: skip
def test_what_flags_show_is_told_before_torch_is_imported(arguments, told, tmp_path):
    (tmp_path / "train.py").touch()
    code = "import sys\nfrom shared_core.cli import main\ntry:\n    main()\nfinally:\n    print(*sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told in done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "transformers", "pytorch_lightning", "lightning", "numpy"}
