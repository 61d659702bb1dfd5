"""What a forward depends on beside its arguments: put back when it is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Surroundings:
    """The random state and the autocast settings of a forward."""

    def __init__(self, values: list[Any]) -> None:
        devices = {value.device for value in values if isinstance(value, Tensor)}
        self._devices = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)
        self._cpu = torch.get_rng_state()
        self._states = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]
        cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cached)
            for kind in sorted({"cpu", *(device.type for device in self._devices)})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run something in them, and leave the present ones as they are."""
        with contextlib.ExitStack() as stack:
            kind = self._devices[0].type if self._devices else "cuda"
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(*settings))
            yield
