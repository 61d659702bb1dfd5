"""Every case of the GPU benchmark runs and agrees with its peers, on this CPU and in sizes for a test."""

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
    monkeypatch.setattr(gpu, "cases", lambda: ())
    monkeypatch.setattr(sys, "argv", ["gpu.py", "nosuch", "--device", "cpu", "--quick"])
    assert gpu.main() == 2
    assert "WORD must be in a case's name, got nosuch" in capsys.readouterr().err
