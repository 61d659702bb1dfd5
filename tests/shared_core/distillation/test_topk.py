"""Divergences from a teacher's k best classes against the whole ones, and their refusals."""

import itertools
import math

import numpy as np
import pytest
import torch
from divergence_references import INF, NAN, SOFT, kl, mean, soft

from shared_core.distillation.losses.divergences import kd_loss, kd_topk_sum
from shared_core.distillation.losses.softened_pair import mean_of
from shared_core.errors import ConfigError


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
