"""kd_loss against a float64 reference written from Hinton et al. (2015), its gradient, and its edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.distillation import DistillConfig, kd_loss, kd_sum
from shared_core.errors import ConfigError

INF, NAN = float("inf"), float("nan")


def soft(logits, temperature):
    """Equation 1 of the paper."""
    z = logits / temperature
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(student, teacher, temperature, mask=None):
    student, teacher = student.double().numpy(), teacher.double().numpy()
    p, q = soft(teacher, temperature), soft(student, temperature)
    # section 2: cross-entropy with soft targets times T², less the teacher's entropy, which is constant
    rows = temperature**2 * (p * (np.log(p) - np.log(q))).sum(-1)
    return rows.mean() if mask is None else rows[mask.numpy()].mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5,), (7, 3), (2, 41, 401)])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 2.0, 10.0, 37.5, 100.0, 1000.0])
def test_value_and_gradient(dtype, shape, temperature):
    torch.manual_seed(0)
    student = (torch.randn(shape) * 3).to(dtype).requires_grad_()
    teacher = (torch.randn(shape) * 3).to(dtype)
    loss = kd_loss(student, teacher, temperature=temperature)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = reference(student.detach(), teacher, temperature)
    assert loss.item() == pytest.approx(
        expected, rel=1e-15 * max(1e3, temperature**2) if dtype == torch.float64 else 3e-6
    )
    loss.backward()
    rows = math.prod(shape[:-1])
    s, t = soft(student.detach().double().numpy(), temperature), soft(teacher.double().numpy(), temperature)
    closed_form = torch.from_numpy(temperature * (s - t) / rows)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    scale = closed_form.abs().max().item()
    torch.testing.assert_close(student.grad.double(), closed_form, rtol=0, atol=tolerance * scale + 1e-7)


def test_mixed_dtypes():
    student, teacher = torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)
    expected = reference(student, teacher.float(), 2.0)
    assert kd_loss(student, teacher).item() == pytest.approx(expected, rel=1e-5)
    assert kd_loss(student.half(), teacher.bfloat16()).dtype == torch.float32


def test_mask_averages_over_rows_that_are_true():
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    mask = torch.rand(3, 5) > 0.5
    assert kd_loss(student, teacher, mask=mask).item() == pytest.approx(reference(student, teacher, 2.0, mask), 1e-5)
    total, count = kd_sum(student, teacher, mask=mask)
    assert count.item() == mask.sum().item()
    assert (total / count).item() == pytest.approx(reference(student, teacher, 2.0, mask), 1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_nothing_counts(shape):
    student = torch.randn(shape, requires_grad=True)
    loss = kd_loss(student, torch.randn(shape), mask=torch.zeros(shape[0], dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(student.grad, torch.zeros(shape))
    assert kd_sum(student, torch.randn(shape), mask=torch.zeros(shape[0], dtype=torch.bool))[1].item() == 0


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
def test_properties(rows, classes, temperature, shift, seed):
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


def test_high_temperature_becomes_mean_squared_difference_of_centred_logits():
    # Hinton et al., section 2.1: for high T the gradient is (z_i - v_i) / N of zero-mean logits
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 10), torch.randn(6, 10)
    centred = (student - student.mean(-1, keepdim=True)) - (teacher - teacher.mean(-1, keepdim=True))
    expected = centred.pow(2).mean(-1).mean() / 2
    torch.testing.assert_close(kd_loss(student, teacher, temperature=1e4), expected, rtol=1e-3, atol=0)


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"teacher": ""}, "teacher must be a folder, a Hub name, a module, or several of them, got ''"),
            ({"teacher": None}, "teacher must be"),
            ({"teacher": 3}, "teacher must be"),
            ({"teacher": torch.nn.Linear}, "teacher must be"),
            ({"temperature": 0.0}, "temperature must be in"),
            ({"temperature": NAN}, "temperature must be a finite number"),
            ({"alpha": 1.5}, "alpha must be in"),
            ({"alpha": -0.1}, "alpha must be in"),
            ({"begin": -1}, "begin must be a step"),
            ({"end": 1.2}, "end must be a step"),
            ({"causal": "maybe"}, "causal must be true or false"),
            ({"temprature": 2.0}, "did you mean 'temperature'"),
        ],
    )
    def test_refusals(self, options, message):
        with pytest.raises(ConfigError, match=message):
            DistillConfig.from_dict({"teacher": "t", **options})

    def test_the_teacher_is_the_switch(self):
        with pytest.raises(ConfigError, match=r"distill\.teacher must be given"):
            DistillConfig.from_dict({"alpha": 0.3})

    def test_values(self, tmp_path):
        config = DistillConfig.from_dict({"teacher": tmp_path, "causal": "true", "end": "2ep", "student": "none"})
        assert (config.teacher, config.causal, config.student) == (str(tmp_path), True, None)
        assert DistillConfig.from_dict(config.to_dict()) == config
        assert DistillConfig(teacher=torch.nn.Linear(1, 1)).to_dict()["teacher"] == "<Linear>"
