"""The chunked loss beside Liger's, where that is installed: it brings Triton along, so it is no test dependency."""

import pytest
import torch

from shared_core.distillation import chunked_kd_loss

liger = pytest.importorskip("liger_kernel.chunked_loss")


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_are_ligers(beta, temperature):
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16, requires_grad=True), torch.randn(101, 16, requires_grad=True)
    teacher = torch.randn(37, 24), torch.randn(101, 24)
    labels = torch.randint(101, (37,)).index_fill(0, torch.arange(0, 37, 5), -100)
    peer = liger.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.4, weight_soft_loss=0.6, beta=beta, temperature=temperature, compiled=False, chunk_size=8
    )
    wanted = peer(hidden, weight, *teacher, labels)
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    found = chunked_kd_loss(
        hidden, weight, *teacher, temperature=temperature, labels=labels, alpha=0.4, divergence="jsd", beta=beta,
        scale_by_temperature=False, chunk_rows=8,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), gradients, atol=1e-6, rtol=1e-5)
