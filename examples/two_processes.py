"""Lets `python example.py` start an example of two processes; scripts of one's own need no such thing."""

import os
import subprocess
import sys
from collections.abc import Callable


def in_two_processes(main: Callable[[], None]) -> None:
    """Run `main` if torchrun started this process; else start the program twice, and show what it prints."""
    if "RANK" in os.environ:
        main()
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *sys.argv]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=one_thread, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout.strip())
