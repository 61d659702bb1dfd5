"""Loss scaling under two processes: one verdict, one scale, one floor, sharded gradients counted once."""

import pytest
import torch
import torch.distributed as dist
from loss_scaling_runs import Loop
from torch import nn
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core.loss_scaling import LossScaler, UnderflowTelemetry


def overflow_on_one(rank):
    out = []
    for fused in (False, True):
        loop = Loop(fused, init_scale=64.0)
        for step in range(4):
            scale = loop.step(bad=step == 1 and rank == 1)
            out.append((scale, loop.scaler.was_skipped(loop.optimizer), loop.weight.tolist()))
    return out


def own_losses(rank):
    # alone, rank 1 would call the second window a bad one; the mean over both improves
    loop, seen = Loop(kind="enhanced", floor_window=2), []
    for loss in ((9.0, 1.0), (9.0, 1.0), (5.0, 2.0), (5.0, 2.0)):
        loop.step(loss=loss[rank])
        seen.append(loop.scaler.lowest_scale)
    return seen


def own_gradients(rank):
    loop, out = Loop(kind="auto", smoothing=0.0), []
    for amaxes, bad in (((1e-3, 1.0), False), ((1.0, 1e-3), False), ((1e-3, 1e-3), True), ((1e-3, 1e-3), False)):
        out.append((loop.step(amaxes[rank], bad=bad and rank == 1), loop.scaler.last_step_skipped))
    return out


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))  # 5 rows: unequal shards


def measured(model):
    model(torch.ones(2, 6)).square().sum().backward()
    telemetry = UnderflowTelemetry()
    telemetry.measure(model.named_parameters(), 1.0)
    return telemetry.report(), telemetry.histograms


def sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = small_net()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    found = measured(model)
    loop = LossScaler(kind="auto", smoothing=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.scale(torch.ones(()))
    for parameter in model.parameters():
        parameter.grad *= 65536
    loop.step(optimizer)
    loop.update()
    return *found, loop.get_scale()


def work(rank, folder):
    return {each.__name__: each(rank) for each in (overflow_on_one, own_losses, own_gradients, sharded)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return saved_by_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


def test_an_overflow_on_one_rank_is_skipped_on_all(ranks):
    first, second = (rank["overflow_on_one"] for rank in ranks)
    assert first == second
    assert [skipped for _, skipped, _ in first] == [False, True, False, False] * 2
    assert first[-1][0] == 32.0


def test_all_ranks_have_one_floor(ranks):
    first, second = (rank["own_losses"] for rank in ranks)
    assert first == second == [8192.0, 8192.0, 8192.0, 16384.0]


def test_all_ranks_have_one_automatic_scale(ranks):
    first, second = (rank["own_gradients"] for rank in ranks)
    assert first == second == [(2.0**13, False), (2.0**13, False), (2.0**12, True), (2.0**13, False)]


def test_sharded_gradients_are_counted_once_and_measured_whole(ranks):
    first, second = (rank["sharded"] for rank in ranks)
    assert first[0] == second[0]
    expected, histograms = measured(small_net())
    assert first[1].sum() == histograms.sum() == 6 * 5 + 5 + 5 * 3 + 3
    assert first[0]["underflow"] == expected["underflow"]
    assert first[0]["headroom"] == pytest.approx(expected["headroom"], abs=1e-5)
    assert first[2] == second[2] == 2.0 ** int(expected["headroom"] - 2)


if __name__ == "__main__":
    be_a_rank(work)
