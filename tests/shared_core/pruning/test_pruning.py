"""Pruning through a session: long runs, exact resume, and the rule for shared and frozen tensors."""

import copy
import functools

import pytest
import torch
from plain_loop import update
from torch import nn

from shared_core import Session
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.pruning import PruneConfig, prune_masks
from shared_core.pruning.masks import MaskStore, clear_moments_

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}


def make_net(seed: int = 0, width: int = 12) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def make_session(model, optimizer=None, total_steps=40, clips=True, state=None, **options):
    session = Session(Recipe.from_dict({"prune": {"sparsity": 0.75, **options}}))
    session.attach(model)
    optimizer = optimizer(model.parameters()) if optimizer else OPTIMIZERS["sgd"](model.parameters())
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=total_steps, clips_gradients=clips)
    return session, optimizer


def train(session, optimizer, model, steps, clip=True):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
        session.loss((model(x) - y).square().mean()).backward()
        clips = functools.partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 0.5)
        update(session, optimizer, clips if clip else lambda: None)


def zeros(model) -> dict[str, torch.Tensor]:
    return {name: p == 0 for name, p in model.named_parameters() if p.ndim > 1}


def is_positive_zero(values: torch.Tensor) -> bool:
    return not values.any() and not values.signbit().any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_of_pruned_weights_are_cleared_at_the_update(optimizer):
    model = make_net()
    session, opt = make_session(model, OPTIMIZERS[optimizer], schedule="one_shot", begin=5)
    train(session, opt, model, range(5))
    for name, zero in zeros(model).items():
        state = opt.state[dict(model.named_parameters())[name]]
        moments = [value for value in state.values() if torch.is_tensor(value) and value.shape == zero.shape]
        assert moments
        for moment in moments:
            assert is_positive_zero(moment[zero])
            assert moment[~zero].all()


def counting_passes(monkeypatch):
    """Return a list that gets an entry for each pass over the weights."""
    passes, apply = [], MaskStore.apply
    monkeypatch.setattr(MaskStore, "apply", lambda self, *args: (passes.append(1), apply(self, *args))[1])
    return passes


UPDATES = {"begin": 5, "end": 20, "every": 5}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True}, {"amsgrad": True, "lr": torch.tensor(0.01)}]
)
@pytest.mark.parametrize("granularity", ["unstructured", "neuron"])
def test_a_fused_step_keeps_zeros_without_a_pass(monkeypatch, kind, options, granularity):
    passes, found = counting_passes(monkeypatch), {}
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr("shared_core.pruning.masks.keeps_zeros", lambda optimizer: False)
        model = make_net()
        session, opt = make_session(
            model, lambda p: kind(p, **{"lr": 0.01, **options}, fused=True), granularity=granularity, **UPDATES
        )
        train(session, opt, model, range(22))
        passes.clear()
        train(session, opt, model, range(22, 40))
        assert len(passes) == (0 if alone else 18)
        found[alone] = model.state_dict()
        assert all(is_positive_zero(parameter.detach()[parameter == 0]) for parameter in model.parameters())
    assert all(torch.equal(found[True][name], value) for name, value in found[False].items())


CHANGES = {
    "into a gradient": lambda model, opt: model[0].weight.grad.add_(1.0),
    "another gradient": lambda model, opt: setattr(model[0].weight, "grad", model[0].weight.grad + 1.0),
    "into a weight": lambda model, opt: model[3].weight.detach().add_(1.0),
    "frozen": lambda model, opt: setattr(model[0].weight, "grad", None),
    "without epsilon": lambda model, opt: opt.param_groups[0].update(eps=0.0),
    "not fused": lambda model, opt: opt.param_groups[0].update(fused=False),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_writes_between_masks_and_step_does_not_bring_weights_back(change, before):
    model = make_net()
    session, opt = make_session(model, OPTIMIZERS["adamw_fused"], schedule="one_shot", begin=2)
    train(session, opt, model, range(5))
    dead = zeros(model)
    for step in range(5, 12):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        session.loss(model(x).square().mean()).backward()
        session.before_step()
        if before and step == 7:
            change(model, opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if not before and step == 7:
            change(model, opt)
        session.after_step()
        opt.zero_grad()
        for name, parameter in model.named_parameters():
            assert name not in dead or is_positive_zero(parameter.detach()[dead[name]]), (step, name)


@pytest.mark.parametrize("first", [0, 3])
def test_a_write_in_each_step_of_a_loop_that_does_not_clip_is_not_taken_for_clipping(first):
    model = make_net()
    session, opt = make_session(model, OPTIMIZERS["adamw_fused"], schedule="one_shot", begin=1)
    dead = {}
    for step in range(12):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        session.loss(model(x).square().mean()).backward()
        session.before_step()
        if step >= first:
            torch._foreach_add_([parameter.grad for parameter in model.parameters()], 0.1)
        opt.step()
        session.after_step()
        opt.zero_grad()
        dead = zeros(model) if step == 1 else dead
        for name, parameter in model.named_parameters():
            assert name not in dead or is_positive_zero(parameter.detach()[dead[name]]), (step, name)
    assert sum(int(zero.sum()) for zero in dead.values()) == session.techniques["prune"].report()["pruned"]


def test_a_later_update_clears_the_moments_of_newly_pruned_weights_alone():
    model = make_net()
    session, opt = make_session(
        model, OPTIMIZERS["adamw"], clips=False, schedule="linear", begin=2, end=6, every=4, initial_sparsity=0.3
    )
    named = dict(model.named_parameters())
    train(session, opt, model, range(2), clip=False)
    before = zeros(model)
    train(session, opt, model, range(2, 6), clip=False)
    for name, zero in zeros(model).items():
        moment, newly = opt.state[named[name]]["exp_avg_sq"], zero & ~before[name]
        assert newly.any()
        assert not moment[newly].any()
        assert moment[before[name]].any()


def plainly_trained(steps):
    """Return a net trained without a technique."""
    twin = make_net()
    optimizer, session = OPTIMIZERS["sgd"](twin.parameters()), Session(Recipe.from_dict({}))
    session.attach(twin)
    session.begin([optimizer], total_steps=40)
    train(session, optimizer, twin, range(steps))
    return twin


def test_the_survivors_are_the_largest_weights_of_that_step():
    model, twin = make_net(), plainly_trained(7)
    session, opt = make_session(model, schedule="one_shot", begin=7)
    train(session, opt, model, range(7))
    masks = prune_masks([p.detach().abs() for p in twin.parameters() if p.ndim > 1], 0.75)
    for zero, mask in zip(zeros(model).values(), masks, strict=True):
        assert torch.equal(zero, ~mask)


def test_a_live_weight_that_is_zero_is_not_taken_for_a_pruned_one_on_resume():
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0).view(2, 4))
    session, opt = make_session(model, schedule="one_shot", sparsity=0.5)
    with torch.no_grad():
        model.weight[1, 3] = 0.0
    state = {"optimizer": opt.state_dict(), "session": session.state_dict()}
    session.detach()
    session, _ = make_session(model, schedule="one_shot", sparsity=0.5, state=state)
    with torch.no_grad():
        model.weight.fill_(1.0)
    session.context.report_weights_replaced()
    assert model.weight.tolist() == [[0.0] * 4, [1.0] * 4]


def test_pruned_weights_stay_pruned_among_ties_and_zeros():
    model = nn.Linear(10, 10, bias=False)
    session, opt = make_session(model, total_steps=10, begin=0, end=10, every=1, schedule="linear")
    store = session.techniques["prune"]._policy.store
    for _ in range(10):
        before = store.parts.get("weight", torch.ones(10, 10, dtype=torch.bool)).clone()
        model.weight.data.zero_()  # every live weight ties with the pruned ones
        opt.zero_grad()
        session.before_step()
        session.after_step()
        after = store.parts["weight"]
        assert not (after & ~before).any()
    assert int((~after).sum()) == 75


def test_the_norm_is_that_of_live_gradients_only():
    model = make_net()
    session, opt = make_session(model, schedule="one_shot", begin=0)
    model(torch.randn(8, 6)).square().mean().backward()
    expected = torch.stack([p.grad[p != 0].norm() for p in model.parameters() if p.ndim > 1]).norm()
    session.before_step()
    grads = [p.grad for p in model.parameters() if p.ndim > 1]
    assert torch.allclose(torch.nn.utils.get_total_norm(grads), expected)
    model[0].weight.grad = None
    session.before_step()
    model[0].weight.grad = torch.ones(12, 6).to_sparse()
    with pytest.raises(CompatibilityError, match="must be dense"):
        session.before_step()
    opt.zero_grad()


def test_nan_gradients_and_weights_of_pruned_places_do_no_harm_and_live_ones_are_an_error():
    model = make_net()
    session, opt = make_session(model, schedule="linear", begin=0, end=20, every=10, initial_sparsity=0.5)
    zero = zeros(model)["0.weight"]
    with torch.no_grad():
        model[0].weight[zero] = float("nan")
    session.after_step()
    assert is_positive_zero(model[0].weight.detach()[zero])
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"NaN in 0.weight at step 10"):
        for _ in range(9):
            session.after_step()
    assert opt.state == {}


@pytest.mark.parametrize("schedule", ["cubic", "linear", "one_shot"])
@pytest.mark.parametrize("scope", ["global", "local"])
def test_short_runs_reach_the_full_sparsity(schedule, scope):
    model = make_net()
    session, opt = make_session(model, total_steps=3, schedule=schedule, scope=scope, every=1000)
    train(session, opt, model, range(3))
    counts = {name: int(zero.sum()) for name, zero in zeros(model).items()}
    assert sum(counts.values()) == 90
    assert scope == "global" or counts == {"0.weight": 54, "3.weight": 36}


def test_a_run_cut_short_keeps_the_zeros_that_it_has_and_says_so():
    model = make_net()
    session, opt = make_session(model, total_steps=100, begin=0, end=100, every=10)
    train(session, opt, model, range(15))
    reached = sum(int(zero.sum()) for zero in zeros(model).values())
    assert 0 < reached < 60
    unreached = session.receipt()["unreached"]
    assert unreached == {"prune": "sparsity 0.2032 of 0.75, complete at step 100"}
    assert not session.progress.may_be_best()
    session.finish()
    assert sum(int(zero.sum()) for zero in zeros(model).values()) == reached
    receipt = session.receipt()
    assert receipt["unreached"] == unreached
    assert (
        "prune did not reach its target: sparsity 0.2032 of 0.75, complete at step 100; the run ended after 15 "
        "steps of 100 planned"
    ) in receipt["notes"]
    assert [type(module) for module in model] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert list(model.state_dict()) == list(make_net().state_dict())
    assert session.state_dict()["techniques"]["prune"]["masks"]


def test_sparsity_zero_changes_nothing():
    model = make_net()
    session, opt = make_session(model, sparsity=0.0)
    train(session, opt, model, range(40))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plainly_trained(40).parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.body.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


def test_the_rule_for_shared_frozen_and_computed_tensors():
    model = Tied()
    options = {"schedule": "one_shot", "sparsity": 0.5, "begin": 0}
    session = Session(Recipe.from_dict({"prune": options, "allow_partial": True}))
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters())], total_steps=40)
    report = session.techniques["prune"].report()
    assert [entry["name"] for entry in report["tensors"]] == ["body.weight"]
    assert report["numel"] == 36
    assert report["pruned"] == 18
    left_out = report["left_out"]
    assert "shared with embedding" in left_out["head.weight"]
    assert "frozen" in left_out["frozen.weight"]
    assert any(name.startswith("normed.") for name in left_out)
    assert model.embedding.weight.all()
    assert model.frozen.weight.all()
    assert model.again.weight is model.body.weight

    session, _ = make_session(Tied(), schedule="one_shot", sparsity=0.5, include=["frozen"])
    assert [entry["name"] for entry in session.techniques["prune"].report()["tensors"]] == ["frozen.weight"]
    session, _ = make_session(Tied(), schedule="one_shot", include=["body", "frozen"])
    left_out = session.techniques["prune"].report()["left_out"]
    assert left_out["body.weight"] == "shared with again: left out by include, skip or min_size"
    with pytest.raises(MatchError, match=r"all were left out \(.*frozen"):
        make_session(nn.Sequential(nn.Linear(3, 3).requires_grad_(False)))


def test_convolutions_are_pruned_in_any_memory_format():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    make_session(model, schedule="one_shot")
    make_session(plain, schedule="one_shot")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert sum(int((p == 0).sum()) for p in model.parameters()) == round(0.75 * (216 + 288))


def test_half_precision_weights():
    model = make_net().bfloat16()
    make_session(model, schedule="one_shot")
    assert sum(int(zero.sum()) for zero in zeros(model).values()) == 90


def test_codes_without_a_code_book_stay():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    codes = torch.arange(200, 216, dtype=torch.uint8).reshape(4, 4)
    optimizer.state[weight] = {"quantized": codes.clone(), "moment": torch.ones(4, 4)}
    clear_moments_([optimizer], {"weight": weight}, {"weight": torch.eye(4, dtype=torch.bool)})
    assert torch.equal(optimizer.state[weight]["quantized"], codes)
    assert torch.equal(optimizer.state[weight]["moment"], torch.eye(4))


def test_eight_bit_states_hold_zero_and_training_goes_on():
    import bitsandbytes

    model = make_net(width=1024)  # 8-bit states begin at 4096 elements
    session, opt = make_session(
        model, lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1), schedule="one_shot", begin=3
    )
    train(session, opt, model, range(3))
    weight = model[0].weight
    state, zero = opt.state[weight], weight == 0
    assert state["state1"].dtype == torch.uint8
    assert is_positive_zero(state["qmap1"][state["state1"][zero].long()])
    assert is_positive_zero(state["qmap2"][state["state2"][zero].long()])
    assert (state["state1"][~zero] != 127).any()
    train(session, opt, model, range(3, 10))
    assert torch.equal(model[0].weight == 0, zero)
    assert model[0].weight.isfinite().all()


LIMITED = {"sparsity": 0.5, "max_layer_sparsity": 0.9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity must be in \[0, 1\)"),
        ({"sparsity": float("nan")}, "finite"),
        ({"initial_sparsity": 0.9}, "initial_sparsity must be at most sparsity=0.8"),
        (
            {"schedule": "one_shot", "initial_sparsity": 0.1},
            "initial_sparsity cannot be combined with schedule=one_shot",
        ),
        ({"every": 0}, "every must be in"),
        ({"schedule": "qubic"}, "did you mean 'cubic'"),
        ({"criterion": "luck"}, "criterion must be one of"),
        ({"n_m": "1:4"}, "n_m .*granularity=n_m"),
        ({"block": "2x2"}, "block .*granularity=block"),
        ({"regularizer_strength": 0.1}, "regularizer_strength .*regularizer"),
        ({"cost": "flops", "scope": "local"}, "cost .*a threshold across layers"),
        ({"criterion": "threshold", "threshold": 0.1, "granularity": "block"}, "granularity=unstructured, got"),
        ({"criterion": "wanda", "granularity": "block"}, "granularity=unstructured or n_m"),
        ({"criterion": "wanda", "scope": "erdos_renyi"}, "scope=auto, global or local"),
        ({"criterion": "wanda", "scope": "tower"}, "scope=auto, global or local, got scope=tower"),
        ({"granularity": "neuron", "scope": "tower"}, "scope=tower .*granularity=unstructured or block"),
        (
            {"granularity": "filter", "criterion": "l2_norm", "scope": "erdos_renyi"},
            "granularity=unstructured or block",
        ),
        ({"criterion": "sparsegpt", "scope": "global"}, "criterion=sparsegpt .*scope=auto or local"),
        ({"criterion": "sparsegpt", "granularity": "block"}, "granularity=unstructured or n_m"),
        ({"criterion": "sparsegpt", "granularity": "neuron"}, "granularity=unstructured or n_m"),
        ({"criterion": "sparsegpt", "cost": "bytes"}, "cost .*a threshold across layers"),
        ({**LIMITED, "max_layer_sparsity": 0.4}, "must be at least sparsity=0.5"),
        ({**LIMITED, "scope": "local"}, "max_layer_sparsity .*sparsity that differs by layer"),
        ({**LIMITED, "granularity": "channel"}, "scope local"),
        ({**LIMITED, "criterion": "wanda"}, "criterion wanda"),
        ({**LIMITED, "granularity": "n_m", "schedule": "one_shot"}, "granularity n_m"),
        ({**LIMITED, "max_layer_sparsity": 1.1}, r"in \(0, 1\]"),
        ({"granularity": "n_m", "n_m": "4:2", "schedule": "one_shot"}, "must be n:m with 1 <= n < m"),
        ({"granularity": "block", "block": "0x2"}, "must be outputs x inputs"),
        (
            {"granularity": "n_m", "schedule": "one_shot", "overrides": {"4": {"sparsity": 0.5}}, "sparsity": 0.5},
            "fixes",
        ),
        ({"granularity": "layer", "overrides": {"4": {"sparsity": 0.5}}}, "granularity layer"),
        ({"overrides": ["last"]}, "overrides must be PATTERN:OPTION=VALUE"),
        ({"overrides": {"last": {"scope": "local"}}}, "with an option of sparsity"),
        ({"overrides": {"last": {"sparsity": 1}}}, r"must give last a sparsity in \[0, 1\)"),
        ({"overrides": {"last": {"sparsity": "much"}}}, "overrides must be a finite number"),
        ({"overrides": {"[4]": {"sparsity": "nan"}}}, "overrides must"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PruneConfig(**{"sparsity": 0.8, **options})


def test_bad_surroundings_are_refused():
    with pytest.raises(ConfigError, match="must not come before begin"):
        make_session(make_net(), begin=30, end=20)
    with pytest.raises(ConfigError, match="within the 40 steps"):
        make_session(make_net(), schedule="one_shot", begin=41)
    with pytest.raises(CompatibilityError, match="prune cannot be combined with an LBFGS"):
        make_session(make_net(), torch.optim.LBFGS)
    with pytest.raises(MatchError, match="has no Linear"):
        make_session(nn.Sequential(nn.Embedding(3, 3)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"granularity": "block", "block": "99x99"}, "2 blocks"),
        ({"sparsity": 0.001}, "weights"),
        ({"granularity": "layer", "sparsity": 0.2}, "2 layers"),
    ],
)
def test_a_sparsity_that_rounds_to_nothing_is_refused(options, what):
    with pytest.raises(MatchError, match=f"sparsity must prune at least one of .*{what}, got"):
        make_session(make_net(), **options)


def test_a_state_of_another_model_is_refused():
    session, opt = make_session(make_net(), schedule="one_shot")
    state = {"optimizer": opt.state_dict(), "session": session.state_dict()}
    other = Session(session.recipe)
    other.attach(make_net(width=16))
    other.load_state_dict(state["session"])
    with pytest.raises(CheckpointError, match=r"difference at 0.weight"):
        other.begin([], total_steps=1)
    other = Session(session.recipe)
    other.attach(nn.Sequential(nn.Linear(6, 12)))
    other.load_state_dict(state["session"])
    with pytest.raises(CheckpointError, match=r"difference at 3.weight"):
        other.begin([], total_steps=1)


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({"sparsity": 0.5}, True),
        ({"sparsity": 0.5, "schedule": "one_shot", "begin": 2}, True),
        ({"sparsity": 0.5, "granularity": "neuron", "begin": 1}, True),
        ({"sparsity": 0.5, "schedule": "one_shot", "begin": 0}, False),
    ],
)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_sparse_model_whose_zeros_a_schedule_fills_again_is_told_at_the_start(options, is_told, is_sparse):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        for layer in (model[0], model[2]) if is_sparse else ():
            layer.weight[:, ::2] = 0
        if not is_sparse:
            model[2].weight.zero_()  # drawn as zeros, as the last layer of a residual branch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session({"prune": options})
    attach_with(session, model, [optimizer])
    session.begin([optimizer], total_steps=20)
    told = [note for note in session.notes if "zero" in note and "one_shot" in note]
    assert bool(told) == (is_told and is_sparse)
    if told:
        assert "96 of the 192 " in told[0]
        assert "schedule: one_shot, begin: 0 and sparsity: 0.5" in told[0]
