"""Convert pruned layers to sparse kernels: CSR and BSR on CPU if they are faster, 2:4 on GPUs that support it.

The break-even density of sparse and dense products is measured on this machine.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError, first_line
from shared_core.modules.matching import match_modules, replaced
from shared_core.tools.sparse_inference.layers import (
    Layout,
    SemiStructuredLinear,
    SparseLinear,
    compressor,
    has_two_four_kernels,
    two_four_obstacle,
)

DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_FEWEST, _MOST, _SECONDS = 3, 25, 0.1


@dataclass(frozen=True)
class SparseSpeed:
    """The speed of a sparse layer over the dense one, by density.

    Attributes:
        densities: Rising; the last is 0.5, or the first at which the sparse layer is slower.
        speedups: At each density, the median of paired ratios: dense seconds over sparse seconds.
        dense_seconds: Median time of one call of the dense layer.
        num_threads: Number of threads in the measurement.

    Example:
        >>> speed = SparseSpeed((0.01, 0.1), (4.0, 0.25), 1e-3, 1)
        >>> round(speed.break_even, 4), round(speed.at(0.01), 4)
        (0.0316, 4.0)
    """

    densities: tuple[float, ...]
    speedups: tuple[float, ...]
    dense_seconds: float
    num_threads: int

    @property
    def break_even(self) -> float:
        """The density at which both are equally fast; 0 if sparse is never faster, at most the last measured."""
        # Densities rise, speed-ups fall. Not faster at the lowest density: never.
        if self.speedups[0] <= 1:
            return 0.0
        for i in range(1, len(self.densities)):
            if self.speedups[i] <= 1:
                # Log-linear between two measured densities: the point where the logarithm of the speed-up is 0.
                above, below = math.log(self.speedups[i - 1]), math.log(self.speedups[i])
                return _between(self.densities[i - 1], self.densities[i], above / (above - below))
        return self.densities[-1]

    def at(self, density: float) -> float:
        """Return the speed-up at a density, interpolated between the logarithms of those measured."""
        if density <= self.densities[0]:
            return self.speedups[0]
        for i in range(1, len(self.densities)):
            if density <= self.densities[i]:
                # Speed is about a power of density: straight in logarithms.
                low, high = math.log(self.densities[i - 1]), math.log(self.densities[i])
                part = (math.log(density) - low) / (high - low)
                return _between(self.speedups[i - 1], self.speedups[i], part)
        return self.speedups[-1]


def _between(low: float, high: float, part: float) -> float:
    return math.exp((1 - part) * math.log(low) + part * math.log(high))


def measure_sparse_speed(
    num_outputs: int,
    num_inputs: int,
    *,
    batch: int = 1,
    layout: Layout = "csr",
    block: int | None = None,
    dtype: torch.dtype = torch.float32,
    densities: tuple[float, ...] = DENSITIES,
    clock: Callable[[], float] = time.perf_counter,
) -> SparseSpeed:
    """Return the speed of a sparse linear layer of this shape relative to dense, with torch's current threads.

    Random weights of rising density are measured, dense and sparse in turn, until sparse is slower: at least three
    calls each, for about 0.1 seconds. Results are cached.

    Args:
        num_outputs: Rows of the weight.
        num_inputs: Columns of the weight.
        batch: Rows of the input: sequences times positions.
        layout: ``csr`` or ``bsr``.
        block: Side of a square ``bsr`` block, which divides the shape.
        dtype: Of weight and input.
        densities: Densities to measure, rising; for ``bsr`` the share of blocks.
        clock: ``time.process_time`` excludes other programs, but adds up threads.

    Raises:
        ConfigError: If `batch` is less than 1, or a block does not divide the shape.
    """
    checked(batch, int, "sparse_layers", "batch", low=1)
    checked(layout, Layout, "sparse_layers", "layout")
    if layout == "bsr" and (block is None or block < 1 or num_outputs % block or num_inputs % block):
        raise ConfigError("sparse_layers", f"block must divide {num_outputs} and {num_inputs}, got {block}")
    return _measured(
        num_outputs, num_inputs, batch, layout, block, dtype, tuple(densities), clock, torch.get_num_threads()
    )


@functools.cache
def _measured(
    num_outputs: int, num_inputs: int, batch: int, layout: Layout, block: int | None, dtype: torch.dtype,
    densities: tuple[float, ...], clock: Callable[[], float], num_threads: int,
) -> SparseSpeed:  # fmt: skip
    # Cached by shape, threads and dtype: a model has many layers of one shape, and a measurement takes a second.
    generator = torch.Generator().manual_seed(0)
    dense = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = nn.Parameter(torch.zeros(num_outputs, dtype=dtype), requires_grad=False)
    dense.weight, dense.bias = nn.Parameter(weight.to(dtype), requires_grad=False), bias
    x = torch.randn(batch, num_inputs, generator=generator).to(dtype)
    side = block or 1
    tiles = torch.rand(num_outputs // side, num_inputs // side, generator=generator)

    speedups: list[float] = []
    seconds: list[float] = []
    with torch.inference_mode():
        for density in densities:
            # Keep or drop whole blocks, as block pruning does.
            keep = (tiles < density).repeat_interleave(side, 0).repeat_interleave(side, 1)
            sparse = SparseLinear((weight * keep).to(dtype), bias, layout, block)
            dense_seconds, sparse_seconds = _in_turn(dense, sparse, x, clock)
            seconds += dense_seconds
            # The median of quotients, each of two runs after one another: a machine that is busy slows both.
            speedups.append(statistics.median(a / b for a, b in zip(dense_seconds, sparse_seconds, strict=True)))
            # Denser ones are slower still.
            if speedups[-1] <= 1:
                break
    return SparseSpeed(densities[: len(speedups)], tuple(speedups), statistics.median(seconds), num_threads)


def _in_turn(
    dense: nn.Module, sparse: nn.Module, x: Tensor, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    # The first call of each builds buffers.
    dense(x), sparse(x)
    spent = 0.0
    # In turn, so that clocks and caches are the same for both.
    while len(times[0]) < _FEWEST or (spent < _SECONDS and len(times[0]) < _MOST):
        for layer, its_times in zip((dense, sparse), times, strict=True):
            start = clock()
            layer(x)
            # a clock that has not moved must not divide by zero
            its_times.append(max(clock() - start, 1e-9))
            spent += its_times[-1]
    return times


BLOCKS = (32, 16, 8, 4)
"""Sides of square blocks that are tried by default, largest first."""
_PADDING = 1.25


@dataclass(frozen=True)
class LayerChoice:
    """The result for one linear layer.

    Attributes:
        name: Name of the module.
        shape: Outputs and inputs.
        density: Share of the weights that are not zero.
        layout: ``csr``, ``bsr``, ``2:4``, or ``dense`` if it was not converted.
        why: Why a layer stayed dense.
        stored_density: For ``bsr``: share of the weights that are stored, including zeros in kept blocks.
        break_even: Stored density below which the layout is faster: measured, or `max_density`.
        speedup: Measured at this density, dense time over sparse time.
    """

    name: str
    shape: tuple[int, int]
    density: float
    layout: Literal["csr", "bsr", "2:4", "dense"]
    why: str = ""
    stored_density: float | None = None
    break_even: float | None = None
    speedup: float | None = None


def sparse_layers(
    model: nn.Module,
    *,
    layout: Literal["auto", "csr", "bsr"] = "auto",
    batch: int = 1,
    max_density: float | None = None,
    block: int | None = None,
    include: Iterable[str] = (),
    skip: Iterable[str] = (),
) -> list[LayerChoice]:
    """Make the linear layers sparse that are faster so, for inference on CPU, and return the choice for each.

    Whether a sparse product is faster depends on density, shape, batch and machine. It is measured here, once per shape
    (`measure_sparse_speed`), with torch's current threads. A layer at or above the break-even density stays
    dense. The model is changed in place. It saves and loads the dense model's state dict.

    Args:
        model: On CPU, holding other modules; for inference.
        layout: ``csr``; ``bsr`` for weights pruned in blocks; ``auto`` for the faster.
        batch: Rows of a layer's input at inference: sequences times positions.
        max_density: Convert below this density without measuring, in (0, 1].
        block: Side of BSR's square blocks; by default the largest of 4 to 32 that contain few zeros.
        include: Only layers of these names (globs), or ``first``, ``last``.
        skip: Leave out layers of these names.

    Raises:
        ConfigError: If an option breaks its rule, or `model` is itself a linear layer.
        MatchError: If there is no linear layer.
        CompatibilityError: If a layer is not on CPU.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> with torch.no_grad():
        ...     net[0].weight.mul_(torch.eye(64))[0, 1] = 1.0
        >>> [(choice.layout, choice.why) for choice in sparse_layers(net, layout="csr", max_density=0.1)]
        [('csr', ''), ('dense', 'density 1 is not below 0.1')]
    """
    checked(layout, Literal["auto", "csr", "bsr"], "sparse_layers", "layout")
    checked(batch, int, "sparse_layers", "batch", low=1)
    checked(max_density, float | None, "sparse_layers", "max_density", above=0, high=1)
    checked(block, int | None, "sparse_layers", "block", low=1)
    found = _linears(model, "sparse_layers", include, skip, lambda device: device.type == "cpu")
    choices: list[LayerChoice] = []
    made: dict[nn.Module, nn.Module] = {}
    for name, module, why in found:
        weight = module.weight.detach()
        # Weights that are zero, however they were masked.
        density = int(weight.count_nonzero()) / weight.numel()
        shape = (module.out_features, module.in_features)
        if why:
            choices.append(LayerChoice(name, shape, density, "dense", why))
            continue
        forms: tuple[Layout, ...] = ("csr", "bsr") if layout == "auto" else (layout,)
        candidates = [_candidate(name, weight, form, density, batch, max_density, block) for form in forms]
        able = [choice for choice in candidates if choice.layout != "dense"]
        # Without a measurement (max_density given) all that fit are equal.
        best = max(able, key=lambda choice: choice.speedup or 1.0) if able else candidates[0]
        choices.append(best)
        if best.layout != "dense":
            size = _block(weight, block) if best.layout == "bsr" else None
            sparse = SparseLinear(weight, module.bias, "csr" if size is None else "bsr", size)
            made[module] = sparse.train(module.training)
    replaced(model, made)
    return choices


def _candidate(
    name: str, weight: Tensor, layout: Layout, density: float, batch: int, max_density: float | None,
    block: int | None,
) -> LayerChoice:  # fmt: skip
    """Return this layout's choice, or dense and the reason."""
    shape = (weight.shape[0], weight.shape[1])
    stored, size = density, None
    if layout == "bsr":
        size = _block(weight, block)
        if size is None:
            return LayerChoice(name, shape, density, "dense", "its zeros do not fill blocks of 4 to 32; take csr")
        if shape[0] % size or shape[1] % size:
            return LayerChoice(name, shape, density, "dense", f"blocks of {size}x{size} do not divide its shape")
        # A block is stored whole: zeros in it cost as much as weights.
        stored = float(_tiles(weight, size).float().mean())
    speed: SparseSpeed | None = None
    if max_density is None:
        try:
            speed = measure_sparse_speed(*shape, batch=batch, layout=layout, block=size, dtype=weight.dtype)
        except (RuntimeError, NotImplementedError) as error:
            why = f"torch has no {layout} product here: {first_line(error)}"
            return LayerChoice(name, shape, density, "dense", why)
    limit = speed.break_even if speed else cast("float", max_density)
    speedup = speed.at(stored) if speed else None
    why = ""
    # not <, so that NaN keeps the layer dense.
    if not stored < limit:
        why = f"density {stored:.3g} is not below {limit:.3g}" + (f", where {layout} breaks even" if speed else "")
    return LayerChoice(name, shape, density, "dense" if why else layout, why, stored, limit, speedup)


def _tiles(weight: Tensor, block: int) -> Tensor:
    rows, columns = weight.shape[0] // block, weight.shape[1] // block
    return weight.ne(0).reshape(rows, block, columns, block).any(3).any(1)


def _block(weight: Tensor, block: int | None) -> int | None:
    """Return the requested block, or the largest that stores few zeros; None if there is none."""
    if block is not None:
        return block
    num_live = int(weight.count_nonzero())
    for size in BLOCKS:
        if weight.shape[0] % size == 0 and weight.shape[1] % size == 0:
            stored = int(_tiles(weight, size).count_nonzero()) * size * size
            # Larger blocks multiply faster, if they store at most a quarter more.
            if stored <= _PADDING * num_live:
                return size
    return None


def to_semi_structured(model: nn.Module, *, include: Iterable[str] = (), skip: Iterable[str] = ()) -> list[LayerChoice]:
    """Run linear layers with a 2:4 pattern on sparse tensor cores, and return the choice for each.

    Half of the products are skipped: at most twice as fast, for large products (Mishra et al. 2021,
    arXiv:2104.08378). Train the pattern with ``prune: {granularity: n_m, sparsity: 0.5, n_m: "2:4"}``. The model is
    changed in place. It saves and loads the dense model's state dict.

    Args:
        model: In float16 or bfloat16 on an NVIDIA GPU of compute capability 8.0 or newer; for inference.
        include: Only layers of these names (globs), or ``first``, ``last``.
        skip: Leave out layers of these names.

    Raises:
        CompatibilityError: If the device has no 2:4 products.
        ConfigError: If `model` is itself a linear layer.
        MatchError: If there is no linear layer.
    """
    found = _linears(model, "to_semi_structured", include, skip, has_two_four_kernels)
    choices: list[LayerChoice] = []
    made: dict[nn.Module, nn.Module] = {}
    for name, module, left in found:
        weight = module.weight.detach()
        compress, backend = compressor()
        why = left or two_four_obstacle(weight, backend)
        if not why:
            try:
                made[module] = _checked(module, compress).train(module.training)
            except (RuntimeError, NotImplementedError) as error:
                why = f"torch refused it: {first_line(error)}"
        density = int(weight.count_nonzero()) / weight.numel()
        shape = (module.out_features, module.in_features)
        choices.append(LayerChoice(name, shape, density, "dense" if why else "2:4", why))
    replaced(model, made)
    return choices


@torch.no_grad()
def _checked(module: nn.Linear, compress: Callable[[Tensor], Tensor]) -> SemiStructuredLinear:
    """Return the layer on the GPU's kernel, after checking one product against the dense one."""
    layer = SemiStructuredLinear(module.weight, module.bias, compress)
    generator = torch.Generator(device=module.weight.device).manual_seed(0)
    # Drawn in float32 and rounded: the same probe for both 16-bit formats.
    probe = torch.randn(
        32, module.in_features, generator=generator, device=module.weight.device, dtype=torch.float32
    ).to(module.weight.dtype)
    expected, result = module(probe).float(), layer(probe).float()
    error, scale = float((result - expected).norm()), float(expected.norm())
    # both round to 16 bits once or twice: relative 2^-8 for bfloat16; a wrong product is off by its own size
    if not error <= 0.02 * scale + 1e-6:
        raise RuntimeError(f"its product differs from the dense one by {error / max(scale, 1e-30):.2g}")
    return layer


_DEVICES = {
    "sparse_layers": ("the CPU", "move it with model.cpu(), or prune 2:4 and take to_semi_structured on an NVIDIA GPU"),
    "to_semi_structured": ("an NVIDIA GPU of compute capability 8.0 or newer", "torch has no 2:4 product elsewhere"),
}


def _linears(
    model: nn.Module, where: str, include: Iterable[str], skip: Iterable[str], able: Callable[[torch.device], bool]
) -> list[tuple[str, nn.Linear, str]]:
    """Return name, layer, and the reason why it must stay as it is, if any."""
    if isinstance(model, nn.Linear):
        raise ConfigError(where, "model must hold its layers, got a linear layer itself", "wrap it in nn.Sequential")
    holders: dict[Tensor, int] = {}
    # A weight shared by two modules would be stored twice as sparse.
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[parameter] = holders.get(parameter, 0) + 1
    fused = {
        part
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for part in (module.linear1, module.linear2)
    }
    linears = []
    for found in match_modules(model, (nn.Linear,), where=where, include=include, skip=skip):
        module = cast("nn.Linear", found.module)
        if not able(module.weight.device):
            place, remedy = _DEVICES[where]
            rule = f"model must be on {place}, got {found.name} on {module.weight.device}"
            raise CompatibilityError(where, rule, remedy)
        why = ""
        if type(module) is not nn.Linear:
            why = f"{type(module).__name__} computes its weight itself, or is used in another way"
        elif module in fused:
            why = "nn.TransformerEncoderLayer has a fused product of its weight at inference"
        elif holders.get(module.weight, 0) > 1:
            why = "its weight is shared with another module"
        elif module._forward_hooks or module._forward_pre_hooks:
            why = "it has hooks, which would be lost"
        elif not module.weight.is_floating_point():
            why = f"not floating point ({module.weight.dtype})"
        linears.append((found.name, module, why))
    return linears
