"""What holds for every test."""

import atexit
import functools
import gc
import os
import random
import sys
import tempfile

import hypothesis
import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from _pytest.mark.expression import Expression
from torch._export import utils as of_export

# Triton settles at its import, in whichever test, whether it interprets: yes, unless a GPU run says TRITON_INTERPRET=0
os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("EFF_TEST_DEVICE", "cpu") != "cpu":  # read by tests/support/promise_table.py; see `make test-gpu`
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.allow_tf32 = False
if "ATEN_CPU_CAPABILITY" in os.environ:  # torch (2.13) keeps compiled graphs without it in their keys
    kept = f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), kept))
pytest_plugins = ["lanes"]
MANY_MODULES, MANY_TESTS = 200, 20
_modules = _tests = 0
gc.disable()  # until all tests are collected, which keeps everything: a quarter of the time that takes
atexit.register(gc.unfreeze)  # extension modules complain of what they find alive at the end
os.fsync = lambda descriptor: None  # nobody pulls the plug here, and a disk takes longer than most tests
if hasattr(of_export, "_materialize_cpp_cia_ops"):  # at each export and for each library anew: a third of the time
    of_export._materialize_cpp_cia_ops = functools.cache(of_export._materialize_cpp_cia_ops)

hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    chosen = Expression.compile(config.option.markexpr)
    by_mark = {mark: chosen.evaluate(lambda name, mark=mark, **_: name == mark) for mark in ("gpu", "gpu_lane", "")}
    if os.environ["TRITON_INTERPRET"] != "0" and by_mark["gpu"] + by_mark["gpu_lane"] > 2 * by_mark[""]:
        raise pytest.UsageError("tests marked gpu or gpu_lane must not be interpreted: set TRITON_INTERPRET=0")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    return [one for one in (yield) if not isinstance(one, DoctestModule)]  # tests hold no doctests


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # Which tests a worker ran before must not decide what a test draws, nor in which format it multiplies.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    for name in ("MIXED_PRECISION", "DYNAMO_BACKEND", "DYNAMO_MODE"):  # transformers 4.57 leaves a run's for the next
        os.environ.pop(f"ACCELERATE_{name}", None)
    global _modules, _tests
    _tests += 1
    if _tests % MANY_TESTS == 1 or len(sys.modules) > _modules + MANY_MODULES:
        # The Hugging Face trainer collects garbage at the end of each run (accelerate's `free_memory`), and a session
        # that finds another one. With all that a worker has imported and cached, that takes longer than the short runs
        # here: what is there now stays, and need not be looked at.
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()
