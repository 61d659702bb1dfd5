"""One of two processes is killed: the other ends with an error, and soon."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from promise_drivers import run_hf, run_lightning
from promise_table import recipe_of
from two_ranks import ranks_of, start_scripts

from shared_core.engine.session import Session

SECONDS = 60
"""How long the process that is left may wait."""


def train(front_end, folder):
    keys, step = ("prune", "qat", "average", "loss_scale"), Session.before_step

    def fall(self):
        if self.step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        step(self)

    Session.before_step = fall
    options = {"batch_norm": False, "batch": 4, "optim": "sgd"}
    if front_end == "hf":
        run_hf(recipe_of(*keys), Path(folder), ddp_find_unused_parameters=False, **options)
    else:
        run_lightning(recipe_of(*keys), Path(folder), devices=2, strategy="ddp", **options)


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_the_other_process_ends_with_an_error_in_time(front_end, tmp_path):
    workers, logs = start_scripts(ranks_of(__file__, tmp_path, front_end, tmp_path), tmp_path)
    deadline = None
    try:
        while workers[0].exitcode is None:
            if deadline is None and workers[1].exitcode is not None:
                deadline = time.monotonic() + SECONDS
            assert deadline is None or time.monotonic() < deadline, "the first rank waits for ever"
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    log = logs[0].read_text()
    assert workers[1].exitcode == -signal.SIGKILL, log[-2000:]
    assert workers[0].exitcode not in (0, -signal.SIGKILL), log[-2000:]
    assert "Error" in log
    assert not list(tmp_path.glob("**/model.safetensors"))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
