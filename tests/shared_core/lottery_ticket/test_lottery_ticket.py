"""Lottery tickets against a loop written by hand: rewinding bit for bit, zeros, controls, files."""

import json

import numpy as np
import pytest
import torch
from lottery_runs import (
    CLIP,
    PRUNED,
    RATE,
    STEPS,
    cosine,
    equal,
    loss_of,
    make_net,
    pruned_weights,
    sgd,
    ticket_recipe,
    train,
)
from plain_loop import begun_session
from safetensors import safe_open
from torch import nn

from shared_core import Recipe
from shared_core.errors import CompatibilityError, MatchError
from shared_core.lottery_ticket import Ticket, read_ticket, write_ticket
from shared_core.runs import LotterySearch


def smaller(kept, weights):
    """The masks of the next round, by sorting: half the rate in the output layer, the lowest index wins a tie."""
    found = {}
    for name, mask in kept.items():
        rate = RATE / 2 if name == PRUNED[-1] else RATE
        values = np.abs(weights[name].detach().numpy().astype(np.float64)).reshape(-1)
        alive = np.flatnonzero(mask.numpy().reshape(-1))
        order = sorted(alive, key=lambda index: (-values[index], index))
        new = np.zeros(values.size, dtype=bool)
        new[order[: len(alive) - round(rate * len(alive))]] = True
        found[name] = torch.from_numpy(new).view(mask.shape)
    return found


def by_hand(masks, k, *, start=None, fresh=False, rate_from_k=None):
    """Train as Frankle and Carbin (2019) do; return (weights of step k, trained model, learning rates used)."""
    model = make_net()
    optimizer = sgd(model)
    schedule = cosine(optimizer)
    kept, used = {name: value.clone() for name, value in model.state_dict().items()}, []

    def rewind():
        if start is not None:
            model.load_state_dict(start)
        if fresh:
            optimizer.state.clear()
        for name, weight in pruned_weights(model).items():
            with torch.no_grad():
                weight[~masks[name]] = 0.0
                if weight in optimizer.state:
                    optimizer.state[weight]["momentum_buffer"][~masks[name]] = 0.0

    if k == 0:
        rewind()
    for step in range(STEPS):
        loss_of(model, step).backward()
        if step >= k:
            for name, weight in pruned_weights(model).items():
                weight.grad[~masks[name]] = 0.0
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scheduled = optimizer.param_groups[0]["lr"]
        if rate_from_k is not None and step >= k:
            optimizer.param_groups[0]["lr"] = rate_from_k
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.param_groups[0]["lr"] = scheduled
        if step + 1 == k:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            rewind()
        elif step >= k:
            with torch.no_grad():
                for name, weight in pruned_weights(model).items():
                    weight[~masks[name]] = 0.0
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 4 == 0:  # validation puts batch norms out of training for a moment, and changes nothing
            model.eval()
            model.train()
    return kept, model, used


def everything():
    return {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in pruned_weights(make_net()).items()}


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 5])
def test_rounds_equal_a_loop_written_by_hand_bit_for_bit(k, tmp_path):
    trained = []
    search = LotterySearch(rounds=3, rate=RATE, rewind_to=k)
    curve = search.run(lambda recipe: trained.append(train(recipe)[0].state_dict()), tmp_path)
    masks, theta = everything(), None
    for number in range(4):
        at_k, model, _ = by_hand(masks, k)
        theta = at_k if theta is None else theta
        assert equal(at_k, theta)  # the loop itself replays
        assert equal(trained[number], model.state_dict()), f"round {number}"
        masks = smaller(masks, pruned_weights(model))
        ticket = read_ticket(tmp_path / f"round-{number:02d}" / "ticket.safetensors")
        assert equal(dict(ticket.masks), masks)
        assert equal(dict(ticket.weights), theta)
        assert ticket.step == k
    assert [row.replay for row in curve.rows] == [None, "bit-equal", "bit-equal", "bit-equal"]


def test_learning_rate_rewinding_keeps_weights_and_replays_the_schedule(tmp_path):
    trained, rates = [], []

    def each_step(session, model, optimizer):
        rates.append(session.schedule.get_last_lr()[0])

    search = LotterySearch(rounds=2, rate=RATE, rewind="learning_rate")
    assert search.config.rewind_to == pytest.approx(1 / 3)
    search.run(lambda recipe: trained.append(train(recipe, each_step=each_step)[0].state_dict()), tmp_path)
    _, dense, used = by_hand(everything(), STEPS + 1)
    assert equal(trained[0], dense.state_dict())
    masks = everything()
    for number in (1, 2):
        masks = smaller(masks, {name: trained[number - 1][name] for name in PRUNED})
        _, model, used_again = by_hand(masks, STEPS // 3, start=trained[number - 1], fresh=True)
        assert used_again == used
        assert equal(trained[number], model.state_dict())


def test_fine_tuning_trains_on_at_the_last_learning_rate(tmp_path):
    trained = []
    LotterySearch(rounds=2, rate=RATE, rewind="none", rewind_to=2).run(
        lambda recipe: trained.append(train(recipe)[0].state_dict()), tmp_path
    )
    *_, used = by_hand(everything(), STEPS + 1)
    masks = everything()
    for number in (1, 2):
        masks = smaller(masks, {name: trained[number - 1][name] for name in PRUNED})
        *_, model, again = by_hand(masks, 2, start=trained[number - 1], fresh=True, rate_from_k=used[-1])
        assert again[:2] == used[:2]
        assert equal(trained[number], model.state_dict())
    ticket = read_ticket(tmp_path / "round-01" / "ticket.safetensors")
    assert ticket.learning_rates == ((used[-1],),)


@pytest.mark.parametrize("optimizer", [
    sgd,
    lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3),
    lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3, fused=True),
    lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True, amsgrad=True),
], ids=["sgd", "adamw", "fused", "foreach"])  # fmt: skip
def test_pruned_weights_and_their_moments_stay_zero(optimizer, tmp_path):
    train(ticket_recipe(tmp_path / "dense", rewind_to=3), optimizer=optimizer)
    path = tmp_path / "dense" / "ticket.safetensors"
    masks = read_ticket(path).masks
    checked = []

    def each_step(session, model, optimizers):
        if session.step < 3:
            return
        for name, weight in pruned_weights(model).items():
            gone = weight.detach()[~masks[name]]
            assert not gone.any()
            assert not torch.signbit(gone).any()
            moments = [v for v in optimizers.state[weight].values() if torch.is_tensor(v) and v.shape == weight.shape]
            assert moments
            if session.step == 3:
                assert not any(value[~masks[name]].any() for value in moments)
        checked.append(session.step)

    train(ticket_recipe(tmp_path / "sparse", ticket=path, rewind_to=3), optimizer=optimizer, each_step=each_step)
    assert checked == list(range(3, STEPS + 1))


def test_a_replay_that_is_not_exact_is_told_and_gets_the_tickets_weights(tmp_path, capsys):
    train(ticket_recipe(tmp_path / "dense", rewind_to=4))
    path = tmp_path / "dense" / "ticket.safetensors"
    seen = {}

    def each_step(session, model, optimizer):
        if session.step == 4:
            seen.update({name: value.clone() for name, value in model.state_dict().items()})

    _, session = train(ticket_recipe(tmp_path / "other", ticket=path, rewind_to=4), seed=5, each_step=each_step)
    ticket = read_ticket(path)
    for name, value in seen.items():
        expected = ticket.weights[name] * ticket.masks[name] if name in ticket.masks else ticket.weights[name]
        assert torch.equal(value, expected)
    assert session.receipt()["techniques"]["lottery"]["replay"].startswith("not bit-equal (0.weight)")
    assert "not bit-equal" in capsys.readouterr().out


@pytest.mark.parametrize("control", ["random_reinit", "random_mask"])
def test_controls(control, tmp_path):
    train(ticket_recipe(tmp_path / "dense", rewind_to=4))
    path = tmp_path / "dense" / "ticket.safetensors"
    ticket, seen = read_ticket(path), {}

    def each_step(session, model, optimizer):
        seen[session.step] = {name: value.clone() for name, value in model.state_dict().items()}

    options = {"ticket": path, "rewind_to": 4, "control": control}
    model = make_net()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    _, session = train(ticket_recipe(tmp_path / "a", **options), model=model, each_step=each_step)
    again = train(ticket_recipe(tmp_path / "b", **options))[0]
    other = train(ticket_recipe(tmp_path / "c", seed=1, **options))[0]
    assert equal(model.state_dict(), again.state_dict())
    assert not equal(model.state_dict(), other.state_dict())
    assert not (tmp_path / "a" / "ticket.safetensors").exists()
    for name, mask in ticket.masks.items():
        assert int((seen[STEPS][name] != 0).sum()) == int(mask.sum())
        if control == "random_reinit":
            assert all(torch.equal(seen[step][name] != 0, mask) for step in seen)
        else:
            assert not torch.equal(seen[4][name] != 0, mask)
            assert torch.equal(seen[4][name], ticket.weights[name] * (seen[4][name] != 0))
    if control == "random_reinit":
        assert session.receipt()["techniques"]["lottery"]["rewind_step"] == 0
    else:
        assert session.receipt()["techniques"]["lottery"]["replay"] == "bit-equal"
    assert initial.keys() == seen[STEPS].keys()


def test_random_reinit_draws_from_the_models_own_initialization(tmp_path):
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    nn.init.normal_(model[0].weight, std=3.0)
    nn.init.zeros_(model[0].bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in before.items() if value.dim() > 1}
    path = write_ticket(tmp_path / "t.safetensors", Ticket(masks, before, 0))
    begun_session(ticket_recipe(tmp_path / "out", ticket=path, control="random_reinit"), model, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value.flatten().sort().values, before[name].flatten().sort().values)
        assert torch.equal(value, before[name]) == (name == "0.bias")


def test_a_ticket_reads_with_safetensors_and_numpy_alone(tmp_path):
    train(ticket_recipe(tmp_path, rewind_to=2))
    ticket = read_ticket(tmp_path / "ticket.safetensors")
    with safe_open(tmp_path / "ticket.safetensors", framework="np") as file:
        told = json.loads(file.metadata()["eff_ticket"])
        for name in PRUNED:
            weight = file.get_tensor(f"weight.{name}")
            bits = np.unpackbits(file.get_tensor(f"mask.{name}"), count=weight.size)
            assert np.array_equal(bits.reshape(weight.shape).astype(bool), ticket.masks[name].numpy())
            assert np.array_equal(weight, ticket.weights[name].numpy())
        assert set(file.keys()) == {f"weight.{n}" for n in make_net().state_dict()} | {f"mask.{n}" for n in PRUNED}
    assert told == {"format": 1, "step": 2, "rewind": "weights", "learning_rates": []}
    assert not list(tmp_path.glob("rewind*"))


def test_tied_and_skipped_weights(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.body(self.embed(x)))

    def run(out, **options):
        torch.manual_seed(0)
        model = Tied()
        session, optimizer = begun_session(ticket_recipe(out, **options), model, 2)
        for _ in range(2):
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
            session.after_step()
        session.finish()
        return session.receipt()["techniques"]["lottery"]

    run(tmp_path / "dense", rewind_to=1)
    ticket = read_ticket(tmp_path / "dense" / "ticket.safetensors")
    assert list(ticket.masks) == ["body.weight"]
    assert set(ticket.weights) == {"embed.weight", "body.weight", "body.bias"}  # a tied tensor once
    told = run(tmp_path / "sparse", rewind_to=1, ticket=tmp_path / "dense" / "ticket.safetensors")
    assert (told["replay"], told["kept"]) == ("bit-equal", 16 - round(RATE * 16))
    with pytest.raises(MatchError, match=r"^ticket: .*pattern"):
        run(tmp_path / "none", skip=["decoder.*"])


@pytest.mark.parametrize("seed", [0, 5], ids=["exact", "loaded"])
def test_rewinding_under_quantization_aware_training(seed, tmp_path):
    qat = {"qat": {"scheme": "int8", "begin": 2, "range": "lsq", "fold_batch_norm": False}}
    dense = {"lottery": {"out": str(tmp_path / "dense"), "rate": RATE, "rewind_to": 4}}
    train(Recipe.from_dict(dense | qat))
    path = tmp_path / "dense" / "ticket.safetensors"
    sparse = {"lottery": {"out": str(tmp_path / "sparse"), "ticket": str(path), "rate": RATE, "rewind_to": 4}}
    model, session = train(Recipe.from_dict(sparse | qat), seed=seed)
    told = session.receipt()["techniques"]["lottery"]
    assert (told["replay"] == "bit-equal") == (seed == 0)
    for name, mask in read_ticket(path).masks.items():
        assert not pruned_weights(model)[name].detach()[~mask].any()
    kept = {"lottery": {"out": str(tmp_path / "kept"), "rewind": "learning_rate", "rewind_to": 4}}
    with pytest.raises(CompatibilityError, match="lottery with rewind learning_rate cannot be combined with qat"):
        train(Recipe.from_dict(kept | qat))
