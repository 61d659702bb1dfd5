"""Fine-tune a text classifier with efficient-training techniques, each switched on by one flag.

Without arguments it tells the whole story: a teacher, a student that has one label in ten, then one flag or `eff`
command more a row (distilled, a soup of a short sweep, three of four neurons removed, int8), each an ONNX file
in onnxruntime; then what training a language model holds in memory, again one flag more a row:

    python examples/quickstart/quickstart.py

With flags it trains the one student that they describe:

    python examples/quickstart/quickstart.py --prune_sparsity 0.8 --distill_teacher runs/teacher --qat_scheme int8

The data is Python's own standard library (which package is a fragment from?). Your own is as good, and so is a model:

    quickstart.py --train_file a.csv --validation_file b.csv --test_file c.csv --prune_sparsity 0.8
    quickstart.py --dataset_name ag_news --model_name_or_path bert-base-uncased --prune_sparsity 0.8
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import quickstart_data
import quickstart_report
import stdlib_fragments
import torch
from rich.console import Console
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    PrinterCallback,
    set_seed,
)
from transformers.utils import logging

from hf_eff import EffTrainer, EffTrainingArguments
from shared_core.cli import app
from shared_core.errors import ConfigError, EffError, nearest

CONSOLE = Console(width=None if sys.stdout.isatty() else 130)
RELU = {"hidden_act": "relu", "num_hidden_layers": 1}
SIZES = {
    "teacher": {**RELU, "hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 768},
    "student": {**RELU, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 1536},
}
DROPOUT = {"teacher": 0.1, "student": 0.0}
LABELS = 480  # of the story's students
SWEEP = ("2e-3", "3e-3", "4e-3", "5e-3")
DEFAULTS = {
    "output_dir": "runs",
    "num_train_epochs": 5,
    "learning_rate": 3e-3,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "save_strategy": "no",
    "logging_steps": 10,
    "use_cpu": True,
    "disable_tqdm": True,
}


@dataclass
class ScriptArguments:
    """Model and data; all other flags are those of `TrainingArguments` and of the techniques."""

    model_size: Literal["student", "teacher"] | None = field(
        default=None, metadata={"help": "Size of the encoder that is trained from scratch; student if not given."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model folder or Hub name to fine-tune instead, with its own tokenizer."}
    )
    teacher: str | None = field(
        default=None, metadata={"help": "Of the story: a folder with a teacher, which then is not trained."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A Hub data set to use instead."})
    train_file: str | None = field(default=None, metadata={"help": "CSV or JSON to train on instead."})
    validation_file: str | None = field(default=None, metadata={"help": "CSV or JSON to choose on."})
    test_file: str | None = field(default=None, metadata={"help": "CSV or JSON to report accuracy on."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    labeled: int | None = field(
        default=None,
        metadata={
            "help": "Labels to keep, drawn by --seed. The other texts are left out, or with --distill_unlabeled_field "
            "teach without labels."
        },
    )
    max_length: int = field(default=64, metadata={"help": "Tokens that are kept of a text."})
    vocab_size: int = field(default=2000, metadata={"help": "Size of the tokenizer made from the training split."})

    @property
    def names_model(self) -> bool:
        """Whether the flags say which model to train."""
        return bool(self.model_size or self.model_name_or_path)


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, Any]:
    """Return the script's arguments and the trainer's, defaults as this task wants them."""
    parser = HfArgumentParser((ScriptArguments, EffTrainingArguments), allow_abbrev=False)
    parser.set_defaults(**DEFAULTS)

    def fail(message: str) -> NoReturn:
        raise ConfigError(f"flags: {message}")

    parser.error = fail
    script, training, unknown = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
    if unknown:
        known = (flag.lstrip("-") for action in parser._actions for flag in action.option_strings)
        hint = nearest(unknown[0].lstrip("-"), known, "--")
        fail(f"{unknown[0]} is not a flag{hint if 'did you mean' in hint else '; see --help'}")
    if script.max_length < 3 or script.vocab_size < 300:
        fail(
            f"--max_length must be at least 3, --vocab_size at least 300, got {script.max_length}, {script.vocab_size}"
        )
    return script, training


def prepare(script: ScriptArguments) -> tuple[Any, Any, list[str]]:
    """Return the tokenizer, the tokenized splits and the names of the labels."""
    texts, labels = quickstart_data.load_texts(script)
    if script.model_name_or_path:
        try:
            tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"flags: --model_name_or_path must be a model folder or Hub name with a tokenizer, got {error}"
            ) from error
    else:
        train_texts = [row["text"] for row in texts["train"]]
        tokenizer = stdlib_fragments.train_tokenizer(train_texts, script.vocab_size, script.max_length)
    return tokenizer, quickstart_data.tokenize(texts, tokenizer, script.max_length), labels


def make_model(script: ScriptArguments, tokenizer: Any, labels: list[str]) -> Any:
    """Return the model to train: given by name, or a small BERT with random weights."""
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    if script.model_name_or_path:
        return AutoModelForSequenceClassification.from_pretrained(
            script.model_name_or_path, num_labels=len(labels), ignore_mismatched_sizes=True, **names
        )
    size = script.model_size or "student"
    config = BertConfig(
        **SIZES[size],
        **names,
        vocab_size=len(tokenizer),
        max_position_embeddings=script.max_length,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=DROPOUT[size],
        attention_probs_dropout_prob=0.0,
    )
    # BERT's 0.02 suits matrices of width 768; narrow ones need the usual 1/sqrt(width). Its embeddings stay at 0.02:
    # LayerNorm follows them, and those that start small turn faster, which generalizes better from so few texts.
    config.initializer_range = config.hidden_size**-0.5
    model = BertForSequenceClassification(config)
    for table in (module for module in model.modules() if isinstance(module, nn.Embedding)):
        nn.init.normal_(table.weight, std=0.02)
    return model


def training_texts(script: ScriptArguments, training: Any, texts: Any) -> Any:
    """Return the texts to train on: all, those with a label, or all with a column that tells which have none."""
    if script.labeled is None:
        return texts
    if not 0 < script.labeled <= len(texts):
        raise ConfigError(f"flags: --labeled must be in [1, {len(texts)}], got {script.labeled}")
    kept = set(random.Random(training.seed).sample(range(len(texts)), script.labeled))
    if training.distill_unlabeled_field is None:
        return texts.select(sorted(kept))
    return texts.add_column(training.distill_unlabeled_field, [index not in kept for index in range(len(texts))])


def train(script: ScriptArguments, training: Any, data: tuple[Any, Any, list[str]]) -> dict[str, Any]:
    """Fine-tune one model with the techniques that the flags switch on, save it, and tell what it was and took."""
    tokenizer, splits, labels = data
    set_seed(training.seed)
    trainer = EffTrainer(
        model=make_model(script, tokenizer, labels),
        args=training,
        train_dataset=training_texts(script, training, splits["train"]),
        eval_dataset=splits["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    seconds = time.perf_counter() - start
    trainer.save_model()
    validation = trainer.evaluate()["eval_accuracy"]
    CONSOLE.print(f"  {trainer.state.global_step} steps, validation accuracy {100 * validation:.1f} %, {seconds:.0f} s")
    return {
        "name": Path(training.output_dir).name,
        "folder": training.output_dir,
        "recipe": trainer.session.recipe.to_dict(),
        "validation": validation,
        "train_seconds": seconds,
    }


def eff(*arguments: object) -> None:
    """Run the command line, in this process: it starts faster."""
    words = [str(argument) for argument in arguments]
    CONSOLE.print(f"\neff {shlex.join(words)}", style="bold", markup=False, highlight=False, soft_wrap=True)
    app(words, standalone_mode=False)


def fresh(folder: Path) -> Path:
    """Return a folder of the story without what an earlier story left there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def story(argv: Sequence[str], script: ScriptArguments, training: Any, data: Any) -> list[dict[str, Any]]:
    """Train the teacher and the student, then add one flag or command a row; return the rows."""
    root = Path(training.output_dir)
    few = ["--labeled", str(script.labeled or LABELS)]
    taught = [*few, "--distill_teacher", script.teacher or str(root / "teacher")]
    taught += ["--distill_unlabeled_field", "unlabeled", "--distill_alpha", "0.1"]

    def run(name: str, *flags: str, added: str = "") -> dict[str, Any]:
        line = [*flags, *argv, "--output_dir", str(root / name)]
        command = f"python examples/quickstart/quickstart.py {shlex.join(line)}"
        CONSOLE.print(f"\n{command}", style="bold", markup=False, highlight=False, soft_wrap=True)
        return train(*parse(line), data) | {"added": added}

    rows = []
    if script.teacher is None:
        teacher = ["--model_size", "teacher", "--num_train_epochs", "5", "--learning_rate", "1e-3"]
        rows.append(run("teacher", *teacher, "--weight_decay", "0.3"))
    rows.append(run("student", *few, "--num_train_epochs", "15"))
    constant = ["--lr_scheduler_type", "constant_with_warmup"]
    rows.append(run("distilled", *taught, "--num_train_epochs", "3", *constant, added="--distill_teacher"))

    short = ["--num_train_epochs", "0.5", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]
    start = ["--model_name_or_path", str(root / "distilled")]
    sweep = [
        run(f"sweep-{i}", *taught, *start, *short, "--learning_rate", rate, "--data_seed", f"{training.seed}{i}")
        for i, rate in enumerate(SWEEP, start=1)
    ]
    best = max(sweep, key=lambda row: row["validation"])
    rows.append(best | {"name": "best of a sweep", "added": "--lr_scheduler_type constant"})
    fresh(root / "soup")
    eff("soup", *(row["folder"] for row in sweep), "--kind", "uniform", "--out", root / "soup")
    rows.append({"name": "soup", "folder": str(root / "soup"), "added": "eff soup"})

    start = ["--model_name_or_path", str(root / "soup"), "--num_train_epochs", "1.5", "--learning_rate", "2e-3"]
    cut = ["--prune_sparsity", "0.75", "--prune_granularity", "neuron"]
    pruned = run("pruned", *taught, *start, *cut, added="--prune_sparsity, eff shrink")
    fresh(root / "small")
    eff("shrink", pruned["folder"], "--out", root / "small")
    rows.append(pruned | {"folder": str(root / "small")})
    start = ["--model_name_or_path", str(root / "small"), "--num_train_epochs", "0.5", "--learning_rate", "5e-4"]
    rows.append(run("int8", *taught, *start, "--qat_scheme", "int8", added="--qat_scheme, eff export"))
    return rows


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Run the story, or one run if a flag describes it, and show what it measured."""
    script, training = parse(argv)
    is_story = not (script.names_model or training.recipe)
    if is_story:
        os.environ.setdefault("EFF_QUIET", "1")  # its tables tell what the receipts do; these lie in the folders
    if not is_story and training.output_dir == DEFAULTS["output_dir"]:
        training.output_dir += f"/{script.model_size or 'student'}"  # beside the folders of the story
    root = Path(training.output_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"flags: --output_dir must be a folder that can be written, got {root}: {error}") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if script.model_name_or_path is None:
        torch.set_num_threads(1)  # a second thread gains little with models so small, and loses much on a busy machine
    start = time.perf_counter()
    data = prepare(script)
    memory = quickstart_report.memory_meanwhile(fresh(root / "memory")) if is_story and not script.teacher else list
    rows = story(argv, script, training, data) if is_story else [train(script, training, data)]
    try:
        for row in rows:
            eff("export", row["folder"], "--length", script.max_length, "--out", Path(row["folder"]) / "model.onnx")
    except EffError as error:
        CONSOLE.print(f"the model is in {row['folder']}; it cannot be measured as ONNX: {error}", markup=False)
        return rows
    memory_rows = memory()  # waits for it: nothing else runs while latencies are measured
    tokenizer, splits, _ = data
    quickstart_report.measure(rows, splits["test"], tokenizer, script.max_length)
    quickstart_report.show(rows, memory_rows, root, CONSOLE)
    CONSOLE.print(f"{time.perf_counter() - start:.0f} s in all")
    if is_story:
        CONSOLE.print(quickstart_report.YOURS, markup=False, highlight=False, soft_wrap=True)
    return rows


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except EffError as error:
        sys.exit(f"quickstart: {error}")
