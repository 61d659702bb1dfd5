"""Inference cost per weight of each layer, by which scores are divided: energy-aware pruning.

Costs are measured on calibration batches, or on the user's own micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.config.options import checked
from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import ConfigError, TrainingError
from shared_core.modules.calls import RunHook, remove_hooks
from shared_core.modules.matching import weight_of
from shared_core.modules.weight_views import channel_axis
from shared_core.pruning.scorers.gradient_scorers import num_examples

Kind = Literal["flops", "bytes", "energy"]

HOROWITZ_45NM: dict[str, float] = {
    "int8_add": 0.03,
    "int32_add": 0.1,
    "float16_add": 0.4,
    "bfloat16_add": 0.4,
    "float32_add": 0.9,
    "int8_multiply": 0.2,
    "int32_multiply": 3.1,
    "float16_multiply": 1.1,
    "bfloat16_multiply": 1.1,
    "float32_multiply": 3.7,
    "dram_byte": 160.0,
}
"""pJ per operation at 45 nm and 0.9 V. Reading 32 bits from DRAM takes 640 pJ (Horowitz 2014, ISSCC; DRAM as in Han et
al. 2016, arXiv:1602.01528, table I). bfloat16 is not listed there and counts as float16."""


class LayerUses:
    """Counts, until `close`, how often each layer is called, and at how many positions per example."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.positions: dict[str, float] = {}
        """Weight name → positions, summed over calls."""
        self.calls: dict[str, int] = {}
        """Weight name → number of calls."""
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(RunHook(self._count(name)), with_kwargs=True)
            for name, module in modules.items()
        ]

    def _count(self, name: str) -> Callable[..., None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            places = _places(name, module, args, kwargs, output)
            if places and torch._C._current_graph_task_id() == -1:
                self.positions[name] = self.positions.get(name, 0.0) + places
                self.calls[name] = self.calls.get(name, 0) + 1

        return hook  # type: ignore[no-any-return]

    def close(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._handles)


def _places(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    """Return at how many positions per example a call used this weight."""
    if isinstance(module, nn.MultiheadAttention):
        # Queries, keys and values may have different lengths. A packed weight multiplies all three.
        inputs = [*args[:3], *(kwargs[part] for part in ("query", "key", "value") if part in kwargs)]
        steps = dict(zip("qkv", (_steps(x, first=module.batch_first) for x in inputs), strict=True))
        return steps.get(name.rpartition(".")[2].partition("_proj_")[0]) or sum(steps.values()) / 3
    used = args[0] if args else next(iter(kwargs.values()))
    if isinstance(module, nn.RNNCellBase):
        return float(used.numel() > 0)
    if isinstance(module, nn.RNNBase):
        if isinstance(used, nn.utils.rnn.PackedSequence):
            # Unpadded data divided by the largest batch: average positions per example.
            return used.data.shape[0] / int(used.batch_sizes[0])
        return _steps(used, first=module.batch_first)
    # A transposed convolution uses each weight once per input position, other layers once per output position.
    used = used if getattr(module, "transposed", False) else output
    return used.numel() / used.shape[channel_axis(module, used)] / num_examples(module, used) if used.numel() else 0.0


def _steps(x: Tensor, *, first: bool) -> float:
    """Return the length of a sequence whose batch axis, if any, is first or second."""
    return float(x.shape[1 if x.dim() == 3 and first else 0]) if x.numel() else 0.0


@contextlib.contextmanager
def observe_positions(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[dict[str, float]]:
    """Count at how many positions per example each layer's weights are used, in forwards inside this block.

    That is 1 for a linear layer, or the tokens of a sequence, the steps of a recurrent layer, or the output positions
    of a convolution (input positions of a transposed one). Calls of one layer in a forward add up, and the result is
    the mean over forwards, in training or validation. Recomputation by activation checkpointing does not count.

    Args:
        model: The model whose forwards are counted.
        modules: Weight name → layer.

    Yields:
        Positions by weight name, complete when the block ends.

    Raises:
        TrainingError: If the model or one of its layers was not called.

    Example:
        >>> net = nn.Conv2d(1, 2, 3)
        >>> with observe_positions(net, {"weight": net}) as positions:
        ...     _ = net(torch.zeros(4, 1, 5, 6))
        >>> positions
        {'weight': 12.0}
    """
    found: dict[str, float] = {}
    forwards: list[None] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def called(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            forwards.append(None)

    handle = model.register_forward_pre_hook(called)
    uses = LayerUses(modules)
    try:
        yield found
    finally:
        handle.remove()
        uses.close()
    missing = [name for name in modules if name not in uses.positions]
    if missing:
        rule = f"every layer must be called, got no call of {', '.join(missing[:5])}"
        raise TrainingError("observe_positions", rule, "run the model on a batch that reaches them")
    found.update({name: uses.positions[name] / len(forwards) for name in modules})


def layer_costs(
    modules: Mapping[str, nn.Module],
    kind: Kind,
    *,
    positions: Mapping[str, float] | None = None,
    table: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the cost of one weight of each layer for one example, to pass to a scorer as `costs`.

    - ``flops``: ``2·positions``, a multiplication and an addition at every position where the weight is used;
    - ``bytes``: its size in memory;
    - ``energy`` in pJ: ``positions·(multiply + add) + bytes·dram_byte``, with one read from DRAM (Yang et al. 2017,
      arXiv:1611.05128, without the energy of activations).

    Args:
        modules: Weight name → layer.
        kind: ``flops``, ``bytes`` or ``energy``.
        positions: From `observe_positions`. Not needed for ``bytes``.
        table: pJ by ``<dtype>_multiply``, ``<dtype>_add`` and ``dram_byte``, which override those of `HOROWITZ_45NM`.

    Raises:
        ConfigError: If the kind is unknown, or a figure or position is missing or not above 0.

    Example:
        >>> layer_costs({"weight": nn.Linear(2, 2)}, "energy", positions={"weight": 10.0})
        {'weight': 686.0}
    """
    checked(kind, Kind, "layer_costs", "kind")
    figures = {**HOROWITZ_45NM, **(table or {})}

    def known(what: str, value: float | None, remedy: str) -> float:
        if value is None or not 0 < value < float("inf"):
            raise ConfigError("layer_costs", f"{what} must be a number above 0, got {value!r}", remedy)
        return value

    def figure(name: str) -> float:
        return known(f"{name} in pJ", figures.get(name), "pass a table")

    costs: dict[str, float] = {}
    for name, module in modules.items():
        weight = weight_of(name, module)
        if kind == "bytes":
            costs[name] = float(weight.element_size())
            continue
        places = known(f"positions of {name}", (positions or {}).get(name), "see observe_positions")
        if kind == "flops":
            costs[name] = 2.0 * places
            continue
        dtype = str(weight.dtype).removeprefix("torch.")
        # A multiplication and an addition per position. The weight itself is read once from DRAM.
        operation = figure(f"{dtype}_multiply") + figure(f"{dtype}_add")
        costs[name] = places * operation + weight.element_size() * figure("dram_byte")
    return costs


class CostWatch:
    """Measures the cost of each layer in the first step that reaches it, from the positions at which it is used.

    The cost of an expert is unknown until its first token. Positions are summed over all processes, whose batches may
    be padded to different lengths, so that costs, and with them the masks, are equal. They are divided by the number
    of calls of the first layer that was called, because it is unknown which module the trainer calls.
    """

    def __init__(self, kind: Kind, modules: Mapping[str, nn.Module]) -> None:
        self._kind, self._modules = kind, dict(modules)
        self._uses: LayerUses | None = None
        self.costs: dict[str, float] = layer_costs(self._modules, "bytes") if kind == "bytes" else {}
        """Weight name → cost of one of its weights, for layers whose cost is known. Always the same object."""

    def watch(self) -> None:
        """Watch the layers, unless all costs are known."""
        if self._uses is None and not self._is_complete:
            self._uses = LayerUses(self._modules)

    @property
    def _is_complete(self) -> bool:
        return self.costs.keys() >= self._modules.keys()

    def end_step(self) -> None:
        """Record the costs of layers that this step reached first. Every process must call it."""
        if self._uses is None:
            return
        uses = [(self._uses.positions.get(name, 0.0), self._uses.calls.get(name, 0)) for name in self._modules]
        weight = weight_of(*next(iter(self._modules.items())))
        # On the weights' device, because NCCL does not support CPU tensors.
        joined = all_reduce_(torch.tensor(uses, dtype=torch.float64).to(weight.device), "sum").tolist()
        # Every layer is divided by the calls of one layer: ranking only needs relative costs.
        forwards = next((calls for _, calls in joined if calls), 1)
        positions = {
            name: total / forwards
            for name, (total, _) in zip(self._modules, joined, strict=True)
            if total and name not in self.costs
        }
        self.costs |= layer_costs({name: self._modules[name] for name in positions}, self._kind, positions=positions)
        self._uses.positions, self._uses.calls = {}, {}
        if self._is_complete:
            self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._uses is not None:
            self._uses.close()
            self._uses = None

    def window_state(self) -> dict[str, Any]:
        """Return this process's counts in the unfinished step."""
        uses = self._uses
        return {"positions": dict(uses.positions), "calls": dict(uses.calls)} if uses and uses.calls else {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        if self._uses is not None:
            self._uses.positions = {name: float(total) for name, total in state["positions"].items()}
            self._uses.calls = {name: int(count) for name, count in state["calls"].items()}
