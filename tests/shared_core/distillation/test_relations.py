"""Relations of a batch against loops written from the papers, their invariances, degenerate batches, two processes."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import leave, run_two_ranks

from shared_core.distillation.losses.features import (
    RELATIONS,
    cka_loss,
    gather_features,
    linear_cka,
    relation_sum,
    rkd_angle,
    rkd_distance,
    rkd_loss,
)
from shared_core.errors import ConfigError

NAN = float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def huber(a, b):
    d = abs(a - b)
    return d**2 / 2 if d <= 1 else d - 0.5


def cosine(points, i, j, k):
    u, v = points[j] - points[i], points[k] - points[i]
    size = np.linalg.norm(u) * np.linalg.norm(v)
    return u @ v / size if size else 0.0


def reference(name, student, teacher):
    s, t = (each.detach().double().flatten(1).numpy() for each in (student, teacher))
    b = len(s)
    everyone = range(b)
    if name == "rkd":
        return reference("rkd_distance", student, teacher) + 2 * reference("rkd_angle", student, teacher)
    if name == "rkd_distance":  # Park et al., equations 7-9
        sides = []
        for points in (s, t):
            d = np.array([[np.linalg.norm(points[i] - points[j]) for j in everyone] for i in everyone])
            sides.append(d / d[d > 0].mean())
        return sum(huber(sides[0][i, j], sides[1][i, j]) for i in everyone for j in everyone) / b**2
    if name == "rkd_angle":  # equations 10-11; the angle j-i-k at i
        triples = [(i, j, k) for i in everyone for j in everyone for k in everyone]
        return sum(huber(cosine(s, *each), cosine(t, *each)) for each in triples) / b**3
    if name == "similarity_preserving":  # Tung and Mori, equations 2-4
        grams = [points @ points.T for points in (s, t)]
        grams = [gram / np.linalg.norm(gram, axis=1, keepdims=True) for gram in grams]
        return ((grams[0] - grams[1]) ** 2).sum() / b**2
    # Kornblith et al., section 3: HSIC of K = XX', L = YY' with the centring matrix H
    h = np.eye(b) - 1 / b
    kernels = [points @ points.T for points in (s, t)]

    def hsic(k, l):  # noqa: E741
        return np.trace(k @ h @ l @ h)

    return 1 - hsic(*kernels) / math.sqrt(hsic(kernels[0], kernels[0]) * hsic(kernels[1], kernels[1]))


def pair(b=6, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, 4, generator=generator).to(dtype), torch.randn(b, 7, generator=generator).to(dtype)


def rotation(width, seed=3):
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)).double())[0]


@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_is_the_papers(name, dtype):
    student, teacher = pair(dtype=dtype)
    loss = RELATIONS[name](student, teacher)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(
        reference(name, student, teacher), rel=1e-12 if dtype == torch.float64 else 2e-5
    )


@pytest.mark.parametrize("name", RELATIONS)
def test_gradient_is_that_of_finite_differences(name):
    student, teacher = pair(dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True, False])
    assert torch.autograd.gradcheck(lambda each: RELATIONS[name](each, teacher, mask=mask), student.requires_grad_())


@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1e18])
def test_size_changes_nothing(name, scale):
    student, teacher = pair()
    scaled = (scale * student).requires_grad_()
    loss = RELATIONS[name](scaled, teacher / scale)
    loss.backward()
    torch.testing.assert_close(loss, RELATIONS[name](student, teacher), rtol=1e-4, atol=1e-6)
    assert torch.isfinite(scaled.grad).all()


ORDER = torch.randperm(6, generator=torch.Generator().manual_seed(1))
NOTHING = {
    "rotation": lambda s, t: (s @ rotation(4), t @ rotation(7)),
    "order": lambda s, t: (s[ORDER], t[ORDER]),
    "dimensions": lambda s, t: (s.view(6, 2, 2), t.view(6, 7, 1)),
    "translation": lambda s, t: (s + 5, t - 2),
}


@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize("change", NOTHING)
def test_what_changes_nothing(name, change):
    student, teacher = pair(dtype=torch.float64)
    same = RELATIONS[name](student, teacher)
    changed = RELATIONS[name](*NOTHING[change](student, teacher))
    if (name, change) == ("similarity_preserving", "translation"):  # is not of centered features
        assert changed != pytest.approx(same)
    else:
        torch.testing.assert_close(changed, same)
    assert RELATIONS[name](teacher @ rotation(7) * 3, teacher).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("name", RELATIONS)
def test_too_few_examples(name, b):
    student, teacher = torch.randn(b, 4, requires_grad=True), torch.randn(b, 7)
    loss = RELATIONS[name](student, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(student.grad, torch.zeros(b, 4))


@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_points_have_finite_gradients(name, dtype):
    point = torch.randn(1, 4).to(dtype)
    for student, teacher in (
        (point.repeat(5, 1), torch.randn(5, 7)),
        (torch.randn(5, 4).to(dtype), torch.ones(5, 7)),
        (point.repeat(5, 1), torch.ones(5, 7)),
        (torch.zeros(5, 4, dtype=dtype), torch.zeros(5, 7)),
        (torch.cat([point, point, torch.randn(3, 4).to(dtype)]), torch.randn(5, 7)),
    ):
        student = student.clone().requires_grad_()
        loss = RELATIONS[name](student, teacher)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(student.grad).all()
        assert student.grad.abs().max() < 1e3


@pytest.mark.parametrize("name", RELATIONS)
def test_large_half_precision_features(name):
    student, teacher = pair(dtype=torch.float16)
    large = (student / student.abs().max() * 6e4).requires_grad_()
    loss = RELATIONS[name](large, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(reference(name, large, teacher), rel=1e-4)
    assert torch.isfinite(large.grad).all()


@pytest.mark.parametrize("name", RELATIONS)
def test_examples_that_do_not_count_may_hold_anything(name):
    student, teacher = pair()
    clean = RELATIONS[name](student[:4], teacher[:4])
    student[4:], teacher[4:] = NAN, NAN
    student.requires_grad_()
    loss = RELATIONS[name](student, teacher, mask=torch.arange(6) < 4)
    loss.backward()
    assert torch.equal(loss, clean)
    assert torch.equal(student.grad[4:], torch.zeros(2, 4))
    assert torch.isfinite(student.grad).all()
    nothing = RELATIONS[name](student, teacher, mask=torch.zeros(6, dtype=torch.bool))
    assert nothing.item() == 0.0


@pytest.mark.parametrize("name", RELATIONS)
def test_neither_the_teacher_nor_autocast_change_anything(name):
    student, teacher = pair()
    student.requires_grad_()
    teacher.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = RELATIONS[name](student, teacher)
    loss.backward()
    assert teacher.grad is None
    assert torch.equal(loss, RELATIONS[name](student, teacher))


def test_the_authors_code_of_rkd():
    student, teacher = pair(b=8, dtype=torch.float64)
    # as published (lenscloth/RKD, metric/loss.py): smooth_l1_loss over the whole b x b and b x b x b tensors
    distances = [torch.cdist(each, each) for each in (student, teacher)]
    distances = [each / each[each > 0].mean() for each in distances]
    torch.testing.assert_close(rkd_distance(student, teacher), F.smooth_l1_loss(*distances))
    angles = []
    for each in (student, teacher):
        unit = F.normalize(each.unsqueeze(0) - each.unsqueeze(1), p=2, dim=2)
        angles.append(torch.bmm(unit, unit.transpose(1, 2)).view(-1))
    torch.testing.assert_close(rkd_angle(student, teacher), F.smooth_l1_loss(*angles))


def test_weights_of_rkd():
    student, teacher = pair()
    torch.testing.assert_close(
        rkd_loss(student, teacher, distance_weight=3.0, angle_weight=0.5),
        3 * rkd_distance(student, teacher) + 0.5 * rkd_angle(student, teacher),
    )
    torch.testing.assert_close(rkd_loss(student, teacher, angle_weight=0.0), rkd_distance(student, teacher))


class TestCka:
    def test_it_is_a_similarity(self):
        for seed in range(20):
            student, teacher = pair(b=30, dtype=torch.float64, seed=seed)
            value = linear_cka(student, teacher)
            assert 0 <= value <= 1
            torch.testing.assert_close(value, linear_cka(teacher, student))
            torch.testing.assert_close(1 - value, cka_loss(student, teacher))

    def test_of_itself_it_is_1(self):
        student, _ = pair(b=30)
        assert linear_cka(student, student).item() == pytest.approx(1, abs=1e-6)
        assert linear_cka(student, student) <= 1

    def test_of_orthogonal_directions_it_is_0(self):
        points = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        assert linear_cka(points[:, :1], points[:, 1:]).item() == 0.0

    def test_it_is_not_invariant_to_other_linear_maps(self):
        student, _ = pair(b=30, dtype=torch.float64)
        assert linear_cka(student * torch.tensor([10.0, 1.0, 1.0, 0.1]), student) < 0.9

    @pytest.mark.parametrize(("student", "teacher", "value"), [(1, 1, 1.0), (1, 0, 0.0), (0, 1, 0.0)])
    def test_features_without_variation_give_no_gradient(self, student, teacher, value):
        # 0.1 has no exact mean in float32: rounding is not variation
        sides = [torch.full((7, 3), 0.1) if constant else torch.randn(7, 3) for constant in (student, teacher)]
        sides[0].requires_grad_()
        similarity = linear_cka(*sides)
        similarity.backward()
        assert similarity.item() == value
        assert torch.equal(sides[0].grad, torch.zeros(7, 3))


class TestSum:
    @pytest.mark.parametrize("name", RELATIONS)
    def test_it_is_the_loss_times_the_examples(self, name):
        student, teacher = pair()
        mask = torch.tensor([True, True, False, True, True, True])
        total, count = relation_sum(student, teacher, relation=name, mask=mask)
        assert (count.item(), count.dtype) == (5, torch.int64)
        torch.testing.assert_close(total / 5, RELATIONS[name](student, teacher, mask=mask))

    def test_a_mask_of_nothing_gives_zero_without_gradient(self):
        student, teacher = pair()
        total, count = relation_sum(student.requires_grad_(), teacher, mask=torch.zeros(6, dtype=torch.bool))
        total.backward()
        assert (total.item(), count.item()) == (0.0, 0)
        assert torch.equal(student.grad, torch.zeros(6, 4))


@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize(
    ("student", "teacher", "options", "message"),
    [
        (torch.zeros(3), torch.zeros(3), {}, r"student_features must be floating point of shape \(examples, ...\)"),
        (torch.zeros(3, 2).long(), torch.zeros(3, 2), {}, r"torch\.int64"),
        (torch.zeros(3, 2), torch.zeros(4, 2), {}, "the student's 3 examples, got 4"),
        (torch.zeros(3, 2), torch.zeros(3, 2), {"mask": torch.ones(3)}, r"mask must be bool of shape \(3,\)"),
    ],
)
def test_refusals(name, student, teacher, options, message):
    with pytest.raises(ConfigError, match=message):
        RELATIONS[name](student, teacher, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda w=w, n=n: rkd_loss(*pair(), **{n: w}), f"{n} must be finite and at least 0")
          for w in (-1.0, NAN, float("inf"), True) for n in ("angle_weight", "distance_weight")),
        (lambda: relation_sum(*pair(), relation="rkd_angel"), "did you mean 'rkd_angle'"),
        (lambda: gather_features(torch.tensor(1.0)), "got a scalar"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_one_process_gathers_nothing():
    features = torch.randn(3, 2)
    assert gather_features(features) is features


# two processes: 5 examples on rank 0 and 3 on rank 1, against one process on all 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=generator).double(), torch.randn(8, 7, generator=generator).double()


def parameter_gradients(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    part = slice(0, 5) if rank == 0 else slice(5, 8)
    inputs, targets = (each[part] for each in data())
    found = {}
    for name in RELATIONS:
        student = DistributedDataParallel(model())
        total, count = relation_sum(student(inputs), targets, relation=name)
        dist.all_reduce(count)
        # what a trainer does: the sums over the count of all processes, times the processes that DDP divides by
        (2 * total / count).backward()
        found[name] = parameter_gradients(student)
    rows = inputs.clone().requires_grad_()
    gathered = gather_features(rows)
    (gathered * torch.arange(8.0).unsqueeze(1) * (rank + 1)).sum().backward()
    found["gathered"], found["rows"] = gathered.detach(), rows.grad
    found["half"] = gather_features(inputs.bfloat16())
    empty = gather_features(inputs[:0] if rank else inputs)
    found["empty"] = empty
    try:
        gather_features(torch.zeros(2, 3 + rank))
    except ConfigError as error:
        found["refusal"] = torch.tensor("as wide on every rank, got [3, 4]" in str(error))
    torch.save(found, f"{folder}/found{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relations")
    run_two_ranks(__file__, folder)
    return [torch.load(folder / f"found{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", RELATIONS)
def test_two_processes_train_as_one_on_the_joined_batch(found, name):
    inputs, targets = data()
    student = model()
    RELATIONS[name](student(inputs), targets).backward()
    for each in found:
        torch.testing.assert_close(each[name], parameter_gradients(student), rtol=1e-9, atol=1e-12)


def test_rows_are_gathered_in_the_order_of_ranks(found):
    inputs, _ = data()
    for rank, part in ((0, slice(0, 5)), (1, slice(5, 8))):
        assert torch.equal(found[rank]["gathered"], inputs)
        assert torch.equal(found[rank]["half"], inputs.bfloat16())
        assert torch.equal(found[rank]["empty"], inputs[:5])
        assert found[rank]["refusal"]
        # both ranks' losses, of weights 1 and 2, reach the rows of either
        expected = (3 * torch.arange(8.0))[part].unsqueeze(1).expand(-1, 5).double()
        assert torch.equal(found[rank]["rows"], expected)


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
