"""`recompute_weights`: the same training bit for bit, without rounded weights in the graph."""

import pytest
import torch
from mixtures import mixture
from plain_loop import begun_session, plain_step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from shared_core.errors import MatchError, TrainingError


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def linear(kind=nn.Sequential):
    return kind(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


MODELS = {
    "linear": (linear, (8, 16)),
    "checkpointed": (lambda: linear(Checkpointed), (8, 16)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.ConvTranspose2d(8, 4, 2)), (2, 3, 6, 6)),
    "conv1d": (lambda: nn.Sequential(Conv1D(32, 16), nn.Tanh(), Conv1D(4, 32)), (8, 16)),
    "folded": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
    "experts": (lambda: mixture("qwen3_moe"), (2, 6)),
    "gpt_oss": (lambda: mixture("gpt_oss"), (2, 6)),
}


def trained(model, recompute, recipe=None, *, amp=False, change=lambda model: None):
    """Return the weights after three steps of two micro-batches, and the bytes that backward kept of the last."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    net, recipe = make(), recipe or {}
    qat = {"scheme": "int8_weight", "recompute_weights": recompute} | recipe.get("qat", {})
    session, optimizer = begun_session({**recipe, "qat": qat}, net, 3)
    kept = {}

    def pack(value):
        kept[value.untyped_storage()._cdata] = value
        return value

    for step in range(6):
        kept.clear()
        torch.manual_seed(step)
        tokens, x = torch.randint(2, 8, shape), torch.randn(shape)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=amp)
        with saved_tensors_hooks(pack, lambda value: value), autocast, session.forward():
            y = net(x) if isinstance(net, nn.Sequential) else net(input_ids=tokens, labels=tokens).loss
            loss = session.loss(y.float().square().mean())
        change(net)
        loss.backward()
        if step % 2:
            plain_step(session, optimizer)
    own = {value.untyped_storage()._cdata for value in net.parameters()}
    size = sum(value.untyped_storage().nbytes() for at, value in kept.items() if at not in own)
    session.finish()
    return net.state_dict(), size


@pytest.mark.parametrize(
    ("model", "qat", "amp"),
    [
        ("linear", {}, False),
        ("linear", {"scheme": "int8"}, True),
        ("linear", {"rounding": "stochastic"}, False),
        ("linear", {"scheme": "int8", "range": "lsq"}, False),
        ("linear", {"scheme": "mxfp4a16"}, False),
        ("checkpointed", {}, True),
        ("convolutions", {}, False),
        ("conv1d", {"scheme": "w4a16", "group_size": 8}, False),
        ("experts", {"scheme": "mxfp4a16"}, False),
        ("gpt_oss", {}, False),
    ],
)
def test_training_is_equal_and_keeps_no_rounded_weight(model, qat, amp):
    usual, before = trained(model, False, {"qat": qat}, amp=amp)
    again, after = trained(model, True, {"qat": qat}, amp=amp)
    assert all(torch.equal(again[name], value) for name, value in usual.items())
    assert after < before or model == "checkpointed"  # checkpointing keeps none anyway


def test_training_is_equal_with_packed_activations():
    recipe = {"activations": {"pack": "exact", "min_size": 1}}
    usual, again = (trained("linear", recompute, recipe)[0] for recompute in (False, True))
    assert all(torch.equal(again[name], value) for name, value in usual.items())


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(MatchError) as raised:
        trained("folded", True, {"qat": {"scheme": "int8"}})
    assert "recompute_weights" in str(raised.value)


def test_weights_that_change_before_backward_are_refused():
    def change(net):
        with torch.no_grad():
            net[2].weight.mul_(2)

    with pytest.raises(TrainingError):
        trained("linear", True, change=change)
