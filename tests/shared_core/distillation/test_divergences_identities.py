"""Divergences against TRL, torch and each other, and what each promises beyond its formula.

Of a teacher's k best classes, and of the mean of several teachers, too.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from divergence_references import INF, NAN, SOFT, kl, mean, of, reference, soft
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.distillation.losses.divergences import (
    DIVERGENCES,
    jsd,
    kd_loss,
    kd_topk_sum,
    mean_logits,
    mean_teacher,
    reverse_kl,
)
from shared_core.distillation.losses.regression import bernoulli_kl_sum, hard_label_sum
from shared_core.distillation.losses.softened_pair import mean_of


class TestAgainstOthers:
    @pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
    @pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
    def test_the_loss_and_its_gradient_equal_those_of_trl(self, beta, temperature):
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
    def test_losses_equal_those_of_torch(self, temperature):
        student, teacher = torch.randn(9, 5), torch.randn(9, 5)
        s, t = F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
        square = temperature**2
        kls = [square * F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((s, t), (t, s))]
        torch.testing.assert_close(kd_loss(student, teacher, temperature=temperature), kls[0])
        torch.testing.assert_close(reverse_kl(student, teacher, temperature=temperature), kls[1])
        entropy = square * F.cross_entropy(student / temperature, t.exp())
        torch.testing.assert_close(mean("soft_cross_entropy", student, teacher, temperature=temperature), entropy)
        torch.testing.assert_close(mean("logit_mse", student, teacher), F.mse_loss(student, teacher))
        torch.testing.assert_close(
            mean("huber", student, teacher, delta=0.3), F.huber_loss(student, teacher, delta=0.3)
        )
        torch.testing.assert_close(mean("hard_label", student, teacher), F.cross_entropy(student, teacher.argmax(-1)))

    def test_bernoulli_is_binary_cross_entropy_less_the_teachers_entropy(self):
        student, teacher = torch.randn(6, 4).double(), torch.randn(6, 4).double()
        target = teacher.sigmoid()
        expected = F.binary_cross_entropy_with_logits(student, target) - F.binary_cross_entropy(target, target)
        found = mean("bernoulli_kl", student, teacher, temperature=1.0, average_labels=True)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("temperature", [0.5, 2.0, 20.0])
    def test_bernoulli_of_one_logit_is_the_kl_of_two_classes(self, temperature):
        student, teacher = torch.randn(6, 1), torch.randn(6, 1)
        classes = [torch.cat([logit, torch.zeros_like(logit)], -1) for logit in (student, teacher)]
        torch.testing.assert_close(
            mean("bernoulli_kl", student, teacher, temperature=temperature), kd_loss(*classes, temperature=temperature)
        )


class TestProperties:
    @given(
        st.integers(1, 5), st.integers(2, 9), st.floats(0.05, 100), st.floats(1e-3, 1 - 1e-3), st.integers(0, 2**31 - 1)
    )
    @settings(max_examples=60, deadline=None)
    def test_jsd(self, rows, classes, temperature, beta, seed):
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(rows, classes, generator=generator, dtype=torch.float64) for _ in range(2))
        of_beta = partial(jsd, temperature=temperature)
        slack = 1e-10 * temperature**2
        value = of_beta(a, b, beta=beta).item()
        assert value >= -slack
        assert of_beta(a, a, beta=beta).item() == pytest.approx(0, abs=slack)
        # the roles of the sides are swapped by 1 - beta
        assert of_beta(b, a, beta=1 - beta).item() == pytest.approx(value, rel=1e-6, abs=slack)
        assert of_beta(a, b, beta=0.5).item() <= temperature**2 * math.log(2) + slack
        assert of_beta(a + 3, b - 5, beta=beta).item() == pytest.approx(value, rel=1e-6, abs=slack)

    def test_jsd_over_beta_goes_to_the_kls_and_itself_to_zero(self):
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
        student, teacher = torch.randn(5, 6).double(), torch.randn(5, 6).double()
        with_it, without = (
            of(name)(student, teacher, temperature=3.0, scale_by_temperature=each)[0] for each in (True, False)
        )
        assert with_it.item() == pytest.approx(9 * without.item())

    def test_soft_cross_entropy_has_the_gradient_of_the_kl(self):
        student, teacher = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
        found = [
            torch.autograd.grad(loss(student, teacher), student)[0]
            for loss in (partial(mean, "soft_cross_entropy"), kd_loss)
        ]
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
        loss = mean("hard_label", student, torch.zeros(3, 2), threshold=0.51)
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
        loss = mean("bernoulli_kl", student, torch.tensor([[INF, -INF, 0.0]], dtype=dtype))
        loss.backward()
        assert loss.item() == pytest.approx(mean("bernoulli_kl", torch.ones(1, 1), torch.zeros(1, 1)).item(), rel=1e-6)
        assert torch.isfinite(student.grad).all()

    def test_averaging_labels_divides_by_their_number(self):
        student, teacher = torch.randn(5, 4), torch.randn(5, 4)
        summed, _ = bernoulli_kl_sum(student, teacher)
        averaged, _ = bernoulli_kl_sum(student, teacher, average_labels=True)
        assert summed.item() == pytest.approx(4 * averaged.item(), rel=1e-6)

    def test_the_bound_of_chen(self):
        student, teacher = torch.tensor([[2.0], [1.0], [1.0]], requires_grad=True), torch.tensor([[1.0], [2.0], [1.1]])
        # errors 4, 1, 1 against the teacher's 1, 4, 1.21
        loss = mean("teacher_bounded_mse", student, teacher, targets=torch.zeros(3, 1))
        loss.backward()
        assert loss.item() == pytest.approx(4 / 3)
        assert student.grad.flatten().tolist() == pytest.approx([4 / 3, 0, 0])
        assert mean(
            "teacher_bounded_mse", student, teacher, targets=torch.zeros(3, 1), margin=0.5
        ).item() == pytest.approx(5 / 3)
        assert (
            mean("teacher_bounded_mse", student, teacher, targets=torch.zeros(3, 1, dtype=torch.int64)).item()
            == loss.item()
        )

    def test_a_teacher_of_log_probabilities(self):
        student, teacher = torch.randn(5, 4).double(), torch.randn(5, 4).double() * 5
        torch.testing.assert_close(
            mean("bernoulli_kl", student, teacher_log_probs=F.logsigmoid(teacher / 2), temperature=2.0),
            mean("bernoulli_kl", student, teacher, temperature=2.0),
        )


def kd_topk(*args, **options):
    return mean_of(*kd_topk_sum(*args, **options))


class TestTopK:
    @staticmethod
    def cache(teacher, k, temperature):
        log_probs, indices = torch.log_softmax(teacher / temperature, -1).topk(k)
        return indices, log_probs

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    @pytest.mark.parametrize("k", [1, 4, 11, 12])
    def test_the_tail_is_one_more_class(self, dtype, temperature, k):
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

    def test_the_tail_is_not_renormalized_away(self):
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
        student, teacher = torch.randn(6, 40), torch.randn(6, 40) * 3
        indices, log_probs = self.cache(teacher, 8, 2.0)
        tail = 1 - log_probs.exp().sum(-1)
        exact = kd_topk(student, indices, log_probs)
        halved = kd_topk(student.bfloat16(), indices.int(), log_probs.half(), tail_mass=tail)
        assert halved.item() == pytest.approx(exact.item(), rel=2e-2)

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


class TestSeveralTeachers:
    @pytest.mark.parametrize("name", SOFT)
    @pytest.mark.parametrize("temperature", [1.0, 2.0, 20.0])
    def test_probabilities_are_averaged(self, name, temperature):
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
        teachers = [torch.randn(4, 6), torch.randn(4, 6)]
        torch.testing.assert_close(
            mean_teacher(teachers, [3, 1], 2.0, "logits"),
            torch.log_softmax((0.75 * teachers[0] + 0.25 * teachers[1]) / 2, -1),
        )
        torch.testing.assert_close(mean_logits(teachers), (teachers[0] + teachers[1]) / 2)

    def test_labels_of_their_own(self):
        teachers = [torch.randn(4, 6), torch.randn(4, 6)]
        torch.testing.assert_close(
            mean_teacher(teachers, temperature=2.0, multi_label=True).exp(),
            (torch.sigmoid(teachers[0] / 2) + torch.sigmoid(teachers[1] / 2)) / 2,
        )

    def test_one_teacher_is_itself(self):
        student, teacher = torch.randn(4, 6), torch.randn(4, 6)
        found = mean("forward_kl", student, teacher_log_probs=mean_teacher([teacher]))
        torch.testing.assert_close(found, kd_loss(student, teacher))

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
