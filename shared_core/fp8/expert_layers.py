"""Stacked experts whose products run in FP8. The matrix of each expert is a layer with its own scales."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.modules.matching import change_class, matrix_names, own_class
from shared_core.modules.weight_views import output_axis

_FP8: dict[type[nn.Module], type[nn.Module]] = {}
_STACKS = ("gate_up_proj", "down_proj")


class ExpertMatrix:
    """The matrix of one expert, used like a layer."""

    def __init__(self, module: nn.Module, stack: str, expert: int) -> None:
        self.module, self.stack, self.expert = module, stack, expert

    @property
    def weight(self) -> Tensor:
        """A view of the stack, without gradients."""
        return self.module.get_parameter(self.stack).detach()[self.expert]

    def swap(self, layer: Any) -> None:
        """Make this matrix multiply by a `LayerFp8`. The first matrix changes the class of the module."""
        self.fp8 = layer
        kind = own_class(self.module)
        if kind not in _FP8.values():
            if kind not in _FP8:
                about = {"__doc__": f"{kind.__name__} that multiplies FP8 values.", "__module__": __name__}
                _FP8[kind] = type(f"Fp8{kind.__name__}", (Fp8Experts, kind), about)
            change_class(self.module, kind, _FP8[kind])
            vars(self.module)["fp8_matrices"] = {}
        vars(self.module)["fp8_matrices"][self.stack, self.expert] = layer

    def restore(self) -> None:
        """Undo `swap`."""
        if isinstance(self.module, Fp8Experts):
            kind = own_class(self.module)
            change_class(self.module, kind, kind.__bases__[-1])
            del vars(self.module)["fp8_matrices"]


class Fp8Experts(nn.Module):
    """Experts that compute the three products of each matrix on FP8 values, expert by expert."""

    # loops over the experts that receive tokens
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the stock module with products in FP8."""
        found = torch.zeros_like(hidden_states)
        stacks = {name: getattr(self, name).unbind(0) for name in _STACKS}
        for expert in range(len(stacks["down_proj"])):
            tokens, places = torch.where(top_k_index == expert)
            if not len(tokens):
                continue
            hidden = self._apply_gate(self._product("gate_up_proj", stacks, expert, hidden_states[tokens]))
            made = self._product("down_proj", stacks, expert, hidden) * top_k_weights[tokens, places, None]
            found.index_add_(0, tokens, made.to(found.dtype))
        return found

    def _product(self: Any, name: str, stacks: dict[str, tuple[Tensor, ...]], expert: int, x: Tensor) -> Tensor:
        weight = stacks[name][expert] if output_axis(self) == 1 else stacks[name][expert].t()
        biases = self._parameters.get(f"{name}_bias")
        bias = None if biases is None else biases[expert]
        layer = vars(self)["fp8_matrices"].get((name, expert))
        return F.linear(x, weight, bias) if layer is None else layer.linear(x, weight, bias, self.training)


def expert_matrices(name: str, module: nn.Module, stack: str) -> dict[str, ExpertMatrix]:
    """Return name → matrix for a parameter that stacks experts."""
    num = len(module._parameters[stack])  # type: ignore[arg-type]
    names = matrix_names(f"{name}.{stack}".removeprefix("."), module, num)
    return {own: ExpertMatrix(module, stack, expert) for expert, own in enumerate(names)}


def why_no_experts(module: nn.Module, stack: str, torchao: bool) -> str | None:
    """Return why a parameter that stacks experts cannot multiply in FP8; None if it can."""
    if torchao:
        return "torchao supports only nn.Linear; leave backend out"
    if vars(module).get("has_gate") is not True or stack not in _STACKS or not hasattr(module, "_apply_gate"):
        return f"the forward of {own_class(module).__name__} is unknown"
    weight: Any = module._parameters[stack]
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not floating point"
    odd = next((size for size in weight.shape[1:] if size % 16), None)
    return None if odd is None else f"its sizes must be multiples of 16 for FP8 tensor cores, got {odd}"
