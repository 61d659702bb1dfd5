"""A plain loop: what its steps mean for the techniques; `test_training_block.py` has what surrounds it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from shared_core import training
from shared_core.errors import CompatibilityError, TrainingError

PRUNE = {"prune": {"sparsity": 0.5, "end": 2}}
EXAMPLES = torch.ones(2, 16)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def begun(recipe, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training(recipe, model, optimizer, **{"total_steps": 4, **options})


def gradients(loop, factor=1.0):
    loop.backward(loop.inner(EXAMPLES).square().mean() * factor)


def test_gradients_are_shown_before_they_are_clipped_and_once_a_step(monkeypatch):
    with begun(PRUNE) as loop:
        seen = []
        show = loop.session.before_step
        monkeypatch.setattr(
            loop.session, "before_step", lambda: (seen.append(loop.inner[2].weight.grad.norm()), show())
        )
        gradients(loop, 100.0)
        loop.complete()
        nn.utils.clip_grad_norm_(loop.inner.parameters(), 0.01)
        loop.step()
        loop.zero_grad()
        assert len(seen) == 1
        assert seen[0] > 0.1


@pytest.mark.parametrize("own", [True, False])
def test_a_step_that_a_scaler_skips_or_whose_gradients_are_dropped_counts_as_skipped(own):
    options = {"enabled": True, "init_scale": 8.0}
    scaler = torch.amp.GradScaler("cpu", **options)
    recipe = PRUNE if own else {**PRUNE, "loss_scale": {"kind": "dynamic", "init_scale": 8.0}}
    with begun(recipe) as loop:
        for factor in (1.0, float("inf"), 1.0):
            if own:
                scaler.scale(torch.ones(()))
                gradients(loop, factor * scaler.get_scale())
                scaler.unscale_(loop.optimizer)
                loop.step(lambda: scaler.step(loop.optimizer))
                scaler.update()
            else:
                gradients(loop, factor)
                loop.step()
            loop.zero_grad()
        gradients(loop)
        loop.complete()
        loop.zero_grad()
        assert (loop.session.step, loop.session.skipped) == (2, 2)


def test_what_would_train_otherwise_than_told_is_stopped():
    with pytest.raises(TrainingError, match=r"must follow loop\.backward"), begun(PRUNE) as loop:
        loop.step()
    with (
        pytest.raises(TrainingError, match="2 backward calls, but distill expects at most 1"),
        begun({"distill": {"teacher": net()}}) as loop,
    ):
        with loop.forward():
            gradients(loop)
        with loop.forward():
            gradients(loop)


def test_batches_for_ranges_are_given_or_asked_for():
    recipe = {"qat": {"scheme": "int8", "begin": 1}, "average": {"kind": "ema"}}
    with pytest.raises(CompatibilityError, match=r"qat: .*; pass calibration= to training"), begun(recipe):
        pass
    with begun(recipe, calibration=[[EXAMPLES]]) as loop:
        for _ in range(4):
            gradients(loop)
            loop.step()
            loop.zero_grad()
    assert loop.session.receipt()["finished"]


def test_weights_that_diverged_are_named_rather_than_the_batches():
    recipe = {"qat": {"scheme": "int8"}, "average": {"kind": "ema"}}
    with (
        pytest.raises(TrainingError, match=r"weights contain NaN or infinity, such as 0\.weight"),
        begun(recipe, calibration=[[EXAMPLES]]) as loop,
    ):
        for factor in (1.0, float("nan")):
            gradients(loop, factor)
            loop.step()
            loop.zero_grad()


def test_a_step_that_torch_makes_to_save_an_optimizer_hides_no_skipped_one():
    with begun({**PRUNE, "loss_scale": {"kind": "dynamic", "init_scale": 8.0}}) as loop:
        loop.optimizer.step()
        gradients(loop, float("inf"))
        loop.step()
        assert (loop.session.step, loop.session.skipped) == (0, 1)


def test_an_optimizer_may_evaluate_the_loss_several_times_in_a_step():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with training({"average": {"kind": "ema"}}, model, optimizer, total_steps=2) as loop:

        def evaluate():
            loop.zero_grad()
            loss = model(EXAMPLES).square().mean()
            loop.backward(loss)
            return loss

        losses = [float(evaluate().detach())]
        for _ in range(2):
            evaluate()
            loop.step(lambda: optimizer.step(evaluate))
        losses.append(float(model(EXAMPLES).square().mean()))
        assert (loop.session.step, loop.session.skipped) == (2, 0)
    assert losses[1] < losses[0]


def test_lbfgs_is_refused_without_a_closure_and_by_techniques_that_it_passes_by():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with training({"average": {"kind": "ema"}}, model, optimizer, total_steps=2) as loop:
        gradients(loop)
        with pytest.raises(TrainingError, match=r"loop\.step\(lambda: optimizer\.step\(closure\)\)"):
            loop.step()
    distill = {"distill": {"teacher": net()}}
    with pytest.raises(CompatibilityError, match="LBFGS"), training(distill, model, optimizer, total_steps=2):
        pass
    assert not model._forward_hooks


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copied_loop_would_not_see_its_steps_and_is_refused(how):
    with begun(PRUNE) as loop:
        with pytest.raises(TrainingError, match="cannot be copied"):
            how(loop)
        how(loop.inner)


def test_a_seed_draws_other_masks():
    masks = []
    for seed in (0, 0, 1):
        with begun({"prune": {"sparsity": 0.5, "criterion": "random", "end": 0}}, seed=seed) as loop:
            gradients(loop)
            loop.step()
            masks.append(loop.inner[0].weight == 0)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("steps_itself", [True, False])
def test_a_loop_that_never_calls_step_is_told_what_to_call(steps_itself):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with training({"prune": {"sparsity": 0.5, "end": 1}}, model, optimizer, total_steps=2) as loop:
        for _ in range(2):
            with loop.forward():
                loss = model(EXAMPLES).square().mean()
            if steps_itself:
                loss.backward()
                optimizer.step()
            else:
                loop.backward(loss)
                loop.step()
            optimizer.zero_grad()
    assert any("loop.step()" in note for note in loop.session.notes) == steps_itself
