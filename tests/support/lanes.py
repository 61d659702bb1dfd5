"""Which tests `make test` runs: one case of each family, nothing slow.

A family is the cases of one test function; which of them runs depends on its name and their number alone. What is asked
of every page of the documents runs in full, and so do refusals but in tests/promises. Tests of several processes take
long, so it runs only those in tests/promises. `make test-all` runs the others. A test that is named,
``pytest FILE::TEST``, runs in any case, and so does a file with ``-m "slow or not slow"``.
``--technique prune`` takes of that what is about pruning: the tests of its package, and its promises.
``--share 1/3`` takes a third of what was chosen.
"""

import functools
import inspect
import random
import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from shared_core.engine.registry import REGISTRY

DEVICES = "not gpu and not gpu_lane"
QUICK = f"{DEVICES} and not slow and not further"
IN_QUICK, IN_REST = (Expression.compile(lane) for lane in (QUICK, f"{DEVICES} and (slow or further)"))
PROMISES = "tests/promises/test_promises.py"
OF_PAGES = ("test_code_blocks.py", "test_docs.py", "test_notebooks.py", "test_site.py")
STARTERS = {
    "by_two", "by_two_and_by_one", "ranks_of", "run_by_one_and_by_two", "run_scripts", "run_two_ranks",
    "saved_by_two_ranks", "start_scripts",
}  # fmt: skip
left_out = 0


def pytest_addoption(parser):
    parser.addoption("--technique", choices=REGISTRY, help="run the tests of one technique and its promises")
    parser.addoption("--share", type=share, help="run one part of the chosen tests, such as 1/3")


def share(text):
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def pytest_configure(config):
    if key := config.option.technique:
        package = Path(*REGISTRY[key].package.split("."))
        config.args = [str(config.rootpath / folder) for folder in ("tests" / package, package, PROMISES)]
    if not config.option.markexpr:
        config.option.markexpr = DEVICES if any("::" in name for name in config.args) else QUICK


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their marks
def pytest_collection_modifyitems(config, items):
    if key := config.option.technique:
        items[:] = [item for item in items if not of_promises(item.nodeid) or key in re.split(r"\W", item.nodeid)]
    starting = {item for item in items if starts_processes(item)}
    items.sort(key=lambda item: item not in starting)  # one worker gets them, and forks them all from one process
    families = defaultdict(list)
    for item in items:
        if item in starting and not of_promises(item.nodeid):
            item.add_marker("further")
        elif selected(item, IN_QUICK) and not in_full(item):
            families[item.nodeid.partition("[")[0]].append(item)
    for family, cases in families.items():
        kept = random.Random(family.rpartition("/")[2]).choice(cases)
        for case in cases:
            if case is not kept:
                case.add_marker("further")
    if config.option.share:
        part, parts = config.option.share
        together = {item.path for item in starting}  # whose tests share what the processes did
        dealt = defaultdict(list)
        for item in items:
            place = item.nodeid.partition("::")[0] if item.path in together else item.nodeid
            dealt[zlib.crc32(place.encode()) % parts == part - 1].append(item)
        items[:] = dealt[True]
        config.hook.pytest_deselected(items=dealt[False])
    if config.option.markexpr == QUICK:
        tell(config, sum(selected(item, IN_REST) for item in items))


def selected(item, lane):
    marks = {mark.name for mark in item.iter_markers()}
    return lane.evaluate(lambda name, **_: name in marks)


def in_full(item):
    return item.path.name in OF_PAGES or (not of_promises(item.nodeid) and refuses(item))


def starts_processes(item):
    """Return True if a test, or a fixture of it, calls a function that runs a script in several processes."""
    fixtures = getattr(item, "_fixtureinfo", None)
    used = [one for found in (fixtures.name2fixturedefs.values() if fixtures else ()) for one in found]
    functions = [getattr(item, "function", None), *(one.func for one in used)]
    return any(STARTERS & names_in(inspect.unwrap(one).__code__) for one in functions if inspect.isfunction(one))


@functools.cache
def names_in(code):
    inner = (names_in(one) for one in code.co_consts if inspect.iscode(one))
    return {*code.co_names}.union(*inner)


def of_promises(nodeid):
    return "/promises/" in nodeid


def refuses(item):
    test = getattr(item, "function", None)  # a doctest has none
    return test is not None and "raises" in inspect.unwrap(test).__code__.co_names


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
        further = "1 further case was" if left_out == 1 else f"{left_out:,} further cases were"
        print(f"{further} left out: make test-all")  # noqa: T201
