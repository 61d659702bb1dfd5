"""Several processes of one job, as threads of this one that talk through a store in memory."""

import threading

import torch.distributed as dist

from shared_core.distributed.job import Job


def together(work, size=2):
    """Return what ``work(job)`` returned or raised, by rank."""
    store, results = dist.HashStore(), [None] * size

    def be(rank):
        try:
            with Job(store, rank, size) as job:
                results[rank] = work(job)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
