"""The mixture of task and soft term through the trainer where the model's own loss ignores the count of labels."""

import copy
import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import make_classifier, make_examples, make_language_model, make_texts, make_trainer
from hf_gradients import Gradients, InOrder, largest_difference
from two_ranks import run_two_ranks

from hf_eff import attach

ALPHA, T = 0.3, 2.0
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16, **QUIET,
}  # fmt: skip


class OwnLoss(InOrder):
    """As many a user writes it: a mean, whatever the count."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].reshape(-1, 24), labels[:, 1:].reshape(-1))
        return (loss, outputs) if return_outputs else loss


def tagger(seed=0, **config):
    torch.manual_seed(seed)
    return BertForTokenClassification(BertConfig(**TINY | {"num_labels": 24} | config))


def classifier(seed=0, **config):
    return make_classifier(seed, **QUIET | config)


def mean_of_language_model(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].reshape(-1, 24), labels[:, 1:].reshape(-1))


def sum_by_number(outputs, labels, num_items_in_batch=None):
    total = F.cross_entropy(outputs.logits[:, :-1].reshape(-1, 24), labels[:, 1:].reshape(-1), reduction="sum")
    return total / num_items_in_batch.item()


CASES = {
    "classes": (classifier, make_examples, {}),
    "tokens": (tagger, make_texts, {}),
    "causal": (make_language_model, make_texts, {}),
    "smoothed": (classifier, make_examples, {"label_smoothing_factor": 0.2}),
    "mean": (make_language_model, make_texts, {"extra": {"compute_loss_func": mean_of_language_model}}),
    "number": (make_language_model, make_texts, {"extra": {"compute_loss_func": sum_by_number}}),
    "own": (make_language_model, make_texts, {"trainer_class": OwnLoss}),
}
IGNORING = {
    "classes": "the loss of BertForSequenceClassification ignores num_items_in_batch",
    "tokens": "the loss of BertForTokenClassification ignores",
    "mean": "the loss of compute_loss_func ignores",
    "own": "the loss of OwnLoss.compute_loss ignores",
}


def run(folder, kind, size, windows, *, rows=8, steps=1, recipe=None, model=None, **more):
    """Return the trainer, the first step's gradients and the session."""
    make, data, settings = CASES[kind]
    gradients = Gradients()
    trainer = make_trainer(
        folder, model=model or make(), data=data(rows), callbacks=[gradients],
        **{"trainer_class": InOrder, "per_device_train_batch_size": size, "gradient_accumulation_steps": windows,
           "max_steps": steps, "max_grad_norm": 0.0, "optim": "sgd", **settings, **more},
    )  # fmt: skip
    taught = {"distill": {"teacher": make(seed=5, hidden_size=32), "temperature": T, "alpha": ALPHA}}
    session = attach(trainer, taught if recipe is None else recipe)
    trainer.train()
    return trainer, gradients.first, session


def reference(kind):
    """The formula on the joined window, in float64."""
    make, data, settings = CASES[kind]
    student, teacher = make().double().train(), make(seed=5, hidden_size=32).double().eval()
    batch = {name: torch.stack([row[name] for row in data(8)]) for name in ("input_ids", "attention_mask", "labels")}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    labels, ours, theirs = batch["labels"], student(**inputs).logits, teacher(**inputs).logits.detach()
    if make is make_language_model:
        labels, ours, theirs = labels[:, 1:], ours[:, :-1], theirs[:, :-1]
    counts = labels != -100
    labels, ours, theirs = labels[counts], ours[counts].double(), theirs[counts].double()
    hard = F.cross_entropy(ours, labels, label_smoothing=settings.get("label_smoothing_factor", 0.0))
    p = (theirs / T).softmax(-1)
    soft = T**2 * (p * (p.log() - (ours / T).log_softmax(-1))).sum(-1).mean()
    (ALPHA * hard + (1 - ALPHA) * soft).backward()
    return {name: value.grad.float() for name, value in student.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", CASES)
def test_any_cut_of_the_window_has_the_gradient_of_the_formula(tmp_path, kind):
    expected = reference(kind)
    for size, windows in ((8, 1), (2, 4)):
        _, found, session = run(tmp_path / str(size), kind, size, windows)
        assert largest_difference(expected, found) < 1e-6, (size, windows)
        told = [note for note in session.notes if "num_items_in_batch" in note]
        if kind in IGNORING and windows > 1:
            assert len(told) == 1
            assert told[0].startswith(IGNORING[kind])
            assert "4 micro-batches" in told[0]
        else:
            assert told == []


def test_the_last_window_of_an_epoch_is_shorter(tmp_path):
    # 8 and 3 examples: a window of two micro-batches, of which the last has one example
    whole, parts = (
        run(tmp_path / str(size), "classes", size, windows, rows=11, steps=4, lr_scheduler_type="constant")[0]
        for size, windows in ((8, 1), (2, 4))
    )
    assert largest_difference(whole.model.state_dict(), parts.model.state_dict()) < 1e-6


def test_peers_are_weighted_alike(tmp_path):
    recipe = {"distill": {"teacher": "mutual", "peers": 2, "temperature": T, "alpha": ALPHA}}
    found = []
    for size, windows in ((8, 1), (2, 4)):
        *_, session = run(tmp_path / str(size), "classes", size, windows, recipe=copy.deepcopy(recipe))
        (peer,) = session.techniques["distill"].peers
        found.append({name: value.detach() for name, value in peer.named_parameters()})
    assert largest_difference(*found) < 1e-6


def test_looking_draws_nothing_and_moves_no_statistics(tmp_path):
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Embedding(24, 4), torch.nn.Flatten(), torch.nn.BatchNorm1d(32),
                                           torch.nn.Dropout(0.5), torch.nn.Linear(32, 4))  # fmt: skip

        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.net(input_ids)
            return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})

    class Random(Gradients):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            super().on_pre_optimizer_step(args, state, control, **kwargs)
            self.random = torch.get_rng_state()

    seen = []
    for recipe in ({}, {"distill": {"teacher": Normed(), "alpha": 1.0}}, {"prune": {"sparsity": 0.5, "begin": 1}}):
        watch = Random()
        trainer = make_trainer(
            tmp_path, trainer_class=InOrder, model=Normed(), data=make_examples(8), callbacks=[watch], max_steps=1,
            per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd", max_grad_norm=0.0,
        )  # fmt: skip
        attach(trainer, recipe)
        trainer.train()
        seen.append((watch, dict(trainer.model.named_buffers())))
    (bare, buffers), *others = seen
    for watch, found in others:
        assert torch.equal(watch.random, bare.random)
        assert all(torch.equal(value, buffers[name]) for name, value in found.items())
    distilled, pruned = (watch.first for watch, _ in others)
    # the trainer's own gradient is four times too large; nothing changes it where no term joins the loss
    assert all(torch.equal(pruned[name], value) for name, value in bare.first.items())
    assert largest_difference({name: value / 4 for name, value in bare.first.items()}, distilled) < 1e-6


def test_a_part_that_ignores_the_count_is_told(tmp_path, monkeypatch):
    def with_penalty(outputs, labels, num_items_in_batch=None):
        return sum_by_number(outputs, labels, num_items_in_batch) + 0.2

    settings = {"extra": {"compute_loss_func": with_penalty}}
    monkeypatch.setitem(CASES, "penalized", (make_language_model, make_texts, settings))
    *_, session = run(tmp_path, "penalized", 2, 4)
    assert any("of the loss of compute_loss_func ignores num_items_in_batch" in note for note in session.notes)


def test_private_gradients_are_clipped_by_the_norm_of_one_examples_own_loss(tmp_path):
    found = []
    for size, windows in ((8, 1), (2, 4)):
        recipe = {"dp": {"noise_multiplier": 0.0, "max_grad_norm": 100.0, "seed": 0, "delta": 1e-2}}
        found.append(run(tmp_path / str(size), "classes", size, windows, rows=16, recipe=recipe)[1])
    assert max(value.abs().max() for value in found[0].values()) > 1e-3
    assert largest_difference(*found) < 1e-6


def test_a_loss_without_logits_of_all_positions_is_looked_at_by_one_row(tmp_path, monkeypatch):
    rows, found = [], []

    def masked(seed=0, **config):
        torch.manual_seed(seed)
        return BertForMaskedLM(BertConfig(**TINY | config))

    evaluated = BertForMaskedLM.forward

    @functools.wraps(evaluated)
    def forward(self, input_ids=None, **kwargs):
        rows.extend([] if self.training or "labels" not in kwargs else [len(input_ids)])
        return evaluated(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(BertForMaskedLM, "forward", forward)
    monkeypatch.setitem(CASES, "masked", (masked, make_texts, {}))
    for size, windows in ((8, 1), (4, 2)):
        recipe = {"distill": {"teacher": masked(5), "temperature": T, "alpha": ALPHA, "chunked": True}}
        found.append(run(tmp_path / str(size), "masked", size, windows, recipe=recipe)[1])
    assert rows == [1, 1]
    assert largest_difference(*found) < 1e-6


def test_a_loss_that_eval_mode_does_not_have_is_told(tmp_path):
    class OnlyInTraining(OwnLoss):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if not model.training:
                raise RuntimeError("no loss here")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer, _, session = run(tmp_path, "own", 2, 4, trainer_class=OnlyInTraining)
    assert trainer.state.global_step == 1
    assert any("cannot be computed in eval mode (no loss here)" in note for note in session.notes)


def test_a_loss_function_that_is_told_no_count_returns_means(tmp_path, monkeypatch):
    def by_tokens(outputs, labels, num_items_in_batch=None):
        assert num_items_in_batch is None
        return outputs.logits.square().mean()

    def unlabeled(count):
        return [{name: row[name] for name in ("input_ids", "attention_mask")} for row in make_examples(count)]

    settings = {"extra": {"compute_loss_func": by_tokens}, "label_names": ["none"]}
    monkeypatch.setitem(CASES, "uncounted", (classifier, unlabeled, settings))
    found = [run(tmp_path / str(size), "uncounted", size, windows)[1] for size, windows in ((8, 1), (2, 4))]
    assert largest_difference(*found) < 1e-6


@pytest.mark.parametrize("kind", ["classes", "tokens", "causal"])
def test_two_processes_have_the_gradient_of_the_formula(two, kind):
    for rank in (0, 1):
        assert largest_difference(reference(kind), two[rank][kind]) < 1e-6


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_two_ranks(__file__, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


if __name__ == "__main__":
    rank, folder = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    kinds = ("classes", "tokens", "causal")
    torch.save({kind: run(Path(folder) / kind, kind, 2, 2)[1] for kind in kinds}, f"{folder}/{rank}.pt")
