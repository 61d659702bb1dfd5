"""Find quantized layers that read the output of a GELU, in the first forward, without tracing the model."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import MatchError
from shared_core.modules.calls import remove_hooks
from shared_core.quantization.layer_quantizer import ClippedQuantizer
from shared_core.quantization.ranges.observers import RangeBank

# These pass values on, or drop some. Dropout on the CPU is a product with a mask, which has no gradient itself.
_PASSES = frozenset(
    """
    NativeDropoutBackward0 MulBackward0 ToCopyBackward0 CloneBackward0 AliasBackward0 ViewBackward0 UnsafeViewBackward0
    TransposeBackward0 PermuteBackward0 SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 UnsqueezeBackward0
    TBackward0 ReshapeAliasBackward0 ExpandBackward0 SliceBackward0 SelectBackward0 SplitBackward0 UnbindBackward0
    IndexBackward0
    """.split()  # noqa: SIM905
)


class GeluInputs:
    """Find the layers whose input is a GELU's output, and clip the ranges of these inputs.

    A GELU returns values from −0.17 up to its largest input. A wide range leaves few codes, or none, for the negative
    ones. Wu et al. clip it at 10.

    The first step that calls a layer decides. Its input is the output of a module with GELU in its class name
    (``nn.GELU``, ``NewGELUActivation``), or the autograd graph leads from it to ``F.gelu``, possibly through dropout, a
    constant factor, a cast or a change of shape. Without gradients (a frozen part of the model) and in compiled code,
    only modules are found.

    Source: Wu et al. 2020, arXiv:2004.09602, section 3.2.1 and table 6 (GELU10).
    """

    def __init__(self, quantizers: Mapping[str, ClippedQuantizer], clip: float) -> None:
        if not quantizers:
            raise MatchError("qat", "clip_gelu found no layer whose input has a range", "leave clip_gelu out")
        self.quantizers, self._clip = dict(quantizers), clip
        self._bank = next(iter(self.quantizers.values())).bank
        self._judged: set[str] = set()
        self._seen: set[str] = set()
        self._late = False
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self._sources: set[tuple[Any, int]] = set()
        self._hooks: list[RemovableHandle] = []
        for quantizer in self.quantizers.values():
            quantizer.gelu_inputs = self

    def leave_out(self, names: Collection[str], bank: RangeBank) -> None:
        """Stop watching these layers. The others observe into `bank` from now on."""
        self.quantizers = {name: quantizer for name, quantizer in self.quantizers.items() if name not in names}
        self._bank = bank

    def watch(self, model: nn.Module) -> None:
        """Watch a model's GELU modules until every layer is decided."""
        self._hooks = [module.register_forward_hook(self._remember) for module in model.modules() if _is_gelu(module)]

    def __deepcopy__(self, memo: dict[int, Any]) -> GeluInputs:
        # within a step there are graph nodes, which cannot be copied
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy({**vars(self), "_outputs": {}, "_sources": set()}, memo))
        return copied

    @property
    def found(self) -> list[str]:
        """Layers whose input is clipped."""
        return [name for name, quantizer in self.quantizers.items() if quantizer.clip is not None]

    @property
    def searches(self) -> bool:
        """True if some layer is still undecided."""
        return len(self._judged) < len(self.quantizers)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _remember(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._bank.observing and isinstance(output, Tensor):
            # The output is recognized while it is alive, its grad_fn also through views and dropout (`_PASSES`).
            self._outputs[id(output)] = weakref.ref(output)
            if output.grad_fn is not None:
                self._sources.add((output.grad_fn, output.output_nr))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look(self, quantizer: ClippedQuantizer, x: Tensor) -> None:
        """Decide about a layer by its input."""
        self._seen.update(name for name, mine in self.quantizers.items() if mine is quantizer)
        if quantizer.clip is None and self._is_gelu_output(x):
            quantizer.clip = self._clip
            # with reentrant checkpointing the layer got this input before, without gradients
            self._late |= torch._C._current_graph_task_id() != -1

    def _is_gelu_output(self, x: Tensor) -> bool:
        known = self._outputs.get(id(x))
        if known is not None and known() is x:
            return True
        node: Any = x.grad_fn
        number = x.output_nr
        # Go back through the graph while each node has one source. A node with two mixes in other values.
        while node is not None:
            if node.name() == "GeluBackward0" or (node, number) in self._sources:
                return True
            sources = [source for source in node.next_functions if source[0] is not None]
            if node.name() not in _PASSES or len(sources) != 1:
                return False
            node, number = sources[0]
        return False

    def settle(self, device: torch.device) -> bool:
        """Agree with the other ranks on the layers reached. Return True if this step's observations must be dropped.

        Every rank must call it before an optimizer step.
        """
        if not self.searches:
            return False
        names = list(self.quantizers)
        flags = [[name in self._seen, self.quantizers[name].clip is not None] for name in names]
        # All ranks must clip the same layers, so one rank that reached a layer decides for all.
        agreed = all_reduce_(torch.tensor([*flags, [self._late, False]], dtype=torch.int32, device=device), "max")
        *rows, (late, _) = agreed.tolist()
        for name, (seen, clipped) in zip(names, rows, strict=True):
            if seen:
                self._judge(name, bool(clipped))
        self._outputs.clear()
        self._sources.clear()
        self._late = False
        if not self.searches:
            self.close()
        if self._judged and not self.found:
            raise MatchError(
                "qat",
                "clip_gelu found no layer with a range that reads the output of a GELU, among "
                f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}",
                "leave clip_gelu out",
            )
        return bool(late)

    def _judge(self, name: str, clipped: bool) -> None:
        self._judged.add(name)
        quantizer = self.quantizers[name]
        quantizer.clip, quantizer.gelu_inputs = self._clip if clipped else None, None

    def close(self) -> None:
        """Watch no longer."""
        remove_hooks(self._hooks)
        for quantizer in self.quantizers.values():
            quantizer.gelu_inputs = None

    def state_dict(self) -> dict[str, list[str]]:
        """Return the layers that are decided, and those that are clipped."""
        return {"judged": sorted(self._judged), "clipped": self.found}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Restore a saved state."""
        for name in state["judged"]:
            self._judge(name, name in state["clipped"])
        if not self.searches:
            self.close()

    @contextlib.contextmanager
    def gradients(self, model: nn.Module) -> Iterator[None]:
        """Keep the autograd graph, which `look` reads, in forwards outside training while a layer is undecided."""
        if not self.searches:
            yield
            return
        # grad_fn exists only with gradients, so frozen models get them during a calibration.
        frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            with torch.enable_grad():
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def _is_gelu(module: nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower() and next(module.parameters(), None) is None
