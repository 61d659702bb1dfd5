"""Whatever is packed comes back to the bit: masks, 2:4 metadata, codebooks, sparse indices, cached rows, states."""

import tempfile

import numpy as np
import pytest
import torch
from eff_kernels import masks as kernels
from promise_drivers import difference
from torch import nn

from shared_core.distillation.teacher_cache import TeacherCache, top_k_targets, write_teacher_cache
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.tools import compressed_file as entropy
from shared_core.tools.compressed_file import gap_symbols, runs_of_zeros, weight_places
from shared_core.tools.compression import compress, decompress
from shared_core.weight_clustering.clustering import share_values

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Draws:
    """What a test needs of chance, the same for the same number."""

    def __init__(self, number):
        self.random, self.torch = np.random.default_rng(number), torch.Generator().manual_seed(number)

    def size(self, low, high):
        return int(self.random.integers(low, high))

    def shape(self):
        return tuple(int(size) for size in self.random.integers(0, 9, self.size(0, 4)))

    def mask(self, *shape):
        return torch.rand(shape, generator=self.torch) < self.random.random()

    def tensor(self, *shape, dtype=None):
        """Values of many magnitudes, zeros of both signs among them."""
        wide = torch.randn(shape, generator=self.torch) * 2.0 ** torch.randint(-9, 9, shape, generator=self.torch)
        return (wide * self.mask(*shape)).to(dtype or FLOATS[self.size(0, 4)])


def masks(draws):
    mask = draws.mask(*draws.shape())
    packed = kernels.pack_bits(mask)
    assert packed.numel() == kernels.packed_size(mask.shape)
    assert torch.equal(kernels.unpack_bits(packed, mask.shape), mask)


def sparse_index(draws):
    live = draws.mask(draws.size(0, 400)).numpy()
    symbols = gap_symbols(runs_of_zeros(live), draws.size(1, 9))
    bits = 8 if not len(symbols) else max(1, int(symbols.max()).bit_length())
    for width in range(bits, 9):
        symbols = gap_symbols(runs_of_zeros(live), width)
        assert np.array_equal(weight_places(symbols, width, 0)[0], np.flatnonzero(live))
    table = entropy.make_table(symbols, 256)
    decoder = entropy.Decoder(entropy.encode([(symbols, table)]))
    if len(symbols):
        assert np.array_equal(decoder.take(len(symbols), decoder.model(table)), symbols)
    assert decoder.is_empty()


def codebooks(draws):
    bits = draws.size(2, 9)
    weight = draws.tensor(draws.size(1, 30), draws.size(1, 30), dtype=FLOATS[draws.size(1, 4)])
    state = {"w": weight, "exact": draws.tensor(*draws.shape())}
    with tempfile.TemporaryDirectory() as folder:
        told = compress(state, f"{folder}/x", bits=bits, min_size=1, bits_of={"exact": None})
        back = decompress(f"{folder}/x")
    assert torch.equal(back["exact"], state["exact"])
    is_shared = any(tensor.clusters for tensor in told.tensors)  # not where a table of values would take more
    assert torch.equal(back["w"], share_values(weight, bits).weight() if is_shared else weight)


def states(draws):
    value = {"a": draws.tensor(*draws.shape()), "b": [draws.mask(3), {"c": float(draws.random.normal()), "d": None}]}
    with tempfile.TemporaryDirectory() as folder:
        save_state(folder, value)
        assert difference(value, load_state(folder)) is None


ROUND_TRIPS = [masks, sparse_index, codebooks, states]


@pytest.mark.parametrize("count", [300, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("round_trip", ROUND_TRIPS, ids=lambda each: each.__name__)
def test_what_is_packed_comes_back(round_trip, count):
    for number in range(count):
        round_trip(Draws(number))


@pytest.mark.parametrize("count", [300, pytest.param(1_000, marks=pytest.mark.slow)])
def test_what_a_teacher_said_comes_back(count, tmp_path):
    class Words(nn.Module):
        def forward(self, input_ids):
            return {"logits": logits[input_ids]}

    for store in range(count // 100):
        draws = Draws(store)
        classes, kept = draws.size(4, 60), draws.size(1, 4)
        logits = draws.tensor(100, classes, dtype=torch.float32)
        rows = torch.randperm(10**6, generator=draws.torch)[: 100 * 4].view(100, 4) % 100
        rows = torch.unique(rows, dim=0)
        options = {"top_k": kept, "temperature": float(draws.random.uniform(0.5, 4))}
        batches = [{"input_ids": part} for part in rows.split(7)]
        write_teacher_cache(Words(), batches, tmp_path / f"{store}", dtype="float32", shard_bytes=2000, **options)
        cache = TeacherCache.open(tmp_path / f"{store}")
        for part in rows[torch.randperm(len(rows), generator=draws.torch)].split(9):
            found, said = cache.lookup({"input_ids": part}), top_k_targets(logits[part].flatten(0, 1), **options)
            for name in ("indices", "log_probs", "tail_log_mass"):
                assert torch.equal(getattr(found, name).flatten(0, 1), getattr(said, name)), name
