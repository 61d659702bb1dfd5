"""Distributed checkpoints (DCP) as ingredients: sharded and whole, both trainers' layouts, damaged and unsafe ones."""

import os
import pickle
import re

import pytest
import torch
from gadgets import Reduce
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from shared_core.checkpoint_formats import expand, open_ingredient
from shared_core.errors import CheckpointError
from shared_core.soup import greedy_soup, save_soup, uniform_soup


def weights(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(6, 4).to(dtype), "a.bias": torch.randn(6).to(dtype), "b.weight": torch.randn(3, 2).T,
        "norm.count": torch.tensor(seed + 3),
    }  # fmt: skip


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    save(content, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def content_of(folder):
    """What torch itself reads from it, optimizer and all."""
    dcp_to_torch_save(folder, folder / "all.pt")
    found = torch.load(folder / "all.pt", weights_only=True)
    (folder / "all.pt").unlink()
    return found


OPTIMIZER = {"state": {"a.weight": {"exp_avg": torch.ones(6, 4), "step": torch.tensor(1.0)}},
             "param_groups": [{"lr": 0.1, "params": ["a.weight"]}]}  # fmt: skip
LAYOUTS = {
    "accelerate": (lambda w: {"model": w}, "pytorch_model_fsdp_0"),
    "fsdp": (lambda w: {"model": w, "optimizer_0": OPTIMIZER}, ""),
    "fsdp2": (lambda w: {"state_dict": w, "optimizer_0": OPTIMIZER, "step": 3}, ""),
    "stateful": (lambda w: {"app": {"model": w, "optim": OPTIMIZER}}, ""),
    "flat": (dict, ""),
    "named": (lambda w: {"net": w}, ""),
    "nested": (lambda w: {"model": {"a": {"weight": w["a.weight"], "bias": w["a.bias"]},
                                    "b": {"weight": w["b.weight"]}, "norm": {"count": w["norm.count"]}}}, ""),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_averaged_and_written_back(tmp_path, layout):
    nest, inner = LAYOUTS[layout]
    folders = []
    for seed in range(3):
        write(tmp_path / "run" / f"checkpoint-{seed}" / inner, nest(weights(seed)))
        folders.append(tmp_path / "run" / f"checkpoint-{seed}")
    assert expand([tmp_path / "run"]) == folders
    opened = [open_ingredient(folder) for folder in folders]
    for seed, item in enumerate(opened):
        assert all(torch.equal(item.tensor(key), value) for key, value in weights(seed).items())
    (folders[1] / "tokenizer.json").write_text("{}")
    (folders[1] / "trainer_state.json").write_text("{}")
    result = greedy_soup(opened, lambda state: 0.0)
    out = save_soup(result.state_dict, opened[1], tmp_path / "soup")
    found = content_of(out / inner)
    expected = uniform_soup([weights(seed) for seed in range(3)])
    written = open_ingredient(out)
    assert all(torch.equal(written.tensor(key), value) for key, value in expected.items())
    assert str(nest(expected).keys()) == str(found.keys()) or layout in ("fsdp", "fsdp2")
    assert not {"optimizer_0", "step"} & found.keys()
    others = {file.name for file in out.iterdir()} - {inner, ".metadata", "__0_0.distcp"}
    assert others == {"tokenizer.json"}


def test_lightnings_folder_keeps_what_loading_it_needs(tmp_path):
    for seed in range(2):
        folder = write(tmp_path / f"{seed}.ckpt", {"state_dict": weights(seed), "optimizer_0": OPTIMIZER})
        raw = {"eff_raw_state_dict": {"a.bias": torch.full((6,), float(seed))}} if seed else {}
        torch.save({"epoch": seed, "hyper_parameters": {"width": 3}, "loops": {}, "callbacks": {}, **raw},
                   folder / "meta.pt")  # fmt: skip
    soup = uniform_soup([tmp_path / "0.ckpt", tmp_path / "1.ckpt"])
    assert torch.allclose(soup["a.bias"], (weights(0)["a.bias"] + 1) / 2)  # the latent weights, where there are any
    out = save_soup(soup, open_ingredient(tmp_path / "1.ckpt"), tmp_path / "soup.ckpt")
    assert torch.load(out / "meta.pt", weights_only=True) == {"epoch": 1, "hyper_parameters": {"width": 3}}
    assert torch.equal(content_of(out)["state_dict"]["a.bias"], soup["a.bias"])


def sharded(folder, state_dict, rows=2):
    """Write as FSDP does: each tensor in pieces of rows, in a file a rank (the index of the whole, edited)."""
    write(folder, {"model": state_dict})
    index = FileSystemReader(folder).read_metadata()
    files = [open(folder / f"__{rank}_0.distcp", "ab") for rank in range(2)]  # noqa: SIM115
    for name, value in state_dict.items():
        if value.ndim == 0:
            continue
        key = f"model.{name}"
        pieces = value.split(rows)
        chunk = index.state_dict_metadata[key].chunks.pop()
        place = index.storage_data.pop(MetadataIndex(key, chunk.offsets))
        for number, piece in enumerate(pieces):
            offsets = torch.Size([number * rows, *(0,) * (value.ndim - 1)])
            file = files[number % 2]
            start = file.tell()
            torch.save(piece.clone(), file)
            index.state_dict_metadata[key].chunks.append(type(chunk)(offsets, piece.shape))
            index.storage_data[MetadataIndex(key, offsets)] = type(place)(
                f"__{number % 2}_0.distcp", start, file.tell() - start
            )
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_put_together(tmp_path, rows, dtype):
    folder = sharded(tmp_path / "two_ranks", weights(0, dtype), rows)
    item, expected = open_ingredient(folder), weights(0, dtype)
    assert {key: tuple(spec) for key, spec in item.specs.items()} == {
        key: (tuple(value.shape), value.dtype) for key, value in expected.items()
    }
    assert all(torch.equal(item.tensor(key), value) for key, value in expected.items())
    assert all(torch.equal(content_of(folder)["model"][key], value) for key, value in expected.items())


def test_the_index_runs_no_code(tmp_path):
    folder, witness = write(tmp_path / "dcp", {"model": weights(0)}), tmp_path / "ran"
    index = FileSystemReader(folder).read_metadata()
    index.planner_data = Reduce(os.mkdir, str(witness))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"may only contain classes that DCP writes, got posix.mkdir"):
        open_ingredient(folder)
    assert not witness.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert witness.exists()


@pytest.mark.parametrize("size", [0, 7, 100, 0.5, 0.99])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_truncated_files_are_refused_when_opened(tmp_path, file, size):
    path = write(tmp_path, {"model": weights(0)}) / file
    content = path.read_bytes()
    path.write_bytes(content[: size if isinstance(size, int) else int(size * len(content))])
    with pytest.raises(CheckpointError, match=re.escape(file) + ".*truncated"):
        open_ingredient(tmp_path)


def edited(folder, change):
    write(folder, {"model": weights(0)})
    index = FileSystemReader(folder).read_metadata()
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def test_an_index_that_lies_is_refused(tmp_path):
    def of_bias(index):
        return next(place for name, place in index.storage_data.items() if name.fqn == "model.a.bias")

    outside = edited(tmp_path / "outside", lambda index: setattr(of_bias(index), "relative_path", "../x.distcp"))
    with pytest.raises(CheckpointError, match="file name in the same folder"):
        open_ingredient(outside)
    packed = edited(tmp_path / "packed", lambda index: setattr(of_bias(index), "transform_descriptors", ["zstd"]))
    with pytest.raises(CheckpointError, match=r"without transforms, got .*zstd"):
        open_ingredient(packed)
    short = edited(tmp_path / "short", lambda index: index.state_dict_metadata["model.a.bias"].chunks.clear())
    with pytest.raises(CheckpointError, match=r"'model.a.bias' are missing"):
        open_ingredient(short)

    def swap(index):
        of_weight = next(place for name, place in index.storage_data.items() if name.fqn == "model.a.weight")
        vars(of_bias(index)).update(vars(of_weight))

    other = edited(tmp_path / "other", swap)
    with pytest.raises(CheckpointError, match=r"shape or dtype of a shard of 'model.a.bias'"):
        uniform_soup([other])


def test_what_is_no_model_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"weights under one of model, .*got 'net', 'optimizer'"):
        open_ingredient(write(tmp_path / "names", {"net": weights(0), "optimizer": OPTIMIZER}))
    with pytest.raises(CheckpointError, match="got 'net'"):  # `head` would be lost
        open_ingredient(write(tmp_path / "part", {"net": {"model": weights(0), "head": weights(1)}}))
    with pytest.raises(CheckpointError, match="got 'optimizer'"):
        open_ingredient(write(tmp_path / "optimizer_0", {"optimizer": OPTIMIZER}))
    with pytest.raises(CheckpointError, match="'extra' is not a tensor"):
        open_ingredient(write(tmp_path / "object", {"model": {**weights(0), "extra": "text"}}))


def test_formats_mix_under_the_names_of_the_first(tmp_path):
    """A tie is one tensor in a Hugging Face folder, two names of one in a .ckpt, two copies in a distributed one."""
    states = [{"wte": torch.randn(4, 3), "h": torch.zeros(3), "z": torch.zeros(3)} for _ in range(4)]
    hf, light, shards, memory = tmp_path / "hf", tmp_path / "light.ckpt", tmp_path / "dcp", dict(states[3])
    hf.mkdir()
    save_file(states[0], hf / "model.safetensors")
    torch.save({"state_dict": {f"model.{key}": value for key, value in states[1].items()}
                | {"model.head": states[1]["wte"]}}, light)  # fmt: skip
    write(shards, {"model": {"head": states[2]["wte"].clone(), **states[2]}})
    memory["head"] = memory["wte"]
    mean = sum(state["wte"] for state in states) / 4
    for first in (hf, light, shards, memory):
        others = [source for source in (hf, light, shards, memory) if source is not first]
        soup = uniform_soup([first, *others])
        names = {"wte", "h", "z"} if first is hf else {"wte", "h", "z", "head"}
        prefix = "model." if first is light else ""
        assert soup.keys() == {prefix + name for name in names}
        assert all(torch.allclose(soup[prefix + name], mean) for name in names & {"wte", "head"})
        assert soup.keys() == greedy_soup([*others[::-1], first][::-1], lambda state: 0.0).state_dict.keys()
    with pytest.raises(CheckpointError, match=r"names of .*hf, .* got no '.+'.*the first"):
        save_soup(uniform_soup([light, hf]), open_ingredient(hf), tmp_path / "soup")
    out = save_soup(uniform_soup([shards, hf]), open_ingredient(shards), tmp_path / "soup")
    assert content_of(out)["model"].keys() == {"wte", "h", "z", "head"}
    assert load_file(save_soup(uniform_soup([hf, shards]), open_ingredient(hf), tmp_path / "folder")
                     / "model.safetensors").keys() == {"wte", "h", "z"}  # fmt: skip


def test_formats_of_other_models_do_not_mix(tmp_path):
    write(tmp_path / "dcp", {"model": {"wte": torch.randn(4, 3), "head": torch.randn(4, 3)}})
    with pytest.raises(CheckpointError, match=r"same tensors, got 'head' in .*dcp but not in ingredient 0"):
        uniform_soup([{"wte": torch.randn(4, 3)}, tmp_path / "dcp"])
    with pytest.raises(CheckpointError, match=r"got 'wte' in ingredient 0 but not in ingredient 1"):
        uniform_soup([{"wte": torch.ones(1), "b": torch.ones(1)}, {"x.wte": torch.ones(1), "y.b": torch.ones(1)}])
