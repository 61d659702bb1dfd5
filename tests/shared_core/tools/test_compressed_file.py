"""Damaged and hostile compressed files end in an error that names them, in little memory."""

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import CheckpointError
from shared_core.tools.compressed_file import HEADER, MAGIC, VERSION
from shared_core.tools.compression import CompressedFile, compress, decompress


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=generator)
    state = {
        "sparse": weight * (weight.abs() > 1.7), "dense": weight, "bias": torch.randn(20, generator=generator),
        "count": torch.arange(900), "tied": weight,
    }  # fmt: skip
    file = tmp_path_factory.mktemp("whole") / "m.eff"
    compress(state, file, files={"config.json": b"{}" * 50})
    return file.read_bytes()


def parts(content):
    _, _, size, offset, packed, _ = HEADER.unpack(content[: HEADER.size])
    return content[HEADER.size : offset], json.loads(zlib.decompress(content[offset : offset + packed])), size


def build(payload, index, *, size=None, version=VERSION, magic=MAGIC):
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    packed = zlib.compress(text)
    head = HEADER.pack(magic, version, len(text) if size is None else size, HEADER.size + len(payload), len(packed),
                       zlib.crc32(packed))  # fmt: skip
    return head + payload + packed


def read(tmp_path, content):
    file = tmp_path / "hostile.eff"
    file.write_bytes(content)
    return decompress(file), CompressedFile(file).files()


def test_the_file_itself_is_read(tmp_path, whole):
    tensors, files = read(tmp_path, whole)
    assert set(tensors) == {"sparse", "dense", "bias", "count", "tied"}
    assert files == {"config.json": b"{}" * 50}
    payload, index, _ = parts(whole)
    assert set(read(tmp_path, build(payload, index))[0]) == set(tensors)


def test_missing_empty_and_foreign(tmp_path):
    with pytest.raises(CheckpointError, match="must be a readable file"):
        decompress(tmp_path / "none.eff")
    for content in (b"", b"PK\x03\x04" + bytes(100)):
        with pytest.raises(CheckpointError, match="`eff compress`"):
            read(tmp_path, content)


def test_every_cut_is_seen(tmp_path, whole):
    for length in [*range(0, HEADER.size + 2), *range(HEADER.size + 2, len(whole), 53), len(whole) - 1]:
        with pytest.raises(CheckpointError):
            read(tmp_path, whole[:length])


def test_every_flipped_bit_is_seen_or_harmless(tmp_path, whole):
    expected, _ = read(tmp_path, whole)
    generator = np.random.default_rng(0)
    for place in [*range(HEADER.size), *generator.integers(HEADER.size, len(whole), 150).tolist()]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        try:
            found, _ = read(tmp_path, bytes(damaged))
        except CheckpointError:
            continue
        # the only freedom: a table of frequencies that decodes to the same symbols
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), place


def test_a_newer_format_says_so(tmp_path, whole):
    payload, index, _ = parts(whole)
    with pytest.raises(CheckpointError, match="must have format 1, got 2; update efftrain"):
        read(tmp_path, build(payload, index, version=2))


def changed(index, name, fields):
    return {**index, "tensors": [{**item, **fields} if item["name"] == name else item for item in index["tensors"]]}


BREAKS = {
    "negative length": ("bias", {"bytes": -80}),
    "length beyond the file": ("bias", {"bytes": 1 << 40}),
    "boolean as number": ("bias", {"bytes": True}),
    "fraction": ("bias", {"bytes": 80.0}),
    "unknown dtype": ("bias", {"dtype": "object"}),
    "unknown coding": ("bias", {"coding": "pickle"}),
    "unknown field": ("bias", {"code": "import os"}),
    "shape of text": ("bias", {"shape": "20"}),
    "negative shape": ("bias", {"shape": [-20]}),
    "shape that is too large for its bytes": ("bias", {"shape": [21]}),
    "a hundred dimensions": ("bias", {"shape": [1] * 99 + [20]}),
    "name is no text": ("bias", {"name": 3}),
    "two of one name": ("bias", {"name": "dense"}),
    "more values than codes": ("sparse", {"values": 100_000}),
    "no values for weights": ("sparse", {"values": 0}),
    "values but other count": ("sparse", {"values": 31}),
    "weights than elements": ("sparse", {"weights": 10_000}),
    "one weight more": ("sparse", {"weights": "plus one"}),
    "fewer gaps": ("sparse", {"gaps": 1}),
    "more gaps": ("sparse", {"gaps": 1 << 50}),
    "gaps of no bits": ("sparse", {"gap_bits": 0}),
    "gaps of many bits": ("sparse", {"gap_bits": 60}),
    "sparse integers": ("sparse", {"dtype": "int32"}),
    "smaller shape": ("sparse", {"shape": [64, 24]}),
    "other shape": ("dense", {"shape": [64, 49]}),
    "dtype of the same size": ("dense", {"dtype": "int32"}),
    "dtype of another size": ("dense", {"dtype": "float64"}),
    "dense said to be sparse": ("dense", {"coding": "sparse"}),
    "sparse said to be dense": ("sparse", {"coding": "dense"}),
    "other checksum": ("dense", {"crc": 12345}),
    "deflated to another size": ("count", {"shape": [901]}),
    "coded said to be deflated": ("dense", {"coding": "deflate"}),
}


@pytest.mark.parametrize("case", BREAKS)
def test_an_index_that_lies_is_refused(tmp_path, whole, case):
    payload, index, _ = parts(whole)
    name, fields = BREAKS[case]
    if fields.get("weights") == "plus one":
        fields = {"weights": next(item["weights"] for item in index["tensors"] if item["name"] == name) + 1}
    with pytest.raises(CheckpointError, match="hostile"):
        read(tmp_path, build(payload, changed(index, name, fields)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index: {**index, "ties": {"tied": "nowhere"}},
        lambda index: {**index, "ties": {"bias": "dense"}},
        lambda index: {**index, "ties": ["tied"]},
        lambda index: {**index, "tensors": index["tensors"][:-1]},
        lambda index: {**index, "tensors": index["tensors"] * 2},
        lambda index: {**index, "tensors": {"name": "x"}},
        lambda index: {**index, "files": [{**index["files"][0], "name": "../config.json"}]},
        lambda index: {**index, "files": [{**index["files"][0], "name": ".profile"}]},
        lambda index: {**index, "files": [{**index["files"][0], "name": "/etc/passwd"}]},
        lambda index: {**index, "files": [{**index["files"][0], "name": "C:x"}]},
        lambda index: {**index, "files": [{**index["files"][0], "size": 5}]},
        lambda index: {**index, "files": [{**index["files"][0], "crc": 5}]},
        lambda index: [],
        lambda index: b"\xff\xfe",
        lambda index: b"[" * 100_000,
        lambda index: b"{",
    ],
)
def test_an_index_of_another_form_is_refused(tmp_path, whole, spoil):
    payload, index, _ = parts(whole)
    with pytest.raises(CheckpointError, match="hostile"):
        read(tmp_path, build(payload, spoil(index)))


def bomb(name, **fields):
    return {"tensors": [{"name": name, "dtype": "float32", "crc": 0, **fields}]}


@pytest.mark.parametrize(
    ("payload", "index"),
    [
        # 4 TB of zeros from no payload but a table; 4 GB of one value; deflated zeros; a shape beyond all numbers
        (bytes(4), bomb("w", shape=[1 << 40], coding="sparse", bytes=4, gap_bits=2)),
        (bytes(5), bomb("w", shape=[1 << 30], coding="dense", bytes=5, values=1)),
        (zlib.compress(bytes(1 << 20)), bomb("w", shape=[1 << 28], coding="deflate", bytes=1038)),
        (bytes(4), bomb("w", shape=[1 << 62, 1 << 62], coding="sparse", bytes=4, gap_bits=2)),
    ],
)
def test_a_small_file_cannot_fill_the_memory(tmp_path, payload, index):
    index["tensors"][0]["bytes"] = len(payload)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"at most \d+ bytes, .* \d+; .* pass max_bytes"):
        read(tmp_path, build(payload, index))
    assert tracemalloc.get_traced_memory()[1] < 1 << 21
    tracemalloc.stop()


def test_an_index_that_inflates_without_end_is_refused(tmp_path):
    packed = zlib.compress(b" " * (1 << 26), 9)
    head = HEADER.pack(MAGIC, VERSION, 1000, HEADER.size, len(packed), zlib.crc32(packed))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="deflated data must be 1000 bytes"):
        read(tmp_path, head + packed)
    assert tracemalloc.get_traced_memory()[1] < 1 << 21
    tracemalloc.stop()
    head = HEADER.pack(MAGIC, VERSION, 1 << 31, HEADER.size, len(packed), zlib.crc32(packed))
    with pytest.raises(CheckpointError, match="must hold its index at its end"):
        read(tmp_path, head + packed)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [1], "coding": "sparse", "gap_bits": 2**31},
        {"shape": [1], "coding": "raw", "gap_bits": 2**62},
        {"shape": [2**62] * 20_000, "coding": "raw"},
    ],
)
def test_no_number_is_computed_that_has_no_end(tmp_path, fields):
    with pytest.raises(CheckpointError, match="dimensions and gaps"):
        read(tmp_path, build(bytes(4), bomb("w", bytes=4, **fields)))


def test_no_elements_in_a_shape_of_huge_dimensions(tmp_path):
    index = bomb("w", shape=[0, 1 << 62, 1 << 62], coding="raw", bytes=0)
    assert read(tmp_path, build(b"", index))[0]["w"].numel() == 0


def test_max_bytes_is_what_the_caller_says(tmp_path):
    compress({"w": torch.zeros(1000, 1000)}, tmp_path / "m.eff")
    assert decompress(tmp_path / "m.eff")["w"].shape == (1000, 1000)
    with pytest.raises(CheckpointError, match=r"at most 3999999 bytes, .* 4000000"):
        decompress(tmp_path / "m.eff", max_bytes=3_999_999)
    assert decompress(tmp_path / "m.eff", max_bytes=4_000_000)["w"].shape == (1000, 1000)


@given(st.binary(max_size=400))
@settings(deadline=None, max_examples=100)
def test_any_payload_is_decoded_or_refused(tmp_path_factory, payload):
    size = len(payload)
    index = bomb("w", shape=[16, 8], coding="sparse", bytes=size, values=3, weights=9, gaps=11, gap_bits=2)
    with pytest.raises(CheckpointError):
        read(tmp_path_factory.getbasetemp(), build(payload, index))
    index = bomb("w", shape=[16, 8], coding="dense", bytes=size, values=3)
    with pytest.raises(CheckpointError):
        read(tmp_path_factory.getbasetemp(), build(payload, index))


def test_numbers_are_little_endian(whole):
    magic, version = struct.unpack("<8sI", whole[:12])
    assert magic == b"\x89EFF\r\n\x1a\n"
    assert version == 1
