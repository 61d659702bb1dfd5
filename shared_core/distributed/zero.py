"""DeepSpeed's ZeRO stages 1 and 2: every process has whole weights but steps only float32 parts of them.

The engine overwrites the parameters with the stepped parts, and splits gradients and moments too. This module maps
all of it to the model's parameters, so that techniques change weights and gradients as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import CompatibilityError


class ZeroOptimizer:
    """An engine's optimizer, with the model's parameters in its groups. `state` is empty: moments belong to parts."""

    def __init__(self, optimizer: Any) -> None:
        self._zero, self.optimizer = optimizer, optimizer.optimizer
        self.state: dict[Tensor, Any] = {}

    @staticmethod
    def of(engine: Any) -> ZeroOptimizer | None:
        """Return the optimizer of an engine; None in stage 3, and in stage 0, where torch's optimizer steps."""
        optimizer = engine.optimizer
        if isinstance(optimizer, torch.optim.Optimizer) or engine.zero_optimization_stage() == 3:
            return None
        if not hasattr(optimizer, "single_partition_of_fp32_groups"):
            rule = f"optimizer must be that of ZeRO stage 1 or 2, got {type(optimizer).__name__}"
        elif (found := optimizer.gradient_accumulation_dtype) != optimizer.dtype:
            rule = f"gradients must have the weights' dtype {optimizer.dtype}, got {found}"
        else:
            return ZeroOptimizer(optimizer)
        remedy = "set zero_optimization.stage to 1 or 2, and remove data_types.grad_accum_dtype"
        raise CompatibilityError("deepspeed", rule, remedy)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the present groups, with the model's parameters instead of flat parts. Read-only."""
        pairs = zip(self.optimizer.param_groups, self._zero.bit16_groups, strict=True)
        return [{**group, "params": parameters} for group, parameters in pairs]

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """Put whole gradients into `grad` for the block, after a step's last backward; every process must call it."""
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        parameters = self._parameters()
        try:
            for parameter in parameters:
                parameter.grad = safe_get_full_grad(parameter).to(parameter.dtype)
            yield
        finally:
            for parameter in parameters:
                gradient, parameter.grad = parameter.grad, None  # if set, DeepSpeed would update only this one
                if gradient is not None:
                    safe_set_full_grad(parameter, gradient)
            self._measure_offloaded()

    @torch.no_grad()
    def _measure_offloaded(self) -> None:
        """Update the norms that offloading records as gradients arrive, and uses for clipping."""
        if not self._zero.cpu_offload:
            return
        for parameter in self._parameters():
            if (part := parameter._hp_mapping) is not None:
                found = part.get_lp_grad_fragment(parameter._index_in_param_group)
                self._zero.norm_for_param_grads[self._zero.get_param_id(parameter)] = found.double().norm()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy changed parameter elements to the float32 parts, or the next step would undo the change."""
        for parameter in self._parameters():
            if (part := parameter._hp_mapping) is None:
                continue  # other processes hold all of it
            place, kept = part.lp_fragment_address, part.hp_fragment
            shown = parameter.detach().flatten().narrow(0, place.start, place.numel).to(kept.device)
            written = kept.to(shown.dtype).ne(shown)
            kept.copy_(torch.where(written, shown.to(kept.dtype), kept))

    @torch.no_grad()
    def clear_moments_(self, parameter: Tensor, kept: Tensor) -> None:
        """Zero the optimizer's state for the elements of a parameter that are not kept."""
        if (part := getattr(parameter, "_hp_mapping", None)) is None:
            return  # frozen, or held by other processes
        whole, mine = part.lp_fragment_address, part.hp_fragment_address
        flat = self._zero.single_partition_of_fp32_groups[part.param_group_index]
        gone = ~kept.flatten().narrow(0, whole.start, whole.numel).to(flat.device)
        for value in self.optimizer.state.get(flat, {}).values():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                value.narrow(0, mine.start, mine.numel).masked_fill_(gone, 0)

    def in_full_precision(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return 16-bit parameters as the stepped float32 values; every process must call it."""
        from deepspeed.utils import safe_get_full_fp32_param

        stepped = {id(parameter) for parameter in self._parameters() if parameter.dtype != torch.float32}
        return {
            name: safe_get_full_fp32_param(value) if id(value) in stepped else value for name, value in weights.items()
        }

    def _parameters(self) -> list[Any]:
        return [parameter for group in self._zero.bit16_groups for parameter in group]
