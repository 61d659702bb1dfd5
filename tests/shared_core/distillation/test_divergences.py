"""Divergences against float64 formulas of the papers: values, gradients, rows, edges."""

import math

import numpy as np
import pytest
import torch
from divergence_references import INF, NAN, kl, mean, of, reference, soft

from shared_core.distillation.losses.divergences import DIVERGENCES, jsd, reverse_kl

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.05, 1.0, 2.0, 37.5, 1000.0])
def test_value_is_the_papers(name, dtype, temperature):
    torch.manual_seed(0)
    student, teacher = ((torch.randn(2, 31, 41) * 3).to(dtype) for _ in range(2))
    total, count = of(name)(student, teacher, temperature=temperature)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (count.item(), count.dtype) == (62, torch.int64)
    expected = reference(name, student, teacher, temperature).sum()
    exact = 1e-15 * max(1e3, temperature**2)
    assert total.item() == pytest.approx(expected, rel=exact if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [0.5, 2.0, 30.0])
def test_gradient_is_that_of_finite_differences(name, temperature):
    torch.manual_seed(1)
    student, teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 5).double()
    mask = torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(
        lambda logits: of(name)(logits, teacher, temperature=temperature, mask=mask)[0], student
    )


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_jsd_gradient(beta):
    torch.manual_seed(1)
    student, teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 5).double()
    assert torch.autograd.gradcheck(lambda logits: jsd(logits, teacher, beta=beta), student)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_those_of_float64_rounded(name, dtype):
    torch.manual_seed(2)
    student, teacher = ((torch.randn(6, 50) * 3).to(dtype) for _ in range(2))
    grads = []
    for kind in (dtype, torch.float64):
        logits = student.detach().clone().to(kind).requires_grad_()
        mean(name, logits, teacher.to(kind)).backward()
        grads.append(logits.grad.double())
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=8e-3 * grads[1].abs().max().item())


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_rows_that_do_not_count_may_hold_anything(name, garbage):
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 4), torch.randn(3, 4)
    clean = of(name)(student[:2], teacher[:2])
    student[2], teacher[2] = garbage, garbage
    student.requires_grad_()
    total, count = of(name)(student, teacher, mask=torch.tensor([True, True, False]))
    total.backward()
    assert (total, count) == clean
    assert torch.equal(student.grad[2], torch.zeros(4))
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (2, 3, 4)])
def test_nothing_counts(name, shape):
    student = torch.randn(shape, requires_grad=True)
    total, count = of(name)(student, torch.randn(shape), mask=torch.zeros(shape[:-1], dtype=torch.bool))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert torch.equal(student.grad, torch.zeros(shape))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_one_row_without_a_batch(name):
    torch.manual_seed(0)
    student, teacher = torch.randn(4), torch.randn(4)
    total, count = of(name)(student, teacher)
    assert count == 1
    assert total.item() == pytest.approx(of(name)(student[None], teacher[None])[0].item())


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1e-30, 0.01, 1.0, 2.0, 100.0])
def test_large_logits_stay_finite(name, temperature):
    student = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 5.0]], requires_grad=True)
    teacher = torch.tensor([[-1e4, 1e4, 0.0], [-1e4, 1e4, 5.0]])
    total, _ = of(name)(student, teacher, temperature=temperature)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(student.grad).all()
    # all mass on other classes of the first row, the same in the second: by hand
    expected = {"reverse_kl": 2e4 * temperature, "forward_kl": 2e4 * temperature, "hard_label": 2e4}
    expected["jsd"] = temperature**2 * math.log(2)
    if name in expected:
        assert total.item() == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "soft_cross_entropy", "hard_label"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_classes_that_both_rule_out_change_nothing(name, dtype):
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 3).to(dtype), torch.randn(4, 3).to(dtype)
    wide = [
        torch.cat([side, torch.full((4, 2), -INF, dtype=dtype)], -1).requires_grad_() for side in (student, teacher)
    ]
    total, _ = of(name)(*wide)
    total.backward()
    torch.testing.assert_close(total, of(name)(student, teacher)[0])
    assert torch.isfinite(wide[0].grad).all()
    assert torch.equal(wide[0].grad[:, 3:], torch.zeros(4, 2, dtype=dtype))
    assert wide[1].grad is None


def test_logits_ruled_out_on_both_sides_have_no_squared_difference():
    student = torch.tensor([[1.0, -INF]], requires_grad=True)
    loss = mean("logit_mse", student, torch.tensor([[3.0, -INF]]))
    loss.backward()
    assert loss.item() == 2.0
    assert student.grad.tolist() == [[-2.0, 0.0]]


@pytest.mark.parametrize("beta", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("ruled_out", ["student", "teacher"])
def test_jsd_stays_finite_where_one_side_rules_a_class_out(beta, ruled_out):
    full, cut = torch.tensor([[1.0, 2.0, 3.0]]).double(), torch.tensor([[1.0, 2.0, -INF]]).double()
    student, teacher = (cut, full) if ruled_out == "student" else (full, cut)
    student = student.clone().requires_grad_()
    loss = jsd(student, teacher, beta=beta, temperature=1.0)
    loss.backward()
    p, q = (torch.softmax(each.detach(), -1) for each in (teacher, student))
    mixed = beta * p + (1 - beta) * q
    expected = beta * torch.xlogy(p, p / mixed) + (1 - beta) * torch.xlogy(q, q / mixed)
    assert loss.item() == pytest.approx(expected.nansum().item())
    assert torch.isfinite(student.grad).all()


def test_reverse_kl_is_infinite_only_where_the_teacher_alone_rules_out():
    full, cut = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, -INF]])
    assert reverse_kl(full, cut).item() == INF
    student = cut.clone().requires_grad_()
    loss = reverse_kl(student, full, temperature=1.0)
    loss.backward()
    q, p = soft(np.array([1.0, 2.0]), 1.0), soft(np.array([1.0, 2.0, 3.0]), 1.0)[:2]
    assert loss.item() == pytest.approx(kl(q, p), rel=1e-5)
    assert torch.isfinite(student.grad).all()
