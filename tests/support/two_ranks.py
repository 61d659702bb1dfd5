"""Two gloo processes that run a test file as a script: ``python FILE RANK FOLDER``."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
}
"""For processes that import what lies here."""


def leave():
    """End a rank's part: gloo (torch 2.13) may wait for ever in its teardown for a process that has gone already."""
    dist.barrier()
    dist.destroy_process_group()


def run_two_ranks(file, folder, seconds=240):
    """Run both ranks to their end; what a rank writes lies in the folder, where they meet too.

    A port could be taken by another process between its choice and its use; ``MASTER_PORT`` and ``RANK`` are for
    trainers, which know no other way.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    logs = [Path(folder) / f"rank{rank}.log" for rank in range(2)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("w") as errors:
            line = [sys.executable, "-P", file, str(rank), str(folder)]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            workers.append(subprocess.Popen(line, stderr=errors, env=ENVIRONMENT | meeting | own))
    deadline = time.monotonic() + seconds
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        if any(worker.poll() for worker in workers):
            break  # the other one would wait for it
        time.sleep(0.05)
    codes = [worker.poll() for worker in workers]
    for worker in workers:
        worker.kill()
        worker.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
