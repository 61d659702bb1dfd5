"""Lottery tickets against a loop written by hand: rewinding bit for bit, exact counts, controls, files, refusals."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lottery_runs import CLIP, STEPS, batch, cosine, loss_of, make_net, sgd, snapshot, train
from safetensors import safe_open
from torch import nn
from two_ranks import run_two_ranks

from shared_core import Recipe, Session
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.pruning import LotteryTicket, TicketConfig, read_ticket
from shared_core.pruning.lottery import Ticket, write_ticket

PRUNED = ("0.weight", "3.weight", "5.weight")
RATE = 0.3


def ticket_recipe(out, **options):
    return Recipe.from_dict({"ticket": {"out": str(out), "rate": RATE, **options}})


def pruned_weights(model):
    return {name: dict(model.named_parameters())[name] for name in PRUNED}


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


def equal(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items()) and first.keys() == second.keys()


def everything():
    return {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in pruned_weights(make_net()).items()}


@pytest.mark.parametrize("k", [0, 1, 5])
def test_rounds_equal_a_loop_written_by_hand_bit_for_bit(k, tmp_path):
    trained = []
    search = LotteryTicket(rounds=3, rate=RATE, rewind_to=k)
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

    search = LotteryTicket(rounds=2, rate=RATE, rewind="learning_rate")
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
    LotteryTicket(rounds=2, rate=RATE, rewind="none", rewind_to=2).run(
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


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3, fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True, amsgrad=True),
    ],
    ids=["sgd", "adamw", "fused", "foreach"],
)
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
    assert session.receipt()["techniques"]["ticket"]["replay"].startswith("not bit-equal (0.weight)")
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
        assert session.receipt()["techniques"]["ticket"]["rewind_step"] == 0
    else:
        assert session.receipt()["techniques"]["ticket"]["replay"] == "bit-equal"
    assert initial.keys() == seen[STEPS].keys()


def test_random_reinit_draws_from_the_models_own_initialisation(tmp_path):
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    nn.init.normal_(model[0].weight, std=3.0)
    nn.init.zeros_(model[0].bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in before.items() if value.dim() > 1}
    path = write_ticket(tmp_path / "t.safetensors", Ticket(masks, before, 0))
    session = Session(ticket_recipe(tmp_path / "out", ticket=path, control="random_reinit"))
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value.flatten().sort().values, before[name].flatten().sort().values)
        assert torch.equal(value, before[name]) == (name == "0.bias")


def test_a_dense_run_resumed_beyond_step_k_finds_the_same_ticket(tmp_path):
    saved = {}

    def keep(session, model, optimizer):
        saved[session.step] = snapshot(session, model, optimizer)

    recipe = ticket_recipe(tmp_path / "out", rewind_to=4)
    whole = train(recipe, each_step=keep)[0]
    found = (tmp_path / "out" / "ticket.safetensors").read_bytes()
    result = (tmp_path / "out" / "round.json").read_text()
    for stop in (3, 4, 7, STEPS - 1):
        (tmp_path / "out" / "round.json").unlink()
        again = train(recipe, seed=9, state=saved[stop])[0]
        assert equal(whole.state_dict(), again.state_dict())
        assert (tmp_path / "out" / "ticket.safetensors").read_bytes() == found
        assert (tmp_path / "out" / "round.json").read_text() == result
    (tmp_path / "out" / "ticket.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must hold rewind\.safetensors.*wrote at step 4"):
        train(recipe, state=saved[7])
    train(ticket_recipe(tmp_path / "other", rewind_to=4), seed=9)
    with pytest.raises(CheckpointError, match="must hold weights of the run that is resumed, got those of another"):
        train(ticket_recipe(tmp_path / "other", rewind_to=4), state=saved[7])


def test_a_run_with_a_ticket_resumes_and_refuses_another_rounds_checkpoint(tmp_path):
    LotteryTicket(rounds=2, rate=RATE, rewind_to=4).run(train, tmp_path)
    saved = {}

    def keep(session, model, optimizer):
        saved[session.step] = snapshot(session, model, optimizer)

    def recipe(number, out):
        path = tmp_path / f"round-{number - 1:02d}" / "ticket.safetensors"
        return ticket_recipe(tmp_path / out, ticket=path, rewind_to=4)

    whole = train(recipe(2, "a"), each_step=keep)[0]
    for stop in (3, 4, 9):
        assert equal(whole.state_dict(), train(recipe(2, f"from{stop}"), seed=9, state=saved[stop])[0].state_dict())
    with pytest.raises(CheckpointError, match="got one of another round"):
        train(recipe(1, "b"), state=saved[9])
    with pytest.raises(CheckpointError, match="or of a run that rewound there, got one of step 9"):
        plain = {**saved[9]["session"], "techniques": {}}
        train(recipe(2, "c"), state={**saved[9], "session": plain})


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
        session = Session(ticket_recipe(out, **options))
        session.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.begin([optimizer], total_steps=2)
        for _ in range(2):
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
            session.after_optimizer_step()
        session.finish()
        return session.receipt()["techniques"]["ticket"]

    run(tmp_path / "dense", rewind_to=1)
    ticket = read_ticket(tmp_path / "dense" / "ticket.safetensors")
    assert list(ticket.masks) == ["body.weight"]
    assert set(ticket.weights) == {"embed.weight", "body.weight", "body.bias"}  # a tied tensor once
    told = run(tmp_path / "sparse", rewind_to=1, ticket=tmp_path / "dense" / "ticket.safetensors")
    assert (told["replay"], told["kept"]) == ("bit-equal", 16 - round(RATE * 16))
    with pytest.raises(MatchError, match=r"^ticket: .*pattern"):
        run(tmp_path / "none", skip=["decoder.*"])


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"ticket: control must be none for a dense run"):
        TicketConfig(out="x", control="random_mask")
    with pytest.raises(ConfigError, match=r"ticket: conv_rate must not be given with scope global"):
        TicketConfig(out="x", scope="global", conv_rate=0.1)
    for rate in (0, 1, -0.1, float("nan"), "much"):
        with pytest.raises(ConfigError, match=r"rate must be"):
            TicketConfig(out="x", rate=rate)
    with pytest.raises(ConfigError, match=r"rewind_to must be a step"):
        TicketConfig(out="x", rewind_to="soon")


@pytest.mark.parametrize("rewind_to", [STEPS, 500, 1.0])
def test_step_k_must_lie_before_the_end(rewind_to, tmp_path):
    with pytest.raises(ConfigError, match=f"rewind_to must lie before the end of the run, {STEPS} steps"):
        train(ticket_recipe(tmp_path, rewind_to=rewind_to))


def test_what_cannot_be_right_is_refused_before_training(tmp_path):
    train(ticket_recipe(tmp_path / "dense", rewind_to=3))
    path = tmp_path / "dense" / "ticket.safetensors"
    with pytest.raises(CheckpointError, match="out must not hold a finished run"):
        train(ticket_recipe(tmp_path / "dense", rewind_to=3))
    with pytest.raises(CheckpointError, match="rewind_to must be the ticket's step 3, got step 0"):
        train(ticket_recipe(tmp_path / "a", ticket=path))
    with pytest.raises(CheckpointError, match="must be a ticket for rewind none, got one for weights"):
        train(ticket_recipe(tmp_path / "a", ticket=path, rewind="none", rewind_to=3))
    with pytest.raises(CheckpointError, match="must be a ticket file, but there is none"):
        train(ticket_recipe(tmp_path / "a", ticket=tmp_path / "nowhere"))
    for content in (b"", path.read_bytes()[:-20], b"x" * 100):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="must be a whole ticket file"):
            train(ticket_recipe(tmp_path / "a", ticket=tmp_path / "bad.safetensors"))
    with pytest.raises(CheckpointError, match=r"only the ticket has 0\.weight"):
        train(ticket_recipe(tmp_path / "a", ticket=path, rewind_to=3, skip=["first"]))
    wide = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(20, 6\) and its mask \(16, 6\)"):
        train(ticket_recipe(tmp_path / "a", ticket=path, rewind_to=3), model=wide)
    with pytest.raises(CompatibilityError, match="LBFGS"):
        train(ticket_recipe(tmp_path / "a"), optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
    with pytest.raises(CompatibilityError, match="prune cannot be combined with ticket"):
        Session(Recipe.from_dict({"ticket": {"out": "x"}, "prune": {"sparsity": 0.5}})).attach(make_net())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="out must be a folder"):
        train(ticket_recipe(tmp_path / "file" / "out"))


def test_a_run_that_diverged_or_ended_early_leaves_no_ticket(tmp_path):
    def poison(session, model, optimizer):
        if session.step == STEPS:
            with torch.no_grad():
                model[3].weight[0, 0] = float("nan")

    with pytest.raises(TrainingError, match=r"got NaN in 3\.weight at step 12"):
        train(ticket_recipe(tmp_path / "nan"), each_step=poison)
    session = Session(ticket_recipe(tmp_path / "early", rewind_to=3))
    model = make_net()
    session.attach(model)
    session.begin([sgd(model)], total_steps=STEPS)
    with pytest.raises(TrainingError, match="must go on beyond rewind_to = step 3"):
        session.finish()
    assert not list(tmp_path.glob("*/ticket.safetensors"))
    assert not list(tmp_path.glob("*/round.json"))


@pytest.mark.parametrize("seed", [0, 5], ids=["exact", "loaded"])
def test_rewinding_under_quantization_aware_training(seed, tmp_path):
    qat = {"qat": {"scheme": "int8", "begin": 2, "range": "lsq", "fold_batch_norm": False}}
    dense = {"ticket": {"out": str(tmp_path / "dense"), "rate": RATE, "rewind_to": 4}}
    train(Recipe.from_dict(dense | qat))
    path = tmp_path / "dense" / "ticket.safetensors"
    sparse = {"ticket": {"out": str(tmp_path / "sparse"), "ticket": str(path), "rate": RATE, "rewind_to": 4}}
    model, session = train(Recipe.from_dict(sparse | qat), seed=seed)
    told = session.receipt()["techniques"]["ticket"]
    assert (told["replay"] == "bit-equal") == (seed == 0)
    for name, mask in read_ticket(path).masks.items():
        assert not pruned_weights(model)[name].detach()[~mask].any()
    kept = {"ticket": {"out": str(tmp_path / "kept"), "rewind": "learning_rate", "rewind_to": 4}}
    with pytest.raises(CompatibilityError, match="ticket with rewind learning_rate cannot be combined with qat"):
        train(Recipe.from_dict(kept | qat))


def ranks_main(rank, port, folder):
    """Data-parallel training of two rounds; each rank sees half of every batch."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    states = []
    for number in range(2):
        options = {"rewind_to": 2}
        if number:
            options["ticket"] = str(folder / "round-00" / "ticket.safetensors")
            dist.barrier()
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        for index, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
        session = Session(ticket_recipe(folder / f"round-{number:02d}", **options))
        session.attach(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.begin([optimizer], total_steps=5)
        for step in range(5):
            x, labels = batch(step)
            nn.functional.cross_entropy(parallel(x[rank::2]), labels[rank::2]).backward()
            session.before_optimizer_step()
            optimizer.step()
            session.after_optimizer_step()
            optimizer.zero_grad()
        states.append(session.state_dict())
        session.finish()
        states.append(dict(model.state_dict()))
    torch.save(states, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_agree_and_one_writes(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    for mine, theirs in zip(first[1::2], second[1::2], strict=True):
        assert equal(mine, theirs)
    assert [state["techniques"] for state in first[::2]] == [state["techniques"] for state in second[::2]]
    assert first[2]["techniques"]["ticket"]["replay"] == "bit-equal"
    for name, mask in read_ticket(tmp_path / "round-00" / "ticket.safetensors").masks.items():
        assert torch.equal(first[3][name] != 0, mask)


if __name__ == "__main__":
    ranks_main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
