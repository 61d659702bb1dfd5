"""Normal numbers of our own: their formula in float64, their distribution, and the same bits everywhere."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from shared_core.privacy.normal import Normals


class Words:
    """Stands for a bit generator that returns these numbers again and again."""

    def __init__(self, *words):
        self.words = np.array(words, np.uint64)

    def random_raw(self, size):
        return np.resize(self.words, size)


def box_muller(words):
    """Return the numbers of these raw ones in float64: all cosines', then all sines'."""
    first, second = np.split(words.view(np.uint32).astype(np.int64), 2)
    u = (first % 2**31 + (second % 512 // 2 * 2 + 1) / 512) / 2**31
    angle = (second - (second >= 2**31) * 2**32) / 2**32 * np.pi
    radius = np.sqrt(-2 * np.log(u))
    return np.concatenate([np.where(first < 2**31, 1, -1) * radius * np.cos(angle), radius * np.sin(angle)])


def test_numbers_are_those_of_the_formula_in_float64():
    words, drawn = np.random.SFC64(1).random_raw(50_000), Normals(np.random.SFC64(1), 100_000).take(100_000)
    # u in 24 bits moves the radius where u is near 1 and the radius near 0.
    np.testing.assert_allclose(drawn, box_muller(words), rtol=2e-6, atol=4e-4)
    assert np.abs(drawn - box_muller(words)).mean() < 1e-7


@pytest.mark.parametrize("word", [0, 2**64 - 1, 2**31 - 1, 2**31, 2**63, 2**32, (2**31 - 1) << 32, 2**63 - 1])
def test_every_word_gives_a_finite_number(word):
    drawn = Normals(Words(word), 4).take(4)
    assert np.isfinite(drawn).all()
    assert np.abs(drawn).max() < 7.5


def test_the_distribution_is_the_normal_one():
    size = 1 << 20
    drawn = Normals(np.random.SFC64(0), size).take(size).astype(np.float64)
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        values = drawn**power
        assert abs(values.mean() - moment) < 4 * values.std() / size**0.5
    for bound in (2, 3, 4):
        expected = 2 * stats.norm.sf(bound) * size
        assert abs((np.abs(drawn) > bound).sum() - expected) < 4 * expected**0.5
    cosines, sines = drawn.reshape(-1, 2, 1 << 16).transpose(1, 0, 2)
    assert abs(np.mean(cosines * sines)) < 4 / (size / 2) ** 0.5
    assert abs(np.mean((cosines**2 - 1) * (sines**2 - 1))) < 4 * 2 / (size / 2) ** 0.5


def test_bits_are_the_same_on_every_platform_and_however_they_are_taken():
    whole = Normals(np.random.SFC64(7), 300_000).take(300_000, 0.5)
    assert hashlib.sha256(whole.tobytes()).hexdigest()[:16] == "59390b6483a5e1ae"
    parts = Normals(np.random.SFC64(7), 300_000)
    taken = [parts.take(size, 0.5) for size in (1, 0, 131_071, 3, 168_925)]
    np.testing.assert_array_equal(np.concatenate(taken), whole)
