"""k-means on a line, shared values, and the gradient of a centroid, against plain float64 references."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import ConfigError, TrainingError
from shared_core.weight_clustering import clustering as kmeans
from shared_core.weight_clustering import kmeans_1d, share_values
from shared_core.weight_clustering.clustering import summed_by_code

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def clusters_of(ordered, num_clusters):
    centroids, thresholds = kmeans_1d(ordered, num_clusters)
    return centroids, np.searchsorted(thresholds, ordered, side="right")


def cost(ordered, centroids, assigned):
    return float(np.square(ordered - centroids[assigned]).sum())


def best_cost(ordered, num_clusters):
    """The least cost over all partitions into runs, which on a line are the only ones that can be best."""
    best = np.inf
    for inner in itertools.combinations(range(1, len(ordered)), num_clusters - 1):
        runs = np.split(ordered, inner)
        best = min(best, sum(float(np.square(run - run.mean()).sum()) for run in runs))
    return best


def plain_lloyd(values, num_clusters):
    """Lloyd's iterations as the paper has them: every value to its nearest centroid, every centroid to its mean."""
    centroids = np.linspace(values.min(), values.max(), num_clusters)
    while True:
        assigned = np.abs(values[:, None] - centroids).argmin(1)
        moved = np.array([values[assigned == i].mean() if (assigned == i).any() else centroids[i]
                          for i in range(num_clusters)])  # fmt: skip
        if np.array_equal(moved, centroids):
            return centroids, assigned
        centroids = moved


@given(
    st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=2, max_size=9, unique=True),
    st.integers(2, 4),
)
@settings(deadline=None, max_examples=150)
def test_a_fixed_point_that_is_never_better_than_the_optimum(values, num_clusters):
    ordered = np.sort(np.array(values, dtype=np.float64))
    centroids, assigned = clusters_of(ordered, num_clusters)
    reached = cost(ordered, centroids, assigned)
    if len(ordered) <= num_clusters:
        assert reached == 0
        assert np.array_equal(centroids, ordered)
        return
    assert reached >= best_cost(ordered, num_clusters) - 1e-9
    assert (np.diff(centroids) > 0).all()
    for i, centroid in enumerate(centroids):
        assert (assigned == i).any()
        assert centroid == pytest.approx(ordered[assigned == i].mean(), abs=1e-12)
    distance = np.abs(ordered[:, None] - centroids)
    assert (distance[np.arange(len(ordered)), assigned] <= distance.min(1) + 1e-12).all()


def test_the_optimum_where_clusters_are_plain():
    ordered = np.sort(np.concatenate([center + np.array([-0.1, 0.0, 0.1]) for center in (-5.0, 0.0, 2.0)]))
    centroids, assigned = clusters_of(ordered, 3)
    assert cost(ordered, centroids, assigned) == pytest.approx(best_cost(ordered, 3))


@pytest.mark.parametrize("num_clusters", [4, 16, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_to_plain_iterations_where_no_cluster_is_empty(num_clusters, dtype):
    ordered = np.sort(np.random.default_rng(num_clusters).uniform(-1, 1, 3000).astype(dtype))
    expected, assigned = plain_lloyd(ordered.astype(np.float64), num_clusters)
    assert len(np.unique(assigned)) == num_clusters
    centroids, ours = clusters_of(ordered, num_clusters)
    assert np.allclose(centroids, expected, rtol=0, atol=1e-12)
    assert np.array_equal(ours, assigned)


def test_cost_never_rises_from_pass_to_pass(monkeypatch):
    ordered = np.sort(np.random.default_rng(3).normal(size=2000) ** 3)
    costs = []
    for passes in range(1, 40):
        monkeypatch.setattr(kmeans, "_PASSES", passes)
        monkeypatch.setattr(kmeans, "_ROUNDS", 0)
        centroids, assigned = clusters_of(ordered, 16)
        costs.append(cost(ordered, centroids, assigned))
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(costs))
    assert costs[-1] < 0.9 * costs[0]


def test_no_cluster_is_wasted_on_the_gap_that_pruning_leaves():
    values = np.random.default_rng(0).normal(size=20_000)
    ordered = np.sort(values[np.abs(values) > 1.5])
    plain, assigned = plain_lloyd(ordered, 16)
    assert len(np.unique(assigned)) < 16
    centroids, ours = clusters_of(ordered, 16)
    assert len(centroids) == 16
    assert cost(ordered, centroids, ours) < 0.8 * cost(ordered, plain, assigned)


def test_few_values_among_very_many_keep_their_exact_mean():
    ordered = np.sort(np.concatenate([np.random.default_rng(0).normal(0.02, 1e-3, 1_000_000), [9.0, 9.5]]))
    centroids, _ = clusters_of(ordered.astype(np.float32), 3)
    assert centroids[-1] == pytest.approx(9.25, abs=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_zeros_stay_zeros_and_the_rest_share_few_values(dtype, bits):
    torch.manual_seed(0)
    weight = torch.randn(60, 50).to(dtype)
    weight[torch.rand(60, 50) < 0.6] = 0
    shared = share_values(weight, bits)
    now = shared.weight()
    assert now.dtype == dtype
    assert now.shape == weight.shape
    assert torch.equal(now == 0, weight == 0)
    assert len(now[now != 0].unique()) == len(shared.values) <= 2**bits
    assert (shared.values.diff() > 0).all()
    # nearest, to the rounding of the centroids and of the midpoints between them
    distance = (weight.double().reshape(-1, 1) - shared.values.double()).abs().min(1).values.view(60, 50)
    live = weight != 0
    slack = 2 * torch.finfo(dtype).eps * weight.double().abs().max()
    assert ((weight.double() - now.double()).abs() <= distance + slack)[live].all()
    again = share_values(now, bits)
    assert torch.equal(again.weight(), now)
    assert torch.equal(again.codes, shared.codes)


def test_256_values_beside_zeros_fit_their_codes():
    weight = torch.cat([torch.zeros(3), torch.arange(1, 257)]).float()
    shared = share_values(weight, 8)
    assert torch.equal(shared.weight(), weight)
    assert shared.codes.dtype == torch.int16
    assert share_values(weight[:200], 8).codes.dtype == torch.uint8


@pytest.mark.parametrize("weight", [torch.zeros(4, 5), torch.empty(0, 3), torch.tensor(-0.0)])
def test_nothing_but_zeros(weight):
    shared = share_values(weight, 3)
    assert torch.equal(shared.weight(), torch.zeros_like(weight))
    assert not shared.weight().signbit().any()
    assert len(shared.values) == 0


def test_layout_does_not_matter():
    weight = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    expected = share_values(weight, 3)
    for other in (
        weight.to(memory_format=torch.channels_last),
        weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ):
        assert torch.equal(share_values(other, 3).codes, expected.codes)


@pytest.mark.parametrize("bits", [1, 9, 0, 5.0, True, "5", None])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(ConfigError, match=r"layer: bits must be a whole number in \[2, 8\]"):
        share_values(torch.ones(4), bits, name="layer")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(bad):
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(TrainingError, match=r"fc1: weights must be finite to share values, got .* at flat index 6"):
        share_values(weight, 5, name="fc1")


def test_integers_are_refused():
    with pytest.raises(ConfigError, match="weight must be float16"):
        share_values(torch.ones(4, dtype=torch.int64), 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_centroid_is_the_sum_of_its_members(dtype):
    torch.manual_seed(1)
    codes = torch.randint(0, 33, (40, 30)).to(torch.uint8)
    gradient = torch.randn(40, 30).to(dtype)
    expected = [gradient.double()[codes == i].sum().item() for i in range(1, 33)]
    sums = summed_by_code(gradient, codes, 32)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx(expected, abs=1e-12)


def test_it_is_the_gradient_that_autograd_gives_a_codebook():
    torch.manual_seed(2)
    values = torch.randn(8, dtype=torch.float64, requires_grad=True)
    codes = torch.randint(0, 9, (12, 10))
    inputs = torch.randn(5, 10, dtype=torch.float64)
    weight = torch.cat([torch.zeros(1, dtype=torch.float64), values])[codes].detach().requires_grad_()
    torch.tanh(inputs @ weight.t()).square().sum().backward()
    torch.tanh(inputs @ torch.cat([torch.zeros(1, dtype=torch.float64), values])[codes].t()).square().sum().backward()
    assert torch.allclose(summed_by_code(weight.grad, codes.to(torch.uint8), 8), values.grad, rtol=1e-12)
