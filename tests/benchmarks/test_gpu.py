"""Every case of the GPU benchmark runs and agrees with its peers, on this CPU and in sizes for a test."""

import subprocess
import sys

import gpu
import measure
import operations
import pytest
import torch


def test_every_case_agrees_with_all_its_peers():
    at = operations.At(torch.device("cpu"), 2, compiler="")
    names = set()
    for make in gpu.cases():
        torch.manual_seed(0)
        case = make(at)
        usable, reasons = operations.usable_peers(case)
        assert usable, case.name
        assert not reasons, (case.name, reasons)
        assert case.moved or case.flops, case.name
        names.add(case.name)
    assert len(names) == len(gpu.cases())


def test_a_peer_with_other_numbers_stops_the_case_and_one_that_cannot_run_does_not():
    def broken():
        raise RuntimeError("no such kernel\nat line 3")

    one = lambda: torch.ones(2)  # noqa: E731
    usable, reasons = operations.usable_peers(operations.Case("sum", one, {"same": one, "broken": broken}))
    assert list(usable) == ["same"]
    assert reasons == {"broken": "RuntimeError: no such kernel"}
    for other in (lambda: torch.tensor([1.0, 1.1]), lambda: torch.tensor([1.0, torch.nan])):
        with pytest.raises(RuntimeError, match="sum: ours must agree with other"):
            operations.usable_peers(operations.Case("sum", one, {"other": other}))
        assert operations.usable_peers(operations.Case("sum", one, {"other": other}, unlike=("other",)))[0]


def test_a_row_holds_time_peers_share_and_memory():
    at = operations.At(torch.device("cpu"), 2)
    x = torch.ones(1 << 16)
    case = operations.Case("double", lambda: x * 2, {"added": lambda: x + x}, moved=2 * x.nbytes, flops=8)
    row = operations.measured(case, at, operations.Ceilings(bytes=1e9, flops=1e9))
    assert row.ours.endswith("ms")
    assert row.ratio.endswith("of added")
    assert row.peer.startswith("added ")
    assert "of a copy" in row.roofline
    assert "of a bf16 product" in row.roofline
    assert row.memory == "0 MiB, added 0"


@pytest.mark.slow
def test_a_comparison_ends_when_its_time_is_spent_but_never_before_three_rounds(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(measure.time, "process_time", lambda: float(next(clock)))
    for seconds, rounds in ((0.5, 3), (3.5, 6), (100.0, 9)):
        times = measure.in_turn({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=9, seconds=seconds)
        assert {name: len(found) for name, found in times.items()} == {"a": rounds, "b": rounds}, seconds


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, got in (([], "none"), (["--device", "cpu"], "cpu")):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        assert gpu.main() == 2
        assert capsys.readouterr().err.startswith(f"bench-gpu: device must be a CUDA GPU, got {got}; ")


def test_a_word_of_no_case_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "cases", lambda: (operations.ceilings,))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "nosuch", "--device", "cpu", "--quick"])
    assert gpu.main() == 2
    assert "WORD must be in a case's name, got nosuch; of ceilings" in capsys.readouterr().err


def made_here(name):
    def make(at): ...

    make.__name__ = name
    return make


class Bench:
    """`gpu.main` over stand-ins: cases of which one may be cut off, a clock that they move, tests that passed."""

    def __init__(self, monkeypatch, folder):
        self.now, self.made, self.tests, self.device = 0.0, [], 0, "NVIDIA H200"
        self.does = dict.fromkeys("abc", lambda: None)
        for module in (gpu, measure):
            monkeypatch.setattr(module, "RESULTS", folder)
        for name, stand_in in {
            "cases": lambda: tuple(made_here(name) for name in self.does), "code": lambda: "commit 1",
            "ceilings": lambda at: operations.Ceilings(1e12, 1e14), "row_of": self.row, "run_tests": self.tested,
            "_is_lost": lambda device: False,
        }.items():  # fmt: skip
            monkeypatch.setattr(gpu, name, stand_in)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: self.device)
        monkeypatch.setattr(gpu.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(sys, "argv", ["gpu.py"])
        self.folder = folder

    def row(self, make, at, best, until):
        self.made.append(make.__name__)
        self.until = until
        self.does[make.__name__]()
        return measure.Row(make.__name__, "1 ms")

    def tested(self):
        self.tests += 1
        return {"what": "tests", "ours": "9 passed", "met": True, "seconds": 300.0}

    def cells(self):
        (file,) = self.folder.glob("*.md")
        return [line.split(" | ")[:2] for line in file.read_text().splitlines() if line.startswith("| ")][1:]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return Bench(monkeypatch, tmp_path)


def cut_off():
    raise KeyboardInterrupt


def test_a_run_that_was_cut_off_goes_on_and_leaves_one_table(bench, capsys):
    bench.does["b"] = cut_off
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    kept = [["| tests", "9 passed"], ["| a", "1 ms"], ["| b", "not yet measured"], ["| c", "not yet measured"]]
    assert bench.cells() == kept
    (unfinished,) = bench.folder.glob("*.jsonl")
    unfinished.write_text(unfinished.read_text() + '["c", {"wh')  # cut off while it was written
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert "goes on" in capsys.readouterr().out
    assert bench.made == ["a", "b", "c", "b"]  # what was begun in vain comes last
    bench.does["b"] = lambda: None
    assert gpu.main() == 0
    assert bench.cells() == [["| tests", "9 passed"], *(["| " + name, "1 ms"] for name in "abc")]
    assert bench.tests == 1
    assert [file.name for file in bench.folder.iterdir()] == ["h200.md"]


def test_a_run_of_another_device_starts_anew_and_says_so(bench, capsys):
    bench.does["b"] = cut_off
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    bench.does["b"], bench.device = lambda: None, "NVIDIA H100"
    assert gpu.main() == 0
    assert "starts anew: device was NVIDIA H200, is NVIDIA H100" in capsys.readouterr().out
    assert bench.made == ["a", "b", "a", "b", "c"]
    assert bench.tests == 2


def test_cases_share_the_time_that_is_left_and_those_that_do_not_fit_are_told(bench):
    bench.does["a"] = lambda: setattr(bench, "now", gpu.SECONDS - 300)
    assert gpu.main() == 0
    assert bench.until == (gpu.SECONDS - 300) / 3  # those of the tests are spent
    assert bench.cells()[1:] == [["| a", "1 ms"], *([f"| {name}", "not measured: no time was left"] for name in "bc")]
    one = lambda: torch.ones(2)  # noqa: E731
    usable, reasons = operations.usable_peers(operations.Case("sum", one, {"same": one}), until=bench.now - 1)
    assert (usable, reasons) == ({}, {"same": "no time was left"})


@pytest.mark.parametrize("lost", [False, True])
def test_a_case_that_fails_is_told_and_a_process_whose_gpu_is_lost_is_replaced(bench, monkeypatch, lost):
    bench.does["a"] = lambda: torch.ones(2) @ torch.ones(3)
    monkeypatch.setattr(gpu, "_is_lost", lambda device: lost)
    monkeypatch.setattr(gpu.os, "execv", lambda *_: cut_off())
    if lost:
        with pytest.raises(KeyboardInterrupt):
            gpu.main()
    assert gpu.main() == 1
    assert bench.made == ["a", "b", "c"]
    assert bench.cells()[1][1].startswith("failed: RuntimeError: ")


@pytest.mark.parametrize(
    ("code", "output", "met", "told"),
    [
        (0, "..\n2 passed, 9 deselected in 1.20s", True, "2 passed, 9 deselected in 1.20s"),
        (0, "SKIPPED [1] tests/a.py: none\n= 2 passed, 1 skipped in 1s =", False, "2 passed, 1 skipped in 1s; SKIPPED"),
        (1, "FAILED tests/a.py::b - a | b\n1 failed, 2 passed in 1s", False, "1 failed, 2 passed in 1s; FAILED"),
        (5, "9 deselected in 1.20s", False, "9 deselected"),
        (None, "", False, "not finished after 480 s"),
    ],
)
def test_the_row_of_the_gpu_tests(monkeypatch, code, output, met, told):
    def run(command, *, env, timeout, **_):
        assert env["TRITON_INTERPRET"] == "0"
        assert "gpu" in command
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    row = gpu.run_tests()
    assert row["met"] is met
    assert row["ours"].startswith(told)
    assert "|" not in row["ours"]


def test_code_names_the_commit_where_there_is_git_and_always_the_files(monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError("git")

    run = lambda *_, **__: subprocess.CompletedProcess([], 0, "12ab\n", "")  # noqa: E731
    monkeypatch.setattr(gpu.subprocess, "run", run)
    named = gpu.code()
    monkeypatch.setattr(gpu.subprocess, "run", absent)
    assert named == f"commit 12ab, {gpu.code()}"
    assert gpu.code().startswith("sources ")
