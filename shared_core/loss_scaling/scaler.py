"""`LossScaler`: torch's GradScaler with a floor, visible skips and the same decision on all ranks."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from eff_kernels.loss_scaling import unscale_with_largest_
from torch import Tensor

# Private in torch, but a subclass can see the stage of a step only in this way. Tests pin it.
from torch.amp.grad_scaler import GradScaler, OptState, _refresh_per_optimizer_state

from shared_core.distributed.collectives import all_reduce_, world_size
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.loss_scaling.config import MIN_SCALE, LossScaleConfig, floor_text
from shared_core.loss_scaling.floors import AutoScale, make_floor

# torch's own messages
_NOT_UNSCALED = {
    OptState.UNSCALED: "unscale_() has already been called on this optimizer since the last update().",
    OptState.STEPPED: "unscale_() is being called after step().",
}


class LossScaleError(TrainingError):
    """Gradients overflowed in too many steps in a row, so that lowering the scale does not help."""


class LossScaler(GradScaler):
    """Multiplies the loss by ``S``, divides gradients by it, and skips steps whose gradients have Inf or NaN.

    It replaces ``torch.amp.GradScaler``: same methods, same state dict, and the same
    scales and weights as long as torch's scale stays at or above `min_scale`. It differs in these cases:

    - the scale never falls below `min_scale` (torch's reaches 0, and the next finite step writes NaN);
    - after `max_skips` skipped steps of an optimizer in a row, `update` raises `LossScaleError`;
    - on overflow the optimizer's step is not called, also for fused optimizers (torch calls those and lets the
      kernel skip, so that trainers count the step and advance the learning rate);
    - all processes apply or skip a step together, even if only one of them saw the overflow.

    ``step`` reads from the device once. Nothing else waits for it, except the end of an automatic floor's window.

    Args:
        device: Device type of the losses, ``"cpu"``, ``"cuda"``, ...
        kind: ``"dynamic"``; ``"static"`` for a scale that never changes; ``"enhanced"``, dynamic above a rising
            `floor`; ``"auto"``, the largest power of two at which the largest gradient keeps `margin` bits free.
        init_scale: Scale of the first step, at least `min_scale`.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow, > 1.
        backoff_factor: Multiplies the scale after an overflow, in (0, 1).
        growth_interval: Steps without overflow before the scale grows, >= 1.
        min_scale: Floor of the scale, > 0.
        max_skips: Skipped steps in a row after which training ends with an error, >= 1.
        floor: For kind enhanced: ``(step, floor)`` pairs in applied steps, also as text like
            ``"40000:8192,150000:32768"``, or ``"auto"``, the default.
        floor_window: Steps after which an automatic floor doubles or halves, >= 1.
        floor_overflows: Share of overflowing steps, in (0, 1], at which an automatic floor falls.
        format: For kind auto: ``"fp16"`` or ``"fp8_e5m2"``, which the gradients must fit into.
        margin: For kind auto: bits kept free below the format's maximum, >= 0.
        smoothing: For kind auto: share of the past in the smoothed largest gradient, in [0, 1).
        enabled: If False, every method passes its input on.

    Raises:
        ConfigError: If an argument is invalid.

    Source: Micikevicius et al., 2018, arXiv:1710.03740, section 3.2; the floor: Mellempudi et al., 2019,
    arXiv:1905.12334, section 3.1.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = LossScaler(init_scale=1024.0)
        >>> scaler.scale(weight * float("inf")).backward()
        >>> scaler.step(optimizer); scaler.update()
        >>> weight.item(), scaler.get_scale(), scaler.was_skipped(optimizer)
        (1.0, 512.0, True)
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        kind: Literal["dynamic", "static", "enhanced", "auto"] = "dynamic",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = MIN_SCALE,
        max_skips: int = 50,
        floor: str | Sequence[tuple[int, float]] | None = None,
        floor_window: int = 200,
        floor_overflows: float = 0.02,
        format: Literal["fp16", "fp8_e5m2"] = "fp16",
        margin: float = 2.0,
        smoothing: float = 0.9,
        enabled: bool = True,
    ) -> None:
        checked = LossScaleConfig(
            kind=kind, init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
            growth_interval=growth_interval, min_scale=min_scale, max_skips=max_skips, floor=floor_text(floor),
            floor_window=floor_window, floor_overflows=floor_overflows, format=format, margin=margin,
            smoothing=smoothing,
        )  # fmt: skip
        super().__init__(
            device, init_scale=checked.init_scale, growth_factor=checked.growth_factor,
            backoff_factor=checked.backoff_factor, growth_interval=checked.growth_interval, enabled=enabled,
        )  # fmt: skip
        self._kind, self._min_scale, self._max_skips = checked.kind, checked.min_scale, checked.max_skips
        self._floor = make_floor(checked) if checked.kind == "enhanced" else None
        self._auto = AutoScale(checked) if checked.kind == "auto" else None
        self.num_steps = 0
        """Calls of `step`, including skipped ones."""
        self.skipped_steps = 0
        """Skipped calls of `step`."""
        self.applied_steps = 0
        """Calls of `update` after which no step was skipped. The pairs of a floor count these."""
        self.last_step_skipped = False
        """True if the latest call of `step`, for any optimizer, was skipped."""
        self.scale_range: tuple[float, float] | None = None
        """Lowest and highest scale of any step, applied or skipped; None before the first."""
        self.widen_gradients: Callable[[torch.optim.Optimizer], None] | None = None
        """Converts an optimizer's fp16 gradients to float32 before unscaling, because in fp16 they would underflow."""
        self._in_a_row: dict[int, int] = {}
        self._restored_in_a_row: list[int] = []
        self._seen: list[tuple[bool, float, float]] = []

    @property
    def lowest_scale(self) -> float:
        """The current lower bound of the scale: `min_scale`, or the floor of kind enhanced if that is higher."""
        return max(self._min_scale, self._floor.at(self.applied_steps) if self._floor else 0.0)

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the latest `step` of this optimizer was skipped; False before its first."""
        return self._in_a_row.get(id(optimizer), 0) > 0

    def scale(self, outputs: Any) -> Any:
        """Return the loss, or each tensor of an iterable, times the scale."""
        if self._floor is not None and self._enabled:
            self._floor.watch(outputs)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's complete gradients by the scale, to clip or read them before `step`.

        Reimplemented for speed: torch 2.13 needs five operations for the factor, but on a CPU one is enough.

        Raises:
            RuntimeError: If `unscale_` or `step` was already called for this optimizer since `update`.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] in _NOT_UNSCALED:
            raise RuntimeError(_NOT_UNSCALED[state["stage"]])
        # kernels of accelerators may divide inexactly in float32; in float64 1/S is rounded once
        factor = scale.reciprocal() if scale.is_cpu or scale.is_mps else scale.double().reciprocal().float()
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, factor, torch.zeros_like(scale), False)
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Return ``optimizer.step(*args, **kwargs)``, or on overflow None without calling it.

        Gradients are unscaled first unless `unscale_` was called. All processes must call it.

        Raises:
            RuntimeError: If it was called twice for this optimizer since `update`, or with a closure.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        # torch accepts a positional closure, which would compute scaled gradients again; Accelerate passes None
        if "closure" in kwargs or any(argument is not None for argument in args[:1]):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if needs_closure(optimizer):
            rule = f"{type(optimizer).__name__}.step needs a closure, which would compute scaled gradients"
            raise CompatibilityError("loss_scale", rule, "use an optimizer that steps without one, or train in bf16")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        # Fused optimizers unscale inside their kernel and would skip silently, so we decide here.
        unscales_itself = state["stage"] is OptState.READY and has_scaled_step(optimizer)
        if unscales_itself:
            self._check_inf_per_device(optimizer)
        elif state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        (found_inf,) = state["found_inf_per_device"].values()
        overflowed = self._record(optimizer, self._read(state, scale))
        state["stage"] = OptState.STEPPED
        if overflowed:
            return None
        if not unscales_itself:
            return cast("float | None", optimizer.step(*args, **kwargs))
        amp: Any = optimizer
        # Another wrapper may have set grad_scale already: divide by both.
        amp.grad_scale, amp.found_inf = scale * getattr(optimizer, "grad_scale", 1), found_inf
        try:
            return cast("float | None", optimizer.step(*args, **kwargs))
        finally:
            del amp.grad_scale, amp.found_inf

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, which never falls below `lowest_scale`, and start the next iteration.

        Args:
            new_scale: Set the scale to this instead: finite, at least `lowest_scale`.

        Raises:
            ConfigError: If `new_scale` is invalid.
            LossScaleError: If an optimizer has now skipped `max_skips` steps in a row.
            AssertionError: If no gradients were checked since the last call.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._set(new_scale)
        elif self._kind in ("dynamic", "enhanced"):
            self._grow_or_back_off(scale)
        else:
            self._follow_gradients(scale)
        worst = max(self._in_a_row.values(), default=0)
        if worst >= self._max_skips:
            raise LossScaleError(
                "loss_scale",
                f"gradients had Inf or NaN in {worst} steps in a row (max_skips is {self._max_skips}), and the scale "
                f"is now {scale.item():g}",
                "no scale helps: check inputs and weights for NaN, lower the learning rate, or train in bf16",
            )

    def _set(self, new_scale: float | Tensor) -> None:
        new_scale = new_scale if isinstance(new_scale, Tensor) else float(new_scale)
        if not self.lowest_scale <= float(new_scale) <= torch.finfo(torch.float32).max:
            raise ConfigError(
                "loss_scale",
                f"new_scale must be finite and at least min_scale, {self.lowest_scale} now, got {new_scale}",
            )
        super().update(new_scale)
        self._end_iteration()

    def _grow_or_back_off(self, scale: Tensor) -> None:
        super().update()
        seen, before = self._seen, self.lowest_scale
        self._end_iteration()
        # a scale that did not fall is still above the same floor
        if self.lowest_scale != before or not seen or any(bad or at < before for bad, at, _ in seen):
            scale.clamp_(min=self.lowest_scale)

    def _follow_gradients(self, scale: Tensor) -> None:
        """Set the scale of kind auto; kind static keeps it."""
        checked = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        if not checked:
            raise AssertionError("No inf checks were recorded prior to update.")
        if self._auto is not None:
            # optimizers that were unscaled but not stepped count too, as in torch
            seen = self._seen + [self._read(s, scale) for s in checked if s["stage"] is not OptState.STEPPED]
            overflowed, amax = any(bad for bad, _, _ in seen), max(amax for _, _, amax in seen)
            scale.fill_(self._auto.next_scale(seen[0][1], amax, overflowed=overflowed))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._end_iteration()

    def _read(self, state: dict[str, Any], scale: Tensor) -> tuple[bool, float, float]:
        """Return overflow, scale and largest unscaled gradient (0 unless kind is auto) in one read."""
        (found_inf,) = state["found_inf_per_device"].values()
        # One host read for all values.
        found, at, *amax = torch.stack((found_inf, scale, *state.get("amax", ()))).tolist()
        return found != 0, at, amax[0] / at if amax else 0.0

    def _end_iteration(self) -> None:
        """Count an applied step, and report either kind to the floor, unless gradients were only checked."""
        if self._seen:
            skipped = any(bad for bad, _, _ in self._seen)
            self.applied_steps += not skipped
            if self._floor is not None:
                in_a_row = max(self._in_a_row.values(), default=0)
                self._floor.end_step(skipped=skipped, in_a_row=in_a_row, scale=self._seen[0][1])
        self._seen = []

    def _record(self, optimizer: torch.optim.Optimizer, seen: tuple[bool, float, float]) -> bool:
        """Count a step at this scale and return True if it must be skipped."""
        overflowed, scale, _ = seen
        self._seen.append(seen)
        if id(optimizer) not in self._in_a_row:
            self._in_a_row[id(optimizer)] = self._restored_in_a_row.pop(0) if self._restored_in_a_row else 0
        self._in_a_row[id(optimizer)] = self._in_a_row[id(optimizer)] + 1 if overflowed else 0
        self.num_steps += 1
        self.skipped_steps += overflowed
        self.last_step_skipped = overflowed
        low, high = self.scale_range or (scale, scale)
        self.scale_range = min(low, scale), max(high, scale)
        return overflowed

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Return one flag on the scale's device, with one host read for all devices and one decision for all ranks."""
        # Reimplemented for speed: torch 2.13 reads `param.grad` up to six times per parameter.
        if self.widen_gradients is not None:
            self.widen_gradients(optimizer)
        grouped = grouped_gradients(optimizer)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype in grouped):
            raise CompatibilityError(
                "loss_scale",
                "gradients to unscale are float16, in which they would underflow again",
                "add primary_weights, or keep the weights in float32 and let autocast run fp16",
            )
        home, found = inv_scale.device, found_inf
        flags, largest = {home: found_inf}, []
        with torch.no_grad():
            for (device, _), grads in grouped.items():
                flag, factor = flags.setdefault(device, found_inf.to(device)), inv_scale.to(device)
                if self._auto is None:
                    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, factor)
                else:
                    largest.append(unscale_with_largest_(grads, flag, factor).to(home))
        amax = torch.stack(largest).max() if largest else None
        for device, flag in flags.items():
            if device != home:
                found = found + flag.to(home, non_blocking=True)
        if world_size() > 1:
            # If only one rank saw an Inf after DDP's reduction, the weights would diverge.
            both = all_reduce_(torch.stack((found, found if amax is None else amax)), "max")
            found, amax = both[0], None if amax is None else both[1]
        if amax is not None:
            self._per_optimizer_states[id(optimizer)]["amax"] = (amax,)
        return {home: found} if grouped else {}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries, which GradScaler loads too, and the counters; empty if not enabled."""
        state = super().state_dict()
        if state:
            state |= {
                "num_steps": self.num_steps,
                "skipped_steps": self.skipped_steps,
                "skips_in_a_row": [*self._in_a_row.values(), *self._restored_in_a_row],
                "applied_steps": self.applied_steps,
                "scale_range": list(self.scale_range or ()),
            }
            if self._floor is not None:
                state["floor"] = self._floor.state_dict()
            if self._auto is not None:
                state["auto"] = self._auto.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of this class or of ``torch.amp.GradScaler``. A scale below the floor is raised to it.

        Raises:
            CheckpointError: If the saved scale is not a finite number.
            RuntimeError: If the state is empty: it was saved by a scaler that was not enabled.
        """
        if not self._enabled:
            return
        state = dict(state_dict)
        if state:
            if not 0 <= state["scale"] <= torch.finfo(torch.float32).max:
                raise CheckpointError(
                    "loss_scale",
                    f"the saved scale must be a finite number, got {state['scale']}",
                    "this run had diverged: resume from an earlier checkpoint",
                )
            self.num_steps = state.get("num_steps", 0)
            self.skipped_steps = state.get("skipped_steps", 0)
            self.applied_steps = state.get("applied_steps", self.num_steps - self.skipped_steps)
            if self._floor is not None:
                self._floor.load_state_dict(state.get("floor", {}))
            if self._auto is not None:
                self._auto.load_state_dict(state.get("auto", {}))
            state["scale"] = max(state["scale"], self.lowest_scale)
        super().load_state_dict(state)
        self._in_a_row = {}
        self._restored_in_a_row = list(state.get("skips_in_a_row", ()))
        low_high = state.get("scale_range") or None
        self.scale_range = (low_high[0], low_high[1]) if low_high else None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # a session's method and ids of optimizers are only valid in this process
        state["widen_gradients"] = None
        state |= {"_in_a_row": {}, "_restored_in_a_row": [*self._in_a_row.values(), *self._restored_in_a_row]}
        return state


def has_scaled_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the step unscales in its own kernel, in fp32. Only then may parameters be fp16."""
    # kernels that take the whole scaler would skip inside; they accept unscaled gradients too
    return getattr(optimizer, "_step_supports_amp_scaling", False) and (
        "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the step cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _coalesced(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    if grad is not None and grad.is_sparse and grad.dtype is torch.float16:
        # the sum of scaled fp16 values with the same index can overflow, so check the sums
        parameter.grad = grad = grad.coalesce()
    return grad._values() if grad is not None and grad.is_sparse else grad


def grouped_gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the values to unscale by device and dtype; for sparse gradients the stored values."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if not grads:
        return {}
    if any(map(attrgetter("is_sparse"), grads)):
        grads = [grad for parameter in parameters if (grad := _coalesced(parameter)) is not None]
    # torch's optimizers group in the same way; without None as input there is none in the result
    groups: Any = torch._C._group_tensors_by_device_and_dtype([grads], False)
    return {
        # torch's kernel supports only real numbers
        (device, dtype): [*map(torch.view_as_real, same)] if dtype.is_complex else same
        for (device, dtype), ((same,), _) in groups.items()
    }
