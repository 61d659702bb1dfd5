"""Run the quickstart for several seeds, and write its tables into docs/results.md.

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
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "results.md", DOCS / "quickstart.png"
BEGIN, END = "<!-- make quickstart-seeds -->\n\n", "\n<!-- end of make quickstart-seeds -->"
HEAD = """\
{date}, {processor}, one thread, onnxruntime {runtime}. {seeds} runs with one teacher: labels, weights and data order
differ. {packages} packages, {train:,} training texts of which {labels} are labeled, {test:,} test texts. ± is one
standard error over seeds. Latency is for 32 texts of 64 tokens, relative to the student.

| run | added | accuracy % | file kB | latency |
|---|---|---|---|---|
"""
EFFECTS = """
### Effects

| row | accuracy minus that of | points | in standard errors |
|---|---|---|---|
"""
MEMORY = """
## A language model in less memory

One training step of a Llama of four layers, 128 wide, that learns from a wider one: 8 x 128 tokens, a vocabulary of
8,000, measured in the same run. Weights of both, gradients and optimizer state are counted on the tensors, activations
at their peak.

| flags, each added to the ones above | MiB | |
|---|---|---|
"""


def mean(values):
    """Return the mean of one value a seed with its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def with_error(values, sign=""):
    return "{:{s}.1f} ± {:.1f}".format(*mean(values), s=sign)


def errors(values):
    """Return how many standard errors an effect is."""
    effect, error = mean(values)
    return f"{abs(effect) / error:.0f}" if abs(effect) < 100 * error else "over 100"


def effects(runs):
    """Return what each row changes in accuracy: its name, the row it is compared with, and points seed by seed."""
    pairs = [("distilled", "student"), ("soup", "best of a sweep"), ("soup", "distilled"), ("pruned", "soup")]
    for name, other in [*pairs, ("int8", "pruned")]:
        yield name, other, [100 * (run[name]["accuracy"] - run[other]["accuracy"]) for run in runs]


def tables(first, runs):
    """Return the tables for the results of the quickstart itself, and of every seed: rows by name."""
    rows = {row["name"]: row for row in first["rows"]}
    texts = stdlib_fragments.load_fragments()
    lines = [HEAD.format(
        seeds=len(runs), date=datetime.date.today(), processor=processor(), labels=quickstart.LABELS,
        packages=len(texts.packages), train=len(texts.splits["train"]), runtime=onnxruntime.__version__,
        test=rows["student"]["test_examples"],
    )]  # fmt: skip
    for name, row in rows.items():
        every = [row] if name == "teacher" else [run[name] for run in runs]
        values = [100 * one["accuracy"] for one in every]
        latency = row["latency_ms"] / rows["student"]["latency_ms"]
        if name != "teacher":
            latency = statistics.fmean(run[name]["latency_ms"] / run["student"]["latency_ms"] for run in runs)
        accuracy = with_error(values) if len(values) > 1 else f"{values[0]:.1f}"
        added = ", ".join(f"`{flag}`" for flag in row["added"].split(", ") if flag)
        size = f"{row['file_bytes'] / 1000:,.0f}"
        lines.append(f"| {' | '.join([name, added, accuracy, size, f'{latency:.2f}'])} |\n")
    lines.append(EFFECTS)
    for name, other, values in effects(runs):
        lines.append(f"| {name} | {other} | {with_error(values, sign='+')} | {errors(values)} |\n")
    lines.append(MEMORY)
    held = first["memory"]
    lines += [f"| `{row['flags']}` | {row['mib']:.1f} | {row['mib'] / held[0]['mib']:.2f} x |\n" for row in held]
    return "".join(lines)


def processor():
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def points(page):
    """Return the rows of the page's table as the picture takes them."""
    lines = page.partition(BEGIN)[2].partition("|\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines):
        accuracy, _, error = cells[2].partition(" ± ")
        yield {
            "name": cells[0], "accuracy": float(accuracy) / 100, "standard_error": float(error or 0) / 100,
            "file_bytes": 1000 * float(cells[-2].replace(",", "")), "latency_ms": float(cells[-1]),
        }  # fmt: skip


def write(text):
    """Write the tables into the page, and draw their picture."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page = f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}"
    PAGE.write_text(page, encoding="utf-8")
    quickstart_report.plot(list(points(page)), PICTURE)


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
    write(tables(first, runs))
    print(f"wrote {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
