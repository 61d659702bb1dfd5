"""Pass a recipe on to the Python processes that a script starts, since a launcher trains in child processes.

They find our ``sitecustomize`` first on their path, which Python imports at its start. It waits for the modules of
trainers and imports nothing else, so other processes stay fast. Only `eff run` needs it, because its script may be a
launcher. The runs of a search start with their recipe (`TrainingCommand.with_recipe`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.front_ends.after_import import after_import
from shared_core.front_ends.finding import FrontEnd, front_ends
from shared_core.front_ends.unseen_steps import UnseenSteps

if TYPE_CHECKING:
    from shared_core.engine.recipe import Recipe

_PATH, _TAKEN = "PYTHONPATH", "taken"
_SITE = """try:
    from shared_core.runs.child_processes import begin
except ImportError:  # another Python, without efftrain: the parent process reports that nothing was switched on
    pass
else:
    begin(__file__)
"""


@contextlib.contextmanager
def handed_on(recipe: Recipe, script: str, installed: Sequence[FrontEnd]) -> Iterator[Callable[[], bool]]:
    """Apply a recipe in Python processes started in this block. Yield a function that tells if one trained with it.

    Args:
        recipe: The techniques to switch on.
        script: The script that the user runs, for errors.
        installed: The front ends.
    """
    facts = {"script": script, "modules": [name for one in installed for name in getattr(one, "modules", ())]}
    files = {"facts.json": json.dumps(facts), "recipe.yaml": recipe.to_yaml(), "sitecustomize.py": _SITE}
    before = os.environ.get(_PATH)
    with tempfile.TemporaryDirectory(prefix="eff-run-", ignore_cleanup_errors=True) as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        os.environ[_PATH] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield Path(folder, _TAKEN).exists
        finally:
            os.environ.pop(_PATH)
            if before is not None:
                os.environ[_PATH] = before


def begin(file: str) -> None:
    """Wait for this process to import trainers, and give them the recipe next to a ``sitecustomize``."""
    folder = Path(file).parent
    _run_own_sitecustomize(folder)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    installed: list[FrontEnd] = []

    def install(_: Any) -> None:
        from shared_core.engine.recipe import Recipe

        if not installed:
            installed.extend(front_end for front_end in front_ends() if getattr(front_end, "modules", ()))
            for front_end in installed:
                front_end.install(Recipe.from_yaml(folder / "recipe.yaml"))

    for name in facts["modules"]:
        after_import(name, install)

    def guard(_: Any) -> None:
        UnseenSteps(functools.cache(front_ends), facts["script"], (folder / _TAKEN).touch)

    after_import("torch.optim.optimizer", guard)


def _run_own_sitecustomize(folder: Path) -> None:
    """Import the environment's own ``sitecustomize``, which ours hides."""
    sys.path[:] = [entry for entry in sys.path if Path(entry) != folder]
    ours = sys.modules.pop("sitecustomize")
    try:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    finally:
        sys.modules.setdefault("sitecustomize", ours)
