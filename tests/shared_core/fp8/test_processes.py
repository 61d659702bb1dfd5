"""FP8 layers in two processes: DDP keeps ranks equal, FSDP2 gives the numbers of one process."""

import math

import pytest
import torch
from fp8_runs import ALL, LOSS_SCALE, Quiet, data, net
from plain_loop import backward, update
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core import Session
from shared_core.fp8 import Fp8Linear

STEPS, POISONED = 4, 2


def attached(model, recipe, **options):
    scaler = LOSS_SCALE if recipe == "hfp8" else {}
    session = Session({"fp8": {"recipe": recipe, **options}, **scaler}, services=Quiet())
    session.attach(model)
    return session


def begun(session, model, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.01)
    session.begin([optimizer], total_steps=STEPS)
    return optimizer


def step(session, optimizer, forward, x):
    backward(session, session.loss(forward(x).square().mean()))
    update(session, optimizer)


def state(session):
    bank = session.state_dict()["techniques"]["fp8"].get("bank", {})
    return {name: torch.as_tensor(value) for name, value in bank.items()}


def replicated(rank, recipe):
    model = net()
    session = attached(model, recipe)
    optimizer = begun(session, model, torch.optim.SGD)
    wrapped = DistributedDataParallel(model)
    for index, x in enumerate(data(STEPS)):
        part = x.chunk(2)[rank].clone()
        if index == POISONED and rank == 1 and recipe != "hfp8":
            part[0, 0] = math.nan  # of one rank alone: both must discard the step
        step(session, optimizer, wrapped, part)
    return {**model.state_dict(), **state(session), "skipped": torch.tensor(session.skipped)}


def optimizer_of(recipe):
    # a scale-free step like Adam's would make much of how hfp8 happened to round
    return torch.optim.SGD if recipe == "hfp8" else torch.optim.AdamW


def sharded(recipe, **options):
    model = net()
    session = attached(model, recipe, **options)
    seen = []
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    model[2].register_forward_pre_hook(lambda layer, _: seen.append((type(layer.weight), tuple(layer.weight.shape))))
    fully_shard(model)
    optimizer = begun(session, model, optimizer_of(recipe))
    for x in data(STEPS):
        step(session, optimizer, model, x)  # the same on both ranks
    session.finish()
    with torch.no_grad():
        model(data()[0])  # stock layers, still sharded
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    told = {
        "seen": [(kind is nn.Parameter, shape) for kind, shape in seen[:STEPS]],
        "stock": not any(isinstance(layer, Fp8Linear) or "fp8" in vars(layer) for layer in model.modules()),
        "class": type(model[2]).__name__,
    }
    return {**weights, **state(session)}, told


def worker(rank, folder):
    found, told = {}, {}
    for recipe in ALL:
        found[f"ddp.{recipe}"] = replicated(rank, recipe)
        found[f"fsdp.{recipe}"], told[recipe] = sharded(recipe)
    found["fsdp.torchao"], told["torchao"] = sharded("rowwise", backend="torchao")
    return found, told


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return list(zip(*saved_by_two_ranks(__file__, tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize("recipe", ALL)
def test_ranks_of_ddp_end_with_equal_weights_and_histories_and_discard_together(ranks, recipe):
    first, second = (found[f"ddp.{recipe}"] for found in ranks[0])
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert first["skipped"] == (0 if recipe == "hfp8" else 1)
    assert all(torch.isfinite(value).all() for value in first.values())


def test_a_history_of_two_processes_is_that_of_the_joined_batch(ranks):
    shared = ranks[0][0]["ddp.delayed"]["history"]
    model = net()
    session = attached(model, "delayed")
    optimizer = begun(session, model, torch.optim.SGD)
    for index, x in enumerate(data(STEPS)):
        if index != POISONED:
            step(session, optimizer, model, x)
    alone = state(session)["history"]
    assert (shared > 0).sum() == (alone > 0).sum() == 3 * (STEPS - 1)
    # inputs and weights; a process's gradients are of the mean over its own half
    torch.testing.assert_close(shared[:2], alone[:2], rtol=0.02, atol=0)
    torch.testing.assert_close(shared[2] / 2, alone[2], rtol=0.15, atol=0)


@pytest.mark.parametrize("recipe", [*ALL, "torchao"])
def test_fsdp2_gives_the_numbers_of_one_process(ranks, recipe):
    first, second = (found[f"fsdp.{recipe}"] for found in ranks[0])
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for told in (one[recipe] for one in ranks[1]):
        assert told["seen"] == [(True, (32, 32))] * STEPS  # forward meets the whole weight, a plain parameter
        assert told["stock"]
        assert told["class"] == "FSDPLinear"
    model = net()
    session = attached(model, "rowwise" if recipe == "torchao" else recipe)
    optimizer = begun(session, model, optimizer_of(recipe))
    for x in data(STEPS):
        step(session, optimizer, model, x)
    alone = {**model.state_dict(), **state(session)}
    # each rank of hfp8 draws for its own part of a weight: the grid is the same, the draws are not
    tolerance = 2**-10 if recipe == "hfp8" else 1e-6
    for name, value in alone.items():
        if name == "overflows":
            continue  # int16 counts those of both ranks
        torch.testing.assert_close(first[name].double(), value.double(), rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    be_a_rank(worker)
