"""Every example runs from another folder, ends with a result and leaves no file; a story ends with a table."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ENDS = ("hf", "lightning")
SLOW = ("stories/compact_lm",)  # a minute
TWO_PROCESSES = ("hf/gradient_compression", "lightning/gradient_compression", "lightning/distributed")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TABLES = {
    "cpu_serving": 5,
    "soup_a_sweep": 5,
    "less_memory_lm": 6,
    "smaller_lm": 7,
    "recover_quantized": 10,
}  # lines, with the headings
SCRIPTS = {
    str(path.relative_to(EXAMPLES).with_suffix("")): path
    for path in sorted(
        [*EXAMPLES.glob("hf/*.py"), *EXAMPLES.glob("lightning/*.py"), *EXAMPLES.glob("stories/comp*.py")]
    )
    if not path.stem.startswith("digits")  # data and model of the others
}


def run(script, *arguments, monkeypatch, folder):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SCRIPTS])
def test_example(name, tmp_path, monkeypatch, capfd):
    if name in TWO_PROCESSES:
        starts = TORCHRUN * name.startswith("hf/")  # Lightning starts the other one itself
        subprocess.run([sys.executable, *starts, SCRIPTS[name]], cwd=tmp_path, check=True)
    else:
        run(SCRIPTS[name], monkeypatch=monkeypatch, folder=tmp_path)
    assert re.search(r"\d", capfd.readouterr().out.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("example", ["hf/average", "lightning/average"])
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
    if example.startswith("hf/"):
        given += ["--model", "model"]
    run(SCRIPTS[example], *given, monkeypatch=monkeypatch, folder=tmp_path)
    assert re.search(r"accuracy.* [01]\.\d+", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow  # 15 to 25 seconds of CPU time each
@pytest.mark.parametrize("story", TABLES)
def test_a_story_prints_its_tables_without_nan(story, tmp_path, monkeypatch, capsys):
    run(EXAMPLES / "stories" / f"{story}.py", "--quick", monkeypatch=monkeypatch, folder=tmp_path)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(table) == TABLES[story]
    assert "nan" not in "".join(table)


def test_every_technique_has_an_example_on_both_front_ends():
    from shared_core.engine.registry import REGISTRY

    for one in REGISTRY.values():
        name = one.package.split(".")[1]
        assert all(f"{end}/{name}" in SCRIPTS or f"{end}/{one.key}" in SCRIPTS for end in ENDS)
