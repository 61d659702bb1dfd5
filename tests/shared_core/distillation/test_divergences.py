"""Divergences against float64 formulas of the papers: values, gradients, rows, edges, refusals."""

import math

import numpy as np
import pytest
import torch
from divergence_references import INF, NAN, SOFT, kl, mean, of, reference, soft
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.distillation.losses.divergences import DIVERGENCES, jsd, kd_loss, kd_topk_sum, mean_teacher, reverse_kl
from shared_core.distillation.losses.regression import hard_label_sum, huber_sum, teacher_bounded_mse_sum
from shared_core.distillation.losses.softened_pair import mean_of
from shared_core.errors import ConfigError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.05, 1.0, 2.0, 37.5, 1000.0])
def test_value_is_the_papers(name, dtype, temperature):
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
def test_a_mask_of_nothing_gives_zero_without_gradient(name, shape):
    student = torch.randn(shape, requires_grad=True)
    total, count = of(name)(student, torch.randn(shape), mask=torch.zeros(shape[:-1], dtype=torch.bool))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert torch.equal(student.grad, torch.zeros(shape))
    assert mean_of(total, count).item() == 0.0


@pytest.mark.parametrize("name", DIVERGENCES)
def test_one_row_without_a_batch(name):
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


def test_mixed_dtypes():
    student, teacher = torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)
    expected = reference("forward_kl", student, teacher.float(), 2.0).mean()
    assert kd_loss(student, teacher).item() == pytest.approx(expected, rel=1e-5)
    assert kd_loss(student.half(), teacher.bfloat16()).dtype == torch.float32


def test_a_class_that_only_one_side_rules_out():
    full, cut = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, -INF]])
    student = full.clone().requires_grad_()
    loss = kd_loss(student, cut, temperature=1.0)
    loss.backward()
    p, q = soft(np.array([1.0, 2.0]), 1.0), soft(np.array([1.0, 2.0, 3.0]), 1.0)[:2]
    assert loss.item() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    assert torch.isfinite(student.grad).all()
    assert kd_loss(cut, full).item() == INF


@given(st.integers(1, 5), st.integers(1, 9), st.floats(0.05, 200), st.floats(-50, 50), st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_the_divergence_is_zero_for_equals_and_never_below(rows, classes, temperature, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(2))
    loss = kd_loss(student, teacher, temperature=temperature).item()
    slack = 1e-10 * temperature**2
    assert loss >= -slack
    assert kd_loss(teacher, teacher, temperature=temperature).item() == pytest.approx(0, abs=slack)
    shifted = kd_loss(student + shift, teacher - shift, temperature=temperature).item()
    assert shifted == pytest.approx(loss, rel=1e-6, abs=slack)
    order = torch.randperm(classes, generator=generator)
    assert kd_loss(student[:, order], teacher[:, order], temperature=temperature).item() == pytest.approx(
        loss, rel=1e-6, abs=slack
    )


def test_high_temperature_becomes_mean_squared_difference_of_centered_logits():
    # Hinton et al., section 2.1: for high T the gradient is (z_i - v_i) / N of zero-mean logits
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 10), torch.randn(6, 10)
    centered = (student - student.mean(-1, keepdim=True)) - (teacher - teacher.mean(-1, keepdim=True))
    expected = centered.pow(2).mean(-1).mean() / 2
    torch.testing.assert_close(kd_loss(student, teacher, temperature=1e4), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(
    ("student", "teacher", "options", "message"),
    [
        ((2, 3), (2, 4), {}, r"\(2, 3\), got \(2, 4\)"),
        ((), (), {}, "classes"),
        ((2, 3), (2, 3), {"mask": torch.ones(3, dtype=torch.bool)}, r"mask must be bool of shape \(2,\)"),
        ((2, 3), (2, 3), {"mask": torch.ones(2)}, r"got torch\.float32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, student, teacher, options, message):
    with pytest.raises(ConfigError, match=message):
        of(name)(torch.zeros(student), torch.zeros(teacher), **options)


Z, ONE = torch.zeros(2, 3), torch.zeros(2)
TOP = torch.zeros(2, 2).long(), torch.zeros(2, 2)
TEMPERATURE = "temperature must be finite and above 0"
REFUSED = [
    *((lambda n=n, T=T: of(n)(Z, Z, temperature=T), TEMPERATURE)
      for n in (*SOFT, "bernoulli_kl") for T in (0, -1.0, INF, NAN, True)),
    *((lambda n=n: of(n)(Z), "must be given, got neither") for n in (*SOFT, "bernoulli_kl", "hard_label")),
    *((lambda n=n: of(n)(Z, Z, teacher_log_probs=Z), "must be given, got both") for n in (*SOFT, "bernoulli_kl")),
    *((lambda n=n: of(n)(Z, teacher_log_probs=Z), "teacher_logits must be given, got teacher_log_probs")
      for n in ("logit_mse", "huber")),
    (lambda: of("logit_mse")(Z), "teacher_logits must be given .*got None"),
    (lambda: reverse_kl(Z.long(), Z), r"reverse_kl: student_logits must be floating point, got torch\.int64"),
    *((lambda b=b: jsd(Z, Z, beta=b), r"jsd: beta must be in \[0, 1\]") for b in (-0.1, 1.1, NAN, True)),
    *((lambda t=t: hard_label_sum(Z, Z, threshold=t), r"threshold must be in \[0, 1\]") for t in (-0.1, 1.1, NAN)),
    *((lambda d=d: huber_sum(Z, Z, delta=d), "delta must be finite and above 0") for d in (0, -1.0, INF, NAN)),
    (lambda: teacher_bounded_mse_sum(Z, Z), "targets must be given .*got None"),
    (lambda: teacher_bounded_mse_sum(Z, Z, targets=ONE), r"targets must be given with the shape .*, got \(2,\)"),
    (lambda: teacher_bounded_mse_sum(Z, Z, targets=Z, margin=NAN), "margin must be finite and at least 0"),
    (lambda: mean_teacher([]), "at least one teacher"),
    (lambda: mean_teacher([ONE], [1, 2]), "weights 1, one a teacher, got 2"),
    (lambda: mean_teacher([ONE], [0]), "not all 0"),
    (lambda: mean_teacher([ONE], [NAN]), "finite"),
    (lambda: mean_teacher([ONE, ONE], [-1, 2]), "at least 0"),
    (lambda: mean_teacher([ONE, torch.zeros(3)]), "one shape"),
    (lambda: mean_teacher([ONE.long()]), "floating-point"),
    (lambda: mean_teacher([ONE], None, 0.0), TEMPERATURE),
    (lambda: mean_teacher([ONE], None, 1.0, "odds"), "space must be 'probabilities' or 'logits', got 'odds'"),
    (lambda: kd_topk_sum(Z, torch.zeros(2, 6).long(), torch.zeros(2, 6)), "k at most the student's classes"),
    (lambda: kd_topk_sum(Z, torch.zeros(3, 2).long(), torch.zeros(3, 2)), r"got \(3, 2\)"),
    (lambda: kd_topk_sum(Z, TOP[0], Z), "topk_log_probs must have the shape of topk_indices"),
    (lambda: kd_topk_sum(Z, *TOP, tail_mass=torch.zeros(3)), r"tail_mass must have the shape \(2,\)"),
    (lambda: kd_topk_sum(Z, *TOP, temperature=NAN), TEMPERATURE),
    (lambda: kd_topk_sum(Z, *TOP, divergence="jds"), "did you mean 'jsd'"),
    (lambda: kd_topk_sum(Z, *TOP, mask=torch.ones(2)), "mask must be bool"),
    (lambda: kd_topk_sum(Z, TOP[1], TOP[1]), "topk_indices must be integers"),
    (lambda: kd_topk_sum(Z, TOP[0], TOP[0]), "topk_log_probs must be floating point"),
    (lambda: kd_topk_sum(Z, TOP[0], TOP[1].half()), "must be float32 or float64 where tail_mass is not given"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
