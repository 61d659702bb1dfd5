"""Measure the verbs of a session in a step of a plain loop at 100 tensors, beside the technique's own arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_core import Recipe, Session
from shared_core.distillation import kd_loss
from shared_core.distillation.mutual import mix
from shared_core.weight_clustering.clustering import put_values_, share_values, summed_by_code

TENSORS, WIDTH, BATCH = 100, 16, 4
# What was to be done once is done after a few steps: masks are made, ranges are known, averages are kept.
RECIPES: dict[str, dict[str, Any]] = {
    "matmul": {"precision": "high"},
    "low_rank": {"rank": 4, "force": True, "min_size": 1},
    "lora": {"rank": 2, "base": "none"},
    "primary_weights": {"kind": "fp32_copy"},
    "prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1},
    "cluster": {"bits": 3, "begin": 1, "min_size": 1},
    "qat": {"scheme": "int8", "begin": 0, "freeze_observers": 2},
    "fp8": {"recipe": "tensorwise"},
    "checkpointing": {"policy": "block", "include": ["*.linear"]},
    "activations": {"pack": "int8", "group_size": WIDTH, "min_size": 1},
    "distill": {"temperature": 2.0},
    "loss_scale": {"kind": "dynamic", "init_scale": 16.0},
    "average": {"kind": "ema", "decay": 0.9},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.linear(x).relu()


def network() -> nn.Sequential:
    """Return a model of 100 small tensors."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(TENSORS)))


class HostReads(TorchDispatchMode):
    """Counts what makes a host wait for its device."""

    WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.WAITING
        return func(*args, **(kwargs or {}))


class PlainLoop:
    """A training loop with one technique, or with an empty session.

    Args:
        key: Of the technique; empty for none.
    """

    def __init__(self, key: str = "") -> None:
        options = dict(RECIPES.get(key, {}))
        if key == "distill":
            options["teacher"] = network()
        dtype = torch.bfloat16 if key == "primary_weights" else torch.float32
        self._model = network().to(dtype)
        self._inputs = torch.randn(BATCH, WIDTH, dtype=dtype)
        self._session = Session(Recipe.from_dict({key: options} if key else {}))
        self._session.attach(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        scaling: Any = self._session.techniques.get("loss_scale")
        self._scaler = scaling.make_scaler("cpu") if scaling else torch.amp.GradScaler("cpu", enabled=False)
        self._session.begin([self._optimizer], total_steps=1_000_000)
        for _ in range(5):
            self.step()

    def step(self, watch: HostReads | None = None) -> float:
        """Return the CPU seconds of the verbs in one step.

        Args:
            watch: Sees the operators of the verbs; then nothing is timed.
        """
        nanoseconds = 0

        def run(verb: Callable[..., Any], *told: Any) -> Any:
            nonlocal nanoseconds
            if watch is not None:
                with watch:
                    return verb(*told)
            start = time.process_time_ns()
            result = verb(*told)
            nanoseconds += time.process_time_ns() - start
            return result

        surrounding = run(self._session.forward)
        run(surrounding.__enter__)
        loss = run(self._session.loss, self._model(self._inputs).float().square().mean())
        run(surrounding.__exit__, None, None, None)
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        run(self._before_step)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        run(self._after_step)
        self._optimizer.zero_grad()
        return nanoseconds / 1e9

    def _before_step(self) -> None:
        self._session.before_step()

    def _after_step(self) -> None:
        self._session.after_step()

    def host_reads(self) -> int:
        """Return how often the verbs of a step wait for what the device computes."""
        watch = HostReads()
        self.step(watch)
        return watch.count


class HandedOver(PlainLoop):
    """An empty session, and of torch's accessors those alone that handing gradients to float32 values takes.

    Gradients are read and set beside the values, and in the end read again on both sides, as somebody may have put in
    others, and cleared; versions are read before and after the step, which may write into the values alone.
    """

    def __init__(self) -> None:
        self._values, self._is_gone = [nn.Parameter(weight.detach()) for weight in network().parameters()], False
        super().__init__()

    def _before_step(self) -> None:
        super()._before_step()
        parameters = self._optimizer.param_groups[0]["params"]
        self._gradients = [parameter.grad for parameter in parameters]
        for value, gradient in zip(self._values, self._gradients, strict=True):
            value.grad = gradient
        self._versions = [parameter._version for parameter in parameters]

    def _after_step(self) -> None:
        super()._after_step()
        parameters = self._optimizer.param_groups[0]["params"]
        self._seen = [parameter._version for parameter in parameters], [parameter.grad for parameter in parameters]
        for value in self._values:
            self._is_gone |= value.grad is None
            value.grad = None


def timed(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start) / 1e9


def arithmetic(key: str) -> Callable[[], object]:
    """Return what a technique computes in its verbs, alone, on tensors of the same sizes; nothing for most of them.

    Arithmetic are the operations on the tensors' elements that the method's equations ask for, called on lists that
    are at hand, as the technique calls them: each costs a microsecond a tensor on a CPU however small the tensor is,
    and those that exist for lists (``torch._foreach_*``) a third of that. Bookkeeping is the rest: to find the tensors,
    to see what changed about them since the last step, to put them in lists, and the frame's own calls.

    What runs inside the layers' forward and backward (fake quantization, casts, the packing of saved tensors) is no
    verb and in neither: the benchmarks of those techniques measure it in whole steps.
    """
    tensors = [block.linear.weight.detach().clone() for block in network()]
    makers = {
        "prune": _masking, "cluster": _sharing, "average": _averaging, "primary_weights": _widening,
        "distill": _teaching,
    }  # fmt: skip
    return makers[key](tensors) if key in makers else lambda: None


def _masking(tensors: list[Tensor]) -> Callable[[], object]:
    masks = [tensor > 0 for tensor in tensors]
    return lambda: [apply_mask_(tensors, masks) for _ in ("gradients", "weights")]


def _sharing(tensors: list[Tensor]) -> Callable[[], object]:
    shared = share_values(torch.cat([tensor.view(-1) for tensor in tensors]), 8)
    codes, num_values = shared.codes.int(), len(shared.values)
    first = torch.arange(num_values)

    def share() -> None:
        gradient = torch.cat([tensor.view(-1) for tensor in tensors])
        sums = summed_by_code(gradient, codes, num_values)
        gradient.zero_().index_copy_(0, first, sums.float())
        torch._foreach_copy_(tensors, [part.view(WIDTH, WIDTH) for part in gradient.split(WIDTH**2)])
        weight = torch.cat([tensor.view(-1) for tensor in tensors])
        put_values_(weight, codes, weight.index_select(0, first))
        torch._foreach_copy_(tensors, [part.view(WIDTH, WIDTH) for part in weight.split(WIDTH**2)])

    return share


def _averaging(tensors: list[Tensor]) -> Callable[[], object]:
    return partial(torch._foreach_lerp_, [tensor.clone() for tensor in tensors], tensors, 0.1)


def _widening(tensors: list[Tensor]) -> Callable[[], object]:
    narrow, together = [tensor.bfloat16() for tensor in tensors], torch.cat(tensors)
    copies = list(together.split(WIDTH))

    def widen() -> None:
        rounded, weights = together.bfloat16(), torch.cat(narrow)
        torch.equal(rounded.view(torch.int16), weights.view(torch.int16))  # whether somebody else changed one
        torch._foreach_copy_(narrow, copies)

    return widen


def _teaching(tensors: list[Tensor]) -> Callable[[], object]:
    teacher, inputs, task = network(), torch.randn(BATCH, WIDTH), torch.ones((), requires_grad=True)

    def teach() -> None:
        student = torch.randn(BATCH, WIDTH, requires_grad=True)
        with torch.no_grad():
            logits = teacher(inputs)
        mix(task, kd_loss(student, logits, temperature=2.0), 0.5)

    return teach
