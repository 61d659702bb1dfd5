"""The user's training command: parse it, and rebuild it with the recipe and folder of a run."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.engine.recipe import Recipe
from shared_core.errors import require
from shared_core.files.atomic import atomic_write
from shared_core.front_ends.flags import STEPS_FLAG, STEPS_VARIABLE, check_steps, take_flags
from shared_core.runs.executors import Executor, StartedRun

VARIABLE = "EFF_RECIPE"
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "mpirun", "srun", *_LAUNCHING_MODULES)
_PYTHON = ("python", "python3")
_CHILD = "from shared_core.runs.command import train_script; train_script()"
_SECRET = re.compile(r"token(?!iz)|key|secret|password", re.IGNORECASE)


def is_launcher(word: str) -> bool:
    """Return True if a command or module starts scripts in separate processes, outside our runner."""
    return Path(word).name in _LAUNCHERS


def without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command that is safe to write to a file: values of secrets are replaced.

    Example:
        >>> without_secrets(["python", "train.py", "--hub_token", "hf_a", "--password=1", "--max_tokens", "9"])
        ['python', 'train.py', '--hub_token', '***', '--password=***', '--max_tokens', '9']
    """
    shown, before = [], ""
    for part in command:
        name, sign, value = part.partition("=")
        # `--token VALUE` and `--token=VALUE`: both forms.
        if before and not part.startswith("--") and _is_secret(before, part):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if sign and _is_secret(name, value) else part)
        before = name if name.startswith("-") and not sign else ""
    return shown


def _is_secret(name: str, value: str) -> bool:
    # --max_tokens 9 and --num_key_value_heads 8 are numbers, not secrets
    found = {word.lower() for word in _SECRET.findall(name)}
    return bool(found) and not (value.isdecimal() and found <= {"token", "key"})


@dataclass(frozen=True)
class TrainingCommand:
    """A parsed command that trains once."""

    where: str
    """The command that runs it, for errors."""
    interpreter: tuple[str, ...]
    """Python and its own options if the command runs a script or a module, else empty."""
    arguments: tuple[str, ...]
    """The script (or ``-m``, module) and its arguments; or the whole command."""
    flags: Mapping[str, Any]
    """Our flags among the script's, as `take_flags` returns them."""
    steps: str | None = None
    """From ``--eff_total_steps``: optimizer steps of a loop whose scheduler does not know them."""

    @classmethod
    def parse(cls, command: Sequence[str], where: str) -> TrainingCommand:
        """Return the parsed command, with our flags removed from a Python script's as `eff run` does.

        The words ``python`` and ``python3`` mean the current Python, whatever is first on the path.

        Example:
            >>> parsed = TrainingCommand.parse(["torchrun", "train.py", "--lr", "0.1"], "lottery")
            >>> parsed.interpreter, parsed.arguments
            ((), ('torchrun', 'train.py', '--lr', '0.1'))
        """
        parts = list(command)
        if parts and parts[0] in _PYTHON:
            parts[0] = sys.executable or parts[0]
        require(parts, where, "command must be given, got none", "write it after --: python my_train.py")
        starts = [index for index, part in enumerate(parts) if index and (part.endswith(".py") or part == "-m")]
        start = starts[0] if starts else len(parts)
        script = parts[start : start + (2 if parts[start : start + 1] == ["-m"] else 1)]
        is_python = Path(parts[0]).name.startswith("python") and all(part.startswith("-") for part in parts[1:start])
        if not script or not is_python or is_launcher(script[-1]):
            # No Python script found, or options that cannot be told apart from values: run as is.
            return cls(where, (), tuple(parts), {})
        require(script != ["-m"], where, "-m must be followed by a module, got none")
        is_there = script[0] == "-m" or Path(script[0]).is_file()
        require(is_there, where, f"script must be a file, got {script[0]!r}")
        flags, rest = take_flags(parts[start + len(script) :], script[0], where)
        steps = flags.pop(STEPS_FLAG, None)
        check_steps(steps, where)
        return cls(where, tuple(parts[:start]), (*script, *rest), flags, steps)

    def uses(self, sign: str) -> bool:
        """Return True if an argument contains `sign`."""
        return any(sign in argument for argument in self.arguments)

    def with_recipe(
        self, recipe: Recipe, file: Path, stands_for: Mapping[str, str], child: str = _CHILD
    ) -> tuple[list[str], dict[str, str]]:
        """Write a recipe to a file, and return the command that trains with it and the variables it needs."""
        file = file.resolve()
        with atomic_write(file) as temporary:
            temporary.write_text(recipe.to_yaml(), encoding="utf-8")
        arguments = list(self.arguments)
        for sign, value in {**stands_for, "{recipe}": str(file)}.items():
            arguments = [argument.replace(sign, value) for argument in arguments]
        if self.interpreter:
            # -P: the script's folder is put on the path, as Python would, not the working directory
            arguments = [*self.interpreter, "-P", "-c", child, str(file), *arguments]
        steps = {} if self.steps is None else {STEPS_VARIABLE: self.steps}
        return arguments, {VARIABLE: str(file), **steps}

    def start(
        self,
        name: str,
        recipe: Recipe,
        file: Path,
        stands_for: Mapping[str, str],
        log: Path,
        executor: Executor,
        variables: Mapping[str, str] | None = None,
    ) -> StartedRun:
        """Start a run of this name. Its output is appended to the log; `variables` extend its environment."""
        arguments, needed = self.with_recipe(recipe, file, stands_for)
        seen = log.stat().st_size if log.exists() else 0
        run = executor.start(arguments, {**(variables or {}), **needed}, log)
        return StartedRun(f"{self.where}: {name}", shlex.join(self.arguments), run, log, seen)


def train_script() -> None:
    """Run a script or module with the recipe in every trainer that it builds: ``RECIPE SCRIPT|-m MODULE ARGUMENTS``."""
    from shared_core.front_ends.finding import front_ends

    recipe, *arguments = sys.argv[1:]
    for front_end in front_ends():
        front_end.install(Recipe.from_yaml(Path(recipe)))
    run_script(arguments)


def run_script(arguments: list[str]) -> None:
    """Run a script, or ``-m`` and a module, with its arguments, in this process as Python would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
