"""`distill.vocab_size`: heads padded to different sizes, as if their padding had been cut off."""

import copy
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from shared_core.distillation import Distillation, DistillConfig
from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, ConfigError

CLASSES = 7


def net(width, classes, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, classes))


def cut(model):
    """The model without padding, in float64."""
    model = copy.deepcopy(model).double()
    model[2].weight = nn.Parameter(model[2].weight[:CLASSES])
    model[2].bias = nn.Parameter(model[2].bias[:CLASSES])
    return model


def soft(model, teacher, x, **options):
    technique = Distillation(DistillConfig(teacher=teacher, alpha=0.0, temperature=2.0, **options))
    context = Context(model, total_steps=3)
    technique.attach(context)
    technique.begin(context, None)
    technique.labels = torch.zeros(len(x), dtype=torch.long)
    model.zero_grad()
    loss = technique.loss(model(x).sum(), context)
    loss.backward()
    context.undo.close()
    return loss, [parameter.grad for parameter in model.parameters()]


def assert_cut(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6, check_dtype=False)
    for ours, reference in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(ours[: len(reference)], reference, rtol=1e-5, atol=1e-6, check_dtype=False)
        assert not ours[len(reference) :].any()


@pytest.mark.parametrize("divergence", get_args(get_type_hints(DistillConfig)["divergence"]))
@pytest.mark.parametrize("several", [False, True])
def test_as_if_padding_were_cut_off(divergence, several):
    x, student = torch.randn(6, 5), net(6, 9, 0)
    teachers = [net(8, 12, 1), net(8, CLASSES, 2)][: 1 + several]
    expected = soft(cut(student), [cut(teacher) for teacher in teachers], x.double(), divergence=divergence)
    got = soft(student, teachers, x, divergence=divergence, vocab_size=CLASSES)
    assert_cut(got, expected)


def test_a_cached_teacher(tmp_path):
    x, student, teacher = torch.randn(6, 5), net(6, 9, 0), net(8, 12, 1)
    write_teacher_cache(teacher, [x], tmp_path / "cache", temperature=2.0, dtype="float32", vocabulary=CLASSES)
    name = f"cache:{tmp_path / 'cache'}"
    assert_cut(soft(student, name, x, vocab_size=CLASSES), soft(cut(student), cut(teacher), x.double()))
    with pytest.raises(CheckpointError, match=r"must have the 7 classes .* got 8"):
        soft(student, name, x, vocab_size=8)


@pytest.mark.parametrize(
    ("sizes", "vocab_size", "message"),
    [
        ((9, 12), None, r"the student's 9 classes, got 12; .* set distill.vocab_size .* different tokenizers take"),
        ((9, 12), 10, r"vocab_size must be at most 9, the smaller of the student's 9 and the teacher's 12"),
        ((9, 6), 7, r"vocab_size must be at most 6"),
    ],
)
def test_sizes_that_do_not_fit(sizes, vocab_size, message):
    with pytest.raises(ConfigError, match=message):
        soft(net(6, sizes[0], 0), net(8, sizes[1], 1), torch.randn(6, 5), vocab_size=vocab_size)


def test_no_counted_class():
    with pytest.raises(ConfigError, match="vocab_size"):
        DistillConfig(teacher="runs/t", vocab_size=0)
