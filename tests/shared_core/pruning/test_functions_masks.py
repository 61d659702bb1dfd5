"""Where masks are kept and what they hide: bit for bit; and what of a layer goes with an output unit."""

import math

import pytest
import torch
from eff_kernels.masks import pack_bits, unpack_bits
from torch import nn
from transformers.pytorch_utils import Conv1D

from shared_core.pruning.mask_dynamics import StraightThrough
from shared_core.pruning.masks import MaskStore
from shared_core.pruning.structured import filter_groups, kept_units, layer_groups, masks_of_units

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
    groups = filter_groups({"layer.weight": layer})
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
    (group,) = layer_groups({"weight": layer})
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
    groups = filter_groups({"a.weight": layer}) * 2
    keeps = [torch.tensor([True, False, True, True]), torch.tensor([True, True, False, True])]
    masks = masks_of_units(groups, keeps, {"a.weight": layer.weight})
    assert list(masks) == ["a.weight"]  # the bias may not be masked here
    assert masks["a.weight"].any(1).tolist() == [True, False, False, True]
