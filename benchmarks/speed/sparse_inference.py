"""Linear layers stored sparse beside dense ones: from which density on they are faster, by shape and batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from measure import Row, interleaved, main, milliseconds, ratio
from torch import nn

from shared_core.pruning import prune_masks
from shared_core.tools.sparse_inference.convert import SparseSpeed, measure_sparse_speed, sparse_layers

BATCHES = (1, 16, 256)
BLOCK = 16


def layer(size: int, batch: int, clock: Callable[[], float], dtype: torch.dtype = torch.float32) -> Row:
    how = {"batch": batch, "dtype": dtype, "clock": clock}
    csr = measure_sparse_speed(size, size, **how)
    bsr = measure_sparse_speed(size, size, layout="bsr", block=BLOCK, **how)
    kind = "" if dtype == torch.float32 else f" in {dtype}".replace("torch.", "")
    return Row(
        f"sparse inference, {size} x {size}{kind}, batch {batch} (dense: {1e3 * csr.dense_seconds:.3g} ms), "
        "break-even density, speed-up at densities",
        f"CSR {told(csr)}",
        f"BSR {BLOCK}x{BLOCK} {told(bsr)}",
    )


def told(speed: SparseSpeed) -> str:
    limit = f"{'>= ' if speed.speedups[-1] > 1 else ''}{100 * speed.break_even:.2g} %"
    pairs = zip(speed.densities, speed.speedups, strict=True)
    return f"{limit}; " + ", ".join(f"{100 * density:g} %: {speedup:.2g}x" for density, speedup in pairs)


def model(width: int, depth: int, sparsity: float, batch: int, rounds: int) -> Row:
    """Measure a pruned model before and after `sparse_layers`: it must never be slower."""
    torch.manual_seed(0)
    dense = nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]).eval()
    weights = [module.weight for module in dense if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for weight, mask in zip(weights, prune_masks([weight.abs() for weight in weights], sparsity), strict=True):
            weight.mul_(mask)
    sparse = copy.deepcopy(dense)
    choices = sparse_layers(sparse, layout="csr", batch=batch)
    x = torch.randn(batch, width)
    with torch.inference_mode():
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-4, atol=1e-5)
        times = interleaved({"dense": lambda: dense(x), "ours": lambda: sparse(x)}, rounds=rounds, warmup=2)
    ours = ratio(times, "ours", "dense")
    taken = sum(choice.layout != "dense" for choice in choices)
    return Row(
        f"sparse inference, {depth} layers of {width}, {100 * (1 - sparsity):g} % of the weights left, batch {batch}: "
        f"{taken} of {depth} converted",
        milliseconds(times, "ours"),
        f"dense {milliseconds(times, 'dense')}",
        ours.text(3),
        target="<= 1.05",
        met=ours.median <= 1.05,
    )


def measure(quick: bool, threads: int = 1, more: int = 0) -> list[Row]:
    torch.set_num_threads(threads)
    # processor time of one thread leaves other programs out; of several it would be added up
    clock = time.process_time if threads == 1 else time.perf_counter
    sizes = (64, 128) if quick else (256, 1024, 4096)[: 3 if more else 2]
    rows = [layer(size, batch, clock) for size in sizes for batch in BATCHES]
    rows += [layer(sizes[1], batch, clock, torch.bfloat16) for batch in BATCHES]
    if threads == 1:
        shares = (0.5, 0.95) if quick else (0.5, 0.9, 0.95, 0.98)
        width, depth, rounds = (64, 2, 3) if quick else (1024, 4, 15)
        rows += [model(width, depth, sparsity, 16, rounds) for sparsity in shares]
    return rows


if __name__ == "__main__":
    main(measure, threads=1, more=0)
