"""The linear layers of a model changed one decoder block after another, each by the inputs that it then has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shared_core.errors import TrainingError
from shared_core.modules.calls import evaluated
from shared_core.modules.matching import is_transformers_conv1d

Solve = Callable[[str, nn.Module, Tensor], None]
"""Called with (name, layer, ``X Xᵀ`` of its inputs): changes the layer."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def has_rows(module: nn.Module) -> bool:
    """Return whether a layer multiplies vectors along the last axis of its input by its weight."""
    return isinstance(module, nn.Linear) or is_transformers_conv1d(module)


def solve_in_order(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    run: Callable[[Any], Any],
    batches: Sequence[Any],
    solve: Solve,
    where: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Show every layer's inputs to `solve`, in evaluation mode and without gradients.

    Where a ``ModuleList`` holds blocks, each called once with the output of the one before, layers of a block see what
    the blocks before, already changed, give; hidden states wait on the CPU, and one block's Hessians are held at a
    time. Layers outside the blocks come last, by one more pass. In any other model all layers see the inputs of the
    unchanged model, and all Hessians are held at once, solved in the order of `layers`.
    """
    blocks = _blocks(model, layers)
    calls: list[list[_Call]] = []
    with evaluated(model):
        for done, batch in enumerate(batches, 1):
            if blocks:
                recorded = _record(blocks, lambda batch=batch: run(batch))  # type: ignore[misc]
                if recorded is None:
                    blocks = []
                else:
                    calls.append(recorded)
            if progress is not None:
                progress(done, len(batches))
        left = dict(layers)
        for number, block in enumerate(blocks):
            inside = {id(module) for module in block.modules()}
            own = {name: left.pop(name) for name, layer in layers.items() if id(layer) in inside and name in left}
            with _hessians(own) as found:
                for each in calls:
                    _again(block, each[number])
            _solve(own, found, solve, where)
            for each in calls if number + 1 < len(blocks) else ():
                each[number + 1] = _with_hidden(each[number + 1], _hidden(_again(block, each[number])).cpu())
                each[number] = ((), {})
        if left:
            with _hessians(left) as found:
                for batch in batches:
                    run(batch)
            _solve(left, found, solve, where)


def _blocks(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the list of modules of one class that holds most of the layers; empty where none holds several."""
    wanted, best, most = {id(layer) for layer in layers.values()}, list[nn.Module](), 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            held = sum(id(part) in wanted for part in module.modules())
            if held > most:
                best, most = list(module), held
    return best


def _record(blocks: list[nn.Module], run: Callable[[], Any]) -> list[_Call] | None:
    """Return the arguments of each block, on the CPU; None where the blocks are no chain."""
    calls: list[_Call] = []
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    last: list[Any] = [None]
    chained = [True]

    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):  # once, however many blocks share it; kept alive so that no id comes twice
            return kept.setdefault(id(value), (value, value.detach().to("cpu", copy=True)))[1]
        return None if hasattr(value, "get_seq_length") else value  # a cache: empty here, filled again elsewhere

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = len(calls)
        hidden: Any = args[0] if args else next(iter(kwargs.values()), None)
        right = number < len(blocks) and block is blocks[number] and isinstance(hidden, Tensor)
        chained[0] = chained[0] and right and (number == 0 or hidden is last[0])
        if not chained[0]:
            return
        first = hidden.detach().to("cpu", copy=True) if number == 0 else None
        rest: _Call = (args[1:], kwargs) if args else ((), dict(list(kwargs.items())[1:]))
        moved = tree_map(on_cpu, rest)
        calls.append(((first, *moved[0]), moved[1]) if args else ((), {next(iter(kwargs)): first, **moved[1]}))

    def leave(block: nn.Module, args: Any, output: Any) -> None:
        last[0] = _hidden(output)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls if chained[0] and len(calls) == len(blocks) else None


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _with_hidden(call: _Call, hidden: Tensor) -> _Call:
    args, kwargs = call
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): hidden})


def _again(block: nn.Module, call: _Call) -> Any:
    """Call a block with copies of kept arguments, which it may write into, on its device."""
    device = next(block.parameters()).device
    args, kwargs = tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, call)
    return block(*args, **kwargs)


@contextlib.contextmanager
def _hessians(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Gather ``X Xᵀ`` of each layer's inputs, of every position and example, in float32 (float64 of float64)."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            rows = x.detach().reshape(-1, x.shape[-1])
            rows = rows if rows.dtype == torch.float64 else rows.float()
            if len(rows):
                gram = rows.t() @ rows
                found[name] = found[name].add_(gram) if name in found else gram

        return see

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _solve(layers: Mapping[str, nn.Module], found: dict[str, Tensor], solve: Solve, where: str) -> None:
    for name, layer in layers.items():
        if name not in found:
            raise TrainingError(where, f"calibration must reach {name}, got no input", "skip it, or use other batches")
        if not bool(torch.isfinite(found[name].diagonal()).all()):
            raise TrainingError(where, f"inputs of {name} must be finite, got NaN or infinity", "look for the batch")
        solve(name, layer, found.pop(name))
