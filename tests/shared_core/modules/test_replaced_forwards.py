"""Layers whose forward somebody put on the layer itself: a technique's class is reached through it, or refused."""

import copy
import functools
from types import MethodType

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from plain_loop import begun_session, plain_step
from torch import nn
from transformers.distributed.tensor_parallel import LocalParamsParallel, TensorParallelLayer

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


def planned(model):
    """Do as a plan of tensor parallelism does, but for cutting."""
    for layer in model:
        TensorParallelLayer().install_forward(layer, None)
    return model


@pytest.mark.parametrize("key", RECIPES)
@pytest.mark.parametrize("wrapped", [hooked, unhooked, planned])
def test_hooks_of_accelerate_and_plans_of_transformers_call_the_layer_as_the_technique_made_it(wrapped, key):
    recipe = {key: RECIPES[key]}
    model = wrapped(net())
    before = [vars(layer).get("forward") for layer in model]
    expected, got = outputs(net(), recipe), outputs(model, recipe)
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    assert [vars(layer).get("forward") for layer in model] == before


def test_a_copy_computes_by_its_own_weights_and_without_gradients_there_are_none():
    model = planned(net())
    session, _ = begun_session({"qat": RECIPES["qat"]}, model, 2)
    twin, inputs = copy.deepcopy(model)[3], torch.ones(2, 16)
    with torch.no_grad():
        twin.weight.zero_()
        assert torch.equal(twin(inputs), twin.bias.expand(2, -1))
        assert not model[3](inputs).requires_grad
    assert model[3](inputs).requires_grad
    session.finish()


def forward(layer, x):
    return 2 * nn.Linear.forward(layer, x)


@pytest.mark.parametrize("key", RECIPES)
@pytest.mark.parametrize(
    "other",
    [
        lambda layer: functools.partial(layer.forward),
        lambda layer: MethodType(forward, layer),
        lambda layer: LocalParamsParallel().install_forward(layer, None).forward,
    ],
)
def test_another_forward_put_on_a_layer_is_refused_and_the_model_left_as_it_was(other, key):
    model = net()
    model[3].forward = put = other(model[3])
    with pytest.raises(MatchError, match=r"layers: forward was replaced by .* on a Linear"):
        outputs(model, {key: RECIPES[key]})
    assert [type(layer) for layer in model] == [type(layer) for layer in net()]
    assert model[3].forward is put
