"""The user's training command with a recipe: a Python script under `eff run`'s machinery, others as they stand."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared_core.errors import ConfigError, TrainingError
from shared_core.recipe import Recipe

VARIABLE = "EFF_RECIPE"
# they start the script in processes of their own, which no runner of ours is in
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_CHILD = "from shared_core.pruning.lottery.commands import train_script; train_script()"


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains once, taken apart.

    ``{round}`` in an argument stands for the run's name, ``{out}`` for its folder, ``{recipe}`` for the file of its
    recipe, which the environment variable ``EFF_RECIPE`` names too.
    """

    interpreter: tuple[str, ...]
    """Python and its own options if the command runs a script or a module, else empty."""
    arguments: tuple[str, ...]
    """The script (or ``-m``, module) and what it is given; or the whole command."""
    recipe: Recipe
    """Techniques of ours that were among the script's flags."""

    @classmethod
    def parse(cls, command: Sequence[str]) -> TrainingCommand:
        """Return the command, our flags taken out of a Python script's as `eff run` does.

        Raises:
            ConfigError: If it is empty, its script does not exist, or a flag of ours is wrong.

        Example:
            >>> parsed = TrainingCommand.parse(["torchrun", "train.py", "--lr", "0.1"])
            >>> parsed.interpreter, parsed.arguments
            ((), ('torchrun', 'train.py', '--lr', '0.1'))
        """
        from shared_core.cli.run import recipe_of, take_flags

        parts = list(command)
        if not parts:
            raise ConfigError("lottery: command must be given, got none; write it after --: python my_train.py")
        starts = [index for index, part in enumerate(parts) if index and (part.endswith(".py") or part == "-m")]
        before = parts[1 : starts[0]] if starts else []
        if not Path(parts[0]).name.startswith("python") or not starts or not all(o.startswith("-") for o in before):
            return cls((), tuple(parts), Recipe({}))
        start = starts[0]
        if parts[start : start + 2][-1] in _LAUNCHERS:
            return cls((), tuple(parts), Recipe({}))
        size = 2 if parts[start] == "-m" else 1
        script = parts[start : start + size]
        if size == 1 and not Path(script[0]).is_file():
            raise ConfigError(f"lottery: script must be a file, got {script[0]!r}")
        if len(script) < size:
            raise ConfigError("lottery: -m must be followed by a module, got none")
        flags, rest = take_flags(parts[start + size :])
        recipe = recipe_of(flags)
        if "ticket" in recipe:
            raise ConfigError("lottery: command must not have flags of ticket, which are chosen for every round")
        return cls(tuple(parts[:start]), (*script, *rest), recipe)

    def run(self, recipe: Recipe, out: Path, lock: int, stdout: int | None = None) -> None:
        """Train once, in a fresh process.

        Args:
            recipe: What to train with; our flags of the command are added.
            out: The folder of the run, where the recipe is written to as well.
            lock: A file descriptor to pass on.
            stdout: Where the command prints; None: where this process does.

        Raises:
            TrainingError: If the command fails.
        """
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "recipe.yaml").resolve()
        file.write_text(recipe.merged(self.recipe).to_yaml(), encoding="utf-8")
        stands_for = {"{round}": out.name, "{out}": str(out.resolve()), "{recipe}": str(file)}
        arguments = []
        for argument in self.arguments:
            for sign, value in stands_for.items():
                argument = argument.replace(sign, value)
            arguments.append(argument)
        if self.interpreter:
            # -P: the script's folder is put on the path, as Python would, and not the working one
            arguments = [*self.interpreter, "-P", "-c", _CHILD, str(file), *arguments]
        descriptors = (lock,) if os.name == "posix" else ()
        try:
            done = subprocess.run(
                arguments, check=False, env={**os.environ, VARIABLE: str(file)}, pass_fds=descriptors, stdout=stdout
            )
        except OSError as error:
            raise ConfigError(f"lottery: command must be one that can be started, got {error}") from error
        if done.returncode:
            raise TrainingError(
                f"lottery: {out.name} must end well, but `{shlex.join(self.arguments)}` ended with exit code "
                f"{done.returncode}; see its output above. Started again, the search goes on from here"
            )


def train_script() -> None:
    """Run a script or module with the recipe in every trainer that it builds: ``RECIPE SCRIPT|-m MODULE ARGUMENTS``."""
    from shared_core.cli.run import front_ends

    recipe, *arguments = sys.argv[1:]
    for front_end in front_ends():
        front_end.install(Recipe.from_yaml(Path(recipe)))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
