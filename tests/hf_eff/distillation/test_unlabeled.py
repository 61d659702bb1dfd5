"""Weak supervision through the Trainer: labeled and unlabeled examples in one stream, however it is cut."""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import make_language_model, make_trainer
from hf_gradients import Gradients, InOrder, largest_difference
from two_ranks import run_two_ranks

from hf_eff import attach
from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.errors import ConfigError, TrainingError

ALPHA, T, FIELD = 0.3, 2.0, "is_new"
UNLABELED = [0, 0, 0, 0, 1, 1, 1, 0]  # the fifth and sixth make a micro-batch of two that is wholly unlabeled


def texts(flags=UNLABELED, *, labeled=True, field=True):
    """Ragged texts, padded on the right; where one is unlabeled its labels are wrong."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index, flag in enumerate(flags):
        row = torch.randint(1, 24, (8,), generator=generator)
        length = 3 + index % 6
        real = (torch.arange(8) < length).long()
        labels = torch.where(real.bool() & (torch.arange(8) >= index % 3), row, -100)
        text = {"input_ids": row * real, "attention_mask": real}
        text |= {"labels": torch.full_like(row, 7) if flag else labels} if labeled or not flag else {}
        found.append(text | ({FIELD: bool(flag)} if field else {}))
    return found


def teacher():
    return make_language_model(seed=5, hidden_size=32)


def reference(flags=UNLABELED):
    """D10 on the joined window, in float64, from the formula."""
    student, taught_by = make_language_model().double(), teacher().double()
    rows = texts(flags)
    ids, real, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels"))
    new = torch.tensor(flags).bool()[:, None]
    has_label = (labels[:, 1:] != -100) & ~new
    counts = torch.where(new, real[:, 1:] != 0, has_label)
    ours = student(input_ids=ids, attention_mask=real).logits[:, :-1]
    theirs = taught_by(input_ids=ids, attention_mask=real).logits[:, :-1].detach()
    hard = -ours[has_label].log_softmax(-1).gather(-1, labels[:, 1:][has_label][:, None]).sum()
    hard = hard / max(int(has_label.sum()), 1)
    p = (theirs[counts] / T).softmax(-1)
    soft = T**2 * (p * (p.log() - (ours[counts] / T).log_softmax(-1))).sum(-1).mean()
    (ALPHA * hard + (1 - ALPHA) * soft).backward()
    return {name: value.grad.float() for name, value in student.named_parameters()}


def train(folder, size, windows, data=None, model=None, extra=None, options=None, **settings):
    gradients = Gradients()
    trainer = make_trainer(
        folder, trainer_class=InOrder, model=model or make_language_model(), data=texts() if data is None else data,
        callbacks=[gradients], extra=extra, **{
            "per_device_train_batch_size": size, "gradient_accumulation_steps": windows, "max_steps": 1,
            "max_grad_norm": 0.0, "optim": "sgd", **settings,
        },
    )  # fmt: skip
    options = {"teacher": teacher(), "temperature": T, "alpha": ALPHA, "unlabeled_field": FIELD} | (options or {})
    attach(trainer, {"distill": options})
    trainer.train()
    return trainer, gradients.first


def told(folder):
    return json.loads((Path(folder) / "eff_receipt.json").read_text())["techniques"]["distill"]


@pytest.mark.parametrize(("size", "windows"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_any_cut_of_the_window_has_the_gradient_of_the_formula(tmp_path, size, windows):
    trainer, found = train(tmp_path, size, windows, logging_steps=1)
    assert largest_difference(found, reference()) < 1e-6
    receipt = told(tmp_path)
    assert (receipt["labeled_examples"], receipt["unlabeled_examples"]) == (5, 3)
    assert receipt["unlabeled_positions"] == 6 + 7 + 2
    assert "distill/unlabeled_share" in trainer.state.log_history[0]


@pytest.mark.parametrize(("size", "windows"), [(2, 4), (1, 8)])
def test_batches_without_labels_in_a_stream_with_some(tmp_path, size, windows):
    flags = [1, 1, 0, 0, 1, 1, 0, 0]  # the first batch, too: the trainer looks at that one alone
    data = texts(flags, labeled=False, field=False)
    _, found = train(tmp_path, size, windows, data=data, options={"unlabeled_field": None})
    assert largest_difference(found, reference(flags)) < 1e-6
    assert told(tmp_path)["unlabeled_examples"] == 4


@pytest.mark.parametrize(("size", "windows"), [(8, 1), (2, 4)])
def test_a_window_without_one_label_is_not_divided_by_zero(tmp_path, size, windows):
    _, found = train(tmp_path, size, windows, data=texts([1] * 8))
    assert largest_difference(found, reference([1] * 8)) < 1e-6


def test_label_smoothing_and_a_loss_function_see_no_label_of_an_unlabeled_example(tmp_path):
    def summed(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs.logits[:, :-1].reshape(-1, 24), labels[:, 1:].reshape(-1), reduction="sum")
        return loss / num_items_in_batch

    _, found = train(tmp_path / "func", 2, 4, extra={"compute_loss_func": summed})
    assert largest_difference(found, reference()) < 1e-6
    smoothed = [train(tmp_path / str(n), 8 // n, n, label_smoothing_factor=0.2)[1] for n in (1, 4)]
    assert largest_difference(*smoothed) < 1e-6


@pytest.mark.parametrize("divergence", ["hard_label", "logit_mse"])
def test_other_divergences_do_not_depend_on_the_cut(tmp_path, divergence):
    found = [train(tmp_path / str(n), 8 // n, n, options={"divergence": divergence})[1] for n in (1, 4)]
    assert largest_difference(*found) < 1e-6


def test_a_cached_teacher_gives_the_same(tmp_path):
    rows = [{name: text[name][None] for name in ("input_ids", "attention_mask")} for text in texts()]
    write_teacher_cache(teacher().eval(), rows, tmp_path / "cache", temperature=T, top_k=24, dtype="float32")
    _, found = train(tmp_path / "run", 2, 4, options={"teacher": f"cache:{tmp_path / 'cache'}"})
    assert largest_difference(found, reference()) < 1e-6


def test_classification_by_labels_of_minus_100(make, tmp_path):
    data = make.examples(8)
    for index in (2, 3, 6):
        data[index]["labels"] = torch.tensor(-100)
    options = {"teacher": make.classifier(seed=9, hidden_size=32), "unlabeled_field": None, "alpha": 0.0}
    model = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    found = [
        train(tmp_path / str(n), 8 // n, n, data=data, model=make.classifier(**model), options=options)[1]
        for n in (1, 4)  # the second micro-batch of four has no label: its mean is 0/0
    ]
    assert largest_difference(*found) < 1e-6
    assert told(tmp_path / "1")["unlabeled_examples"] == 3
    trainer, last = train(
        tmp_path / "both", 2, 4, data=data, model=make.classifier(**model), options=options | {"alpha": 0.5}
    )
    assert all(torch.isfinite(value).all() for value in last.values())
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))


def test_evaluation_drops_the_column_and_keeps_its_labels(tmp_path):
    trainer, _ = train(tmp_path, 4, 2)
    plain = make_trainer(tmp_path / "plain", model=trainer.model, data=texts(field=False))
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_resume_is_exact(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.05}
    whole, _ = train(tmp_path / "whole", 2, 2, **settings)
    uninterrupted = told(tmp_path / "whole")
    resumed = make_trainer(
        tmp_path / "whole", trainer_class=InOrder, model=make_language_model(seed=3), data=texts(),
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.0, optim="sgd", **settings,
    )  # fmt: skip
    options = {"teacher": teacher(), "temperature": T, "alpha": ALPHA, "unlabeled_field": FIELD}
    attach(resumed, {"distill": options})
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert told(tmp_path / "whole") == uninterrupted


def test_what_cannot_work_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match="must be a column of the training data, got 'is_new'; they have input_ids"):
        train(tmp_path, 2, 4, data=texts(field=False))
    from datasets import Dataset

    with pytest.raises(ConfigError, match="must be a column of the training data"):
        train(tmp_path, 2, 4, data=Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}]))

    class Hidden(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return texts(field=False)[index]

    with pytest.raises(ConfigError, match="must be a key of every batch, got input_ids"):
        train(tmp_path, 2, 4, data=Hidden())
    numbers = [text | {"labels": torch.tensor(0.5)} for text in make.examples(8)]
    for row in numbers:
        row[FIELD] = True
    with pytest.raises(ConfigError, match="compute_loss_func"):
        one = {"teacher": make.classifier(num_labels=1, seed=9), "divergence": "logit_mse"}
        train(tmp_path, 2, 4, data=numbers, model=make.classifier(num_labels=1), options=one)
    nothing = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in make.examples(8)]

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Embedding(24, 4)

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            return {"logits": self.net(input_ids)}

    with pytest.raises(TrainingError, match=r"must have labels.*unlabeled_field"):
        train(tmp_path, 2, 4, data=nothing, model=Tokens(), options={"teacher": Tokens(), "unlabeled_field": None})


def test_a_model_with_a_loss_of_its_own_keeps_it_without_labels(make, tmp_path):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.EmbeddingBag(24, 4)

        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.net(input_ids)
            return {"logits": logits, "loss": logits.square().mean()}

    data = [{"input_ids": row["input_ids"]} for row in make.examples(8)]
    own, options = Own(), {"teacher": Own(), "unlabeled_field": None}
    found = [
        train(tmp_path / str(n), 8 // n, n, data=data, model=copy.deepcopy(own), options=options)[1] for n in (1, 4)
    ]
    assert largest_difference(*found) < 1e-6


def test_a_column_that_calls_nothing_unlabeled_is_told(tmp_path):
    train(tmp_path, 2, 4, data=texts([0] * 8))
    assert told(tmp_path)["unlabeled_field"] == "is_new marked no example as unlabeled"


def test_a_hugging_face_data_set_keeps_its_column(tmp_path):
    from datasets import Dataset

    data = Dataset.from_list(
        [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()} for row in texts()]
    )
    _, found = train(tmp_path, 2, 4, data=data.add_column("other", list(range(8))))
    assert largest_difference(found, reference()) < 1e-6


def test_two_processes_of_which_one_has_no_label(tmp_path):
    run_two_ranks(__file__, tmp_path)
    expected = reference([0, 0, 1, 1, 0, 0, 1, 1])
    for kind in ("field", "no_labels"):
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{kind}{rank}.pt", weights_only=True)
            assert largest_difference(found, expected) < 1e-6, kind


if __name__ == "__main__":
    rank, folder = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    # batches of two take turns, so that the second process has none but unlabeled examples
    flags = [0, 0, 1, 1, 0, 0, 1, 1]
    for kind, data, options in (
        ("field", texts(flags), {}),
        ("no_labels", texts(flags, labeled=False, field=False), {"unlabeled_field": None}),
    ):
        _, found = train(Path(folder) / kind, 2, 2, data=data, options=options, ddp_find_unused_parameters=False)
        torch.save(found, f"{folder}/{kind}{rank}.pt")
