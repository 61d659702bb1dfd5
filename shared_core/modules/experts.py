"""Stacked experts: one parameter holds the matrices of all experts, as in transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

STACKED_DIMS = 3
"""Axis 0 for experts, then outputs and inputs in the order of `output_axis_of_experts`."""


def output_axis_of_experts(module: nn.Module) -> int | None:
    """Return the axis of the outputs in the parameters that stack experts; None for other modules.

    1 in (experts, out, in), as in Mixtral, Qwen3-MoE and DeepSeek; 2 in (experts, in, out), as in GPT-OSS and
    Llama 4. It follows from `is_transposed` of transformers' modules, or from common sizes.
    """
    stacked = [value for value in module._parameters.values() if value is not None and value.ndim == STACKED_DIMS]
    if not stacked or len({len(value) for value in stacked}) > 1:
        return None
    told = vars(module).get("is_transposed")
    if isinstance(told, bool) and "has_gate" in vars(module):
        return 2 if told else 1
    sizes = vars(module).get("output_size"), vars(module).get("input_size")
    if len(stacked) == 1 and None not in sizes and sizes[0] != sizes[1]:  # JetMoE
        shape = tuple(stacked[0].shape[1:])
        return 1 if shape == sizes else 2 if shape == sizes[::-1] else None
    up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or len(stacked) > 2:
        return None
    if up.shape[2] == down.shape[1] and up.shape[1] == 2 * down.shape[2]:
        return 1
    return 2 if up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1] else None


class _Stacked(type):
    """Makes `isinstance` check a module's contents, because classes of experts have no common base."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Module) and output_axis_of_experts(instance) is not None


class StackedExperts(nn.Module, metaclass=_Stacked):
    """The class of modules that stack experts, for `match_modules` and `isinstance`. It has no instances."""


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold the matrices of all experts, by name; empty for other modules."""
    found = {n: value for n, value in module._parameters.items() if value is not None and value.ndim == STACKED_DIMS}
    return found if isinstance(module, StackedExperts) else {}


def gates_between_products(module: nn.Module) -> bool:
    """Return True if the module's ``_apply_gate`` returns the inputs of the second stack.

    This holds for transformers' batched and grouped products. Its eager loops gate in their own code.
    """
    how = getattr(vars(module).get("config"), "_experts_implementation", None)
    return vars(module).get("has_gate") is True and how in ("batched_mm", "grouped_mm")


def matrices(module: nn.Module, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor with the shape of a module's weight as matrices: one per expert, or the tensor itself."""
    return tensor.unbind(0) if isinstance(module, StackedExperts) else (tensor,)


def matrix_names(name: str, module: nn.Module, num: int) -> list[str]:
    """Return the names of the matrices of a weight."""
    return [f"{name}[{expert}]" for expert in range(num)] if isinstance(module, StackedExperts) else [name]
