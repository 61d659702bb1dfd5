"""Primary weights in a bare loop: against the same loop with float32 weights written out by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.primary_weights import PrimaryWeightsConfig, replace_parameters_
from shared_core.recipe import Recipe
from shared_core.session import Session

HALF = (torch.float16, torch.bfloat16)
KINDS = ("fp32_copy", "stochastic_rounding")
STEPS = 8


class Net(nn.Module):
    """A tied weight, one that is never used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embed(x) * self.frozen)))


def net(dtype, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randint(12, (8,), generator=generator), torch.randint(12, (8,), generator=generator)


def loss_of(model, index):
    x, y = batch(index)
    return F.cross_entropy(model(x).float(), y)


def begin(model, optimizer, kind="fp32_copy", **more):
    session = Session(Recipe.from_dict({"primary_weights": {"kind": kind}, **more}))
    session.attach(model)
    session.begin([optimizer], total_steps=STEPS)
    return session


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
}


def by_hand(model, make, *, accumulate=1, clip=None, gamma=1.0):
    """Train with float32 weights beside the model, whose 16-bit weights are theirs rounded."""
    trained = [p for p in model.parameters() if p.requires_grad]
    primary = [p.detach().float() for p in trained]
    optimizer = make(primary)
    # untied, so that both gradients of the tied weight can be added in float32
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    for step in range(STEPS):
        for p in primary:
            p.grad = None
        for micro in range(accumulate):
            loss = loss_of(model, step * accumulate + micro) / accumulate
            gradients = torch.autograd.grad(loss, [*trained, model.head.weight], allow_unused=True)
            *wide, of_head = [None if gradient is None else gradient.float() for gradient in gradients]
            for p, source, gradient in zip(primary, trained, wide, strict=True):
                if gradient is not None:
                    gradient = gradient + of_head if source is model.embed.weight else gradient
                    p.grad = gradient if p.grad is None else p.grad + gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(primary, clip)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= gamma
        with torch.no_grad():
            for p, wide in zip(trained, primary, strict=True):
                p.copy_(wide)
            model.head.weight.copy_(model.embed.weight)
    model.head.weight = model.embed.weight
    return primary


def by_session(model, make, *, accumulate=1, clip=None, gamma=1.0, clip_groups=False, set_to_none=True):
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    session = begin(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for step in range(STEPS):
        for micro in range(accumulate):
            (loss_of(model, step * accumulate + micro) / accumulate).backward()
        session.before_optimizer_step()
        if clip is not None:
            in_groups = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(in_groups if clip_groups else model.parameters(), clip)
        optimizer.step()
        session.after_optimizer_step()
        scheduler.step()
        optimizer.zero_grad(set_to_none)
    return session, optimizer


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_equals_the_one_by_hand(dtype, name):
    model, reference = net(dtype), net(dtype)
    session, optimizer = by_session(model, OPTIMIZERS[name], accumulate=2, clip=0.3, gamma=0.9)
    primary = by_hand(reference, OPTIMIZERS[name], accumulate=2, clip=0.3, gamma=0.9)
    assert same(model, reference)
    copies = session.state_dict()["techniques"]["primary_weights"]["copies"]
    assert list(copies) == [key for key, p in reference.named_parameters() if p.requires_grad]
    for key, wide in zip(copies, primary, strict=True):
        assert torch.equal(copies[key], wide)
    assert any(not torch.equal(wide, wide.to(dtype).float()) for wide in primary)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert moments
    assert all(value.dtype == torch.float32 for value in moments)
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("clip_groups", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_clipping_either_tensors_and_zeroing_either_way_are_the_same(clip_groups, set_to_none):
    model, reference = net(torch.float16), net(torch.float16)
    by_session(model, OPTIMIZERS["adamw"], clip=0.1, clip_groups=clip_groups, set_to_none=set_to_none)
    by_hand(reference, OPTIMIZERS["adamw"], clip=0.1)
    assert same(model, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_through_the_optimizer_before_the_session_hears_of_the_step(kind):
    models = [net(torch.float16), net(torch.float16)]
    for model, early in zip(models, (True, False), strict=True):
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        session = begin(model, optimizer, kind)
        for step in range(4):
            loss_of(model, step).backward()
            session.before_optimizer_step()
            optimizer.step()
            if early:
                optimizer.zero_grad()
            session.after_optimizer_step()
            optimizer.zero_grad()
    assert same(*models)


def adamw64(weight, gradients, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01):
    weight, first, second = weight.double(), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        weight = weight * (1 - lr * decay)
        first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
        weight = weight - lr * (first / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + eps)
    return weight


def test_the_copy_follows_a_float64_adamw():
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(50)]
    weight = nn.Parameter(torch.linspace(-2, 2, 64).to(torch.bfloat16))
    holder = nn.ParameterList([weight])
    start = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.01)
    session = begin(holder, optimizer)
    for gradient in gradients:
        weight.grad = gradient.float()
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()
    exact = adamw64(start, [gradient.double() for gradient in gradients])
    copy = session.state_dict()["techniques"]["primary_weights"]["copies"]["0"]
    torch.testing.assert_close(copy.double(), exact, rtol=2e-6, atol=2e-6)
    assert torch.equal(weight, copy.to(torch.bfloat16))


def take_steps(weight, update, steps, kind):
    """Subtract a constant update as often as asked, with primary weights or, with kind None, without."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    session = begin(nn.ParameterList([weight]), optimizer, kind) if kind else None
    for _ in range(steps):
        weight.grad = torch.full_like(weight, update, dtype=torch.float32 if kind else weight.dtype)
        if session:
            session.before_optimizer_step()
        optimizer.step()
        if session:
            session.after_optimizer_step()
    return session


@pytest.mark.parametrize("dtype", HALF)
def test_updates_below_half_an_ulp_vanish_without_a_copy_and_add_up_with_it(dtype):
    # Micikevicius et al. 2018, section 3.1: a weight at least 2048 times its update does not move in fp16.
    plain, kept = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    take_steps(plain, 1e-4, 100, None)
    session = take_steps(kept, 1e-4, 100, "fp32_copy")
    assert plain.tolist() == [1.0] * 3
    copy = session.state_dict()["techniques"]["primary_weights"]["copies"]["0"]
    torch.testing.assert_close(copy, torch.full((3,), 0.99), rtol=0, atol=100 * 2.0**-24)  # half an ulp a step
    assert torch.equal(kept, copy.to(dtype))
    figures = session.metrics()
    assert figures == {"primary_weights/small_updates": 1.0}  # counted at the first step


@pytest.mark.parametrize("dtype", HALF)
def test_stochastic_rounding_moves_in_the_mean(dtype):
    count, steps = 40_000, 20
    weight = nn.Parameter(torch.ones(count, dtype=dtype))
    session = take_steps(weight, 1e-4, steps, "stochastic_rounding")
    ulp = torch.finfo(dtype).eps / 2  # below 1.0
    # every step adds the variance ulp²·f·(1-f) of a Bernoulli of f = update / ulp
    fraction = 1e-4 / ulp
    deviation = ulp * (fraction * (1 - fraction) * steps / count) ** 0.5
    assert abs(weight.double().mean().item() - (1 - steps * 1e-4)) < 5 * deviation
    assert set(weight.unique().tolist()) <= {1 - k * ulp for k in range(steps + 1)}
    assert session.state_dict()["techniques"]["primary_weights"]["copies"] == {}


def test_the_draws_come_from_the_runs_own_generator():
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))
        weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        session = Session(Recipe.from_dict({"primary_weights": {"kind": "stochastic_rounding"}}), seed=seed)
        session.attach(nn.ParameterList([weight]))
        session.begin([optimizer], total_steps=1)
        before = torch.get_rng_state()
        weight.grad = torch.full((1000,), 1e-3)
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(weight.detach())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_frozen_parameters_are_left_alone(kind):
    model = net(torch.bfloat16)
    model.hidden.float()
    model.forward = lambda x: model.head(model.hidden(model.embed(x).float() * model.frozen).bfloat16())
    frozen = model.frozen.clone()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    session = begin(model, optimizer, kind)
    loss_of(model, 0).backward()
    session.before_optimizer_step()
    stepped = set(optimizer.param_groups[0]["params"])
    assert {model.frozen, model.hidden.weight} <= stepped
    assert model.embed.weight not in stepped
    optimizer.step()
    session.after_optimizer_step()
    report = session.receipt()["techniques"]["primary_weights"]
    assert report["parameters"] == 2
    assert report["elements"] == 72 + 3
    assert report["format"] == "bfloat16"
    assert report["copy_bytes"] == (4 * 75 if kind == "fp32_copy" else 0)
    assert report["left_alone"] == {"float32": 2, "bfloat16, frozen": 1}
    assert report["small_updates_step"] == 1
    assert 0 <= report["small_updates"] <= 1
    assert torch.equal(model.frozen, frozen)


def test_a_copy_takes_over_what_others_changed_and_keeps_the_rest():
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    session = begin(nn.ParameterList([weight]), optimizer)

    def step():
        weight.grad = torch.full((4,), 1e-4)
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()
        return session.state_dict()["techniques"]["primary_weights"]["copies"]["0"].clone()

    step()
    weight.data[0] = 0.25  # in a way that no version counter sees
    copy = step()
    torch.testing.assert_close(copy, torch.tensor([0.2499, 0.9998, 0.9998, 0.9998]), rtol=0, atol=1e-7)
    session.context.weights_replaced()
    torch.testing.assert_close(
        session.state_dict()["techniques"]["primary_weights"]["copies"]["0"], weight.detach().float(), rtol=0, atol=0
    )


def test_groups_added_later_and_parameters_unfrozen_later_are_updated_in_float32():
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD([model.hidden.weight], lr=1e-3)
    session = begin(model, optimizer)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [model.embed.weight, model.frozen], "lr": 1e-5})
        if step == 2:
            model.frozen.requires_grad_(True)
        loss_of(model, step).backward()
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()
        model.zero_grad()
    copies = session.state_dict()["techniques"]["primary_weights"]["copies"]
    assert set(copies) == {"hidden.weight", "embed.weight", "frozen"}
    assert not torch.equal(copies["embed.weight"], copies["embed.weight"].bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_interrupts_a_step_the_optimizer_gets_its_parameters_back(kind):
    model = net(torch.float16)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    session = begin(model, optimizer, kind)
    loss_of(model, 0).backward()
    session.before_optimizer_step()
    optimizer.step()
    session.after_optimizer_step()
    before, keys = copy.deepcopy(model.state_dict()), list(optimizer.state)

    loss_of(model, 1).backward()
    session.before_optimizer_step()
    session.before_optimizer_step()  # the first was interrupted, and training went on
    session.detach()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert list(optimizer.state) == keys
    assert all(key.dtype == torch.float16 for key in keys)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad_dtype == torch.float16 for p in trained)
    assert model.hidden.weight.grad.dtype == torch.float16
    copies = session.state_dict()["techniques"]["primary_weights"]["copies"]
    assert len(copies) == (4 if kind == "fp32_copy" else 0)
    session.detach()


def test_finish_leaves_a_plain_model():
    model = net(torch.float16)
    session, _ = by_session(model, OPTIMIZERS["adamw"])
    weights = copy.deepcopy(model.state_dict())
    session.finish()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    loss_of(model, 0).backward()
    assert model.hidden.weight.grad.dtype == torch.float16
    assert session.receipt()["techniques"]["primary_weights"]["parameters"] == 4


def test_a_discarded_step_changes_nothing():
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    session.context.discard_step = True
    session.before_optimizer_step()
    optimizer.step()
    assert not session.after_optimizer_step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters() if p.requires_grad)


def test_eight_bit_optimizer_updates_float32_values():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=1e-4, weight_decay=0.0)
    session = begin(nn.ParameterList([weight]), optimizer)
    for _ in range(40):
        weight.grad = torch.ones(64, 128)
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()
    copy = session.state_dict()["techniques"]["primary_weights"]["copies"]["0"]
    torch.testing.assert_close(copy, torch.full((64, 128), 1 - 40e-4), rtol=0, atol=1e-5)
    assert optimizer.state[weight]["state1"].dtype == torch.uint8


# -- refusals


def test_a_float32_model_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(MatchError, match=r"must be loaded in 16 bit.*got float32; load it so"):
        Session(Recipe.from_dict({"primary_weights": {"kind": "fp32_copy"}})).attach(model)
    half = nn.Linear(2, 2).half().requires_grad_(False)
    with pytest.raises(MatchError, match="none that are trainable"):
        Session(Recipe.from_dict({"primary_weights": {"kind": "fp32_copy"}})).attach(half)


def test_an_optimizer_without_16_bit_parameters_is_refused():
    model = nn.ModuleList([nn.Linear(2, 2).half(), nn.Linear(2, 2)])
    with pytest.raises(MatchError, match="got float32"):
        begin(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


def test_lbfgs_is_refused():
    model = nn.Linear(2, 2).half()
    with pytest.raises(CompatibilityError, match="LBFGS"):
        begin(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("options", [{}, {"kind": "fp16_copy"}, {"kind": "fp32_copy", "telemetry_every": -1}])
def test_wrong_options(options):
    with pytest.raises(ConfigError, match="primary_weights"):
        PrimaryWeightsConfig.from_dict(options)


def ready():
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(model, optimizer)
    model(torch.ones(1, 2).half()).sum().backward()
    return model, optimizer, session


def test_a_step_without_announcement_is_an_error():
    _, optimizer, session = ready()
    optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(TrainingError, match="before_optimizer_step must come before"):
        session.after_optimizer_step()


def test_gradients_replaced_behind_the_optimizers_back_are_an_error():
    model, optimizer, session = ready()
    session.before_optimizer_step()
    model.weight.grad = model.weight.grad * 0.5
    optimizer.step()
    with pytest.raises(TrainingError, match="changed in place"):
        session.after_optimizer_step()
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_an_optimizer_with_its_own_list_of_parameters_is_an_error():
    model, _, session = ready()
    session.before_optimizer_step()
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(TrainingError, match="param_groups"):
        session.after_optimizer_step()


@pytest.mark.parametrize("damage", [lambda s: s.pop("copies"), lambda s: s["copies"].update({"weight": torch.ones(3)})])
def test_damaged_state_is_refused(damage):
    model, optimizer, session = ready()
    state = copy.deepcopy(session.state_dict())
    damage(state["techniques"]["primary_weights"])
    other = Session(Recipe.from_dict({"primary_weights": {"kind": "fp32_copy"}}))
    other.attach(model)
    with pytest.raises(CheckpointError, match="primary_weights"):
        other.load_state_dict(state)
        other.begin([optimizer], total_steps=1)


def test_replacing_moves_state_and_keeps_the_order():
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.1, momentum=0.9)
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.ones(2)
    replace_parameters_(optimizer, {weights[1]: other})
    assert optimizer.param_groups[1]["params"][0] is other
    assert weights[1] not in optimizer.state
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert list(after["state"]) == list(before["state"])
    replace_parameters_(optimizer, {other: weights[1]})
    assert list(optimizer.state) == weights
    assert other not in optimizer.state
