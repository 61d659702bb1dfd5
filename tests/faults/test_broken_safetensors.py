"""A broken safetensors file is refused by name wherever one is read, in memory of its size, and no model changes."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from shared_core.checkpoint_formats.opening import teacher_from_weights
from shared_core.cli.loading import load_weights
from shared_core.engine.saving.state_file import STATE_FILE, load_state, save_state
from shared_core.errors import CheckpointError
from shared_core.lottery_ticket import Ticket, read_ticket, write_ticket
from shared_core.low_rank import LowRankConfig, factorize
from shared_core.low_rank import load as load_factors
from shared_core.soup import uniform_soup


def net(width=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))


def factors():
    model = net()
    factorize(model, LowRankConfig(rank=1, force=True, min_size=0, skip=["1"]))
    return model.state_dict()


def soup(path, model):
    mean = uniform_soup([path, path])
    [mean[name] for name in mean]


def state(path, model):
    path.rename(path.with_name(STATE_FILE))
    load_state(path.parent)


def ticket(path, model):
    found = read_ticket(path)
    [found.weights[name] for name in found.weights]


READERS = {
    "soup": (soup, lambda folder: save(net().state_dict())),
    "weights of a command": (lambda p, model: load_weights(model, p, "eff prune"), lambda f: save(net().state_dict())),
    "teacher": (teacher_from_weights, lambda folder: save(net().state_dict())),
    "low rank": (lambda path, model: load_factors(model, path), lambda folder: save(factors())),
    "state": (state, lambda folder: save_state(folder, {"a": torch.ones(3), "b": [torch.ones(2)]}).read_bytes()),
    "ticket": (ticket, lambda folder: write_ticket(
        folder / "t", Ticket({"w": torch.ones(4) > 0}, {"w": torch.ones(4), "b": torch.ones(1)}, 3)
    ).read_bytes()),
}  # fmt: skip


@pytest.fixture(params=READERS)
def refused(request, tmp_path):
    """Check that a reader refuses bytes and leaves its model as it was; `refused.whole` is what it takes."""
    read, make = READERS[request.param]

    def check(content, error=CheckpointError):
        path, model = tmp_path / "x.safetensors", net()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        path.write_bytes(content)
        with pytest.raises(error):
            read(path, model)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    check.whole = make(tmp_path)
    check.name = request.param
    (tmp_path / "x.safetensors").write_bytes(check.whole)
    read(tmp_path / "x.safetensors", net())
    return check


def parts(content):
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header, data):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_file_cut_anywhere_is_refused(refused):
    header = 8 + struct.unpack("<Q", refused.whole[:8])[0]
    for length in (*range(header + 1), len(refused.whole) - 1):
        refused(refused.whole[:length])


def test_a_header_that_lies(refused):
    header, data = parts(refused.whole)
    first, second, *_ = [name for name in header if name != "__metadata__"]

    def changed(name=first, **fields):
        return with_header({**header, name: header[name] | fields}, data)

    begin, end = header[first]["data_offsets"]
    for size in (0, 2**63, 2**64 - 1, 2**32, 10**8 + 1, len(refused.whole)):
        refused(struct.pack("<Q", size) + refused.whole[8:])
    lies = [
        changed(data_offsets=[begin + 1, end + 1]), changed(data_offsets=[end, begin]),
        changed(data_offsets=[0, 2**63]), changed(data_offsets=header[second]["data_offsets"]),
        changed(data_offsets=[begin, end - 1]),
        changed(data_offsets=[-1, end]), changed(data_offsets=[begin]), changed(data_offsets="x"),
        changed(dtype="F64"), changed(dtype="Q7"), changed(dtype=None), changed(shape=[2**40, 2**40]),
        changed(shape=[-1]), changed(shape=None), changed(shape=[[1]]), with_header({}, data), with_header([], data),
        with_header({**header, "gap": header[first]}, data), refused.whole + b"x", b"", with_header("{" * 9999, data),
        with_header({**header, "__metadata__": {"a": 1}}, data), with_header({first: header[first]}, data),
        with_header(json.dumps(header)[:-1] + f', "{first}": {json.dumps(header[second])}}}', data),
        with_header("", b""),
    ]  # fmt: skip
    for content in lies:
        refused(content)


def test_values_that_are_no_weights(refused):
    if refused.name not in ("weights of a command", "teacher", "low rank"):
        pytest.skip("a soup leaves them out and says so; state may hold anything")
    tensors = factors() if refused.name == "low rank" else dict(net().state_dict())
    name = next(reversed(tensors))
    for value in (float("nan"), float("inf")):
        refused(save({**tensors, name: torch.full_like(tensors[name], value)}))
    refused(save({**tensors, name: tensors[name].to(torch.int64)}))
    refused(save({**tensors, name: torch.empty(0)}))
    refused(save({key: value for key, value in tensors.items() if key != name}))
    refused(save({**tensors, "odd": torch.ones(1)}))


def test_memory_is_less_than_twice_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"0.weight": torch.zeros(2048, 2048), "0.bias": torch.zeros(2048)}, path)
    whole = path.read_bytes()
    header, data = parts(whole)
    lie = {**header, "0.weight": header["0.weight"] | {"shape": [2**20, 2**20]}}
    for content in (struct.pack("<Q", 2**40) + whole[8:], whole[:-1], with_header(lie, data)):
        path.write_bytes(content)
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
        before = resident("VmHWM")
        for read in (soup, teacher_from_weights, lambda path, model: load_weights(model, path, "eff")):
            with pytest.raises(CheckpointError):
                read(path, net())
        assert resident("VmHWM") - before < 2 * len(whole)


def resident(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
