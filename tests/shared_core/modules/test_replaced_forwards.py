"""Layers whose forward somebody put on the layer itself: a technique's class is reached through it, or refused."""

import functools
from types import MethodType

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from plain_loop import begun_session, plain_step
from torch import nn

from shared_core.errors import MatchError

RECIPES = {"qat": {"scheme": "int8"}, "fp8": {"recipe": "rowwise", "include": ["0", "3"]}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))


def hooked(model):
    """Hook every layer, as `device_map` does with those that it names."""
    for layer in model:
        add_hook_to_module(layer, AlignDevicesHook("cpu"))
    return model


def unhooked(model):
    return remove_hook_from_module(hooked(model), recurse=True)


def outputs(model, recipe):
    """Return the outputs of two steps, and of the finished model."""
    session, optimizer = begun_session(recipe, model, 2)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(2):
        with session.forward():
            seen.append(model(inputs))
        plain_step(session, optimizer, seen[-1].square().mean())
    session.finish()
    return [*seen, model.eval()(inputs)]


@pytest.mark.parametrize("key", RECIPES)
@pytest.mark.parametrize("wrapped", [hooked, unhooked])
def test_hooks_of_accelerate_call_the_layer_as_the_technique_made_it(wrapped, key):
    recipe = {key: RECIPES[key]}
    expected, got = outputs(net(), recipe), outputs(wrapped(net()), recipe)
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))


def forward(layer, x):
    return 2 * nn.Linear.forward(layer, x)


@pytest.mark.parametrize("key", RECIPES)
@pytest.mark.parametrize(
    "other", [lambda layer: functools.partial(layer.forward), lambda layer: MethodType(forward, layer)]
)
def test_another_forward_put_on_a_layer_is_refused_and_the_model_left_as_it_was(other, key):
    model = net()
    model[3].forward = put = other(model[3])
    with pytest.raises(MatchError, match=r"layers: forward must be that of its class, got .* put on a Linear itself"):
        outputs(model, {key: RECIPES[key]})
    assert [type(layer) for layer in model] == [type(layer) for layer in net()]
    assert model[3].forward is put
