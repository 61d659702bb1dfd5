"""Progress on a terminal alone, ``--quiet``, and receipts in a line."""

import importlib
import io
import os
import re
import sys

import pytest
import torch
from commands import eff
from safetensors.torch import save_file

from shared_core import Session
from shared_core.cli import _WORKING, show_imports
from shared_core.cli.arguments import bar
from shared_core.errors import ConfigError
from shared_core.printing import QUIET


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(QUIET, "")
    monkeypatch.delenv(QUIET)


def shown(monkeypatch, capsys):
    """Return the text that a bar writes to stderr where that is a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take it for one
    monkeypatch.setenv("TERM", "xterm")
    with bar("counting") as advance:
        advance(1, 4)
    return capsys.readouterr()


def test_a_bar_is_shown_on_a_terminal_and_with_the_time_left(monkeypatch, capsys):
    out, err = shown(monkeypatch, capsys)
    assert not out
    assert "counting" in err
    assert "25%" in err


def test_no_bar_in_a_pipe_and_none_where_quiet_is_asked_for(monkeypatch, capsys):
    with bar("counting") as advance:
        advance(1, 4)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(QUIET, "1")
    assert shown(monkeypatch, capsys) == ("", "")


def test_quiet_holds_while_a_command_runs(monkeypatch):
    seen = []

    def note(*_):
        seen.append(os.environ.get(QUIET))
        raise ConfigError("noted")

    monkeypatch.setattr(sys.modules["shared_core.cli.smaller_models"], "check_new", note)
    for given, expected in ((["--quiet"], "1"), ([], None)):
        with pytest.raises(ConfigError, match="noted"):
            eff("prune", "os:getcwd", "--sparsity", "0.5", "--out", "o", *given)
        assert seen.pop() == expected
        assert QUIET not in os.environ


@pytest.mark.parametrize("command", sorted(_WORKING))
def test_every_command_that_works_for_long_has_it(command):
    told = eff(command, "--help", env={"COLUMNS": "200"}).output
    assert told.count("--quiet") == 1


def receipt():
    model = torch.nn.Linear(8, 8)
    session = Session({"prune": {"sparsity": 0.5, "begin": 0, "end": 1}})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.attach(model)
    session.begin([optimizer], total_steps=1)
    model(torch.ones(1, 8)).sum().backward()
    session.before_step()
    optimizer.step()
    session.after_step()
    session.finish()
    return session.receipt()


def test_a_quiet_run_tells_its_receipt_in_a_line(monkeypatch, tmp_path):
    made = receipt()
    assert made.final_text() == made.text()
    made.write(tmp_path)
    monkeypatch.setenv(QUIET, "1")
    assert re.match("efftrain: 1 step; prune: .*50.0 % of 64 weights", made.final_text())
    assert made.final_text().endswith(f"receipt: {tmp_path}/eff_receipt.json; as an HTML page: eff report {tmp_path}")
    assert "\n" not in made.final_text()


def test_averaging_counts_the_files_it_reads(tmp_path):
    from shared_core.soup.merging import average_of

    for number in range(3):
        save_file({"w": torch.full((2,), float(number))}, tmp_path / f"{number}.safetensors")
    seen = []
    average_of([tmp_path / f"{number}.safetensors" for number in range(3)], progress=lambda *at: seen.append(at))
    assert seen == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


@pytest.mark.parametrize(("is_terminal", "quiet"), [(True, ""), (False, ""), (True, "1")])
def test_the_import_of_a_large_library_is_told_on_a_terminal_alone(tmp_path, monkeypatch, is_terminal, quiet):
    class Terminal(io.StringIO):
        def isatty(self):
            return is_terminal

    (tmp_path / "pytorch_lightning.py").write_text("import sys\nsys.stderr.write('[its own]')\n")
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv(QUIET, quiet)
    show_imports()
    module = importlib.import_module("pytorch_lightning")
    sys.modules.pop("pytorch_lightning")  # monkeypatch would put it back at the end
    before, _, after = sys.stderr.getvalue().partition("[its own]")
    assert ("loading lightning" in before) is (is_terminal and not quiet)
    assert "loading" not in after
    assert type(module.__loader__).__module__ != "shared_core.cli"
