"""Codes: how wide this processor's kernels sum them exactly, and how far two computations of the same may differ.

Two kernels that sum floats in another order may round a value that lies near a tie to either of two neighboring codes.
So what lies behind a rounding is compared as codes: none moves by more than one, and few move.
"""

import torch
from eff_kernels.quantization.integer_linear import sums_exactly

WIDEST = {kernel: 8 if sums_exactly(kernel) else 7 for kernel in ("linear", "convolution", "matmul")}
"""Kernel -> the widest codes of weights whose sums it does not saturate here."""


def assert_codes_close(actual, expected, scale, max_flips=0.01, rtol=1e-2):
    """Compare what lies on grids of codes: few values differ by a code, none by more, and the others by rounding alone.

    Args:
        actual: Values of codes.
        expected: The same, of another computation.
        scale: Distance of neighboring codes; a number, or a tensor that broadcasts.
        max_flips: Largest share of the values whose code differs; one always may.
        rtol: Largest relative difference of the others: scales follow from sums too.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    scale = torch.as_tensor(scale, dtype=torch.float64).expand_as(expected)
    distance = (actual - expected).abs()
    flipped = distance > scale / 10
    assert bool((distance <= 1.1 * scale).all()), f"codes differ by {(distance / scale).max():.3g}"
    assert int(flipped.sum()) <= max(1, max_flips * flipped.numel()), f"{int(flipped.sum())} of {flipped.numel()} codes"
    rest = ~flipped
    torch.testing.assert_close(actual[rest], expected[rest], rtol=rtol, atol=1e-6)


def code_step(told, weight):
    """Return the largest distance of neighboring codes at each value of a baked weight.

    Args:
        told: Of the layer, by the technique's `ranges`.
        weight: Outputs first.
    """
    if "weight_scale" in told:
        return torch.tensor(told["weight_scale"]).view(-1, 1)
    rows = weight.unflatten(1, (-1, told["group_size"] or weight.shape[1]))
    largest = rows.abs().amax(-1, keepdim=True).expand_as(rows).reshape(weight.shape)
    codes = 2 ** told["weight_bits"] - 1
    steps = {"channel": largest / (codes // 2), "group": largest * 2 / codes, "fp8": largest / 8}
    return steps.get(told["weight"], largest)


def grid_step(weight):
    """Return the smallest distance of two values of each row: a code's step, or a few where a row has not all codes.

    Args:
        weight: Baked, with a scale for each output, outputs first.
    """
    rows = weight.detach().double().flatten(1).sort(1).values
    gaps, largest = rows.diff(dim=1), rows.abs().amax(1, keepdim=True)
    gaps = torch.where(gaps > 1e-4 * largest, gaps, torch.inf).amin(1, keepdim=True)
    return torch.where(gaps.isinf(), largest, gaps).view(-1, *[1] * (weight.dim() - 1))
