"""What DP-SGD spends and draws: accountants, Poisson sampling, the loaders and options that they need."""

import hashlib
import math

import numpy as np
import pytest
import torch
from privacy_runs import Run
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from shared_core import Recipe, Session
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.privacy import PoissonBatches, PrivacyConfig, classic_epsilon, epsilon, noise_multiplier_for
from shared_core.privacy.sampling import Secret

MNIST = (1.3, 256 / 60_000, 15 * 60_000 // 256)


@pytest.mark.parametrize(
    ("run", "classic", "tight"),
    [((4.0, 0.01, 10_000), 1.259, 1.035), ((4.0, 0.01, 40_000), 2.576, 2.21), (MNIST, 1.192, 0.954)],
)
def test_accountants_give_the_published_values(run, classic, tight):
    assert classic_epsilon(*run, 1e-5) == pytest.approx(classic, abs=1e-3)
    assert epsilon([run], 1e-5) == pytest.approx(tight, abs=1e-3)
    assert epsilon([run], 1e-5, "prv") < epsilon([run], 1e-5) < classic_epsilon(*run, 1e-5)


def test_classic_epsilon_is_the_gaussian_mechanisms_without_sampling():
    # q = 1: rdp(α) = α / 2σ²
    expected = min(5 * order / 8 + math.log(1e5) / (order - 1) for order in range(2, 257))
    assert classic_epsilon(2.0, 1.0, 5, 1e-5) == pytest.approx(expected)
    assert classic_epsilon(2.0, 1 - 1e-12, 5, 1e-5) == pytest.approx(expected)


def test_parts_of_a_run_compose_and_no_noise_is_infinite():
    assert epsilon([(1.0, 0.1, 3), (1.0, 0.1, 4)], 1e-5) == pytest.approx(epsilon([(1.0, 0.1, 7)], 1e-5))
    assert epsilon([], 1e-5) == 0
    assert epsilon([(0.0, 0.1, 1)], 1e-5) == math.inf == classic_epsilon(0, 0.1, 1, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_solved_noise_just_suffices(accountant):
    spent = [(1.0, 0.01, 50)]
    noise = noise_multiplier_for(3.0, 0.01, 500, 1e-5, accountant=accountant, spent=spent)
    assert epsilon([*spent, (noise, 0.01, 500)], 1e-5, accountant) <= 3.0
    assert epsilon([*spent, (0.995 * noise, 0.01, 500)], 1e-5, accountant) > 3.0


def test_a_target_that_is_spent_already_is_refused():
    with pytest.raises(ConfigError, match="target_epsilon must be reachable"):
        noise_multiplier_for(0.1, 0.01, 500, 1e-5, spent=[(1.0, 0.01, 50)])


def test_every_example_is_included_with_the_same_probability_and_alone():
    batches = PoissonBatches(50, 5, 2, lambda: Secret(bytes(range(16))), lambda: 0)
    draws = np.zeros((4000, 50))
    for step, row in enumerate(draws):
        row[batches.chosen(step)] = 1
        assert sorted(batches.part(step, 0) + batches.part(step, 1)) == batches.chosen(step).tolist()
    bound = 4.5 * math.sqrt(0.2 * 0.8 / 4000)  # the largest of 50
    assert np.abs(draws.mean(0) - 0.2).max() < bound
    assert abs(draws.sum(1).var() - 50 * 0.2 * 0.8) < 1.0  # binomial: a shuffled batch would have 0
    assert np.abs(np.corrcoef(draws.T) - np.eye(50)).max() < 0.09
    assert abs(np.corrcoef(draws[:-1].sum(1), draws[1:].sum(1))[0, 1]) < 0.09


def test_an_epoch_goes_on_where_the_last_one_ended_and_replays_what_a_resume_skips():
    drawn = [0]
    batches = PoissonBatches(40, 5, 2, lambda: Secret(bytes(16)), lambda: drawn[0])
    first = list(batches)
    assert len(first) == len(batches) == 8
    drawn[0] = 8
    second = list(batches)
    assert second != first
    drawn[0] = 13
    batches.begin_epoch_again()
    assert list(batches) == second
    drawn[0] = 13
    assert list(batches)[:3] == second[5:]  # from inside a step
    other = PoissonBatches(40, 5, 2, lambda: Secret(b"x" * 16), lambda: 0)
    assert list(other) != first


def test_a_generator_on_the_cpu_takes_the_whole_of_its_seed():
    key = bytes(range(16))
    words = np.frombuffer(hashlib.shake_256(key + b"noise 3 7").digest(4 * 624), np.uint32)
    expected = np.random.MT19937()
    expected.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    drawn = torch.rand(2000, generator=Secret(key).generator("noise 3", 7))
    assert drawn.tolist() == (expected.random_raw(2000) % 2**24 / 2**24).tolist()


@pytest.mark.parametrize("secure_mode", [False, True])
def test_noise_is_normal_and_its_own_in_each_tensor_and_step(secure_mode):
    size = 1 << 18
    like = [torch.empty(size), torch.empty(size), torch.empty(size // 2, dtype=torch.complex64)]
    drawn = [
        torch.view_as_real(part).flatten() if part.is_complex() else part
        for step in (0, 1)
        for part in Secret(bytes(16)).noise(like, 0.5, step, secure_mode=secure_mode)
    ]
    for part in drawn:
        values = part.double().numpy() / 0.5
        assert stats.kstest(values, "norm").pvalue > 0.01
        for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
            assert abs((values**power).mean() - moment) < 4 * (values**power).std() / size**0.5
    assert float((torch.corrcoef(torch.stack(drawn)) - torch.eye(6)).abs().max()) < 4 / size**0.5
    again = Secret(bytes(16)).noise(like, 0.5, 1, secure_mode=secure_mode)
    assert torch.equal(next(again), drawn[3])


def test_secure_noise_is_half_the_sum_of_four_numbers():
    (drawn,) = Secret(bytes(16)).noise([torch.empty(100)], 2.0, 5, secure_mode=True)
    generator = Secret(bytes(16)).generator("noise 0", 5)
    torch.normal(0.0, 2.0, (1, 1), generator=generator)  # Opacus drops the first
    parts = [torch.normal(0.0, 2.0, (100,), generator=generator) for _ in range(4)]
    torch.testing.assert_close(drawn, sum(parts) / 2)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3)


def test_loaders_that_cannot_be_sampled_are_refused():
    session = Session({"dp": {"noise_multiplier": 1.0}})
    session.attach(nn.Linear(3, 2))
    technique, data = session.techniques["dp"], TensorDataset(torch.zeros(10, 3))
    with pytest.raises(CompatibilityError, match="Stream"):
        technique.loader(DataLoader(Stream(), batch_size=2))
    with pytest.raises(CompatibilityError, match="WeightedRandomSampler"):
        technique.loader(DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)))
    with pytest.raises(CompatibilityError, match="one DataLoader, got list"):
        technique.loader([DataLoader(data)])
    with pytest.raises(ConfigError, match="draws 12 examples"):
        technique.loader(DataLoader(data, batch_size=4), 3)
    with pytest.raises(TrainingError, match="must be drawn by Poisson sampling"):
        session.begin([], total_steps=5)
    technique.loader(DataLoader(data, batch_size=2))
    with pytest.raises(TrainingError, match=r"loader=\.\.\."):
        Session({"dp": {"noise_multiplier": 1.0}}).techniques["dp"].rows  # noqa: B018


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "one of noise_multiplier and target_epsilon"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "one of noise_multiplier and target_epsilon"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be in"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta must be in"),
        ({"noise_multiplier": 1.0, "max_grad_norm": 0}, "max_grad_norm must be in"),
        ({"noise_multiplier": 1.0, "secure_mode": True, "seed": 5}, "secure_mode .*seed"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(ConfigError, match=says):
        PrivacyConfig(**options)


def test_delta_must_fit_the_data_and_a_target_the_length_of_the_run():
    with pytest.raises(ConfigError, match=r"delta must be below .* 40"):
        Run(nn.Linear(3, 2), noise_multiplier=1.0, delta=0.1)
    with pytest.raises(ConfigError, match=r"target_epsilon .*a known number of steps"):
        Run(nn.Linear(3, 2), target_epsilon=2.0, steps=None)


def test_either_flag_switches_it_on():
    assert Recipe.from_flags({"dp_target_epsilon": 3.0})["dp"].target_epsilon == 3.0
    assert Recipe.from_flags({"dp_noise_multiplier": "1.5"})["dp"].noise_multiplier == 1.5
    with pytest.raises(ConfigError, match="--dp_noise_multiplier"):
        Recipe.from_flags({"dp_delta": 1e-6})
