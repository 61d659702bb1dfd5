"""`make test` and `make test-all` together run every test, none of them twice; a test that is named runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def run_two_ranks():
    pass

def test_alone():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("case", range(9))
def test_family(case):
    pass

@pytest.mark.parametrize("case", [*range(8), pytest.param(8, marks=pytest.mark.slow)])
def test_family_with_a_slow_case(case):
    pass

@pytest.mark.parametrize("case", range(9))
def test_refusal(case):
    with pytest.raises(ValueError):
        int("x")

@pytest.fixture
def two():
    return run_two_ranks

def test_of_two_processes(two):
    pass

@pytest.mark.gpu
@pytest.mark.parametrize("case", range(9))
def test_gpu(case):
    pass
"""


def run(folder, *arguments, text=TESTS):
    (folder / "test_it.py").write_text(text)
    markers = ("slow", "further", "gpu", "gpu_lane")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =" + "".join(f"\n    {marker}" for marker in markers))
    options = ["-q", "-rp", "-p", "lanes", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
    return re.findall(r"^PASSED \S+::(\S+)$", done.stdout, flags=re.MULTILINE), done.stdout.splitlines()[-1]


def test_the_two_together_are_all(tmp_path):
    (rest,) = re.findall(r'^test-all:.*\n.*-m "([^"]*)"', (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    quick, last = run(tmp_path)
    others, _ = run(tmp_path, "-m", rest)
    assert len({*quick, *others}) == len(quick) + len(others) == 30
    assert last == f"{len(others)} further cases were left out: make test-all"
    one_of_each = ["test_alone", "test_family", "test_family_with_a_slow_case"]
    assert sorted(test.partition("[")[0] for test in quick) == [*one_of_each, *["test_refusal"] * 9]


def test_shares_together_are_all(tmp_path):
    alone = TESTS.replace("return run_two_ranks", "return None")
    for text in (TESTS, alone):
        shares = [run(tmp_path, "-m", "not gpu", "--share", f"{part}/2", text=text)[0] for part in (1, 2)]
        found = [test for share in shares for test in share]
        assert len({*found}) == len(found) == 30
        assert all(shares) == (text == alone)  # a file that starts processes stays together


def test_what_is_named_runs(tmp_path):
    named, _ = run(tmp_path, "test_it.py::test_slow", "test_it.py::test_family")
    assert named == ["test_slow", *(f"test_family[{case}]" for case in range(9))]
