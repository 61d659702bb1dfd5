"""R10: work with a journal that is killed anywhere and started again gives the answer of work that never was."""

import json

import pytest
import torch
from fault_points import ALL_POINTS, QUICK_POINTS, SLOW, count_moments, dice, killed, moments
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.distillation.teacher_cache.writer import write_teacher_cache
from shared_core.runs import LotterySearch
from shared_core.soup import greedy_soup


def search_a_soup(folder):
    generator = torch.Generator().manual_seed(0)
    members = [{"w": torch.randn(9, generator=generator)} for _ in range(4)]
    journal = folder / "journal.json"
    found = greedy_soup(members, lambda weights: -float((weights["w"] - 0.3).square().sum()), journal=journal)
    (folder / "answer.json").write_text(json.dumps([found.history, found.state_dict["w"].tolist()]))


def _train(recipe):
    torch.manual_seed(0)
    model, session = nn.Linear(10, 2), Session(recipe)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=3)
    for _ in range(3):
        model(torch.ones(1, 10)).square().sum().backward()
        plain_step(session, optimizer)
    session.evaluated({"loss": float(model(torch.ones(1, 10)).square().sum().detach())})
    session.finish()


def search_tickets(folder):
    LotterySearch(rounds=2, rate=0.5, rewind_to=1).run(_train, folder)


class Teacher(nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return {"logits": torch.sin(input_ids[..., None] * torch.arange(1.0, 21.0))}


def write_cache(folder):
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(0, 5, (4, 3), generator=generator)} for _ in range(16)]
    write_teacher_cache(Teacher(), batches, folder, top_k=3, shard_bytes=300, resume=True)


def contents(folder):
    # a plot is not the same twice, and who works on it leaves a lock
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".png", ".lock"))
    return {file.relative_to(folder): file.read_bytes().replace(bytes(folder), b"") for file in files}


@pytest.mark.parametrize("points", [QUICK_POINTS, pytest.param(ALL_POINTS, marks=SLOW)])
@pytest.mark.parametrize("work", [search_a_soup, search_tickets, write_cache])
def test_killed_work_ends_as_if_it_never_was(work, points, tmp_path, monkeypatch):
    monkeypatch.setattr("shared_core.runs.lottery.TicketCurve.plot", lambda curve, file: file)  # slow
    for name in ("whole", "counted"):
        (tmp_path / name).mkdir()
    work(tmp_path / "whole")  # here: what it imports on the way is not counted, nor done again in each that is killed
    calls, size = count_moments(lambda: work(tmp_path / "counted"), tmp_path / "counted")
    whole, deaths = contents(tmp_path / "whole"), 0
    for number, (how, at) in enumerate(moments(calls, size, points, dice())):
        folder = tmp_path / str(number)
        folder.mkdir()
        deaths += killed(lambda folder=folder: work(folder), how, at, folder)
        work(folder)
        assert contents(folder) == whole, (how, at)
    assert deaths >= points // 2
