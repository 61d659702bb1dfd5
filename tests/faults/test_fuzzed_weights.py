"""Files of weights that are cut, emptied, flipped or of other types: whoever reads them raises an error of ours."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file

from shared_core.checkpoint_formats import expand, open_ingredient
from shared_core.checkpoint_formats.adapter import check_adapters
from shared_core.errors import EffError
from shared_core.soup import logged_metrics, uniform_soup
from shared_core.soup.averaging import masked_ingredients

WEIGHTS = {"a.weight": torch.ones(4, 3), "a.bias": torch.zeros(4)}
INDEX = {"metadata": {"total_size": 64}, "weight_map": {"a.weight": "1.safetensors", "a.bias": "2.safetensors"}}
ODD = [None, True, float("nan"), float("inf"), 10**400, -1, 1e308, "", "../x", "x" * 5000, "\0", "\ud800", [], [[]], {},
       {"": 7}]  # fmt: skip


def folder_of(path, **files):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return path


def single(path):
    save_file(WEIGHTS, folder_of(path, config__json={"n": 1}) / "model.safetensors")


def sharded(path):
    folder_of(path, **{"model__safetensors__index__json": INDEX})
    for number, name in enumerate(WEIGHTS, start=1):
        save_file({name: WEIGHTS[name]}, path / f"{number}.safetensors")


def torch_folder(path):
    torch.save(WEIGHTS, folder_of(path, config__json={"n": 1}) / "pytorch_model.bin")


def adapter(path):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {}}
    weights = {f"base_model.model.a.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    save_file(weights, folder_of(path, adapter_config__json=config) / "adapter_model.safetensors")


def modules(path):
    listed = [{"idx": i, "name": str(i), "path": f"{i}_X", "type": "t"} for i in range(2)]
    folder_of(path, modules__json=listed)
    for i in range(2):
        save_file(WEIGHTS, folder_of(path / f"{i}_X", config__json={}) / "model.safetensors")


def checkpoint(path):
    saver = {"monitor": "loss", "best_k_models": {str(path / "x.ckpt"): 1.0}}
    state = {"recipe": {"prune": {"sparsity": 0.5}}, "step": 3, "techniques": {}}
    content = {"state_dict": WEIGHTS, "callbacks": {"ModelCheckpoint": saver, "Eff": state}}
    torch.save(content | {"eff_run": {"id": "r", "step": 2, "metrics": {"loss": 1.0}}}, folder_of(path) / "x.ckpt")


def distributed(path):
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": dict(WEIGHTS)}, storage_writer=FileSystemWriter(path), no_dist=True)


MAKERS = [single, sharded, torch_folder, adapter, modules, checkpoint, distributed]


def read(path):
    target = path / "x.ckpt" if (path / "x.ckpt").exists() or (path / "x.ckpt").is_symlink() else path
    opened = [open_ingredient(found) for found in expand([target])]
    if opened[0].kind == "PEFT adapter":
        check_adapters(opened[0], opened[0])
    logged_metrics(opened[0])
    masked_ingredients(opened, keep_unpruned=True)
    uniform_soup(opened)


def changed_json(value, random_):
    """Return the same values with one of them another."""
    places = []

    def walk(inner):
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key))
            if isinstance(inner[key], dict | list):
                walk(inner[key])

    walk(value)
    if places:
        where, key = random_.choice(places)
        where[key] = random_.choice(ODD)
    return random_.choice([value, value, value, random_.choice(ODD)])


def damage(file, kind, random_):
    content = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "cut":
        file.write_bytes(content[: random_.randrange(len(content))])
    elif kind == "values":
        file.write_text(json.dumps(changed_json(json.loads(content), random_)))
    else:
        flipped = bytearray(content)
        for _ in range(random_.choice([1, 1, 3, 30])):
            flipped[random_.randrange(len(flipped))] ^= 1 << random_.randrange(8)
        file.write_bytes(flipped)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_damaged_files_are_our_errors(make, tmp_path):
    make(tmp_path / "whole")
    read(tmp_path / "whole")
    random_, refused = random.Random(make.__name__), 0
    files = sorted(file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole").rglob("*") if file.is_file())
    for number in range(250):
        shutil.copytree(tmp_path / "whole", tmp_path / "x", symlinks=True)
        file = tmp_path / "x" / random_.choice(files)
        kinds = ["folder", "loop", "cut", "flip", "flip", "flip", *(["values"] * 6 if file.suffix == ".json" else [])]
        kind = kinds[number] if number < 3 else random_.choice(kinds)
        damage(file, kind, random_)
        try:
            read(tmp_path / "x")
        except EffError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{number}: {kind} of {file.name} raised {error!r:.300}") from error
        shutil.rmtree(tmp_path / "x")
    assert refused > 50


@pytest.mark.parametrize(
    "part", ["eff_run", "callbacks", "hyper_parameters", "eff_raw_state_dict", "eff_deployment", "metrics"]
)
@pytest.mark.filterwarnings("ignore")
def test_odd_values_in_a_checkpoint_are_our_errors(part, tmp_path):
    for odd in [
        *ODD[:-2],
        [1],
        {"ModelCheckpoint": {"best_k_models": 7}},
        {"Eff": {"techniques": {"prune": {"masks": {"w": 1}}}}},
    ]:
        content = {"state_dict": WEIGHTS, "eff_run": {"id": "r", "step": 1, "metrics": {}}, "epoch": 1}
        content |= {"eff_run": {"id": "r", "metrics": odd}} if part == "metrics" else {part: odd}
        torch.save(content, tmp_path / "x.ckpt")
        try:
            read(tmp_path)
        except EffError:
            pass
        except Exception as error:
            raise AssertionError(f"{odd!r:.60} for {part} raised {error!r:.300}") from error
