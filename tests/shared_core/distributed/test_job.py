"""Jobs of several processes: each ticket goes to one, what is told reaches all, an error ends all."""

import os

import pytest
from together import together

from shared_core.distributed.job import Job, check_alone, launched
from shared_core.errors import CompatibilityError, ConfigError, EffError


@pytest.mark.parametrize("size", [1, 3])
def test_each_ticket_goes_to_one_process(size):
    taken = together(lambda job: list(job.tickets("work", 40)), size)
    assert sorted(number for mine in taken for number in mine) == list(range(40))
    assert all(mine == sorted(mine) for mine in taken)


def test_what_each_gave_comes_to_all_by_rank():
    told = together(lambda job: job.exchange("names", f"rank {job.rank}".encode()), 3)
    assert told == [[b"rank 0", b"rank 1", b"rank 2"]] * 3


def test_an_error_of_one_is_raised_by_all_that_wait():
    def work(job):
        if job.rank == 1:
            raise ConfigError("soup", "jobs must be 1, got 2")
        return job.get("what nobody tells")

    waited, failed, other = together(work, 3)
    assert isinstance(failed, ConfigError)
    for error in (waited, other):
        assert isinstance(error, EffError)
        assert str(error) == "rank 1 of 3 failed: soup: jobs must be 1, got 2"


def test_without_a_launcher_there_is_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    job = Job.joined()
    assert (job.rank, job.size, job.is_main) == (0, 1, True)
    job.meet("there")
    check_alone("eff prune")
    # a pod of a cluster has some of them, and a shell in it is no rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert launched() == 1


def test_a_command_that_shares_nothing_is_refused_under_a_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CompatibilityError, match=r"one process.* 2; start it without torch"):
        check_alone("eff prune")
    assert os.environ["WORLD_SIZE"] == "2"
