"""Techniques × operators with weights: each weight is done, as a recount shows, or named with a reason."""

import copy
from types import SimpleNamespace

import pytest
import torch
from mixtures import mixture
from plain_loop import plain_step
from torch import nn
from transformers.pytorch_utils import Conv1D

from shared_core import Session
from shared_core.engine.checks.coverage import count
from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import as_rows

SIZE = 16


def tokens(*shape):
    return torch.randn(*shape, SIZE)


def image(dims):
    return torch.randn(4, SIZE, *[5] * dims)


def experts(layer):
    chosen = torch.arange(12).view(6, 2) % 4
    return layer(tokens(6), chosen, torch.full((6, 2), 0.5))


OPERATORS = {
    "linear": (lambda: nn.Linear(SIZE, SIZE), lambda layer: layer(tokens(6))),
    "Conv1D of GPT-2": (lambda: Conv1D(SIZE, SIZE), lambda layer: layer(tokens(6))),
    **{
        f"{kind.__name__}": (lambda kind=kind: kind(SIZE, SIZE, 3), lambda layer, dims=dims: layer(image(dims)))
        for kinds in ((nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        for dims, kind in enumerate(kinds, 1)
    },
    "embedding": (lambda: nn.Embedding(32, SIZE), lambda layer: layer(torch.arange(32))),
    "attention": (
        lambda: nn.MultiheadAttention(SIZE, 2), lambda layer: layer(*[tokens(6, 2)] * 3, need_weights=False)[0]
    ),
    "attention, separate": (
        lambda: nn.MultiheadAttention(SIZE, 2, kdim=32, vdim=32),
        lambda layer: layer(tokens(6, 2), *[torch.randn(5, 2, 32)] * 2)[0],
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(SIZE, 2, 32, batch_first=True), lambda layer: layer(tokens(2, 6))
    ),
    **{kind.__name__: (lambda kind=kind: kind(SIZE, SIZE, bidirectional=True), lambda layer: layer(tokens(6, 2))[0])
       for kind in (nn.RNN, nn.LSTM, nn.GRU)},
    "RNNCell": (lambda: nn.RNNCell(SIZE, SIZE), lambda layer: layer(tokens(6))),
    "LSTMCell": (lambda: nn.LSTMCell(SIZE, SIZE), lambda layer: layer(tokens(6))[0]),
    "GRUCell": (lambda: nn.GRUCell(SIZE, SIZE), lambda layer: layer(tokens(6))),
    "stacked experts": (lambda: mixture("mixtral", intermediate_size=32).model.layers[0].mlp.experts, experts),
}  # fmt: skip
CONVOLUTIONS = {name for name in OPERATORS if name.startswith("Conv") and name != "Conv1D of GPT-2"}
RECURRENT = {"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"}
ATTENTION = {"attention", "attention, separate", "encoder"}


def rows_of(run, name):
    """The weight as (outputs, inputs), one matrix, or one for each expert."""
    holder = run.net.get_submodule(name.rpartition(".")[0])
    weight = run.net.get_parameter(name).detach()
    return weight if isinstance(holder, StackedExperts) else as_rows(holder, weight)


def on_few_values(run, name):
    rows = as_rows(run.net.get_submodule(name.rpartition(".")[0]), run.net.get_parameter(name).detach())
    return all(0 < len(row.unique()) <= 15 for row in rows)


def half_gone(run, name):
    weight = run.net.get_parameter(name)
    return int((weight == 0).sum()) == weight.numel() // 2


def few_values(run, name):
    return len(run.net.get_parameter(name).unique()) == 4


def is_low_rank(run, name):
    return bool((torch.linalg.matrix_rank(rows_of(run, name), rtol=1e-4) == 2).all())


def moved_by_a_low_rank(run, name):
    moved = rows_of(run, name) - rows_of(SimpleNamespace(net=run.before), name)
    return bool((torch.linalg.matrix_rank(moved, rtol=1e-3) == 2).all())


def multiplied(run, name):
    layer = name.rpartition(".")[0]
    mine = [
        one
        for one in run.report["per_layer"]
        if one["name"].startswith((layer, name)) and one["name"] != f"{layer}.out_proj"
    ]
    return bool(mine) and all(one["emulated"]["forward"] or one["scaled_mm"]["forward"] for one in mine)


# technique → its options, the recount of a weight, and the operators that it leaves, in whole or in part
TABLE = {
    "qat": ({"weights": "int8", "weight_bits": 4, "inputs": "none"}, on_few_values, set()),
    "prune": ({"sparsity": 0.5, "scope": "local", "end": 1}, half_gone, {"embedding"}),
    "cluster": ({"bits": 2, "begin": 1, "min_size": 0}, few_values, set()),
    "low_rank": (
        {"rank": 2, "min_size": 0, "skip": [], "conv": "channel", "merge": True}, is_low_rank,
        CONVOLUTIONS - {"Conv2d"} | RECURRENT | ATTENTION | {"embedding", "stacked experts"},
    ),
    "lora": (
        {"rank": 2, "base": "none", "save": "merged"}, moved_by_a_low_rank,
        CONVOLUTIONS | RECURRENT | {"embedding"},
    ),
    "fp8": ({"recipe": "s2fp8"}, multiplied, CONVOLUTIONS | RECURRENT | {"embedding"}),
}  # fmt: skip


def trained(technique, operator):
    build, call = OPERATORS[operator]
    torch.manual_seed(0)
    net = nn.ModuleDict({"first": nn.Linear(SIZE, SIZE), "tried": build(), "rest": nn.Linear(SIZE, 2 * SIZE)})
    before = copy.deepcopy(net)
    counted = [name for weight in count(net).multiplying for name in weight.names if name.startswith("tried")]
    names = counted or ["tried.weight"]  # of an embedding
    session = Session({technique: TABLE[technique][0], "allow_partial": True})
    session.attach(net)
    optimizer = torch.optim.Adam([one for one in net.parameters() if one.requires_grad], lr=1e-2)
    session.begin([optimizer], total_steps=3)
    net.train()
    for step in range(3):
        torch.manual_seed(step)
        plain_step(session, optimizer, call(net["tried"]).square().mean() + net["rest"](net["first"](tokens(4))).mean())
    session.finish()
    receipt = session.receipt()
    return SimpleNamespace(
        net=net, before=before, names=names, session=session, report=receipt["techniques"][technique],
        coverage=receipt["coverage"][technique],
    )  # fmt: skip


@pytest.mark.parametrize("technique", TABLE)
def test_each_weight_is_done_or_named(technique):
    _, is_done, expected = TABLE[technique]
    left = set()
    for operator in OPERATORS:
        run = trained(technique, operator)
        done = {name: is_done(run, name) for name in run.names}
        if all(done.values()):
            assert not any(name in str(run.report.get("left_out")) for name in run.names), operator
            continue
        left.add(operator)
        if operator == "embedding":  # multiplies nothing
            assert run.coverage["beside"]["embeddings"], (technique, operator)
            continue
        told = [label for label in run.coverage["left"] if label.endswith(")")]
        for name in (name for name, is_one in done.items() if not is_one):
            holder = type(run.before.get_submodule(name.rpartition(".")[0])).__name__
            assert any(label.startswith(f"{holder} (") for label in told), (operator, name, run.coverage["left"])
    assert left == expected
