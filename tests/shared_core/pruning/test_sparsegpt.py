"""`prune` by SparseGPT: block after block on compressed inputs, in the pattern asked for, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.numerics.second_order import compensated
from shared_core.pruning import PruneConfig, Pruning, prune

SPARSEGPT = {"sparsity": 0.5, "criterion": "sparsegpt"}


def llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | options)).eval()


def texts(count=3):
    generator = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(32, (4, 7 + i), generator=generator)} for i in range(count)]
    batches[0]["attention_mask"] = torch.ones(4, 7, dtype=torch.long).tril(3)
    return batches


def seen_by(model, layers, batches):
    """Return X Xᵀ of the layers' inputs in a forward of the whole model."""
    found = {}

    def see(name, x):
        found[name] = found.get(name, 0) + x.flatten(0, -2).T @ x.flatten(0, -2)

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0])) for name, layer in layers.items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("n_m", [None, (2, 4)])
def test_each_block_is_solved_on_what_the_compressed_blocks_before_give(n_m):
    model, batches = llama(), texts()
    expected = copy.deepcopy(model)
    linear = {name: layer for name, layer in expected.named_modules() if isinstance(layer, nn.Linear)}
    for part in ("layers.0.", "layers.1.", "layers.2.", "lm_head"):
        layers = {name: layer for name, layer in linear.items() if part in name}
        for name, hessian in seen_by(expected, layers, batches).items():
            new, _ = compensated(layers[name].weight, hessian, sparsity=0 if n_m else 0.5, n_m=n_m)
            layers[name].weight.data.copy_(new)
    report = prune(model, {**SPARSEGPT, **({"granularity": "n_m"} if n_m else {})}, batches)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert report.sparsity == 0.5
    assert report.criterion == "sparsegpt"
    assert report.scope == "local"
    assert report.batches == 3
    assert model.config.use_cache
    assert not model.training
    for name, mask in report.masks.items():
        weight = model.get_parameter(name)
        assert not weight[~mask].any()
        assert mask.sum() * 2 == mask.numel()
        assert n_m is None or (mask.unflatten(1, (-1, 4)).sum(2) == 2).all()


def test_other_models_are_solved_on_the_inputs_of_the_dense_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    expected = copy.deepcopy(model)
    x = torch.randn(40, 4, 4)
    for index, inputs in ((2, expected[:2](x)), (4, expected[:4](x))):
        new, _ = compensated(model[index].weight, inputs.T @ inputs, sparsity=0.25 if index == 2 else 0.5)
        expected[index].weight.data.copy_(new)
    report = prune(model, {**SPARSEGPT, "overrides": ("2:sparsity=0.25",)}, [x[:30], x[30:]])
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert "linear layer" in report.left_out["0.weight"]
    assert report.examples == 40
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()
    assert prune(gpt2, {**SPARSEGPT, "granularity": "n_m"}, texts(1)).sparsity == 0.5


class Scaled(nn.Module):
    """Blocks that are no chain: something happens between them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = 2 * block(x)
        return x


def test_blocks_that_are_no_chain_are_solved_on_the_inputs_of_the_dense_model():
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(30, 8)
    inputs = (2 * model.blocks[0](x)).detach()
    new, _ = compensated(model.blocks[1][0].weight, inputs.T @ inputs, sparsity=0.5)
    prune(model, SPARSEGPT, [x[:20], x[20:]])
    torch.testing.assert_close(model.blocks[1][0].weight.detach(), new.detach(), rtol=1e-4, atol=1e-5)


def bad_net():
    model = llama()
    model.model.layers[1].extra = nn.Linear(4, 4)
    return model


CONV = nn.Conv1d(4, 4, 1)


@pytest.mark.parametrize(
    ("make", "options", "batches", "error", "match"),
    [
        (llama, {}, None, ConfigError, "calibration must be given with criterion sparsegpt"),
        (lambda: nn.Sequential(CONV), {}, [torch.ones(1, 4, 4)], MatchError, "linear layer"),
        (lambda: nn.Sequential(CONV, nn.Linear(4, 4)), {"include": ("0",)}, [torch.ones(1, 4, 4)], CompatibilityError,
         "include must name layers that can be pruned, got 0"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {}, [torch.full((2, 4), torch.nan)], TrainingError,
         r"inputs of 0\.weight must be finite"),
        (bad_net, {}, texts(1), TrainingError, r"calibration must reach model\.layers\.1\.extra\.weight, got no input"),
    ],
)  # fmt: skip
def test_what_cannot_be_solved_is_refused(make, options, batches, error, match):
    with pytest.raises(error, match=match):
        prune(make(), {**SPARSEGPT, **options}, batches)


def test_a_run_cannot_solve():
    with pytest.raises(ConfigError, match=r"criterion must.*sparsegpt.*eff prune"):
        Pruning(PruneConfig(**SPARSEGPT))
