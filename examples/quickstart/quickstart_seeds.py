"""Run the quickstart for several seeds, and write its page: every effect beside its spread.

    python examples/quickstart/quickstart_seeds.py

The teacher and the memory are those of `runs`, which the quickstart itself fills (it is run if they are not there).
Each seed draws other labels, weights and orders. A seed that is done already is not run again.
"""

import datetime
import json
import math
import platform
import re
import statistics
from pathlib import Path

import onnxruntime
import quickstart
import quickstart_report
import stdlib_fragments

ROOT = Path("runs")
SEEDS = (42, 1, 2, 3, 4)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
HEAD = """\
# The quickstart, over seeds

Written by `make quickstart-seeds`: {seeds} runs of `make quickstart` with one teacher and other labels, weights and
orders each. {date}, {processor}, one thread.

The task: which of {packages} packages of Python's standard library is a fragment of eight lines from? {train:,}
training texts; no file is on two sides. The teacher stands for a model that somebody has who had every label. Its
students have {labels} labels, and the other texts teach them through `--distill_unlabelled_field`. Each row is the
`model.onnx` that `eff export` wrote, in onnxruntime {runtime}: accuracy on {test:,} test texts (one standard error of
these: {error:.1f} points), latency of 32 texts of 64 tokens. ± is one standard error over seeds.

![accuracy against latency and file](quickstart.png)

| run | added | accuracy % | {each} | file kB | latency |
|---{columns}|
"""
EFFECTS = """
Latency is the share of the student's. The best of the sweep is the one that validation chooses. The
distilled student and the sweep train at constant rates, where a soup pays; the pruned student's rate decays to zero.

## Effects

| row | of what | effect | in standard errors |
|---|---|---|---|
"""
MEMORY = """
## Memory of training

One step of a language model (four layers of width 128, 8 x 128 tokens, vocabulary of 8,000) that learns from a wider
one: weights with the teacher's, gradients and optimizer counted on tensors, activations at their peak. The count is the
same in every run; the loss, after more steps, is too ([story](stories.md#a-language-model-in-less-memory)).

| flags, each added to the ones above | MiB | |
|---|---|---|
"""


def mean(values):
    """Return the mean of one value a seed with its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def told(values, digits=1, sign=""):
    return "{:{s}.{d}f} ± {:.{d}f}".format(*mean(values), s=sign, d=digits)


def errors(values):
    """Return how many standard errors an effect is."""
    effect, error = mean(values)
    return f"{abs(effect) / error:.0f}" if abs(effect) < 100 * error else "over 100"


def effects(runs):
    """Return what each row changes, seed by seed: its name, of what, values, digits and the value of no effect."""

    def difference(name, other):
        return [100 * (run[name]["accuracy"] - run[other]["accuracy"]) for run in runs]

    def share(name, other, key):
        return [run[name][key] / run[other][key] for run in runs]

    yield "distilled", "accuracy beside the student, points", difference("distilled", "student"), 1, 0
    yield "soup", "accuracy beside the best of the sweep, points", difference("soup", "best of a sweep"), 1, 0
    yield "soup", "accuracy beside the distilled student, points", difference("soup", "distilled"), 1, 0
    yield "pruned", "latency, share of the soup's", share("pruned", "soup", "latency_ms"), 2, 1
    yield "pruned", "file, share of the soup's", share("pruned", "soup", "file_bytes"), 2, 1
    yield "pruned", "accuracy beside the soup, points", difference("pruned", "soup"), 1, 0
    yield "int8", "latency, share of the pruned student's", share("int8", "pruned", "latency_ms"), 2, 1
    yield "int8", "file, share of the pruned student's", share("int8", "pruned", "file_bytes"), 2, 1
    yield "int8", "accuracy beside the pruned student, points", difference("int8", "pruned"), 1, 0
    yield "int8", "latency, share of the soup's", share("int8", "soup", "latency_ms"), 2, 1
    yield "int8", "file, share of the soup's", share("int8", "soup", "file_bytes"), 2, 1


def page(first, runs):
    """Return the page for the results of the quickstart itself, and of every seed: rows by name."""
    rows = {row["name"]: row for row in first["rows"]}
    texts = stdlib_fragments.load_fragments()
    lines = [HEAD.format(
        seeds=len(runs), date=datetime.date.today(), processor=processor(), labels=quickstart.LABELS,
        packages=len(texts.packages), train=len(texts.splits["train"]), runtime=onnxruntime.__version__,
        test=rows["student"]["test_examples"], error=100 * rows["soup"]["standard_error"],
        each=" | ".join(f"seed {seed}" for seed in SEEDS), columns="|---" * (len(SEEDS) + 4),
    )]  # fmt: skip
    for name, row in rows.items():
        every = [row] if name == "teacher" else [run[name] for run in runs]
        values = [100 * one["accuracy"] for one in every]
        latency = row["latency_ms"] / rows["student"]["latency_ms"]
        if name != "teacher":
            latency = statistics.fmean(run[name]["latency_ms"] / run["student"]["latency_ms"] for run in runs)
        told_alone = [f"{value:.1f}" for value in values] if len(values) > 1 else [""] * len(SEEDS)
        accuracy = told(values) if len(values) > 1 else f"{values[0]:.1f}"
        added = f"`{row['added']}`" if row["added"] else ""
        size = f"{row['file_bytes'] / 1000:,.0f}"
        lines.append(f"| {' | '.join([name, added, accuracy, *told_alone, size, f'{latency:.2f}'])} |\n")
    lines.append(EFFECTS)
    for name, what, values, digits, none in effects(runs):
        effect = told(values, digits, "-" if none else "+")
        lines.append(f"| {name} | {what} | {effect} | {errors([value - none for value in values])} |\n")
    lines.append(MEMORY)
    held = first["memory"]
    lines += [f"| `{row['flags']}` | {row['mib']:.1f} | {row['mib'] / held[0]['mib']:.2f} x |\n" for row in held]
    return "".join(lines)


def processor():
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def middle(rows):
    """Return the mean of a row over seeds, with its standard error, as the plot takes it."""
    accuracy, error = mean([row["accuracy"] for row in rows])
    latency = statistics.fmean(row["latency_ms"] for row in rows)
    return rows[0] | {"accuracy": accuracy, "standard_error": error, "latency_ms": latency}


def read(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def main():
    if not (ROOT / "results.json").is_file():
        quickstart.main([])
    first, runs = read(ROOT), []
    for seed in SEEDS:
        folder = ROOT if seed == 42 else ROOT / f"seed-{seed}"
        if not (folder / "results.json").is_file():
            quickstart.main(["--seed", str(seed), "--teacher", str(ROOT / "teacher"), "--output_dir", str(folder)])
        runs.append({row["name"]: row for row in read(folder)["rows"]})
    PAGE.write_text(page(first, runs), encoding="utf-8")
    rows = [middle([run[name] for run in runs]) for name in runs[0] if name != "teacher"]
    quickstart_report.plot(rows, PAGE.with_suffix(".png"))
    print(f"wrote {PAGE} and {PAGE.with_suffix('.png')}")


if __name__ == "__main__":
    main()
