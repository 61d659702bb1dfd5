"""Measure one operation beside its peers on any device: agreement first, then time, bandwidth and memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from measure import MIB, Row, Spread, Times, in_turn, peak_allocated, ratio
from torch import Tensor
from torch.utils._pytree import tree_leaves

Call = Callable[[], Any]
FLUSHED = 512 << 20  # bytes, several times any L2
FEWEST, ROUNDS = 5, 50
GPU_SECONDS, CPU_SECONDS = 2.0, 1.0  # for all calls of a case
CYCLES, LONGEST_SLEEP = 1.98e9, 0.02  # of a Hopper's clock in a second; seconds


@dataclass(frozen=True)
class At:
    """Where the cases run, how large they are (0 for a GPU, 1 for a CPU, 2 to see that they run), and what compiles."""

    device: torch.device
    small: int = 0
    compiler: str = "inductor"
    """Backend of torch.compile; empty: no compiled peers."""

    def size(self, *sizes: int) -> int:
        """Return the size for a GPU, a CPU, a test."""
        return sizes[self.small]

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    def compiled(self, name: str, call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """Return the function under torch.compile as a peer."""
        return {name: torch.compile(call, backend=self.compiler, dynamic=False)} if self.compiler else {}


@dataclass(frozen=True)
class Case:
    """One operation at one size. A call returns what is compared; one that overwrites its inputs owns them."""

    name: str
    ours: Call
    peers: Mapping[str, Call]
    moved: int = 0
    """Bytes that one fused pass has to read and write."""
    flops: int = 0
    """Of the matrix products."""
    tolerance: float = 1e-2
    """Largest relative difference (of norms) from any peer."""
    unlike: tuple[str, ...] = ()
    """Peers whose numbers are others by design."""


def difference(ours: Any, peer: Any) -> float:
    """Return the largest relative difference, ``|a − b| / |b|`` in norms, of two results' tensors.

    Example:
        >>> difference((torch.ones(2),), [torch.tensor([1.0, 1.0])])
        0.0
    """
    apart = []
    for a, b in zip(_tensors(ours), _tensors(peer), strict=True):
        wide = b.double()
        apart.append(((a.to(b.device).double() - wide).norm() / wide.norm().clamp_min(1e-30)).item())
    return max(apart)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def usable_peers(case: Case, until: float = math.inf) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the peers that run here, warmed up, and why the others do not: from a time on, for want of time.

    Raises:
        RuntimeError: If a peer that runs gives other numbers than ours.
    """
    expected = _tensors(case.ours())
    usable, reasons = {}, {}
    for name, call in case.peers.items():
        if time.perf_counter() > until:
            reasons[name] = "no time was left"
            continue
        try:
            found = call()
        except Exception as error:  # a peer that this device, version or memory does not allow is a result
            reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
            continue
        if name not in case.unlike:
            apart = difference(expected, found)
            if not apart <= case.tolerance:
                raise RuntimeError(f"{case.name}: ours must agree with {name} within {case.tolerance}, got {apart:.3g}")
        usable[name] = call
    return usable, reasons


def timed(calls: Mapping[str, Call], device: torch.device, rounds: int, hosts: Mapping[str, float]) -> Times:
    """Return the seconds of each call, one entry a round: a GPU's by events, its L2 flushed before, or of CPU time."""
    if device.type != "cuda":
        return in_turn({name: _clocked(call) for name, call in calls.items()}, rounds=rounds, seconds=CPU_SECONDS)
    waste = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    times: Times = {name: [] for name in calls}
    names, start = list(calls), time.perf_counter()
    for i in range(rounds):
        if i >= FEWEST and time.perf_counter() - start > GPU_SECONDS:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            waste.zero_()
            # until the host has launched all of a call: what is timed is the device
            torch.cuda._sleep(int(CYCLES * min(LONGEST_SLEEP, 2 * hosts[name])))
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
    return times


def host_seconds(calls: Mapping[str, Call], device: torch.device) -> dict[str, float]:
    """Return what each call takes of the host, its waits for the GPU among it; on a CPU nothing."""
    found = {}
    for name, call in calls.items() if device.type == "cuda" else ():
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(FEWEST):
            call()
        found[name] = (time.perf_counter() - start) / FEWEST
    return found


def _clocked(call: Call) -> Callable[[], float]:
    def seconds() -> float:
        start = time.process_time()
        call()
        return max(time.process_time() - start, 1e-9)

    return seconds


def peak_of(call: Call, device: torch.device) -> int:
    """Return the largest number of bytes allocated during a call above those before it."""
    if device.type != "cuda":
        return peak_allocated(call)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class Ceilings:
    """The limits of the device: bytes a second of a copy, operations a second of a bfloat16 product."""

    bytes: float
    flops: float

    def text(self) -> str:
        product = f", {self.flops / 1e12:.1f} TFLOP/s in a bfloat16 product" if self.flops else ""
        return f"{self.bytes / 1e9:.0f} GB/s in a copy (read and written){product}"


def ceilings(at: At) -> Ceilings:
    """Measure a copy and, on a GPU, a square product of random numbers."""
    source = torch.randn(at.size(1 << 28, 1 << 26, 1 << 16), device=at.device)
    target, width = torch.empty_like(source), at.size(8192, 0, 64)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    if width:
        a, b = at.randn(width, width), at.randn(width, width)
        calls["product"] = lambda: a @ b
    for call in calls.values():
        call()
    found = timed(calls, at.device, at.size(ROUNDS, ROUNDS, 3), host_seconds(calls, at.device))
    best = {name: statistics.median(times) for name, times in found.items()}
    return Ceilings(2 * source.nbytes / best["copy"], 2 * width**3 / best["product"] if width else 0.0)


def measured(case: Case, at: At, best: Ceilings, until: float = math.inf) -> Row:
    """Return ours beside the peers that run here: time, share of what the device can do, paired ratios, memory."""
    peers, reasons = usable_peers(case, until)
    calls = {"ours": case.ours, **peers}
    peaks = {name: peak_of(call, at.device) for name, call in calls.items()}
    hosts = host_seconds(calls, at.device)
    times = timed(calls, at.device, at.size(ROUNDS, ROUNDS, 3), hosts)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    report = {name: f" (host {1e3 * found:.3f})" for name, found in hosts.items()}
    bound = Spread.of([1e3 * value for value in times["ours"]])
    shares = []
    if case.moved:
        shares.append(f"{case.moved / seconds['ours'] / best.bytes:.2f} of a copy")
    if case.flops and best.flops:
        shares.append(f"{case.flops / seconds['ours'] / best.flops:.2f} of a bf16 product")
    return Row(
        case.name,
        f"{bound.text(3)} ms{report.get('ours', '')}",
        "; ".join(
            [
                *(f"{name} {1e3 * seconds[name]:.3f} ms{report.get(name, '')}" for name in peers),
                *(f"{name}: {reason}" for name, reason in reasons.items()),
            ]
        ),
        "; ".join(f"{ratio(times, 'ours', name).text()} of {name}" for name in peers),
        f"{peaks['ours'] / MIB:.0f} MiB" + "".join(f", {name} {peaks[name] / MIB:.0f}" for name in peers),
        roofline=", ".join(shares),
    )


def row_of(make: Callable[[At], Case], at: At, best: Ceilings, until: float = math.inf) -> Row:
    """Make a case and return its row.

    Args:
        make: Makes the case.
        at: Where it runs.
        best: What the device does at best.
        until: The reading of `time.perf_counter` from which on no further peer is tried.
    """
    torch.compiler.reset()  # and free what a case before left
    if at.device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    return measured(make(at), at, best, until)
