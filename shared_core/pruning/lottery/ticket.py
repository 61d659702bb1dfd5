"""A ticket on disk: which weights are left, and what all weights are set to when training is rewound."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared_core.atomic import atomic_write
from shared_core.errors import CheckpointError
from shared_core.packed_masks import pack_mask, packed_size, unpack_mask
from shared_core.parsing import parse_json

_FORMAT = 1
_MASK, _WEIGHT = "mask.", "weight."
_ENDS = 1024


@dataclass(frozen=True)
class Ticket:
    """Masks, and the weights that training goes on from at `step`."""

    masks: Mapping[str, Tensor]
    """bool by the name of the weight, True = keep; empty before anything was pruned."""
    weights: Mapping[str, Tensor]
    """Parameters and buffers by name, dense; of a file, read one by one when asked for."""
    step: int
    """The optimizer step at which they are put in place."""
    rewind: str = "weights"
    """What they are: those of that step (``weights``), or the trained ones (``learning_rate``, ``none``)."""
    learning_rates: tuple[tuple[float, ...], ...] = field(default=())
    """Of the last step, for each optimizer's parameter groups; only with ``none``."""

    @property
    def numel(self) -> int:
        """How many weights the masks are of."""
        return sum(mask.numel() for mask in self.masks.values())

    @property
    def kept(self) -> int:
        """How many of them are left."""
        return sum(int(mask.count_nonzero()) for mask in self.masks.values())

    def digest(self) -> str:
        """Return a hash of the masks and of the two ends of every weight, to tell tickets apart."""
        digest = hashlib.sha256(f"{self.step} {self.rewind}".encode())
        for name, mask in sorted(self.masks.items()):
            digest.update(name.encode() + pack_mask(mask).numpy().tobytes())
        for name in sorted(self.weights):
            flat = self.weights[name].detach().reshape(-1)
            ends = torch.cat([flat[:_ENDS], flat[-_ENDS:]]).cpu().contiguous()
            digest.update(name.encode() + ends.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def write_ticket(path: Path | str, ticket: Ticket) -> Path:
    """Write a ticket as one safetensors file, whole or not at all, and return its path.

    Tensors ``weight.<name>`` hold the weights, ``mask.<name>`` the masks, eight to a byte (``numpy.packbits`` of the
    flattened mask); the metadata field ``eff_ticket`` is JSON: format, step, rewind, learning_rates.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/ticket.safetensors"
        >>> ticket = Ticket({"w": torch.tensor([True, False])}, {"w": torch.tensor([0.5, 0.25])}, step=3)
        >>> read = read_ticket(write_ticket(path, ticket))
        >>> read.masks["w"].tolist(), read.weights["w"].tolist(), read.step
        ([True, False], [0.5, 0.25], 3)
    """
    # A copy each: safetensors refuses two names for one storage.
    tensors = {
        _WEIGHT + name: value.detach().to("cpu", copy=True).contiguous() for name, value in ticket.weights.items()
    }
    tensors |= {_MASK + name: pack_mask(mask) for name, mask in ticket.masks.items()}
    told = {"format": _FORMAT, "step": ticket.step, "rewind": ticket.rewind, "learning_rates": ticket.learning_rates}
    path = Path(path)
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"eff_ticket": json.dumps(told)})
    return path


def read_ticket(path: Path | str) -> Ticket:
    """Return the ticket in a file; its masks are read, its weights when they are asked for.

    Args:
        path: A ``ticket.safetensors``, as `LotteryTicket` and ``eff lottery`` write it.

    Raises:
        CheckpointError: If the file is missing, damaged, no ticket, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"ticket: {path} must be a ticket file, but there is none; check the path")
    try:
        with safe_open(path, framework="pt") as file:
            told = parse_json((file.metadata() or {})["eff_ticket"])
            names = list(file.keys())
            if int(told["format"]) > _FORMAT:
                raise CheckpointError(f"ticket: {path} was written by a newer efftrain; update it to read this file")
            masks = {}
            for name in (name.removeprefix(_MASK) for name in names if name.startswith(_MASK)):
                shape = file.get_slice(_WEIGHT + name).get_shape()
                masks[name] = _unpacked(file.get_tensor(_MASK + name), shape)
        weights = _InFile(path, [name.removeprefix(_WEIGHT) for name in names if name.startswith(_WEIGHT)])
        rates = tuple(tuple(map(float, groups)) for groups in told["learning_rates"])
        return Ticket(masks, weights, int(told["step"]), str(told["rewind"]), rates)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"ticket: {path} must be a whole ticket file, got {error!r}; it is damaged") from error


class _InFile(Mapping[str, Tensor]):
    """The weights in a ticket's file, each read when it is asked for."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._path, self._names = path, dict.fromkeys(names)
        self._file: Any = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._file is None:
            self._file = safe_open(self._path, framework="pt")
        tensor: Tensor = self._file.get_tensor(_WEIGHT + name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _unpacked(packed: Tensor, shape: list[int]) -> Tensor:
    if packed.dtype != torch.uint8 or packed.numel() != packed_size(shape):
        raise ValueError(f"{packed.numel()} bytes of mask for {math.prod(shape)} weights")
    return unpack_mask(packed, shape)
