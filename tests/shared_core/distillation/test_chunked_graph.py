"""Chunked distillation and autograd: the memory it holds, what a graph may be asked for, torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from chunked_distillation_runs import assert_same_gradients, chunked, leaves, problem, whole
from eff_kernels.distillation import kd_rows_torch_
from plain_loop import begun_session
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shared_core.distillation import chunked_autograd, deferred_logits
from shared_core.distillation.chunked_loss import chunked_kd_loss
from shared_core.errors import TrainingError


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
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
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


def test_two_runs_give_the_same_bits():
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
    with pytest.raises(TrainingError, match="create_graph"):
        torch.autograd.grad(chunked(ours, teacher), ours[0], create_graph=True)


def test_a_compiled_caller_gets_the_same_gradients():
    student, teacher = problem(dtype=torch.float32)
    ours, theirs = leaves(student), leaves(student)

    @torch.compile(backend="eager")
    def loss(hidden, weight):
        return 2 * chunked_kd_loss(hidden * 1.5, weight, teacher[0], teacher[1])

    loss(*ours[:2]).backward()
    (2 * chunked_kd_loss(theirs[0] * 1.5, theirs[1], teacher[0], teacher[1])).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_of_both_buffers_stay_within_the_budget(parts):
    for count in (1, 7, 131, 8100, 8192):
        for budget in (2, 3, 17, 40, 56, 2092):
            size, part = chunked_autograd.chunk_sizes(count, budget, parts)
            assert 1 <= part <= size
            assert size + part <= budget
            assert part == size or part % 8 == 0
            alone = chunked_autograd.chunk_sizes(count, budget, 1)
            assert alone[0] == alone[1] <= size


class Classifier(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 11)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        return self.head(self.body(x))


ROWS = torch.tensor([0, 5, 5, 19])
TASKS = {  # from (rows, classes) and labels, and whether one pass computes its gradient with that of the soft term
    "mean": (F.cross_entropy, True),
    "sum": (lambda z, y: F.cross_entropy(z.float(), y, reduction="sum") / 7, True),
    "ignored": (lambda z, y: 3 * F.cross_entropy(z, y.masked_fill(y == 2, -100)), True),
    "half of the rows": (lambda z, y: F.cross_entropy(z[::2], y[::2]), True),
    "a row twice": (lambda z, y: F.cross_entropy(z[ROWS], y[ROWS]), False),
    "other logits": (lambda z, y: F.cross_entropy(z / 2, y), False),
    "smoothed": (lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), False),
    "class weights": (lambda z, y: F.cross_entropy(z, y, weight=torch.arange(1.0, 12.0)), False),
    "two terms": (lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z[:3], y[:3]), False),
    "a loss a row": (lambda z, y: F.cross_entropy(z, y, reduction="none").sum(), False),
}


@pytest.mark.parametrize("name", TASKS)
def test_one_pass_computes_the_task_loss_gradient_where_it_is_these_logits_cross_entropy(name, monkeypatch):
    task, one_pass = TASKS[name]
    x, labels = torch.randn(4, 5, 6), torch.randint(11, (20,))
    own, backward = [], deferred_logits.chunked_cross_entropy_rows
    monkeypatch.setattr(
        deferred_logits,
        "chunked_cross_entropy_rows",
        lambda *args: (losses := backward(*args)).register_hook(own.append) and losses,
    )
    found = []
    for is_chunked in (True, False):
        student = Classifier(1)
        session, _ = begun_session({"distill": {"teacher": Classifier(2), "chunked": is_chunked}}, student, 10)
        session.loss(task(student(x).flatten(0, 1), labels)).backward()
        found.append([parameter.grad for parameter in student.parameters()])
    assert bool(own) != one_pass
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
