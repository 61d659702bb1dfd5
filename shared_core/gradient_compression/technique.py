"""Gradient compression as a technique, in DDP's communication hook or FSDP2's reduce-scatter."""
# No postponed annotations: DDP compares its hook's annotations with the classes themselves.

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shared_core.distributed.collectives import all_finite, any_rank, local_part, world_size
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.plan import Plan, Touched, trained
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.gradient_compression.config import CommConfig
from shared_core.gradient_compression.power_sgd import PowerSgd
from shared_core.printing import counted, size_text

# The name in torch 2.13, which warns about the earlier one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RoundedReduceScatter:
    """A reduce-scatter for FSDP2 that sums gradients and returns each process's shard, with torch's interface.

    Gradients are divided by the number of processes in 16 bits, as in DDP's hooks, so that both give the same sums.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        """The dtype to send in; None sends gradients unchanged."""
        self.step = {"gradients": 0, "sent": 0}
        """Since the last optimizer step: the bytes of the gradients and the bytes that this process sent."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Overwrite `output_tensor` with this process's shard of the inputs' sum or mean, as `op` says."""
        # 16-bit gradients are sent unchanged: a cast between fp16 and bf16 would only lose precision.
        narrow = self.dtype if self.dtype is not None and input_tensor.dtype.itemsize > 2 else input_tensor.dtype
        self.step["gradients"] += input_tensor.nbytes
        self.step["sent"] += input_tensor.numel() * narrow.itemsize
        if narrow == input_tensor.dtype:
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)  # type: ignore[no-any-return]
        sent = input_tensor.to(narrow)
        # Divided before the sum, because n fp16 gradients may sum to more than 65504 even if their mean does not.
        if op == dist.ReduceOp.AVG:
            sent, op = sent.div_(dist.get_world_size(group)), dist.ReduceOp.SUM
        received = torch.empty_like(output_tensor, dtype=narrow)
        _reduce_scatter(received, sent, op=op, group=group)
        # None means that FSDP2 need not wait: the copy back runs on the receiving stream.
        output_tensor.copy_(received)
        return None


def put_into(model: nn.Module) -> RoundedReduceScatter | None:
    """Install and return a reduce-scatter for the sharded modules of a model; None if none is sharded."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        return None
    # HSDP then all-reduces the shards in a call without a hook, which would send them in full.
    kept: Any = next((p for p in model.parameters() if is_sharded(p) and p.device_mesh.ndim > 1), None)  # type: ignore[attr-defined]
    if kept is not None:
        raise CompatibilityError(
            "comm",
            f"weights must be sharded over all processes, got {tuple(kept.placements)}: replicas are summed by "
            "another collective, which cannot be compressed",
            "shard without replicas (no HSDP), or leave comm out",
        )
    scatter = RoundedReduceScatter()
    for module in modules:
        try:
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        except ValueError as error:
            raise CompatibilityError("comm", f"FSDP2 did not accept a custom reduce-scatter: {error}") from error
    return scatter


_ROUNDED = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOST_DISCARDED = 50


class _Switch:
    """The hook that DDP calls for each bucket. DDP accepts only one hook ever, so this one can be redirected."""

    compress: Callable[[GradBucket], Future[Tensor]] | None = None


def _reduce(switch: _Switch, bucket: GradBucket) -> Future[torch.Tensor]:
    if switch.compress is not None:
        return switch.compress(bucket)
    return default_hooks.allreduce_hook(cast(Any, None), bucket)


class GradientCompression(Technique):
    """Sends gradients in 16 bits (DDP, FSDP2) or as low-rank products (DDP), and counts the bytes."""

    config: CommConfig

    def __init__(self, config: CommConfig) -> None:
        super().__init__(config)
        self.power_sgd: PowerSgd | None = None
        """State of powersgd; None before `begin` and with another hook."""
        self._switch: _Switch | None = None
        self._scatter: RoundedReduceScatter | None = None
        self._names: dict[Tensor, str] = {}
        self._first, self._is_active = 0, True
        self._step = {"gradients": 0, "sent": 0}
        self._last = self._total = dict(self._step)
        self._discarded = self._in_a_row = 0

    def attach(self, context: Context) -> Touched:
        """Raise if there is only one process, which sends nothing."""
        context.undo.callback(self._detach)
        context.windows[self.key] = self
        if world_size() < 2 and not context.is_preview:
            raise CompatibilityError(
                "comm",
                f"training must run in several processes under DDP or FSDP2, got {world_size()}",
                "start it with torchrun --nproc_per_node=2 (Lightning: Trainer(devices=2, strategy='ddp')), or leave "
                "comm out",
            )
        return trained(context.model)

    def plan(self, context: Context) -> Plan:
        """Return the step where compression starts."""
        if self.config.hook == "powersgd":
            self._first = context.resolve(self.config.begin, "comm.begin")
        return Plan([(self._first, f"gradients are sent as {self.config.hook}")])

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Register with the DDP module, or with the modules that FSDP2 sharded."""
        saved = state or {}
        if state is not None:  # from any number of processes
            self._total, self._last = dict(state["total"]), dict(state["last"])
            self._discarded = int(state["discarded"])
        wrapped = context.services.wrapped_model()
        self._scatter = None if wrapped is None else put_into(wrapped)
        if wrapped is not None and self._scatter is not None:
            # From the wrapped model, because FSDP2 has replaced parameters by sharded ones.
            self._names = {value: name for name, value in wrapped.named_parameters() if value.requires_grad}
            self._scatter.dtype, self._scatter.step = _DTYPES[self.config.hook], self._step
            return
        modules = wrapped.modules() if wrapped is not None else ()
        ddp: Any = next((module for module in modules if isinstance(module, DistributedDataParallel)), None)
        if ddp is None:
            raise CompatibilityError(
                "comm",
                f"model must be wrapped in DistributedDataParallel or sharded by FSDP2, got {type(wrapped).__name__}",
                "train with DDP; in your own loop pass Session(services=...) whose wrapped_model() returns "
                "the DDP module",
            )
        # DDP's buckets hold the parameters of its own module, so use that module's names.
        names = {parameter: name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
        self._names = names
        if self.config.hook == "powersgd":
            self.plan(context)
            parameters = {name: parameter for parameter, name in names.items()}
            # All processes must draw the same first Q, so the seed comes from the run's generator.
            self.power_sgd = PowerSgd(parameters, rank=self.config.rank, seed=context.generator.initial_seed() % 2**32)
            # Cloned, because errors change in place and others may use the loaded state.
            self.power_sgd.errors = {name: value.clone() for name, value in saved.get("errors", {}).items()}
            self.power_sgd.queries = dict(saved.get("queries", {}))
        self._is_active = context.step >= self._first
        self._switch = _switch_of(ddp)
        self._switch.compress = self._compress

    def _compress(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        self._step["gradients"] += buffer.nbytes
        if not self._is_active:
            self._step["sent"] += buffer.nbytes
            return default_hooks.allreduce_hook(cast(Any, None), bucket)
        if self.power_sgd is None:
            self._step["sent"] += 2 * buffer.numel()
            return _ROUNDED[self.config.hook](cast(Any, None), bucket)
        reduced, sent = self.power_sgd.reduce(bucket.parameters(), bucket.gradients())
        self._step["sent"] += sent
        # The hook's future must return the bucket's buffer, but the chain's own value is None.
        return cast("Future[Tensor]", reduced.then(functools.partial(_value, buffer)))

    def before_step(self, context: Context) -> None:
        """Discard a step if its gradients overflowed in fp16 on any process."""
        rule = remedy = ""
        if not self._step["gradients"]:
            rule = "gradients must be reduced in every step, but were not in this one"
            remedy = "leave DDP's no_sync() for the last micro-batch, or leave comm out"
        # Nothing was saved: gradients already were 16-bit.
        elif self._scatter is not None and self._step["sent"] == self._step["gradients"]:
            rule = (
                "FSDP2 must reduce gradients in float32 for comm to save anything, but its mixed precision "
                "(reduce_dtype) already reduces them in 16 bits"
            )
            remedy = "leave comm out, or set reduce_dtype to float32"
        if rule:
            raise TrainingError("comm", rule, remedy)
        self._last = dict(self._step)
        self._step.update(dict.fromkeys(self._step, 0))
        self._total = {name: total + self._last[name] for name, total in self._total.items()}
        if self.config.hook != "fp16" or not self._overflowed():
            self._in_a_row = 0
            return
        context.discard_step = True
        self._discarded += 1
        self._in_a_row += 1
        if self._in_a_row >= _MOST_DISCARDED:
            raise TrainingError(
                "comm",
                f"gradients must stay below 65504 with hook fp16, got infinity or NaN {_MOST_DISCARDED} times in a row",
                "use hook bf16, or lower the learning rate",
            )

    def _overflowed(self) -> bool:
        grads = [local_part(parameter.grad) for parameter in self._names if parameter.grad is not None]
        found = not all_finite(grads)
        # After DDP's all-reduce all processes hold the same gradients. Under FSDP2 each holds a shard.
        return found if self._scatter is None else any_rank(found, grads[0].device if grads else "cpu")

    def after_step(self, context: Context, applied: bool) -> None:
        """Start compression at its first step, and drop errors after a step with NaN or infinity."""
        if applied:
            self._is_active = context.step >= self._first
        elif self.power_sgd is not None:
            self.power_sgd.forget()

    def swapped(self, context: Context, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """Average the errors over all processes, so that only the main process's need saving."""
        if self.power_sgd is not None and purpose == "checkpoint":
            self.power_sgd.share_errors_()
        return contextlib.nullcontext()

    def _detach(self) -> None:
        """Stop compressing gradients."""
        if self._switch is not None:
            # DDP does not accept another hook, so the existing one passes gradients on unchanged.
            self._switch.compress = None
        if self._scatter is not None:
            self._scatter.dtype = None

    def finish(self, context: Context) -> None:
        """Stop compressing gradients. The weights need no conversion."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the errors, `Q` of the last step, and the counts."""
        state = {"total": dict(self._total), "last": dict(self._last), "discarded": self._discarded}
        if self.power_sgd is None:
            return state
        # Copied, because the next step changes the errors in place.
        errors = {name: value.clone() for name, value in self.power_sgd.errors.items()}
        return state | {"errors": errors, "queries": dict(self.power_sgd.queries)}

    def window_state(self) -> dict[str, Any]:
        """Return the bytes sent so far in the unfinished step."""
        return dict(self._step) if any(self._step.values()) else {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `window_state`."""
        self._step.update(state)

    def report(self) -> dict[str, Any]:
        """Return how many tensors were sent in which form, and the bytes that each process sent in collectives."""
        report: dict[str, Any] = {
            "hook": self.config.hook,
            "processes": world_size(),
            "tensors": len(self._names),
            "bytes_per_step": dict(self._last),
            "bytes": dict(self._total),
            "ratio": round(self._last["gradients"] / max(self._last["sent"], 1), 3),
        }
        if self.config.hook == "fp16":
            report["discarded_steps"] = self._discarded
        if self.power_sgd is not None:
            report |= {
                "begin": self._first,
                "low_rank_tensors": len(self.power_sgd.compressed),
                "error_bytes": sum(value.nbytes for value in self.power_sgd.errors.values()),
            }
        return report

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report as plain sentences, the result first. The report may come from a file."""
        step = report["bytes_per_step"]
        if not step.get("sent"):
            return [f"Sent nothing over {report['hook']}: {counted(report['processes'], 'process', 'processes')}."]
        discarded = report.get("discarded_steps")
        return [
            f"Each process sent {size_text(step['sent'])} a step instead of {size_text(step['gradients'])} "
            f"({report['ratio']:g} times less), with {report['hook']}.",
            *([f"{counted(discarded, 'step')} overflowed and were discarded."] if discarded else []),
        ]


def _value(buffer: Tensor, future: Future[Any]) -> Tensor:
    future.value()  # raises errors of earlier futures
    return buffer


def _switch_of(ddp: Any) -> _Switch:
    switch = getattr(ddp, "_eff_switch", None)
    if isinstance(switch, _Switch):
        return switch
    if ddp._comm_hooks:
        raise CompatibilityError(
            "comm",
            f"DDP must have no other communication hook, got {ddp._comm_hooks[0][0].__qualname__}",
            "remove one of the two",
        )
    switch = _Switch()
    ddp.register_comm_hook(switch, _reduce)
    ddp._eff_switch = switch
    return switch
