"""Every technique tells its report in sentences, without the names of its keys."""

import re

import pytest
import torch
from promise_table import NUM_STEPS, TECHNIQUES, make_net, train_examples

from shared_core.engine.receipt import Receipt, sentences
from shared_core.engine.registry import REGISTRY
from shared_core.front_ends.bare_loop import training

# Their reports need a trainer, or several processes.
MADE = {
    "dp": {
        "epsilon": 7.91, "delta": 1e-5, "accountant": "rdp", "sample_rate": 0.01, "examples": 6000, "steps": 120,
        "noise_multiplier": 1.02, "max_grad_norm": 1.0,
    },
    "soup": {"kind": "greedy", "metric": "eval_loss", "candidates": 4, "best_single": 0.31, "score": 0.29,
             "ingredients": ["a", "b"]},
    "comm": {"hook": "bf16", "processes": 2, "ratio": 2.0, "bytes_per_step": {"gradients": 1000000, "sent": 500000}},
}  # fmt: skip
NUMBERS = {
    "prune": "60.0 % of 4,292 weights", "qat": "3 layers with int8", "cluster": "8 values", "distill": "64 positions",
    "average": "4 updates", "dp": "epsilon 7.91", "soup": "2 of 4 checkpoints", "comm": "500.0 kB",
}  # fmt: skip


def report_of(key):
    if key in MADE:
        return MADE[key]
    net = make_net(recipe=(key,))
    data = train_examples()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with training(TECHNIQUES[key].recipe(), net, optimizer, total_steps=NUM_STEPS) as loop:
        for step in range(NUM_STEPS):
            batch = [data[(step * 8 + i) % len(data)] for i in range(8)]
            with loop.forward():
                found = net(torch.stack([one["x"] for one in batch]), torch.stack([one["labels"] for one in batch]))
            loop.backward(found["loss"])
            loop.step()
            loop.zero_grad()
    return loop.session.receipt()["techniques"][key]


@pytest.mark.parametrize("key", [key for key in REGISTRY if key in TECHNIQUES or key in MADE])
def test_a_report_is_told_in_sentences(key):
    report = report_of(key)
    told = sentences(key, report)
    assert told == REGISTRY[key].technique_class.summary(report)
    assert NUMBERS.get(key, "") in " ".join(told)
    for sentence in told:
        assert re.match(r"[A-Z0-9]", sentence), sentence
        assert sentence.endswith("."), sentence
    names = {name for name in report if "_" in name}
    assert not names & set(re.findall(r"\w+", " ".join(told)))


def test_all_of_ours_have_sentences():
    assert {*TECHNIQUES, *MADE} >= {key for key, one in REGISTRY.items() if one.package.startswith("shared_core.")}


def test_a_report_of_another_version_is_told_by_its_names():
    assert sentences("prune", {"sparsity": 0.5}) == ["sparsity 0.5"]


def test_a_receipt_takes_the_width_that_it_is_given():
    values = {"steps": {"applied": 1, "skipped": 0}, "seconds": {}, "notes": []}
    made = Receipt(values | {"techniques": {"dp": MADE["dp"]}})
    for width in (60, 100):
        assert max(map(len, made.text(width).splitlines())) <= width
