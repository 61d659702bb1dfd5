"""FP8 layers reach the Triton kernels by dispatch, and train to the same bits as on plain torch."""

import pytest
import torch
from eff_kernels import fp8
from fp8_runs import Quiet, backward, data, net, update
from plain_loop import begun_session

from shared_core.numerics import block_formats, rounding

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")


def run(recipe):
    model = net()
    session, optimizer = begun_session({"fp8": {"recipe": recipe}}, model, 100, lr=0.05, services=Quiet())
    for number, x in enumerate(data(3)):
        # the second batch overflows, and its step is not taken
        backward(session, session.loss(model(x * torch.inf if number == 1 else x).square().mean()))
        update(session, optimizer)
    return [*model.parameters()], session.receipt()["techniques"]["fp8"]


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise", "mxfp4", "nvfp4", "s2fp8"])
def test_layers_train_alike(recipe, monkeypatch):
    plain = run(recipe)
    asked = []
    for module in (fp8, block_formats, rounding):
        monkeypatch.setattr(module, "on_eager_cuda", lambda x: asked.append(x) or True)
    in_triton = run(recipe)
    # forward, and backward's gradient, weight and input, in three steps
    assert len(asked) >= 5 * 3 - 3
    assert plain[1] == in_triton[1]
    for a, b in zip(plain[0], in_triton[0], strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
