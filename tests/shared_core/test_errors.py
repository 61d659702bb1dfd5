"""Errors tell their parts, and arrive whole in another process."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

from shared_core.engine.recipe import Recipe
from shared_core.engine.services import Services
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, EffError, MissingExtraError
from shared_core.files.user_code import function
from shared_core.runs import RunError


def test_what_is_refused_is_told_by_its_parts() -> None:
    with pytest.raises(ConfigError) as refused:
        Recipe.from_dict({"prune": {"sparsity": 80}})
    assert (refused.value.where, refused.value.option) == ("prune.sparsity", "sparsity")
    with pytest.raises(ConfigError) as refused:
        function("no_colon", "eff export: --calibration")
    assert (refused.value.where, refused.value.option) == ("eff export", "--calibration")
    with pytest.raises(CompatibilityError) as unable:
        Services().load_teacher("teacher", nn.Linear(4, 4))
    error = unable.value
    assert (error.where, error.option) == ("bare loop", "distill.teacher")
    assert str(error) == f"{error.where}: {error.rule}; {error.remedy}"
    assert error.remedy == "load it and pass the object"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("prune", "sparsity must be in (0, 1], got 80", "80 % is written 0.8"),
        CheckpointError("soup: weights must be finite, got NaN"),
        MissingExtraError("export", "onnx", "onnx"),
        RunError("chain: stage 2 failed", 3),
    ],
)
def test_an_error_arrives_whole_in_another_process(error: EffError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.where, back.option, back.remedy) == (str(error), error.where, error.option, error.remedy)
    assert (type(back), vars(back)) == (type(error), vars(error))


def test_what_no_terminal_takes_is_escaped_and_what_is_too_long_is_cut() -> None:
    error = ConfigError("prune", f"include must be short, got {'x' * 5000}\ud800")
    text = str(error).encode().decode()
    assert len(text) < 2100
    assert "[…]" in text
