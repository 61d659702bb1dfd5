"""`eff compat` and `eff flags`, in a narrow terminal: names are whole, and every refusal has its reason."""

import json
import re

import pytest
from commands import eff

from shared_core.config.environments import RUN_ENVIRONMENTS
from shared_core.engine.registry import REGISTRY
from shared_core.errors import ConfigError


def told(line, monkeypatch, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = eff(*line.split())
    assert result.exit_code == 0
    return result.output


def test_tables_fit_and_agree_with_the_rows(monkeypatch):
    rows = json.loads(told("compat --json", monkeypatch))
    lines = told("compat", monkeypatch).splitlines()
    assert max(map(len, lines)) <= 80
    for number, row in enumerate(rows, 1):
        (line,) = (line for line in lines if line.startswith(f"{number} {row['technique']} "))
        assert line.split()[2:].count("x") == sum(row[key] not in ("yes", "-") for key in REGISTRY)
    assert {line.split()[0] for line in lines if line.strip()} >= RUN_ENVIRONMENTS.keys()


def test_names_are_told_their_reasons(monkeypatch):
    rows = {row["technique"]: row for row in json.loads(told("compat --json", monkeypatch))}
    lines = told("compat lora", monkeypatch).splitlines()
    refused = [other for other, answer in rows["lora"].items() if other != "technique" and answer not in ("yes", "-")]
    assert len(lines) == len(refused)
    assert f"lora + fsdp1: {rows['lora']['fsdp1']}" in lines
    assert told("compat prune qat", monkeypatch).splitlines() == ["prune + qat: yes"]
    assert told("compat fsdp2", monkeypatch) == "fsdp2: nothing is refused\n"
    with pytest.raises(ConfigError, match=r"prun .*did you mean 'prune'"):
        told("compat prun", monkeypatch)


def test_flags_of_one_technique(monkeypatch):
    rows = json.loads(told("flags --json", monkeypatch))
    mine = json.loads(told("flags average soup --json", monkeypatch))
    assert mine == [row for row in rows if row["flag"].startswith(("--average_", "--soup_"))]
    assert all(row["flag"] in told("flags average soup", monkeypatch) for row in mine)
    assert re.findall(r"^\| `(--\w+)`", told("flags average soup --markdown", monkeypatch), flags=re.M) == [
        row["flag"] for row in mine
    ]
    assert len(re.findall("^## ", told("flags --markdown", monkeypatch), flags=re.M)) == len(REGISTRY)
    assert max(map(len, told("flags", monkeypatch).splitlines())) <= 80
    lines = [line.split()[0] for line in told("flags", monkeypatch).splitlines() if line.startswith("--")]
    assert [REGISTRY[key].key for key in REGISTRY] == [
        next(key for key in REGISTRY if line.startswith(f"--{key}_")) for line in lines
    ]
    with pytest.raises(ConfigError, match="did you mean 'soup'"):
        told("flags soop", monkeypatch)
