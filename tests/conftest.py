"""What holds for every test."""

import gc
import sys

MANY_MODULES = 200
_modules = 0


def pytest_collection_finish(session):
    _freeze()


def pytest_runtest_setup(item):
    if len(sys.modules) > _modules + MANY_MODULES:
        _freeze()


def _freeze():
    # The Hugging Face trainer collects garbage at the end of each run (accelerate's `free_memory`). With all that a
    # worker has imported, while collecting tests or in the last one, that takes longer than the short runs here: what
    # is there now stays, and need not be looked at.
    global _modules
    _modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()  # extension modules complain of what they find alive at the end
