"""Buffers that a forward changes: running statistics must not move a second time when it is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

Buffer = tuple[nn.Module, str]
_UNCOUNTED = ("running_mean", "running_var")  # the kernels of norms write them without telling autograd


class Snapshot:
    """The buffers that a block is about to change, as they are now.

    Args:
        block: About to run forward.
        moving: What it was seen to change so far; None if it never ran, and then all buffers are copied once. One that
            begins to move later is kept from moving twice, but not rewound.
    """

    def __init__(self, block: nn.Module, moving: set[Buffer] | None) -> None:
        self._now = {
            (module, name): (
                buffer,
                buffer._version,
                buffer.clone() if moving is None or (module, name) in moving else None,
            )
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self.before: dict[Buffer, Tensor | None] = {}
        """What moved, with its value before, None if unknown; filled by `close`."""

    def close(self) -> None:
        """The forward is over: keep what it moved."""
        self.before = {
            (module, name): clone
            for (module, name), (buffer, version, clone) in self._now.items()
            if name in _UNCOUNTED or module._buffers.get(name) is not buffer or buffer._version != version
        }
        self._now = {}

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Run a forward again on copies of the buffers as they were before; afterwards they are what they are now."""
        now = {(module, name): module._buffers[name] for module, name in self.before}
        try:
            for (module, name), before in self.before.items():
                source = now[module, name] if before is None else before
                module._buffers[name] = None if source is None else source.clone()
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer
