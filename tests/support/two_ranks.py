"""Two gloo processes that run a test file as a script: ``python FILE RANK PORT FOLDER``."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
}
"""For processes that import what lies here."""


def run_two_ranks(file, folder):
    """Run both ranks to their end; what a rank writes lies in the folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = [[sys.executable, "-P", file, str(rank), str(port), str(folder)] for rank in range(2)]
    workers = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) for line in commands]
    for process in workers:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
