"""FP8 layers reach the Triton kernels by dispatch, and train to the same bits as on plain torch."""

import pytest
import torch
from eff_kernels import fp8
from fp8_runs import Quiet, data, net, start
from fp8_values import memory
from plain_loop import backward, begun_session, update
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from shared_core.fp8 import layers, native
from shared_core.fp8.native import BLOCKS
from shared_core.fp8.scaling import inner_major, outer_major
from shared_core.numerics import block_formats, rounding

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")


def run(recipe):
    model = net()
    session, optimizer = begun_session({"fp8": {"recipe": recipe}}, model, 100, lr=0.05, services=Quiet())
    for number, x in enumerate(data(3)):
        # the second batch overflows, and its step is not taken
        backward(session, session.loss(model(x * torch.inf if number == 1 else x).square().mean()))
        update(session, optimizer)
    return [*model.parameters()], session.receipt()["techniques"]["fp8"]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mx", "mxfp4", "nvfp4", "s2fp8"])
def test_layers_train_alike(recipe, monkeypatch):
    plain = run(recipe)
    asked = []
    for module in (fp8, block_formats, rounding):
        monkeypatch.setattr(module, "on_eager_cuda", lambda x: asked.append(x) or True)
    in_triton = run(recipe)
    # three operands, in three steps; what has no codes to keep casts weight and input once more in backward
    assert len(asked) == 3 * 3 if recipe in BLOCKS else len(asked) > 3 * 3
    assert plain[1] == in_triton[1]
    for a, b in zip(plain[0], in_triton[0], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


@pytest.mark.parametrize(("block", "layout"), [((1, 128), outer_major), ((128, 128), inner_major)])
def test_scales_of_blocks_lie_as_products_read_them(block, layout, monkeypatch):
    x = torch.randn(300, 650)
    for turned in (False, True):
        given = x.t() if turned else x
        wanted = fp8.quantize(given, torch.float8_e4m3fn, block, "exact", both=True)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "on_eager_cuda", lambda x: True)
            found = fp8.quantize(given, torch.float8_e4m3fn, block, "exact", both=True)
        for one, other in zip(found, wanted, strict=True):
            assert layout(one.scale).data_ptr() == one.scale.data_ptr()
            assert layout(one.scale).stride() == layout(other.scale).stride()
            assert torch.equal(memory(layout(one.scale)), memory(layout(other.scale)))


BODIES = {body._opoverload: body._init_fn for body in (layers.fp8_linear, layers.fp8_grads)}
# of operators, what is counted otherwise: the products, and the layer's number, which is read on the CPU, where it lies
APART = {"_scaled_mm", "item", "_local_scalar_dense"}


class Launches(TorchDispatchMode):
    """What a GPU would be told to do beside products: torch's operators, also those inside a layer's, and kernels."""

    def __init__(self, patch):
        super().__init__()
        self.operators, self.kernels = [], []
        patch.setattr(fp8, "on_eager_cuda", lambda x: True)
        patch.setattr(native, "why_not_native", lambda *_: None)
        # no CPU has it
        patch.setattr(
            functional,
            "scaled_mm",
            lambda a, b, *, output_dtype, **_: torch.empty(a.shape[0], b.shape[1], dtype=output_dtype),
        )
        # not run: what they would compute does not decide what follows
        patch.setattr(triton.runtime.interpreter.GridExecutor, "__call__", self.launch)

    def launch(self, *given, **constants):
        self.kernels.append([x.data_ptr() for x in given if isinstance(x, torch.Tensor)])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in BODIES:
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and "empty" not in name and name not in APART:
            self.operators.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_of_a_layer_and_micro_batch(recipe, dtype, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(640, 128, bias=False)).to(dtype)
    session, _ = start(model, recipe, include=["0"])
    (layer,) = model
    address = layer.weight.data_ptr()
    x, gradient = torch.randn(128, 640, dtype=dtype), torch.randn(128, 128, dtype=dtype)
    for micro_batch in (0, 1, 2):
        with monkeypatch.context() as patch, Launches(patch) as launches:
            torch.autograd.grad(layer(x.requires_grad_()), (x, layer.weight), gradient)
        # the watch and the bank are on: what they remember rides along
        assert launches.operators == []
        assert 2 <= len(launches.kernels) <= 4
        # the weight is cast in the first micro-batch of a window, and not again
        assert any(address in given for given in launches.kernels) == (micro_batch != 1)
        if micro_batch == 1:
            session.before_step()
            session.after_step(applied=False)
