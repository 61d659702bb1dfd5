"""The pure functions of pruning against references in fractions and float64, written from the papers."""

import copy
import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from shared_core.errors import ConfigError
from shared_core.modules.weight_views import input_axis, output_axis
from shared_core.pruning import SCHEDULES, PruneConfig, erdos_renyi_sparsities, iterative_sparsity, nm_mask
from shared_core.pruning.mask_dynamics import rigl_drop_share, rigl_mask
from shared_core.pruning.patterns import block_scores, expand_blocks, nm_mask_of_scores, row_mask
from shared_core.pruning.regularizers import add_group_lasso_gradient_, add_l1_gradient_
from shared_core.pruning.schedules import Schedule

GROWING = [name for name in SCHEDULES if name != "one_shot"]


def random_values(*shape, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


# schedules (C4)


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize(("initial", "final"), [(0.0, 0.8), (0.1, 0.7), (0.3, 0.3), (0.0, 0.0), (0.2, 1 - 2**-40)])
@pytest.mark.parametrize(("begin", "end"), [(0, 100), (7, 1_000_003), (5, 5), (3, 4)])
def test_schedules_are_exact_at_both_ends_and_never_fall(name, initial, final, begin, end):
    sparsity = SCHEDULES[name]
    arguments = {"begin": begin, "end": end, "initial": initial, "final": final}
    assert sparsity(end, **arguments) == sparsity(end + 9, **arguments) == final
    if begin < end:
        assert sparsity(begin, **arguments) == sparsity(begin - 1, **arguments) == initial
    steps = sorted({begin + (end - begin) * i // 97 for i in range(98)})
    values = [sparsity(step, **arguments) for step in steps]
    assert values == sorted(values)
    assert all(initial <= value <= final for value in values)


@pytest.mark.parametrize("step", [0, 13, 25, 50, 77, 99, 100])
def test_linear_and_cubic_are_the_formula_in_fractions(step):
    tau = Fraction(step, 100)
    for name, remaining in (("linear", 1 - tau), ("cubic", (1 - tau) ** 3)):
        expected = Fraction(4, 5) + (Fraction(1, 10) - Fraction(4, 5)) * remaining
        found = SCHEDULES[name](step, begin=0, end=100, initial=0.1, final=0.8)
        assert found == pytest.approx(float(expected), abs=1e-15), name
    assert SCHEDULES["one_shot"](step, begin=50, end=100, initial=0.1, final=0.8) == (0.8 if step >= 50 else 0.1)


def test_cosine_and_exponential_are_the_formula():
    for step in range(0, 41, 3):
        found = SCHEDULES["cosine"](step, begin=0, end=40, initial=0.2, final=0.9)
        assert found == pytest.approx(0.9 - 0.7 * (1 + math.cos(math.pi * step / 40)) / 2, abs=1e-15)
        remaining = 1 - SCHEDULES["exponential"](step, begin=0, end=40, initial=0.2, final=0.9)
        assert math.log(remaining) == pytest.approx(math.log(0.8) + step / 40 * math.log(0.1 / 0.8), abs=1e-12)


@pytest.mark.parametrize(("begin", "end", "every"), [(0, 10, 1), (3, 20, 5), (3, 23, 5), (4, 4, 7), (0, 6, 100)])
def test_iterative_takes_the_same_share_of_what_is_left_at_each_update(begin, end, every):
    arguments = {"begin": begin, "end": end, "initial": 0.1, "final": 0.95, "every": every}
    remaining, shares = 0.9, []
    schedule = Schedule(PruneConfig(sparsity=0.95, every=every), begin, end)
    for step in range(begin - 1, end + 5):
        now = 1 - iterative_sparsity(step, **arguments)
        if schedule.is_due(step):
            shares.append(1 - now / remaining)
        else:
            assert now == pytest.approx(remaining, abs=1e-15)  # nothing goes between updates
        remaining = now
    assert shares == pytest.approx([shares[0]] * len(shares), abs=1e-12)
    assert (1 - shares[0]) ** len(shares) == pytest.approx(0.05 / 0.9, rel=1e-12)
    assert iterative_sparsity(end, **arguments) == 0.95


# Erdős–Rényi (C3)


def reference_densities(shapes, sparsity, kernel):
    """Raise ε until the kept weights are those wanted: each tensor's kept number is piecewise linear in ε."""
    numels = [math.prod(shape) for shape in shapes]
    raw = [
        Fraction(sum(shape), math.prod(shape)) if kernel else Fraction(shape[0] + shape[1], shape[0] * shape[1])
        for shape in shapes
    ]
    kept = (1 - sparsity) * sum(numels)
    # between two values of ε at which a tensor becomes dense, the total is linear
    for low, high in itertools.pairwise([Fraction(0), *sorted(1 / density for density in raw)]):
        at_low, at_high = (
            sum(n * min(Fraction(1), eps * d) for n, d in zip(numels, raw, strict=True)) for eps in (low, high)
        )
        if at_low <= kept <= at_high:
            eps = low if at_low == at_high else low + (high - low) * (kept - at_low) / (at_high - at_low)
            return [min(Fraction(1), eps * density) for density in raw]
    raise AssertionError("no ε")


SHAPES = [
    [(10, 20), (300, 100), (100, 300)],
    [(4, 4), (64, 64), (3, 512)],
    [(64, 3, 7, 7), (64, 64, 3, 3), (128, 64, 1, 1), (10, 128)],
    [(2, 2), (3, 3), (5, 5), (1000, 1000)],
    [(8, 8)],
]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("sparsity", [Fraction(0), Fraction(1, 8), Fraction(1, 2), Fraction(9, 10), Fraction(1)])
@pytest.mark.parametrize("shapes", SHAPES)
def test_erdos_renyi_densities_solve_the_equation(shapes, sparsity, kernel):
    found = erdos_renyi_sparsities(shapes, float(sparsity), kernel=kernel)
    expected = reference_densities(shapes, sparsity, kernel)
    assert found == pytest.approx([float(1 - density) for density in expected], abs=1e-12)
    assert all(0 <= share <= 1 for share in found)
    numels = [math.prod(shape) for shape in shapes]
    pruned = sum(share * numel for share, numel in zip(found, numels, strict=True))
    assert pruned == pytest.approx(float(sparsity) * sum(numels), abs=1e-9 * sum(numels))


def test_erdos_renyi_clamps_small_tensors_and_kernels_matter():
    shares = erdos_renyi_sparsities([(2, 2), (3, 3), (1000, 1000)], 0.9)
    assert shares[:2] == [0.0, 0.0]
    shapes = [(64, 64, 7, 7), (64, 64, 1, 1), (64, 64, 3, 3)]
    assert len({round(share, 9) for share in erdos_renyi_sparsities(shapes, 0.9)}) == 1
    assert len({round(share, 9) for share in erdos_renyi_sparsities(shapes, 0.9, kernel=True)}) == 3
    assert erdos_renyi_sparsities([], 0.5) == []


@pytest.mark.parametrize(("shapes", "sparsity", "what"), [
    ([(3,)], 0.5, "two dimensions"), ([(3, 3)], 1.5, "in \\[0, 1\\]"), ([(3, 3)], math.nan, "finite"),
    ([(3, 3), (0, 4)], 0.5, r"hold weights, got \(0, 4\)"),
])  # fmt: skip
def test_erdos_renyi_refuses(shapes, sparsity, what):
    with pytest.raises(ConfigError, match=what):
        erdos_renyi_sparsities(shapes, sparsity)


# N:M and rows (C2, C1)


def best_of_each_group(scores, n, m):
    """Of all sets of n positions the one of largest sum; of several the one that comes first."""
    keep = []
    for group in scores.reshape(-1, m).tolist():
        best = max(itertools.combinations(range(m), n), key=lambda kept: sorted((group[i] for i in kept), reverse=True))
        keep.append([i in best for i in range(m)])
    return torch.tensor(keep).view(scores.shape)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 2), (2, 4), (1, 4), (4, 4), (3, 8), (4, 8)])
@pytest.mark.parametrize(("shape", "axis"), [((5, 16), 1), ((16, 5), 0), ((3, 8, 3, 3), 1), ((8, 2, 3), 0)])
def test_nm_mask_is_the_best_of_all_sets(shape, axis, n, m, ties):
    weight = random_values(*shape, seed=n + m, ties=ties)
    mask = nm_mask(weight, n, m, axis=axis)
    expected = best_of_each_group(weight.abs().movedim(axis, -1), n, m).movedim(-1, axis)
    assert torch.equal(mask, expected)
    assert mask.is_contiguous()
    groups = mask.movedim(axis, -1).reshape(-1, m)
    assert (groups.sum(1) == n).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_nm_mask_of_other_types_zeros_and_infinities(dtype):
    weight = torch.tensor(
        [[0.0, -0.0, 0.0, -0.0], [-math.inf, 1.0, math.inf, 2.0], [1.0, -1.0, -2.0, 1.0]], dtype=dtype
    )
    expected = [[True, True, False, False], [True, False, True, False], [True, False, True, False]]
    assert nm_mask(weight, 2, 4).tolist() == expected


def test_nm_mask_of_scores_minds_their_sign():
    scores = torch.tensor([[-5.0, 1.0, -math.inf, 0.0]])
    assert nm_mask_of_scores(scores, 2, 4, axis=1).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize(("weight", "n", "m", "what"), [
    (torch.ones(2, 6), 2, 4, "multiple of m = 4"), (torch.ones(2, 4), 5, 4, "n must be in"),
    (torch.ones(2, 4), 0, 4, "n must be in"), (torch.ones(4), 2, 4, "multiple"),
    (torch.tensor([[1.0, math.nan]]), 1, 2, "NaN"), (torch.ones(2, 4), 2.0, 4.0, "both whole numbers"),
])  # fmt: skip
def test_nm_mask_refuses(weight, n, m, what):
    with pytest.raises(ConfigError, match=what):
        nm_mask(weight, n, m)


def places_of_output(module, output):
    """Return what of the weight one output of a layer sees, by what the layer computes: a gradient that is not zero."""
    module = copy.deepcopy(module).double()
    nn.init.ones_(module.weight)
    size = (5,) * (module.weight.ndim - 2)
    num_inputs = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    result = module(torch.ones(1, num_inputs, *size, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(result[0, output].sum(), module.weight)
    return gradient.reshape(-1).nonzero().view(-1).tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("layer", [
    nn.Linear(9, 4), nn.Conv2d(4, 3, 2), nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 3, 2),
    nn.ConvTranspose1d(4, 6, 3, groups=2),
], ids=["linear", "conv", "grouped", "transposed", "transposed_grouped"])  # fmt: skip
def test_row_mask_keeps_the_same_number_of_each_output(layer, sparsity, ties):
    scores = random_values(*layer.weight.shape, seed=3, ties=ties)
    mask = row_mask(layer, scores, sparsity)
    assert mask.shape == scores.shape
    flat, kept = scores.view(-1).tolist(), mask.reshape(-1)
    num_outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    for output in range(num_outputs):
        places = places_of_output(layer, output)
        number = max(1, len(places) - round(sparsity * len(places)))
        best = sorted(places, key=lambda i: (-flat[i], i))[:number]
        assert sorted(best) == [place for place in places if kept[place]]


def test_axes_of_layers():
    for module, outputs in ((nn.Linear(4, 6), 6), (nn.Conv2d(4, 6, 3), 6), (nn.ConvTranspose2d(4, 6, 3), 6)):
        assert module.weight.shape[output_axis(module)] == outputs
        assert module.weight.shape[input_axis(module)] == 4


# blocks (C2)


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 4), (3, 2), (7, 100)])
@pytest.mark.parametrize("shape", [(8, 12), (7, 10), (1, 1), (5, 3, 2, 2)])
def test_block_scores_are_means_of_tiles_also_ragged_ones(shape, block):
    scores = random_values(*shape, seed=1).double()
    matrix = scores.reshape(shape[0], -1)
    rows, columns = range(0, matrix.shape[0], block[0]), range(0, matrix.shape[1], block[1])
    expected = torch.tensor(
        [[float(matrix[i : i + block[0], j : j + block[1]].mean()) for j in columns] for i in rows], dtype=torch.float64
    )
    torch.testing.assert_close(block_scores(scores, block), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 4), (7, 100)])
@pytest.mark.parametrize("shape", [(8, 12), (7, 10), (5, 3, 2, 2)])
def test_expanded_blocks_are_whole_tiles(shape, block):
    tiles = block_scores(random_values(*shape), block) > 0
    found = expand_blocks(tiles, torch.Size(shape), block)
    assert found.shape == shape
    matrix = found.reshape(shape[0], -1)
    for i, j in itertools.product(range(matrix.shape[0]), range(matrix.shape[1])):
        assert matrix[i, j] == tiles[i // block[0], j // block[1]]


# RigL (C5)


def test_rigl_drop_share_falls_as_a_cosine():
    for step in range(10, 111):
        expected = 0.15 * (1 + math.cos(math.pi * (step - 10) / 100)) if step < 110 else 0.0
        assert rigl_drop_share(step, begin=10, end=110, alpha=0.3) == pytest.approx(expected, abs=1e-15)
    assert rigl_drop_share(5, begin=10, end=110, alpha=0.3) == 0.3
    assert rigl_drop_share(10, begin=10, end=10, alpha=0.3) == 0.0


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("live_share", [0.0, 0.1, 0.4, 0.9, 1.0])
def test_rigl_drops_the_smallest_and_grows_where_the_gradient_is_largest(live_share, share, ties):
    shape = (7, 9)
    scores, gradient = random_values(*shape, seed=4, ties=ties).abs(), random_values(*shape, seed=5, ties=ties)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(6)) < live_share
    found = rigl_mask(scores, gradient, mask, share)

    flat_scores, flat_gradient = scores.view(-1).tolist(), gradient.abs().view(-1).tolist()
    live = mask.view(-1).nonzero().view(-1).tolist()
    moved = min(round(share * len(live)), mask.numel() - len(live))
    stay = sorted(live, key=lambda i: (-flat_scores[i], i))[: len(live) - moved]
    candidates = [i for i in range(mask.numel()) if i not in stay]
    grown = sorted(candidates, key=lambda i: (-flat_gradient[i], i))[:moved]
    assert sorted([*stay, *grown]) == found.view(-1).nonzero().view(-1).tolist()
    assert found.count_nonzero() == mask.count_nonzero()
    assert found is not mask


# regularizers (C6)


@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 2, 2)])
def test_l1_gradient_is_that_of_the_penalty(shape):
    weight = random_values(*shape, seed=7).double().requires_grad_()
    with torch.no_grad():
        weight[0] = 0.0
    before = random_values(*shape, seed=8).double()
    (0.3 * weight.abs().sum()).backward()
    gradient = before.clone()
    add_l1_gradient_(gradient, weight, 0.3)
    torch.testing.assert_close(gradient, before + weight.grad, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 2, 2)])
def test_group_lasso_gradient_is_that_of_the_penalty(shape, axis):
    weight = random_values(*shape, seed=9).double().requires_grad_()
    groups = weight.movedim(axis, 0).flatten(1)
    (0.3 * groups.shape[1] ** 0.5 * groups.norm(dim=1)).sum().backward()
    gradient = torch.zeros(shape, dtype=torch.float64)
    add_group_lasso_gradient_(gradient, weight, 0.3, axis=axis)
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_group_lasso_of_zero_and_subnormal_groups_is_finite_and_of_length_sqrt_p(dtype):
    weight = torch.zeros(3, 4, dtype=dtype)
    weight[1, 0] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest there is
    weight[2] = torch.tensor([3.0, 0.0, 4.0, 0.0])
    assert weight[1, 0] > 0
    gradient = torch.zeros(3, 4, dtype=dtype)
    add_group_lasso_gradient_(gradient, weight, 1.0, axis=0)
    expected = torch.tensor([[0.0] * 4, [2.0, 0.0, 0.0, 0.0], [1.2, 0.0, 1.6, 0.0]], dtype=dtype)
    torch.testing.assert_close(gradient, expected)


def test_a_nan_is_not_hidden_by_group_lasso():
    weight = torch.tensor([[math.nan, 1.0], [1.0, 1.0]])
    gradient = torch.zeros(2, 2)
    add_group_lasso_gradient_(gradient, weight, 1.0, axis=0)
    assert gradient.isnan().any(1).tolist() == [True, False]
