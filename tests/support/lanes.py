"""Which tests `make test` runs: of each family a few cases, always the same ones, and nothing slow.

A family is the cases of one test function. Refusals run in full, and so do the promises and the tests of the repository
itself. `make test-all` runs the others. A test that is named, ``pytest FILE::TEST``, runs in any case.
"""

import inspect
import random
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

FEW = 2
"""Cases of a family that has no mark `sampled(count)`."""
DEVICES = "not gpu and not gpu_lane"
QUICK = f"{DEVICES} and not slow and not further"
REST = f"{DEVICES} and (slow or further)"
TESTS = Path(__file__).parents[1]
IN_FULL = (TESTS, TESTS / "promises")
left_out = 0


def pytest_configure(config):
    if not config.option.markexpr:
        config.option.markexpr = DEVICES if any("::" in name for name in config.args) else QUICK


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their marks
def pytest_collection_modifyitems(config, items):
    families = defaultdict(list)
    for item in items:
        if selected(item, QUICK):
            families[item.nodeid.partition("[")[0], count_of(item)].append(item)
    for (family, count), cases in families.items():
        for case in further(family, cases, count):
            case.add_marker("further")
    if config.option.markexpr == QUICK:
        tell(config, sum(selected(item, REST) for item in items))


def selected(item, expression):
    marks = {mark.name for mark in item.iter_markers()}
    return Expression.compile(expression).evaluate(lambda name, **_: name in marks)


def count_of(item):
    """Return how many cases run of those that are marked alike, None: all."""
    if mark := item.get_closest_marker("sampled"):
        return mark.args[0]
    return None if item.path.parent in IN_FULL or refuses(item) else FEW


def refuses(item):
    test = getattr(item, "function", None)
    return test is not None and "raises" in inspect.unwrap(test).__code__.co_names


def further(family, cases, count):
    """Return the cases beyond `count`; which, depends on the test's name and on how many there are."""
    kept = random.Random(family.rpartition("/")[2]).sample(cases, min(count or len(cases), len(cases)))
    return [case for case in cases if case not in kept]


def tell(config, count):
    global left_out
    left_out = count
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = count


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    global left_out
    left_out = max(left_out, getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_unconfigure(config):
    if left_out and not hasattr(config, "workeroutput"):
        print(f"{left_out:,} further cases were left out: make test-all")  # noqa: T201
