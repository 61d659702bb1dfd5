"""Saving and evaluating: the weights in the model meanwhile, what files hold, and whether the receipt is true of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_core.distributed.collectives import from_main
from shared_core.engine.checks.claims import Claim, Claims, Where
from shared_core.engine.checks.saved_names import under_own_names
from shared_core.engine.protocols import Bakes, Deploys, SavesPart, TrainedPart, offering
from shared_core.engine.registry import in_order
from shared_core.engine.saving.session_state import unstepped
from shared_core.engine.technique import Purpose, returned
from shared_core.errors import CheckpointError, ReceiptError

if TYPE_CHECKING:
    from shared_core.engine.session import Session


class Swaps:
    """Counts nested evaluations and saves of a session, so that only the outermost swaps weights.

    Args:
        session: Its techniques swap. Before `begin` and after the run they swap nothing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._evaluations, self._evaluation = 0, contextlib.ExitStack()
        self.is_saving = False
        """True during a save. Torch may then step the optimizer to create its state for the file."""

    @contextlib.contextmanager
    def during(self, purpose: Purpose) -> Iterator[None]:
        """Hold the weights for a purpose in the model, see `Session.swapped`."""
        if purpose == "evaluate":
            self.begin_evaluation()
            try:
                yield
            finally:
                self.leave_evaluation()
        elif self.is_saving:
            yield
        else:
            with self._saving(purpose):
                yield

    @contextlib.contextmanager
    def _saving(self, purpose: Purpose) -> Iterator[None]:
        session, self.is_saving = self._session, True
        try:
            session.refuse_changed()
            session.experts.join()
            optimizers = session.context.optimizers if session.context else ()
            with unstepped(optimizers), self._enter(purpose):
                yield
        finally:
            self.is_saving = False

    def _enter(self, purpose: Purpose) -> contextlib.ExitStack:
        live = self._session.context if self._session.is_live else None
        return contextlib.ExitStack() if live is None else self._session.hooks.entered(live, purpose)

    def begin_evaluation(self) -> None:
        """Hold the weights to evaluate from now on, for trainers that report a validation's start and end."""
        if not self._evaluations:
            self._session.refuse_changed()
            self._evaluation = self._enter("evaluate")
        # Counted only now: after an error, the script may go on and evaluate again.
        self._evaluations += 1

    def leave_evaluation(self) -> None:
        """End what `begin_evaluation` began. Does nothing without it."""
        if self._evaluations:
            self._evaluations -= 1
            if not self._evaluations:
                self._evaluation.close()

    def end_evaluation(self) -> None:
        """Put the training weights back if an exception has left others in the model."""
        self._evaluation.close()


class SavedFiles:
    """Plain weights, the trained part and deployment values of a session, for front ends that write and check files.

    Args:
        session: Attached to the model before any of these methods is called.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.claims = Claims({})
        """What the receipt says about the final weights, once the run has ended."""
        self._part: TrainedPart | None = None  # of the finished model

    def settle(self, claimed: Mapping[str, Mapping[str, Claim]]) -> None:
        """Keep what techniques claim of the final weights, and the trained part, when the run has ended."""
        self.claims = Claims.settled(claimed, self._session.context_for("settle").model)
        self._part = self._find_part()

    def bake(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict that the user's plain model loads.

        Raises:
            CheckpointError: If the untouched model could not load the result.
        """
        baked, session = dict(state_dict), self._session
        if not session.is_attached:
            return baked
        # As `finish` would, on tensors: each technique sees what the previous one wrote.
        for key in in_order(session.techniques, "finish"):
            if isinstance(baking := session.techniques[key], Bakes):
                baked = returned(key, "bake", baking.bake(baked), dict)
        if session.plain is not None:
            session.plain.check(baked)
        return baked

    def bake_average(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an average of the weights as the finished model would hold them, see `Session.bake`."""
        session, model = self._session, self._session.context_for("bake").model
        if not session.is_live:
            return dict(weights)
        own, state = {*map(id, [*model.parameters(), *model.buffers()])}, model.state_dict(keep_vars=True)
        if unknown := sorted(weights.keys() - state.keys()):
            rule = f"another average cannot follow weights that a technique replaced: {', '.join(unknown[:5])}"
            raise CheckpointError("bake", rule, "leave the technique out, or average with the technique average")
        # The values of merged adapters are no tensors of the model.
        names = {name: tensor for name, tensor in state.items() if id(tensor) in own and name in weights}
        with torch.inference_mode(False), torch.no_grad():
            lent = {tensor: weights[name].to(tensor, copy=True) for name, tensor in names.items()}
            session.context_for("bake").project(lent)
            kept = {tensor: tensor.detach().clone() for tensor in lent}
            try:
                # Grids of folded batch norms depend on the norm's statistics, so all values must be in the model.
                for tensor, value in lent.items():
                    tensor.copy_(value)
                return self.bake({**weights, **{name: lent[tensor] for name, tensor in names.items()}})
            finally:
                for tensor, value in kept.items():
                    tensor.copy_(value)

    def deployment(self) -> dict[str, Any]:
        """Return what a deployment needs in addition to the plain weights, by technique. Also works after `finish`."""
        offered = offering(self._session.techniques, Deploys)
        return {key: values for key, one in offered if (values := one.deployment())}

    @property
    def _part_savers(self) -> list[SavesPart]:
        return [one for _, one in offering(self._session.techniques, SavesPart)]

    @property
    def saves_part(self) -> bool:
        """True if the trained part of the model is to be saved without the rest."""
        return any(one.saves_part for one in self._part_savers)

    def part(self) -> TrainedPart | None:
        """Return the trained part of the model, None if it is saved as a whole; every process must call it."""
        return self._part if self._session.is_finished else self._find_part()

    def _find_part(self) -> TrainedPart | None:
        context = self._session.context
        found = (one.part(context) for one in self._part_savers) if context is not None else ()
        return next((part for part in found if part is not None), None)

    def load_part(self, folder: Path) -> bool:
        """Load what was trained from a folder that holds no other weights; return False if it is no such folder."""
        context = self._session.context_for("load_part")
        return any(one.load_part(context, folder) for one in self._part_savers)

    def verify(
        self,
        weights: Mapping[str, Tensor] | None,
        what: str,
        changed_by: Iterable[str] = (),
        *,
        where: Where = Where.END,
        gather: bool = True,
    ) -> None:
        """Recount the final weights, compare them with the receipt as `Claims.verify` does, and note a difference.

        Weights of a file may have the names of a submodule, see `under_own_names`.
        """
        if self._session.context is None or not self.claims.any_hold(where):
            return
        model = self._session.context.model
        if weights is not None:
            weights, unknown = under_own_names(weights, model)
            self._session.note(unknown and f"{what} was not checked against the receipt: {unknown}")
        with self._noting_differences():
            self.claims.verify(model, weights, what, changed_by, where, gather=gather)

    def verify_part(self, folder: Path) -> None:
        """Compare the files of the trained part in a folder with what training ended with, and note a difference."""
        if self._part is None or not (lines := self._part.differences(folder)):
            return
        with self._noting_differences():
            raise ReceiptError(str(folder), f"the saved files differ from the trained model: {'; '.join(lines[:5])}")

    @staticmethod
    def refuse_on_all(found: str) -> None:
        """Raise the main process's `ReceiptError`, if any, on every process: the others would wait for it."""
        if found := from_main(found):
            raise ReceiptError(found)

    @contextlib.contextmanager
    def _noting_differences(self) -> Iterator[None]:
        try:
            yield
        except ReceiptError as error:
            self._session.note(f"The saved weights differ from this receipt: {error}")
            raise
