"""A ticket on disk: the masks, and the weights to rewind to. Also loading it into a model, and the folder of a run.

The folder holds the weights of step k, then the ticket, and last the metrics, which mark the run as finished.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from eff_kernels.masks import pack_bits, packed_size, unpack_bits
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shared_core.checkpoint_formats.files import LazyTensors
from shared_core.distributed.collectives import all_reduce_, is_main, local_part
from shared_core.distributed.sharded_tensors import fill_, is_sharded, place_of, whole
from shared_core.errors import CheckpointError, require
from shared_core.files.atomic import atomic_write
from shared_core.files.journal import write_object
from shared_core.files.json_yaml import parse_json
from shared_core.lottery_ticket.config import RESULT_FILE, TICKET_FILE
from shared_core.modules.matching import plain_name
from shared_core.numerics.deferred_checks import copied_to_cpu

_FORMAT = 1
_MASK, _WEIGHT = "mask.", "weight."
_ENDS = 1024


@dataclass(frozen=True)
class Ticket:
    """Masks, and the weights from which training continues at `step`."""

    masks: Mapping[str, Tensor]
    """Weight name → bool mask, True = keep. Empty before anything is pruned."""
    weights: Mapping[str, Tensor]
    """Parameters and buffers by name, dense. From a file, each is read when it is accessed."""
    step: int
    """The optimizer step at which they are loaded."""
    rewind: str = "weights"
    """Which weights: those of that step (``weights``), or the trained ones (``learning_rate``, ``none``)."""
    learning_rates: tuple[tuple[float, ...], ...] = field(default=())
    """Learning rates of the last step, for each optimizer's parameter groups. Only with ``none``."""

    @property
    def numel(self) -> int:
        """Number of weights that have a mask."""
        return sum(mask.numel() for mask in self.masks.values())

    @property
    def kept(self) -> int:
        """Number of weights that the masks keep."""
        return sum(int(mask.count_nonzero()) for mask in self.masks.values())

    def digest(self) -> str:
        """Return a hash of the masks and of both ends of every weight, to distinguish tickets."""
        digest = hashlib.sha256(f"{self.step} {self.rewind}".encode())
        masks, weights = sorted(self.masks), sorted(self.weights)
        # Both ends of each tensor distinguish runs, without hashing a whole large model.
        flat = (self.weights[name].detach().reshape(-1) for name in weights)
        ends = (torch.cat([values[:_ENDS], values[-_ENDS:]]) for values in flat)
        packed = (pack_bits(self.masks[name]) for name in masks)
        for name, found in zip(masks + weights, copied_to_cpu(itertools.chain(packed, ends)), strict=True):
            digest.update(name.encode() + found.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def write_ticket(path: Path | str, ticket: Ticket) -> Path:
    """Write a ticket atomically as one safetensors file, and return its path.

    Tensors ``weight.<name>`` hold the weights and ``mask.<name>`` the masks, packed eight to a byte (``numpy.packbits``
    of the flattened mask). The metadata field ``eff_ticket`` is JSON: format, step, rewind, learning_rates.

    Args:
        path: The file, which is replaced if it exists.
        ticket: Masks, and the weights to rewind to.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/ticket.safetensors"
        >>> ticket = Ticket({"w": torch.tensor([True, False])}, {"w": torch.tensor([0.5, 0.25])}, step=3)
        >>> read = read_ticket(write_ticket(path, ticket))
        >>> read.masks["w"].tolist(), read.weights["w"].tolist(), read.step
        ([True, False], [0.5, 0.25], 3)
    """
    names = [_WEIGHT + name for name in ticket.weights] + [_MASK + name for name in ticket.masks]
    values = itertools.chain(ticket.weights.values(), map(pack_bits, ticket.masks.values()))
    # Copies, because safetensors refuses two names for one storage.
    tensors = {name: value.contiguous() for name, value in zip(names, copied_to_cpu(values), strict=True)}
    report = {"format": _FORMAT, "step": ticket.step, "rewind": ticket.rewind, "learning_rates": ticket.learning_rates}
    path = Path(path)
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"eff_ticket": json.dumps(report)})
    return path


def read_ticket(path: Path | str) -> Ticket:
    """Return the ticket in a file. Masks are read now, weights when they are accessed.

    Args:
        path: A ``ticket.safetensors`` written by `LotterySearch` or ``eff lottery``.

    Raises:
        CheckpointError: If the file is missing, damaged, not a ticket, or has a newer format.
    """
    path = Path(path)
    rule = f"ticket must be an existing ticket file, got {path}"
    require(path.is_file(), "lottery", rule, "check the path", CheckpointError)
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {})["eff_ticket"])
            names = list(file.keys())
            newer = f"{path} was written by a newer efftrain"
            is_known = int(header["format"]) <= _FORMAT
            require(is_known, "lottery", newer, "update efftrain to read it", CheckpointError)
            masks = {}
            for name in (name.removeprefix(_MASK) for name in names if name.startswith(_MASK)):
                packed, shape = file.get_tensor(_MASK + name), file.get_slice(_WEIGHT + name).get_shape()
                if packed.dtype != torch.uint8 or packed.numel() != packed_size(shape):
                    raise ValueError(f"{packed.numel()} bytes of mask for {math.prod(shape)} weights")
                masks[name] = unpack_bits(packed, shape)
        opened: Any = functools.cache(lambda: safe_open(path, framework="pt"))
        kept = {name.removeprefix(_WEIGHT): name for name in names if name.startswith(_WEIGHT)}
        weights = LazyTensors(kept, lambda name: opened().get_tensor(name))
        rates = tuple(tuple(map(float, groups)) for groups in header["learning_rates"])
        return Ticket(masks, weights, int(header["step"]), str(header["rewind"]), rates)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        rule = f"{path} is not a complete ticket file: {error!r}"
        raise CheckpointError("lottery", rule, "it is damaged; copy it again or rerun the round") from error


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name. A tied tensor appears once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        # Tied weights agree in all four. Other views of the same memory do not, and count separately.
        storage: object = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        storage = id(value) if is_sharded(value) else storage  # the local part may be empty
        if storage not in seen:
            seen.add(storage)
            found[plain_name(name)] = value.detach()
    return found


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return `own_tensors` for writing. Tensors sharded by FSDP2 are gathered one by one on the main process.

    Every process must call it. The others get an empty mapping.
    """
    own = own_tensors(model)
    if not any(map(is_sharded, own.values())):
        return own
    gathered = ((name, whole(value)) for name, value in own.items())
    return {name: value.cpu() for name, value in gathered if is_main()}


def renamed(ticket: Ticket, weights: Mapping[str, Tensor], source: str) -> Ticket:
    """Return the ticket with the names of the weights to mask, so that a ticket from one trainer works in another.

    Names may differ by a common prefix (``net.`` in a LightningModule).
    """
    # A Lightning module holds the model under a prefix ("model."), the Hugging Face Trainer does not.
    add, remove = _prefixes(list(ticket.masks), list(weights))
    masks = {add + name.removeprefix(remove): mask for name, mask in ticket.masks.items()}
    rule = f"{source} must be a ticket of this model's weights, but"
    remedy = "use the model that it was found with, and the same include, skip and min_size"
    for name in sorted({*masks, *weights}):
        side = "the model" if name not in masks else "the ticket"
        is_both = name in masks and name in weights
        require(is_both, "lottery", f"{rule} only {side} has {name}", remedy, CheckpointError)
        own, its = tuple(weights[name].shape), tuple(masks[name].shape)
        require(own == its, "lottery", f"{rule} {name} has shape {own} and its mask {its}", "", CheckpointError)
    if not (add or remove):
        return ticket
    names = {add + name.removeprefix(remove): name for name in ticket.weights}
    return dataclasses.replace(ticket, masks=masks, weights=LazyTensors(names, ticket.weights.__getitem__))


def _prefixes(theirs: list[str], own: list[str]) -> tuple[str, str]:
    """Return the prefix to add to all their names and the one to remove, so that they match, or empty strings."""
    if not theirs or set(theirs) == set(own):
        return "", ""
    for name in own:
        if name.endswith(f".{theirs[0]}"):
            prefix = name.removesuffix(theirs[0])
            if {prefix + other for other in theirs} == set(own):
                return prefix, ""
    for name in own:
        if theirs[0].endswith(f".{name}"):
            prefix = theirs[0].removesuffix(name)
            if {other.removeprefix(prefix) for other in theirs} == set(own):
                return "", prefix
    return "", ""


def first_difference(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], source: str) -> str | None:
    """Return the name of the first tensor that is not bit-equal, or None if all are. Every process must call it.

    For sharded tensors each process compares its part.
    """
    odd = next((name for name in sorted({*own, *theirs}) if name not in own or name not in theirs), None)
    if odd is None:
        odd = next((name for name, value in own.items() if _kind(value) != _kind(theirs[name])), None)
    if odd is not None:
        lines = [str(_kind(side[odd])) if odd in side else "none" for side in (own, theirs)]
        rule = f"but {odd} is {lines[0]} in the model and {lines[1]} in the ticket"
        rule = f"{source} must hold the weights of this model, {rule}"
        raise CheckpointError("lottery", rule, "use the model that the ticket was found with")
    if not any(map(is_sharded, own.values())):
        return next((name for name, value in own.items() if not same_bits(value, theirs[name])), None)
    # Compare each shard with its place in the whole tensor. A difference on one process is enough.
    differ = [not same_bits(local_part(value), theirs[name][place_of(value)]) for name, value in own.items()]
    all_reduce_(joined := torch.tensor(differ, dtype=torch.int32, device=next(iter(own.values())).device), "max")
    return next((name for name, is_odd in zip(own, joined.tolist(), strict=True) if is_odd), None)


def _kind(value: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors of the same shape and dtype have equal bits, including NaN and -0.0.

    Example:
        >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
        True
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    # As bytes: NaN equals itself, -0.0 differs from +0.0.
    bits = [side.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for side in (first, second)]
    return torch.equal(*bits)


@torch.no_grad()
def load_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the model's own tensors, in place."""
    for name, value in own_tensors(model).items():
        fill_(value, weights[name])


class HeldRates:
    """Holds learning rates for fine-tuning: every step uses those of the ticket's last step (rewind ``none``).

    The user's scheduler continues. Its rates are restored after each step, because it may compute the next from the
    last.
    """

    def __init__(self) -> None:
        self.last: tuple[tuple[float, ...], ...] = ()
        """Learning rates of the last step, for each optimizer's parameter groups."""
        self._held: Sequence[Sequence[float]] = ()
        self._scheduled: list[list[Any]] = []

    def fit(self, optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[Sequence[float]]) -> bool:
        """Use a ticket's rates. Return True if they fit these groups. A single common rate fits any groups."""
        sizes = [len(optimizer.param_groups) for optimizer in optimizers]
        values = {rate for its in rates for rate in its}
        if [len(its) for its in rates] == sizes:
            self._held = rates
        elif len(values) == 1:
            self._held = [list(values) * size for size in sizes]
        else:
            return False
        return True

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], *, rewound: bool) -> None:
        """Set the rates for one step, after the run has rewound, until `give_back`."""
        # The scheduler's rate is restored after the step, or it would continue from the held rate.
        self._scheduled = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        if rewound and self._held:
            _set_rates(optimizers, self._held)
        self.last = tuple(tuple(float(group["lr"]) for group in each.param_groups) for each in optimizers)

    def give_back(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Restore the scheduler's rates."""
        if self._scheduled:
            _set_rates(optimizers, self._scheduled)
        self._scheduled = []


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[Sequence[Any]]) -> None:
    for optimizer, its in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, its, strict=True):
            group["lr"] = rate


REWIND_FILE = "rewind.safetensors"


class RunFolder:
    """The folder of one run. Only the main process writes. `RESULT_FILE` is written last and ends the run."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def make(self) -> None:
        """Make the folder."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError("lottery", f"out must be a folder that can be created, got {error}") from error

    def check_unfinished(self) -> None:
        """Refuse to train into the folder of a finished run."""
        file = self._path / RESULT_FILE
        remedy = "use another folder or remove it; in a script that trains twice, pass the recipe to one training only"
        rule = f"out must not hold a finished run, got {file}"
        require(not file.exists(), "lottery", rule, remedy, CheckpointError)

    def keep(self, ticket: Ticket) -> None:
        """Save the weights of step k until the run ends."""
        write_ticket(self._path / REWIND_FILE, ticket)

    def kept_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights of step k that a dense run saved, or None if it did not reach that step."""
        files = [self._path / name for name in (REWIND_FILE, TICKET_FILE)]
        return next((read_ticket(file).weights for file in files if file.is_file()), None)

    def check_kept(self, digest: str, step: int) -> None:
        """Refuse to resume a dense run after step k without its saved weights of step k."""
        weights = self.kept_weights()
        rule = f"{self._path} must hold {REWIND_FILE}, which the original run wrote at step {step}"
        require(weights is not None, "lottery", rule, "resume with the same out, or start again", CheckpointError)
        is_same = Ticket({}, weights or {}, step).digest() == digest
        rule = f"{self._path} must hold weights of the run to resume, got those of another"
        require(is_same, "lottery", rule, "start again", CheckpointError)

    def finish(self, result: Mapping[str, Any], found: Ticket | None) -> None:
        """Write the ticket, if one was found, and then the figures."""
        if found is not None:
            write_ticket(self._path / TICKET_FILE, found)
            # The ticket now holds the weights to rewind to. The result comes last, because it marks the run as
            # finished.
            (self._path / REWIND_FILE).unlink(missing_ok=True)
        write_object(self._path / RESULT_FILE, result)
