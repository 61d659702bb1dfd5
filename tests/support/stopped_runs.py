"""Where the runs of the promise table are stopped, and what they find when they go on."""

import shutil

# Four steps an epoch: 2 and 6 lie inside an epoch and on schedule edges, 4 on an epoch's edge, 1 before anything began.
STOPS = (1, 2, 4, 5, 6)


def copied(whole, stop, folder):
    """The run's folder as it was when it stopped: a soup at the end takes its ingredients from there."""
    folder.mkdir()
    for step, path in whole.checkpoints.items():
        if step <= stop:
            shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copy(path, folder / path.name)
    return folder / whole.checkpoints[stop].name
