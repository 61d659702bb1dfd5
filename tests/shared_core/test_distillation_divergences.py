"""Divergences against float64 formulas of the papers, against TRL and torch, their gradients, and their edges."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.distillation.divergences import (
    DIVERGENCES,
    forward_kl_sum,
    jsd,
    jsd_sum,
    reverse_kl,
    reverse_kl_sum,
    soft_cross_entropy,
)
from shared_core.distillation.hard_labels import hard_label_loss, hard_label_sum
from shared_core.distillation.independent_outputs import (
    bernoulli_kl,
    bernoulli_kl_sum,
    huber,
    huber_sum,
    logit_mse,
    teacher_bounded_mse,
    teacher_bounded_mse_sum,
)
from shared_core.distillation.losses import kd_loss, kd_sum
from shared_core.distillation.teacher_mean import mean_logits, mean_teacher
from shared_core.distillation.topk_divergence import kd_topk, kd_topk_sum
from shared_core.errors import ConfigError

INF, NAN = float("inf"), float("nan")
SOFT = ["forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def of(name):
    """The sum form with what it needs beyond the signature that all share."""
    if name == "teacher_bounded_mse":
        return lambda student, teacher, **options: teacher_bounded_mse_sum(
            student, teacher, targets=torch.zeros_like(teacher), **options
        )
    return DIVERGENCES[name]


def mean(name, *args, **options):
    total, count = of(name)(*args, **options)
    return total / max(count.item(), 1)


def soft(logits, temperature):
    z = logits / temperature
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(-1)


def gjsd(p, q, beta):
    # Agarwal et al., equation 1: beta KL(P || beta P + (1 - beta) Q) + (1 - beta) KL(Q || the same)
    mixed = beta * p + (1 - beta) * q
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


def sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


def reference(name, student, teacher, temperature):
    """One number a row, T² included, from the papers' formulas in float64."""
    s, t = student.double().numpy(), teacher.double().numpy()
    p, q = soft(t, temperature), soft(s, temperature)
    if name == "forward_kl":
        return temperature**2 * kl(p, q)
    if name == "reverse_kl":
        return temperature**2 * kl(q, p)
    if name == "jsd":
        return temperature**2 * gjsd(p, q, 0.5)
    if name == "soft_cross_entropy":
        return -(temperature**2) * (p * np.log(q)).sum(-1)
    if name == "hard_label":
        return -np.log(np.take_along_axis(soft(s, 1.0), t.argmax(-1)[..., None], -1))[..., 0]
    if name == "logit_mse":
        return ((s - t) ** 2).mean(-1)
    if name == "huber":
        d = np.abs(s - t)
        return np.where(d <= 1, d**2 / 2, d - 0.5).mean(-1)
    if name == "teacher_bounded_mse":
        ours, theirs = (s**2).sum(-1), (t**2).sum(-1)
        return np.where(ours > theirs, ours, 0.0)
    yes, guess = sigmoid(t / temperature), sigmoid(s / temperature)
    no, other = sigmoid(-t / temperature), sigmoid(-s / temperature)
    return temperature**2 * (yes * np.log(yes / guess) + no * np.log(no / other)).sum(-1)


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
    loss = logit_mse(student, torch.tensor([[3.0, -INF]]))
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


class TestAgainstOthers:
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
    @pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
    def test_trl(self, beta, temperature):
        gkd = pytest.importorskip("trl.experimental.gkd")
        torch.manual_seed(0)
        student, teacher = torch.randn(2, 7, 13, requires_grad=True), torch.randn(2, 7, 13)
        labels = torch.where(torch.rand(2, 7) > 0.3, 1, -100)
        theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=temperature)
        (wanted,) = torch.autograd.grad(theirs, student)
        # TRL leaves T² out
        ours = jsd(
            student, teacher, beta=beta, temperature=temperature, mask=labels != -100, scale_by_temperature=False
        )
        (found,) = torch.autograd.grad(ours, student)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize("temperature", [1.0, 4.0])
    def test_torch(self, temperature):
        torch.manual_seed(0)
        student, teacher = torch.randn(9, 5), torch.randn(9, 5)
        s, t = F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
        square = temperature**2
        kls = [square * F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((s, t), (t, s))]
        total, count = forward_kl_sum(student, teacher, temperature=temperature)
        torch.testing.assert_close(total / count, kls[0])
        torch.testing.assert_close(reverse_kl(student, teacher, temperature=temperature), kls[1])
        entropy = square * F.cross_entropy(student / temperature, t.exp())
        torch.testing.assert_close(soft_cross_entropy(student, teacher, temperature=temperature), entropy)
        torch.testing.assert_close(logit_mse(student, teacher), F.mse_loss(student, teacher))
        torch.testing.assert_close(huber(student, teacher, delta=0.3), F.huber_loss(student, teacher, delta=0.3))
        torch.testing.assert_close(hard_label_loss(student, teacher), F.cross_entropy(student, teacher.argmax(-1)))

    def test_bernoulli_is_binary_cross_entropy_less_the_teachers_entropy(self):
        torch.manual_seed(0)
        student, teacher = torch.randn(6, 4).double(), torch.randn(6, 4).double()
        target = teacher.sigmoid()
        expected = F.binary_cross_entropy_with_logits(student, target) - F.binary_cross_entropy(target, target)
        found = bernoulli_kl(student, teacher, temperature=1.0, average_labels=True)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("temperature", [0.5, 2.0, 20.0])
    def test_bernoulli_of_one_logit_is_the_kl_of_two_classes(self, temperature):
        torch.manual_seed(0)
        student, teacher = torch.randn(6, 1), torch.randn(6, 1)
        classes = [torch.cat([logit, torch.zeros_like(logit)], -1) for logit in (student, teacher)]
        torch.testing.assert_close(
            bernoulli_kl(student, teacher, temperature=temperature), kd_loss(*classes, temperature=temperature)
        )

    @pytest.mark.parametrize("temperature", [0.001, 1.0, 2.0, 50.0])
    def test_forward_kl_is_kd_sum(self, temperature):
        torch.manual_seed(0)
        student, teacher, mask = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6) > 0.4
        options = {"temperature": temperature, "mask": mask}
        assert forward_kl_sum(student, teacher, **options) == kd_sum(student, teacher, **options)


class TestProperties:
    @given(
        st.integers(1, 5), st.integers(2, 9), st.floats(0.05, 100), st.floats(1e-3, 1 - 1e-3), st.integers(0, 2**31 - 1)
    )
    @settings(max_examples=60, deadline=None)
    def test_jsd(self, rows, classes, temperature, beta, seed):
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(2))
        of_beta = functools.partial(jsd, temperature=temperature)
        slack = 1e-10 * temperature**2
        value = of_beta(a, b, beta=beta).item()
        assert value >= -slack
        assert of_beta(a, a, beta=beta).item() == pytest.approx(0, abs=slack)
        # the roles of the sides are swapped by 1 - beta
        assert of_beta(b, a, beta=1 - beta).item() == pytest.approx(value, rel=1e-6, abs=slack)
        assert of_beta(a, b, beta=0.5).item() <= temperature**2 * math.log(2) + slack
        assert of_beta(a + 3, b - 5, beta=beta).item() == pytest.approx(value, rel=1e-6, abs=slack)

    def test_jsd_over_beta_goes_to_the_kls_and_itself_to_zero(self):
        torch.manual_seed(0)
        student, teacher = torch.randn(5, 6).double(), torch.randn(5, 6).double()
        for ends, small in (((0, 1e-6), 1e-6), ((1, 1 - 1e-6), 1e-6)):
            end, near = (jsd(student, teacher, beta=beta) for beta in ends)
            assert near / small == pytest.approx(end.item(), rel=1e-3)
            assert near < 1e-4 * end

    def test_one_at_a_time(self):
        student, teacher = torch.randn(5, 6), torch.randn(5, 6)
        assert torch.equal(jsd(student, teacher, beta=1), reverse_kl(student, teacher))
        torch.testing.assert_close(jsd(student, teacher, beta=0), kd_loss(student, teacher))
        torch.testing.assert_close(reverse_kl(student, teacher), kd_loss(teacher, student))

    @pytest.mark.parametrize("name", [*SOFT, "bernoulli_kl"])
    def test_the_switch_takes_the_square_of_the_temperature_out(self, name):
        torch.manual_seed(0)
        student, teacher = torch.randn(5, 6).double(), torch.randn(5, 6).double()
        with_it, without = (
            of(name)(student, teacher, temperature=3.0, scale_by_temperature=each)[0] for each in (True, False)
        )
        assert with_it.item() == pytest.approx(9 * without.item())

    def test_soft_cross_entropy_has_the_gradient_of_the_kl(self):
        student, teacher = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
        found = [torch.autograd.grad(loss(student, teacher), student)[0] for loss in (soft_cross_entropy, kd_loss)]
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("name", DIVERGENCES)
    def test_autocast_does_not_lower_the_arithmetic(self, name):
        student, teacher = torch.randn(4, 50) * 3, torch.randn(4, 50) * 3
        with torch.autocast("cpu", torch.bfloat16):
            inside = of(name)(student, teacher)
        assert inside == of(name)(student, teacher)

    @pytest.mark.parametrize("name", DIVERGENCES)
    def test_the_teacher_gets_no_gradient(self, name):
        student, teacher = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        of(name)(student, teacher)[0].backward()
        assert teacher.grad is None
        assert student.grad.abs().sum() > 0


class TestHardLabels:
    def test_only_confident_rows_count(self):
        teacher = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]).log()
        student = torch.randn(3, 2, requires_grad=True)
        total, count = hard_label_sum(student, teacher, threshold=0.8)
        assert count.item() == 2
        torch.testing.assert_close(total, F.cross_entropy(student[[0, 2]], torch.tensor([0, 1]), reduction="sum"))
        total.backward()
        assert torch.equal(student.grad[1], torch.zeros(2))

    def test_no_row_is_confident(self):
        student = torch.randn(3, 2, requires_grad=True)
        loss = hard_label_loss(student, torch.zeros(3, 2), threshold=0.51)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(student.grad, torch.zeros(3, 2))

    def test_certainty_meets_a_threshold_of_one(self):
        assert hard_label_sum(torch.zeros(2, 2), torch.tensor([[50.0, 0.0], [1.0, 0.0]]), threshold=1.0)[1] == 1

    def test_the_temperature_changes_nothing(self):
        student, teacher = torch.randn(5, 6), torch.randn(5, 6)
        assert hard_label_sum(student, teacher, threshold=0.4, temperature=9.0) == hard_label_sum(
            student, teacher, threshold=0.4
        )


class TestIndependentOutputs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_infinite_logits_of_both_sides_add_nothing(self, dtype):
        student = torch.tensor([[INF, -INF, 1.0]], dtype=dtype, requires_grad=True)
        loss = bernoulli_kl(student, torch.tensor([[INF, -INF, 0.0]], dtype=dtype))
        loss.backward()
        assert loss.item() == pytest.approx(bernoulli_kl(torch.ones(1, 1), torch.zeros(1, 1)).item(), rel=1e-6)
        assert torch.isfinite(student.grad).all()

    def test_averaging_labels_divides_by_their_number(self):
        student, teacher = torch.randn(5, 4), torch.randn(5, 4)
        summed, _ = bernoulli_kl_sum(student, teacher)
        averaged, _ = bernoulli_kl_sum(student, teacher, average_labels=True)
        assert summed.item() == pytest.approx(4 * averaged.item(), rel=1e-6)

    def test_the_bound_of_chen(self):
        student, teacher = torch.tensor([[2.0], [1.0], [1.0]], requires_grad=True), torch.tensor([[1.0], [2.0], [1.1]])
        # errors 4, 1, 1 against the teacher's 1, 4, 1.21
        loss = teacher_bounded_mse(student, teacher, torch.zeros(3, 1))
        loss.backward()
        assert loss.item() == pytest.approx(4 / 3)
        assert student.grad.flatten().tolist() == pytest.approx([4 / 3, 0, 0])
        assert teacher_bounded_mse(student, teacher, torch.zeros(3, 1), margin=0.5).item() == pytest.approx(5 / 3)
        assert teacher_bounded_mse(student, teacher, torch.zeros(3, 1, dtype=torch.int64)).item() == loss.item()

    def test_a_teacher_of_log_probabilities(self):
        torch.manual_seed(0)
        student, teacher = torch.randn(5, 4).double(), torch.randn(5, 4).double() * 5
        torch.testing.assert_close(
            bernoulli_kl(student, teacher_log_probs=F.logsigmoid(teacher / 2), temperature=2.0),
            bernoulli_kl(student, teacher, temperature=2.0),
        )


class TestSeveralTeachers:
    @pytest.mark.parametrize("name", SOFT)
    @pytest.mark.parametrize("temperature", [1.0, 2.0, 20.0])
    def test_probabilities_are_averaged(self, name, temperature):
        torch.manual_seed(0)
        student, teachers = torch.randn(4, 6), [torch.randn(4, 6) * 3 for _ in range(3)]
        weights = [1.0, 2.0, 5.0]
        shared = sum(
            weight / 8 * soft(teacher.double().numpy(), temperature)
            for weight, teacher in zip(weights, teachers, strict=True)
        )
        log_probs = mean_teacher(teachers, weights, temperature)
        np.testing.assert_allclose(log_probs.exp(), shared, rtol=1e-5)
        found = mean(name, student, teacher_log_probs=log_probs, temperature=temperature)
        # logits of a distribution at T are T times its logs
        expected = reference(name, student, torch.from_numpy(temperature * np.log(shared)), temperature).mean()
        assert found.item() == pytest.approx(expected, rel=1e-4)

    def test_logits_are_averaged(self):
        torch.manual_seed(0)
        teachers = [torch.randn(4, 6), torch.randn(4, 6)]
        torch.testing.assert_close(
            mean_teacher(teachers, [3, 1], 2.0, "logits"),
            torch.log_softmax((0.75 * teachers[0] + 0.25 * teachers[1]) / 2, -1),
        )
        torch.testing.assert_close(mean_logits(teachers), (teachers[0] + teachers[1]) / 2)

    def test_labels_of_their_own(self):
        torch.manual_seed(0)
        teachers = [torch.randn(4, 6), torch.randn(4, 6)]
        torch.testing.assert_close(
            mean_teacher(teachers, temperature=2.0, multi_label=True).exp(),
            (torch.sigmoid(teachers[0] / 2) + torch.sigmoid(teachers[1] / 2)) / 2,
        )

    def test_one_teacher_is_itself(self):
        student, teacher = torch.randn(4, 6), torch.randn(4, 6)
        total, _ = forward_kl_sum(student, teacher_log_probs=mean_teacher([teacher]))
        torch.testing.assert_close(total, forward_kl_sum(student, teacher)[0])

    def test_classes_ruled_out(self):
        first, second = torch.tensor([1.0, -INF, -INF]), torch.tensor([-INF, 1.0, -INF])
        assert mean_teacher([first, second]).exp().tolist() == pytest.approx([0.5, 0.5, 0.0])
        # a teacher of weight 0 is not read
        assert mean_teacher([first, torch.full((3,), NAN)], [1, 0]).exp().tolist() == [1.0, 0.0, 0.0]
        assert mean_logits([first, torch.full((3,), -INF)], [1, 0]).tolist() == [1.0, -INF, -INF]

    def test_extreme_temperatures_keep_float64(self):
        teachers = [torch.randn(4, 6) for _ in range(2)]
        assert mean_teacher(teachers, temperature=100.0).dtype == torch.float64
        assert mean_teacher(teachers, temperature=100.0, space="logits").dtype == torch.float64
        assert mean_teacher([teacher.bfloat16() for teacher in teachers]).dtype == torch.float32

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (([],), "at least one teacher"),
            (([torch.zeros(2)], [1, 2]), "weights must be 1, one a teacher, got 2"),
            (([torch.zeros(2)], [0]), "not all 0"),
            (([torch.zeros(2)], [NAN]), "finite"),
            (([torch.zeros(2), torch.zeros(2)], [-1, 2]), "at least 0"),
            (([torch.zeros(2), torch.zeros(3)],), "one shape"),
            (([torch.zeros(2, dtype=torch.int64)],), "floating-point"),
            (([torch.zeros(2)], None, 0.0), "temperature must be finite and above 0"),
            (([torch.zeros(2)], None, 1.0, "odds"), "space must be 'probabilities' or 'logits', got 'odds'"),
        ],
    )
    def test_refusals(self, args, message):
        with pytest.raises(ConfigError, match=message):
            mean_teacher(*args)


class TestTopK:
    @staticmethod
    def cache(teacher, k, temperature):
        log_probs, indices = torch.log_softmax(teacher / temperature, -1).topk(k)
        return indices, log_probs

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    @pytest.mark.parametrize("k", [1, 4, 11, 12])
    def test_the_tail_is_one_more_class(self, dtype, temperature, k):
        torch.manual_seed(0)
        student, teacher = torch.randn(3, 5, 12, dtype=dtype) * 2, torch.randn(3, 5, 12, dtype=dtype) * 2
        indices, log_probs = self.cache(teacher, k, temperature)
        p, q = soft(teacher.double().numpy(), temperature), soft(student.double().numpy(), temperature)
        top_p, top_q = (np.take_along_axis(each, indices.numpy(), -1) for each in (p, q))
        expected = kl(top_p, top_q)
        if k < 12:
            rest_p, rest_q = 1 - top_p.sum(-1), 1 - top_q.sum(-1)
            expected = expected + rest_p * np.log(rest_p / rest_q)
        found = kd_topk(student, indices, log_probs, temperature=temperature)
        tolerance = 1e-9 if dtype == torch.float64 else 2e-5
        assert found.item() == pytest.approx(temperature**2 * expected.mean(), rel=tolerance)

    @pytest.mark.parametrize("temperature", [0.001, 1.0, 2.0, 50.0])
    def test_all_classes_are_the_whole_loss_and_its_gradient(self, temperature):
        torch.manual_seed(0)
        student, teacher = torch.randn(4, 7, dtype=torch.float64, requires_grad=True), torch.randn(4, 7).double()
        mask = torch.tensor([True, False, True, True])
        results = []
        for loss in (
            kd_topk(student, *self.cache(teacher, 7, temperature), temperature=temperature, mask=mask),
            kd_loss(student, teacher, temperature=temperature, mask=mask),
        ):
            results.append((loss, torch.autograd.grad(loss, student)[0]))
        torch.testing.assert_close(*results)

    @pytest.mark.parametrize("divergence", SOFT)
    @pytest.mark.parametrize("k", [2, 5])
    def test_gradient_is_that_of_finite_differences(self, divergence, k):
        torch.manual_seed(1)
        student, teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 5).double()
        cached = self.cache(teacher, k, 2.0)
        assert torch.autograd.gradcheck(lambda logits: kd_topk(logits, *cached, divergence=divergence), student)

    @pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
    def test_merging_classes_never_adds(self, divergence):
        torch.manual_seed(2)
        student, teacher = torch.randn(30, 20).double(), torch.randn(30, 20).double() * 3
        values = [kd_topk(student, *self.cache(teacher, k, 2.0), divergence=divergence) for k in (1, 3, 9, 19, 20)]
        assert all(low <= high + 1e-12 for low, high in itertools.pairwise(values))
        torch.testing.assert_close(values[-1], mean(divergence, student, teacher))

    def test_the_tail_is_not_renormalised_away(self):
        teacher = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
        student = torch.zeros(1, 4, requires_grad=True)
        kd_topk(student, *self.cache(teacher, 1, 1.0), temperature=1.0).backward()
        # q - p where p is known; the tail's classes share -(0.6 - 0.75) by their probabilities
        assert student.grad[0].tolist() == pytest.approx([0.25 - 0.4, 0.05, 0.05, 0.05], abs=1e-6)

    def test_a_stored_mass_is_used(self):
        indices, log_probs = torch.tensor([[0]]), torch.tensor([[0.5]]).log()
        found = kd_topk(torch.zeros(1, 3), indices, log_probs, temperature=1.0, tail_mass=torch.tensor([0.25]))
        expected = 0.5 * math.log(0.5 * 3) + 0.25 * math.log(0.25 / (2 / 3))
        assert found.item() == pytest.approx(expected, rel=1e-5)

    def test_half_precision_stores_come_with_their_mass(self):
        torch.manual_seed(0)
        student, teacher = torch.randn(6, 40), torch.randn(6, 40) * 3
        indices, log_probs = self.cache(teacher, 8, 2.0)
        tail = 1 - log_probs.exp().sum(-1)
        exact = kd_topk(student, indices, log_probs)
        halved = kd_topk(student.bfloat16(), indices.int(), log_probs.half(), tail_mass=tail)
        assert halved.item() == pytest.approx(exact.item(), rel=2e-2)
        with pytest.raises(ConfigError, match=r"must be float32 or float64 where tail_mass is not given"):
            kd_topk(student, indices, log_probs.half())

    @pytest.mark.parametrize("k", [2, 4])
    def test_classes_that_nobody_allows(self, k):
        student = torch.tensor([[1.0, 2.0, -INF, -INF]], requires_grad=True)
        teacher = torch.tensor([[0.0, 3.0, -INF, -INF]])
        loss = kd_topk(student, *self.cache(teacher, k, 2.0))
        loss.backward()
        torch.testing.assert_close(loss, kd_loss(student, teacher))
        assert torch.isfinite(student.grad).all()

    @pytest.mark.parametrize("k", [1, 3])
    def test_large_logits(self, k):
        student = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
        loss = kd_topk(student, *self.cache(torch.tensor([[-1e4, 1e4, 0.0]]), k, 1.0), temperature=1.0)
        loss.backward()
        assert loss.item() == pytest.approx(2e4)
        assert torch.isfinite(student.grad).all()

    def test_rows_that_do_not_count_may_hold_anything(self):
        torch.manual_seed(0)
        student, teacher = torch.randn(3, 6), torch.randn(3, 6)
        indices, log_probs = self.cache(teacher, 2, 2.0)
        clean = kd_topk_sum(student[:2], indices[:2], log_probs[:2])
        indices[2], log_probs[2], student[2] = -1, NAN, INF
        student.requires_grad_()
        total, count = kd_topk_sum(student, indices, log_probs, mask=torch.tensor([True, True, False]))
        total.backward()
        assert (total, count) == clean
        assert torch.isfinite(student.grad).all()
        nothing, none = kd_topk_sum(student, indices, log_probs, mask=torch.zeros(3, dtype=torch.bool))
        assert (nothing.item(), none.item()) == (0.0, 0)

    @pytest.mark.parametrize(
        ("shapes", "options", "message"),
        [
            (((2, 5), (2, 6), (2, 6)), {}, "k at most the student's classes"),
            (((2, 5), (3, 2), (3, 2)), {}, r"got \(3, 2\)"),
            (((2, 5), (2, 2), (2, 3)), {}, "topk_log_probs must have the shape of topk_indices"),
            (((2, 5), (2, 2), (2, 2)), {"tail_mass": torch.zeros(3)}, r"tail_mass must have the shape \(2,\)"),
            (((2, 5), (2, 2), (2, 2)), {"temperature": NAN}, "temperature must be finite"),
            (((2, 5), (2, 2), (2, 2)), {"divergence": "jds"}, "did you mean 'jsd'"),
            (((2, 5), (2, 2), (2, 2)), {"mask": torch.ones(2)}, "mask must be bool"),
        ],
    )
    def test_refusals(self, shapes, options, message):
        with pytest.raises(ConfigError, match=message):
            kd_topk(
                torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64), torch.zeros(shapes[2]), **options
            )

    def test_dtypes_are_checked(self):
        with pytest.raises(ConfigError, match="topk_indices must be integers"):
            kd_topk(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 2))
        with pytest.raises(ConfigError, match="topk_log_probs must be floating point"):
            kd_topk(torch.zeros(2, 3), torch.zeros(2, 2).long(), torch.zeros(2, 2).long())


class TestRefusals:
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
    def test_shapes(self, name, student, teacher, options, message):
        with pytest.raises(ConfigError, match=message):
            of(name)(torch.zeros(student), torch.zeros(teacher), **options)

    @pytest.mark.parametrize("name", [*SOFT, "bernoulli_kl"])
    @pytest.mark.parametrize("temperature", [0, -1.0, INF, NAN, True])
    def test_temperatures(self, name, temperature):
        with pytest.raises(ConfigError, match="temperature must be finite and above 0"):
            of(name)(torch.zeros(2, 3), torch.zeros(2, 3), temperature=temperature)

    @pytest.mark.parametrize("name", [*SOFT, "bernoulli_kl", "hard_label"])
    def test_one_teacher(self, name):
        logits = torch.zeros(2, 3)
        with pytest.raises(ConfigError, match="must be given, got neither"):
            of(name)(logits)
        with pytest.raises(ConfigError, match="must be given, got both"):
            of(name)(logits, logits, teacher_log_probs=logits)

    @pytest.mark.parametrize("name", ["logit_mse", "huber"])
    def test_outputs_have_no_log_probabilities(self, name):
        with pytest.raises(ConfigError, match="teacher_logits must be given, got teacher_log_probs"):
            of(name)(torch.zeros(2, 3), teacher_log_probs=torch.zeros(2, 3))
        with pytest.raises(ConfigError, match="must be given, got None"):
            of(name)(torch.zeros(2, 3))

    def test_integers(self):
        with pytest.raises(ConfigError, match=r"reverse_kl: student_logits must be floating point, got torch\.int64"):
            reverse_kl_sum(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))

    @pytest.mark.parametrize("beta", [-0.1, 1.1, NAN, True])
    def test_beta(self, beta):
        with pytest.raises(ConfigError, match=r"jsd: beta must be in \[0, 1\]"):
            jsd_sum(torch.zeros(2, 3), torch.zeros(2, 3), beta=beta)

    @pytest.mark.parametrize("threshold", [-0.1, 1.1, NAN])
    def test_threshold(self, threshold):
        with pytest.raises(ConfigError, match=r"threshold must be in \[0, 1\]"):
            hard_label_loss(torch.zeros(2, 3), torch.zeros(2, 3), threshold=threshold)

    @pytest.mark.parametrize("delta", [0, -1.0, INF, NAN])
    def test_delta(self, delta):
        with pytest.raises(ConfigError, match="delta must be finite and above 0"):
            huber_sum(torch.zeros(2, 3), torch.zeros(2, 3), delta=delta)

    def test_bound(self):
        zeros = torch.zeros(2, 3)
        with pytest.raises(ConfigError, match="targets must be given, got None"):
            teacher_bounded_mse_sum(zeros, zeros)
        with pytest.raises(ConfigError, match=r"targets must have the shape .*, got \(2,\)"):
            teacher_bounded_mse(zeros, zeros, torch.zeros(2))
        with pytest.raises(ConfigError, match="margin must be finite and at least 0"):
            teacher_bounded_mse(zeros, zeros, zeros, margin=NAN)
