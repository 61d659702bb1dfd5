"""`eff report`: what the files of a run hold and nothing else, on one page that loads nothing and runs nothing."""

import copy
import functools
import json
import re
import sys

import commands
import pytest
from reports import Outline, part, report_of, row

from shared_core.engine.receipt import RECEIPT_FILE, Receipt, sentences
from shared_core.errors import CheckpointError, ConfigError

HOSTILE = "[/b]<script>alert(1)</script>|[x](javascript:y)\"'&"
RECEIPT = {
    "recipe": {"prune": {"sparsity": 0.8, "begin": 0.0, "end": 1.0}, "loss_scale": {"kind": "dynamic"}},
    "front_end": "hf",
    "finished": True,
    "environment": {"python": "3.11", "device": "cpu", "libraries": {"torch": "2"}},
    "steps": {"applied": 40, "skipped": 2, "planned": 42},
    "wall_seconds": 12.25,
    "seconds": {"prune": 0.5},
    "techniques": {
        "prune": {
            "tensors": [{"name": "a.weight", "shape": [4, 4], "numel": 16, "pruned": 12, "sparsity": 0.75}],
            "numel": 16, "pruned": 12, "sparsity": 0.75, "left_out": {"head": "it is the last"}, "note": "no faster",
            "begin_step": 4, "end_step": 30, "last_update_step": 30,
        },
        "loss_scale": {"scale": 1024.0, "measured_step": 40, "layers": {"a": {"underflow": 0.125, "zero": 0.0}}},
    },
    "validation": {"eval_f1": 0.75},
    "history": {
        "figures": [
            {"step": 1, "prune/sparsity": 0.0, "loss_scale/scale": 4096.0},
            {"step": 40, "prune/sparsity": 0.75, "loss_scale/scale": 1024.0},
        ],
        "validation": [{"step": 20, "eval_f1": 0.5}, {"step": 40, "eval_f1": 0.75}],
    },
    "notes": ["resumed once"],
}  # fmt: skip


def write(folder, receipt=RECEIPT, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in {"eff_receipt": receipt, **files}.items():
        if values is not None:
            (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


eff = functools.partial(commands.eff, "report")


def test_a_page_of_a_run(tmp_path):
    run = write(tmp_path / "run")
    log = [
        {"step": 10, "loss": 2.0, "epoch": 1, "grad_norm": 3.0, "eval_runtime": 9.0},
        {"step": 42, "loss": 1.0, "prune/sparsity": 0.75},
    ]
    write(run / "checkpoint-5", None, trainer_state={"log_history": [{"step": 5, "loss": 9.0}]})
    write(run / "checkpoint-42", None, trainer_state={"log_history": log})
    (run / "model.safetensors").write_bytes(b"x" * 1234)
    result = eff(run)
    assert result.exit_code == 0
    assert "40 steps applied, 2 skipped" in result.output
    page, text = (run / "eff_report.html").read_text(), (run / "eff_report.md").read_text()
    asked = part(text, "What was asked")
    assert row(asked, "loss_scale") == ["kind", "dynamic"]
    assert row(asked, "prune") == ["sparsity", "0.8"]
    achieved = part(text, "What was achieved")
    assert row(achieved, "prune")[-1] == "500.0 ms"
    for told in ("75.0 % of 16 weights", "40 steps of 42 planned", "12.2 s"):
        assert told in achieved
    assert text.index("What was achieved") < text.index("What was asked")
    assert row(text, "eval_f1, first and last of the run") == ["0.5", "0.75", "1.5×", "validations in training"]
    assert row(text, "bytes of model.safetensors")[:2] == ["–", "1,234"]
    assert row(text, "loss") == ["2", "42", "2", "1", "1", "2"]
    assert row(part(text, "Other figures that the trainer logged"), "grad_norm")[0] == "1"
    assert "runtime" not in text
    assert row(text, "a.weight") == ["4, 4", "16", "12", "0.75"]
    for told in ("| prune | head | it is the last |", "no faster", "resumed once", "| a | 0.125 | 0 |"):
        assert told in text
    assert "Read: eff_receipt.json, checkpoint-42/trainer_state.json." in text
    targets = [value for name, value in Outline(page).attributes if name in ("src", "href")]
    assert all(target.startswith("data:image/svg+xml;base64,") for target in targets)
    # loss and quality, sparsity, scale, layers of both techniques
    assert len(targets) == text.count("*Plot: ") == 6
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "Memory" not in text  # this run holds nothing of it
    assert "Greedy" not in text


def test_a_run_is_watched_until_its_end(tmp_path, monkeypatch):
    run = tmp_path / "run"
    pages = []

    def later(seconds):
        """What the run does meanwhile: nothing yet, a validation, a log that is half written, the end."""
        assert seconds == 7
        page = run / "eff_report.html"
        pages.append(page.read_text() if page.exists() else "")
        if len(pages) == 1:
            log = {"log_history": [{"step": 20, "loss": 2.0}]}
            write(run / "checkpoint-20", None, trainer_state=log)
        elif len(pages) == 2:
            (run / "checkpoint-20" / "trainer_state.json").write_text("{")
        else:
            write(run / "checkpoint-42", None, trainer_state={"log_history": [{"step": 42, "loss": 1.0}]})
            write(run)

    monkeypatch.setattr(sys.modules["shared_core.cli.trainings"].time, "sleep", later)
    told = eff(run, "--watch", "--seconds", "7").output
    assert told.startswith(f"nothing is logged yet; waiting for {run}")
    assert told.index("nothing is logged yet") < told.index("step 20:") < told.index("40 steps applied")
    assert [page.count('http-equiv="refresh" content="7"') for page in pages] == [0, 1, 1]
    last = (run / "eff_report.html").read_text()
    assert "refresh" not in last
    assert "Finished after" in last
    with pytest.raises(ConfigError, match=r"--watch .*--json"):
        eff(run, "--watch", "--json")


def test_of_lightnings_folder_the_newest_version_counts(tmp_path):
    for number in (2, 10):
        folder = write(tmp_path / "lightning_logs" / f"version_{number}", {**RECEIPT, "front_end": f"pl{number}"})
        (folder / "metrics.csv").write_text(
            f"epoch,step,train_loss,val_acc\n0,9,{number},\n0,9,,0.5\n0,bad,3,\n1,19,1.5,\n"
        )
    text = report_of(tmp_path)
    assert row(text, "trainer") == ["pl10"]
    assert row(text, "train_loss")[:5] == ["2", "19", "10", "1.5", "1.5"]
    assert row(text, "val_acc")[:2] == ["1", "9"]
    assert "lightning_logs/version_10 is the newest of 2" in text
    assert row(report_of(tmp_path / "lightning_logs"), "trainer") == ["pl10"]
    assert row(report_of(tmp_path / "lightning_logs" / "version_2"), "trainer") == ["pl2"]


def test_of_a_log_that_ends_early_the_receipt_goes_on(tmp_path):
    run = write(tmp_path, trainer_state={"log_history": [{"step": 3, "prune/sparsity": 0.1}]})
    assert row(report_of(run), "prune/sparsity")[:2] == ["2", "40"]


def test_a_techniques_soup_and_memory(tmp_path):
    entry = {"name": "/x/checkpoint-1", "order": 0, "single": 0.5, "score": 0.5, "accepted": True, "reason": "best"}
    soup = {"metric": "eval_f1", "score": 0.625, "ingredients": ["a", "b"], "history": [
        entry, {**entry, "order": 1, "name": "checkpoint-2", "score": 0.625, "single": None},
        {**entry, "order": 2, "name": "checkpoint-3", "score": None, "accepted": False, "reason": "NaN"}]}  # fmt: skip
    checkpointing = {"peak_bytes_without": 4 << 20, "predicted_peak_bytes": 2 << 20, "measured_peak_bytes": None}
    receipt = {**RECEIPT, "techniques": {"soup": soup, "checkpointing": checkpointing}}
    text = report_of(write(tmp_path, receipt))
    assert row(text, "eval_f1, first ingredient and soup")[:3] == ["0.5", "0.625", "1.25×"]
    assert "2 of 3 ingredients are in the soup: eval_f1 0.625." in text
    assert "| 3 | checkpoint-3 | 0.5 | – | no | NaN |" in text
    assert row(text, "peak bytes of a step, planned")[:3] == ["4,194,304", "2,097,152", "0.5×"]


def test_several_runs_stand_beside_each_other(tmp_path):
    other = copy.deepcopy(RECEIPT)
    other["recipe"]["prune"]["sparsity"] = 0.5
    other["techniques"]["prune"] |= {"pruned": 8, "sparsity": 0.5}
    a, b = write(tmp_path / "a" / "run"), write(tmp_path / "b" / "run", other)
    c = write(tmp_path / "c", None, soup_path={"score": 0.5, "ingredients": ["x"], "history": [], "repeat": None})
    result = eff(a, b, c, "--out", tmp_path / "all.html")
    assert result.exit_code == 0
    text = (tmp_path / "all.md").read_text()
    assert row(text, "figure") == ["a/run", "b/run", "c"]
    assert row(text, "sparsity") == ["0.75", "0.5", "–"]
    assert row(text, "prune.sparsity") == ["0.8", "0.5", "–"]
    assert "a/run: prune/sparsity" in text
    told = json.loads(eff(a, b, "--json").stdout)["runs"]
    assert [run["recipe"]["prune"]["sparsity"] for run in told] == [0.8, 0.5]


def test_json_is_the_receipt_and_what_was_found(tmp_path):
    run = write(tmp_path / "run")
    told = json.loads(eff(run, "--json").stdout)
    report = told.pop("report")
    assert told == RECEIPT
    assert {"what": "sparsity", "before": None, "after": 0.75, "source": "receipt, prune"} in report["changes"]
    assert report["curves"]["prune/sparsity"] == [[1, 0.0], [40, 0.75]]
    assert [file.name for file in run.iterdir()] == ["eff_receipt.json"]  # no page unless asked for


def poisoned(value):
    if isinstance(value, dict):
        kept = ("libraries", "steps", "seconds", "history")
        return {key: value[key] if key in kept else poisoned(value[key]) for key in value}
    return (
        [poisoned(item) for item in value] if isinstance(value, list) else HOSTILE if isinstance(value, str) else value
    )


def test_a_users_text_is_text_wherever_it_comes_from(tmp_path):
    receipt = poisoned(RECEIPT)
    receipt["recipe"][HOSTILE] = {HOSTILE: HOSTILE}
    receipt["techniques"][HOSTILE] = {HOSTILE: HOSTILE, "tensors": [{"name": HOSTILE, HOSTILE: 1, "sparsity": 0.5}]}
    receipt["history"] = {"figures": [{"step": step, f"eval_{HOSTILE}": step / 2} for step in (1, 2)]}
    receipt["validation"] = {HOSTILE: 0.5}
    run = write(tmp_path / "<b>run")
    (run / "eff_receipt.json").write_text(json.dumps(receipt))
    assert eff(run).exit_code == 0
    page = (run / "eff_report.html").read_text()
    assert page.count("&lt;script&gt;") > 10
    assert set(Outline(page).tags) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th", "td",
        "figure", "img", "figcaption",
    }  # fmt: skip


def test_without_matplotlib_the_tables_stay(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    run = write(tmp_path)
    assert eff(run).exit_code == 0
    page = (run / "eff_report.html").read_text()
    assert page.count("<img") == 0
    assert page.count("matplotlib is not installed") == 1
    assert "<td>prune/sparsity</td>" in page


@pytest.mark.parametrize(("files", "match"), [
    (None, r"RUNS must be an existing file or folder, got .*none"),
    ({"curve.json": "not ours"}, r"none must be a run's folder, .*eff_receipt.json"),
    ({"eff_receipt.json": "{"}, r"eff_receipt.json: file must be JSON, .* another folder"),
    ({"eff_receipt.json": "[1]"}, r"must hold a JSON object, got list"),
    ({"eff_receipt.json": "{}"}, r"report: cannot read .*eff_receipt"),
    ({"eff_receipt.json": '{"techniques": 3}'}, r"report: cannot read .*eff_receipt"),
    ({"lottery.json": "{}", "curve.json": '{"rows": []}'}, r"cannot read .* curve.json"),
    ({"metrics.csv": b"\xff\xfe\x00"}, r"metrics.csv: file must be a log of Lightning's CSVLogger"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, files, match):
    folder = tmp_path / "none"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for options in ([], ["--json"]):
        with pytest.raises(CheckpointError, match=match):
            eff(folder, *options)
    assert not list(tmp_path.rglob("*.html"))


def test_wrong_places_and_runs_named_twice(tmp_path):
    run = write(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"eff report: runs must differ"):
        eff(run, tmp_path / "." / "run")
    with pytest.raises(ConfigError, match=r"--out must be an .html file"):
        eff(run, "--out", tmp_path / "page.pdf")
    assert re.search("eff_report", eff("--help").output)


def test_a_written_receipt_says_where_it_lies(tmp_path):
    receipt = Receipt(RECEIPT)
    assert "eff report" not in receipt.text()
    receipt.write(tmp_path / "run")
    assert receipt.text().endswith(f"{tmp_path / 'run' / RECEIPT_FILE}; as an HTML page: eff report {tmp_path / 'run'}")


def test_a_folders_name_commands_no_terminal(tmp_path):
    output = eff(write(tmp_path / "run\x1b[31m")).output
    assert r"run\u001b[31m" in output
    assert "\x1b" not in output


def test_a_report_without_sentences_leaves_out_empty_lists_and_what_is_per_layer():
    report = {"layers": 2, "left_out": {}, "per_layer": [1, 2], "tensors": ["a"], "ticket": None}
    assert sentences("of_somebody_else", report) == ["layers 2, tensors 1, ticket none"]
