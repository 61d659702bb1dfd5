"""One training by another library's trainer, for the small callbacks that translate its events."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from shared_core.checkpoint_formats.files import load_torch_file
from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.distributed.collectives import world_size
from shared_core.engine.recipe import Recipe
from shared_core.engine.services import Services
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.files.atomic import atomic_write
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.services import looking
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import UntilEnd


class LibraryRun(UntilEnd):
    """A session with what every trainer's callback needs: wrapped methods, finished weights in files, a receipt.

    The callback calls `session.loss`, `session.before_step` and `session.after_step` itself.

    Args:
        recipe: A recipe, a dict, or the path of a YAML or JSON file.
        library: Name of the library in errors.
        batches: Returns an iterator that runs the model on one training batch per item, for techniques that
            calibrate.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = LibraryRun({"prune": {"sparsity": 0.5, "end": 1}}, "mine", lambda: iter(()))
        >>> _ = run.start(model, optimizer, total_steps=2)
        >>> for _ in range(2):
        ...     run.session.loss(model(torch.ones(2, 8)).square().mean()).backward()
        ...     run.session.before_step()
        ...     optimizer.step()
        ...     _ = run.session.after_step()
        >>> with run.publishing():
        ...     int((model.state_dict()["weight"] == 0).sum())
        16
        >>> run.cut_short()
    """

    def __init__(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        library: str,
        batches: Callable[[], Iterator[object]],
    ) -> None:
        super().__init__()
        self.library = library
        self.session = Session(as_recipe(recipe), services=_Services(self, batches))
        self._saved: dict[str, str] = {}  # file → what it holds
        self._compared_at = 0

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        resumed: Path | None = None,
        **length: Any,
    ) -> Mapping[str, Any]:
        """Begin as `Session.start` does, in one process. Return the content of the file `resumed`, if given.

        Args:
            model: The unwrapped model.
            optimizer: The torch optimizer of its parameters.
            resumed: File of `save`. Its weights and optimizer state are loaded too.
            length: As in `Session.start`.
        """
        self.cut_short()
        if world_size() > 1:
            rule = "several processes are not supported"
            raise CompatibilityError(self.library, rule, "train in one process, or with the HF Trainer or Lightning")
        state = {} if resumed is None else load_torch_file(resumed)
        if state:
            if state["model"].keys() != model.state_dict().keys():
                rule = "cannot resume from weights that a technique replaced in training"
                raise CheckpointError(resumed, rule, "train again, or with the HF Trainer or Lightning")
            model.load_state_dict(state["model"])
            optimizer.state.clear()  # techniques add parameters first
        self.session.start(model, optimizer, resumed=state.get("session"), **length)
        if state:
            optimizer.load_state_dict(state["optimizer"])
        self._saved, self._compared_at = {}, self.session.step
        return state

    def save(self, file: Path, **more: Any) -> None:
        """Write what `start` resumes from: training weights, the states of optimizer and session, and more."""
        context = self.session.context_for("save")
        with self.session.swapped("checkpoint"), atomic_write(file) as temporary:
            state = {"model": context.model.state_dict(), "optimizer": context.optimizers[0].state_dict()}
            # Schedules write numpy's numbers into optimizers, which torch's restricted reader refuses.
            plain = tree_map(lambda one: one.item() if isinstance(one, np.generic) else one, {**more, **state})
            torch.save({**plain, "session": self.session.state_dict()}, temporary)

    def saved(self, file: str, what: str = "finished weights") -> None:
        """Tell the receipt what a file of the present step holds. A later save of this name replaces it."""
        if self.session.is_live:
            self._saved[file] = f"{file} holds {what} of step {self.session.step:,}"

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Make the model's `state_dict` return what `Session.bake` returns. Nested calls do nothing."""
        if not self.session.is_live or self.session.swaps.is_saving:
            yield
            return

        def finished(model: nn.Module, state: dict[str, Any], prefix: str, about: object) -> None:
            own = [name for name in state if name.startswith(prefix)]
            baked = self.session.files.bake({name.removeprefix(prefix): state.pop(name) for name in own})
            state.update({f"{prefix}{name}": value for name, value in baked.items()})

        model = self.session.context_for("publishing").model
        with self.session.swapped("export"):
            hook = model.register_state_dict_post_hook(finished)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                hook.remove()

    def forgets_best(self) -> bool:
        """Return True if the best model until the last call lacked what the recipe asks for, such as zeros.

        Call it before each comparison of models.
        """
        before, self._compared_at = self._compared_at, self.session.step
        return before < self.session.context_for("forgets_best").first_usable_step

    def finish(self, folder: Path | str) -> None:
        """Finish the model, write the receipt into a folder and print it. Does nothing before `start`."""
        if not self.session.has_begun:
            return
        for told in self._saved.values():
            self.session.note(told)
        self.session.finish()
        self.ends.close()
        receipt = self.session.receipt()
        receipt.write(folder)
        if values := self.session.files.deployment():
            write_deployment(folder, values)
        self.session.context_for("finish").services.say(receipt.final_text())

    def cut_short(self) -> None:
        """Restore the user's model after an error. Does nothing after `finish`."""
        self.ends.close()
        self.session.swaps.end_evaluation()
        self.session.detach()


class _Services(Services):
    def __init__(self, run: LibraryRun, batches: Callable[[], Iterable[object]]) -> None:
        self._run, self._batches = run, batches

    def calibrate(self, num_batches: int) -> None:
        """Run training batches without gradients. Random state does not change."""
        with looking(self._run.session.context_for("calibrate").model):
            for _ in itertools.islice(self._batches(), num_batches):
                pass
