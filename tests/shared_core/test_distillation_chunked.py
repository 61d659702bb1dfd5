"""Chunked distillation against the same losses of whole logits in float64, its memory, and its edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from eff_kernels.distillation import kd_rows_torch_
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shared_core.distillation import chunked_autograd
from shared_core.distillation.chunked import chunked_kd_loss, chunked_kd_sum
from shared_core.distillation.losses import kd_loss
from shared_core.errors import ConfigError, TrainingError

INF, NAN = float("inf"), float("nan")


def problem(rows=(3, 7), classes=29, widths=(5, 9), dtype=torch.float64, bias=False, seed=0):
    """Hidden states, weights, biases of a student and of a teacher."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return tuple((values(*rows, width), values(classes, width), values(classes) if bias else None) for width in widths)


def whole(student, teacher, *, temperature=2.0, labels=None, alpha=0.0, kind="forward_kl", beta=0.5, softcap=None):
    """Hinton's loss with Agarwal's divergences (arXiv:2306.13649, equation 1), of all logits at once."""

    def logits(hidden, weight, bias):
        z = hidden @ weight.t() + (0 if bias is None else bias)
        return (z if softcap is None else softcap * torch.tanh(z / softcap)).flatten(0, -2)

    s, t = logits(*student), logits(*teacher).detach()
    counts = torch.ones(len(s), dtype=torch.bool) if labels is None else labels.flatten() != -100
    p, q = F.softmax(t[counts] / temperature, -1), F.softmax(s[counts] / temperature, -1)

    def kl(of, to):
        return (of * (of / to).log()).sum(-1).mean()

    m = beta * p + (1 - beta) * q
    soft = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]
    loss = (1 - alpha) * temperature**2 * soft
    return loss + alpha * F.cross_entropy(s, labels.flatten()) if alpha else loss


def leaves(side):
    return tuple(None if value is None else value.clone().requires_grad_() for value in side)


def chunked(student, teacher, **options):
    return chunked_kd_loss(student[0], student[1:], teacher[0], teacher[1:], **options)


def assert_same_gradients(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        if b is not None:
            torch.testing.assert_close(a.grad, b.grad, **tolerance)


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
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    (3 * loss).backward()
    (3 * expected).backward()
    assert_same_gradients(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_equal_to_kd_loss_and_cross_entropy_in_float32(alpha):
    student, teacher = problem((100,), 997, (16, 24), torch.float32)
    student, teacher = (student[0], student[1] / 2, None), (teacher[0], teacher[1] / 2, None)
    labels = torch.randint(997, (100,), generator=torch.Generator().manual_seed(1))
    labels[::7] = -100
    ours, theirs = leaves(student), leaves(student)
    loss = chunked(ours, teacher, labels=labels, alpha=alpha, chunk_rows=16)
    logits = theirs[0] @ theirs[1].t()
    soft = kd_loss(logits, teacher[0] @ teacher[1].t(), mask=labels != -100)
    expected = alpha * F.cross_entropy(logits, labels) + (1 - alpha) * soft
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    largest = theirs[1].grad.abs().max().item()
    assert_same_gradients(ours, theirs, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_gradcheck(kind):
    (hidden, weight, bias), teacher = problem((5,), 6, (3, 4), bias=True)
    labels = torch.tensor([0, 5, -100, 2, 3])

    def loss(hidden, weight, bias):
        return chunked(
            (hidden, weight, bias), teacher, labels=labels, alpha=0.4, divergence=kind, softcap=2.0, chunk_rows=2
        )

    assert torch.autograd.gradcheck(loss, leaves((hidden, weight, bias)))


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


class LiveLogits(TorchDispatchMode):
    """The largest number of float32 that tensors as wide as the vocabulary held at a time, weights apart."""

    def __init__(self, classes, *weights):
        super().__init__()
        self.classes = classes
        self.weights = {weight.untyped_storage()._cdata for weight in weights}
        self.live, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == self.classes:
                storage = value.untyped_storage()
                if storage._cdata not in self.weights:
                    self.live[storage._cdata] = (
                        StorageWeakRef(storage),
                        storage.nbytes(),
                    )
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        sizes = [nbytes // 4 for _, nbytes in self.live.values()]
        self.peak, self.largest = max(self.peak, sum(sizes)), max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_never_exceed_two_chunks(kind, bias, monkeypatch):
    monkeypatch.setattr(chunked_autograd, "kd_rows_", kd_rows_torch_)  # a mode does not see into a custom operator
    rows, classes, chunk_rows = 256, 1009, 32
    student, teacher = problem((rows,), classes, (8, 12), torch.float32, bias)
    student = leaves(student)
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    with LiveLogits(classes, student[1], teacher[1]) as seen:
        loss = chunked(
            student, teacher, labels=labels, alpha=0.5, chunk_rows=chunk_rows, divergence=kind, softcap=(None, 5.0)
        )
        loss.backward()
    assert chunk_rows * classes / 2 < seen.largest <= chunk_rows * classes
    assert 1.5 * chunk_rows * classes < seen.peak <= 2 * chunk_rows * classes
    with LiveLogits(classes, student[1], teacher[1]) as naive:
        whole(student, teacher, labels=labels, alpha=0.5).backward()
    assert naive.peak >= 4 * rows * classes  # the measure sees what there is


def test_the_budget_sets_the_chunk(monkeypatch):
    monkeypatch.setattr(chunked_autograd, "kd_rows_", kd_rows_torch_)
    student, teacher = problem((512,), 1024, (4, 4), torch.float32)
    ours = leaves(student)
    for budget in (0.25, 1.0):
        with LiveLogits(1024, ours[1], teacher[1]) as seen:
            chunked(ours, teacher, budget_mib=budget).backward()
        assert 0.6 * budget <= seen.peak * 4 / 2**20 <= budget


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


def test_mask_lets_unlabelled_rows_count_in_the_soft_term_alone():
    student, teacher = problem((6,))
    labels = torch.tensor([3, -100, 5, -100, 0, 1])
    mask = torch.tensor([True, True, True, False, True, False])
    ours, theirs = leaves(student), leaves(student)
    loss = chunked(ours, teacher, labels=labels, alpha=0.3, mask=mask)
    some = tuple(value[mask] if index == 0 else value for index, value in enumerate(theirs))
    soft = whole(some, (teacher[0][mask], *teacher[1:]))
    hard = F.cross_entropy((theirs[0] @ theirs[1].t())[mask], labels[mask])
    expected = 0.3 * hard + 0.7 * soft
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    assert_same_gradients(ours, theirs, rtol=1e-11, atol=1e-13)


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
    assert (total.rows.item(), total.labelled.item(), total.rows.dtype) == (6, 6, torch.int64)
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


def test_without_the_factor_of_the_temperature():
    student, teacher = problem()
    ours, theirs = leaves(student), leaves(student)
    loss = chunked(ours, teacher, temperature=3.0, scale_by_temperature=False)
    expected = whole(theirs, teacher, temperature=3.0) / 9
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    assert_same_gradients(ours, theirs, rtol=1e-11, atol=1e-14)


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


def test_tied_embedding_gets_its_gradient_from_both_ends():
    student, teacher = problem((7,))
    tokens = torch.arange(7)
    ours, theirs = (nn.Parameter(student[1].clone()) for _ in range(2))
    chunked((F.embedding(tokens, ours), ours, None), teacher).backward()
    whole((F.embedding(tokens, theirs), theirs, None), teacher).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)


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


def test_no_grad_computes_no_gradients():
    student, teacher = problem((64,), 101, (8, 8))
    ours = leaves(student)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func.__name__.startswith(("mm", "addmm")))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        loss = chunked(ours, teacher, chunk_rows=1000)
    assert sum(products) == 2
    assert not loss.requires_grad
    assert torch.equal(loss, chunked(ours, teacher, chunk_rows=1000).detach())


def test_deterministic():
    student, teacher = problem((64,), 101, (8, 8), torch.float32, bias=True)
    runs = [leaves(student) for _ in range(2)]
    losses = [chunked(ours, teacher, chunk_rows=9) for ours in runs]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*runs, strict=True))


def test_a_graph_that_is_kept_gives_its_gradients_again():
    student, teacher = problem()
    ours = leaves(student)
    loss = chunked(ours, teacher)
    first = torch.autograd.grad(loss, ours[:2], retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(5 * loss, ours[:2])
    for before, same, five in zip(kept, first, second, strict=True):
        assert torch.equal(before, same)
        torch.testing.assert_close(five, 5 * before)


def test_second_derivatives_are_refused():
    student, teacher = problem()
    ours = leaves(student)
    with pytest.raises(TrainingError, match="must be first ones, got a backward with create_graph"):
        torch.autograd.grad(chunked(ours, teacher), ours[0], create_graph=True)


def test_compiled_around():
    student, teacher = problem(dtype=torch.float32)
    ours, theirs = leaves(student), leaves(student)

    @torch.compile(backend="eager")
    def loss(hidden, weight):
        return 2 * chunked_kd_loss(hidden * 1.5, weight, teacher[0], teacher[1])

    loss(*ours[:2]).backward()
    (2 * chunked_kd_loss(theirs[0] * 1.5, theirs[1], teacher[0], teacher[1])).backward()
    assert_same_gradients(ours, theirs)


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
