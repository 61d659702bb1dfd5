"""A step that is not finite, or that a technique discards, leaves no trace: in every loop, on all ranks."""

import copy
import itertools
import os
import sys
from pathlib import Path

import promise_drivers
import pytest
import torch
from plain_loop import begun_session, plain_step
from promise_drivers import difference, run_bare, run_hf, run_lightning
from promise_table import NUM_STEPS, TECHNIQUES, VARIANTS, make_net, recipe_of
from pytorch_lightning import Callback
from torch import nn
from transformers import TrainerCallback
from two_ranks import run_two_ranks

from shared_core import Session
from shared_core.engine.checks.compatibility import refusal
from shared_core.loss_scaling import LossScaleError
from shared_core.pruning import Pruning

BAD = 5
"""The training forward that goes wrong: after techniques have begun, before they end."""
RUNS = {"bare": lambda recipe, folder: run_bare(recipe), "hf": run_hf, "lightning": run_lightning}
LOSS_SCALE = {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "telemetry_every": 0}}


def poisoned(how, bad, make=make_net):
    """Like `make_net`, but the training forwards numbered `bad` have a loss or gradients that are not finite."""

    def made(*args, **kwargs):
        net, count = make(*args, **kwargs), [0]

        def spoil(module, inputs, output):
            if not module.training or not torch.is_grad_enabled() or "loss" not in output:
                return None
            count[0] += 1
            if count[0] not in bad:
                return None
            if how == "loss":
                return {**output, "loss": output["loss"] * float("inf")}
            places = slice(None) if how == "all" else (0, 0)

            def nan(gradient):
                gradient = gradient.clone()
                gradient[places] = float("nan")
                return gradient

            output["logits"].register_hook(nan)
            return None

        net.register_forward_hook(spoil)
        return net

    return made


TRANSIENT = {
    "window": "ranges seen since the last step, which a step uses up, applied or not",
    "gradients": "of peers, which a step uses up",
    "num_left_out": "counts the batches whose scores were not finite",
    "discarded": "counts discarded steps",
    "tallies": "counts what was recomputed, for skipped steps too",
    "in_a_row": "and those without one applied between them",
}


def lasting(state):
    """A technique's state without what a step uses up and without counts of skips."""
    if isinstance(state, dict):
        return {key: lasting(value) for key, value in state.items() if key not in TRANSIENT}
    return [lasting(each) for each in state] if isinstance(state, list | tuple) else copy.deepcopy(state)


def picture(session):
    """All that a step may change: weights, moments, learning rates, the state of techniques."""
    context = session.context
    optimizers = [optimizer.state_dict() for optimizer in context.optimizers]
    states = {key: each.state_dict() for key, each in session.techniques.items() if key != "loss_scale"}
    return lasting({"model": dict(context.model.state_dict()), "optimizers": optimizers, "techniques": states})


@pytest.fixture
def skips(monkeypatch):
    """What was different after each skipped step from what was there before."""
    return watch(monkeypatch.setattr)


def watch(put):
    found = []
    before, after = Session.before_step, Session.after_step

    def before_step(self):
        self.picture = picture(self)
        before(self)

    def after_step(self, applied=True):
        counts = after(self, applied)
        if not counts:
            found.append(difference(self.picture, picture(self)))
        return counts

    put(Session, "before_step", before_step)
    put(Session, "after_step", after_step)
    return found


SCALED = [key for key, row in (TECHNIQUES | VARIANTS).items() if not refusal(row.key, "loss_scale")]
ROWS = [key for key in SCALED if key not in ("loss_scale", "soup")]  # which has nothing to do in steps
HOWS = ("one", "all", "loss")


@pytest.mark.parametrize(("number", "key"), list(enumerate(ROWS)))
def test_nothing_moves_in_a_bare_loop(key, number, skips, monkeypatch):
    # chunked logits take no hook
    how = "loss" if key == "distill-chunked" else HOWS[number % 3]
    monkeypatch.setattr(promise_drivers, "make_net", poisoned(how, {BAD}))
    result = run_bare(recipe_of(key) | LOSS_SCALE)
    assert skips == [None]
    assert all(torch.isfinite(value).all() for value in result.weights.values())


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
@pytest.mark.parametrize(
    ("keys", "how"),
    [
        (("prune", "average", "checkpointing"), "one"),
        (("qat", "distill-ema"), "all"),
        (("cluster", "average-last"), "loss"),
        (("primary_weights",), "all"),
        (("ticket-late",), "one"),
        (("prune-rigl",), "loss"),
    ],
)
def test_nothing_moves_in_a_trainer(front_end, keys, how, skips, monkeypatch, tmp_path):
    monkeypatch.setattr(promise_drivers, "make_net", poisoned(how, {BAD}))
    result = RUNS[front_end](recipe_of(*keys) | LOSS_SCALE, tmp_path)
    assert skips == [None]
    assert result.receipt["steps"]["skipped"] == 1
    assert all(torch.isfinite(value).all() for value in result.weights.values())


@pytest.mark.parametrize("front_end", RUNS)
def test_permanent_overflow_ends_in_an_error_and_leaves_the_weights(front_end, skips, monkeypatch, tmp_path):
    first = dict(make_net().state_dict())
    nets = []

    def kept(*args, **kwargs):
        nets.append(poisoned("all", range(99))(*args, **kwargs))
        return nets[-1]

    monkeypatch.setattr(promise_drivers, "make_net", kept)
    recipe = recipe_of("prune") | {"loss_scale": LOSS_SCALE["loss_scale"] | {"max_skips": 4}}
    with pytest.raises(LossScaleError, match="4"):
        RUNS[front_end](recipe, tmp_path)
    assert set(skips) == {None}
    parameters = dict(nets[-1].named_parameters())
    assert all(
        torch.equal(first[name.replace("parametrizations.", "")], value.cpu()) for name, value in parameters.items()
    )


def worker(rank, folder, front_end, how):
    """Rank 1 alone goes wrong, by a gradient or by its loss."""
    torch.set_num_threads(1)
    found = watch(setattr)
    promise_drivers.make_net = poisoned(how, {BAD} if rank else ())
    options = {"batch_norm": False, "batch": 4}
    options |= {"ddp_find_unused_parameters": False} if front_end == "hf" else {"devices": 2, "strategy": "ddp"}
    result = RUNS[front_end](recipe_of("prune", "average") | LOSS_SCALE, folder, **options)
    torch.save({"weights": result.weights, "skips": found}, folder / f"{rank}.pt")


@pytest.mark.parametrize("how", ["one", "loss"])
@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_what_one_rank_alone_sees_is_skipped_on_both(front_end, how, tmp_path):
    run_two_ranks(__file__, tmp_path, tmp_path, front_end, how)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["skips"] == second["skips"] == [None]
    assert difference(first["weights"], second["weights"]) is None


if __name__ == "__main__":
    worker(int(os.environ["RANK"]), Path(sys.argv[1]), *sys.argv[2:])


LEFT_OUT = {
    **{key: None for key in TECHNIQUES if key not in ("dp", "soup", "primary_weights")},
    **{
        f"prune-{criterion}": {"prune": {"sparsity": 0.5, "criterion": criterion, "begin": 1, "end": 6, "every": 1}}
        for criterion in ("taylor", "fisher", "wanda", "movement")
    },
    **{
        f"neuron-{criterion}": {
            "prune": {"sparsity": 0.5, "granularity": "neuron", "criterion": criterion, "schedule": "one_shot", **at}
        }
        for criterion, at in (
            ("magnitude", {"begin": 1, "end": 1}),
            ("neuron_taylor", {"begin": 5, "end": 5}),
            ("taylor", {"begin": 1, "end": 1}),
            ("shapley", {"begin": 1, "end": 1}),
        )
    },
    "prune-flops": {"prune": {"sparsity": 0.5, "cost": "flops", "schedule": "one_shot", "begin": 1, "end": 1}},
    "budget": {"checkpointing": {"policy": "budget:least", "include": ["*norm", "*dropout", "*hidden"]}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("forward_first", [False, True])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_training_step_that_returns_none_ends_no_run(name, forward_first, tmp_path, monkeypatch):
    make = promise_drivers.lightning_module

    def leaving_out(*args):
        module = make(*args)
        step = module.training_step

        def training_step(batch, batch_idx):
            # of windows of two: the second of the first, all of the third, the first of the fourth
            if batch_idx not in (1, 4, 5, 6):
                return step(batch, batch_idx)
            if forward_first:
                step(batch, batch_idx)
            return None

        module.training_step = training_step
        return module

    monkeypatch.setattr(promise_drivers, "lightning_module", leaving_out)
    result = run_lightning(LEFT_OUT[name] or recipe_of(name), tmp_path, accumulate=2)
    # with a scaler Lightning skips the step of a window whose last micro-batch is left out
    skipped = 4 if name == "loss_scale" else 0
    assert result.receipt["steps"] == {"applied": 8 - skipped, "skipped": skipped, "planned": 8}
    assert not result.receipt["unreached"]
    if told := result.receipt["techniques"].get("prune"):
        found = {f"net.{key}": value for key, value in result.weights.items()}
        zeros = sum(int((found[entry["name"]] == 0).sum()) for entry in told["tensors"])
        assert zeros == told["pruned"] >= 0.4 * told["numel"]
    assert all(value.isfinite().all() for value in result.weights.values())


@pytest.mark.parametrize("criterion", ["taylor", "fisher", "wanda"])
def test_masks_that_were_due_after_steps_without_gradients_are_those_of_the_next_step(criterion):
    torch.manual_seed(0)
    model, data = nn.Linear(6, 4, bias=False), torch.randn(5, 8, 6)
    target = torch.randn(5, 8, 4)
    recipe = {"prune": {"sparsity": 0.5, "criterion": criterion, "schedule": "one_shot", "begin": 1, "scope": "local"}}
    session, optimizer = begun_session(recipe, model, 5)
    for step in range(4):
        loss = (model(data[step]) - target[step]).square().mean() if step > 1 else None
        if step == 2:
            weight = model.weight.detach().clone().double()
            errors = data[2].double() @ weight.T - target[2].double()
            each = torch.einsum("no,ni->noi", errors, data[2].double())
            after = weight - 0.1 * each.mean(0) / 2  # SGD: the mean is over 4 outputs, too
            scores = {
                "taylor": (weight * each.mean(0)).abs(),
                "fisher": after.square() * each.square().mean(0),
                "wanda": after.abs() * data[2].double().norm(dim=0),
            }[criterion]
        plain_step(session, optimizer, loss)
        assert int((model.weight == 0).sum()) == (12 if step > 1 else 0)
    if criterion == "wanda":  # within a row
        kept = scores.argsort(1).argsort(1) >= 3
    else:
        kept = (scores.view(-1).argsort().argsort() >= 12).view_as(scores)
    assert torch.equal(model.weight != 0, kept)


AT = 3


@pytest.fixture
def discards_the_third_step(monkeypatch):
    seen = []
    original = Pruning.before_step

    def before_step(self, context):
        original(self, context)
        seen.append(context.step)
        context.discard_step = len(seen) == AT

    monkeypatch.setattr(Pruning, "before_step", before_step)
    return seen


def test_weights_moments_and_step_stay(discards_the_third_step):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    session = Session({"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}})
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session.begin([optimizer], total_steps=10)
    for number in range(1, 6):
        before = model.weight.detach().clone()
        moments = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
        session.loss(model(torch.randn(3, 6)).square().mean()).backward()
        session.before_step()
        optimizer.step()
        assert session.after_step() is (number != AT)
        if number == AT:
            assert torch.equal(model.weight, before)
            assert all(torch.equal(value, moments[key]) for key, value in optimizer.state[model.weight].items())
        optimizer.zero_grad()
    assert (session.step, session.skipped) == (4, 1)
    assert not session.context.discard_step


def test_hugging_face_holds_the_learning_rate(discards_the_third_step, tmp_path):
    rates = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
            rates.append(lr_scheduler.get_last_lr()[0])

    result = run_hf(recipe_of("prune"), tmp_path, lr_scheduler_type="linear", callbacks=[Rates()])
    assert (result.receipt["steps"]["applied"], result.receipt["steps"]["skipped"]) == (NUM_STEPS - 1, 1)
    falls = [before > after for before, after in itertools.pairwise(rates)]
    assert falls == [number != AT for number in range(2, NUM_STEPS + 1)]


def test_hugging_face_counts_an_overflow_right_behind_it(discards_the_third_step, tmp_path):
    class Overflow(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == AT:
                self.hook = model.register_forward_hook(lambda _, inputs, out: {**out, "loss": out["loss"] * torch.inf})
            elif state.global_step == AT + 1:
                self.hook.remove()

    recipe = recipe_of("prune") | {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0}}
    steps = run_hf(recipe, tmp_path, callbacks=[Overflow()]).receipt["steps"]
    assert (steps["applied"], steps["skipped"]) == (NUM_STEPS - 2, 2)


def test_lightning_counts_it_once(discards_the_third_step, tmp_path):
    states = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            states.append(max(int(value["step"]) for value in trainer.optimizers[0].state.values()))

    result = run_lightning(recipe_of("prune"), tmp_path, callbacks=[Steps()])
    assert (result.receipt["steps"]["applied"], result.receipt["steps"]["skipped"]) == (NUM_STEPS - 1, 1)
    assert states[AT - 1] == states[AT - 2] == AT - 1
