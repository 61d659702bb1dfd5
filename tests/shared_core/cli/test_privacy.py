"""`eff privacy`: every accountant, both directions, wrong input."""

import functools

import pytest
from commands import told_by

from shared_core.errors import ConfigError

told = functools.partial(told_by, "privacy")


def test_every_accountant_is_told():
    found = told("--noise-multiplier", "4", "--sample-rate", "0.01", "--steps", "10000")["accountants"]
    assert {name: round(values["epsilon"], 3) for name, values in found.items()} == {
        "rdp": 1.035,
        "prv": 0.957,
        "classic": 1.259,
    }


def test_next_to_no_noise_has_a_bound():
    found = told("--noise-multiplier", "1e-9", "--sample-rate", "0.01", "--steps", "10")["accountants"]
    assert found["prv"]["epsilon"] == found["rdp"]["epsilon"] > 1e18


def test_a_target_is_solved_for_with_the_trainers_number_of_steps():
    found = told("--target-epsilon", "1", "--examples", "1000", "--batch-size", "30", "--epochs", "3")
    assert found["steps"] == 102  # an epoch of 1,000 in batches of 30 has 34
    assert all(0.99 < values["epsilon"] <= 1 for values in found["accountants"].values())


@pytest.mark.parametrize(("options", "says"), [
    ([], "one of --noise-multiplier and --target-epsilon"),
    (["--noise-multiplier", "1"], "--sample-rate must be in"),
    (["--sample-rate", "0.1", "--noise-multiplier", "1"], "--steps must be given"),
    (["--sample-rate", "0.1", "--steps", "3"], "one of --noise-multiplier and --target-epsilon"),
    (["--sample-rate", "0.1", "--steps", "3", "--noise-multiplier", "0"],
     r"--noise-multiplier must be in \(0, inf\), got 0"),
    (["--examples", "90", "--batch-size", "9", "--steps", "3", "--delta", "0.02"], r"delta must be in \(0, 1 / 90"),
    (["--examples", "10", "--batch-size", "20", "--target-epsilon", "1"], r"got 2\.0"),
    (["--examples", "0", "--batch-size", "20", "--target-epsilon", "1"], "--examples must be in"),
])  # fmt: skip
def test_wrong_input_is_told(options, says):
    with pytest.raises(ConfigError, match=says):
        told(*options)
