import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[1] / "support" / "lightning_ddp.py"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_both_ranks_agree_and_resume_exactly(tmp_path):
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    logs = [(tmp_path / f"log-{rank}").open("w") for rank in (0, 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)],
            env={**shared, "LOCAL_RANK": str(rank)},
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
        for log in logs:
            log.close()
    assert codes == [0, 0], (tmp_path / "log-0").read_text()[-3000:] + (tmp_path / "log-1").read_text()[-3000:]
    first, second = (torch.load(tmp_path / f"result-{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, weight in first["whole"].items():
        assert torch.equal(weight, second["whole"][name]), name
        assert torch.equal(weight, first["resumed"][name]), name
    for name, mask in first["masks"].items():
        assert torch.equal(mask, second["masks"][name]), name
    assert torch.equal(first["ranges"], second["ranges"])
