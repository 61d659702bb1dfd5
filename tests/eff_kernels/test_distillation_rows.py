"""`kd_rows_` on torch against autograd of whole losses in float64, as an operator, and its scratch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from eff_kernels.distillation import arithmetic_dtype, kd_rows, kd_rows_, kd_rows_torch_, scratch_rows, tile_rows

CPU = torch.device("cpu")


def reference(student, teacher, labels, temperature, soft_weight, hard_weight, divergence, beta, caps):
    """Hinton et al., 2015, section 2, and Agarwal et al., 2023, equation 1, differentiated by autograd."""
    s, t = student.double().requires_grad_(), teacher.double()
    z, v = (x if not cap else cap * torch.tanh(x / cap) for x, cap in zip((s, t), caps, strict=True))
    q, p = F.softmax(z / temperature, -1), F.softmax(v / temperature, -1)
    m = beta * p + (1 - beta) * q

    def kl(of, to):
        return (of * (of / to).log()).sum(-1)

    soft = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m),
    }[divergence] * temperature**2
    hard = torch.zeros(len(s), dtype=torch.float64)
    if labels is not None:
        hard = F.cross_entropy(z, labels.masked_fill(labels < 0, -100), reduction="none")
    (soft_weight * soft + hard_weight * hard).sum().backward()
    return soft.detach(), hard.detach(), s.grad


@pytest.mark.parametrize("classes", [1, 7, 130])
@pytest.mark.parametrize("caps", [(0.0, 0.0), (3.0, 0.0), (2.0, 5.0)])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_rows_and_gradient(classes, caps, divergence):
    generator = torch.Generator().manual_seed(classes)
    for rows, labeled, ruled_out, temperature in itertools.product((1, 37), (False, True), (False, True), (0.7, 2, 40)):
        student, teacher = (3 * torch.randn(rows, classes, generator=generator) for _ in range(2))
        labels = torch.randint(-1, classes, (rows,), generator=generator) if labeled else None
        options = (float(temperature), 0.7, 0.3, divergence, 0.3)
        expected = reference(student, teacher, labels, *options, caps)
        kept = teacher.clone()
        if caps == (0.0, 0.0):
            apart = kd_rows(student.t().contiguous().t(), teacher, labels, *options)
            for ours, theirs in zip(apart, expected, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6 * max(1, temperature))
        soft, hard = kd_rows_(student, teacher, labels, *options, *caps, ruled_out)
        # what float32 logits keep of a divergence is absolute: its terms are of the size of log-probabilities
        tolerance = {"rtol": 1e-5, "atol": 2e-6 * max(1, temperature)}
        for ours, theirs in zip((soft, hard, student), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, **tolerance)
        assert torch.equal(teacher, kept)


def test_teacher_of_another_type_and_rows_of_a_buffer():
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(4, 9, generator=generator).double()
    teacher = torch.randn(2, 9, generator=generator).bfloat16()
    rest = buffer[2:].clone()
    expected = reference(buffer[:2].clone(), teacher, None, 2.0, 1.0, 0.0, "forward_kl", 0.5, (0, 0))
    soft, _ = kd_rows_(buffer[:2], teacher, None, 2.0, 1.0, 0.0)
    torch.testing.assert_close(soft, expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(buffer[:2], expected[2], rtol=1e-12, atol=1e-15)
    assert torch.equal(buffer[2:], rest)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_classes_ruled_out(divergence):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 6, generator=generator) for _ in range(2))
    options = (2.0, 1.0, 0.0, divergence, 0.5, 0.0, 0.0, True)
    wide = [F.pad(logits, (0, 2), value=-torch.inf) for logits in (student, teacher)]
    expected, _ = kd_rows_torch_(student, teacher, None, *options)
    soft, _ = kd_rows_torch_(*wide, None, *options)
    torch.testing.assert_close(soft, expected)
    torch.testing.assert_close(wide[0], F.pad(student, (0, 2)))


def test_only_one_side_rules_out():
    full, cut = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, -torch.inf]])
    p, q = F.softmax(cut[0, :2].double(), 0), F.softmax(full[0].double(), 0)
    soft, _ = kd_rows_(full.clone(), cut, None, 1.0, 1.0, 0.0)
    assert soft.item() == pytest.approx((p * (p / q[:2]).log()).sum().item(), rel=1e-6)
    assert kd_rows_(cut.clone(), full, None, 1.0, 1.0, 0.0)[0].item() == torch.inf
    assert kd_rows_(full.clone(), cut, None, 1.0, 1.0, 0.0, "reverse_kl")[0].item() == torch.inf
    assert kd_rows_(cut.clone(), full, None, 1.0, 1.0, 0.0, "jsd")[0].isfinite().all()


def test_scratch_is_small_beside_many_rows():
    assert arithmetic_dtype(torch.float32, 11.0) == torch.float64
    assert tile_rows(4096, 32_000, torch.float32, CPU) <= 8 * torch.get_num_threads()
    assert tile_rows(64, 10, torch.float32, CPU) == 4
    for rows in (16, 64, 4096):
        assert scratch_rows(rows, 32_000, torch.float32, 2.0, CPU) <= 5 * rows / 16
