"""A step whose gradients or loss are not finite leaves no trace: whatever is trained, in every loop, on all ranks."""

import copy
import sys
from pathlib import Path

import promise_drivers
import pytest
import torch
from promise_drivers import difference, run_bare, run_hf, run_lightning
from promise_table import TECHNIQUES, VARIANTS, make_net, recipe_of
from two_ranks import run_two_ranks

from shared_core.engine.compatibility import refusal
from shared_core.engine.session import Session
from shared_core.loss_scaling import LossScaleError

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
    before_step, skipped = Session.before_optimizer_step, Session.skipped_optimizer_step

    def before_optimizer_step(self):
        self.picture = picture(self)
        before_step(self)

    def skipped_optimizer_step(self):
        skipped(self)
        found.append(difference(self.picture, picture(self)))

    put(Session, "before_optimizer_step", before_optimizer_step)
    put(Session, "skipped_optimizer_step", skipped_optimizer_step)
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


def worker(rank, folder):
    """Rank 1 alone goes wrong, by a gradient and by its loss."""
    torch.set_num_threads(1)
    found = watch(setattr)
    for front_end in ("hf", "lightning"):
        for how in ("one", "loss"):
            found.clear()
            out = Path(folder) / f"{front_end}-{how}"
            out.mkdir(exist_ok=True)
            promise_drivers.make_net = poisoned(how, {BAD} if rank else ())
            options = {"batch_norm": False, "batch": 4}
            options |= {"ddp_find_unused_parameters": False} if front_end == "hf" else {"devices": 2, "strategy": "ddp"}
            result = RUNS[front_end](recipe_of("prune", "average") | LOSS_SCALE, out, **options)
            torch.save({"weights": result.weights, "skips": found}, out / f"{rank}.pt")


def test_what_one_rank_alone_sees_is_skipped_on_both(tmp_path):
    run_two_ranks(__file__, tmp_path)
    for folder in (path for path in tmp_path.iterdir() if path.is_dir()):
        first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
        assert first["skips"] == second["skips"] == [None], folder.name
        assert difference(first["weights"], second["weights"]) is None


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
