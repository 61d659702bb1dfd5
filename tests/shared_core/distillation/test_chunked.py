"""Chunked distillation against the same losses of whole logits in float64: values, gradients, refusals.

In few bits and at the edges, too: 16 bits, loss scales, autocast, infinite and missing rows.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from chunked_distillation_runs import assert_same_gradients, chunked, leaves, problem, whole
from torch import nn

from shared_core.distillation.chunked_loss import chunked_kd_loss, chunked_kd_sum
from shared_core.distillation.losses.divergences import kd_loss
from shared_core.errors import ConfigError

INF, NAN = float("inf"), float("nan")


def assert_same(loss, expected, ours, theirs):
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    loss.backward()
    expected.backward()
    assert_same_gradients(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 30.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_equal_to_whole_logits_in_float64(kind, temperature, bias, softcap, chunk_rows):
    student, teacher = problem(bias=bias)
    labels = torch.randint(29, (3, 7), generator=torch.Generator().manual_seed(1))
    labels[0, 2] = labels[2] = -100
    options = {"temperature": temperature, "labels": labels, "alpha": 0.3, "beta": 0.2, "softcap": softcap}
    ours, theirs = leaves(student), leaves(student)
    loss = chunked(ours, teacher, divergence=kind, chunk_rows=chunk_rows, **options)
    expected = whole(theirs, teacher, kind=kind, **options)
    assert_same(3 * loss, 3 * expected, ours, theirs)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_gradcheck(kind):
    (hidden, weight, bias), teacher = problem((5,), 6, (3, 4), bias=True)
    labels = torch.tensor([0, 5, -100, 2, 3])

    def loss(hidden, weight, bias):
        return chunked(
            (hidden, weight, bias), teacher, labels=labels, alpha=0.4, divergence=kind, softcap=2.0, chunk_rows=2
        )

    assert torch.autograd.gradcheck(loss, leaves((hidden, weight, bias)))


def test_mask_lets_unlabeled_rows_count_in_the_soft_term_alone():
    student, teacher = problem((6,))
    labels = torch.tensor([3, -100, 5, -100, 0, 1])
    mask = torch.tensor([True, True, True, False, True, False])
    ours, theirs = leaves(student), leaves(student)
    loss = chunked(ours, teacher, labels=labels, alpha=0.3, mask=mask)
    some = tuple(value[mask] if index == 0 else value for index, value in enumerate(theirs))
    soft = whole(some, (teacher[0][mask], *teacher[1:]))
    hard = F.cross_entropy((theirs[0] @ theirs[1].t())[mask], labels[mask])
    expected = 0.3 * hard + 0.7 * soft
    assert_same(loss, expected, ours, theirs)


def test_sums_of_parts_add_up_and_tell_what_they_hold():
    student, teacher = problem((8,))
    labels = torch.tensor([0, 1, -100, 3, 4, -100, 6, 7])
    sums = [
        chunked_kd_sum(
            student[0][part], student[1], teacher[0][part], teacher[1], labels=labels[part], alpha=0.25, temperature=3.0
        )
        for part in (slice(0, 8), slice(0, 3), slice(3, 8))
    ]
    for field in sums[0]._fields:
        one, first, second = (getattr(each, field) for each in sums)
        torch.testing.assert_close(one, first + second, rtol=1e-12, atol=0)
    total = sums[0]
    assert (total.rows.item(), total.labeled.item(), total.rows.dtype) == (6, 6, torch.int64)
    torch.testing.assert_close(total.total, 0.25 * total.hard + 0.75 * total.soft, rtol=1e-12, atol=0)
    expected = whole(student, teacher, labels=labels, alpha=0.25, temperature=3.0)
    torch.testing.assert_close(total.total / total.rows, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_of_jsd_are_the_kullback_leibler_divergences(beta):
    student, teacher = problem()
    other = "reverse_kl" if beta else "forward_kl"
    assert torch.equal(
        chunked(student, teacher, divergence="jsd", beta=beta), chunked(student, teacher, divergence=other)
    )


def test_padded_vocabularies_of_one_tokenizer():
    (hidden, weight, bias), teacher = problem(bias=True)
    pad = torch.full((3, 5), 9.0, dtype=torch.float64), torch.full((3,), 9.0, dtype=torch.float64)
    ours, theirs = (
        leaves((hidden, torch.cat([weight, pad[0]]), torch.cat([bias, pad[1]]))),
        leaves((hidden, weight, bias)),
    )
    loss = chunked(ours, teacher, vocab_size=29)
    expected = whole(theirs, teacher)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-11, atol=1e-13)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a.grad[:29], b.grad, rtol=1e-11, atol=1e-13)
        assert not a.grad[29:].any()


def test_layers_as_heads_and_only_wanted_gradients():
    student, teacher = problem(dtype=torch.float32, bias=True)
    ours, teacher_layer = nn.Linear(5, 29), nn.Linear(9, 29)
    ours.weight.requires_grad_(False)
    loss = chunked_kd_loss(student[0], ours, teacher[0], teacher_layer)
    expected = kd_loss(ours(student[0]), teacher_layer(teacher[0]))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    assert ours.weight.grad is None
    assert ours.bias.grad is not None
    assert teacher_layer.weight.grad is None
    ours.bias.requires_grad_(False)
    assert not chunked_kd_loss(student[0], ours, teacher[0], teacher_layer).requires_grad


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


HIDDEN, TEACHER = torch.zeros(2, 4), torch.zeros(2, 6)
WEIGHT, TEACHER_WEIGHT = torch.zeros(8, 4), torch.zeros(8, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be finite and above 0, got 0.0"),
        ({"temperature": NAN}, "temperature must be finite and above 0, got nan"),
        ({"alpha": 1.5}, r"alpha must be in \[0, 1\], got 1.5"),
        ({"alpha": 0.5}, "labels must be given with alpha above 0"),
        ({"divergence": "js"}, "divergence must be one of forward_kl, reverse_kl, jsd, got 'js'"),
        ({"divergence": "jsd", "beta": -0.1}, "beta must be in"),
        ({"softcap": 0.0}, "softcap must be finite and above 0, got 0.0"),
        ({"softcap": (None, NAN)}, "softcap must be finite and above 0, got nan"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, got 0"),
        ({"budget_mib": NAN}, "budget_mib must be finite and above 0, got nan"),
        ({"vocab_size": 9}, "vocab_size must be in 1 to 8, .* got 9"),
        ({"mask": torch.ones(2)}, r"mask must be bool of shape \(2,\)"),
        ({"labels": torch.zeros(2)}, r"labels must be integers of shape \(2,\), .* got torch.float32"),
        ({"labels": torch.tensor([0, 8])}, "labels must be in 0 to 7 or -100, got 0 to 8"),
        ({"labels": torch.tensor([-1, -100])}, "got -1 to -1"),
        ({"teacher_head": torch.zeros(9, 6)}, "teacher_head must have the student's 8 classes, got 9; .*vocab_size"),
        (
            {"teacher_hidden": torch.zeros(3, 6)},
            r"teacher_hidden must have the rows of student_hidden, \(2,\), got \(3,\)",
        ),
        ({"student_hidden": torch.zeros(2, 5)}, r"student_hidden must be floating point of shape \(\.\.\., 4\)"),
        ({"student_hidden": torch.zeros(2, 4).long()}, "student_hidden must be floating point"),
        ({"student_head": torch.zeros(8, 4).char()}, r"floating point weight \(classes, features\), got torch.int8"),
        ({"student_head": (torch.zeros(8, 4), torch.zeros(4))}, r"must have a bias \(8,\), got \(4,\)"),
        ({"student_head": Scaled(4, 8)}, "must be an nn.Linear with its own forward, got Scaled"),
        ({"teacher_head": nn.Identity()}, "must be an nn.Linear with its own forward, got Identity"),
        ({"student_head": torch.zeros(8, 4, device="meta")}, "must be on the device of its input, cpu, got meta"),
    ],
)
def test_refusals(changes, message):
    arguments = {
        "student_hidden": HIDDEN,
        "student_head": WEIGHT,
        "teacher_hidden": TEACHER,
        "teacher_head": TEACHER_WEIGHT,
        **changes,
    }
    with pytest.raises(ConfigError, match=message):
        chunked_kd_loss(**arguments)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_are_ligers(beta, temperature):
    liger = pytest.importorskip("liger_kernel.chunked_loss")  # brings Triton along: no test dependency
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16, requires_grad=True), torch.randn(101, 16, requires_grad=True)
    teacher = torch.randn(37, 24), torch.randn(101, 24)
    labels = torch.randint(101, (37,)).index_fill(0, torch.arange(0, 37, 5), -100)
    peer = liger.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.4, weight_soft_loss=0.6, beta=beta, temperature=temperature, compiled=False, chunk_size=8
    )
    wanted = peer(hidden, weight, *teacher, labels)
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    found = chunked_kd_loss(
        hidden, weight, *teacher, temperature=temperature, labels=labels, alpha=0.4, divergence="jsd", beta=beta,
        scale_by_temperature=False, chunk_rows=8,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), gradients, atol=1e-6, rtol=1e-5)


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


def test_labels_or_a_mask_of_nothing_give_zero():
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
