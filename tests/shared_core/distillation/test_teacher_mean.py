"""The mean of several teachers against its formula in float64, and its refusals."""

import numpy as np
import pytest
import torch
from divergence_references import INF, NAN, SOFT, mean, reference, soft

from shared_core.distillation.losses.divergences import divergence, mean_logits, mean_teacher
from shared_core.errors import ConfigError


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
        found = divergence("forward_kl", student, teacher_log_probs=mean_teacher([teacher]))
        torch.testing.assert_close(found, divergence("forward_kl", student, teacher))

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
