"""The way to the host and back, on a lane whose copies run as late as they may."""

import pytest
import torch
from plain_loop import begun_session
from saved_runs import packed
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared_core import Session
from shared_core.activation_compression.saved_tensors import HostMover
from shared_core.errors import CompatibilityError, TrainingError


class LateLane:
    """Copies only when the computation waits, and all before it; poisons what it has not written yet."""

    def __init__(self):
        self.queue, self.log, self.held = [], [], 0

    def host_like(self, part):
        return torch.empty_like(part).fill_(0 if part.dtype == torch.bool else 77)

    def run(self, copy):
        self.queue.append(copy)
        self.log.append(("run", len(self.log)))
        return len(self.log) - 1

    def wait(self, event):
        self.log.append(("wait", event))
        while self.queue:
            self.queue.pop(0)()


def net():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(8, 32)


def test_what_comes_back_is_what_went_out_even_if_every_copy_is_as_late_as_it_may_be():
    model, x = net()
    parameters = list(model.parameters())
    plain = torch.autograd.grad(model(x).square().sum(), parameters)
    for pack in ("none", "exact"):
        lane = LateLane()
        loss, counts = packed(
            lambda: model(x).square().sum(), weights=model, pack=pack, offload=True, mover=HostMover(lane)
        )
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
        for a, b, c in zip(plain, first, second, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
        assert counts.kinds == {"as_is"}
        assert counts.share_saved == 1.0
        assert counts.report()["left_alone"].keys() == {"weights"}


def test_packed_parts_travel_packed():
    sizes = []

    class Sizes(LateLane):
        def host_like(self, part):
            sizes.append(part.nbytes)
            return super().host_like(part)

    x = torch.randn(800, requires_grad=True)
    loss, _ = packed(lambda: torch.where(x > 0, x, 2 * x).sum(), mover=HostMover(Sizes()))
    assert sizes == [100]
    loss.backward()
    assert torch.equal(x.grad, torch.where(x > 0, 1.0, 2.0))


def test_few_copies_are_under_way_and_backward_fetches_ahead():
    lane = LateLane()
    mover = HostMover(lane)
    sources = [torch.full((4,), float(i)) for i in range(10)]
    moved = [mover.out((source,)) for source in sources]
    assert sum(item.source is not None for item in moved) == 4
    assert [kind for kind, _ in lane.log] == ["run"] * 4 + ["run", "wait"] * 6
    lane.log.clear()
    assert [item.parts()[0][0].item() for item in moved[:5:-1]] == [9.0, 8.0, 7.0, 6.0]
    # those were still on the device; the last two of them have begun to fetch the two before them
    assert [kind for kind, _ in lane.log] == ["run", "run"]
    assert moved[5].parts()[0][0] == 5.0
    assert [kind for kind, _ in lane.log] == ["run"] * 3 + ["wait"]
    mover.start()
    assert all(item.source is None for item in moved)
    assert moved[9].parts()[0][0] == 9.0


def test_a_source_that_backward_is_through_with_is_freed_though_its_copy_is_under_way():
    lane = LateLane()
    mover, source = HostMover(lane), torch.ones(4)
    memory, moved = StorageWeakRef(source.untyped_storage()), mover.out((source,))
    lane.queue.clear()
    del source
    assert not memory.expired()
    del moved
    assert memory.expired()


def test_what_was_prefetched_and_never_wanted_is_waited_for_before_its_memory_is_given_away():
    lane = LateLane()
    mover = HostMover(lane)
    moved = [mover.out((torch.ones(4),)) for _ in range(8)]
    moved[3].parts()
    lane.log.clear()
    del moved[2]
    assert [kind for kind, _ in lane.log] == ["wait"]


@pytest.mark.parametrize("later", [0, 6])
def test_a_source_modified_while_it_is_copied_is_an_error_and_later_is_harmless(later):
    mover, source = HostMover(LateLane()), torch.ones(4)
    moved = mover.out((source,))
    others = [mover.out((torch.ones(4),)) for _ in range(later)]
    source.zero_()
    if later:
        assert moved.parts()[0].sum() == 4
        return
    with pytest.raises(TrainingError, match="modified while it was copied to the host"):
        moved.parts()
    assert not others


def test_a_cpu_has_nothing_to_offload_to():
    session = Session({"activations": {"pack": "none", "offload": True}})
    with pytest.raises(CompatibilityError, match=r"activations: offload must .* CUDA device"):
        session.attach(nn.Linear(2, 2))


def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_has_neither(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    session = Session({"activations": {"pack": "exact", "offload": True}})
    model = nn.Linear(2, 2)
    session.attach(model)
    with pytest.raises(CompatibilityError, match="got a model on cpu"):
        session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=1)


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_the_same_and_memory_is_less():
    layers, x = net()
    model, x = nn.Sequential(*layers, *net()[0]).cuda(), x.repeat(8192, 1).cuda()
    model(x)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before, peaks, gradients = torch.cuda.memory_allocated(), [], []
    for offload in (False, True):
        recipe = {"activations": {"pack": "none", "offload": True}} if offload else {}
        session, _ = begun_session(recipe, model, 1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with session.forward():
            loss = model(x).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        session.detach()
        del loss
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert peaks[1] < 0.7 * peaks[0]
