"""The masks of a run, applied after every step, and what an optimizer remembers of the weights that they prune."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from eff_kernels.masks import pack_bits, packed_size, unpack_bits
from eff_kernels.pruning import apply_mask_
from torch import Tensor

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import is_sharded, part_of
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.pruning.selection import count_kept


class MaskStore(Mapping[str, Tensor]):
    """The whole masks of named weights; empty before the first update.

    A weight that FSDP2 shards is masked in the part that this process holds; its whole mask is kept packed, eight
    weights to a byte, so that saving needs no other process.
    """

    def __init__(self) -> None:
        self._weights: Mapping[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        """By name, bool, True = keep: of the whole weight, or of this process's part."""
        self.num_pruned: dict[str, int] = {}
        self._packed: dict[str, Tensor] = {}
        self._masked: list[Tensor] = []
        self._masks: list[Tensor] = []

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What the masks are of."""
        return self._weights

    @weights.setter
    def weights(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._masked = [weights[name] for name in self.parts]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._packed:
            weight = self.weights[name]
            return unpack_bits(self._packed[name].to(weight.device), weight.shape)
        return self.parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self.parts  # Mapping's own would unpack the mask

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Take whole masks, equal on every process, in place of all there were."""
        self.num_pruned = {name: mask.numel() - count_kept(mask) for name, mask in masks.items()}
        sharded = {name: mask for name, mask in masks.items() if is_sharded(self.weights[name])}
        self._packed = {name: pack_bits(mask).cpu() for name, mask in sharded.items()}
        self.parts = {**masks, **{name: part_of(mask, self.weights[name]) for name, mask in sharded.items()}}
        self._masked, self._masks = [self.weights[name] for name in masks], [*self.parts.values()]

    def packed(self) -> dict[str, Tensor]:
        """Return all masks, eight weights to a byte, as they are saved."""
        return {name: pack_bits(mask).cpu() for name, mask in self.parts.items()} | self._packed

    def apply(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        """Set every pruned weight to exactly +0.0, or what `values` has for it: this process's part of it."""
        if values is None:
            apply_mask_(self._held(self._masked), self._masks)
            return
        held = [name for name in self.parts if self.weights[name] in values]
        apply_mask_([values[self.weights[name]] for name in held], [self.parts[name] for name in held])

    def apply_to_gradients(self) -> None:
        """Set the gradient of every pruned weight to exactly +0.0.

        Raises:
            CompatibilityError: If a gradient is sparse.
        """
        live, masks = [gradient for weight in self._masked if (gradient := weight.grad) is not None], self._masks
        if len(live) != len(masks):
            masks = [mask for mask, weight in zip(masks, self._masked, strict=True) if weight.grad is not None]
        try:
            apply_mask_(self._held(live), masks)
        except RuntimeError:
            refuse_sparse(live)
            raise

    def _held(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return what this process holds of the weights, or of their gradients."""
        return [*map(local_part, tensors)] if self._packed else tensors


def refuse_sparse(gradients: Iterable[Tensor]) -> None:
    """Refuse what cannot be masked.

    Raises:
        CompatibilityError: If a gradient is sparse.
    """
    if not {gradient.layout for gradient in gradients} <= {torch.strided}:
        raise CompatibilityError("prune: gradients must be dense, got a sparse one; use sparse=False")


def check_saved(masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, of_units: bool) -> None:
    """Refuse saved masks that are not those of these weights.

    Args:
        masks: Packed, by name.
        weights: Those that are pruned.
        of_units: Whether there may be masks of other tensors too, and of some weights none.

    Raises:
        CheckpointError: Naming one that does not fit.
    """
    missing = sorted(set(weights) - set(masks)) if masks and not of_units else []
    strange = [name for name in masks if name not in weights and not of_units]
    if missing or strange:
        raise CheckpointError(
            f"prune: saved masks must be those of this model's weights, got a difference at "
            f"{(missing + strange)[0]}; resume with the model and recipe that wrote the checkpoint"
        )
    for name in (name for name in weights if name in masks):
        packed, num_bytes = masks[name], packed_size(weights[name].shape)
        if packed.dtype != torch.uint8 or packed.numel() != num_bytes:
            raise CheckpointError(
                f"prune: saved mask of {name} must be {num_bytes} bytes, got {packed.numel()} of "
                f"{packed.dtype}; resume with the model that wrote the checkpoint"
            )


SLOW_ON_ZEROS = (
    "efftrain: prune: on a CPU Adam's step takes about twice as long when half of the gradients are zeros, as those of "
    "pruned weights are where gradients are clipped or an optimizer mixes their elements; pass fused=True to the "
    "optimizer, whose step does not"
)


def is_slow_on_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer takes the square root of second moments by a kernel that is slow on zeros.

    That is Adam on a CPU unless ``fused=True``: torch 2.13's ``sqrt`` takes five times as long on zeros, so that a step
    with the masked gradients of a half pruned model takes more than twice as long.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> [is_slow_on_zeros(torch.optim.AdamW([weight], fused=fused)) for fused in (None, True)]
        [True, False]
    """
    return isinstance(optimizer, torch.optim.Adam) and any(
        not group["fused"] and any(parameter.is_cpu for parameter in group["params"])
        for group in optimizer.param_groups
    )


@torch.no_grad()
def clear_moments_(
    optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> None:
    """Zero, in place, what the optimizers' states hold for weights that are not kept.

    That is every floating-point state tensor whose last dimensions are the weight's (moments, momentum,
    their maxima), and bitsandbytes' 8-bit codes, where zero is the position of 0.0 in the code book
    ``qmap<i>`` beside ``state<i>`` (127 in the signed one, 0 in the unsigned) and the scale of a block need
    not change.

    Args:
        optimizers: Their ``state`` is looked up by parameter.
        weights: Parameters by name.
        masks: bool by the same names, True = keep.
    """
    for optimizer in optimizers:
        for name, weight in weights.items():
            if weight not in optimizer.state:
                continue
            state, mask = optimizer.state[weight], masks[name]
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.shape[-weight.ndim :] != weight.shape:
                    continue
                value = local_part(value)
                if type(value) is not Tensor:
                    continue
                if value.is_floating_point():
                    apply_mask_([value], [mask.to(value.device)])
                elif value.dtype == torch.uint8 and key.replace("state", "qmap") in state:
                    zero = int(state[key.replace("state", "qmap")].abs().argmin())
                    value.masked_fill_(~mask.to(value.device), zero)
