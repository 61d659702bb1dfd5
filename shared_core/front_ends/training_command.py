"""The user's training command with a recipe: a Python script under `eff run`'s machinery, others as they stand."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError
from shared_core.files.atomic import atomic_write
from shared_core.front_ends.executors import Executor, Run
from shared_core.front_ends.flags import STEPS_FLAG, STEPS_VARIABLE, check_steps, take_flags

VARIABLE = "EFF_RECIPE"
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "mpirun", "srun", *_LAUNCHING_MODULES)
_CHILD = "from shared_core.front_ends.training_command import train_script; train_script()"

_SECRET = re.compile(r"token(?!iz)|key|secret|password", re.IGNORECASE)


def is_launcher(word: str) -> bool:
    """Return whether a command or module starts scripts in processes of their own, which no runner of ours is in."""
    return Path(word).name in _LAUNCHERS


def without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command as it may be written into a file: values of what is named like a secret are left out.

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
    # of tokens and keys there may be a number: --max_tokens 9, --num_key_value_heads 8
    found = {word.lower() for word in _SECRET.findall(name)}
    return bool(found) and not (value.isdecimal() and found <= {"token", "key"})


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains once, taken apart."""

    where: str
    """Who runs it, for errors."""
    interpreter: tuple[str, ...]
    """Python and its own options if the command runs a script or a module, else empty."""
    arguments: tuple[str, ...]
    """The script (or ``-m``, module) and what it is given; or the whole command."""
    flags: Mapping[str, Any]
    """Flags of ours that were among the script's, as `take_flags` returns them."""
    steps: str | None = None
    """Of ``--eff_total_steps`` among them: optimizer steps of a loop whose scheduler does not tell them."""

    @classmethod
    def parse(cls, command: Sequence[str], where: str) -> TrainingCommand:
        """Return the command, our flags taken out of a Python script's as `eff run` does.

        Raises:
            ConfigError: If it is empty, its script does not exist, or a flag of ours is wrong.

        Example:
            >>> parsed = TrainingCommand.parse(["torchrun", "train.py", "--lr", "0.1"], "lottery")
            >>> parsed.interpreter, parsed.arguments
            ((), ('torchrun', 'train.py', '--lr', '0.1'))
        """
        parts = list(command)
        if not parts:
            raise ConfigError(where, "command must be given, got none", "write it after --: python my_train.py")
        starts = [index for index, part in enumerate(parts) if index and (part.endswith(".py") or part == "-m")]
        before = parts[1 : starts[0]] if starts else []
        if not Path(parts[0]).name.startswith("python") or not starts or not all(o.startswith("-") for o in before):
            # No Python script in sight, or options with values that cannot be told apart: run as it stands.
            return cls(where, (), tuple(parts), {})
        start = starts[0]
        if is_launcher(parts[start : start + 2][-1]):
            return cls(where, (), tuple(parts), {})
        size = 2 if parts[start] == "-m" else 1
        script = parts[start : start + size]
        if size == 1 and not Path(script[0]).is_file():
            raise ConfigError(where, f"script must be a file, got {script[0]!r}")
        if len(script) < size:
            raise ConfigError(where, "-m must be followed by a module, got none")
        flags, rest = take_flags(parts[start + size :])
        steps = flags.pop(STEPS_FLAG, None)
        check_steps(steps, where)
        return cls(where, tuple(parts[:start]), (*script, *rest), flags, steps)

    def uses(self, sign: str) -> bool:
        """Return whether an argument contains `sign`."""
        return any(sign in argument for argument in self.arguments)

    def start(
        self,
        recipe: Recipe,
        file: Path,
        stands_for: Mapping[str, str],
        lock: int,
        *,
        environment: Mapping[str, str] | None = None,
        child: str = _CHILD,
        executor: Executor | None = None,
        log: Path | None = None,
        **streams: Any,
    ) -> Run:
        """Return a fresh process that trains once.

        Args:
            recipe: All that it trains with.
            file: Where the recipe is written to; ``EFF_RECIPE`` and ``{recipe}`` in an argument name it.
            stands_for: What further signs in arguments stand for.
            lock: A file descriptor to pass on.
            environment: Further variables.
            child: Python code that runs the script in the process: ``RECIPE SCRIPT ARGUMENTS`` are its arguments.
            executor: Starts it elsewhere; None: here.
            log: What takes the output of one that is started elsewhere.
            streams: Of `subprocess.Popen`.

        Raises:
            ConfigError: If the command cannot be started.
        """
        file = file.resolve()
        with atomic_write(file) as temporary:
            temporary.write_text(recipe.to_yaml(), encoding="utf-8")
        arguments = list(self.arguments)
        for sign, value in {**stands_for, "{recipe}": str(file)}.items():
            arguments = [argument.replace(sign, value) for argument in arguments]
        if self.interpreter:
            # -P: the script's folder is put on the path, as Python would, and not the working one
            arguments = [*self.interpreter, "-P", "-c", child, str(file), *arguments]
        variables = {**(environment or {}), VARIABLE: str(file)}
        if self.steps is not None:
            variables[STEPS_VARIABLE] = self.steps
        if executor is not None and log is not None:
            return executor.start(arguments, variables, log)
        # The child holds the lock too: a training that outlives a killed search keeps others out.
        descriptors = (lock,) if os.name == "posix" else ()
        try:
            return subprocess.Popen(arguments, env={**os.environ, **variables}, pass_fds=descriptors, **streams)
        except OSError as error:
            raise ConfigError(self.where, f"command must be one that can be started, got {error}") from error


def train_script() -> None:
    """Run a script or module with the recipe in every trainer that it builds: ``RECIPE SCRIPT|-m MODULE ARGUMENTS``."""
    from shared_core.front_ends.finding import front_ends

    recipe, *arguments = sys.argv[1:]
    for front_end in front_ends():
        front_end.install(Recipe.from_yaml(Path(recipe)))
    run_script(arguments)


def run_script(arguments: list[str]) -> None:
    """Run a script, or ``-m`` and a module, in this process as Python would.

    Args:
        arguments: The script and what it is given.
    """
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
