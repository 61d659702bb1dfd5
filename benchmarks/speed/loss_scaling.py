"""Measure what loss scaling adds to a step beside torch's GradScaler, and how often it waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from measure import Row, interleaved, main, milliseconds, ratio
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_core.loss_scaling import LossScaler

TARGET = 1.05


class Reads(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host; on an accelerator each would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[Reads]:
    """Count ``item``, ``bool``, ``float`` by their operator, ``tolist`` and ``numpy``, which have none, by name."""
    with contextlib.ExitStack() as stack:
        reads = stack.enter_context(Reads())
        for name in ("tolist", "numpy"):
            original = getattr(Tensor, name)

            def counted(tensor: Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                reads.count += 1
                return original(tensor, *args, **kwargs)

            stack.enter_context(mock.patch.object(Tensor, name, counted))
        yield reads


class LeastScaler:
    """Does what no scaler can leave out: it scales the loss, unscales the gradients once, reads the flag once."""

    def __init__(self) -> None:
        self._scale, self._flag = torch.tensor([65536.0]), torch.zeros(1)
        self._inverse, self._is_unscaled = self._scale.reciprocal(), False

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._flag, self._inverse)
        self._is_unscaled = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_unscaled:
            self.unscale_(optimizer)
        if not self._flag.item():
            optimizer.step()

    def update(self) -> None:
        self._is_unscaled = False


def step_of(width: int, depth: int, batch: int, scaler: Any, clip: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())][:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return step


def steps(width: int, depth: int, batch: int, *, clip: bool = False) -> dict[str, Callable[[], None]]:
    return {
        "plain": step_of(width, depth, batch, None, clip),
        "torch": step_of(width, depth, batch, torch.amp.GradScaler("cpu"), clip),
        "ours": step_of(width, depth, batch, LossScaler("cpu"), clip),
        "least": step_of(width, depth, batch, LeastScaler(), clip),
    }


def cost(width: int, depth: int, batch: int, *, clip: bool, rounds: int) -> Row:
    times = interleaved(steps(width, depth, batch, clip=clip), rounds=rounds, calls=10, warmup=5)
    ours, peer = ratio(times, "ours", "plain"), ratio(times, "torch", "plain")
    parameters = depth * width * (width + 1) / 1e6
    clipped = ", clipped by norm" if clip else ""
    return Row(
        f"loss scaling, one step, {parameters:.2f} M parameters in {2 * depth} tensors, batch {batch}{clipped} "
        f"(plain: {milliseconds(times, 'plain')})",
        milliseconds(times, "ours"),
        f"GradScaler {milliseconds(times, 'torch')}, {peer.text(3)}; one product, unscaling and read of a flag "
        f"{ratio(times, 'least', 'plain').text(3)}",
        ours.text(3),
        target=f"<= {TARGET}",
        met=ours.median <= TARGET,
    )


def host_reads() -> Row:
    reads = {}
    for name, step in steps(64, 8, 16).items():
        step()
        with counting() as counted:
            for _ in range(10):
                step()
        reads[name] = counted.count / 10
    ours, peer = reads["ours"] - reads["plain"], reads["torch"] - reads["plain"]
    return Row(
        f"loss scaling, values read by the host in a step (beside AdamW's own {reads['plain']:.0f})",
        f"{ours:g}",
        f"GradScaler {peer:g}",
        target="<= 1",
        met=ours <= 1,
    )


def measure(quick: bool) -> list[Row]:
    rounds = 5 if quick else 25
    return [
        cost(64, 32, 64, clip=False, rounds=rounds),
        cost(768, 4, 64, clip=False, rounds=rounds),
        cost(768, 4, 64, clip=True, rounds=rounds),
        host_reads(),
    ]


if __name__ == "__main__":
    main(measure)
