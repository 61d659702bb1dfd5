"""The search: the curve and its files, stopped and extended searches, wrong options, wrong commands."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from commands import eff
from lottery_runs import train
from reports import part, report_of

from shared_core import Recipe
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.runs import LotterySearch
from shared_core.runs.lottery import curve_of, parse_round


def result(history, **more):
    entries = [{"step": step, "metrics": metrics} for step, metrics in history]
    return {"history": entries, "kept": 8, "numel": 10, "replay": None, "unmeasured": None, **more}


def test_the_curve_tells_when_a_ticket_is_as_good_as_the_dense_run():
    nan = float("nan")
    runs = [
        (0, "none", Path("a"), result([(1, {"acc": 0.5}), (2, {"acc": 0.9}), (3, {"acc": 0.8})], kept=10)),
        (1, "none", Path("b"), result([(1, {"acc": 0.8}), (2, {"acc": 0.85}), (3, {"acc": 0.7})])),
        (2, "none", Path("c"), result([(1, {"acc": nan}), (2, {"other": 1.0}), (3, {"acc": 0.8})], kept=6)),
        (2, "random_mask", Path("d"), result([(1, {"acc": 0.1}), (3, {"acc": 0.2})], kept=6)),
    ]
    last = curve_of(runs, metric="acc")
    assert [row.quality for row in last.rows] == [0.8, 0.7, 0.8, 0.2]
    assert [row.reached_dense_at for row in last.rows] == [2, 1, 3, None]
    assert [row.best_step for row in last.rows] == [2, 2, 3, 3]
    assert last.smallest_winning.folder == "c"
    best = curve_of(runs, metric="acc", quality="best")
    assert [row.quality for row in best.rows] == [0.9, 0.85, 0.8, 0.2]
    assert [row.reached_dense_at for row in best.rows] == [2, None, None, None]
    assert best.smallest_winning is None
    smaller = curve_of(runs, metric="acc", mode="min")
    assert [row.best_step for row in smaller.rows] == [1, 3, 3, 1]
    assert not curve_of([(0, "none", Path("a"), result([(1, {"val_loss": 1.0, "acc": 0.2})]))]).larger_is_better
    unmeasured = curve_of([(0, "none", Path("a"), result([]))])
    assert (unmeasured.metric, unmeasured.rows[0].quality, unmeasured.smallest_winning) == (None, None, None)


def test_the_metric_must_be_one_that_there_is():
    dense = [(0, "none", Path("a"), result([(1, {"acc": 0.5, "f1": 0.2})]))]
    with pytest.raises(ConfigError, match=r"metric must be chosen, got none; .*acc, f1"):
        curve_of(dense)
    with pytest.raises(ConfigError, match=r"got 'ac'; did you mean 'acc'\?"):
        curve_of(dense, metric="ac")
    with pytest.raises(ConfigError, match=r"got 'acc' \(there is no eval_dataset\)"):
        curve_of([(0, "none", Path("a"), result([], unmeasured="there is no eval_dataset"))], metric="acc")


@pytest.mark.slow
def test_a_search_writes_table_json_csv_and_plot(tmp_path):
    search = LotterySearch(
        rounds=2, rate=0.5, rewind_to=2, controls=["random_mask", "random_reinit"], control_rounds=[2]
    )
    curve = search.run(train, tmp_path)
    folders = ["round-00", "round-01", "round-02", "round-02-random_mask", "round-02-random_reinit"]
    assert [row.folder for row in curve.rows] == folders
    assert [row.control for row in curve.rows[2:]] == ["none", "random_mask", "random_reinit"]
    assert [row.replay for row in curve.rows] == [None, "bit-equal", "bit-equal", "bit-equal", None]
    assert len({row.kept for row in curve.rows[2:]}) == 1
    assert (curve.metric, curve.larger_is_better) == ("val_loss", False)
    assert json.loads((tmp_path / "curve.json").read_text())["rows"][1]["kept"] == curve.rows[1].kept
    rows = list(csv.DictReader(io.StringIO((tmp_path / "curve.csv").read_text())))
    assert [row["folder"] for row in rows] == folders
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert curve.table().row_count == 5
    told = json.loads((tmp_path / "round-01" / "round.json").read_text())
    assert [entry["step"] for entry in told["history"]] == [4, 8, 12]
    assert list(told["history"][0]["metrics"]) == ["val_loss"]  # and not how long it took
    assert sum(entry["kept"] for entry in told["tensors"]) == told["kept"] == curve.rows[1].kept
    assert not list(tmp_path.rglob(".eff-tmp-*"))
    text = part(report_of(tmp_path), "Lottery tickets")
    assert text.count("| random mask |") == text.count("| random re-init |") == text.count("| dense |") == 1
    assert f"| 1 | winning ticket | {curve.rows[1].kept:,} | {curve.rows[1].left:.6g} |" in text


@pytest.mark.slow
def test_a_stopped_search_goes_on_and_can_be_extended(tmp_path):
    calls = []

    def stops(recipe):
        calls.append(recipe["lottery"].out)
        if len(calls) == 3:
            raise KeyboardInterrupt
        train(recipe)

    options = {"rate": 0.5, "rewind_to": 2}
    with pytest.raises(KeyboardInterrupt):
        LotterySearch(rounds=3, **options).run(stops, tmp_path / "a")
    LotterySearch(rounds=3, **options).run(stops, tmp_path / "a")
    assert [Path(out).name[-2:] for out in calls] == ["00", "01", "02", "02", "03"]
    again = LotterySearch(rounds=4, controls=["random_mask"], control_rounds=[1], **options).run(stops, tmp_path / "a")
    assert [Path(out).name for out in calls[5:]] == ["round-01-random_mask", "round-04"]
    whole = LotterySearch(rounds=4, controls=["random_mask"], control_rounds=[1], **options).run(train, tmp_path / "b")
    assert again == whole
    for file in (tmp_path / "b").glob("*/ticket.safetensors"):
        assert file.read_bytes() == (tmp_path / "a" / file.parent.name / file.name).read_bytes()
    with pytest.raises(CheckpointError, match=r"rate is 0\.5, now 0\.4"):
        LotterySearch(rounds=4, rate=0.4, rewind_to=2).run(train, tmp_path / "a")
    (tmp_path / "a" / "lottery.json").write_text("{")
    with pytest.raises(CheckpointError, match="must be JSON"):
        LotterySearch(rounds=4, **options).run(train, tmp_path / "a")
    (tmp_path / "a" / "lottery.json").unlink()
    with pytest.raises(CheckpointError, match="must be a new folder or hold a search"):
        LotterySearch(rounds=4, **options).run(train, tmp_path / "a")


def test_a_wrong_metric_costs_one_run_and_no_second_one(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'val_loss'"):
        LotterySearch(rounds=1, metric="val_los").run(train, tmp_path)
    calls = []
    LotterySearch(rounds=1, metric="val_loss").run(lambda recipe: (calls.append(1), train(recipe)), tmp_path)
    assert len(calls) == 1


def test_training_without_the_recipe_is_told(tmp_path):
    with pytest.raises(TrainingError, match=r"round-00 must train with the given recipe, but left no round\.json"):
        LotterySearch(rounds=1).run(lambda recipe: None, tmp_path)


@pytest.mark.parametrize(("options", "message"), [
    ({"rounds": 0}, r"rounds must be in \[1, inf\), got 0"),
    ({"rounds": 2.5}, "rounds must be a whole number"),
    ({"rate": 1.0}, "rate must be in"),
    ({"rewind_to": -1}, "rewind_to must be a step"),
    ({"controls": ["random"]}, "controls must be one of random_reinit, random_mask, got 'random'"),
    ({"control_rounds": [11]}, r"control_rounds must be in \[1, 10\], got 11"),
    ({"control_rounds": [5]}, r"control_rounds \[5\] .*controls"),
    ({"controls": "random_mask"}, r"controls must be a list, got 'random_mask'"),
    ({"mode": "up"}, "mode must be one of auto, max, min"),
    ({"quality": "first"}, "quality must be one of last, best"),
    ({"out": "x"}, "out must not be given"),
    ({"rewind": "lr"}, "rewind must be one of"),
    ({"rewnd": "weights"}, "did you mean 'rewind'"),
])  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LotterySearch(**options)


def test_commands_are_taken_apart(tmp_path):
    path = str(tmp_path / "my_train.py")
    Path(path).touch()
    parsed, ours = parse_round(["python", "-u", path, "--lr", "1", "--qat_scheme", "int8", "--", "--prune_x"])
    assert parsed.interpreter == (sys.executable, "-u")  # whatever python is first on the path
    assert parsed.arguments == (path, "--lr", "1", "--prune_x")
    assert ours == Recipe.from_dict({"qat": {"scheme": "int8"}})
    assert parse_round(["/usr/bin/python3.11", "-m", "pkg.train", "x.py"])[0].arguments == (
        "-m",
        "pkg.train",
        "x.py",
    )
    for other in (
        ["torchrun", path],
        ["bash", "train.sh"],
        ["python", "-c", "pass"],
        ["python", "-X", "dev", path],
        ["python", "-m", "torch.distributed.run", "eff", "run", path, "--eff_recipe", "{recipe}"],
    ):
        assert parse_round(other)[0].interpreter == ()
    for command, message in (
        ([], "command must be given"),
        (["python", "nowhere.py"], "script must be a file, got 'nowhere.py'"),
        (["python", "-m"], "must be followed by a module"),
        (["python", path, "--lottery_out", "x"], "must not have flags of ticket"),
        (["python", path, "--prune_sparsitty", "1"], "did you mean '--prune_sparsity'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_round(command)


def test_the_command_line_refuses_before_it_trains(tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text("raise SystemExit('trained')")
    out = ["--out", tmp_path / "o"]
    run = ["--", "python", script]
    for arguments, message in (
        ([*out, "--rate", "2", *run], "^eff lottery: --rate must be in"),
        ([*out, "--control_rounds", "a", *run], "^eff lottery: --control-rounds must be a whole number"),
        ([*out, "--control", "none", *run], "^eff lottery: --control must be one of"),
        (out, "^eff lottery: COMMAND must be given"),
    ):
        with pytest.raises(ConfigError, match=message):
            eff("lottery", *arguments)
    with pytest.raises(CompatibilityError):
        eff("lottery", *out, *run, "--prune_sparsity", "0.5")
    assert not (tmp_path / "o").exists()
