"""Lottery tickets on two processes: they agree, and one writes."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lottery_runs import batch, equal, ticket_recipe
from plain_loop import plain_step
from torch import nn
from two_ranks import leave, run_two_ranks

from shared_core import Session
from shared_core.lottery_ticket import read_ticket


def ranks_main(rank, folder):
    """Data-parallel training of two rounds; each rank sees half of every batch."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    states = []
    for number in range(2):
        options = {"rewind_to": 2}
        if number:
            options["ticket"] = str(folder / "round-00" / "ticket.safetensors")
            dist.barrier()
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        for index, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
        session = Session(ticket_recipe(folder / f"round-{number:02d}", **options))
        session.attach(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.begin([optimizer], total_steps=5)
        for step in range(5):
            x, labels = batch(step)
            nn.functional.cross_entropy(parallel(x[rank::2]), labels[rank::2]).backward()
            plain_step(session, optimizer)
        states.append(session.state_dict())
        session.finish()
        states.append(dict(model.state_dict()))
    torch.save(states, folder / f"rank{rank}.pt")
    leave()


def test_two_processes_agree_and_one_writes(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    for mine, theirs in zip(first[1::2], second[1::2], strict=True):
        assert equal(mine, theirs)
    assert [state["techniques"] for state in first[::2]] == [state["techniques"] for state in second[::2]]
    assert first[2]["techniques"]["lottery"]["replay"] == "bit-equal"
    for name, mask in read_ticket(tmp_path / "round-00" / "ticket.safetensors").masks.items():
        assert torch.equal(first[3][name] != 0, mask)


if __name__ == "__main__":
    ranks_main(int(sys.argv[1]), Path(sys.argv[2]))
