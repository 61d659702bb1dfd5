"""Callbacks of one technique: the option that switches it on needs no name, and what is missing is told."""

import inspect
from typing import get_args

import pytest

import hf_eff
import lightning_eff
from shared_core.engine.registry import OURS, REGISTRY
from shared_core.errors import ConfigError

# Values of switches that are not one of a few words.
VALUES = {
    "low_rank": 4, "lora": 4, "prune": 0.8, "lottery": "out", "cluster": 4, "distill": "teacher",
    "activations": "exact", "checkpointing": "block",
}  # fmt: skip


@pytest.mark.parametrize("package", [hf_eff, lightning_eff])
@pytest.mark.parametrize("key", sorted(OURS))
def test_a_callback_takes_its_switch_without_a_name(package, key):
    if (key, package) == ("loss_scale", lightning_eff):
        pytest.skip("a plugin there")
    config, kind = REGISTRY[key].config_class, getattr(package, REGISTRY[key].technique_name)
    with pytest.raises(
        ConfigError, match=rf"^{kind.__name__}: {config.switch} .*must be given.*write {kind.__name__}\("
    ):
        kind()
    value = VALUES.get(key) or get_args(config.hints()[config.switch])[0]
    if config.other_switches:  # which of them is meant cannot be told
        with pytest.raises(ConfigError, match=f"must be named, .*write {kind.__name__}\\({config.switch}="):
            kind(0.5)
        return
    assert repr(kind(value)) == repr(kind(**{config.switch: value}))
    assert next(iter(inspect.signature(kind).parameters)) == config.switch
    with pytest.raises(ConfigError, match=f"only {config.switch} can be given without its name, got 2 values"):
        kind(value, value)
    with pytest.raises(ConfigError, match=f"{config.switch} must be given once"):
        kind(value, **{config.switch: value})


@pytest.mark.parametrize("package", [hf_eff, lightning_eff])
def test_a_misspelled_switch_is_named(package):
    with pytest.raises(ConfigError, match=r"sparsty is not an option; did you mean 'sparsity'\?"):
        package.Pruning(sparsty=0.8)
