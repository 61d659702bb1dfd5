"""Divergences against TRL, torch and each other, and what each promises beyond its formula."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from divergence_references import INF, SOFT, mean, of
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.distillation.losses.divergences import (
    DIVERGENCES,
    divergence,
    jsd,
    kd_loss,
    kd_sum,
    reverse_kl,
)
from shared_core.distillation.losses.regression import bernoulli_kl_sum, hard_label_sum


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
        torch.testing.assert_close(divergence("forward_kl", student, teacher, temperature=temperature), kls[0])
        torch.testing.assert_close(reverse_kl(student, teacher, temperature=temperature), kls[1])
        entropy = square * F.cross_entropy(student / temperature, t.exp())
        torch.testing.assert_close(mean("soft_cross_entropy", student, teacher, temperature=temperature), entropy)
        torch.testing.assert_close(mean("logit_mse", student, teacher), F.mse_loss(student, teacher))
        torch.testing.assert_close(
            mean("huber", student, teacher, delta=0.3), F.huber_loss(student, teacher, delta=0.3)
        )
        torch.testing.assert_close(mean("hard_label", student, teacher), F.cross_entropy(student, teacher.argmax(-1)))

    def test_bernoulli_is_binary_cross_entropy_less_the_teachers_entropy(self):
        torch.manual_seed(0)
        student, teacher = torch.randn(6, 4).double(), torch.randn(6, 4).double()
        target = teacher.sigmoid()
        expected = F.binary_cross_entropy_with_logits(student, target) - F.binary_cross_entropy(target, target)
        found = mean("bernoulli_kl", student, teacher, temperature=1.0, average_labels=True)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("temperature", [0.5, 2.0, 20.0])
    def test_bernoulli_of_one_logit_is_the_kl_of_two_classes(self, temperature):
        torch.manual_seed(0)
        student, teacher = torch.randn(6, 1), torch.randn(6, 1)
        classes = [torch.cat([logit, torch.zeros_like(logit)], -1) for logit in (student, teacher)]
        torch.testing.assert_close(
            mean("bernoulli_kl", student, teacher, temperature=temperature), kd_loss(*classes, temperature=temperature)
        )

    @pytest.mark.parametrize("temperature", [0.001, 1.0, 2.0, 50.0])
    def test_forward_kl_is_kd_sum(self, temperature):
        torch.manual_seed(0)
        student, teacher, mask = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6) > 0.4
        options = {"temperature": temperature, "mask": mask}
        assert divergence("forward_kl", student, teacher, reduction="sum", **options) == kd_sum(
            student, teacher, **options
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
        torch.manual_seed(0)
        student, teacher = torch.randn(5, 4).double(), torch.randn(5, 4).double() * 5
        torch.testing.assert_close(
            mean("bernoulli_kl", student, teacher_log_probs=F.logsigmoid(teacher / 2), temperature=2.0),
            mean("bernoulli_kl", student, teacher, temperature=2.0),
        )
