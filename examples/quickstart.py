"""Fine-tune a text classifier with efficient-training techniques, each switched on by one flag.

Without arguments it tells the whole story: a teacher, then students of one seed that each add one flag (dense, pruned,
distilled, quantised), then the soup of the last student's checkpoints, in one table and one plot:

    python examples/quickstart.py

With flags it trains the one student that they describe:

    python examples/quickstart.py --prune_sparsity 0.8 --distill_teacher runs/teacher --qat_scheme int8

The data is Python's own standard library (which package is a fragment from?). Your own is as good, and so is a model:

    python examples/quickstart.py --train_file a.csv --validation_file b.csv --test_file c.csv --prune_sparsity 0.8
    python examples/quickstart.py --dataset_name ag_news --model_name_or_path bert-base-uncased --prune_sparsity 0.8
"""

from __future__ import annotations

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
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging

from hf_eff import EffTrainer, EffTrainingArguments
from shared_core.errors import ConfigError, EffError, nearest

CONSOLE = Console(width=None if sys.stdout.isatty() else 130)
SIZES = {
    "teacher": {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 384},
    "student": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 512},
}
DROPOUT = {"teacher": 0.1, "student": 0.0}
DEFAULTS = {
    "output_dir": "runs",
    "num_train_epochs": 5,
    "learning_rate": 3e-3,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "eval_strategy": "epoch",
    "save_steps": 0.1,
    "logging_steps": 10,
    "use_cpu": True,
    "disable_tqdm": True,
}


@dataclass
class ScriptArguments:
    """What to train on which data; all other flags are those of `TrainingArguments` and of the techniques."""

    model_size: Literal["student", "teacher"] | None = field(
        default=None, metadata={"help": "Size of the encoder that is trained from scratch; student if not given."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model folder or Hub name to fine-tune instead, with its own tokenizer."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A Hub data set to use instead."})
    train_file: str | None = field(default=None, metadata={"help": "CSV or JSON to train on instead."})
    validation_file: str | None = field(default=None, metadata={"help": "CSV or JSON to choose on."})
    test_file: str | None = field(default=None, metadata={"help": "CSV or JSON to report accuracy on."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    max_length: int = field(default=96, metadata={"help": "Tokens that are kept of a text."})
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
        hint = nearest(unknown[0].lstrip("-"), known)
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
    # LayerNorm follows them, and those that start small turn faster, which generalises better from so few texts.
    config.initializer_range = config.hidden_size**-0.5
    model = BertForSequenceClassification(config)
    for table in (module for module in model.modules() if isinstance(module, nn.Embedding)):
        nn.init.normal_(table.weight, std=0.02)
    return model


class Progress(TrainerCallback):
    """Prints one line an epoch."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        logged: dict[str, float] = {}
        for entry in state.log_history:
            logged.update(entry)
        sparsity = f", sparsity {logged['prune/sparsity']:.3f}" if "prune/sparsity" in logged else ""
        CONSOLE.print(
            f"  epoch {state.epoch:.3g} of {args.num_train_epochs:g}: loss {logged.get('loss', float('nan')):.3f}, "
            f"validation accuracy {100 * metrics['eval_accuracy']:.1f} %{sparsity}"
        )


def train(script: ScriptArguments, training: Any, data: tuple[Any, Any, list[str]]) -> dict[str, Any]:
    """Fine-tune one model with the techniques that the flags switch on, save it, and return its measured row."""
    tokenizer, splits, labels = data
    set_seed(training.seed)
    trainer = EffTrainer(
        model=make_model(script, tokenizer, labels),
        args=training,
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    start, cpu_start = time.perf_counter(), time.process_time()
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    trainer.save_model()
    folder = Path(training.output_dir)
    return {
        "name": folder.name,
        "recipe": trainer.session.recipe.to_dict(),
        **quickstart_report.measure(trainer, splits["test"], folder),
        "train_seconds": seconds,
        "train_cpu_seconds": cpu_seconds,
        "soup": trainer.session.receipt()["techniques"].get("soup", {}),
        "log": trainer.state.log_history,
    }


def story(argv: Sequence[str], script: ScriptArguments, training: Any) -> list[dict[str, Any]]:
    """Train the teacher, the students that each add one flag, and the soup; return their rows."""
    root = Path(training.output_dir)
    longer = ["--num_train_epochs", "8", "--learning_rate", "7e-4", "--weight_decay", "0.3"]
    prune, distill = ["--prune_sparsity", "0.8"], ["--distill_teacher", str(root / "teacher")]
    qat = ["--qat_scheme", "int8"]
    soup = ["--soup_kind", "greedy", "--soup_metric", "eval_accuracy"]
    data = prepare(script)
    rows: list[dict[str, Any]] = []
    for name, flags in (
        ("teacher", ["--model_size", "teacher", *longer]),
        ("dense", ["--model_size", "student"]),
        ("pruned", ["--model_size", "student", *prune]),
        ("distilled", ["--model_size", "student", *prune, *distill]),
        ("quantised", ["--model_size", "student", *prune, *distill, *qat]),
        ("soup", ["--model_size", "student", *prune, *distill, *qat, *soup]),
    ):
        line = [*argv, *flags, "--output_dir", str(root / name)]
        copy = ""
        if name == "soup":
            # The same run with one more flag goes on from the end of the quantised one and averages its checkpoints.
            shutil.copytree(root / "quantised", root / "soup", dirs_exist_ok=True)
            copy = f"cp -r {root / 'quantised'} {root / 'soup'} && "
            line += ["--resume_from_checkpoint", str(root / "soup" / f"checkpoint-{rows[-1]['log'][-1]['step']}")]
        command = f"{copy}python examples/quickstart.py {shlex.join(line)}"
        CONSOLE.print(f"\n{command}", style="bold", markup=False, highlight=False, soft_wrap=True)
        rows.append(train(*parse(line), data))
    return rows


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Run the story, or one run if a flag describes it, and show what it measured."""
    script, training = parse(argv)
    is_story = not (script.names_model or training.recipe)
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
    rows = story(argv, script, training) if is_story else [train(script, training, prepare(script))]
    quickstart_report.show(rows, root, CONSOLE)
    CONSOLE.print(f"{time.perf_counter() - start:.0f} s in all")
    return rows


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except EffError as error:
        sys.exit(f"quickstart: {error}")
