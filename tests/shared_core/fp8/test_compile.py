"""FP8 layers under torch.compile: one graph, the eager run's numbers, and counts and histories on every call."""

import copy
import gc
import pickle
import shutil

import pytest
import torch
from fp8_runs import ALL, data, net, start
from plain_loop import backward, update
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_core.errors import TrainingError
from shared_core.fp8 import Fp8Config, convert_to_fp8
from shared_core.fp8.layers import _LAYERS, fp8_grad_input, fp8_grad_weight, fp8_grads, fp8_linear


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(session, optimizer, forward, batches):
    losses = []
    for x in batches:
        loss = session.loss(forward(x).square().mean())
        backward(session, loss)
        update(session, optimizer)
        losses.append(loss.item())
    return losses


def told(session):
    (*_, entry) = [
        entry for entry in session.receipt()["techniques"]["fp8"]["per_layer"] if not entry.get("sixteen_bit")
    ]
    return entry["emulated"], session.state_dict()["techniques"]["fp8"].get("bank", {})


def assert_same_run(recipe, backend, **options):
    models = net(), net()
    runs = []
    for model, forward in (models[0], models[0]), (models[1], torch.compile(models[1], backend=backend, **options)):
        session, optimizer = start(model, recipe)
        losses = train(session, optimizer, forward, data(4))
        with session.swapped("evaluate"), torch.no_grad():
            losses.append(forward(data(1)[0]).sum().item())
        runs.append((losses, *told(session)))
    (losses, counts, bank), (compiled_losses, compiled_counts, compiled_bank) = runs
    assert counts == compiled_counts == {"forward": 5, "grad_input": 4, "grad_weight": 4}
    return models, (losses, bank), (compiled_losses, compiled_bank)


@pytest.mark.parametrize("recipe", ALL)
def test_a_compiled_model_is_one_graph_and_trains_as_the_eager_one(recipe):
    models, (losses, bank), (compiled_losses, compiled_bank) = assert_same_run(recipe, "aot_eager", fullgraph=True)
    assert losses == compiled_losses
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert bank.keys() == compiled_bank.keys()
    for name, value in bank.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(compiled_bank[name])), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_calls_the_same_products():
    models, (losses, _), (compiled_losses, _) = assert_same_run("delayed", "inductor", fullgraph=True)
    # what lies between the layers is compiled and rounds otherwise, and a value may fall to the next code
    assert losses == pytest.approx(compiled_losses, rel=1e-3)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_layers_of_one_shape_share_a_graph_and_keep_their_counts():
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    convert_to_fp8(model, Fp8Config(recipe="tensorwise"))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in list(model)[1:5]:
        layer.compile(backend=count, fullgraph=True)
    for _ in range(2):
        model(torch.randn(4, 32)).sum().backward()
    assert len(graphs) == 1  # compiled anew for each, a deep model would meet the compiler's limit
    assert all(layer.fp8.emulated == {"forward": 2, "grad_input": 2, "grad_weight": 2} for layer in list(model)[1:5])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_types_empty_and_batched_inputs(compiled):
    layer = convert_to_fp8(nn.Linear(32, 16), Fp8Config(recipe="rowwise", include=["first"]))
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else layer
    for shape in ((32,), (3, 32), (2, 3, 32), (0, 32), (2, 0, 32)):
        x = torch.randn(shape, requires_grad=True)
        y = forward(x)
        y.sum().backward()
        assert y.shape == (*shape[:-1], 16)
        assert x.grad.shape == x.shape
        assert torch.isfinite(layer.weight.grad).all()
        layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert forward(torch.randn(4, 32)).dtype == torch.bfloat16
    for dtype in (torch.float64, torch.float16):
        layer.to(dtype)
        x = torch.randn(4, 32, dtype=dtype, requires_grad=True)
        forward(x).sum().backward()
        assert x.grad.dtype == layer.weight.grad.dtype == dtype
        layer.zero_grad()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ALL)
def test_recomputation_changes_no_number(recipe, reentrant):
    plain, recomputed = net(), net()

    def again(x):
        return checkpoint(recomputed, x.requires_grad_(), use_reentrant=reentrant)

    runs = []
    for model, forward in ((plain, plain), (recomputed, again)):
        session, optimizer = start(model, recipe)
        runs.append((train(session, optimizer, forward, data(4)), *told(session)))
    assert runs[0][0] == runs[1][0]
    assert runs[1][1] == {"forward": 8, "grad_input": 4, "grad_weight": 4}
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a, b)
    for name in ("history", "exponents"):
        if name in runs[0][2]:
            assert torch.equal(runs[0][2][name], runs[1][2][name])


def test_recomputation_inside_a_compiled_graph():
    plain, recomputed = net(), net()
    forward = torch.compile(
        lambda x: checkpoint(recomputed, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    ends = []
    for model, call in ((plain, plain), (recomputed, forward)):
        session, optimizer = start(model, "delayed")
        train(session, optimizer, call, data(4))
        ends.append(told(session)[1]["history"])
    assert torch.equal(*ends)
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "block"), [("rowwise", [1, 0]), ("blockwise", [1, 128]), ("tensorwise", [0, 0])])
def test_operators_keep_torchs_rules(recipe, block):
    layer = convert_to_fp8(nn.Linear(32, 48, bias=False), Fp8Config(recipe=recipe, include=["first"]))
    handle = layer.fp8.handle
    for dtype in (torch.float32, torch.bfloat16):
        x, g = torch.randn(5, 32, dtype=dtype), torch.randn(5, 48, dtype=dtype)
        weight = layer.weight.detach()
        for saved_block in ([], block):
            for bias in (None, torch.randn(48, dtype=dtype).requires_grad_()):
                given = x.clone().requires_grad_(), weight.clone().requires_grad_(), bias, handle, True, saved_block
                torch.library.opcheck(fp8_linear, given, atol=0, rtol=0)
        torch.library.opcheck(fp8_grad_input, (g, weight, handle, True))
        _, *codes = fp8_linear(x, weight, None, handle, True, block)
        for saved in ((x, None), codes):
            torch.library.opcheck(fp8_grads, (g, *saved, weight, handle, True))
            torch.library.opcheck(fp8_grad_weight, (g, *saved, handle, True, torch.float32))


def test_second_derivatives_are_refused():
    layer = convert_to_fp8(nn.Linear(16, 16), Fp8Config(recipe="rowwise", include=["first"]))
    x = torch.randn(2, 16, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"efftrain|once_differentiable"):
        first.sum().backward()


def test_every_copy_of_a_layer_has_a_number_of_its_own():
    layer = convert_to_fp8(nn.Linear(16, 16), Fp8Config(recipe="rowwise", include=["first"]))
    copies = [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    assert len({int(one.fp8.handle) for one in copies}) == 3
    copies[1](torch.randn(2, 16)).sum().backward()
    assert [sum(one.fp8.emulated.values()) for one in copies] == [0, 2, 0]
    handles = [int(one.fp8.handle) for one in copies]
    del layer, copies
    gc.collect()
    assert not set(handles) & set(_LAYERS)


def test_a_graph_may_outlive_its_model_and_a_number_of_no_layer_is_refused():
    x = torch.randn(2, 16, requires_grad=True)
    convert_to_fp8(nn.Linear(16, 16), Fp8Config(recipe="rowwise", include=["first"]))(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    with pytest.raises(TrainingError, match="no longer multiplies in FP8"):
        fp8_linear(x, torch.randn(16, 16), None, torch.tensor(10**9), False, [])
