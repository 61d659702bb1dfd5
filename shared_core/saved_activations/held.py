"""Which memory a model holds anyway, whatever autograd saves of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared_core.saved_activations.origin import is_weight

_PLAIN = (torch.Tensor, nn.Parameter)  # what FSDP2 shards has no storage of its own


class HeldMemory:
    """The memory of a model's parameters and buffers.

    To go through all of them takes longer than all else that a forward begins with. So their storages are remembered,
    and looked up again when a parameter is saved that lies in another one: it was replaced, or moved. Buffers, which
    modules replace as they compute, are looked up for every forward.

    Args:
        model: Its modules; those that join it later, or get their first buffer, are found by their parameters alone.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> held = HeldMemory(norm)
        >>> norm.running_mean in held, norm.weight.detach() in held, torch.ones(2) in held
        (True, True, False)
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [*model.modules()]
        self._owned = [owned for part in parts for owned in (part._parameters, part._buffers)]
        self._buffers = [part._buffers for part in parts if part._buffers]
        self._known: dict[int, Any] = {}
        self._of_buffers: set[int] = set()
        self._look()
        self.start()

    def start(self) -> None:
        """A forward begins."""
        self._has_looked = False
        if self._buffers:
            self._of_buffers = {buffer.untyped_storage()._cdata for buffer in _plain(self._buffers)}

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, or lies in the memory of a parameter or buffer."""
        address = tensor.untyped_storage()._cdata
        if address in self._known or address in self._of_buffers:
            return True
        if not is_weight(tensor):
            return False
        # the copies that autocast makes of weights are new ones each time
        if not self._has_looked and isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            self._look()
        return True

    def _look(self) -> None:
        self._has_looked = True
        storages = map(Tensor.untyped_storage, _plain(self._owned))
        # held weakly, so that the address of one that is freed stands for no other
        self._known = {storage._cdata: StorageWeakRef(storage) for storage in storages}  # type: ignore[no-untyped-call]


def _plain(owned: Iterable[dict[str, Any]]) -> list[Tensor]:
    held = chain.from_iterable(map(methodcaller("values"), owned))
    return [tensor for tensor in held if type(tensor) in _PLAIN]
