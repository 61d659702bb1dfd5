"""The main job: its data, its flags, a whole story on a small table, and what it says to bad input."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import quickstart
import quickstart_data
import stdlib_fragments
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForSequenceClassification

from shared_core.errors import ConfigError, EffError

WORDS = {"fruit": "apple pear plum cherry", "tool": "hammer saw drill file", "bird": "robin crow owl finch"}


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
    return root, quickstart.main([*own_data, *SHORT, f"--output_dir={root}"])


def test_the_story_adds_one_technique_a_row(story):
    root, rows = story
    assert [row["name"] for row in rows] == ["teacher", "dense", "pruned", "distilled", "quantised", "soup"]
    techniques = [set(row["recipe"]) for row in rows[1:]]
    assert techniques == [
        set(),
        {"prune"},
        {"prune", "distill"},
        {"prune", "distill", "qat"},
        {"prune", "distill", "qat", "soup"},
    ]
    assert (root / "quickstart.png").stat().st_size > 10_000
    assert [row["name"] for row in json.loads((root / "results.json").read_text())["rows"]] == [r["name"] for r in rows]


def test_the_story_measures_what_it_says(story):
    root, rows = story
    figures = {row["name"]: row for row in rows}
    assert figures["dense"]["linear_sparsity"] == 0
    assert figures["teacher"]["parameters"] > 2 * figures["dense"]["parameters"]
    weights = load_file(root / "pruned" / "model.safetensors")
    linear = {name: w for name, w in weights.items() if w.ndim == 2 and "embeddings" not in name}
    zeros = sum(int((weight == 0).sum()) for weight in linear.values()) / sum(w.numel() for w in linear.values())
    assert figures["pruned"]["linear_sparsity"] == zeros == pytest.approx(0.8, abs=1e-3)
    for row in rows:
        assert (root / row["name"] / row["file"]).stat().st_size == row["file_bytes"] > row["zipped_bytes"]
        assert 0 <= row["accuracy"] <= 1
        assert row["latency_ms"] > 0
    assert figures["pruned"]["zipped_bytes"] < 0.9 * figures["dense"]["zipped_bytes"]
    assert figures["quantised"]["file_bytes"] < 0.9 * figures["dense"]["file_bytes"]


def test_the_soup_goes_on_from_the_last_run_and_averages_its_checkpoints(story):
    root, rows = story
    soup = rows[-1]["soup"]
    assert soup["score"] >= soup["best_single"]
    assert soup["candidates"] > 1
    assert all(Path(name).parent == root / "soup" for name in soup["ingredients"])
    assert rows[-1]["linear_sparsity"] >= 0.8 - 1e-3


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
    assert rows[0]["linear_sparsity"] == pytest.approx(0.5, abs=1e-3)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert sorted(model.config.label2id) == sorted(WORDS)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == model.config.vocab_size


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_file=nowhere.csv"], "nowhere.csv must be a readable table.*No such file"),
        (["--train_file="], "must be given together"),
        (["--text_column=txt"], "--text_column must be a column of the train split.*did you mean 'text'"),
        (["--label_column=class"], "--label_column must be a column"),
        (["--dataset_name=x"], "must come without --train_file"),
        (["--test_file=missing.csv"], "missing.csv must be a readable table"),
        (["--prune_sparsity=1.5"], r"prune.sparsity: sparsity must be in \[0, 1\), got 1.5"),
        (["--prune_every=5"], "--prune_every must come with --prune_sparsity"),
        (["--prune_sparsitty=0.8"], "--prune_sparsitty=0.8 is not a flag; did you mean 'prune_sparsity'"),
        (["--num_train_epochs=many"], "invalid float value"),
        (["--model_size=huge"], "invalid choice"),
        (["--distill_teacher=./no/such/teacher"], "teacher must be an existing folder"),
        (["--model_name_or_path=./no/such/model"], "--model_name_or_path must be"),
        (["--vocab_size=3"], "--vocab_size at least 300"),
    ],
)
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
