"""What a GPU run does around its kernels, here around the operators' CPU side: the same results."""

import weakref

import pytest
import torch
from eff_kernels import loss_scaling, masks, pruning
from eff_kernels import loss_scaling as unscaling
from eff_kernels._triton.launch import tensor_tables


def pretend_a_gpu(patch):
    for module in (loss_scaling, masks, pruning, unscaling):
        patch.setattr(module, "runs_in_one_launch", lambda *columns: True)
    patch.setattr(pruning, "_one_gpu", lambda tensors: torch.device("cpu"))


def unscaled(step):
    grads, flag = [torch.randn(3, 4), torch.zeros(0), torch.full((2,), 1e-30)], torch.zeros(1)
    return [step(grads, flag, torch.tensor([0.5])), *grads, flag]


def kth_smallest(scores, k):
    there = pruning.kth_smallest_there(scores, k)
    return torch.tensor(pruning.kth_smallest(scores, k)) if there is None else there


def masked():
    weights = [torch.randn(5, 7), torch.randn(3)]
    kept = [torch.rand(weight.shape) < 0.5 for weight in weights]
    pruning.apply_mask_(weights, kept)
    return weights


CASES = {
    "count_magnitudes": lambda: loss_scaling.count_magnitudes([torch.nn.Parameter(torch.randn(3, 4))], 1e-3),
    "count_exponents": lambda: [loss_scaling.count_exponents(torch.randn(9).half()).counts],
    "unscale_with_largest": lambda: unscaled(unscaling.unscale_with_largest_),
    "n_of_m_mask": lambda: [masks.n_of_m_mask(torch.randn(3, 8), 2, 4, -1)],
    "bits": lambda: [masks.unpack_bits(masks.pack_bits(torch.rand(3, 5) < 0.5), (3, 5))],
    "apply_mask": masked,
    "kth_smallest": lambda: [kth_smallest([torch.randn(300), torch.ones(3)], k) for k in (1, 200)],
}


@pytest.mark.parametrize("name", CASES)
def test_operators_give_what_their_functions_do_on_cpu(name, monkeypatch):
    torch.manual_seed(0)
    expected = CASES[name]()
    pretend_a_gpu(monkeypatch)
    torch.manual_seed(0)
    found = CASES[name]()
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_masks_of_a_gpu_are_those_of_the_cpu(monkeypatch):
    from shared_core.errors import ConfigError
    from shared_core.pruning import prune_masks, selection

    generator = torch.Generator().manual_seed(0)
    scores = [torch.randint(0, 9, (7, 5), generator=generator) / 4, torch.zeros(3), torch.rand(40, generator=generator)]
    asked = [(share, most) for share in (0.2, 0.6) for most in (None, [10, 1, 40])]
    expected = [mask for each in asked for mask in prune_masks(scores, *each)]
    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr(selection, "_marked", lambda scores, number: masks.marked_largest(list(scores), number))
    found = [mask for each in asked for mask in prune_masks(scores, *each)]
    assert all(map(torch.equal, found, expected))
    scores[1][2] = torch.nan
    with pytest.raises(ConfigError, match="must not be NaN, got one in tensor 1"):
        prune_masks(scores, 0.5)
    with pytest.raises(ConfigError, match="must not be NaN, got one in tensor 0"):
        selection.prune_mask(scores[1], 0.5)


def test_operators_refuse_as_their_functions_do(monkeypatch):
    pretend_a_gpu(monkeypatch)
    with pytest.raises(ValueError, match="must not be NaN"):
        masks.n_of_m_mask(torch.full((1, 4), torch.nan), 2, 4, 1)


def test_a_table_is_made_once_for_tensors_that_stay_and_holds_none():
    tensors = [torch.ones(5), torch.ones(3)]
    (first,), (again,) = (list(tensor_tables(4, tensors)) for _ in range(2))
    assert first.table is again.table
    assert again.like[0] is tensors[0]
    (moved,) = list(tensor_tables(4, [tensors[0], torch.ones(3)]))
    assert not torch.equal(moved.table, first.table)
    gone = weakref.ref(tensors.pop())
    assert gone() is None
    assert list(tensor_tables(4, [])) == []
