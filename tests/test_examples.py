"""Every example runs as a user would run it, from another folder, and ends with a figure, every story with a table."""

import runpy
import sys
from pathlib import Path

import datasets
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ENDS = ("hf", "lightning")
STORIES = ("compact_lm_hf",)  # a minute
TABLES = {"story_cpu_serving": 5, "story_soup_a_sweep": 5, "story_less_memory_lm": 6}  # lines, with the headings
SCRIPTS = [
    path
    for path in sorted(EXAMPLES.glob("*_*.py"))
    if path.stem.rsplit("_", 1)[1] in ENDS and not path.stem.startswith("digits")  # data and model of the others
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in STORIES)) for path in SCRIPTS],
)
def test_example(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert any(character.isdigit() for character in capsys.readouterr().out.splitlines()[-1])
    assert len(script.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("example", ["average_hf", "average_lightning"])
def test_examples_take_a_folder_or_hub_id(example, tmp_path, monkeypatch, capsys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(image_size=16, patch_size=8, **sizes)
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
    rows = {"picture": [Image.new("L", (8, 8), 80 * (i % 3)) for i in range(12)], "kind": [i % 3 for i in range(12)]}
    pictures = datasets.Dataset.from_dict(rows).cast_column("picture", datasets.Image())
    for split in ("train", "test"):
        pictures.to_parquet(tmp_path / f"data/{split}.parquet")
    given = ["--dataset", "data", "--image_column", "picture", "--label_column", "kind"]
    if example.endswith("_hf"):
        given += ["--model", "model"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [example, *given])
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert any(character.isdigit() for character in capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow  # 15 to 25 seconds of CPU time each
@pytest.mark.parametrize("story", TABLES)
def test_story(story, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [story, "--quick"])
    runpy.run_path(str(EXAMPLES / f"{story}.py"), run_name="__main__")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(table) == TABLES[story]
    assert "nan" not in "".join(table)


def test_every_technique_has_an_example_on_both_front_ends():
    from shared_core.engine.registry import REGISTRY

    names = {path.stem for path in SCRIPTS}
    for one in REGISTRY.values():
        assert {f"{one.package.split('.')[1]}_{end}" for end in ENDS} <= names or {
            f"{one.key}_{end}" for end in ENDS
        } <= names
