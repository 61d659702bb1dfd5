"""`kd_rows_` in Triton: its numbers in the interpreter, and on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
RULED_OUT = -float("inf")


def cases(classes):
    """Yield logits of both sides, labels and options; odd shapes, classes ruled out."""
    generator = torch.Generator().manual_seed(classes)
    for index, divergence in enumerate(DIVERGENCES):
        for caps in ((0.0, 0.0), (3.0, 0.0), (2.0, 5.0)):
            student, teacher = (3 * torch.randn(3, classes, generator=generator) for _ in range(2))
            labels = torch.tensor([0, -1, classes - 1]) if caps[0] != 3.0 else None
            if classes > 40 and not any(caps):
                student[:, 3:40] = teacher[:, 3:40] = RULED_OUT
            yield (
                student[:, :classes],
                teacher[:, :classes],
                labels,
                ((2.0, 0.5, 7.0)[index], 0.7, 0.3, divergence, 0.3, *caps),
            )


def check(triton_, device, classes, dtypes, *, thinned=False, **settings):
    from eff_kernels.distillation import kd_rows_torch_

    for turn, (dtype, eps) in enumerate(dtypes.items()):
        for number, (student, teacher, labels, options) in enumerate(cases(classes)):
            if thinned and (number + number // 3) % 3 != turn:  # each divergence and each pair of caps has every dtype
                continue
            # rows of a wider buffer
            whole = [torch.full((3, classes + 2), 5.0).to(device, dtype) for _ in range(2)]
            ours, theirs = (each[:, :classes] for each in whole)
            ours.copy_(student), theirs.copy_(teacher)
            expected_grad = ours.double().cpu()
            where = None if labels is None else labels.to(device)
            soft, hard = triton_(ours, theirs, where, *options, **settings)
            expected = kd_rows_torch_(expected_grad, theirs.double().cpu(), labels, *options, True)
            for value, wanted in zip((soft, hard), expected, strict=True):
                assert value.dtype == torch.float32
                torch.testing.assert_close(value.double().cpu(), wanted, rtol=2e-5, atol=2e-5)
            assert all((each[:, classes:] == 5.0).all() for each in whole)
            torch.testing.assert_close(ours.double().cpu(), expected_grad, rtol=2 * eps, atol=5e-6)


@pytest.mark.parametrize("classes", [1, 38, 130])  # rows of 130 do not begin with a vector
def test_in_the_interpreter(classes):
    from eff_kernels._triton.distillation import kd_rows_triton_

    # the interpreter cuts bfloat16 off instead of rounding it (Triton 3.6 to 3.9): within one unit all the same
    dtypes = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
    check(kd_rows_triton_, "cpu", classes, dtypes, thinned=True, block=64)


def test_no_rows_and_no_numbers_in_the_interpreter():
    from eff_kernels._triton.distillation import kd_rows_triton_

    soft, hard = kd_rows_triton_(torch.zeros(0, 4), torch.zeros(0, 4), None, 2.0, 1.0, 0.0, "jsd", 0.5, 0.0, 0.0)
    assert soft.shape == hard.shape == (0,)
    for divergence in DIVERGENCES:
        student = torch.tensor([[0.0, float("nan"), 1.0]])
        soft, _ = kd_rows_triton_(student, torch.zeros(1, 3), None, 2.0, 1.0, 0.0, divergence, 0.5, 0.0, 0.0)
        assert soft.isnan().all(), divergence


@pytest.mark.gpu
def test_on_a_gpu():
    from eff_kernels.distillation import kd_rows_

    dtypes = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}
    for classes in (1, 37, 5000, 32_001):
        check(kd_rows_, "cuda", classes, dtypes)
