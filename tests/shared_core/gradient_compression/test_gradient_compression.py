"""Compressed gradients on two gloo processes against the formula, in float64; bytes, resume, overflow, refusals."""

import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from two_ranks import saved_by_two_ranks

from shared_core.engine.checks import compatibility
from shared_core.engine.recipe import Recipe
from shared_core.engine.technique import Context
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.gradient_compression import CommConfig, GradientCompression, PowerSgd

SCRIPT = Path(__file__).parents[2] / "support" / "techniques" / "gradient_compression_runs.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comm")
    return saved_by_two_ranks(SCRIPT, folder)


def test_powersgd_sends_what_the_paper_says(ranks):
    first, second = (rank["hooks"]["powersgd"] for rank in ranks)
    assert first["compressed"] == ["0.weight", "2.weight", "4.weight"]
    queries, errors = {}, {}
    for number, (one, two) in enumerate(zip(first["steps"], second["steps"], strict=True)):
        for index, name in enumerate(first["names"]):
            local = [found["local"][index].double() for found in (one, two)]
            assert torch.equal(one["reduced"][index], two["reduced"][index])
            expected = (local[0] + local[1]) / 2
            if number >= 1 and name in first["compressed"]:
                shape = local[0].shape
                # Vogels et al. 2019, algorithms 1 and 2
                matrices = [g.flatten(1) + errors.get((name, rank), 0) for rank, g in enumerate(local)]
                if name not in queries:
                    generator = torch.Generator().manual_seed(3 + zlib.crc32(str(index).encode()))
                    queries[name] = torch.randn(matrices[0].shape[1], 2, generator=generator).double()
                left = torch.linalg.qr(sum(m @ queries[name] for m in matrices) / 2).Q
                queries[name] = sum(m.T @ left for m in matrices) / 2
                product = left @ queries[name].T
                errors |= {(name, rank): m - product for rank, m in enumerate(matrices)}
                expected = product.view(shape)
            torch.testing.assert_close(one["reduced"][index].double(), expected, rtol=1e-4, atol=1e-6)
    for rank, found in enumerate((first, second)):
        for name, error in found["errors"].items():
            torch.testing.assert_close(error.double(), errors[name, rank], rtol=1e-4, atol=1e-6)


def test_what_was_not_sent_yet_is_in_the_errors(ranks):
    first, second = (rank["hooks"]["powersgd"] for rank in ranks)
    for index, name in enumerate(first["names"]):
        sent = sum(found["reduced"][index] for found in first["steps"])
        wanted = sum(found["local"][index] for rank in (first, second) for found in rank["steps"]) / 2
        if name in first["errors"]:
            sent = sent + (first["errors"][name] + second["errors"][name]).view(wanted.shape) / 2
        torch.testing.assert_close(sent, wanted, rtol=1e-4, atol=1e-6)


def test_powersgd_draws_the_same_under_the_prefix_of_a_wrapper():
    weights = {"first": torch.zeros(8, 8), "second": torch.zeros(8, 8)}
    gradients = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sent = []
        for prefix in ("", "net.", "module.net."):
            named = {prefix + name: weight for name, weight in weights.items()}
            power, own = PowerSgd(named, rank=1, seed=3), gradients.clone()
            power.reduce([*weights.values()][::-1], [*own])[0].wait()
            sent.append(own)
            assert not torch.equal(*power.queries.values())
    finally:
        dist.destroy_process_group()
    assert torch.equal(sent[0], sent[1])
    assert torch.equal(sent[0], sent[2])


@pytest.mark.parametrize(("hook", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_sixteen_bits_are_a_rounded_average(ranks, hook, dtype):
    for one, two in zip(*(rank["hooks"][hook]["steps"] for rank in ranks), strict=True):
        for mine, other, reduced in zip(one["local"], two["local"], one["reduced"], strict=True):
            expected = ((mine / 2).to(dtype) + (other / 2).to(dtype)).to(dtype).float()
            tolerance = torch.finfo(dtype).eps * reduced.abs().max()
            torch.testing.assert_close(reduced, expected, rtol=0, atol=float(tolerance))
            assert torch.equal(reduced, reduced.to(dtype).float())


def test_the_receipt_counts_the_bytes(ranks):
    for rank in ranks:
        reports = {hook: found["report"] for hook, found in rank["hooks"].items()}
        weights = {"0.weight": (8, 18), "2.weight": (24, 128), "4.weight": (20, 24)}
        biases = 8 + 24 + 20
        whole = 4 * (biases + sum(rows * columns for rows, columns in weights.values()))
        thin = 4 * (biases + sum(2 * (rows + columns) for rows, columns in weights.values()))
        assert reports["bf16"]["bytes"] == reports["fp16"]["bytes"] == {"gradients": 6 * whole, "sent": 3 * whole}
        assert reports["powersgd"]["bytes_per_step"] == {"gradients": whole, "sent": thin}
        assert reports["powersgd"]["bytes"]["sent"] == whole + 5 * thin  # the first step was sent whole
        assert reports["powersgd"]["low_rank_tensors"] == 3


def test_after_the_end_gradients_are_whole_averages(ranks):
    for hook in ranks[0]["hooks"]:
        one, two = (rank["hooks"][hook]["after"] for rank in ranks)
        for mine, other, reduced in zip(one["local"], two["local"], one["reduced"], strict=True):
            torch.testing.assert_close(reduced, (mine + other) / 2, rtol=1e-6, atol=1e-8)


def test_a_resumed_run_equals_one_that_was_never_stopped_though_its_buckets_are_others(ranks):
    assert all(rank["resumed"] == {"equal": True, "report": True} for rank in ranks)


def test_overflow_discards_a_step_on_every_process_and_errors_forget_it(ranks):
    for rank in ranks:
        assert rank["overflow"] == {"kept": True, "applied": 1, "skipped": 1, "forgotten": True}


def test_what_cannot_be_right_is_refused(ranks):
    for rank in ranks:
        hook, sharded, unsynced, bare = rank["refused"]
        assert "DDP must have no other communication hook, got allreduce_hook" in hook
        assert "comm with hook powersgd cannot be combined with FSDP version 2" in sharded
        assert "gradients must be reduced in every step" in unsynced
        assert "model must be wrapped in DistributedDataParallel" in bare


def test_one_process_is_refused():
    technique = GradientCompression(CommConfig(hook="bf16"))
    with pytest.raises(CompatibilityError, match="several processes under DDP or FSDP2, got 1; start it with torchrun"):
        technique.attach(Context(model=torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("other", [{"run_environment": ["fp16"]}, {"loss_scale": {"kind": "dynamic"}}])
def test_errors_in_units_of_a_changing_scale_are_refused(other):
    around = other.pop("run_environment", [])
    with pytest.raises(CompatibilityError, match="units of the loss scale"):
        compatibility.check(Recipe.from_dict({"comm": {"hook": "powersgd"}, **other}), around)
    compatibility.check(Recipe.from_dict({"comm": {"hook": "fp16"}, **other}), around)


@pytest.mark.parametrize("options", [{"hook": "bf16", "rank": 2}, {"hook": "fp8"}, {"hook": "powersgd", "rank": 0}, {}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match="comm"):
        Recipe.from_dict({"comm": options})


def test_what_would_hardly_shrink_is_sent_whole():
    shapes = {"bias": (64,), "thin": (64, 4), "empty": (0, 8), "scalar": (), "square": (7, 7), "conv": (16, 4, 3, 3)}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert PowerSgd(parameters, rank=2, seed=0).compressed == {"conv"}
    assert PowerSgd(parameters, rank=1, seed=0).compressed == {"thin", "square", "conv"}
