"""Score units and layers of a trained model by their activity on calibration batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.channel_graph.graph import Ids
from shared_core.channel_graph.groups import ChannelGroup, Traced
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.modules.calls import evaluated, has_rows

Run = Callable[[Any], Any]
"""Runs a batch through the model."""


@dataclass(frozen=True)
class Place:
    """Where a group's units can be observed: outputs of a norm or inputs of a layer, (units, k) of the last axis."""

    module: str
    is_output: bool
    positions: Ids


def places_of(model: nn.Module, traced: Traced, group: ChannelGroup) -> list[Place]:
    """Return where a group's units can be observed: all norms over a residual width, or the layer that reads them."""
    if norms := [Place(name, True, places) for name, places in norms_over(traced, group)]:
        return norms
    for part in group.slices:
        name = part.tensor.rpartition(".")[0]
        module = model.get_submodule(name)
        # all readers of a unit get the same values, so one is enough
        if part.role == "in" and has_rows(module) and part.axis == (1 if isinstance(module, nn.Linear) else 0):
            return [Place(name, False, part.positions)]
    rule = f"units of {group.name} must be read by a linear layer, whose inputs are their activations, got none"
    raise CompatibilityError("shrink", rule, "leave that size out, or score by criterion magnitude")


def norms_over(traced: Traced, group: ChannelGroup) -> list[tuple[str, Ids]]:
    """Return the modules that normalize over a group's units, and the units' positions in each input."""
    roots = np.array([traced.components[ids[0]] for ids in traced.unit_ids.get(group.name, [])])
    found = []
    for norm in traced.tracer.norms:
        passing = traced.components[norm.label.reshape(-1).numpy()]
        if len(passing) == len(roots) and np.array_equal(np.sort(passing), np.sort(roots)):
            order = np.empty(len(roots), dtype=np.int64)
            order[np.argsort(roots)] = np.argsort(passing)
            found.append((norm.module, order[:, None]))
    return found


class UnitActivations:
    r"""Scores units by :math:`s_u = \sqrt{\sum_b (\frac{1}{S} \sum_s \lVert a_{b,s,u} \rVert_2)^2}`.

    ``a`` are the k values of a unit for token s of example b: one for a neuron or for a channel after a norm, a
    head's output. Several places add up their s. Tokens that a batch's ``attention_mask`` excludes do not count.

    Source: Muralidharan et al. 2024, *Minitron*, arXiv:2407.14679, section 2.2: mean over the sequence, L2 over the
    batch.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, Sequence[Place]]) -> None:
        self._model, self._places = model, places
        self._squares: dict[tuple[str, str], Tensor] = {}
        self._mask: Tensor | None = None

    def run(self, batches: Sequence[Any], run: Run) -> None:
        """Run all batches and record activations."""
        with contextlib.ExitStack() as hooks:
            for group, places in self._places.items():
                for place in places:
                    hooks.callback(self._hooked(group, place).remove)
            for batch in _run_on(self._model, batches, run):
                self._mask = mask_of(batch)

    def scores(self, group: str) -> Tensor:
        """Return (units,) in float64. The lowest are removed first."""
        total = torch.zeros((), dtype=torch.float64)
        for place in self._places[group]:
            _check_reached(place.module, (group, place.module) in self._squares)
            total = total + self._squares[group, place.module].sqrt().cpu()
        return total

    def _hooked(self, group: str, place: Place) -> Any:
        module = self._model.get_submodule(place.module)
        if place.is_output:
            return module.register_forward_hook(lambda module, args, output: self._see(group, place, output))
        return module.register_forward_pre_hook(lambda module, args: self._see(group, place, args[0]))

    def _see(self, group: str, place: Place, values: Tensor) -> None:
        units, size = place.positions.shape
        index = torch.from_numpy(place.positions.reshape(-1)).to(values.device)
        picked = values.detach().index_select(-1, index).reshape(*values.shape[:-1], units, size)
        norms = torch.linalg.vector_norm(picked.float() if picked.dtype != torch.float64 else picked, dim=-1)
        # (examples, tokens, units); values without examples count as one
        norms = norms.reshape(len(norms), -1, units) if norms.ndim > 2 else norms.reshape(1, -1, units)
        weights = token_weights(self._mask, norms.shape[:2], norms.device)
        means = torch.einsum("bsu,bs->bu", norms.double(), weights) / weights.sum(1, keepdim=True).clamp(min=1)
        squares = means.square().sum(0)
        _check(squares, place.module)
        key = (group, place.module)
        self._squares[key] = self._squares[key] + squares if key in self._squares else squares


def _run_on(model: nn.Module, batches: Sequence[Any], run: Run) -> Iterator[Any]:
    """Yield each batch, then run it, in evaluation mode and without gradients."""
    with evaluated(model), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            yield batch
            run(batch)


def _check_reached(module: str, reached: bool) -> None:
    if not reached:
        raise TrainingError("shrink", f"calibration must reach {module}, but never called it", "use other batches")


def mask_of(batch: Any) -> Tensor | None:
    """Return which tokens of a batch count, None if unknown."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def token_weights(mask: Tensor | None, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return 1 for tokens that count, 0 for others. All count if the mask has another shape.

    Example:
        >>> token_weights(torch.tensor([[1, 0]]), (1, 2), torch.device("cpu"))
        tensor([[1., 0.]], dtype=torch.float64)
    """
    if mask is None or mask.shape != tuple(shape):
        return torch.ones(*shape, dtype=torch.float64, device=device)
    return mask.to(device, torch.float64)


def _check(found: Tensor, module: str) -> None:
    if not bool(torch.isfinite(found).all()):
        remedy = "check the batch, or find the step at which training diverged"
        raise TrainingError("shrink", f"activations of {module} must be finite, got NaN or infinity", remedy)


def block_influence(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Any], run: Run) -> list[float]:
    r"""Return the Block Influence of each block, :math:`1 - E[\cos(x, f(x))]` over tokens. Lower means less change.

    Raises:
        TrainingError: If a hidden state is NaN or infinite, or a block is not reached.

    Source: Men et al. 2024, *ShortGPT*, arXiv:2403.03853, equation 1.

    Example:
        >>> block = nn.Linear(2, 2, bias=False)
        >>> _ = block.weight.data.copy_(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))  # a quarter turn
        >>> block_influence(block, [block], [torch.ones(1, 3, 2)], block)
        [1.0]
    """
    sums = [[0.0, 0.0] for _ in blocks]
    mask: list[Tensor | None] = [None]

    def hook(number: int) -> Callable[..., None]:
        def see(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before, after = (hidden.detach().double() for hidden in (entering(args, kwargs), leaving(output)))
            cosine = torch.cosine_similarity(before, after, dim=-1).reshape(len(before), -1)
            _check(cosine, f"layer {number}")
            weights = token_weights(mask[0], cosine.shape, cosine.device)
            sums[number][0] += float((cosine * weights).sum())
            sums[number][1] += float(weights.sum())

        return see

    with contextlib.ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.callback(block.register_forward_hook(hook(number), with_kwargs=True).remove)
        for batch in _run_on(model, batches, run):
            mask[0] = mask_of(batch)
    for number, (_, count) in enumerate(sums):
        _check_reached(f"layer {number}", bool(count))
    return [1 - total / count for total, count in sums]


def entering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input hidden states of a block."""
    return args[0] if args else next(iter(kwargs.values()))


def leaving(output: Any) -> Any:
    """Return the output hidden states of a block."""
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def bypassed(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Make blocks return their input hidden states."""

    def pass_on(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = entering(args, kwargs)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_hook(pass_on, with_kwargs=True).remove)
        yield
