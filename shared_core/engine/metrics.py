"""Figures of a run over its steps, as many as can be looked at: what plots of a receipt are drawn from.

What the techniques log while training, by name: one table for bars, documents and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared_core.engine.receipt import device_memory, figures

LIMIT = 200  # even: see `Series.add`


class Series:
    """Points over steps; when there are more than `LIMIT`, every other one goes, but never the first nor the latest.

    What is left depends on what was added alone, so that a resumed run ends with the points of one that was not
    stopped.

    Example:
        >>> series = Series()
        >>> for step in range(1, 1002):
        ...     series.add(step, {"prune/sparsity": step / 2000})
        >>> len(series.points), [point["step"] for point in series.points[:3]], series.points[-1]["step"]
        (126, [1, 9, 17], 1001)
    """

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self._stride, self._seen = 1, 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add what was found at a step; of a step that is there already, more or newer figures."""
        if not values:
            return
        if self.points and self.points[-1]["step"] == step:
            self.points[-1] |= values
            return
        if self.points and (self._seen - 1) % self._stride:
            self.points.pop()  # the latest until now lies between those that stay
        self.points.append({"step": step, **values})
        self._seen += 1
        if len(self.points) > LIMIT:  # an odd number, so that the latest stays
            self.points = self.points[::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the points and where they stand among all."""
        return {"points": [dict(point) for point in self.points], "stride": self._stride, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.points = [dict(point) for point in state["points"]]
        self._stride, self._seen = int(state["stride"]), int(state["seen"])


class History:
    """What the trainer logged of the techniques, and what the user's validations found, over applied steps."""

    def __init__(self) -> None:
        self._series = {"figures": Series(), "validation": Series()}

    def logged(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Add figures of the techniques, and on CUDA the bytes in use and the most so far; return the figures."""
        self._series["figures"].add(step, {name: float(value) for name, value in metrics.items()} | device_memory())
        return metrics

    def validated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the numbers of a validation."""
        self._series["validation"].add(step, figures(metrics))

    def told(self) -> dict[str, Any]:
        """Return the points for the receipt, and under ``validation`` the latest value of each figure of it."""
        points = self._series["validation"].points
        latest = {name: value for point in points for name, value in point.items() if name != "step"}
        return {"validation": latest, "history": {name: series.points for name, series in self._series.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Return all points."""
        return {name: series.state_dict() for name, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the points back, unless there are some: the best checkpoint of a run does not undo what happened."""
        for name, series in self._series.items():
            if name in state and not series.points:
                series.load_state_dict(state[name])


@dataclass(frozen=True)
class Figure:
    """What a logged number says.

    Args:
        text: In one line, for the documents.
        in_bar: Whether a progress bar shows it: what moves and is watched, two a technique at most.
        only: When it is logged, if not always.
    """

    text: str
    in_bar: bool = False
    only: str = ""


FIGURES = {
    "low_rank/layers": Figure("layers that are products of two"),
    "low_rank/parameters": Figure("share of the model's parameters that is left"),
    "lora/layers": Figure("layers with an adapter"),
    "lora/trained": Figure("parameters that are trained"),
    "primary_weights/small_updates": Figure("share of updates that 16 bit alone would have lost", in_bar=True),
    "prune/sparsity": Figure("share of the weights within reach that the masks prune", in_bar=True),
    "lottery/left": Figure("share of the weights within reach that is not pruned"),
    "cluster/values": Figure("distinct values that all shared weights together have; 0 until they are clustered"),
    "qat/active": Figure("1 while values are rounded, 0 before `begin`", in_bar=True),
    "qat/layers": Figure("layers that are quantised"),
    "qat/range_updates": Figure("how often the ranges were updated"),
    "fp8/layers": Figure("layers that multiply in FP8"),
    "fp8/discarded_steps": Figure("steps discarded for NaN or infinity", in_bar=True),
    "activations/saved": Figure("share of the activations' bytes that was saved so far"),
    "distill/soft_loss": Figure("soft term of the latest micro-batch, with T², over its positions", in_bar=True),
    "distill/task_loss": Figure("task loss of the latest micro-batch", in_bar=True),
    "distill/hidden_loss": Figure("term of hidden pairs, before its weight", only="with `hidden`"),
    "distill/attention_loss": Figure("term of attention pairs, before its weight", only="with `attention`"),
    "distill/alpha": Figure("weight of the task loss in the latest step", only="with `alpha_end`"),
    "distill/temperature": Figure("T in the latest step", only="with `temperature_end`"),
    "distill/unlabelled_share": Figure("share of unlabelled examples", only="with `unlabelled_field`"),
    "distill/peer_task_loss": Figure("mean task loss of the other students", only="with `teacher: mutual`"),
    "loss_scale/scale": Figure("the scale", in_bar=True),
    "loss_scale/skipped": Figure("steps skipped so far"),
    "loss_scale/underflow": Figure(
        "share of scaled gradients that are not zero and below the smallest normal number", in_bar=True
    ),
    "loss_scale/zero": Figure("share of scaled gradients that are zero"),
    "loss_scale/headroom": Figure("powers of two between the largest scaled gradient and overflow"),
    "loss_scale/flushed": Figure("share of nonzero activation gradients that became zero", only="with `flush_every`"),
    "loss_scale/grad_below_normal": Figure(
        "share of gradients below the format's normal numbers", only="with `histogram_every`"
    ),
    "loss_scale/grad_below_subnormal": Figure("share of gradients that it makes zero", only="with `histogram_every`"),
    "loss_scale/update_to_weight": Figure("log2 of median update over median weight", only="with `histogram_every`"),
    "dp/epsilon": Figure("epsilon spent so far", in_bar=True),
    "average/updates": Figure("weights that the average has seen"),
}
"""By technique, in the order of composition."""
SILENT = {
    "matmul": "the same in every step",
    "checkpointing": "the same in every step",
    "comm": "the same in every step",
    "soup": "it works after training, and says so",
}
"""Techniques that log nothing, and why."""


def is_in_bar(name: str) -> bool:
    """Return whether a progress bar shows a figure."""
    return name in FIGURES and FIGURES[name].in_bar


def markdown() -> str:
    """Return the table of the documents."""
    rows = ["| figure | what it says | in the bar |", "|---|---|---|"]
    for name, figure in FIGURES.items():
        only = f" ({figure.only})" if figure.only else ""
        rows.append(f"| `{name}` | {figure.text}{only} | {'yes' if figure.in_bar else ''} |")
    rows += [f"| `{key}` | nothing: {reason}; the receipt tells | |" for key, reason in SILENT.items()]
    return "\n".join(rows) + "\n"
