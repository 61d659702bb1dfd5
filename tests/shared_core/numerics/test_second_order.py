"""SparseGPT's and GPTQ's solver: the papers' update column by column in float64, what it gains, and poor inputs."""

import pytest
import torch

from shared_core.errors import ConfigError, TrainingError
from shared_core.numerics.second_order import compensated


def layer(outputs=5, inputs=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator, dtype=dtype)
    x = torch.randn(inputs, 300, generator=generator, dtype=dtype)
    return torch.randn(outputs, inputs, generator=generator, dtype=dtype), mix @ x


def rounded(values, column):
    return (values * 4).round() / 4


def by_paper(weight, hessian, prune, order, rounding):
    """OBS: the inverse Hessian of the columns still free, from which each finished column is eliminated."""
    weight, n = weight.clone(), len(hessian)
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(n, dtype=hessian.dtype))
    kept = torch.ones_like(weight, dtype=torch.bool)
    for place, j in enumerate(order):
        prune(weight, inverse, kept, j)
        value = torch.where(kept[:, j], rounding(weight[:, j], j), 0.0)
        free = order[place:]
        error = (weight[:, j] - value) / inverse[j, j]
        weight[:, free] -= error[:, None] * inverse[j, free]
        weight[:, j] = value
        inverse = inverse - inverse[:, [j]] @ inverse[[j], :] / inverse[j, j]
    return weight, kept


def nothing(weight, inverse, kept, j):
    pass


def two_of_four(weight, inverse, kept, j):
    if j % 4 == 0:
        each, scores = inverse, []
        for k in range(j, j + 4):  # by the curvature that a column has once those before it are done
            scores.append(weight[:, k] ** 2 / each[k, k])
            each = each - each[:, [k]] @ each[[k], :] / each[k, k]
        kept[:, j : j + 4].scatter_(1, torch.stack(scores, 1).argsort(1)[:, :2], False)


@pytest.mark.parametrize(
    ("options", "prune", "rounding"),
    [
        ({"n_m": (2, 4)}, two_of_four, lambda values, column: values),
        ({"grid": rounded}, nothing, rounded),
        ({"grid": rounded, "actorder": True}, nothing, rounded),
        ({"grid": rounded, "n_m": (2, 4)}, two_of_four, rounded),
    ],
    ids=["n_m", "gptq", "actorder", "joint"],
)
def test_it_is_the_papers_update(options, prune, rounding):
    weight, x = layer()
    hessian = x @ x.T
    order = hessian.diagonal().argsort(descending=True).tolist() if "actorder" in options else list(range(12))
    wanted, mask = by_paper(weight, hessian, prune, order, rounding)
    new, kept = compensated(weight, hessian, **options)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inputs", [64, 300])  # also more than one lazy update
def test_the_output_is_nearer_than_with_magnitude_or_rounding(inputs):
    weight, x = layer(16, inputs, dtype=torch.float32)
    hessian = x @ x.T

    def error(new):
        return ((new - weight) @ x).square().sum()

    pruned, kept = compensated(weight, hessian, sparsity=0.5)
    cut = weight.abs() >= weight.abs().flatten().median()
    assert error(pruned) < 0.9 * error(weight * cut)
    assert not pruned[~kept].any()
    assert (~kept).sum() == weight.numel() // 2
    pruned, kept = compensated(weight, hessian, n_m=(2, 4))
    assert (kept.view(16, -1, 4).sum(2) == 2).all()
    assert not pruned[~kept].any()
    for actorder in (False, True):
        new, _ = compensated(weight, hessian, grid=rounded, actorder=actorder)
        assert error(new) < 0.5 * error(rounded(weight, 0))
        assert torch.equal(new, rounded(new, 0))
    again, _ = compensated(pruned, hessian, grid=rounded)
    assert not again[pruned == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_that_say_little_still_give_a_solution(dtype):
    weight, x = layer(8, 16, dtype=torch.float32)
    x[3] = 0
    x[5] = x[4]
    few = x[:, :2]  # of rank 2
    for inputs in (x, few, torch.zeros_like(x), 1e-18 * x, 1e16 * x):
        new, kept = compensated(weight.to(dtype), inputs @ inputs.T, sparsity=0.25)
        assert new.dtype == dtype
        assert new.isfinite().all()
        assert (~kept).sum() == 32
    new, kept = compensated(weight, x @ x.T, sparsity=1 / 16)
    assert not kept[:, 3].any()
    assert kept.sum() == 8 * 15
    with pytest.raises(TrainingError, match="hessian must be finite"):
        compensated(weight, torch.full((16, 16), torch.nan), sparsity=0.5)
    with pytest.raises(ConfigError, match="actorder cannot be combined"):
        compensated(weight, x @ x.T, sparsity=0.5, actorder=True)
