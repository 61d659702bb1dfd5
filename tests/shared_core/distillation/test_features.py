"""Losses of hidden states and attention maps against formulas of the papers, and the projection between widths."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core.distillation.feature_pairs import AttentionPairs
from shared_core.distillation.losses.features import (
    attention_kl,
    hidden_cosine,
    hidden_cosine_sum,
    hidden_mse,
    unit_rows,
)
from shared_core.errors import ConfigError

NAN, INF = float("nan"), float("inf")
HIDDEN = {"mse": hidden_mse, "cosine": hidden_cosine}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def reference(name, student, teacher):
    s, t = student.double().numpy(), teacher.double().numpy()
    if name == "mse":
        return ((s - t) ** 2).mean(-1)
    return 1 - (s * t).sum(-1) / np.sqrt((s**2).sum(-1) * (t**2).sum(-1))


def maps(*shape, dtype=torch.float32, seed=0):
    return torch.softmax(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double() * 2, -1).to(dtype)


class TestHidden:
    @pytest.mark.parametrize("name", HIDDEN)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 33)])
    def test_value_is_the_papers(self, name, dtype, shape):
        student, teacher = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        loss = HIDDEN[name](student, teacher)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert loss.mean().item() == pytest.approx(reference(name, student, teacher).mean(), rel=3e-6)
        assert loss.shape == shape[:-1]

    @pytest.mark.parametrize("name", HIDDEN)
    def test_gradient_is_that_of_finite_differences(self, name):
        student, teacher = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 5).double()
        assert torch.autograd.gradcheck(lambda hidden: HIDDEN[name](hidden, teacher), student)

    def test_equal_to_torch(self):
        student, teacher = torch.randn(6, 5), torch.randn(6, 5)
        torch.testing.assert_close(hidden_mse(student, teacher).mean(), F.mse_loss(student, teacher))
        expected = F.cosine_embedding_loss(student, teacher, torch.ones(6))
        torch.testing.assert_close(hidden_cosine(student, teacher).mean(), expected)

    @pytest.mark.parametrize("garbage", [NAN, INF])
    def test_padding_may_hold_anything(self, garbage):
        student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        mask = torch.tensor([[True, True, False], [True, False, False]])
        expected = reference("cosine", student, teacher)[mask.numpy()]
        student[~mask], teacher[~mask] = garbage, garbage
        student.requires_grad_()
        total, count = hidden_cosine_sum(student, teacher, mask=mask)
        total.backward()
        assert count.item() == 3
        assert total.item() == pytest.approx(expected.sum(), rel=1e-5)
        assert torch.equal(student.grad[~mask], torch.zeros(3, 4))
        assert torch.isfinite(student.grad).all()

    @pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
    def test_a_mask_of_nothing_gives_zero_without_gradient(self, shape):
        student = torch.randn(shape, requires_grad=True)
        loss, count = hidden_cosine_sum(student, torch.randn(shape), mask=torch.zeros(shape[0], dtype=torch.bool))
        loss.backward()
        assert (loss.item(), count.item()) == (0.0, 0)
        assert torch.equal(student.grad, torch.zeros(shape))

    def test_the_cosine_of_zeros_is_0_without_gradient(self):
        student = torch.tensor([[0.0, 0.0], [1.0, 0.0]], requires_grad=True)
        loss = hidden_cosine(student, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        loss.sum().backward()
        assert loss.tolist() == [1.0, 1.0]
        assert torch.equal(student.grad, torch.zeros(2, 2))

    @pytest.mark.parametrize("size", [1e-30, 1e30])
    def test_the_cosine_does_not_depend_on_size(self, size):
        student, teacher = torch.randn(3, 4), torch.randn(3, 4)
        scaled = (student * size).requires_grad_()
        loss = hidden_cosine(scaled, teacher)
        loss.sum().backward()
        torch.testing.assert_close(loss, hidden_cosine(student, teacher))
        assert torch.isfinite(scaled.grad).all()

    @pytest.mark.parametrize("name", HIDDEN)
    def test_large_half_precision_states(self, name):
        student = torch.tensor([[6e4, -6e4]], dtype=torch.float16, requires_grad=True)
        loss = HIDDEN[name](student, -student.detach())
        loss.backward()
        assert loss.item() == pytest.approx((2 * 60000.0) ** 2 if name == "mse" else 2.0, rel=1e-3)

    @pytest.mark.parametrize("name", HIDDEN)
    def test_autocast_changes_nothing(self, name):
        student, teacher = torch.randn(4, 50), torch.randn(4, 50)
        with torch.autocast("cpu", torch.bfloat16):
            loss = HIDDEN[name](student, teacher)
        assert torch.equal(loss, HIDDEN[name](student, teacher))

    def test_refusals(self):
        loss, zeros = hidden_cosine_sum, torch.zeros(2, 3)
        with pytest.raises(ConfigError, match=r"teacher_hidden must be given .*\(2, 3\), got \(3, 3\)"):
            loss(zeros, torch.zeros(3, 3))
        with pytest.raises(ConfigError, match="student_hidden must be floating point"):
            loss(zeros.long(), zeros)
        with pytest.raises(ConfigError, match=r"mask must be bool of shape \(2,\)"):
            loss(zeros, zeros, mask=torch.ones(2))

    def test_unit_rows_of_nothing(self):
        assert unit_rows(torch.zeros(0, 3)).shape == (0, 3)


class TestAttention:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_value_is_minilms(self, dtype):
        student, teacher = maps(2, 3, 5, 7, dtype=dtype), maps(2, 3, 5, 7, dtype=dtype, seed=1)
        s, t = student.double().numpy(), teacher.double().numpy()
        floor = 2.0**-14 if dtype == torch.float16 else 1e-8
        # summed over keys, averaged over heads and positions
        expected = (t * (np.log(np.maximum(t, floor)) - np.log(np.maximum(s, floor)))).sum(-1)
        np.testing.assert_allclose(attention_kl(student, teacher).numpy(), expected.mean(1), rtol=1e-5, atol=1e-6)

    def test_gradient_is_that_of_finite_differences(self):
        student, teacher = maps(1, 2, 3, 4, dtype=torch.float64).requires_grad_(), maps(1, 2, 3, 4, seed=1).double()
        for average in (False, True):
            assert torch.autograd.gradcheck(
                lambda each, average=average: attention_kl(each, teacher, average_heads=average), student
            )

    def test_equal_maps_have_none(self):
        student = maps(1, 2, 3, 4)
        student[..., 0, :] = torch.tensor([1.0, 0.0, 0.0, 0.0])
        assert not attention_kl(student, student).any()

    def test_hidden_keys_add_nothing(self):
        student, teacher = maps(1, 2, 3, 4), maps(1, 2, 3, 4, seed=1)
        padded = F.pad(student, (0, 2)).requires_grad_()
        loss = attention_kl(padded, F.pad(teacher, (0, 2)))
        loss.sum().backward()
        torch.testing.assert_close(loss, attention_kl(student, teacher))
        assert torch.equal(padded.grad[..., 4:], torch.zeros(1, 2, 3, 2))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_probability_rounded_to_zero_stays_finite(self, dtype):
        scores = torch.tensor([[[[0.0, -200.0]]]], dtype=dtype, requires_grad=True)
        loss = attention_kl(torch.softmax(scores, -1), torch.tensor([[[[0.5, 0.5]]]], dtype=dtype))
        loss.backward()
        assert torch.isfinite(loss)
        assert loss > 2
        assert torch.isfinite(scores.grad).all()

    def test_other_numbers_of_heads_are_refused_or_averaged(self):
        student, teacher = maps(2, 2, 3, 4), maps(2, 6, 3, 4, seed=1)
        with pytest.raises(ConfigError, match=r"the student's 2 heads, got 6; set average_heads"):
            attention_kl(student, teacher)
        s, t = student.mean(1).double().numpy(), teacher.mean(1).double().numpy()
        expected = (t * np.log(t / s)).sum(-1).mean()
        assert attention_kl(student, teacher, average_heads=True).mean().item() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize(
        ("student", "teacher", "message"),
        [
            (torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 5), r"got \(2, 2, 3, 5\)"),
            (torch.ones(2, 3, 4), torch.ones(2, 3, 4), r"\(B, H, Q, K\)"),
            (torch.ones(2, 2, 3, 4).long(), torch.ones(2, 2, 3, 4), "student_attentions must be floating point"),
        ],
    )
    def test_refusals(self, student, teacher, message):
        with pytest.raises(ConfigError, match=message):
            attention_kl(student, teacher)

    def test_pairs_of_maps_over_other_keys_are_refused(self):
        student, teacher = (nn.Sequential(nn.Softmax(-1)) for _ in range(2))
        pairs = AttentionPairs(student, teacher, [("0", "0")])
        pairs.activate(True)
        student(torch.ones(2, 2, 3, 4)), teacher(torch.ones(2, 2, 3, 5))
        with pytest.raises(ConfigError, match=r"must have the batch, queries and keys .* got \(2, 2, 3, 5\)"):
            pairs.loss(None, {}, torch.div)
