"""The counts of a round, exact to one weight; ties; rates by layer; what the controls draw; the file of a ticket."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared_core.errors import CheckpointError, TrainingError
from shared_core.lottery_ticket import LotteryConfig, Ticket, read_ticket, write_ticket
from shared_core.lottery_ticket.technique import layer_rates, next_masks, random_masks
from shared_core.lottery_ticket.ticket import HeldRates, renamed, same_bits


def expected_left(numel, rate, rounds):
    left = numel
    for _ in range(rounds):
        left = max(left - round(rate * left), 1)
    return left


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 400), rate=st.floats(0.01, 0.9), rounds=st.integers(1, 12), levels=st.integers(1, 500),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_counts_over_rounds_are_exact_nested_and_the_largest_stay(numel, rate, rounds, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for number in range(1, rounds + 1):
        # few levels: many ties; a live weight may be exactly zero
        weight = torch.randint(-levels, levels + 1, (numel,), generator=generator).float()
        if masks:
            weight[~masks["w"]] = 0.0
        new = next_masks({"w": weight}, masks, {"w": rate})["w"]
        assert int(new.sum()) == expected_left(numel, rate, number)
        alive = masks["w"].nonzero().view(-1).tolist() if masks else range(numel)
        order = sorted(alive, key=lambda index: (-abs(float(weight[index])), index))
        assert sorted(order[: int(new.sum())]) == new.nonzero().view(-1).tolist()
        masks = {"w": new}


def test_ten_rounds_of_lenet_300_100_leave_the_papers_shares():
    shapes = {"a": (300, 784), "b": (100, 300), "c": (10, 100)}
    rates = {"a": 0.2, "b": 0.2, "c": 0.1}
    masks = {}
    for number in range(1, 11):
        weights = {name: torch.randn(shape) for name, shape in shapes.items()}
        masks = next_masks(weights, masks, rates)
        for name, mask in masks.items():
            share = (1 - rates[name]) ** number
            assert abs(int(mask.sum()) - share * mask.numel()) <= 3  # the sum of ten roundings, shrunk by later rounds
            assert int(mask.sum()) == expected_left(mask.numel(), rates[name], number)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_global_scope_prunes_the_smallest_of_all_and_empties_no_tensor(dtype):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(60, generator=generator).to(dtype) for name in "ab"}
    weights["tiny"] = torch.full((5,), 1e-6, dtype=dtype)
    masks = next_masks(weights, {}, 0.5)
    assert sum(int(mask.sum()) for mask in masks.values()) == 125 - round(0.5 * 125)
    assert masks["tiny"].tolist() == [True, False, False, False, False]
    again = next_masks(weights, masks, 0.5)
    left = 125 - round(0.5 * 125)
    assert sum(int(mask.sum()) for mask in again.values()) == left - round(0.5 * left)
    assert all(bool((masks[name] | ~mask).all()) for name, mask in again.items())
    flat = torch.cat([weights["a"], weights["b"]]).abs().double()
    kept = torch.cat([again["a"], again["b"]])
    assert flat[kept].min() >= flat[~kept].max()


def test_nan_is_refused_where_it_is():
    with pytest.raises(TrainingError, match="NaN"):
        next_masks({"w": torch.tensor([1.0, float("nan")])}, {}, {"w": 0.5})


def test_rates_by_layer():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2))
    modules = {"0.weight": model[0], "2.weight": model[2], "3.weight": model[3]}

    def rates(**options):
        return list(layer_rates(model, modules, LotteryConfig(out="x", **options)).values())

    assert rates(rate=0.2) == [0.2, 0.2, 0.1]
    assert rates(rate=0.2, conv_rate=0.15, output_rate=0.0) == [0.15, 0.2, 0.0]


def test_random_masks_keep_the_counts_and_cover_everything():
    masks = {"a": torch.rand(20, 10) < 0.3, "b": torch.ones(7, dtype=torch.bool)}
    hits = torch.zeros(20, 10)
    for seed in range(200):
        drawn = random_masks(masks, torch.Generator().manual_seed(seed))
        assert {name: (int(mask.sum()), mask.shape) for name, mask in drawn.items()} == {
            name: (int(mask.sum()), mask.shape) for name, mask in masks.items()
        }
        hits += drawn["a"]
    # a share p of 200 draws: within five standard deviations everywhere
    share = float(masks["a"].float().mean())
    assert float((hits / 200 - share).abs().max()) < 5 * (share * (1 - share) / 200) ** 0.5


@given(st.lists(st.integers(0, 5), min_size=0, max_size=3), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_tickets_of_any_shape_survive_the_file(tmp_path_factory, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.5
    weight = torch.randn(shape, generator=generator)
    ticket = Ticket({"w": mask}, {"w": weight, "n": torch.tensor(3), "h": weight.bfloat16()}, 7, "none", ((0.1, 0.2),))
    read = read_ticket(write_ticket(tmp_path_factory.mktemp("t") / "t.safetensors", ticket))
    assert torch.equal(read.masks["w"], mask)
    assert all(torch.equal(read.weights[name], value) for name, value in ticket.weights.items())
    assert (read.step, read.rewind, read.learning_rates) == (7, "none", ((0.1, 0.2),))
    assert (read.kept, read.numel, read.digest()) == (int(mask.sum()), mask.numel(), ticket.digest())


def test_a_file_of_the_future_or_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "t.safetensors"
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="ticket file"):
        read_ticket(path)
    save_file({"w": torch.ones(2)}, path, metadata={"eff_ticket": '{"format": 99}'})
    with pytest.raises(CheckpointError, match="newer efftrain"):
        read_ticket(path)
    told = '{"format": 1, "step": 0, "rewind": "weights", "learning_rates": []}'
    packed = torch.from_numpy(np.packbits(np.ones(9, dtype=bool)))
    save_file({"weight.w": torch.ones(3), "mask.w": packed}, path, metadata={"eff_ticket": told})
    with pytest.raises(CheckpointError, match="2 bytes of mask for 3 weights"):
        read_ticket(path)


def test_a_ticket_serves_under_a_prefix():
    ticket = Ticket({"a.weight": torch.ones(2) > 0}, {"a.weight": torch.ones(2), "a.bias": torch.zeros(1)}, 0)
    under = renamed(ticket, {"net.a.weight": torch.zeros(2)}, "t")
    assert (list(under.masks), list(under.weights)) == (["net.a.weight"], ["net.a.weight", "net.a.bias"])
    back = renamed(under, {"a.weight": torch.zeros(2)}, "t")
    assert (list(back.masks), float(back.weights["a.bias"])) == (["a.weight"], 0.0)
    with pytest.raises(CheckpointError, match=r"only the model has b\.weight|only the ticket has a\.weight"):
        renamed(ticket, {"b.weight": torch.zeros(2)}, "t")


def test_same_bits_and_learning_rates_of_other_groups():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor(3), torch.tensor(3))
    optimizer = torch.optim.SGD([{"params": torch.zeros(1, requires_grad=True)} for _ in range(2)], lr=1.0)
    for rates, expected in (([[0.1, 0.2]], [0.1, 0.2]), ([[0.1]], [0.1, 0.1]), ([[0.1, 0.2, 0.3]], None)):
        held = HeldRates()
        assert held.fit([optimizer], rates) is (expected is not None)
        held.hold([optimizer], rewound=True)
        assert [group["lr"] for group in optimizer.param_groups] == (expected or [1.0, 1.0])
        held.give_back([optimizer])
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
