"""A model that its user wrapped with peft: what merging would undo is refused, whatever drives the session."""

import pytest
import torch
from lora_runs import net

from shared_core import Session
from shared_core.errors import CompatibilityError

peft = pytest.importorskip("peft")

RECIPES = {"prune": {"sparsity": 0.8}, "cluster": {"bits": 2, "min_size": 1}, "lottery": {"out": "rounds"}}


def wrapped(**options):
    return peft.get_peft_model(net(), peft.LoraConfig(**{"target_modules": ["0", "2"], "r": 2, **options}))


def attach(key, model, *, allow_partial=False, **options):
    session = Session({key: {**RECIPES[key], **options}, "allow_partial": allow_partial})
    session.attach(model)
    return session


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
@pytest.mark.parametrize("key", RECIPES)
def test_adapters_and_what_is_beneath_them_are_refused(key, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for include in ([], ["*.base_layer"]):
        with pytest.raises(CompatibilityError, match=f"{key}: .*PEFT.*merge"):
            attach(key, wrapped(**options), include=include)
    assert not list(tmp_path.iterdir())


def test_layers_that_are_trained_whole_are_pruned_and_stay_so_when_adapters_are_merged():
    model = wrapped(modules_to_save=["4"])
    options = {"skip": ["*lora_*"], "begin": 0, "schedule": "one_shot"}
    session = attach("prune", model, allow_partial=True, **options)
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=2)
    session.finish()
    merged = model.merge_and_unload()
    assert (merged[4].weight == 0).float().mean() == pytest.approx(0.8, abs=0.02)
    assert merged[0].weight.count_nonzero() == merged[0].weight.numel()


def test_merged_models_are_pruned():
    model = wrapped().merge_and_unload().requires_grad_(True)
    assert set(attach("prune", model).context.touched["prune"].tensors) == {"0.weight", "2.weight", "4.weight"}
