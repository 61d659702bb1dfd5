"""Compressed files: coding round trips, bit-exact reload of every dtype, every byte counted."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import CheckpointError, ConfigError, MissingExtraError, TrainingError
from shared_core.tools import compressed_file as entropy
from shared_core.tools import compression
from shared_core.tools.compressed_file import DTYPES, gap_symbols, runs_of_zeros, smallest_width, weight_places
from shared_core.tools.compression import CompressedFile, compress, decompress
from shared_core.weight_clustering import share_values
from shared_core.weight_clustering.clustering import SHARED_DTYPES


def pruned(*shape, keep=0.08, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    return (weight * (weight.abs() > weight.abs().quantile(1 - keep))).to(dtype)


def bits_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(bits_of(one), bits_of(other))


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 8))
@settings(deadline=None)
def test_gaps_tell_where_weights_are(live, bits):
    live = np.array(live, dtype=bool)
    symbols = gap_symbols(runs_of_zeros(live), bits)
    assert len(symbols) == 0 or symbols.max() < 2**bits
    places, _ = weight_places(symbols, bits, 0)
    assert np.array_equal(places, np.flatnonzero(live))
    # in pieces too, wherever they are cut
    found, following = [], 0
    for first in range(0, len(symbols), 7):
        places, following = weight_places(symbols[first : first + 7], bits, following)
        found += places.tolist()
    assert found == np.flatnonzero(live).tolist()


def test_gaps_are_those_of_the_paper():
    # figure 2 of arXiv:1510.00149: weights at 1, 4 and 15; three bits, so a gap over 8 takes a filler zero
    live = np.zeros(16, dtype=bool)
    live[[1, 4, 15]] = True
    assert gap_symbols(runs_of_zeros(live), 3).tolist() == [1, 2, 7, 3]


def test_the_width_of_a_gap_is_the_cheapest():
    runs = np.random.default_rng(0).geometric(0.05, 5000) - 1
    best, cost = smallest_width(runs)
    costs = []
    for bits in range(1, 9):
        counts = np.bincount(gap_symbols(runs, bits), minlength=2**bits)
        share = counts[counts > 0] / counts.sum()
        costs.append(-counts.sum() * float((share * np.log2(share)).sum()) + 8 * 2**bits)
    assert cost == pytest.approx(min(costs))
    assert costs[best - 1] == pytest.approx(min(costs))


@given(st.lists(st.integers(0, 40), max_size=400), st.lists(st.integers(0, 3), max_size=50))
@settings(deadline=None)
def test_symbols_come_back(first, second):
    streams = [np.array(symbols, dtype=np.uint8) for symbols in (first, second)]
    tables = [entropy.make_table(streams[0], 41), entropy.make_table(streams[1], 4)]
    decoder = entropy.Decoder(entropy.encode(list(zip(streams, tables, strict=True))))
    for symbols, table in zip(streams, tables, strict=True):
        if len(symbols):
            assert np.array_equal(decoder.take(len(symbols), decoder.model(table)), symbols)
    assert decoder.is_empty()


def huffman_bits(counts):
    import heapq

    heap, bits = [count for count in counts if count], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        bits += both
        heapq.heappush(heap, both)
    return bits


@pytest.mark.parametrize("skew", [0.05, 0.2, 0.5, 0.9])
def test_at_least_as_small_as_huffmans_code_with_tables(skew):
    symbols = (np.random.default_rng(0).geometric(skew, 30_000) - 1).clip(0, 31)
    table = entropy.make_table(symbols, 32)
    counts = np.bincount(symbols, minlength=32)
    ours = len(entropy.encode([(symbols, table)])) + len(table)
    # lengths of codes, a byte each; Huffman's is perfect at 0.5, and the coder's last state takes up to two words
    assert ours <= (huffman_bits(counts) + 8 * 32) / 8 + 8
    share = counts[counts > 0] / counts.sum()
    entropy_bytes = -counts.sum() * float((share * np.log2(share)).sum()) / 8
    assert ours - len(table) <= 1.003 * entropy_bytes + 8


def test_symbols_in_several_pieces(tmp_path, monkeypatch):
    for module in (entropy, compression):
        monkeypatch.setattr(module, "PIECE", 64)
    weight = pruned(40, 50)
    compress({"w": weight}, tmp_path / "w.eff")
    assert_same(decompress(tmp_path / "w.eff")["w"], share_values(weight, 5).weight())


@pytest.mark.parametrize("dtype", SHARED_DTYPES)
@pytest.mark.parametrize("keep", [0.001, 0.05, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_shared_weights_come_back_to_the_bit(tmp_path, dtype, keep, bits):
    weight = pruned(70, 9, 3, keep=keep, dtype=dtype)
    done = compress({"w": weight}, tmp_path / "w.eff", bits=bits)
    expected = share_values(weight, bits).weight()
    back = decompress(tmp_path / "w.eff")["w"]
    assert_same(back, expected)
    line = done.tensors[0]
    assert line.weights == int((expected != 0).sum())
    assert line.clusters <= 2**bits
    assert line.rms_error == pytest.approx(float((weight.double() - expected.double()).square().mean().sqrt()))
    # a second time nothing moves
    again = compress({"w": back}, tmp_path / "again.eff", bits=bits)
    assert again.tensors[0].rms_error == 0
    assert_same(decompress(tmp_path / "again.eff")["w"], expected)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (300, 2)])
def test_every_dtype_is_stored_exactly(tmp_path, name, shape):
    count = math.prod(shape) * DTYPES[name].itemsize
    raw = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tensor = (raw % 2 if name == "bool" else raw).view(DTYPES[name]).reshape(shape)
    state = {"block.x": tensor, "bias": torch.ones(3)}
    compress(state, tmp_path / "m.eff", bits_of={"block.x": None})
    back = decompress(tmp_path / "m.eff")
    assert list(back) == ["block.x", "bias"]
    assert_same(back["block.x"], tensor)


def test_vectors_small_tensors_and_integers_are_left_alone(tmp_path):
    state = {
        "bias": torch.randn(5000), "small": torch.randn(5, 50), "large": torch.randn(30, 50),
        "mask": torch.full((40, 40), -torch.inf, dtype=torch.float8_e5m2), "steps": torch.arange(4000).view(40, 100),
    }  # fmt: skip
    done = compress(state, tmp_path / "m.eff")
    back = decompress(tmp_path / "m.eff")
    assert {line.name for line in done.tensors if line.clusters} == {"large"}
    for name in ("bias", "small", "mask", "steps"):
        assert_same(back[name], state[name])
    assert next(line for line in done.tensors if line.name == "steps").coding == "deflate"


def test_bits_of_single_layers(tmp_path):
    state = {f"{name}.weight": torch.randn(30, 40) for name in ("conv1", "conv2", "fc", "head")}
    state["head.bias"] = torch.randn(10)
    widths = {"conv1": 8, "conv*": 4, "head": None, "fc.weight": 2}
    done = compress(state, tmp_path / "m.eff", bits=5, bits_of=widths)
    assert {line.name: line.clusters for line in done.tensors} == {
        "conv1.weight": 256, "conv2.weight": 16, "fc.weight": 4, "head.weight": 0, "head.bias": 0,
    }  # fmt: skip
    assert_same(decompress(tmp_path / "m.eff")["head.weight"], state["head.weight"])


def test_a_named_vector_is_shared(tmp_path):
    done = compress({"embedding": torch.randn(9000)}, tmp_path / "m.eff", bits_of={"embedding": 3})
    assert done.tensors[0].clusters == 8
    assert done.ratio > 8


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    embedding = torch.randn(100, 16)
    state = {"wte.weight": embedding, "mid": torch.randn(50, 50), "head.weight": embedding, "view": embedding[:50]}
    done = compress(state, tmp_path / "m.eff")
    assert done.original_bytes == 4 * (1600 + 2500 + 800)
    assert done.ties == {"head.weight": "wte.weight"}
    back = decompress(tmp_path / "m.eff")
    assert back["head.weight"] is back["wte.weight"]
    named = compress(state, tmp_path / "named.eff", bits_of={"head": None})  # by either of its names
    assert named.tensors[0].clusters == 0
    assert back["view"].data_ptr() != back["wte.weight"].data_ptr()


def test_every_byte_is_counted_and_none_is_unaccounted(tmp_path):
    state = {"a.weight": pruned(300, 400), "a.bias": torch.randn(300), "b.weight": torch.randn(64, 64).bfloat16()}
    files = {"config.json": b'{"model_type": "x"}' * 20}
    done = compress(state, tmp_path / "m.eff", files=files)
    size = (tmp_path / "m.eff").stat().st_size
    assert done.file_bytes == size
    assert done.original_bytes == 4 * 120_000 + 4 * 300 + 2 * 4096
    assert done.ratio == done.original_bytes / size
    content = (tmp_path / "m.eff").read_bytes()
    _, _, _, offset, packed, _ = struct.unpack("<8sIIQII", content[:32])
    assert 32 + sum(line.stored_bytes for line in done.tensors) + done.other_bytes == offset
    assert offset + packed == size
    assert CompressedFile(tmp_path / "m.eff").files() == files


def test_a_sparse_tensor_takes_what_its_entropy_says(tmp_path):
    weight = pruned(300, 784, keep=0.08)
    done = compress({"w": weight}, tmp_path / "w.eff", bits=5)
    shared = share_values(weight, 5)
    counts = torch.bincount(shared.codes.reshape(-1).long()).double()
    p = counts / counts.sum()
    per_weight = -(p * p.log2()).sum().item()  # places and codes together, if independent
    assert done.tensors[0].coding == "sparse"
    assert done.tensors[0].stored_bytes <= 1.01 * weight.numel() * per_weight / 8 + 4 * 32 + 32 + 128 + 8
    assert done.ratio > 37


def test_whichever_of_dense_and_sparse_is_smaller(tmp_path):
    state = {"sparse": pruned(200, 200, keep=0.05), "dense": pruned(200, 200, keep=0.9), "full": torch.randn(90, 90)}
    codings = {line.name: line.coding for line in compress(state, tmp_path / "m.eff").tensors}
    assert codings["sparse"] == "sparse"
    assert codings["full"] == "dense"
    flipped = torch.ones(64, 64)
    flipped[::2] = 0
    done = compress({"w": flipped}, tmp_path / "w.eff")
    assert_same(decompress(tmp_path / "w.eff")["w"], flipped)
    assert done.tensors[0].stored_bytes < 600


def test_a_table_that_does_not_pay_leaves_the_tensor_exact(tmp_path):
    weight = torch.randn(2, 60).half()
    done = compress({"w": weight}, tmp_path / "w.eff", bits=8, min_size=0)
    assert done.tensors[0].clusters == 0
    assert_same(decompress(tmp_path / "w.eff")["w"], weight)


def test_layouts_and_devices_of_views(tmp_path):
    base = torch.randn(4, 8, 6, 5)
    state = {
        "last": base.to(memory_format=torch.channels_last),
        "slice": base[:, 1::2],
        "turned": base.permute(2, 0, 3, 1),
    }
    compress(state, tmp_path / "m.eff", min_size=0)
    back = decompress(tmp_path / "m.eff")
    for name, tensor in state.items():
        assert_same(back[name], share_values(tensor, 5).weight())


def test_the_state_dict_is_not_changed_and_results_are_the_same_each_time(tmp_path):
    state = {"w": torch.randn(100, 100), "b": torch.randn(9)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    for name in ("a.eff", "b.eff"):
        compress(state, tmp_path / name)
    assert (tmp_path / "a.eff").read_bytes() == (tmp_path / "b.eff").read_bytes()
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items())


def test_a_failure_leaves_the_older_file(tmp_path):
    compress({"w": torch.ones(40, 40)}, tmp_path / "m.eff")
    before = (tmp_path / "m.eff").read_bytes()
    bad = {"a": torch.randn(50, 50), "fc2.weight": torch.full((40, 40), torch.nan)}
    with pytest.raises(TrainingError, match=r"compress: fc2\.weight: weights must be finite"):
        compress(bad, tmp_path / "m.eff")
    assert (tmp_path / "m.eff").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.eff"]


@pytest.mark.parametrize(
    ("state", "options", "error", "message"),
    [
        ({}, {}, CheckpointError, "must hold at least one tensor"),
        ({"w": 3}, {}, CheckpointError, "w must be a plain dense tensor, got int"),
        ({"w": torch.ones(3, 3).to_sparse()}, {}, CheckpointError, "w must be a plain dense tensor"),
        ({"w": torch.ones(3, device="meta")}, {}, CheckpointError, "w must be a plain dense tensor"),
        (torch.nn.Linear(2, 2), {}, ConfigError, "state_dict must be tensors by name, got Linear"),
        ({"w": torch.ones(3)}, {"bits": 9}, ConfigError, r"compress: bits must be .* in \[2, 8\], got 9"),
        ({"w": torch.ones(3)}, {"bits": 1}, ConfigError, "got 1"),
        ({"w": torch.ones(3)}, {"bits": float("nan")}, ConfigError, "got nan"),
        ({"w": torch.ones(3)}, {"bits_of": {"w": 11}}, ConfigError, "bits_of 'w': bits must be"),
        ({"w": torch.ones(3)}, {"bits_of": {"v*": 4}}, ConfigError, "pattern 'v\\*' matches no tensor"),
        ({"w": torch.ones(3)}, {"min_size": -1}, ConfigError, "min_size must be in"),
        ({"w": torch.ones(3)}, {"files": {"x": "text"}}, ConfigError, "files must be bytes .* got str as 'x'"),
        ({"w": torch.ones(3)}, {"files": {"../x": b""}}, ConfigError, "files must be bytes by plain name"),
    ],
)
def test_what_cannot_be_compressed_is_refused_before_a_file_is_written(tmp_path, state, options, error, message):
    with pytest.raises(error, match=message):
        compress(state, tmp_path / "m.eff", **options)
    assert not list(tmp_path.iterdir())


def test_without_constriction_the_error_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'efftrain\[compress\]'"):
        compress({"w": torch.randn(40, 40)}, tmp_path / "m.eff")
