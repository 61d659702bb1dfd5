"""Masks against references in float64 and against torch's own pruning; where they are kept and what they hide."""

import math

import numpy as np
import pytest
import torch
from eff_kernels import pruning as kernels
from eff_kernels.masks import pack_bits, unpack_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torch_prune
from transformers.pytorch_utils import Conv1D

from shared_core.errors import ConfigError
from shared_core.pruning import prune_mask, prune_masks
from shared_core.pruning.mask_dynamics import StraightThrough
from shared_core.pruning.masks import MaskStore
from shared_core.pruning.structured import kept_units, layer_groups, masks_of_units

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reference_mask(scores: np.ndarray, num_pruned: int) -> np.ndarray:
    """Sort by (score descending, flat index ascending); the last `num_pruned` go."""
    flat = scores.astype(np.float64).reshape(-1)
    order = sorted(range(flat.size), key=lambda i: (-flat[i], i))
    keep = np.ones(flat.size, dtype=bool)
    keep[order[flat.size - num_pruned :]] = False
    return keep.reshape(scores.shape)


def reference_masks(tensors: list[np.ndarray], sparsity: float, most: list[int]) -> list[np.ndarray]:
    """All but as many of each tensor as may go, the best, do not compete; the rest is sorted as one list."""
    entries, keeps = [], []
    numel = sum(tensor.size for tensor in tensors)
    for i, tensor in enumerate(tensors):
        flat = tensor.astype(np.float64).reshape(-1)
        order = sorted(range(flat.size), key=lambda j: (-flat[j], j))
        entries += [(-flat[j], i, j) for j in order[max(flat.size - most[i], 1) :]]
        keeps.append(np.ones(flat.size, dtype=bool))
    entries.sort()
    num_pruned = min(round(sparsity * numel), len(entries))
    for _, i, j in entries[len(entries) - num_pruned :]:
        keeps[i][j] = False
    return [keep.reshape(tensor.shape) for keep, tensor in zip(keeps, tensors, strict=True)]


few_values = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 5e-324, 1e-40, 1.0, 1.5, math.inf])
values = st.one_of(few_values, st.floats(allow_nan=False, width=16))


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(values, max_size=40), sparsity=st.floats(0, 1), dtype=st.sampled_from(DTYPES), pieces=st.booleans()
)
def test_prune_mask_equals_a_full_sort(data, sparsity, dtype, pieces):
    scores = torch.tensor(data, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr(kernels, "_HISTOGRAM_PIECE", 7)
            patch.setattr("shared_core.pruning.selection._PIECE", 3)
        mask = prune_mask(scores, sparsity)
    expected = reference_mask(scores.double().numpy(), round(sparsity * len(data)))
    assert mask.dtype == torch.bool
    np.testing.assert_array_equal(mask.numpy(), expected)


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.lists(values, max_size=12), max_size=5),
    sparsity=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    pieces=st.booleans(),
    share=st.floats(0, 1),
)
@example(data=[[-math.inf] * 4, [-math.inf] * 3], sparsity=1.0, dtype=torch.float32, pieces=False, share=0.15)
def test_prune_masks_equal_a_full_sort_with_the_best_of_each_protected(data, sparsity, dtype, pieces, share):
    scores = [torch.tensor(items, dtype=dtype) for items in data]
    most = [round(share * len(items)) for items in data]
    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr("shared_core.pruning.selection._HELD", 0)
        masks = prune_masks(scores, sparsity, None if share == 1 else most)
    # what is at -inf was pruned before: it goes as far as the count reaches, whatever the limit
    gone = [sum(value == -math.inf for value in score.tolist()) for score in scores]
    if any(pruned > limit for pruned, limit in zip(gone, most, strict=True)):
        return
    expected = reference_masks([score.double().numpy() for score in scores], sparsity, most)
    for mask, keep in zip(masks, expected, strict=True):
        np.testing.assert_array_equal(mask.numpy(), keep)
        assert not keep.size or mask.any()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), low=st.floats(0, 1), high=st.floats(0, 1))
def test_masks_of_growing_sparsity_are_nested(seed, low, high):
    low, high = min(low, high), max(low, high)
    scores = torch.randint(0, 6, (5, 7), generator=torch.Generator().manual_seed(seed)).float()
    assert not (prune_mask(scores, high) & ~prune_mask(scores, low)).any()


@pytest.mark.parametrize(("num", "sparsity", "kept"), [(5, 0.5, 3), (7, 0.5, 3), (10, 0.25, 8), (3, 0.5, 1)])
def test_halves_round_to_even(num, sparsity, kept):
    assert prune_mask(torch.arange(float(num)), sparsity).sum() == kept


def test_shapes_strides_and_degenerate_input():
    assert prune_mask(torch.empty(0, 3), 0.5).shape == (0, 3)
    assert prune_mask(torch.tensor(3.0), 0.5).item() is True
    assert prune_mask(torch.tensor(3.0), 0.6).item() is False
    assert not prune_mask(torch.ones(4), 1.0).any()
    assert prune_masks([], 0.5) == []
    scores = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(prune_mask(scores.T, 0.5), prune_mask(scores.T.contiguous(), 0.5))
    ties = prune_mask(torch.ones(2, 3), 0.5)
    assert ties.tolist() == [[True, True, True], [False, False, False]]


def test_the_threshold_of_a_large_tensor_is_exact():
    scores = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1)).abs()
    assert kernels.kth_smallest([scores], 2_400_000) == float(scores.sort().values[2_399_999])


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, math.nan])
def test_bad_sparsity_is_refused(sparsity):
    with pytest.raises(ConfigError, match="sparsity must be"):
        prune_mask(torch.ones(4), sparsity)


def test_bad_scores_are_refused():
    with pytest.raises(ConfigError, match="must not be NaN, got one in tensor 1 at flat index 2"):
        prune_masks([torch.ones(3), torch.tensor([1.0, math.inf, math.nan])], 0.0)
    with pytest.raises(ConfigError, match="floating point"):
        prune_mask(torch.ones(3, dtype=torch.long), 0.5)
    with pytest.raises(ValueError, match="k must be in"):
        kernels.kth_smallest([torch.ones(3)], 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_apply_mask_leaves_positive_zero_and_touches_nothing_else(dtype, layout):
    tensor = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    tensor[0, 0, 0] = torch.tensor([math.nan, -math.inf, math.inf, -0.0, -1.0, 1e-5])
    keep = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    keep[0, 0, 0] = False
    if layout == "channels_last":
        tensor = tensor.to(memory_format=torch.channels_last)
    if layout == "transposed":
        tensor, keep = tensor.transpose(0, 2), keep.transpose(0, 2)
    before = tensor.clone()
    kernels.apply_mask_([tensor], [keep])
    assert torch.equal(tensor[keep], before[keep])
    assert not tensor[~keep].any()
    assert not tensor[~keep].signbit().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_large_tensor_is_masked_as_a_small_one_and_autograd_notices(dtype):
    tensor = torch.randn(kernels._NUMPY_FROM + 3, requires_grad=True).to(dtype)
    tensor.data[:3] = torch.tensor([math.nan, -math.inf, -0.0])
    mask = torch.rand(tensor.shape) < 0.5
    mask[:3] = False
    before, product = tensor.detach().clone(), tensor.square().sum()
    kernels.apply_mask_([tensor], [mask])
    assert torch.equal(tensor[mask], before[mask])
    assert not tensor[~mask].any()
    assert not tensor[~mask].signbit().any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, kernels._NUMPY_FROM + 3])
def test_apply_mask_fills_in_another_number_and_touches_nothing_else(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(dtype)
    tensor[:6] = torch.tensor([math.nan, -math.inf, -0.0, math.inf, -0.0, 1e-5])
    keep = torch.rand(size, generator=torch.Generator().manual_seed(3)) < 0.5
    keep[:6] = torch.tensor([False, False, False, True, True, True])
    before = tensor.clone()
    kernels.apply_mask_([tensor], [keep], -0.125)
    assert torch.equal(tensor[keep], before[keep])
    assert tensor[4].signbit()
    assert (tensor[~keep] == -0.125).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_below_is_minus_infinity_and_leaves_the_rest(dtype):
    scores = torch.tensor([0.0, -3.0, math.inf, 2.0, 7.0, math.nan], dtype=dtype)
    kernels.rank_below_(scores, torch.tensor([True, False, False, True, True, False]))
    assert scores.tolist() == [0.0, -math.inf, -math.inf, 2.0, 7.0, -math.inf]
    scores = torch.ones(kernels._PIECE + 3, dtype=dtype)
    assert kernels.rank_below_(scores, torch.zeros(scores.shape, dtype=torch.bool)).isneginf().all()


def test_the_survivors_are_those_of_torch_prune():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20), torch.nn.Conv1d(4, 5, 3))
    weights = [module.weight.detach().clone() for module in net]
    mine = prune_masks([weight.abs() for weight in weights], 0.7)
    torch_prune.global_unstructured([(module, "weight") for module in net], torch_prune.L1Unstructured, amount=0.7)
    for module, mask in zip(net, mine, strict=True):
        assert torch.equal(module.weight_mask.bool(), mask)


@given(
    numel=st.integers(1, 3000),
    share=st.floats(0.001, 0.999),
    values=st.integers(1, 50),
    pruned=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_the_sampled_threshold_is_the_sorted_one(numel, share, values, pruned, seed):
    # few distinct values: ties at the threshold; -inf: what was pruned before; several tensors and pieces
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(values, (numel,), generator=generator).float()
    scores[torch.rand(numel, generator=generator) < pruned] = -torch.inf
    count = round(share * numel)
    parts = list(torch.split(scores, max(1, numel // 3)))
    masks = [torch.empty(part.shape, dtype=torch.bool) for part in parts]
    if not 0 < count < numel or kernels.keep_largest_(masks, lambda i, where: parts[i][where], count) is None:
        return
    order = torch.tensor(sorted(range(numel), key=lambda i: (float(scores[i]), -i)))
    expected = torch.ones(numel, dtype=torch.bool)
    expected[order[:count]] = False
    assert torch.equal(torch.cat(masks), expected)


def test_a_sample_that_misses_falls_back_to_the_exact_histogram():
    # Every sampled score is 0 and all others are 1: the bracket holds no threshold, the masks are right all the same.
    scores = torch.ones(1 << 18)
    stride = (1 << 18) // (1 << 16) | 1
    scores[::stride] = 0.0
    empty = [torch.empty(1 << 18, dtype=torch.bool)]
    assert kernels.keep_largest_(empty, lambda i, where: scores[where], 1 << 17) is None
    mask = prune_mask(scores, 0.5)
    assert int(mask.sum()) == 1 << 17
    assert not mask[::stride].any()


@pytest.mark.parametrize("more", [-70_000, -1, 0, 1, 70_000])
def test_many_equal_scores_at_the_edge_of_the_bracket_are_counted_and_not_ranked(more, monkeypatch):
    scores = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) + 1
    scores[torch.randperm(1 << 18, generator=torch.Generator().manual_seed(1))[: 1 << 17]] = 0.0
    ranked, partition = [], np.partition
    monkeypatch.setattr(np, "partition", lambda values, k: ranked.append(values.size) or partition(values, k))
    mask = prune_mask(scores, ((1 << 17) + more) / (1 << 18))
    assert not (scores[~mask].max() > scores[mask].min())
    assert int((~mask).sum()) == (1 << 17) + more
    if more < 0:  # of equal ones the first stay
        assert (scores[mask] == 0).sum() == -more
        assert mask[scores == 0][:-more].all()
    assert sum(ranked) < 10_000


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    return tensor.detach().clone().view(BITS[tensor.element_size()])


def odd_values(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, 8, generator=generator).to(dtype)
    values[0] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1e-40, -5e-324], dtype=torch.float64)
    values[1] = values[0]
    values[1, 6] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_what_is_hidden_is_shown_again_bit_for_bit(dtype, layout):
    values = odd_values(dtype)
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0], mask[1] = True, False
    if layout == "transposed":
        values, mask = values.t(), mask.t()
    weight = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    dense = bits(weight)
    masks, weights = {"w": mask}, {"w": weight}
    through = StraightThrough()

    for _ in range(3):
        through.hide(weights, masks)
        assert not through.is_shown
        assert torch.equal(bits(weight)[mask], dense[mask])
        assert not bits(weight)[~mask].any()  # exactly +0.0
        assert not bits(through.hidden["w"])[mask].any()
        through.show(weights)
        through.show(weights)  # twice is once
        assert torch.equal(bits(weight), dense)

    through.hide(weights, {"w": ~mask})  # masks may change while everything is shown
    assert torch.equal(bits(weight)[~mask], dense[~mask])
    through.drop()
    through.show(weights)
    assert not bits(weight)[mask].any()


def test_what_is_hidden_trains_and_decays():
    weight = nn.Parameter(torch.tensor([[1.0, -2.0, 3.0, 4.0]]))
    mask = torch.tensor([[True, False, False, True]])
    through = StraightThrough()
    through.hide({"w": weight}, {"w": mask})
    gradient = torch.zeros(1, 4)
    through.add_decay_({"w": gradient, "other": torch.ones(1)}, 0.5)
    assert gradient.tolist() == [[0.0, -1.0, 1.5, 0.0]]  # strength·(1 - mask)·w
    through.show({"w": weight})
    with torch.no_grad():
        weight -= 0.1 * gradient
    through.hide({"w": weight}, {"w": mask})
    assert weight.tolist() == [[1.0, 0.0, 0.0, 4.0]]
    torch.testing.assert_close(through.hidden["w"], torch.tensor([[0.0, -1.9, 2.85, 0.0]]))


def test_decay_comes_in_the_type_of_the_gradient():
    through = StraightThrough()
    through.hide({"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, {"w": torch.tensor([True, False])})
    gradient = torch.zeros(2)
    through.add_decay_({"w": gradient}, 0.25)
    assert gradient.tolist() == [0.0, 0.5]


# stored masks


@pytest.mark.parametrize("shape", [(), (1,), (8,), (9,), (0,), (3, 5, 7), (4, 0)])
def test_packed_masks_come_back(shape):
    weight = torch.zeros(shape)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-mask.numel() // 8)
    found = unpack_bits(packed, weight.shape)
    assert found.dtype == torch.bool
    assert torch.equal(found, mask)
    if mask.ndim > 1:
        assert torch.equal(
            unpack_bits(pack_bits(mask.transpose(0, 1)), weight.transpose(0, 1).shape), mask.transpose(0, 1)
        )


def test_a_store_counts_applies_and_packs():
    store = MaskStore("prune")
    assert not store
    store.apply()  # without masks nothing happens
    store.weights = {"a": nn.Parameter(-torch.ones(3, 3)), "b": nn.Parameter(torch.full((2,), math.nan))}
    store.set({"a": torch.eye(3).bool(), "b": torch.tensor([False, False])})
    store.apply()
    assert "a" in store
    assert "c" not in store
    assert store.num_pruned == {"a": 6, "b": 2}
    assert torch.equal(store.weights["a"], -torch.eye(3))
    for weight in store.weights.values():
        assert not weight[weight == 0].signbit().any()
    assert store.weights["b"].tolist() == [0.0, 0.0]
    assert torch.equal(unpack_bits(store.packed()["a"], store.weights["a"].shape), store["a"])
    store.set({"a": torch.ones(3, 3).bool()})
    assert "b" not in store  # new masks take the place of all there were
    assert store.num_pruned == {"a": 0}


# units


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (2, 6)),
    "no_bias": (lambda: nn.Linear(6, 4, bias=False), (2, 6)),
    "conv": (lambda: nn.Conv2d(6, 4, 3), (2, 6, 5, 5)),
    "grouped": (lambda: nn.Conv1d(6, 4, 3, groups=2), (2, 6, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 3), (2, 6, 5, 5)),
    "transposed_grouped": (lambda: nn.ConvTranspose1d(6, 8, 3, groups=2), (2, 6, 9)),
    "gpt2": (lambda: Conv1D(4, 6), (2, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_pruned_filter_leaves_its_outputs_zero_and_the_others_as_they_were(name):
    torch.manual_seed(3)
    make, shape = LAYERS[name]
    layer = make()
    groups = layer_groups({"layer.weight": layer}, "filter")
    keep = torch.tensor([unit not in (1, 3) for unit in range(groups[0].units)])
    tensors = {f"layer.{key}": tensor for key, tensor in layer.named_parameters()}
    masks = masks_of_units(groups, [keep], tensors)
    assert set(masks) == set(tensors)
    assert torch.equal(kept_units(groups, masks)[0], keep)

    x = torch.randn(shape)
    before = layer(x)
    with torch.no_grad():
        for key, mask in masks.items():
            tensors[key].mul_(mask)
    after = layer(x)
    channels = 1 if name != "gpt2" and len(shape) > 2 else -1
    pruned = keep.logical_not().repeat(before.shape[channels] // len(keep))  # a grouped one: of every group
    before, after = before.movedim(channels, 0), after.movedim(channels, 0)
    assert not after[pruned].any()
    torch.testing.assert_close(after[~pruned], before[~pruned])
    share = 1 - sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    assert share == pytest.approx(2 / len(keep))


@pytest.mark.parametrize("name", LAYERS)
def test_a_pruned_layer_is_zero_altogether(name):
    layer = LAYERS[name][0]()
    (group,) = layer_groups({"weight": layer}, "layer")
    assert group.units == 1
    tensors = dict(layer.named_parameters())
    kept, gone = (masks_of_units([group], [torch.tensor([keep])], tensors) for keep in (True, False))
    assert all(mask.all() for mask in kept.values())
    assert not any(mask.any() for mask in gone.values())
    assert set(gone) == set(tensors)
    assert kept_units([group], kept)[0].item() is True
    assert kept_units([group], gone)[0].item() is False


def test_units_share_a_tensor_and_unnamed_tensors_are_left_alone():
    layer = nn.Linear(3, 4)
    groups = layer_groups({"a.weight": layer}, "filter") * 2
    keeps = [torch.tensor([True, False, True, True]), torch.tensor([True, True, False, True])]
    masks = masks_of_units(groups, keeps, {"a.weight": layer.weight})
    assert list(masks) == ["a.weight"]  # the bias may not be masked here
    assert masks["a.weight"].any(1).tolist() == [True, False, False, True]
