"""Try every technique in every script that TRL publishes, write docs/integrations.md's table.

``python benchmarks/published_scripts.py [WORD ...]``: the cells not yet tried, or again those whose names hold a word.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Runs, arguments_of_cells, device, today, write_between
from published_recounts import RECOUNTS, RecountError, Saved

PAGE = Path(__file__).resolve().parents[1] / "docs" / "integrations.md"
LIBRARIES = ("torch", "transformers", "trl", "peft")
FILE = RESULTS / "published_scripts.jsonl"
ROWS, WORDS, STEPS, TOKENS = 8, 96, 6, 8
COMMAND = "make scripts"
COMMON = {
    "max_steps": STEPS, "use_cpu": "true", "report_to": "none", "bf16": "false", "gradient_checkpointing": "false",
    "learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": "true",
    "per_device_train_batch_size": ROWS, "seed": 3,
}  # fmt: skip
SFT: dict[str, Any] = {"model": "student", "data": "texts"}
TEACHER = {"teacher_model_name_or_path": "teacher"}
SCRIPTS: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "sft, packing": {**SFT, "packing": "true", "max_length": 64, "per_device_train_batch_size": 2},
    "dpo": {"model": "student", "data": "pairs"},
    "kto": {"model": "student", "data": "rated"},
    "reward": {"model": "scorer", "data": "answers"},
    "grpo": {
        "model": "student", "data": "prompts", "num_generations": 2, "max_completion_length": 4,
        "reward_funcs": "published_scripts.distinct_words",
    },
    "distillation": {"model": "student", "data": "prompts", "max_completion_length": 4, **TEACHER},
    "gkd": {"model": "student", "data": "chats", "max_new_tokens": 4, "lmbda": 0.5, **TEACHER},
}  # fmt: skip
PRUNE = {"prune_sparsity": 0.5, "prune_schedule": "one_shot", "prune_begin": 2}
QAT = {"qat_scheme": "int8"}
DISTILL = {"distill_teacher": "teacher", "distill_temperature": 2.0}
LORA = {"lora_rank": 4, "lora_save": "merged"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "prune": PRUNE,
    "qat": QAT,
    "distill": DISTILL,
    "average": {"average_kind": "swa", "average_begin": 1, "save_strategy": "steps", "save_steps": 1},
    "soup": {"soup_kind": "uniform", "save_strategy": "steps", "save_steps": 2},
    "lora": LORA,
    "checkpointing": {"checkpointing_policy": "block"},
    "fp8": {"fp8_recipe": "tensorwise"},
    "prune, qat": {**PRUNE, **QAT},
    "prune, distill": {**PRUNE, **DISTILL},
    "lora, qat": {**LORA, **QAT},
}
PLAIN = "without"


def distinct_words(completions: Sequence[str], **_: Any) -> list[float]:
    """Return a reward for GRPO."""
    return [float(len(set(completion.split()))) for completion in completions]


def make_inputs(folder: Path) -> None:
    """Save models of two layers, a tokenizer of one token a word, and data sets of each script's form."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    words = {"<pad>": 0, **{str(index): index for index in range(1, WORDS)}}
    whole = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="1", padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    for seed, (name, kind, width) in enumerate(
        [
            ("student", LlamaForCausalLM, 64), ("teacher", LlamaForCausalLM, 96),
            ("scorer", LlamaForSequenceClassification, 64), ("scoring_teacher", LlamaForSequenceClassification, 96),
        ]
    ):  # fmt: skip
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=width, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=0, eos_token_id=1,
            bos_token_id=None, initializer_range=0.2,
        )  # fmt: skip
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def texts(seed: int) -> list[str]:
        drawn = torch.randint(2, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed)).tolist()
        return ["".join(f"{token} " for token in row[: TOKENS - index % 4]) for index, row in enumerate(drawn)]

    asked, good, bad = texts(0), texts(1), texts(2)
    columns: dict[str, dict[str, list[Any]]] = {
        "texts": {"text": asked},
        "pairs": {"prompt": asked, "chosen": good, "rejected": bad},
        "rated": {"prompt": asked, "completion": good, "label": [True, False] * (ROWS // 2)},
        "answers": {"chosen": good, "rejected": bad},
        "prompts": {"prompt": asked},
        "chats": {
            "messages": [
                [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
                for one, other in zip(asked, good, strict=True)
            ]
        },
    }
    for name, table in columns.items():
        (folder / name).mkdir()
        rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
        (folder / name / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def command(script: str, technique: str, out: str) -> list[str]:
    """Return the script and its flags, the technique's among them."""
    own = dict(SCRIPTS[script])
    ours = dict(TECHNIQUES.get(technique, {}))
    if script == "reward" and "distill_teacher" in ours:
        ours |= {"distill_teacher": "scoring_teacher", "distill_divergence": "logit_mse"}
    given = {"model_name_or_path": own.pop("model"), "dataset_name": own.pop("data"), "output_dir": out}
    name = script.partition(",")[0]
    module = str(Path(__file__).with_name("published_gkd.py")) if name == "gkd" else f"trl.scripts.{name}"
    return [
        module,
        *(part for key, value in {**COMMON, **given, **own, **ours}.items() for part in (f"--{key}", str(value))),
    ]


def run_cell(folder: Path, script: str, technique: str) -> None:
    """Run a cell in this process; its output goes into the cell's folder."""
    out = folder / f"{script} {technique}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT), descriptor)
    arguments = command(script, technique, str(out))
    if technique != PLAIN:
        from shared_core.cli import main as eff

        sys.argv = ["eff", "run", *arguments]
        return eff()
    sys.argv = arguments
    if arguments[0].endswith(".py"):
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return None


def result(folder: Path, script: str, technique: str, code: int | None) -> dict[str, Any]:
    """Return what became of a cell: works, with what was recounted; refused, with the line; fails, with the reason."""
    out = folder / f"{script} {technique}"
    errors, trained = (out / "stderr").read_text().strip(), "{'loss'" in (out / "stdout").read_text()
    last = errors.rpartition("\n")[2]
    if code == 2 and last.startswith("error: ") and "Traceback" not in errors and not trained:
        return {"status": "refused", "detail": last.removeprefix("error: ")}
    if code:
        return {"status": "fails", "detail": last}
    model = SCRIPTS[script]["model"]
    teacher = {"student": "teacher", "scorer": "scoring_teacher"}[model]
    try:
        saved = Saved(out, folder / f"{script} {PLAIN}", folder / model, folder / teacher)
        text = "; ".join(recount(saved) for recount in RECOUNTS[technique][1])
    except (RecountError, OSError) as error:
        return {"status": "fails", "detail": f"the saved files: {error}"}
    return {"status": "works", "detail": text}


def run_cells(folder: Path, cells: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, int | None, float]]:
    """Run cells in forked processes, which share the imports; yield each with its exit code when it has ended."""
    import_all()
    fork = multiprocessing.get_context("fork")
    waiting, running = list(cells), {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            cell = waiting.pop(0)
            process = fork.Process(target=run_cell, args=(folder, *cell))
            process.start()
            running[process.sentinel] = cell, process, time.monotonic()
        for sentinel in connection.wait(list(running)):
            cell, process, begun = running.pop(sentinel)
            process.join()
            yield *cell, process.exitcode, time.monotonic() - begun


def import_all() -> None:
    """Import what all cells need."""
    importlib.import_module("hf_eff")
    importlib.import_module("shared_core.cli")
    importlib.import_module("trl.experimental.gkd").GKDTrainer  # noqa: B018
    trl = importlib.import_module("trl")
    for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "Distillation"):
        getattr(trl, f"{name}Trainer")
    importlib.import_module("transformers.utils.logging").disable_progress_bar()


def page_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, one row a technique, with the refusals below it."""
    refusals: list[str] = []

    def exception(script: str, technique: str) -> str:
        found = results.get(f"{script} x {technique}", {"status": "not tried"})
        if found["status"] != "refused":
            return "" if found["status"] == "works" else f"{script}: **{found['status']}** {found.get('detail', '')}"
        reason = re.sub(r"got \w+, (whose|which)", r"got a trainer \1", found["detail"])
        if reason not in refusals:
            refusals.append(reason)
        return f"{script} ({refusals.index(reason) + 1})"

    lines = ["| technique | refused in | recounted |", "|---|---|---|"]
    for technique in TECHNIQUES:
        exceptions = ", ".join(filter(None, (exception(script, technique) for script in SCRIPTS)))
        lines.append(f"| {technique} | {exceptions or 'none'} | {RECOUNTS[technique][0]} |")
    table = "\n".join(lines)
    where = "; ".join(
        sorted({f"{found['date']}, {found['versions']}, {found['device']}" for found in results.values()})
    )
    text = "\n".join(f"{number}. `error: {line}`" for number, line in enumerate(refusals, start=1))
    return f"{where}.\n\n{table}\n\n{text}\n"


def main() -> int:
    """Return 1 if a cell neither works nor is refused at the start."""
    arguments = arguments_of_cells(__doc__)
    torch.set_num_threads(1)
    names = {f"{script} x {technique}": (script, technique) for technique in TECHNIQUES for script in SCRIPTS}
    runs = Runs(FILE)
    again = [name for name in names if any(word in name for word in arguments.words)]
    if again or all(name in runs for name in names):
        runs.forget(again or None)
    cells = [names[name] for name in again or names if name not in runs]
    about = {
        "date": today(),
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        "device": device(),
    }
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="eff-scripts-"))
    folder.mkdir(exist_ok=True)
    # read by libraries when they are imported, below; a terminal so wide breaks no line
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    make_inputs(folder)
    plain = [(script, PLAIN) for script in SCRIPTS if any(cell[0] == script for cell in cells)]
    for script, technique, code, seconds in run_cells(folder, [*plain, *cells]):
        if technique == PLAIN:
            if code:
                raise RuntimeError(
                    f"{script} fails without a technique: {(folder / f'{script} {PLAIN}/stderr').read_text()}"
                )
            continue
        found = result(folder, script, technique, code) | {"seconds": round(seconds, 1)} | about
        runs.of(f"{script} x {technique}", lambda found=found: found)
    if not arguments.keep:
        shutil.rmtree(folder)
    results = {name: runs.of(name, dict) for name in names if name in runs}
    write_between(PAGE, COMMAND, page_text(results))
    failed = [name for name, found in results.items() if found["status"] == "fails"]
    print(f"{len(results)} cells, {len(failed)} fail{': ' if failed else ''}{'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
