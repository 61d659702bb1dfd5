"""Two gloo processes that run a test file as a script: ``FILE RANK FOLDER``, or ``FILE`` and arguments of its own."""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
FOLDERS = [str(HERE), str(HERE / "trainers"), str(HERE / "techniques")]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")]).rstrip(":")}
"""For processes that import what lies here."""

# Importing the trainers takes longer than most of what two ranks do: each rank is forked from a process that has done
# nothing else.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "hf_eff",
        "lightning_eff",
        "pytorch_lightning",
        "torch.distributed.fsdp",
        "transformers.trainer",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "sklearn.datasets",
    ]
)


CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


def leave():
    """End a rank: gloo (torch 2.13) may wait for ever in its teardown for a process that has gone already.

    So nothing is torn down; DDP and graphs refer to the group even after ``destroy_process_group``.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def be_a_rank(work):
    """Meet the other rank, as ``FILE RANK FOLDER``; save what ``work(rank, folder)`` returns as ``RANK.pt``; end."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    leave()


def run_as_script(arguments, environment, log):
    """Run ``FILE ARGUMENTS`` in this process, its output in `log`."""
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(environment)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def run_two_ranks(file, folder, *arguments, seconds=400):
    """Run both ranks to their end and return what they printed; what a rank writes lies in the folder.

    A port could be taken by another process between its choice and its use; ``MASTER_PORT`` and ``RANK`` are for
    trainers, which know no other way.

    Args:
        file: The script.
        folder: Where the ranks meet; for their logs; the script's second argument.
        *arguments: The script's arguments instead of ``RANK FOLDER``.
        seconds: When to give up.
    """
    return run_scripts(ranks_of(file, folder, *arguments), folder, seconds)


def saved_by_two_ranks(file, folder):
    """Run two ranks; return what each saved as ``RANK.pt``."""
    run_two_ranks(file, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def ranks_of(file, folder, *arguments, number=2, **environment):
    """What `start_scripts` takes, for ranks that meet at a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(number)}
    # as torchrun does: else Lightning takes WORLD_SIZE away at the end of its first run
    meeting["TORCHELASTIC_RUN_ID"] = "tests"
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"} for rank in range(number)]
    return [([file, *(arguments or (rank, folder))], meeting | environment | own[rank]) for rank in range(number)]


def start_scripts(commands, folder):
    """Start ``(FILE ARGUMENTS, environment)`` at once, each in a process of its own; return these and their logs."""
    logs = [Path(folder) / f"rank{number}.log" for number in range(len(commands))]
    workers = []
    for (line, environment), log in zip(commands, logs, strict=True):
        workers.append(FORKS.Process(target=run_as_script, args=([str(part) for part in line], environment, log)))
        workers[-1].start()
    return workers, logs


def run_scripts(commands, folder, seconds=400):
    """Run ``(FILE ARGUMENTS, environment)`` at once, each in a process of its own, and return what they printed.

    Once more where one crashed: torch 2.13 with gloo was once seen to end a rank by "munmap_chunk(): invalid pointer",
    which is memory of native code, and none of it is ours. What they wrote until then is removed; the log of the crash,
    with where each thread was, is printed.
    """
    before = set(Path(folder).rglob("*"))
    codes, printed = _run_once(commands, folder, seconds)
    if any(code in CRASHES for code in codes):
        print(f"exit codes {codes}: run once more", *printed, sep="\n")  # noqa: T201
        for path in sorted(set(Path(folder).rglob("*")) - before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        codes, printed = _run_once(commands, folder, seconds)
    assert codes == [0] * len(commands), "\n".join([f"exit codes {codes}", *(text[-3000:] for text in printed)])
    return "".join(printed)


def _run_once(commands, folder, seconds):
    workers, logs = start_scripts(commands, folder)
    deadline = time.monotonic() + seconds
    while any(worker.exitcode is None for worker in workers) and time.monotonic() < deadline:
        if any(worker.exitcode for worker in workers):
            break  # the other one would wait for it
        time.sleep(0.02)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        if worker.exitcode is None:
            os.kill(worker.pid, signal.SIGUSR1)  # where does it wait?
            worker.join(1)
        worker.kill()
        worker.join()
    return codes, [log.read_text() for log in logs]
