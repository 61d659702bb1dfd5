"""The main job: its data, its flags, a whole story on a small table, and what it says to bad input."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import quickstart
import quickstart_data
import quickstart_report
import quickstart_seeds
import stdlib_fragments
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForSequenceClassification, DataCollatorWithPadding

from shared_core.errors import ConfigError, EffError

WORDS = {"fruit": "apple pear plum cherry", "tool": "hammer saw drill file", "bird": "robin crow owl finch"}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    # the story sets it for its process, which here is that of other tests too
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFF_QUIET", "1")
        yield


@pytest.fixture(scope="module")
def fragments():
    return stdlib_fragments.load_fragments()


def table(path, rows, columns=("text", "label")):
    with path.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([columns, *rows])
    return path


@pytest.fixture(scope="module")
def own_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [(f"{word} number {turn}", label) for turn in range(8) for label in WORDS for word in WORDS[label].split()]
    return [
        f"--{name}_file={table(folder / f'{name}.csv', rows[start::3])}"
        for start, name in enumerate(("train", "validation", "test"))
    ]


ROWS = ["teacher", "student", "distilled", "best of a sweep", "soup", "pruned", "int8"]
SHORT = ["--num_train_epochs=2", "--per_device_train_batch_size=8", "--max_length=12", "--vocab_size=300"]


def test_no_file_is_on_two_sides_and_every_package_is_on_each(fragments):
    files = {name: {fragment.file for fragment in split} for name, split in fragments.splits.items()}
    assert not files["train"] & files["validation"]
    assert not files["train"] & files["test"]
    assert not files["validation"] & files["test"]
    assert len(fragments.packages) >= 8
    for split in fragments.splits.values():
        assert {fragment.label for fragment in split} == set(range(len(fragments.packages)))
        assert all(fragment.file.startswith(fragments.packages[fragment.label] + "/") for fragment in split)
    sizes = {name: len(split) for name, split in fragments.splits.items()}
    assert sizes["train"] > sizes["test"] > sizes["validation"] > 300


def test_fragments_are_eight_telling_lines_and_do_not_name_their_package(fragments):
    for fragment in fragments.splits["test"][::25]:
        assert fragment.text.count("\n") == 7
        assert fragments.packages[fragment.label] not in fragment.text.lower().replace(".", " ").split()


def test_the_data_is_the_same_each_time_and_follows_the_seed(fragments):
    assert stdlib_fragments.load_fragments() == fragments
    assert stdlib_fragments.load_fragments(seed=1) != fragments


def test_a_file_on_two_sides_is_found(fragments):
    leaky = {**fragments.splits, "test": [*fragments.splits["test"], fragments.splits["train"][0]]}
    with pytest.raises(ConfigError, match="must be in one split only"):
        stdlib_fragments.Fragments(leaky, fragments.packages).check()


def test_a_library_without_enough_packages_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 8 packages of 8 files"):
        stdlib_fragments.load_fragments(tmp_path)


def test_the_tokenizer_is_made_from_the_training_split_alone(own_data, monkeypatch):
    seen = []
    stock = stdlib_fragments.train_tokenizer
    monkeypatch.setattr(
        stdlib_fragments, "train_tokenizer", lambda texts, *sizes: seen.append(texts) or stock(texts, *sizes)
    )
    script, _ = quickstart.parse([*own_data, *SHORT])
    quickstart.prepare(script)
    rows = quickstart_data.read_rows(Path(script.train_file))
    assert seen == [[row["text"] for row in rows]]


@pytest.fixture(scope="module")
def story(own_data, tmp_path_factory):
    root = tmp_path_factory.mktemp("story")
    with pytest.MonkeyPatch.context() as patch:
        texts = tmp_path_factory.mktemp("texts")
        for split in ("train", "test"):
            table(texts / f"{split}.csv", [("apple pear plum cherry " * 8,)] * 99, ["text"])
        patch.setattr(quickstart_report, "MEMORY", (*quickstart_report.MEMORY, "--length=16", f"--dataset={texts}"))
        return root, quickstart.main([*own_data, *SHORT, "--labeled=12", f"--output_dir={root}"])


@pytest.mark.slow
def test_the_story_adds_one_technique_a_row(story):
    root, rows = story
    assert [row["name"] for row in rows] == ROWS
    techniques = {row["name"]: set(row.get("recipe", ())) for row in rows}
    assert techniques["teacher"] == techniques["student"] == set()
    assert techniques["distilled"] == {"distill"}
    assert techniques["pruned"] == {"distill", "prune"}
    assert techniques["int8"] == {"distill", "qat"}
    assert (root / "quickstart.png").stat().st_size > 10_000
    results = json.loads((root / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ROWS
    held = [row["mib"] for row in results["memory"]]
    assert len(held) == 4
    assert held[-1] < held[0]


@pytest.mark.slow
def test_the_story_measures_the_files_that_its_commands_wrote(story):
    _, rows = story
    figures = {row["name"]: row for row in rows}
    for row in rows:
        assert (Path(row["folder"]) / "model.onnx").stat().st_size == row["file_bytes"]
        assert row["accuracy"] * row["test_examples"] == pytest.approx(round(row["accuracy"] * row["test_examples"]))
        assert row["latency_ms"] > 0
    assert figures["soup"]["file_bytes"] == figures["student"]["file_bytes"]
    assert figures["pruned"]["file_bytes"] < 0.8 * figures["soup"]["file_bytes"]
    assert figures["int8"]["file_bytes"] < 0.5 * figures["pruned"]["file_bytes"]


@pytest.mark.slow
def test_the_accuracy_of_a_row_is_that_of_its_folder_s_model(story, own_data):
    _, rows = story
    script, _ = quickstart.parse([*own_data, *SHORT])
    tokenizer, splits, _ = quickstart.prepare(script)
    row = next(row for row in rows if row["name"] == "soup")
    model = BertForSequenceClassification.from_pretrained(row["folder"]).eval()
    batch = DataCollatorWithPadding(tokenizer)(list(splits["test"]))
    labels = batch.pop("labels")
    assert float((model(**batch).logits.argmax(-1) == labels).double().mean()) == pytest.approx(row["accuracy"])


@pytest.mark.slow
def test_the_soup_is_the_mean_of_the_sweep(story):
    root, _ = story
    members = [load_file(file) for file in sorted(root.glob("sweep-*/model.safetensors"))]
    assert len(members) == len(quickstart.SWEEP)
    for name, weight in load_file(root / "soup" / "model.safetensors").items():
        mean = torch.stack([member[name].double() for member in members]).mean(0)
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_three_of_four_neurons_are_gone(story):
    root, _ = story
    neurons = [
        len(load_file(root / run / "model.safetensors")["bert.encoder.layer.0.intermediate.dense.weight"])
        for run in ("soup", "small")
    ]
    assert neurons == [quickstart.SIZES["student"]["intermediate_size"], neurons[0] // 4]


@pytest.mark.slow
def test_the_page_tells_effects_in_standard_errors(story, monkeypatch):
    root, rows = story
    first = json.loads((root / "results.json").read_text())
    runs = []
    for gain in (0.20, 0.22, 0.24):  # of the distilled student: 22 points, spread 2, error 2 / sqrt(3)
        run = {row["name"]: dict(row) for row in rows}
        run["distilled"]["accuracy"] = run["student"]["accuracy"] + gain
        runs.append(run)
    monkeypatch.setattr(quickstart_seeds, "SEEDS", (1, 2, 3))
    page = quickstart_seeds.tables(first, runs)
    assert re.search(r"\| distilled \| student \| \+22\.0 ± 1\.2 \| 19 \|", page)
    for name in ROWS:
        assert f"\n| {name} | " in page
    assert page.count("MiB") == 1
    assert page.count(" x |\n") == len(first["memory"])
    drawn = list(quickstart_seeds.points(quickstart_seeds.BEGIN + page))
    assert [point["name"] for point in drawn] == ROWS
    student, distilled = (next(point for point in drawn if point["name"] == name) for name in ("student", "distilled"))
    assert distilled["accuracy"] - student["accuracy"] == pytest.approx(0.22, abs=2e-3)
    assert student["latency_ms"] == 1.0
    assert distilled["standard_error"] == pytest.approx(0.02 / 3**0.5, abs=1e-3)


def test_the_readme_shows_what_the_page_of_seeds_holds():
    root = Path(quickstart.__file__).resolve().parents[2]
    cells = [
        {cell.strip() for cell in line.split("|")} - {""}
        for line in (root / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    shown = (root / "README.md").read_text(encoding="utf-8").partition("make quickstart")[2].partition("\n## ")[0]
    told = [line for line in shown.splitlines() if line.startswith("| ")][1:]
    names = [line.split("|")[1].strip() for line in told]
    assert names == [row for row in ROWS if row in names]
    assert len(names) >= 4
    for line in told:
        assert any({cell.strip() for cell in line.split("|")} - {""} <= row for row in cells), line


def test_labels_that_are_not_kept_teach_only_without(own_data):
    script, training = quickstart.parse([*own_data, *SHORT, "--labeled=5"])
    texts = quickstart.prepare(script)[1]["train"]
    kept = quickstart.training_texts(script, training, texts)
    assert len(kept) == 5
    training.distill_unlabeled_field = "bare"
    told = quickstart.training_texts(script, training, texts)
    assert len(told) == len(texts)
    assert [row["input_ids"] for row in told if not row["bare"]] == list(kept["input_ids"])
    training.seed += 1
    assert quickstart.training_texts(script, training, texts)["bare"] != told["bare"]


@pytest.mark.slow
def test_one_student_from_flags_with_a_saved_model(story, own_data, tmp_path):
    root, _ = story
    rows = quickstart.main(
        [
            *own_data,
            *SHORT,
            f"--model_name_or_path={root / 'teacher'}",
            "--prune_sparsity=0.5",
            f"--output_dir={tmp_path}",
        ]
    )
    assert len(rows) == 1
    weights = load_file(tmp_path / "model.safetensors")
    linear = [w for name, w in weights.items() if w.ndim == 2 and "embeddings" not in name]
    zeros = sum(int((weight == 0).sum()) for weight in linear) / sum(weight.numel() for weight in linear)
    assert zeros == pytest.approx(0.5, abs=1e-3)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert sorted(model.config.label2id) == sorted(WORDS)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == model.config.vocab_size


@pytest.mark.slow
def test_one_run_stays_out_of_the_way_of_the_story(own_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart.main([*own_data, *SHORT, "--max_steps=2", "--prune_sparsity=0.5", "--prune_every=1"])
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"student"}
    assert (tmp_path / "runs" / "student" / "eff_receipt.json").is_file()


def test_json_is_read_as_a_list_and_as_lines(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = quickstart_data.read_rows
    assert read(tmp_path / "a.json") == read(tmp_path / "b.jsonl") == rows


@pytest.mark.parametrize(("flags", "message"), [
    (["--train_file=nowhere.csv"], "nowhere.csv must be a readable table.*No such file"),
    (["--train_file="], "must be given together"),
    (["--text_column=txt"], "--text_column must be a column of the train split.*did you mean 'text'"),
    (["--label_column=class"], "--label_column must be a column"),
    (["--dataset_name=x"], "must come without --train_file"),
    (["--test_file=missing.csv"], "missing.csv must be a readable table"),
    (["--prune_sparsity=1.5"], r"prune.sparsity: sparsity must be in \[0, 1\), got 1.5"),
    (["--prune_every=5"], "--prune_every needs --prune_sparsity"),
    (["--prune_sparsitty=0.8"], "--prune_sparsitty=0.8 is not a flag; did you mean '--prune_sparsity'"),
    (["--num_train_epochs=many"], "invalid float value"),
    (["--model_size=huge"], "invalid choice"),
    (["--distill_teacher=./no/such/teacher"], "teacher must be an existing folder"),
    (["--model_name_or_path=./no/such/model"], "--model_name_or_path must be"),
    (["--prune_sparsity=0.5", "--labeled=1000"], r"--labeled must be in \[1, 32\], got 1000"),
    (["--vocab_size=3"], "--vocab_size at least 300"),
])  # fmt: skip
def test_bad_input_is_one_error(own_data, tmp_path, flags, message):
    with pytest.raises(EffError, match=message):
        quickstart.main([*own_data, *SHORT, f"--output_dir={tmp_path / 'out'}", *flags])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_labels_that_training_never_saw_are_refused(own_data, tmp_path):
    strange = table(tmp_path / "strange.csv", [("granite", "stone")])
    with pytest.raises(ConfigError, match="labels of test must occur in train, got 'stone'"):
        quickstart.main([*own_data, f"--test_file={strange}", f"--output_dir={tmp_path / 'out'}"])


def test_an_output_folder_that_is_a_file_is_refused(own_data, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="--output_dir must be a folder"):
        quickstart.main([*own_data, f"--output_dir={tmp_path / 'taken'}"])


@pytest.mark.slow
def test_the_script_ends_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, quickstart.__file__, "--prune_sparsitty", "0.8"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("quickstart: flags: --prune_sparsitty is not a flag")
    assert not list(tmp_path.iterdir())
