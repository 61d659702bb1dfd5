"""What the techniques log while training, by name: one table for bars, documents and tests."""

from __future__ import annotations

from dataclasses import dataclass


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
    "ticket/left": Figure("share of the weights within reach that is not pruned"),
    "share/values": Figure("distinct values that all shared weights together have; 0 until they are clustered"),
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
