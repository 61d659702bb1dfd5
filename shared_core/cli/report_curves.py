"""Curves of one run or of several, over steps: a plot and a table of each kind that the runs hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shared_core.cli.run_folder import Curve, RunFolder
from shared_core.page import Cell, Section, line_plot
from shared_core.receipt_page import Block, limited, words
from shared_core.rooms import ROOMS

_CURVES = 12  # in one plot; more could not be told apart
_TIMINGS = ("_runtime", "_per_second", "_time")


@dataclass(frozen=True)
class _Kind:
    title: str
    label: str
    has: Callable[[str], bool]
    log: Mapping[str, int] | None = None


def _named(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _is_ours(name: str) -> bool:
    return name.partition("/")[0] in ROOMS


def _is_loss(name: str) -> bool:
    return "loss" in name and "/" not in name


_SHARES = _named(*(f"loss_scale/{name}" for name in ("underflow", "zero", "flushed", "grad_below_normal")))
_OWN_PLOTS = _named(
    "prune/sparsity", "ticket/left", "loss_scale/scale", "loss_scale/skipped", "loss_scale/headroom",
    "loss_scale/grad_below_subnormal", "loss_scale/update_to_weight",
)  # fmt: skip
KINDS = (
    _Kind("Loss", "loss", _is_loss),
    _Kind("Quality in validations", "metric", lambda name: name.startswith(("eval_", "val_")) and not _is_loss(name)),
    _Kind("Sparsity schedule", "share of the weights within reach", _named("prune/sparsity", "ticket/left")),
    _Kind("Loss scale", "scale", _named("loss_scale/scale"), {"y": 2}),
    _Kind(
        "Underflow", "share of the gradients' elements", lambda name: _SHARES(name) or name.endswith("below_subnormal")
    ),
    _Kind("Steps skipped", "steps", _named("loss_scale/skipped", "fp8/discarded_steps")),
    _Kind("Head-room and updates", "powers of two", _named("loss_scale/headroom", "loss_scale/update_to_weight")),
    _Kind("Loss of distillation", "loss", lambda name: name.startswith("distill/") and name.endswith("loss")),
    _Kind("Device memory", "bytes", _named("memory/allocated", "memory/largest")),
    _Kind(
        "Other figures of the techniques",
        "value",
        lambda name: _is_ours(name) and not (_SHARES(name) or _OWN_PLOTS(name) or name.startswith("distill/")),
    ),
)


def curve_sections(runs: Mapping[str, RunFolder]) -> list[Section]:
    """Return a section for each kind of curve that a run holds; a figure that never changes is in the table alone.

    Args:
        runs: Name → run; of several the names are in the legend.
    """
    sections = []
    for kind in KINDS:
        found = {
            _label(name, figure, len(runs)): curve
            for name, run in runs.items()
            for figure, curve in run.curves.items()
            if kind.has(figure) and not figure.endswith(_TIMINGS)
        }
        if found:
            sections.append(Section(kind.title, list(_blocks(kind, found))))
    return sections


def _label(run: str, figure: str, number: int) -> str:
    return figure if number == 1 else f"{run}: {figure}"


def _blocks(kind: _Kind, found: Mapping[str, Curve]) -> Iterable[Block]:
    moving = {name: curve for name, curve in found.items() if len({value for _, value in curve}) > 1}
    if moving:
        shown = dict(list(moving.items())[:_CURVES])
        told = "" if len(shown) == len(moving) else f", the first {_CURVES} of {len(moving)} curves"
        yield line_plot(shown, "step", kind.label, f"{kind.title} over the steps{told}", log=kind.log)
    rows: list[list[Cell]] = []
    for name, curve in found.items():
        values = [value for _, value in curve]
        rows.append([name, len(curve), curve[-1][0], *map(words, (values[0], values[-1], min(values), max(values)))])
    yield limited(["figure", "points", "last step", "first", "last", "lowest", "highest"], rows)
