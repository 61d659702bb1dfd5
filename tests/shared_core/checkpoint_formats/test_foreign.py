"""Checkpoints with hyperparameters of any class: weights are read, and nothing that a file names is imported or run."""

import argparse
import collections
import copyreg
import io
import pathlib
import pickle
import struct
import time
import zipfile

import pytest
import torch
from gadgets import archive
from torch import nn

from shared_core.checkpoint_formats import Foreign, load_checkpoint, open_ingredient, without_foreign
from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.cli.loading import state_dict_of
from shared_core.errors import CheckpointError
from shared_core.low_rank import LowRankConfig, factorize
from shared_core.low_rank import load as load_factors
from shared_core.soup import logged_metrics, save_soup, uniform_soup


class Settings(dict):
    """As those of yacs and easydict."""


class Steps(list):
    pass


class Custom:
    def __init__(self):
        self.depth = 3


def settings():
    values = Settings(width=5)
    values.frozen = True
    return values


FOREIGN = {
    "data": pathlib.Path("a/b"), "arguments": argparse.Namespace(seed=1), "settings": settings(), "steps": Steps([1]),
    "custom": Custom(), "groups": collections.defaultdict(list, a=[1]), "names": {"a"},
    "activation": nn.functional.relu, "optimizer": torch.optim.AdamW, "backbone": nn.Linear(2, 2), "pairs": {(1, 2): 3},
}  # fmt: skip


def weights(value=1.0):
    return {
        "w": torch.full((2, 3), value), "p": nn.Parameter(torch.full((2,), value)),
        "u": torch.ones(2, dtype=torch.uint16), "h": torch.full((3, 2), value, dtype=torch.bfloat16).t(),
    }  # fmt: skip


def written(path, value=1.0, **hyperparameters):
    content = {"state_dict": collections.OrderedDict(weights(value)), "hyper_parameters": hyperparameters}
    content |= {"epoch": 1, "global_step": 4, "pytorch-lightning_version": "2.6.0", "hparams_name": "kwargs"}
    torch.save(content | {"eff_deployment": {"low_rank": {}}, "callbacks": {"Saver": {"path": path}}}, path)
    return path


def test_every_kind_of_object_beside_the_weights_is_left_unread(tmp_path):
    content = load_checkpoint(written(tmp_path / "a.ckpt", width=5, **FOREIGN))
    for name, value in weights().items():
        read = content["state_dict"][name]
        assert read.dtype == value.dtype
        assert torch.equal(read.float(), value.float())
    kept, lost = without_foreign(content["hyper_parameters"])
    assert kept == {"width": 5}
    assert [name.split()[0] for name in lost] == list(FOREIGN)
    assert "data (pathlib.PosixPath)" in lost
    assert content["global_step"] == 4


def test_a_soup_is_of_the_weights_and_keeps_the_plain_hyperparameters(tmp_path):
    paths = [written(tmp_path / f"{i}.ckpt", float(i), width=5, **FOREIGN) for i in range(2)]
    told = []
    out = save_soup(uniform_soup(paths), open_ingredient(paths[0]), tmp_path / "soup.ckpt", say=told.append)
    content = torch.load(out, weights_only=True)
    assert content["state_dict"]["w"].tolist() == [[0.5] * 3] * 2
    assert content["hyper_parameters"] == {"width": 5}
    assert content["hparams_name"] == "kwargs"
    assert "data (pathlib.PosixPath)" in told[0]
    assert "them to load_from_checkpoint" in told[0]


def test_hyperparameters_that_are_one_object_are_left_out(tmp_path):
    content = {"state_dict": {"w": torch.ones(1)}, "hyper_parameters": Custom(), "hparams_type": Custom, "epoch": 2}
    torch.save(content, tmp_path / "a.ckpt")
    told = []
    out = save_soup({"w": torch.ones(1)}, open_ingredient(tmp_path / "a.ckpt"), tmp_path / "s.ckpt", say=told.append)
    assert torch.load(out, weights_only=True).keys() == {"state_dict", "epoch"}
    assert "Custom" in told[0]


def test_what_reads_checkpoints_reads_these(tmp_path):
    path = written(tmp_path / "a.ckpt", **FOREIGN)
    assert state_dict_of(path, "eff prune")["w"].tolist() == weights()["w"].tolist()
    assert read_deployment(path) == {"low_rank": {}}
    assert logged_metrics(open_ingredient(path)) == {}
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    factorize(net, LowRankConfig(rank=8))
    torch.save({"state_dict": net.state_dict(), "hyper_parameters": FOREIGN}, path)
    fresh = load_factors(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), path)
    assert torch.equal(fresh(torch.ones(1, 64)), net(torch.ones(1, 64)))


def test_other_files_with_objects_are_refused_as_before(tmp_path):
    for content in (nn.Linear(2, 2), {"model": nn.Linear(2, 2)}, [Custom()]):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"must hold only tensors and plain values.*code was not run"):
            open_ingredient(tmp_path / "a.pt")
    torch.save({"state_dict": {"w": Custom()}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="'w' must be a tensor, got Foreign"):
        open_ingredient(tmp_path / "a.ckpt")


# --- hostile ----------------------------------------------------------------------------------------------------------

FIRST = b"cx\ny\n0"
"""A name, taken off the stack again: torch's own reader stops at it."""
_MARK = "X\x06\x00\x00\x00MARKED".encode("latin1")


def spliced(path, operations):
    """A checkpoint whose hyperparameter `x` is what these operations of a pickle leave on the stack."""
    stream = io.BytesIO()
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"x": "MARKED"}}, stream)
    stream.seek(0)
    with zipfile.ZipFile(stream) as whole, zipfile.ZipFile(path, "w") as made:
        for name in whole.namelist():
            content = whole.read(name)
            assert not name.endswith("data.pkl") or content.count(_MARK) == 1
            made.writestr(name, content.replace(_MARK, operations))
    return path


def text(value):
    return b"V" + str(value).encode() + b"\n"


def runs_code(canary):
    """Operations that make the folder `canary` where names are looked up."""
    code = text(f"__import__('os').mkdir({str(canary)!r})")
    name = text(canary)
    return {
        "reduce of os": b"cposix\nmkdir\n(" + name + b"tR",
        "reduce of eval": b"cbuiltins\neval\n(" + code + b"tR",
        "reduce of exec, Python 2": b"c__builtin__\nexec\n(" + code + b"tR",
        "inst": b"(" + code + b"ibuiltins\neval\n",
        "obj": b"(cbuiltins\neval\n" + code + b"o",
        "stack global": text("builtins") + text("eval") + b"\x93(" + code + b"tR",
        "newobj": b"cposix\nmkdir\n(" + name + b"t\x81",
        "newobj_ex": b"cposix\nmkdir\n(" + name + b"t}\x92",
        "import": b"cbuiltins\n__import__\n(Vos\ntR",
        "subprocess": b"csubprocess\nrun\n((" + text("mkdir") + name + b"ltR",
        "inert: pathlib": b"cpathlib\nPath.mkdir\n(cpathlib\nPath\n(" + name + b"tRtR",
        "inert: pickle": b"cpickle\nloads\n(cposixpath\njoin\n(" + name + b"tRtR",
        "inert: getattr": b"cbuiltins\ngetattr\n(cshutil\nos\n" + text("mkdir") + b"tR(" + name + b"tR",
        "inert: partial": b"cfunctools\npartial\n(cshutil\nos.mkdir\ntR(" + name + b"tb",
        "inert: setstate": b"ccode\nInteractiveInterpreter\n)R(" + text("runsource") + code + b"db",
        "inert: torch": b"ctorch.storage\n_load_from_bytes\n(ctorch.hub\nload\n(" + name + b"tRtR",
    }  # fmt: skip


def test_nothing_that_a_file_names_runs(tmp_path):
    canary = tmp_path / "canary"
    for name, operations in runs_code(canary).items():
        path = spliced(tmp_path / "x.ckpt", operations)
        if name.startswith("inert"):
            content = load_checkpoint(path)
            assert content["state_dict"]["w"].tolist() == [1, 1]
            assert isinstance(content["hyper_parameters"]["x"], Foreign), name
        else:
            with pytest.raises(CheckpointError, match=r"x\.ckpt: .*which runs code; nothing was run"):
                load_checkpoint(path)
        assert not canary.exists(), name
    for name in ("reduce of os", "reduce of eval", "inst", "obj", "stack global"):  # the witness is one
        pickle.loads(b"\x80\x02" + runs_code(canary)[name] + b".")
        canary.rmdir()


def test_what_a_file_may_call_cannot_be_changed_by_it(tmp_path):
    rebuild = torch._utils._rebuild_tensor_v2
    defaults = rebuild.__defaults__
    own = vars(torch.nn.Parameter).copy()
    slots = b"(N}(V__defaults__\nNu" + b"t" + b"b"
    for target in (
        "torch._utils\n_rebuild_tensor_v2\n", "torch.nn.parameter\nParameter\n", "collections\nOrderedDict\n",
        "torch\nfloat32\n", "torch.storage\nUntypedStorage\n", "collections\nOrderedDict\n)R",
    ):  # fmt: skip
        load_checkpoint(spliced(tmp_path / "x.ckpt", FIRST + f"c{target}".encode() + slots))
    assert rebuild.__defaults__ == defaults
    assert vars(torch.nn.Parameter) == own


BROKEN = [
    b"ctorch\nfloat32\n)R", b"ctorch.storage\nUntypedStorage\n)R", b"ccollections\nOrderedDict\n(]tR", b"VUntyped\nQ",
    b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00K\x01K\x01\x89NtR", b"ctorch._utils\n_rebuild_parameter\nK\x07R",
    b"ctorch._utils\n_rebuild_parameter\n(cx\ny\n\x89NtR", b"\x82\x07", b"\x96" + struct.pack("<Q", 2**40),
    b"\x8e" + struct.pack("<Q", 2**62) + b"a", b"\x8b" + struct.pack("<i", -5), b")K\x01a", b")K\x01K\x02s", b"\xff",
    b"00000",
]  # fmt: skip


@pytest.mark.parametrize("operations", BROKEN, ids=range(len(BROKEN)))
def test_broken_programs_are_our_error(tmp_path, operations, monkeypatch):
    monkeypatch.setitem(copyreg._extension_cache, 7, print)
    with pytest.raises(CheckpointError, match=r"x\.ckpt"):
        load_checkpoint(spliced(tmp_path / "x.ckpt", FIRST + operations))


def test_large_numbers_and_shared_tuples_take_neither_memory_nor_time(tmp_path):
    memo = b"]r\xff\xff\xff\xff"
    bomb = FIRST + b")" + b"2\x86" * 60  # a tuple of the one before, twice
    itself = b"cx\ny\n0]q\xf0h\xf0a"
    began = time.monotonic()
    for operations in (FIRST + memo, b"}" + bomb + b"K\x01s", b"}" + bomb + b"K\x01s0(" + bomb + b"K\x01d", itself):
        content = load_checkpoint(spliced(tmp_path / "x.ckpt", operations))
        without_foreign(content["hyper_parameters"])
    assert time.monotonic() - began < 5


def test_storages_that_lie_about_their_size_are_refused(tmp_path):
    stream = io.BytesIO()
    torch.save({"state_dict": {"w": torch.ones(4)}, "x": Custom()}, stream)
    with zipfile.ZipFile(stream) as whole:
        (name,) = (name for name in whole.namelist() if name.endswith("data.pkl"))
        pickled = whole.read(name)
    size, large, negative = b"K\x04", b"M\xff\xff", b"J\xff\xff\xff\xff"
    assert pickled.count(size) == 2  # of the storage, and of the tensor
    for changed in (pickled.replace(size, large), pickled.replace(size, negative), pickled.replace(size, negative, 1)):
        (tmp_path / "x.ckpt").write_bytes(archive(changed))
        with pytest.raises(CheckpointError, match=r"x\.ckpt"):
            load_checkpoint(tmp_path / "x.ckpt")


def test_packed_and_broken_archives_are_refused(tmp_path):
    """Torch (2.13) maps packed bytes as if they were the weights."""
    path, packed = written(tmp_path / "a.ckpt"), tmp_path / "packed.ckpt"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name in whole.namelist():
            made.writestr(name, whole.read(name))
    with pytest.raises(CheckpointError, match=r"packed\.ckpt: .* is compressed"):
        load_checkpoint(packed)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"PK\x01\x02", b"PK\x01\x09"))
    with pytest.raises(CheckpointError, match="cannot read the checkpoint: Bad magic number"):
        load_checkpoint(path)


def test_other_containers_are_refused(tmp_path):
    inner = io.BytesIO()
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": Custom()}, inner)
    torch.save(
        {"state_dict": {"w": torch.ones(2)}, "x": Custom()}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False
    )
    (tmp_path / "nested.ckpt").write_bytes(archive(inner.getvalue()))
    with zipfile.ZipFile(tmp_path / "outer.ckpt", "w") as outer:
        outer.writestr("data.pkl", inner.getvalue())
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.ckpt")
    for name in ("old", "nested", "outer", "script"):
        with pytest.raises(CheckpointError, match=rf"{name}\.ckpt"):
            load_checkpoint(tmp_path / f"{name}.ckpt")
