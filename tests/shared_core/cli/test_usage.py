"""What a command line gets wrong is told in a line, with the nearest option."""

import sys

import pytest

from shared_core.cli import main


@pytest.mark.parametrize(("given", "told"), [
    (["prune", "m", "--sparsitty", "1"], "eff prune: --sparsitty is not an option; did you mean '--sparsity'?"),
    (["quantize", "m", "--outt", "x"], "eff quantize: --outt is not an option; did you mean '--out'?"),
    (["compress", "m", "--zzzzzz"], "eff compress: --zzzzzz is not an option; see eff compress --help"),
    (["explain", "--prune_sparsity", "0.8"], "eff explain: --prune_sparsity is a flag of eff run"),
    (["run", "train.py", "--prune_sparsty", "0.8"],
     "eff run: --prune_sparsty is not a flag; did you mean '--prune_sparsity'? Put the script's own flags after `--`"),
    (["prun"], "eff: prun is not a command; did you mean 'prune'?"),
    (["prune", "--sparsity", "1", "--out", "x"], "eff prune: missing argument 'model'"),
    (["cache-teacher", "m", "--out", "c"], "eff cache-teacher: missing option '--data'"),
    (["cache-teacher", "m", "--data", "d"], "eff cache-teacher: missing option '--out'"),
    (["chain", "--generations", "2", "--", "true"], "eff chain: missing option '--out'"),
    (["export", "m:f"], "eff export: missing option '--out'"),
    (["lottery", "--", "true"], "eff lottery: missing option '--out'"),
    (["search", "m", "--out", "x", "--", "true"], "eff search: missing option '--calibration'"),
    (["cache-teacher", "m", "--data", "d", "--out", "c", "--batch-size", "x"],
     "eff cache-teacher: invalid value for '--batch-size'"),
    (["quantize", "os:getcwd", "--out", "x", "--min_size", "-1"],
     "eff quantize: --min-size must be in [0, inf), got -1"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line(given, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eff", *given])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # what `python -m pytest` leaves is no name of it
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert not out
    assert err.count("\n") == 1
    assert err.startswith(f"error: {told}")


@pytest.mark.parametrize("given", [["--version"], ["compat"], ["prune", "--help"]])
def test_what_goes_well_ends_well(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eff", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out


def test_interrupted_is_told(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["shared_core.cli.smaller_models"], "check_new", interrupt)
    monkeypatch.setattr(sys, "argv", ["eff", "prune", "os:getcwd", "--sparsity", "0.5", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
