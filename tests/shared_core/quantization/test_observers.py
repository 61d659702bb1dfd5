"""Observers: ranges that no split of a stream changes, counted NaN, channels, types and states."""

import math

import pytest
import torch
from observed_data import DATA, HISTOGRAMS, STREAMING, sample

from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.quantization import make_observer


@pytest.mark.parametrize("kind", STREAMING)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", DATA)
def test_observers_do_not_depend_on_batches_and_order(kind, symmetric, name):
    x = sample(name)
    options = {"bins": 512} if kind in HISTOGRAMS else {}
    joint, other, third = (make_observer(kind, symmetric=symmetric, **options) for _ in range(3))
    joint.update(x)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    for index, part in enumerate(shuffled.split(217)):
        (third if index % 3 == 0 else other).update(part)
    other.merge(third)
    assert all(torch.equal(a, b) for a, b in zip(joint.range(), other.range(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(joint.scale_zero_point(), other.scale_zero_point(), strict=True))


def test_minmax_is_exact_and_symmetric_doubles_the_larger_side():
    x = torch.tensor([-0.3, 2.7, 1.1])
    for symmetric, low in ((False, -0.3), (True, -2.7)):
        observer = make_observer("minmax", symmetric=symmetric)
        observer.update(x)
        assert torch.equal(torch.stack(observer.range()), torch.tensor([low, 2.7]))
    scale, zero_point = observer.scale_zero_point()
    assert (scale, zero_point) == (torch.tensor(2.7) / 127, 0)


def test_ema_is_the_recurrence_and_an_empty_batch_no_step_of_it():
    observer = make_observer("ema", ema_constant=0.25)
    batches = [torch.randn(50, generator=torch.Generator().manual_seed(seed)).double() for seed in range(5)]
    low, high = batches[0].min().item(), batches[0].max().item()
    observer.update(batches[0])
    for batch in batches[1:]:
        observer.update(torch.empty(0))
        observer.update(torch.tensor([math.nan, math.inf]))
        observer.update(batch)
        low += 0.25 * (batch.min().item() - low)
        high += 0.25 * (batch.max().item() - high)
    assert [bound.item() for bound in observer.range()] == pytest.approx([low, high], rel=1e-14)
    assert observer.non_finite == 8
    with pytest.raises(ConfigError, match="order"):
        observer.merge(observer)


@pytest.mark.parametrize("kind", [*STREAMING, "ema"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.3, -7.1, 1e-38, -3e38])
@pytest.mark.parametrize("count", [1, 1000])
def test_a_constant_is_its_own_range(kind, symmetric, value, count):
    observer = make_observer(kind, symmetric=symmetric)
    observer.update(torch.full((count,), value))
    value = torch.tensor(value).item()
    assert [bound.item() for bound in observer.range()] == ([-abs(value), abs(value)] if symmetric else [value, value])
    scale, zero_point = observer.scale_zero_point()
    assert 0 < scale < math.inf
    assert observer.qmin <= zero_point <= observer.qmax
    if value == 0:
        assert scale == 1


@pytest.mark.parametrize("kind", [*STREAMING, "ema"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_nan_and_infinity_are_counted_and_move_nothing(kind, symmetric):
    x = sample("normal")
    clean, dirty = (make_observer(kind, symmetric=symmetric) for _ in range(2))
    clean.update(x)
    dirty.update(torch.cat([x[:1500], torch.tensor([math.nan, math.inf]), x[1500:], torch.tensor([-math.inf])]))
    assert all(torch.equal(a, b) for a, b in zip(clean.range(), dirty.range(), strict=True))
    assert (clean.non_finite, dirty.non_finite) == (0, 3)
    hopeless = make_observer(kind, symmetric=symmetric)
    hopeless.update(torch.full((4,), math.nan))
    with pytest.raises(TrainingError, match=r"got none \(4 NaN or infinite\)"):
        hopeless.range()


@pytest.mark.parametrize("kind", [*STREAMING, "ema"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_below_float32_give_float32_and_the_values_as_they_are(kind, dtype):
    x = sample("normal").to(dtype)
    observer, wide = make_observer(kind), make_observer(kind)
    observer.update(x)
    wide.update(x.double())
    result = torch.float64 if dtype == torch.float64 else torch.float32
    for bound, expected in zip(observer.range(), wide.range(), strict=True):
        assert bound.dtype == result
        assert bound.double().item() == pytest.approx(expected.item(), rel=1e-7)
    assert observer.scale_zero_point()[0].dtype == result


@pytest.mark.parametrize("kind", [*STREAMING, "ema"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_have_the_ranges_they_would_have_alone(kind, axis):
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7)[:, None, None]
    options = {"bits": 4, "bins": 64} if kind in HISTOGRAMS else {"bits": 4}
    observer = make_observer(kind, axis=axis, **options)
    observer.update(x)
    observer.update(2 * x)
    low, high = observer.range()
    for channel in range(x.shape[axis]):
        alone = make_observer(kind, **options)
        alone.update(x.select(axis, channel))
        alone.update(2 * x.select(axis, channel))
        assert (low[channel], high[channel]) == alone.range()
    scale, zero_point = observer.scale_zero_point()
    assert scale.shape == zero_point.shape == (x.shape[axis],)
    with pytest.raises(ConfigError, match="channels"):
        observer.update(torch.ones(9, 9, 9))


@pytest.mark.parametrize("kind", [*STREAMING, "ema"])
@pytest.mark.parametrize("axis", [None, 1])
def test_a_saved_state_goes_on_bit_for_bit(kind, axis, tmp_path):
    first, second, third = (sample("heavy", seed).view(1000, 3) for seed in range(3))
    straight = make_observer(kind, axis=axis)
    straight.update(first)
    straight.update(second)
    torch.save(straight.state_dict(), tmp_path / "state.pt")
    resumed = make_observer(kind, axis=axis)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for observer in (straight, resumed):
        observer.update(third)
    assert straight.state_dict().keys() == resumed.state_dict().keys()
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]) if torch.is_tensor(value) else True
    assert all(torch.equal(a, b) for a, b in zip(straight.range(), resumed.range(), strict=True))
    with pytest.raises(CheckpointError, match="qmin"):
        make_observer(kind, axis=axis, bits=4).load_state_dict(straight.state_dict())
    damaged = {name: value for name, value in straight.state_dict().items() if not torch.is_tensor(value)}
    with pytest.raises(CheckpointError, match="tensors"):
        resumed.load_state_dict(damaged)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("minmx", {}, "did you mean 'minmax'"),
        ("minmax", {"bins": 64}, "no option 'bins'"),
        ("mse", {"percentil": 99}, "no option"),
        ("percentile", {"percentile": 50.0}, "above 50"),
        ("percentile", {"percentile": math.nan}, "above 50"),
        ("ema", {"ema_constant": 0.0}, "above 0"),
        ("ema", {"ema_constant": math.nan}, "above 0"),
        ("kl", {"bins": 256}, "twice the 256 codes"),
        ("mse", {"bits": 1}, "from 2 to 16"),
        ("mse", {"qmin": 0}, "both"),
        ("mse", {"qmin": 4, "qmax": 4}, "below qmax"),
        ("mse", {"qmin": 0, "qmax": 255, "symmetric": True}, "-qmax"),
        ("mse", {"axis": 0.5}, "axis"),
    ],
)
def test_what_is_refused(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        make_observer(kind, **options)


def test_a_batch_must_be_floating_and_a_range_must_have_data():
    observer = make_observer("mse")
    with pytest.raises(ConfigError, match="floating-point"):
        observer.update(torch.ones(3, dtype=torch.int64))
    observer.update(torch.empty(0))
    with pytest.raises(TrainingError, match="finite values"):
        observer.range()
    with pytest.raises(ConfigError, match="same kind"):
        observer.merge(make_observer("kl"))


def test_codes_of_a_relu_begin_at_zero():
    for kind in STREAMING:
        observer = make_observer(kind, qmin=0, qmax=255)
        observer.update(sample("relu"))
        scale, zero_point = observer.scale_zero_point()
        assert zero_point == 0
        assert scale == observer.range()[1] / 255
