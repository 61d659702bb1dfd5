"""What the divergences refuse."""

import pytest
import torch
from divergence_references import INF, NAN, SOFT, of

from shared_core.distillation.losses.divergences import DIVERGENCES, jsd, reverse_kl
from shared_core.distillation.losses.regression import hard_label_sum, huber_sum, teacher_bounded_mse_sum
from shared_core.errors import ConfigError


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
            reverse_kl(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))

    @pytest.mark.parametrize("beta", [-0.1, 1.1, NAN, True])
    def test_beta(self, beta):
        with pytest.raises(ConfigError, match=r"jsd: beta must be in \[0, 1\]"):
            jsd(torch.zeros(2, 3), torch.zeros(2, 3), beta=beta)

    @pytest.mark.parametrize("threshold", [-0.1, 1.1, NAN])
    def test_threshold(self, threshold):
        with pytest.raises(ConfigError, match=r"threshold must be in \[0, 1\]"):
            hard_label_sum(torch.zeros(2, 3), torch.zeros(2, 3), threshold=threshold)

    @pytest.mark.parametrize("delta", [0, -1.0, INF, NAN])
    def test_delta(self, delta):
        with pytest.raises(ConfigError, match="delta must be finite and above 0"):
            huber_sum(torch.zeros(2, 3), torch.zeros(2, 3), delta=delta)

    def test_bound(self):
        zeros = torch.zeros(2, 3)
        with pytest.raises(ConfigError, match="targets must be given, got None"):
            teacher_bounded_mse_sum(zeros, zeros)
        with pytest.raises(ConfigError, match=r"targets must have the shape .*, got \(2,\)"):
            teacher_bounded_mse_sum(zeros, zeros, targets=torch.zeros(2))
        with pytest.raises(ConfigError, match="margin must be finite and at least 0"):
            teacher_bounded_mse_sum(zeros, zeros, targets=zeros, margin=NAN)
