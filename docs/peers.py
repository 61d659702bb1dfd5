"""Draw ours and the peers from the committed results: ``python docs/peers.py`` writes ``docs/peers.svg``."""

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
COLORS = ("#0b6e4f", "#b8bec5")
RESULTS = DOCS.parent / "benchmarks" / "results" / "cpu.md"
# what, unit, peer, start of its row in the results, where in that row ours and the peer's figure stand
Line = tuple[str, str, str, str, str, str]
FIRST, NAMED = r"\| ([\d.]+) \[", r"{} [\d.]+ ms, ([\d.]+) \["
STEP: list[Line] = [
    ("pruning, gradients clipped", "×", "torch.nn.utils.prune",
     "pruning, one step at batch 16, AdamW, clipped by norm", FIRST, NAMED.format("prune")),
    ("the same, fused AdamW", "×", "torch.nn.utils.prune",
     "pruning, one step at batch 16, fused AdamW, clipped by norm", FIRST, NAMED.format("prune")),
    ("pruning, not clipped", "×", "torch.nn.utils.prune", "pruning, one step at batch 16, AdamW (", FIRST,
     NAMED.format("prune")),
    ("pruning in Lightning", "×", "ModelPruning", "pruning in Lightning", FIRST, NAMED.format("ModelPruning")),
    ("int8 QAT", "×", "torchao", "int8 quantization-aware training, one step at 256 tokens", FIRST,
     NAMED.format("torchao")),
    ("loss scaling", "×", "GradScaler", "loss scaling, one step, 0.13 M", FIRST, NAMED.format("GradScaler")),
]  # fmt: skip
MEMORY: list[Line] = [
    ("pruning: weights, masks", "× weights", "torch.nn.utils.prune", "pruning, parameters and masks",
     r"\| ([\d.]+) x parameters", r"prune ([\d.]+) x"),
    ("greedy soup of 16 models", "models", "published algorithm",
     "greedy soup of 16 x 100 M parameters, single ones scored", r"\| ([\d.]+) models",
     r"peer ([\d.]+) \("),
    ("distillation, 32,000 classes", "MiB", "textbook loss", "distillation from hidden states in chunks, 1024 tokens",
     r"\| ([\d.]+) MiB at most", r"textbook ([\d.]+),"),
]  # fmt: skip


def figures(line: Line) -> tuple[str, str]:
    """Return ours and the peer's figure from the row of the results."""
    _, _, _, start, ours, peer = line
    for row in RESULTS.read_text(encoding="utf-8").splitlines():
        if row.startswith(f"| {start}") and (mine := re.search(ours, row)) and (theirs := re.search(peer, row)):
            return f"{float(mine[1]):.3g}", f"{float(theirs[1]):.3g}"
    raise SystemExit(f"docs/peers.py: {RESULTS} has no row {start!r}")


def draw(axes: Axes, title: str, lines: list[Line], base: float | None) -> None:
    """Draw two bars per line: the part above `base`, or without it the share of the peer's figure."""
    for place, line in enumerate(reversed(lines)):
        found = figures(line)
        for offset, told, name, color in zip((0.2, -0.2), found, ("efftrain", line[2]), COLORS, strict=True):
            length = float(told) - base if base is not None else float(told) / float(found[1])
            axes.barh(place + offset, length, height=0.36, color=color)
            axes.text(length, place + offset, f" {told} {line[1]}  {name}", va="center")
    axes.set_yticks(range(len(lines)), [line[0] for line in reversed(lines)])
    axes.set_title(title, loc="left", fontsize=11)
    axes.tick_params(length=0)
    axes.xaxis.set_visible(False)
    axes.margins(x=1.15, y=0.02)
    axes.set_xlim(left=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    # a fixed salt and no date: the same figures give the same file
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 10}):
        figure = Figure(figsize=(6.4, 5.4), layout="constrained")
        steps, memory = figure.subplots(2, 1, height_ratios=[len(STEP), len(MEMORY)])
        draw(steps, "Time added to a step (plain training = 1 ×)", STEP, 1.0)
        draw(memory, "Memory", MEMORY, None)
        figure.savefig(DOCS / "peers.svg", metadata={"Date": None}, facecolor="white")
