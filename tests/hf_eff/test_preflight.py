"""One evaluated batch at step 0 of the Hugging Face Trainer: what it finds, and that it leaves no trace."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForQuestionAnswering, Trainer, TrainerCallback

import hf_eff._trainer_hooks as hooks
from hf_eff import attach
from shared_core.errors import ConfigError

SAVING = {"save_strategy": "steps", "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, **SAVING}
GREEDY = {"soup": {"kind": "greedy", "metric": "eval_accuracy"}}
PRUNE = {"prune": {"sparsity": 0.5}}


class QuestionAnsweringTrainer(Trainer):
    """As in transformers' examples/pytorch/question-answering: labels are not evaluated on, answers are."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples, self.post_process_function = eval_examples, post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        loader = self.get_eval_dataloader(eval_dataset)
        eval_examples = self.eval_examples if eval_examples is None else eval_examples
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                loader, description="Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )  # fmt: skip
        finally:
            self.compute_metrics = compute_metrics
        predictions = self.post_process_function(eval_examples, eval_dataset, output.predictions)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.compute_metrics(predictions).items()}
        metrics.update(output.metrics)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def qa_trainer(make, folder, strict=False, **settings):
    torch.manual_seed(0)
    model = BertForQuestionAnswering(
        BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    features = [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in make.examples(16)]
    train = [{**row, "start_positions": 1, "end_positions": 2} for row in features]
    trainer = None

    def post_process(examples, features, predictions):
        if len(predictions[0]) != len(features) or (strict and len(examples) != len(features)):
            raise ValueError(f"Got {len(predictions[0])} predictions and {len(features)} features.")
        (Path(trainer.args.output_dir) / "eval_predictions.json").write_text("{}")
        return [int(row.argmax()) for row in predictions[0]]

    trainer = QuestionAnsweringTrainer(
        model=model, args=make.arguments(folder, max_steps=4, per_device_eval_batch_size=4, **settings),
        train_dataset=train, eval_dataset=features, eval_examples=list(range(16)), post_process_function=post_process,
        compute_metrics=lambda starts: {"f1": float(np.mean(starts)), "exact_match": 0.0},
    )  # fmt: skip
    return trainer


def test_question_answering_reports_no_loss_and_that_is_found_before_training(make, tmp_path):
    trainer = qa_trainer(make, tmp_path, **SAVING)
    attach(trainer, {"soup": {"kind": "greedy"}})
    with pytest.raises(ConfigError, match=r"soup: metric must be .*, got 'eval_loss'.*eval_f1"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "eval_predictions.json").exists()
    trainer = qa_trainer(make, tmp_path, **SAVING)
    session = attach(trainer, {"soup": {"kind": "greedy", "metric": "eval_f1"}})
    trainer.train()
    assert session.receipt()["techniques"]["soup"]["metric"] == "eval_f1"


def test_an_evaluation_that_fails_on_one_batch_is_told_and_training_goes_on(make, tmp_path):
    trainer = qa_trainer(make, tmp_path, strict=True, **SAVING)
    session = attach(trainer, {"soup": {"kind": "greedy", "metric": "eval_f1"}})
    trainer.train()
    (told,) = [note for note in session.receipt()["notes"] if "could not check that evaluation reports" in note]
    assert "eval_f1" in told
    assert "ValueError: Got 4 predictions and 4 features" in told


@pytest.mark.parametrize("recipe", [PRUNE, {"soup": {"kind": "uniform"}}])
def test_the_best_checkpoints_metric(make, tmp_path, recipe):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "acuracy"}
    trainer = make.trainer(tmp_path, **EVALUATING, **best)
    attach(trainer, recipe)
    with pytest.raises(
        ConfigError, match=r"hf: metric_for_best_model must be .* got 'eval_acuracy'; did you mean 'eval_a"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


class Counting(Trainer):
    calls = 0

    def prediction_step(self, *args, **kwargs):
        Counting.calls += 1
        return super().prediction_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("recipe", "settings", "batches"),
    [
        (PRUNE, SAVING, 0),
        (PRUNE, {**EVALUATING, "eval_steps": 100}, 0),
        ({"soup": {"kind": "uniform"}}, SAVING, 0),
        (GREEDY, SAVING, 1),
    ],
)
def test_one_batch_and_only_where_something_needs_it(make, tmp_path, monkeypatch, recipe, settings, batches):
    monkeypatch.setattr(Counting, "calls", 0)
    at_start = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            at_start.append(Counting.calls)

    trainer = make.trainer(
        tmp_path, trainer_class=Counting, callbacks=[Watch()], per_device_eval_batch_size=4, **settings
    )
    attach(trainer, recipe)
    trainer.train()
    assert at_start == [batches]


class Noisy(torch.utils.data.Dataset):
    """Draws from every generator, one of its own too."""

    def __init__(self, rows):
        self.rows, self.own = rows, np.random.default_rng(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = dict(self.rows[index])
        draw = self.own.random() + random.random() + np.random.random() + float(torch.rand(()))
        row["input_ids"] = (row["input_ids"] + int(draw * 10)) % 23
        return row


class Told(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_event(self, name, args, state, control, **kwargs):
        self.events.append((name, state.global_step, kwargs.get("logs") and sorted(kwargs["logs"])))


for _name in (
    "on_train_begin",
    "on_step_end",
    "on_evaluate",
    "on_prediction_step",
    "on_log",
    "on_save",
    "on_train_end",
):
    setattr(Told, _name, lambda self, *args, _name=_name, **kwargs: self.on_event(_name, *args, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, PRUNE, {"qat": {"scheme": "int8"}}, {"average": {"kind": "ema"}}, {"low_rank": {"rank": 4, "min_size": 1}}],
    ids=lambda more: next(iter(more), "soup"),
)
def test_it_leaves_no_trace(make, tmp_path, monkeypatch, more):
    def run(folder):
        told = Told()
        best = {"load_best_model_at_end": not more, "metric_for_best_model": "accuracy"}
        workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}
        trainer = make.trainer(folder, callbacks=[told], **EVALUATING, **best, **({} if more else workers))
        trainer.eval_dataset = Noisy(make.examples(16, seed=2))
        session = attach(trainer, {**more, **GREEDY})
        trainer.train()
        times = ("runtime", "per_second")
        logs = [
            {name: value for name, value in row.items() if not any(time in name for time in times)}
            for row in trainer.state.log_history
        ]
        told_by = session.receipt()["notes"]
        rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        files = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        return dict(trainer.model.state_dict()), logs, told.events, told_by, rng, files, trainer.state.best_metric

    with_it = run(tmp_path / "with")
    monkeypatch.setattr(hooks, "preflight", lambda *_: None)
    without = run(tmp_path / "without")
    for name, value in without[0].items():
        assert torch.equal(with_it[0][name], value), name
    assert with_it[1:4] == without[1:4]
    assert torch.equal(with_it[4][0], without[4][0])
    assert with_it[4][1:] == without[4][1:]
    assert with_it[5:] == without[5:]


def test_a_resumed_run_evaluates_no_batch_at_its_start(make, tmp_path, monkeypatch):
    trainer = make.trainer(tmp_path, max_steps=2, **SAVING)
    attach(trainer, GREEDY)
    trainer.train()
    trainer = make.trainer(tmp_path, max_steps=4, **SAVING)
    attach(trainer, GREEDY)
    monkeypatch.setattr("hf_eff._services._names_reported", lambda *_: pytest.fail("evaluated again"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


class Rows(IterableDataset):
    def __init__(self, rows, once=False):
        self.rows, self.left = rows, iter(rows) if once else None

    def __iter__(self):
        return self.left or iter(self.rows)


@pytest.mark.parametrize("kind", ["stream", "iterator", "several", "datasets"])
def test_evaluation_data_of_every_kind(make, tmp_path, kind):
    rows = make.examples(16, seed=2)
    data = {"stream": Rows(rows), "iterator": Rows(rows, once=True), "several": {"one": rows, "two": rows}}.get(kind)
    if kind == "datasets":
        data = pytest.importorskip("datasets").Dataset.from_list(
            [{k: v.tolist() for k, v in row.items()} for row in rows]
        )
    trainer = make.trainer(tmp_path, **SAVING)
    trainer.eval_dataset = data
    session = attach(trainer, {"soup": {"kind": "greedy", "metric": "eval_acc"}})
    if kind == "iterator":
        with pytest.raises(ConfigError):
            trainer.train()
        assert any("are an iterator" in note for note in session.notes)
        return
    name = "eval_two_accuracy" if kind == "several" else "eval_accuracy"
    with pytest.raises(ConfigError, match=f"metric must be.*{name}"):
        trainer.train()
    assert trainer.state.global_step == 0
