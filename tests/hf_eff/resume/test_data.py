"""Exact resume where data are drawn at random: masks of a collator, augmentations of a data set, streams, workers."""

import random
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)

from hf_eff import attach

RECIPE = {"matmul": {"precision": "high"}}
SPECIAL = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", "[UNK]"]


def make_model():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.3,
    )  # fmt: skip
    return BertForMaskedLM(config)


def masking(seed=None):
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{index}" for index in range(19))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        **{f"{name[1:-1].lower()}_token": name for name in SPECIAL},
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=seed)


def rows(count):
    tokens = torch.randint(5, 24, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row} for row in tokens]


class Augmented(Dataset):
    """Swaps one token by each library's generator, and one by a generator of its own."""

    def __init__(self, count):
        self.rows, self.own = rows(count), np.random.default_rng(4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]["input_ids"].clone()
        row[0], row[1] = random.randrange(5, 24), int(np.random.randint(5, 24))
        row[2], row[3] = int(torch.randint(5, 24, ())), int(self.own.integers(5, 24))
        return {"input_ids": row}


class Stream(IterableDataset):
    def __init__(self, count):
        self.data = Augmented(count)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Watching(Trainer):
    seen = ()

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*self.seen, inputs["input_ids"].clone()]
        return super().training_step(model, inputs, *args, **kwargs)


def snapshot(trainer):
    moments = [value for state in trainer.optimizer.optimizer.state.values() for value in state.values()]
    generators = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
    return [*trainer.model.state_dict().values(), *moments, *generators, torch.tensor(random.getstate()[1])]


def entries(trainer):
    """Return what was logged without times, and without the mean that `train` returns of its own steps."""
    left_out = ("runtime", "_per_second", "train_loss")
    return [
        {key: value for key, value in entry.items() if not key.endswith(left_out)}
        for entry in trainer.state.log_history
    ]


def told(trainer):
    words = ("random draws", "random states", "read ahead")
    return [note for note in trainer.eff.receipt()["notes"] if any(word in note for word in words)]


@pytest.fixture
def run(make, tmp_path):
    def run(folder, resume=None, data=None, collator=None, recipe=RECIPE, callbacks=None, **settings):
        folder = tmp_path / folder
        if resume is not None:
            shutil.copytree(resume, folder / resume.name)
        trainer = make.trainer(
            folder, trainer_class=Watching, model=make_model(), data=data or rows(24), callbacks=callbacks,
            extra={"data_collator": collator or masking()},
            **{
                "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4, "max_steps": 9,
                "logging_steps": 1, **settings,
            },
        )  # fmt: skip
        trainer.eff = attach(trainer, recipe) if recipe else None
        trainer.train(resume_from_checkpoint=True if resume else None)
        return trainer

    return run


def assert_goes_on(run, tmp_path, stops, make_data, make_collator=masking, **settings):
    whole = run("whole", data=make_data(), collator=make_collator(), **settings)
    for stop in stops:
        resumed = run(
            f"from{stop}", tmp_path / "whole" / f"checkpoint-{stop}", make_data(), make_collator(), **settings
        )
        taken = len(whole.seen) - len(resumed.seen)
        assert taken > 0
        for expected, found in zip(whole.seen[taken:], resumed.seen, strict=True):
            assert torch.equal(expected, found), stop
        for expected, found in zip(snapshot(whole), snapshot(resumed), strict=True):
            assert torch.equal(expected, found), stop
        assert entries(whole) == entries(resumed)
        assert not told(resumed), stop


def masked():
    return rows(24)


def augmented(count=24):
    return lambda: Augmented(count)


def own_masks():
    return masking(seed=5)


LIVE_ON = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
TWO = {"gradient_accumulation_steps": 2}
WORKERS = {"two": {"dataloader_num_workers": 2}, "live on": LIVE_ON,
           "three": {"dataloader_num_workers": 3, "dataloader_prefetch_factor": 3, **TWO}}  # fmt: skip
STOPS = (2, 6, 7)  # 6 batches are an epoch
GOES_ON = {
    "masks": (STOPS, masked, masking, {}),
    "masks in windows": (STOPS, masked, masking, TWO),
    "augmented": (STOPS, augmented(), masking, {}),
    "augmented in windows": (STOPS, augmented(), masking, TWO),
    "a short last batch": ((2, 5), augmented(22), masking, TWO),
    "a short last window": ((2, 3), augmented(18), masking, TWO),
    "a collator's own generator": ((4, 8), augmented(), own_masks, {}),
    "an order of the same generator": (
        (5, 6), augmented(), masking, {"accelerator_config": {"use_seedable_sampler": False}},
    ),
    "a stream": ((1, 4), lambda: Stream(48), masking, {}),
    **{
        f"workers: {name}": ((3, 8), augmented(22), own_masks, {**settings, "max_steps": 10})
        for name, settings in WORKERS.items()
    },
    **{
        f"workers of a stream: {name}": ((2,), lambda: Stream(48), masking, {**WORKERS[name], "max_steps": 5})
        for name in ("two", "live on")
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", GOES_ON)
def test_what_is_drawn_at_random_is_drawn_again(run, tmp_path, case):
    stops, data, collator, settings = GOES_ON[case]
    assert_goes_on(run, tmp_path, stops, data, collator, **settings)


@pytest.mark.slow
def test_workers_read_only_what_is_left_of_the_round(run, tmp_path):
    class Counted(Augmented):
        def __init__(self, count):
            super().__init__(count)
            self.reads = torch.zeros(count, dtype=torch.int64).share_memory_()

        def __getitem__(self, index):
            self.reads[index] += 1
            return super().__getitem__(index)

    data = Counted(40)  # 10 batches of 4
    settings = {"dataloader_num_workers": 2, "max_steps": 10}
    whole = run("whole", data=data, **settings)
    assert data.reads.tolist() == [1] * 40
    resumed = run("again", tmp_path / "whole" / "checkpoint-7", data=data, **settings)
    assert sorted(data.reads.tolist()) == [1] * 24 + [2] * 16
    assert all(map(torch.equal, snapshot(whole), snapshot(resumed)))


@pytest.mark.slow
def test_workers_of_evaluations_that_live_on(run, tmp_path):
    settings = {**LIVE_ON, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}
    whole = run("whole", data=rows(12), **settings)
    resumed = run("again", tmp_path / "whole" / "checkpoint-3", data=rows(12), **settings)
    assert all(map(torch.equal, snapshot(whole), snapshot(resumed)))


@pytest.mark.parametrize("workers", [0, 2])
def test_watching_changes_nothing(run, workers):
    watched, plain = (
        run(str(recipe), data=Augmented(24), recipe=recipe, dataloader_num_workers=workers) for recipe in (RECIPE, None)
    )
    for expected, found in zip(snapshot(plain), snapshot(watched), strict=True):
        assert torch.equal(expected, found)
    assert entries(watched) == entries(plain)


@pytest.mark.slow
def test_a_run_that_is_stopped_again_and_again(run, tmp_path):
    whole = run("whole", data=Augmented(24))
    folder = "whole"
    for stop in range(1, 9):
        resumed = run(f"from{stop}", tmp_path / folder / f"checkpoint-{stop}", Augmented(24))
        folder = f"from{stop}"
    assert all(map(torch.equal, snapshot(whole), snapshot(resumed)))
    assert entries(whole) == entries(resumed)


@pytest.mark.slow
def test_the_same_trainer_reads_the_same_loader_afterwards(run, tmp_path):
    whole = run("whole", data=Augmented(24))
    resumed = run("again", tmp_path / "whole" / "checkpoint-2", Augmented(24))
    assert "__iter__" not in vars(resumed.callback_handler.train_dataloader.base_dataloader)
    first = snapshot(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(map(torch.equal, first, snapshot(resumed)))
    assert all(map(torch.equal, first, snapshot(whole)))


def test_somebody_else_may_iterate_the_loader(run, tmp_path):
    class Peeks(TrainerCallback):
        def on_step_begin(self, args, state, control, train_dataloader=None, **kwargs):
            random_state = torch.get_rng_state()
            next(iter(train_dataloader))
            torch.set_rng_state(random_state)

    settings = {"data": rows(24), "callbacks": [Peeks()]}
    whole = run("whole", **settings)
    resumed = run("again", tmp_path / "whole" / "checkpoint-2", **settings)
    assert all(map(torch.equal, snapshot(whole), snapshot(resumed)))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"data": rows(28)}, "length was 6, now 7"),
        ({"gradient_accumulation_steps": 2}, "accumulate was 1, now 2"),
        ({"data": rows(24)[::-1]}, "read ahead"),
        ({"ignore_data_skip": True}, None),
        ({}, None),
    ],
    ids=["length", "window", "rows", "not skipped", "the same"],
)
def test_what_cannot_be_drawn_again_is_told(run, tmp_path, change, part):
    run("whole")
    resumed = run("again", tmp_path / "whole" / "checkpoint-2", **change)
    assert [part in note for note in told(resumed)] == ([True] if part else [])
    assert resumed.state.global_step == 9


# --- the end of an epoch


class Told(TrainerCallback):
    """Keeps the events of an epoch's end."""

    def __init__(self):
        self.events = []

    def on_epoch_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step, state.epoch))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluated", state.global_step, metrics["eval_loss"]))

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.global_step, state.epoch))


@pytest.mark.parametrize(
    ("save", "stop"),
    [*(("steps", stop) for stop in (3, 4, 6, 8)), *(("epoch", stop) for stop in (3, 8)), ("best", 3)],
)
def test_the_end_of_an_epoch_is_caught_up_on(run, tmp_path, save, stop):
    # 3 steps are an epoch, and the run ends within the third
    settings = {
        "eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": save, "max_steps": 8, "data": rows(12),
        "load_best_model_at_end": save == "best", "metric_for_best_model": "eval_loss", "learning_rate": 1e-3,
    }  # fmt: skip
    events = [Told(), Told()]
    whole = run("whole", callbacks=events[:1], **settings)
    resumed = run("again", tmp_path / "whole" / f"checkpoint-{stop}", callbacks=events[1:], **settings)
    assert entries(whole) == entries(resumed)
    assert all(map(torch.equal, snapshot(whole), snapshot(resumed)))
    assert (whole.state.best_metric, whole.state.best_global_step) == (
        resumed.state.best_metric, resumed.state.best_global_step,
    )  # fmt: skip
    if stop < 8:
        found = events[1].events[stop % 3 > 0 :]  # within an epoch, the trainer begins it anew
        assert found == events[0].events[-len(found) :]


def test_a_run_that_an_evaluation_that_was_due_stops(run, tmp_path):
    from transformers import EarlyStoppingCallback

    settings = {
        "eval_strategy": "epoch", "metric_for_best_model": "eval_loss",
        "greater_is_better": True, "data": rows(12), "logging_steps": 50,
    }  # fmt: skip
    runs = [
        run(name, resume, callbacks=[EarlyStoppingCallback(early_stopping_patience=1)], **settings)
        for name, resume in (("whole", None), ("again", tmp_path / "whole" / "checkpoint-3"))
    ]
    assert runs[0].state.global_step == runs[1].state.global_step
    assert entries(runs[0]) == entries(runs[1])
