"""The user's training command as one run of a search."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shared_core.atomic import make_folder
from shared_core.errors import ConfigError, TrainingError
from shared_core.recipe import Recipe
from shared_core.training_command import TrainingCommand


class RoundCommand:
    """A command that trains once, in a round.

    ``{round}`` in an argument stands for the run's name, ``{out}`` for its folder, ``{recipe}`` for the file of its
    recipe.

    Args:
        command: As the user writes it.

    Raises:
        ConfigError: If it is empty, its script does not exist, or a flag of ours is wrong.
    """

    def __init__(self, command: Sequence[str]) -> None:
        from shared_core.cli.run import recipe_of

        self.command = TrainingCommand.parse(command, "lottery")
        self.recipe = recipe_of(dict(self.command.flags))
        if "ticket" in self.recipe:
            raise ConfigError("lottery: command must not have flags of ticket, which are chosen for every round")

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
        make_folder(out)
        stands_for = {"{round}": out.name, "{out}": str(out.resolve())}
        recipe = recipe.merged(self.recipe)
        with self.command.start(recipe, out / "recipe.yaml", stands_for, lock, stdout=stdout) as process:
            try:
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        if code:
            raise TrainingError(
                f"lottery: {out.name} must end well, but `{shlex.join(self.command.arguments)}` ended with exit code "
                f"{code}; see its output above. Started again, the search goes on from here"
            )
