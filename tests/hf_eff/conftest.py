"""Small models, ragged data and trainers for the tests of this floor."""

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

CLASSES = 4


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make_classifier(seed=0, **config):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16, "num_labels": CLASSES, **config,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**settings))


def make_language_model(seed=0, **config):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16,
        "attention_dropout": 0.0, **config,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings))


def make_examples(count=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 24, (count, 8), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % CLASSES} for row in tokens]


def make_texts(count=32, seed=1):
    """Sequences whose labeled part differs in length: the case where a mean of means is wrong."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 24, (count, 8), generator=generator)
    texts = []
    for index, row in enumerate(tokens):
        labels = row.clone()
        labels[2 + index % 6 :] = -100
        texts.append({"input_ids": row, "attention_mask": torch.ones_like(row), "labels": labels})
    return texts


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_arguments(folder, arguments_class=TrainingArguments, **settings):
    return arguments_class(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "max_steps": 8,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 2,
            "seed": 3,
            **settings,
        }
    )


def make_trainer(folder, *, trainer_class=Trainer, model=None, data=None, callbacks=None, extra=None, **settings):
    return trainer_class(
        model=make_classifier() if model is None else model,
        args=make_arguments(folder, **settings),
        train_dataset=make_examples() if data is None else data,
        eval_dataset=make_examples(16, seed=2) if data is None else data,
        compute_metrics=accuracy if data is None else None,
        callbacks=callbacks,
        **(extra or {}),
    )


@pytest.fixture(scope="session")
def make():
    """The functions of this file, by name."""

    class Make:
        classifier = staticmethod(make_classifier)
        language_model = staticmethod(make_language_model)
        examples = staticmethod(make_examples)
        texts = staticmethod(make_texts)
        arguments = staticmethod(make_arguments)
        trainer = staticmethod(make_trainer)

        @staticmethod
        def teacher(folder: Path):
            make_classifier(seed=9, hidden_size=32).save_pretrained(folder)
            return str(folder)

    return Make
