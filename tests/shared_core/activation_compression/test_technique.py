"""The technique in a plain loop: receipts, refusals, draws, and what it is combined with."""

import pytest
import torch
from plain_loop import begun_session
from torch import nn

from shared_core import Session
from shared_core.activation_checkpointing import CheckpointingConfig
from shared_core.activation_compression import ActivationsConfig
from shared_core.engine.checks import compatibility
from shared_core.errors import CompatibilityError, ConfigError, TrainingError


def relu_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def session_of(model, seed=0, **options):
    session, _ = begun_session({"activations": {"pack": "exact", "min_size": 8} | options}, model, 9, seed=seed)
    return session


def gradient(session, model, x):
    with session.forward():
        loss = model(x).square().sum()
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


def test_the_receipt_counts_what_lies_in_between():
    model, x = relu_net(), torch.randn(32, 16)
    session = session_of(model)
    gradient(session, model, x)
    session.before_step()
    zeros = int((torch.relu(model[0](x)) == 0).sum())
    told = session.techniques["activations"].report()
    packed = 32 * 64 // 8 + 4 * (32 * 64 - zeros)
    rest = 4 * (32 * 16 + 32 * 4)  # the batch, and the output that square saves
    assert told["bytes_before"] == 4 * 32 * 64 + rest
    assert told["bytes_after"] == packed + rest
    assert told["share_saved"] == round(1 - (packed + rest) / (4 * 32 * 64 + rest), 4)
    assert session.figures()["activations/saved"] == pytest.approx(told["share_saved"], abs=1e-4)


def test_int8_draws_anew_each_micro_batch_and_step_and_again_the_same_after_a_resume():
    model, x = relu_net(), torch.randn(32, 16)
    session, draws, states = session_of(model, pack="int8"), [], []
    for _ in range(2):
        for _ in range(2):
            states.append(session.state_dict())
            draws.append(gradient(session, model, x))
        session.before_step()
        session.after_step()
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[i + 1 :])
    session.detach()
    for state, expected in zip(states, draws, strict=True):  # the second and fourth in the middle of a step
        resumed = Session(session.recipe, seed=7)
        resumed.attach(model)
        resumed.load_state_dict(state)
        resumed.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=9)
        assert torch.equal(gradient(resumed, model, x), expected)
        resumed.detach()
    assert not torch.equal(gradient(session_of(model, seed=7, pack="int8"), model, x), draws[0])


def test_processes_draw_differently(monkeypatch):
    model, x = relu_net(), torch.randn(32, 16)
    first = gradient(session_of(model, pack="int8"), model, x)
    assert torch.equal(gradient(session_of(model, pack="int8"), model, x), first)
    monkeypatch.setattr("shared_core.activation_compression.technique.rank", lambda: 1)
    assert not torch.equal(gradient(session_of(model, pack="int8"), model, x), first)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Tanh(), {}, "must pack a tensor with pack=exact.*; .* 3 nothing to"),
        (nn.Tanh(), {"min_size": 10**6}, "4 small, 1 weights"),
        (nn.ReLU(), {"pack": "bf16"}, "must round a tensor with pack=bf16"),
    ],
    ids=["packed", "small", "rounded"],
)
def test_nothing_packed_or_rounded_is_an_error_at_the_end_of_the_first_step(model, options, words):
    model = nn.Sequential(nn.Linear(16, 64), model, nn.Linear(64, 4))
    model = model.bfloat16() if options.get("pack") else model
    session = session_of(model, **options)
    gradient(session, model, torch.randn(32, 16).to(model[0].weight.dtype))
    with pytest.raises(TrainingError, match=words):
        session.before_step()


def test_a_forward_outside_the_session_is_an_error():
    model = relu_net()
    session = session_of(model)
    model(torch.randn(32, 16)).sum().backward()
    with pytest.raises(TrainingError, match=r"must run inside session.forward\(\)"):
        session.before_step()


def test_options_that_do_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"pack=none .*offload"):
        ActivationsConfig(pack="none")
    with pytest.raises(ConfigError, match="pack=int8"):
        ActivationsConfig(pack="bf16", group_size=64)


def test_rounding_and_checkpointing_are_refused_together():
    def check(pack):
        compatibility.check(
            {"activations": ActivationsConfig(pack=pack), "checkpointing": CheckpointingConfig(policy="block")}
        )

    check("exact")
    for pack in ("int8", "bf16"):
        with pytest.raises(CompatibilityError, match=f"activations with pack {pack} cannot be combined with check"):
            check(pack)


def test_log_probabilities_and_statistics_are_not_rounded():
    model = nn.Sequential(nn.Linear(16, 512), nn.LayerNorm(512))
    session = session_of(model, pack="int8")
    x, labels = torch.randn(64, 16), torch.randint(0, 512, (64,))
    with session.forward():
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, labels)
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (plain,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), logits)
    assert torch.equal(ours, plain)
    kept = session.techniques["activations"].report()["left_alone"]["nothing to leave out"]
    assert kept == {"tensors": 4, "bytes": 4 * (64 * 16 + 64 * 512 + 2 * 64)}
