"""One pass over gradients against a float64 recount that sees values, not bits."""

import numpy as np
import pytest
import torch
from eff_kernels import loss_scaling
from eff_kernels.loss_scaling import count_magnitudes

INF, NAN = float("inf"), float("nan")


def recount(tensor, threshold):
    """Counts in float64, from magnitudes: np.frexp for the exponent, comparisons for the rest."""
    x = np.abs(tensor.detach().to(torch.float32).double().numpy().reshape(-1))
    histogram = np.zeros(256, dtype=np.int64)
    finite = x[np.isfinite(x)]
    exponent = np.frexp(finite)[1] - 1
    for power in range(-126, 128):
        histogram[power + 127] = int(((exponent == power) & (finite > 0)).sum())
    histogram[255] = len(x) - len(finite)
    histogram[0] = len(x) - histogram.sum()
    zeros = int((x == 0).sum())
    small = int(((x < np.float64(np.float32(threshold))) & (x > 0)).sum())
    return histogram.tolist(), zeros, small, float(finite.max()) if len(finite) else 0.0


def tensors():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(70_001, generator=generator) * torch.exp2(torch.randn(70_001, generator=generator) * 20)
    wide[::7] = 0
    special = torch.tensor(
        [0.0, -0.0, 2.0**-14, -(2.0**-14), 2.0**-24, 65504.0, 1e-45, -1e-40, 3.4e38, 1.5, INF, -INF, NAN]
    )
    return {
        "wide": wide,
        "special": special,
        "finite": torch.tensor([[2.0**-14 * (1 - 2.0**-24), 0.1], [-7.0, 3.0]]),
        "bfloat16": wide.bfloat16(),
        "float16": (wide[:1000]).half(),
        "float64": wide[:1000].double(),
        "transposed": wide[:1200].view(30, 40).T,
        "strided": wide[::3],
        "empty": torch.zeros(0, 3),
        "zeros": torch.zeros(5),
        "scalar": torch.tensor(-0.3),
        "nan": torch.full((3,), NAN),
    }


@pytest.mark.parametrize("path", ["cpu", "device"])
@pytest.mark.parametrize("threshold", [2.0**-14, 1e-3, 2.0**-126, 7.7e-12])
def test_every_count_equals_the_recount(path, threshold, monkeypatch):
    if path == "device":
        monkeypatch.setattr(loss_scaling, "_count_on_cpu", loss_scaling._count_on_device)
    named = tensors()
    counts = count_magnitudes(list(named.values()), threshold)
    for index, (name, tensor) in enumerate(named.items()):
        histogram, zeros, small, amax = recount(tensor, threshold)
        assert counts.histogram[index].tolist() == histogram, name
        assert (counts.zeros[index].item(), counts.small[index].item()) == (zeros, small), name
        assert counts.amax[index].item() == amax, name
        assert counts.histogram[index].sum() == tensor.numel()


def test_pieces_add_up(monkeypatch):
    whole = count_magnitudes([tensors()["wide"]], 1e-3)
    monkeypatch.setattr(loss_scaling, "_CPU_PIECE", 7)
    for one, other in zip(
        whole, count_magnitudes([tensors()["wide"][:5000], tensors()["wide"][5000:]], 1e-3), strict=True
    ):
        assert torch.equal(one.sum(0) if one.dtype == torch.int64 else one.amax(0),
                           other.sum(0) if other.dtype == torch.int64 else other.amax(0))  # fmt: skip


def test_nothing_is_changed_and_nothing_counts_as_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    before = weight.detach().clone()
    count_magnitudes([weight], 1.0)
    assert torch.equal(weight, before)
    assert [list(part.shape) for part in count_magnitudes([], 1.0)] == [[0, 256], [0], [0], [0]]


@pytest.mark.parametrize("threshold", [0.0, -1.0, INF, NAN, 2.0**-127, 1e-60])
def test_a_threshold_that_float32_does_not_hold_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold must be a normal float32 above 0"):
        count_magnitudes([torch.ones(1)], threshold)
