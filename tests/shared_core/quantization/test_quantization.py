"""Quantization-aware training as a technique: ranges, accumulation, skipped steps, resume, baking, refusals."""

import numpy as np
import pytest
import torch
from quantization_runs import Run, batches, conv_net, small_net
from torch import nn

from shared_core.errors import CheckpointError, ConfigError
from shared_core.quantization import apply_ranges
from shared_core.quantization.fake_quant_layers import FakeQuantLinear


def test_ranges_are_the_moving_average_of_each_step():
    run = Run(small_net(), ema_constant=0.25)
    data = batches(5)
    expected = None
    for batch in data:
        run.step(batch)
        window = np.array([batch.min(), batch.max()], np.float64)
        expected = window if expected is None else 0.75 * expected + 0.25 * window
        assert run.range_of("0") == pytest.approx(tuple(expected), rel=1e-6)
    assert run.technique.figures() == {"qat/active": 1.0, "qat/layers": 2.0, "qat/range_updates": 5.0}


def test_first_step_has_float_activations_and_quantised_weights():
    run = Run(small_net())
    net, (batch,) = run.model, batches(1)
    plain = small_net()
    with torch.no_grad():
        for layer in (plain[0], plain[2]):
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
        assert torch.allclose(net(batch), plain(batch), atol=1e-6)
    weight = net[0].weight.clone()
    run.step(batch)
    with torch.no_grad():
        after = net(batch)
        net[0].quantizer.has_range = net[2].quantizer.has_range = False
        assert not torch.equal(net(batch), after)
    assert not torch.equal(net[0].weight, weight)


def test_micro_batches_count_as_one_batch():
    (batch,) = batches(1)
    whole, parts = Run(small_net()), Run(small_net())
    for _ in range(4):
        whole.step(batch)
        parts.step(*batch.chunk(4))
        batch = batch * 1.3
        assert whole.range_of("0") == parts.range_of("0")
        assert whole.range_of("2") == pytest.approx(parts.range_of("2"), rel=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_recomputation_does_not_count_twice():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    (batch,) = batches(1)
    plain, again = Run(small_net()), Run(Recomputed())
    for _ in range(3):
        plain.step(batch)
        again.step(batch)
    assert plain.range_of("2") == again.range_of("net.2")


def test_a_skipped_step_leaves_no_trace():
    small, big, last = batches(3)
    skipped, clean = Run(small_net()), Run(small_net())
    skipped.step(small)
    clean.step(small)
    skipped.step(big * 100, skip=True)
    skipped.step(last)
    clean.step(last)
    assert skipped.technique.ranges() == clean.technique.ranges()
    assert skipped.technique.figures() == clean.technique.figures()
    assert torch.equal(skipped.model[0].weight, clean.model[0].weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_window_is_counted_and_not_committed(bad):
    run = Run(small_net())
    good, broken = batches(2)
    run.step(good)
    before = run.technique.ranges()
    broken[0, 0] = bad
    run.model.train()
    with torch.no_grad():
        out = run.model(broken)
    if bad != bad:
        assert out[0].isnan().all()
    run.technique.before_step(run.context)
    run.technique.after_step(run.context, True)
    assert run.technique.ranges()["0"] == before["0"]
    assert run.technique.report()["non_finite_windows"] >= 1


def test_evaluation_never_updates():
    run = Run(small_net())
    good, other = batches(2)
    run.step(good)
    state = run.technique.state_dict()
    run.model.eval()
    run.model(other * 50)
    with run.technique.swapped(run.context, "evaluate"):
        run.model.train()  # a validation that forgets eval()
        run.model(other * 50)
    after = run.technique.state_dict()
    assert all(torch.equal(state[key], after[key]) for key in ("ranges", "window", "known"))
    run.step(good)
    assert run.technique.figures()["qat/range_updates"] == 2.0


def test_begin_and_freeze_turn_at_their_steps():
    run = Run(small_net(), begin=0.3, freeze_observers=5)
    (batch,) = batches(1)
    plain = small_net()
    for step in range(8):
        active = run.technique.figures()["qat/active"]
        assert active == float(step >= 3)
        if step == 0:
            assert torch.equal(run.model(batch), plain(batch))
        run.step(batch * (step + 1))
        if step == 4:
            frozen = run.technique.ranges()
    assert run.technique.ranges() == frozen
    assert run.technique.report()["range_updates"] == 5
    assert run.technique.report()["began_at_step"] == 3


def test_positions_that_cannot_be():
    with pytest.raises(ConfigError, match="freeze_observers must be step 1 or later"):
        Run(small_net(), freeze_observers=0)
    with pytest.raises(ConfigError, match="begin must lie within the 10 steps"):
        Run(small_net(), begin=11)
    assert Run(small_net(), total_steps=None).technique.figures()["qat/active"] == 1.0
    with pytest.raises(ConfigError, match="must be a step number here"):
        Run(small_net(), total_steps=None, begin=0.5)


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_resume_is_exact(stop, tmp_path):
    from shared_core.engine.state_file import load_state, save_state

    data = batches(8)
    whole = Run(small_net(), begin=3, freeze_observers=6)
    for batch in data:
        whole.step(batch)
    first = Run(small_net(), begin=3, freeze_observers=6)
    for batch in data[:stop]:
        first.step(batch)
    save_state(tmp_path, first.technique.state_dict())
    second_net = small_net()
    second_net.load_state_dict(first.model.state_dict())
    second = Run(second_net, begin=3, freeze_observers=6, step=stop, state=load_state(tmp_path))
    for batch in data[stop:]:
        second.step(batch)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = whole.technique.state_dict(), second.technique.state_dict()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]


def test_resume_inside_a_window():
    a, b = batches(2)
    whole, first = Run(small_net()), Run(small_net())
    whole.step(a, b)
    first.model.train()
    (first.model(a).square().mean() / 2).backward()
    second = Run(small_net(), state=first.technique.state_dict())
    second.step(b)
    assert second.range_of("0") == whole.range_of("0")


def test_state_of_other_layers_is_refused():
    state = Run(small_net(), skip=("2",)).technique.state_dict()
    with pytest.raises(CheckpointError, match="differ in 2"):
        Run(small_net(), state=state)


@pytest.mark.parametrize(("make", "shape"), [(small_net, (9, 6)), (conv_net, (9, 2, 5, 5))])
def test_baked_weights_and_saved_ranges_equal_the_training_model(make, shape):
    run = Run(make())
    for batch in batches(3, shape):
        run.step(batch)
    probe = batches(1, shape, seed=9)[0]
    run.model.eval()
    with torch.no_grad():
        expected = run.model(probe)
    keys = list(make().state_dict())
    baked = run.technique.bake(run.model.state_dict())
    ranges = run.technique.ranges()
    assert list(baked) == keys
    latent = run.model[0].weight.clone()
    plain = make()
    plain.load_state_dict(baked)
    assert not torch.equal(plain[0].weight, latent)
    apply_ranges(plain.eval(), ranges)
    with torch.no_grad():
        assert torch.equal(plain(probe), expected)
    run.technique.finish(run.context)
    assert [type(module) for module in run.model] == [type(module) for module in make()]
    assert all(torch.equal(value, baked[name]) for name, value in run.model.state_dict().items())
    assert run.technique.ranges() == ranges
    again = run.technique.bake(run.model.state_dict())
    assert all(torch.equal(value, baked[name]) for name, value in again.items())
    for layer in (run.model[0], run.model[2]):
        for channel in layer.weight.detach().flatten(1):
            codes = channel.double() / (channel.abs().max().double() / 127)
            assert torch.allclose(codes, codes.round(), atol=1e-3)


def test_a_run_that_ends_before_begin_stays_in_float():
    run = Run(small_net(), begin=9)
    run.step(*batches(1))
    state, before = run.model.state_dict(), run.model[0].weight.detach().clone()
    assert run.technique.bake(state) is state
    assert run.technique.plan(run.context).missing == "fake quantisation is not on yet, it starts at step 9"
    run.technique.finish(run.context)
    assert torch.equal(run.model[0].weight, before)
    assert type(run.model[0]) is type(small_net()[0])
    assert run.technique.report()["began_at_step"] is None
    assert run.technique.deployment() == {"ranges": {}}


def test_what_was_asked_for_is_reached_when_ranges_freeze_that_are_to_freeze():
    run = Run(small_net(), begin=1, freeze_observers=3)
    found = [run.technique.plan(run.context).missing]
    for batch in batches(3):
        run.step(batch)
        found.append(run.technique.plan(run.context).missing)
    moving = "ranges still move, they freeze at step 3"
    assert found == ["fake quantisation is not on yet, it starts at step 1", moving, moving, ""]


def test_keep_leaves_the_modules():
    run = Run(small_net(), keep=True)
    run.step(*batches(1))
    latent = run.model[0].weight.clone()
    run.technique.finish(run.context)
    run.context.undo.close()
    assert type(run.model[0]) is FakeQuantLinear
    assert torch.equal(run.model[0].weight, latent)
    assert not torch.equal(run.technique.bake(run.model.state_dict())["0.weight"], latent)
