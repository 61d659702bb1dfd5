"""Running averages of tensors against their definitions in float64."""

import pytest
import torch

from shared_core.weight_average import RunningAverage, ema_decay


def values(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)} for _ in range(count)]


def reference(kind, seen, *, decay=0.9, warmup=True, k=3):
    """The definitions, in float64."""
    seen = [value["w"].double() for value in seen]
    if kind != "ema":
        return torch.stack(seen[-k:] if kind == "last_k" else seen).mean(0)
    mean = seen[0]
    for number, value in enumerate(seen[1:], 1):
        d = min(decay, (1 + number) / (10 + number)) if warmup else decay
        mean = d * mean + (1 - d) * value
    return mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kind", "warmup"), [("ema", True), ("ema", False), ("swa", True), ("last_k", True)])
def test_averages_are_the_definitions_in_float64(kind, warmup, dtype):
    seen, running = values(40, dtype), RunningAverage(kind, decay=0.9, warmup=warmup, k=3)
    for number, value in enumerate(seen, 1):
        running.update(value)
        mean = running.average("w")
        assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        tolerance = 1e-14 if dtype == torch.float64 else 2e-6
        expected = reference(kind, seen[:number], warmup=warmup)
        torch.testing.assert_close(mean.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_equal_values_is_that_value_to_the_bit(kind, dtype):
    value, running = values(1, dtype)[0], RunningAverage(kind, decay=0.999, k=7)
    for _ in range(16):
        running.update(value)
    assert torch.equal(running.average("w"), value["w"].float())


def test_the_last_values_are_the_only_ones_kept():
    running = RunningAverage("last_k", k=3)
    for value in values(10):
        running.update(value)
    assert (running.num_updates, len(running.kept), running.nbytes) == (10, 3, 3 * 15 * 4)


def test_warm_up_starts_low_and_ends_at_the_decay():
    assert ema_decay(0.9, 1) == 2 / 11
    assert ema_decay(0.9, 80) == 0.9
    assert ema_decay(0.0, 5) == 0.0
