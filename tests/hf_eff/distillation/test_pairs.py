"""Hidden states and attention maps of Transformers models, brought together by the Trainer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

from hf_eff import attach
from shared_core import Session
from shared_core.errors import ConfigError, MatchError

LENGTHS = (3, 8, 5, 6, 2, 8, 4, 7)
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def examples(fill=0):
    """Eight texts padded to eight tokens; what stands in the padding is told."""
    tokens = torch.randint(1, 24, (8, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[int(column < length) for column in range(8)] for length in LENGTHS])
    tokens = torch.where(mask.bool(), tokens, fill)
    return [{"input_ids": t, "attention_mask": m, "labels": t[0] % 4} for t, m in zip(tokens, mask, strict=True)]


def gradients_of(make, folder, options, *, size=8, windows=1, fill=0):
    """The gradients of one step of the Trainer whose loss is the pairs' term alone."""
    found = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    trainer = make.trainer(
        folder, model=make.classifier(**QUIET), data=examples(fill), callbacks=[Gradients()], max_steps=1,
        per_device_train_batch_size=size, gradient_accumulation_steps=windows, max_grad_norm=0.0, optim="sgd",
    )  # fmt: skip
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
    teacher = make.classifier(seed=9, num_attention_heads=4, **QUIET)
    attach(trainer, {"distill": {"teacher": teacher, **options}})
    trainer.train()
    return found


def reference(make, term):
    """Gradients in float64 of the mean over examples of the mean over their real tokens."""
    student, teacher = make.classifier(**QUIET).double(), make.classifier(seed=9, num_attention_heads=4, **QUIET)
    teacher = teacher.double().eval()
    for model in (student, teacher):
        model.set_attn_implementation("eager")
    batch = {name: torch.stack([row[name] for row in examples()]) for name in ("input_ids", "attention_mask", "labels")}
    ours = student(**batch, output_hidden_states=True, output_attentions=True)
    with torch.no_grad():
        theirs = teacher(**batch, output_hidden_states=True, output_attentions=True)
    each = [term(ours, theirs, index, length) for index, length in enumerate(LENGTHS)]
    torch.stack(each).mean().backward()
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def squared(ours, theirs, index, length):
    return F.mse_loss(ours.hidden_states[2][index, :length], theirs.hidden_states[1][index, :length])


def divergence(ours, theirs, index, length):
    p, q = theirs.attentions[1][index].mean(0)[:length, :length], ours.attentions[0][index].mean(0)[:length, :length]
    return (p * (p.log() - q.log())).sum(-1).mean()


LAYER = "bert.encoder.layer"
ATTENTION = f"{LAYER}.0.attention.self={LAYER}.1.attention.self"
OPTIONS = {
    "hidden": (squared, {"hidden": [f"{LAYER}.1={LAYER}.0"], "alpha": 1.0, "hidden_weight": 100.0}),
    "attention": (divergence, {"attention": [ATTENTION], "alpha": 1.0, "attention_weight": 100.0}),
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("size", [8, 2])
def test_padding_adds_nothing_and_micro_batches_are_one_batch(make, tmp_path, kind, size):
    term, options = OPTIONS[kind]
    plain = gradients_of(make, tmp_path / "plain", {"alpha": 1.0}, size=size, windows=8 // size)
    found = gradients_of(make, tmp_path / "run", options, size=size, windows=8 // size, fill=5)
    wanted = reference(make, term)
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - plain[name] - 100 * gradient).abs().max() < 1e-4 * 100 * largest, name


def test_models_keep_their_attention_and_the_receipt_names_the_pairs(make, tmp_path):
    model, teacher = make.classifier(**QUIET), make.classifier(seed=9, **QUIET)
    before = model.config._attn_implementation
    assert before != "eager"
    trainer = make.trainer(tmp_path, model=model, data=examples(), max_steps=2)
    session = attach(trainer, {"distill": {"teacher": teacher, "attention": ["*attention.self=*attention.self"]}})
    trainer.train()
    assert model.config._attn_implementation == teacher.config._attn_implementation == before
    told = session.receipt()["techniques"]["distill"]
    names = [f"bert.encoder.layer.{index}.attention.self" for index in (0, 1)]
    assert told["attention"] == [f"{name}={name}" for name in names]


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"attention": ["*attention.self=*attention.self"]}, r"probabilities.* dropout.* to 0"),
        (QUIET, {"attention": ["*output.dense=*output.dense"]}, "must return its map"),
        (QUIET, {"hidden": ["*attention=*nothing"]}, "hidden must name submodules"),
    ],
)
def test_what_is_no_map_is_refused(make, tmp_path, settings, options, message):
    trainer = make.trainer(tmp_path, model=make.classifier(**settings), data=examples())
    with pytest.raises((ConfigError, MatchError), match=message):
        attach(trainer, {"distill": {"teacher": make.classifier(seed=9, **QUIET), **options}})
        trainer.train()


def test_a_shallower_student_begins_with_its_teachers_layers_once(make, tmp_path):
    teacher = make.classifier(seed=9, num_hidden_layers=4)
    student = make.classifier(num_hidden_layers=2)
    trainer = make.trainer(tmp_path, model=student, data=examples(), max_steps=2)
    session = attach(trainer, {"distill": {"teacher": copy.deepcopy(teacher), "init_layers": "1,3"}})
    source = teacher.state_dict()
    for name, tensor in student.state_dict().items():
        name = name.replace("layer.1.", "layer.3.").replace("layer.0.", "layer.1.")
        assert torch.equal(tensor, source[name]), name
    trainer.train()
    trained = copy.deepcopy(student.state_dict())
    assert session.receipt()["techniques"]["distill"]["init_layers"]["layers"] == {"bert.encoder.layer": [1, 3]}
    again = Session({"distill": {"teacher": teacher, "init_layers": "1,3"}}, seed=0)
    again.attach(student)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in student.state_dict().items())
