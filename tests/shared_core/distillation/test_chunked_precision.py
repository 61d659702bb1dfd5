"""Chunked distillation in few bits and at the edges: 16 bits, loss scales, autocast, infinite and missing rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from chunked_distillation_runs import chunked, leaves, problem, whole

from shared_core.distillation.chunked_loss import chunked_kd_loss, chunked_kd_sum
from shared_core.distillation.losses.divergences import kd_loss

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_within_its_rounding(dtype):
    student, teacher = problem((64,), 211, (32, 48), torch.float32)
    student, teacher = ((h, w / 5, None) for h, w, _ in (student, teacher))
    labels = torch.randint(211, (64,), generator=torch.Generator().manual_seed(1))
    options = {"labels": labels, "alpha": 0.5}
    ours = leaves(value if value is None else value.to(dtype) for value in student)
    theirs = leaves(value if value is None else value.detach().double() for value in ours)
    rounded = [tuple(None if v is None else v.to(kind) for v in teacher) for kind in (dtype, torch.float64)]
    rounded[1] = tuple(None if v is None else v.double() for v in rounded[0])
    loss = chunked(ours, rounded[0], chunk_rows=16, **options)
    expected = whole(theirs, rounded[1], **options)
    assert loss.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    assert loss.item() == pytest.approx(expected.item(), rel=2 * eps)
    loss.backward()
    expected.backward()
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert a.grad.dtype == dtype
        assert (a.grad.double() - b.grad).norm() < 4 * eps * b.grad.norm()


def test_float16_keeps_gradients_of_its_smallest_numbers_size():
    # in each row the student gives 999 classes 1.1e-7, two of float16's smallest numbers, and the teacher gives them 0
    hidden = torch.ones(400, 2).half()
    weight, teacher = torch.zeros(1000, 2).half(), torch.zeros(1000, 2).half()
    weight[0], teacher[0] = 8.0, 20.0
    weight.requires_grad_()
    chunked_kd_sum(hidden, weight, hidden, teacher, temperature=1.0).total.backward()
    expected = torch.full((999,), 400 / (999 + math.exp(16)))
    torch.testing.assert_close(weight.grad[1:, 0].float(), expected, rtol=4e-3, atol=0)


@pytest.mark.parametrize("keep", [False, True])
def test_a_loss_scale_beyond_float16_does_not_overflow(keep):
    student, _ = problem((4,), 11, (3, 3))
    student = tuple(None if value is None else value.half() for value in student)
    teacher = (student[0], (1.01 * student[1]).half(), None)
    ours = leaves(student)
    theirs = leaves(value if value is None else value.double() for value in student)
    scale = 2.0**17
    chunked(ours, teacher).backward(torch.tensor(scale), retain_graph=keep)
    whole(theirs, [value if value is None else value.double() for value in teacher]).backward(
        torch.tensor(scale).double()
    )
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert (a.grad.double() - b.grad).norm() < 0.2 * b.grad.norm()  # logits of 1 % difference, rounded to 0.1 %


def test_autocast_multiplies_in_its_type_and_returns_gradients_in_the_weights():
    student, teacher = problem((40,), 97, (16, 24), torch.float32, bias=True)
    ours, theirs = leaves(student), leaves(student)
    labels = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked(ours, teacher, labels=labels, alpha=0.5, chunk_rows=16)
        logits = F.linear(*theirs)
        assert logits.dtype == torch.bfloat16
        soft = kd_loss(logits, F.linear(*teacher))
        expected = 0.5 * F.cross_entropy(logits.float(), labels) + 0.5 * soft
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 2**-6 * b.grad.norm()


@pytest.mark.parametrize("garbage", [NAN, INF])
def test_rows_that_do_not_count_are_never_read(garbage):
    student, teacher = problem((2, 6), dtype=torch.float32)
    labels = torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(1))
    labels[1, 2:] = -100
    expected = chunked(student, teacher, labels=labels, alpha=0.5)
    student[0][1, 2:], teacher[0][1, 2:] = garbage, garbage
    ours = leaves(student)
    loss = chunked(ours, teacher, labels=labels, alpha=0.5)
    assert torch.equal(loss, expected)
    loss.backward()
    assert torch.equal(ours[0].grad[1, 2:], torch.zeros(4, 5))
    assert ours[1].grad.isfinite().all()


def test_nothing_counts():
    student, teacher = problem(bias=True)
    for options in ({"labels": torch.full((3, 7), -100), "alpha": 0.5}, {"mask": torch.zeros(3, 7, dtype=torch.bool)}):
        ours = leaves(student)
        loss = chunked(ours, teacher, **options)
        loss.backward()
        assert loss.item() == 0.0
        assert all(torch.equal(value.grad, torch.zeros_like(value)) for value in ours)
    empty = chunked((student[0][:0], *student[1:]), (teacher[0][:0], *teacher[1:]))
    assert empty.item() == 0.0


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_classes_that_both_heads_rule_out_change_nothing(kind):
    student, teacher = problem(dtype=torch.float32, bias=True)
    expected = chunked(student, teacher, divergence=kind)
    wide = [(h, torch.cat([w, w[:2]]), torch.cat([b, torch.full((2,), -INF)])) for h, w, b in (student, teacher)]
    ours = leaves(wide[0])
    loss = chunked(ours, wide[1], divergence=kind)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert all(value.grad.isfinite().all() for value in ours)
    assert not ours[2].grad[29:].any()


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    loss = chunked_kd_loss(hidden, weight, -hidden, weight, labels=torch.tensor([1, 1]), alpha=0.5)
    loss.backward()
    # T² KL is T times the gap of 2e4, the cross-entropy that gap for one row of two
    assert loss.item() == pytest.approx(0.5 * 2 * 2e4 + 0.5 * 1e4, rel=1e-5)
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_nan_is_not_hidden():
    student, teacher = problem(dtype=torch.float32, bias=True)
    student[0][0, 0, 0] = NAN
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        assert math.isnan(chunked(student, teacher, divergence=kind).item())
