"""The arithmetic of recipes beyond plain FP8: S2FP8, HFP8, MXFP4, NVFP4 and int16.

S2FP8: e5m2 after a shift and a squeeze of log2|x| that fit the tensor's own spread, without loss scaling. HFP8: one
8-bit format forward, another backward, loss scaling, 16-bit weights rounded stochastically. FP4: e2m1 elements with
scales along the contracted axis. int16: dynamic fixed point, one exponent a tensor, moved by how often the last step
overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_, rank, world_size
from shared_core.errors import CheckpointError, ConfigError
from shared_core.fp8.scaling import ROLES
from shared_core.numerics import FORMATS, mx_round_to, nvfp4_round_to, round_to, stochastic_round_


def mxfp4_cast(matrix: Tensor, role: str, record: bool = False) -> Tensor:
    """Return values rounded to MXFP4: 32 elements share a power of two. A block with NaN or infinity becomes NaN.

    Source: OCP Microscaling Formats (MX) 1.0; Rouhani et al. 2023, arXiv:2310.10537.
    """
    return _widened(mx_round_to(matrix, "fp4_e2m1"))


def nvfp4_cast(matrix: Tensor, role: str, record: bool = False) -> Tensor:
    """Return values rounded to NVFP4: 16 elements share an e4m3 scale, the matrix one from its current amax.

    A NaN or an infinity makes the whole matrix NaN. Rounded to nearest, without Hadamard transforms.

    Source: NVIDIA 2025, *Pretraining Large Language Models with NVFP4*, arXiv:2509.25149.
    """
    return nvfp4_round_to(matrix, per_tensor_scale=None)


_FORWARD, _BACKWARD, _SIXTEEN_BIT = "fp8_ibm", "fp8_e5m2", "fp16"


def hfp8_cast(matrix: Tensor, role: str, record: bool = False) -> Tensor:
    """Return values rounded to fp8_ibm (1, 4, 3, bias 11) for inputs and weights, to e5m2 for gradients, unscaled.

    Inputs and weights saturate at 15, which is large enough for them. Gradients beyond 57344 become
    infinite, so that the loss scaler sees the overflow. NaN and infinity are kept. Products accumulate
    in float32, while the paper accumulates chunks in 16 bits.

    Source: Sun et al. 2019, *Hybrid 8-bit Floating Point (HFP8) Training and Inference for Deep Neural Networks*,
    NeurIPS 32.
    """
    is_gradient = role == "gradient"
    return _widened(round_to(matrix, _BACKWARD if is_gradient else _FORWARD, saturate=not is_gradient))


def cast_16bit(matrix: Tensor, role: str, record: bool = False) -> Tensor:
    """Return values rounded to fp16, for the first and last layer of HFP8, which lose most accuracy with 8 bits.

    Gradients beyond 65504 become infinite. Inputs and weights saturate.
    """
    return _widened(round_to(matrix, _SIXTEEN_BIT, saturate=role != "gradient"))


def round_weights_(weights: Iterable[Tensor]) -> None:
    """Round weights to the nearest fp16 values in place, before training with `round_update_`."""
    with torch.no_grad():
        for weight in weights:
            _check(weight)
            weight.copy_(round_to(weight, _SIXTEEN_BIT))


def round_update_(weights: Iterable[Tensor], generator: torch.Generator) -> None:
    """Round weights stochastically to fp16 values in place, after each step, so that small updates are not lost.

    Weights are on the grid before the step. After it ``w = ulp·(⌊w/ulp⌋ + Bernoulli(frac(w/ulp)))``, whose mean is the
    updated weight. Unchanged weights stay. Ranks with equal weights, order and generators get equal weights. The
    paper's 16-bit format is (1, 6, 9). This is IEEE's (1, 5, 10).

    Source: Sun et al. 2019, NeurIPS 32; Gupta et al. 2015, arXiv:1502.02551.
    """
    for weight in weights:
        _check(weight)
        stochastic_round_(weight, weight, format=_SIXTEEN_BIT, generator=generator)


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _check(weight: Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.float64):
        # in 16 bits the optimizer has already rounded its updates to nearest and lost small ones
        raise ConfigError(
            "hfp8", f"weights must be float32 or float64, got {weight.dtype}", "load the model in float32"
        )


_MAX_EXPONENT = 15.0  # log2 of the largest power of two in e5m2
# Below this, m - µ is the rounding error of a mean over equal magnitudes (about 2^-41), not a spread.
_NO_SPREAD = 2.0**-32


class Squeezed(NamedTuple):
    """A tensor in S2FP8: ``x = sign(y)·(2^-beta·|y|)^(1/alpha)``."""

    values: Tensor
    alpha: Tensor
    beta: Tensor


def squeeze(x: Tensor) -> Squeezed:
    """Return ``|y| = 2^beta·|x|^alpha`` with the sign of x, rounded to e5m2.

    ``alpha = 15/(m - µ)`` and ``beta = -alpha·µ`` with µ and m the mean and the maximum of log2|x|: the mean of log2|y|
    is 0 and its maximum 15. If all magnitudes are equal, alpha is 1 and beta ``15 - m``. Zeros, NaN and infinities
    are not part of µ and m, and stay as they are.

    Source: Cambier et al. 2020, *Shifted and Squeezed 8-bit Floating Point Format for Low-Precision Training of Deep
    Neural Networks*, arXiv:2001.05674.
    """
    # float64 throughout: alpha, unbounded, multiplies the error of the logarithm.
    x = x.detach().double()
    used = x.isfinite() & (x != 0)
    log = x.abs().log2()
    known = torch.where(used, log, 0.0)
    mean = known.sum() / used.sum().clamp_min(1)
    largest = torch.where(used, log, -math.inf).amax() if x.numel() else torch.zeros_like(mean)
    largest = torch.where(largest.isfinite(), largest, 0.0)  # only zeros, NaN and infinities
    spread = largest - mean
    flat = spread <= _NO_SPREAD
    alpha = torch.where(flat, 1.0, _MAX_EXPONENT / spread.clamp_min(_NO_SPREAD))
    beta = torch.where(flat, _MAX_EXPONENT - largest, -alpha * mean)
    y = torch.where(used, (alpha * known + beta).exp2().copysign(x), x)
    return Squeezed(torch.where(used, round_to(y, "fp8_e5m2"), x), alpha, beta)


def unsqueeze(squeezed: Squeezed) -> Tensor:
    """Return the values of a tensor in S2FP8 in float64."""
    y, alpha, beta = squeezed
    used = y.isfinite() & (y != 0)
    log = torch.where(used, y, 1.0).abs().log2()
    return torch.where(used, ((log - beta) / alpha).exp2().copysign(y), y)


def s2fp8_cast(matrix: Tensor, role: str, record: bool = False) -> Tensor:
    """Return values rounded to S2FP8, with separate alpha and beta for each product."""
    values = unsqueeze(squeeze(matrix))
    return values if matrix.dtype == torch.float64 else values.float()


_UNKNOWN = -(2**30)  # marks a missing exponent
_SMALLEST, _LARGEST = -126, 112  # exponents for which the step is normal and codes are finite in float32
_BEYOND = FORMATS["int16"].qmax + 0.5  # in steps: magnitudes from here on round past the largest code
_ELEMENTS_PER_OVERFLOW = 10_000  # the paper's largest overflow rate, 0.01 %, as integers


def needed_exponent(x: Tensor) -> Tensor:
    """Return the smallest exponent e for which no finite element of ``x/2^e`` rounds past int16's largest code."""
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    amax = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    fraction, exponent = torch.frexp(amax)
    needed = exponent.long() - 15 + (fraction >= math.ldexp(_BEYOND, -15)).long()
    return torch.where(amax > 0, needed.clamp(_SMALLEST, _LARGEST), _UNKNOWN)


def fixed_point_round_to(x: Tensor, exponent: Tensor) -> Tensor:
    """Return ``2^e·clamp(round(x/2^e), -32768, 32767)``, halves to even. NaN and infinities are kept."""
    step = _step(exponent)
    return torch.where(x.isfinite(), round_to(x / step, "int16") * step, x)


def count_overflows(x: Tensor, needed: Tensor, exponent: Tensor) -> Tensor:
    """Return (needed exponent, elements, overflows, overflows of the doubled tensor, non-finite values) of a tensor.

    Example:
        >>> x = torch.tensor([1.0, 20000.0, -40000.0])
        >>> count_overflows(x, needed_exponent(x), torch.tensor(0)).tolist()
        [1, 3, 1, 2, 0]
    """
    finite = x.isfinite()
    steps = torch.where(finite, x.abs(), 0.0) / _step(exponent)
    elements = torch.full_like(needed, x.numel())
    overflows, of_double = (steps >= _BEYOND).sum(), (steps >= _BEYOND / 2).sum()
    return torch.stack([needed, elements, overflows, of_double, (~finite).any().long()])


class SharedExponentBank:
    """The exponents of all layers of a model, three per layer. A step costs one collective and a few ops.

    Forward and backward only count into the window. `take_window` joins the ranks and empties it. `commit` updates the
    exponents with it after the optimizer step was applied. A window that is never committed has no effect. With an
    overflow rate above 0.01 % an exponent rises by one. If the rate would stay within that with all values doubled, it
    falls by one. A row gets its first exponent from its first committed window. Until then each tensor is cast with
    the exponent that it needs, so nothing overflows at the start. Windows with only zeros, or with NaN or
    infinity, change nothing.

    Rows are plain attributes, not buffers, because DDP would overwrite the other ranks' windows with those of rank 0.

    Source: Courbariaux et al. 2014, *Training Deep Neural Networks with Low Precision Multiplications*,
    arXiv:1412.7024, algorithm 1; Das et al. 2018, *Mixed Precision Training of Convolutional Neural Networks using
    Integer Operations*, arXiv:1802.00930.
    """

    def __init__(self, num_layers: int) -> None:
        rows = num_layers * len(ROLES)
        self.observing = False
        self.num_updates = 0
        self.exponents = torch.full((rows,), _UNKNOWN, dtype=torch.int64)
        self.window = torch.tensor([[_UNKNOWN, 0, 0, 0, 0]]).repeat(rows, 1)
        self.overflows = torch.zeros(rows, dtype=torch.int64)  # of all applied steps

    def move_(self, device: torch.device) -> None:
        """Move all rows."""
        if device.type != "meta":
            for name in ("exponents", "window", "overflows"):
                setattr(self, name, getattr(self, name).to(device))

    def widen(self, layer: int, role: str, counts: Tensor) -> None:
        """Add the counts of a tensor from `count_overflows` to the current window."""
        row = self.window[layer * len(ROLES) + ROLES.index(role)]
        counts = counts.to(row)
        row.copy_(torch.cat([torch.maximum(row[:1], counts[:1]), row[1:] + counts[1:]]))

    def exponent(self, layer: int, role: str, device: torch.device) -> Tensor:
        """Return the exponent of the last applied step; far below every real one if there is none."""
        return self.exponents[layer * len(ROLES) + ROLES.index(role)].to(device)

    def take_window(self) -> Tensor:
        """Return the window of all ranks and start a new one; a collective."""
        # each rank adds its own slot, so that one collective carries sums and a maximum
        slots = self.window.new_zeros(world_size(), *self.window.shape)
        slots[rank()] = self.window
        slots = all_reduce_(slots, "sum")
        self.window.zero_()
        self.window[:, 0] = _UNKNOWN
        return torch.cat([slots[:, :, :1].amax(0), slots[:, :, 1:].sum(0)], 1)

    def commit(self, window: Tensor) -> None:
        """Update the exponents with a window. Rows with only zeros, or with NaN or infinity, stay as they are."""
        needed, elements, overflows, of_double, non_finite = window.unbind(1)
        rises = (overflows * _ELEMENTS_PER_OVERFLOW > elements).long()
        falls = (of_double * _ELEMENTS_PER_OVERFLOW <= elements).long()
        moved = (self.exponents + rises - falls).clamp(_SMALLEST, _LARGEST)
        after = torch.where(self.exponents == _UNKNOWN, needed, moved)
        usable = (needed != _UNKNOWN) & (non_finite == 0)
        self.exponents.copy_(torch.where(usable, after, self.exponents))
        self.overflows += overflows
        self.num_updates += 1

    def forget(self) -> None:
        """Forget the exponents, after weights were replaced."""
        self.exponents.fill_(_UNKNOWN)

    def state_dict(self) -> dict[str, Any]:
        """Return all rows, three for each layer in the order of the layers, and the number of applied steps."""
        return {
            "exponents": self.exponents.clone(),
            "window": self.window.clone(),
            "overflows": self.overflows.clone(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take saved rows."""
        rows = {name: state[name] for name in ("exponents", "window", "overflows")}
        num_updates = int(state["num_updates"])
        for name, saved in rows.items():
            own = getattr(self, name)
            if saved.shape != own.shape or saved.dtype != own.dtype:
                raise CheckpointError(
                    "fp8",
                    f"saved {name} must be {own.dtype} of shape {tuple(own.shape)}, got {saved.dtype} of "
                    f"{tuple(saved.shape)}",
                    "resume with the layers of the saved run",
                )
        for name, saved in rows.items():
            getattr(self, name).copy_(saved)
        self.num_updates = num_updates


class Int16Cast:
    """Casts operands to int16 with the exponent of their layer and role. Products accumulate in float32, not int32."""

    def __init__(self, bank: SharedExponentBank, index: int) -> None:
        self.bank, self.index = bank, index

    def __call__(self, matrix: Tensor, role: str, record: bool = False) -> Tensor:
        """Return values rounded to int16. NaN and infinities are kept."""
        x = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
        needed, shared = needed_exponent(x), self.bank.exponent(self.index, role, x.device)
        # before the first applied step there is no shared exponent
        exponent = torch.where(shared == _UNKNOWN, needed, shared)
        if record:
            self.bank.widen(self.index, role, count_overflows(x, needed, exponent))
        return fixed_point_round_to(x, exponent)


def _step(exponent: Tensor) -> Tensor:
    # built from bits, because exp2 of vector libraries is not exact at integers
    return ((exponent.clamp(_SMALLEST, _LARGEST).int() + 127) << 23).view(torch.float32)
