"""A training loop of the user's own script: what its front ends do alike around the session that they drive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import nn

from shared_core.config.training_time import StepsPerEpoch
from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import is_sharded, place_gradients_, put_gradient
from shared_core.engine.session import Session


class ScriptLoop:
    """Surrounds forwards, validation and saving of one session, and keeps an accumulation window for its checkpoint.

    Args:
        inner: The user's model.
        total_steps: Optimizer steps of the run.
        steps_per_epoch: Those of an epoch, None if unknown.
    """

    session: Session
    """Set by the front end, before anything else is called."""

    def __init__(self, inner: nn.Module, total_steps: int, steps_per_epoch: StepsPerEpoch | None) -> None:
        self.inner: Any = inner
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self._surroundings: list[contextlib.AbstractContextManager[Any]] = []
        self.micro_batches = 0  # since the last step
        self.is_complete = False  # whether a step's gradients are all there
        self.evaluates = False
        self.window: Mapping[str, Any] = {}

    @property
    def is_live(self) -> bool:
        """Whether the session has begun and is not finished."""
        return self.session.is_attached and self.session.has_begun

    @property
    def peers(self) -> list[nn.Module]:
        """The models that techniques train beside the script's, by its optimizer."""
        return self.session.peers

    def check_positions(self) -> None:
        """Refuse positions that do not fit the run now, though it begins with the first micro-batch."""
        context = cast(Any, self.session.context)
        context.total_steps, context.steps_per_epoch = self.total_steps, self.steps_per_epoch
        context.ask_plans()

    def surround(self, trains: bool) -> None:
        """Enter what surrounds a forward; `leave` leaves it."""
        surrounding = self.session.forward() if trains else contextlib.nullcontext()
        surrounding.__enter__()
        self._surroundings.append(surrounding)

    def leave(self, *_: Any) -> None:
        """Leave what surrounds the innermost forward; a forward hook."""
        if self._surroundings:
            self._surroundings.pop().__exit__(None, None, None)

    def set_mode(self, method: Callable[..., Any], mode: bool = True) -> Any:
        """Call the model's ``train``; a validation begins and ends with it."""
        result = method(mode)
        if self.is_live and mode == self.evaluates:
            self.evaluates = not mode
            (self.session.after_eval if mode else self.session.before_eval)()
        return result

    @contextlib.contextmanager
    def training_weights(self) -> Iterator[None]:
        """Surround saving: a validation that goes on may have put in others."""
        if not self.evaluates:
            yield
            return
        self.session.after_eval()
        try:
            yield
        finally:
            self.session.before_eval()

    def log_figures(self, method: Callable[..., Any], values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log the techniques' figures beside the script's."""
        return method({**values, **self.session.metrics()} if self.is_live else values, *args, **kwargs)

    def open_window(self) -> dict[str, Any]:
        """Return what an unfinished accumulation window holds on this process."""
        place_gradients_(self.inner)
        named = dict(self.inner.named_parameters()) if self.micro_batches else {}
        held = {name: local_part(one.grad) for name, one in named.items() if one.grad is not None}
        parts = [name for name, one in named.items() if is_sharded(one) and one.requires_grad]
        if parts and held.keys().isdisjoint(parts):  # FSDP2 keeps them to itself until they are reduced
            self.session.note("gradients of an unfinished window that processes have not summed yet are not saved")
        return {"count": self.micro_batches, "gradients": held, "windows": self.session.window_state()}

    def restore_window(self) -> None:
        """Restore the window that `open_window` returned, kept in ``window`` until the session has begun."""
        window, self.window = self.window, {}
        self.micro_batches = int(window.get("count", 0))
        if not self.micro_batches:
            return
        parameters = dict(self.inner.named_parameters())
        for name, gradient in window["gradients"].items():
            put_gradient(parameters[name], gradient)
        self.session.load_window_state(window["windows"])
