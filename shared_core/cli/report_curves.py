"""Curves of one run or of several, over steps: a plot and a table of each kind that the runs hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shared_core.cli.run_folder import Curve, RunFolder
from shared_core.page import Cell, Section, line_plot
from shared_core.receipt_page import Block, limited, words
from shared_core.rooms import ROOMS

_CURVES = 12  # in one plot; more could not be told apart
_SHARES = ("underflow", "zero", "flushed", "grad_below_normal", "grad_below_subnormal")
_TIMINGS = ("_runtime", "_per_second", "_time")


@dataclass(frozen=True, eq=False)
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
    return "loss" in name and not _is_ours(name)


def _is_quality(name: str) -> bool:
    return name.startswith(("eval", "val", "test")) and not _is_loss(name)


# a figure belongs to the first kind that has it; those without a label are of many scales, and are not drawn
KINDS = (
    _Kind("Loss", "loss", _is_loss),
    _Kind("Quality in validations", "metric", _is_quality),
    _Kind("Sparsity schedule", "share of the weights within reach", _named("prune/sparsity", "ticket/left")),
    _Kind("Loss scale", "scale", _named("loss_scale/scale"), {"y": 2}),
    _Kind("Underflow", "share of the gradients' elements", _named(*(f"loss_scale/{name}" for name in _SHARES))),
    _Kind("Steps skipped", "steps", _named("loss_scale/skipped", "fp8/discarded_steps")),
    _Kind("Head-room and updates", "powers of two", _named("loss_scale/headroom", "loss_scale/update_to_weight")),
    _Kind("Loss of distillation", "loss", lambda name: name.startswith("distill/") and name.endswith("loss")),
    _Kind("Device memory", "bytes", _named("memory/allocated", "memory/largest")),
    _Kind("Other figures of the techniques", "", _is_ours),
    _Kind("Other figures that the trainer logged", "", lambda name: True),
)


def curve_sections(runs: Mapping[str, RunFolder]) -> list[Section]:
    """Return a section for each kind of curve that a run holds; a figure that never changes is in the table alone.

    Args:
        runs: Name → run; of several the names are in the legend.
    """
    found: dict[_Kind, dict[str, Curve]] = {kind: {} for kind in KINDS}
    for name, run in runs.items():
        for figure, curve in run.curves.items():
            if not figure.endswith(_TIMINGS):
                kind = next(kind for kind in KINDS if kind.has(figure))
                found[kind][_label(name, figure, len(runs))] = curve
    return [Section(kind.title, list(_blocks(kind, curves))) for kind, curves in found.items() if curves]


def _label(run: str, figure: str, number: int) -> str:
    return figure if number == 1 else f"{run}: {figure}"


def _blocks(kind: _Kind, found: Mapping[str, Curve]) -> Iterable[Block]:
    moving = {name: curve for name, curve in found.items() if len({value for _, value in curve}) > 1}
    if moving and kind.label:
        shown = dict(list(moving.items())[:_CURVES])
        told = "" if len(shown) == len(moving) else f", the first {_CURVES} of {len(moving)} curves"
        yield line_plot(shown, "step", kind.label, f"{kind.title} over the steps{told}", log=kind.log)
    rows: list[list[Cell]] = []
    for name, curve in found.items():
        values = [value for _, value in curve]
        rows.append([name, len(curve), curve[-1][0], *map(words, (values[0], values[-1], min(values), max(values)))])
    yield limited(["figure", "points", "last step", "first", "last", "lowest", "highest"], rows)
