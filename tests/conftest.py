"""What holds for every test."""

import gc


def pytest_collection_finish(session):
    # The Hugging Face trainer collects garbage at the end of each run (accelerate's `free_memory`). With all that a
    # worker has imported that takes as long as the short runs here: what is there now stays, and need not be looked at.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()  # extension modules complain of what they find alive at the end
