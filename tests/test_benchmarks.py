"""The replicas of published results run, a few steps each, and what they count by hand is right."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks():
    sys.path.insert(0, str(BENCHMARKS))  # as for a script
    try:
        import replica_fp8
        import replica_loss_scaling
        import replicas

        yield {"fp8": replica_fp8, "loss_scaling": replica_loss_scaling, "replicas": replicas}
    finally:
        sys.path.remove(str(BENCHMARKS))


def verdict(rows, start):
    (row,) = [row for row in rows if row.what.startswith(start)]
    return row.met


def test_loss_scaling_replica_runs(benchmarks, monkeypatch, tmp_path):
    replica, replicas = benchmarks["loss_scaling"], benchmarks["replicas"]
    monkeypatch.setattr(replica, "FLUSH_EVERY", 2)
    file = tmp_path / "runs.jsonl"
    rows = replica.measure(True, replicas.Runs(file))
    # these need no training to hold; the others are the benchmark's business
    assert verdict(rows, "the same where fp16 holds weights and inputs exactly")
    assert verdict(rows, "200 bad steps after 3 good ones, torch.amp.GradScaler")
    assert verdict(rows, "200 bad steps after 3 good ones, dynamic with its defaults")
    assert [row.what for row in rows if row.what.startswith("fp16, ")] == [
        f"fp16, {kind}, loss x 1e-5: flushed, accuracy, paired difference to fp32, skipped at most"
        for kind in replica.KINDS
    ]
    assert len(replicas.table(rows).splitlines()) == len(rows) + 2

    monkeypatch.setattr(replica.Training, "run", None)  # a second time everything comes from the file
    assert replica.measure(True, replicas.Runs(file)) == rows


def test_fp8_replica_has_a_row_for_every_recipe(benchmarks, monkeypatch):
    replica, replicas = benchmarks["fp8"], benchmarks["replicas"]
    monkeypatch.setattr(replica, "BATCH", 2)
    monkeypatch.setattr(replica, "VALIDATION", 2)
    rows = replica.measure(True, replicas.Runs())
    told = [row.what for row in rows]
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mx", *replica.recipes()):
        assert any(what.startswith((f"{recipe}:", f"{recipe},")) for what in told), recipe
    assert told[2].startswith("FP8 without scales")


def test_the_recount_counts_what_a_lost_gradient_is(benchmarks):
    replica = benchmarks["loss_scaling"]
    model = replica.lenet(0)
    recount = replica.Recount(model)
    output = model(torch.rand(4, 1, 28, 28))
    recount.note_output(output)
    output.sum().backward()
    lost, seen = recount.counts()
    assert lost == 0  # fp32 loses nothing
    assert seen > 4 * 10
    assert not any(module._forward_hooks for module in model)


def test_unscaled_fp8_flushes_gradients_that_e5m2_cannot_hold(benchmarks):
    replica = benchmarks["fp8"]
    layer = torch.nn.Linear(16, 16)
    layer.__class__ = replica.UnscaledLinear
    x = torch.ones(1, 16, dtype=torch.bfloat16, requires_grad=True)
    (layer(x).float().sum() * 2.0**-18).backward()  # half of half the smallest e5m2
    assert not x.grad.any()
    (layer(x).float().sum() * 2.0**-16).backward()
    assert x.grad.any()


@pytest.mark.parametrize("variant", ["local", "global", "global, scores not divided"])
def test_the_scopes_of_structures_are_measured_on_shrunk_nets(benchmarks, monkeypatch, variant):
    import structured_scope as script

    monkeypatch.setattr(script, "TUNING", 1)
    torch.manual_seed(0)
    after, before, parameters, least = script.measured("MLP", 0.5, variant, script.mlp(), script.Task(0))
    assert 0 <= before <= 100
    assert 10 < after <= 100
    assert 30 < parameters < 50
    assert (least == 50) == (variant == "local")
