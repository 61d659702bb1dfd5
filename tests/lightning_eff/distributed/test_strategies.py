"""`eff_fsdp` and `eff_ddp` on two gloo processes, and runs that go on with another number of processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp2_runs import AVERAGE, PRUNE, weights
from lightning_blocks import LOW_RANK, module_class, train
from lightning_world import BOTH, make_trainer
from torch import nn
from two_ranks import ENVIRONMENT, run_two_ranks

import lightning_eff.lightning
import lightning_eff.pytorch
from lightning_eff._fsdp2 import Sharding, repeated_blocks
from shared_core.errors import CompatibilityError, ConfigError

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "lightning_strategies.py"
BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    alone = weights(train(folder / "one", {**PRUNE, **AVERAGE})[2])
    run_two_ranks(SCRIPT, folder)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    return {"folder": folder, "alone": alone, "tensors": ranks[0]["tensors"], "ranks": ranks, "told": ranks[0]["told"]}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_both_processes_hold_the_same(runs):
    first, second = (rank["tensors"] for rank in runs["ranks"])
    for run in first.keys() - {"predicted"}:
        assert all(torch.equal(value, second[run][name]) for name, value in first[run].items()), run


def test_a_plain_module_is_sharded_in_its_repeated_blocks_and_trains_what_one_process_does(runs):
    told = runs["told"]["fsdp"]
    assert told["units"] == BLOCKS
    assert told["held"] <= told["weights"] / 2 + 64
    assert told["in_step"] == [True] * 6  # a block that has not run yet is not gathered
    assert told["validated"] == 6
    assert_close(runs["tensors"]["fsdp"], runs["alone"])
    assert runs["tensors"]["predicted"].shape == (24, 4)


def test_a_sharded_run_resumes_from_weights_in_training_though_the_file_holds_the_average(runs):
    found = runs["tensors"]
    assert all(torch.equal(value, found["fsdp resumed"][name]) for name, value in found["fsdp"].items())
    saved = torch.load(runs["folder"] / "fsdp" / "5.ckpt", weights_only=True)["state_dict"]
    module_class(BOTH[0])().load_state_dict(saved)


@pytest.mark.parametrize(
    ("namespace", "units", "ahead", "behind"),
    [
        (BOTH[0], BLOCKS, [0, 2, 1, 0], [0, 0, 1, 1]),
        (BOTH[1], ["", "blocks.0", "blocks.0.up", "blocks.1.up", "blocks.2.up"], [0, 2, 2, 1, 0], [0, 0, 1, 1, 1]),
    ],
)
def test_blocks_precision_and_prefetching_arrive(runs, namespace, units, ahead, behind):
    told = runs["told"][namespace]
    assert told == {"units": units, "ahead": ahead, "behind": behind, "dtype": "torch.bfloat16", "sharded": True}
    assert all(value.dtype == torch.float32 for value in runs["tensors"][f"mixed {namespace}"].values())


def test_factors_for_the_inputs_seen_train_sharded_and_resume(runs, tmp_path):
    # batches are looked at through the root, whose own layers are gathered there alone
    found = runs["tensors"]
    assert_close(found["factors"], weights(train(tmp_path, LOW_RANK, save=False)[2]))
    assert all(torch.equal(value, found["factors resumed"][name]) for name, value in found["factors"].items())


def test_eff_ddp_trains_what_one_process_does(runs):
    assert_close(runs["tensors"]["ddp"], runs["alone"])


def test_compression_by_a_strategys_name_is_that_by_a_callback(runs):
    by_name, by_callback = runs["tensors"]["bf16"], runs["tensors"]["stock"]
    assert all(torch.equal(value, by_callback[name]) for name, value in by_name.items())
    assert runs["told"]["bf16"] == runs["told"]["stock"]
    assert runs["told"]["bf16"]["bytes"] == {"gradients": 6 * 4 * 13252, "sent": 6 * 2 * 13252}
    assert runs["told"]["powersgd"]["ratio"] > 10


def test_powersgd_resumes_exactly(runs):
    found = runs["tensors"]
    assert all(torch.equal(value, found["powersgd resumed"][name]) for name, value in found["powersgd"].items())


def test_a_hook_of_the_users_own_is_called_on_a_cpu(runs):
    assert runs["told"]["called"] == 6


def test_two_processes_go_on_from_what_one_saved(runs):
    assert runs["told"]["grown"] == 6
    assert_close(runs["tensors"]["grown"], runs["alone"])


def test_one_process_goes_on_from_what_two_saved(runs, tmp_path):
    _, callback, module = train(tmp_path, {**PRUNE, **AVERAGE}, ckpt_path=runs["folder"] / "ddp" / "2.ckpt")
    assert callback.session.step == 6
    assert any("saved by 2 processes and resumed by 1" in note for note in callback.receipt["notes"])
    assert_close(weights(module), runs["alone"])


def test_what_cannot_be_right_is_refused(runs):
    itself, by_hand, pattern, comm, merge, hook, twice = runs["told"]["refused"]
    assert "module must not shard itself, but blocks.0 is sharded" in itself
    assert "must be automatic" in by_hand
    assert "blocks pattern 'Blok' matches no module; did you mean 'Block'?" in pattern
    assert "comm with hook powersgd cannot be combined with FSDP version 2" in comm
    assert "low_rank with merge cannot be combined with FSDP version 2" in merge
    assert "DDP must have no other communication hook, got fp16_compress_hook" in hook
    assert "comm must be given once, got it in a callback and in EffDDPStrategy" in twice


@pytest.mark.parametrize("options", [{"param_dtype": "bf16"}, {"forward_prefetch": -1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match="eff_fsdp"):
        Sharding(**options)


def test_a_block_that_shares_a_weight_stays_with_the_root():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    net = nn.ModuleDict({"layers": layers, "head": nn.Linear(4, 4)})
    net["head"].weight = layers[1].weight
    assert repeated_blocks(net) == [layers[0], layers[2]]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())) == []


def test_one_process_cannot_compress(tmp_path):
    with pytest.raises(CompatibilityError, match="several processes under DDP or FSDP2, got 1"):
        train(tmp_path, {"comm": {"hook": "bf16"}}, save=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports", ["lightning_eff, pytorch_lightning as pl", "pytorch_lightning as pl, lightning_eff"]
)
def test_the_names_are_registered_in_either_order_of_imports(imports):
    code = (
        f"import {imports}; from pytorch_lightning.strategies import StrategyRegistry as registry; "
        "assert {'eff_ddp', 'eff_ddp_powersgd', 'eff_fsdp'} <= set(registry.available_strategies()); "
        "strategy = pl.Trainer(strategy='eff_ddp_fp16', accelerator='cpu', logger=False).strategy; "
        "print(type(strategy).__module__, strategy.eff_recipe['comm'].hook)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.split() == ["lightning_eff.pytorch", "fp16"]


@pytest.mark.parametrize("namespace", BOTH)
def test_the_name_without_a_namespace_becomes_that_of_the_trainer(namespace, tmp_path):
    strategy = lightning_eff.EffDDPStrategy(find_unused_parameters=True)
    make_trainer(tmp_path, namespace, strategy=strategy, devices=1)
    home = {BOTH[0]: lightning_eff.pytorch, BOTH[1]: lightning_eff.lightning}[namespace]
    assert type(strategy) is home.EffDDPStrategy
    sharded = lightning_eff.EffFSDPStrategy()
    make_trainer(tmp_path, namespace, strategy=sharded, devices=1)
    assert type(sharded) is home.EffFSDPStrategy
