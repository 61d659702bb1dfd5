"""Soups of LoRA adapters: what PEFT loads from them is the mean of what it loads from the ingredients."""

import copy
import functools
import json

import commands
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core.checkpoint_formats import open_ingredient
from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup import AdapterWeights, greedy_soup, save_soup, uniform_soup
from shared_core.soup.greedy import path_json


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 3, 3)
        self.inner = nn.Sequential(nn.Linear(48, 10), nn.Tanh(), nn.Linear(10, 7))
        self.head = nn.Linear(7, 4)

    def forward(self, tokens):
        return self.head(self.inner(self.conv(self.words(tokens)[:, None]).flatten(1)))


def base():
    torch.manual_seed(0)
    return Net()


def adapter(folder, seed, modules=("inner.0", "inner.2"), dtype=torch.float32, **options):
    options = {"r": 4, "lora_alpha": 8, "target_modules": list(modules), **options}
    model = get_peft_model(base(), LoraConfig(**options))
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / 3)
    model.to(dtype).save_pretrained(folder)
    return folder


def merged(folder):
    return PeftModel.from_pretrained(base(), folder).double().merge_and_unload().state_dict()


def outputs(folder):
    tokens = torch.arange(24).reshape(4, 6) % 11
    model = PeftModel.from_pretrained(base(), folder).eval()
    return model(tokens)


def check_mean(soup, folders, shares, tolerance=1e-6):
    got, parts = merged(soup), [merged(folder) for folder in folders]
    assert got.keys() == parts[0].keys()
    for name, value in got.items():
        expected = sum(share / sum(shares) * part[name] for share, part in zip(shares, parts, strict=True))
        assert (value - expected).abs().max() <= tolerance, name


ALL = ("words", "conv", "inner.0", "inner.2")
VARIANTS = {
    "linear": [{}, {}, {}],
    "scalings": [{"lora_alpha": 8}, {"lora_alpha": 3}, {"lora_alpha": 8, "use_rslora": True}],
    "rslora": [{"use_rslora": True}] * 3,
    "ranks": [{"r": 2}, {"r": 4}, {"r": 3}],
    "patterns": [
        {"modules": ALL, "rank_pattern": {"inner.0": 2}, "alpha_pattern": {"^inner.2": 5}}, {"modules": ALL},
        {"modules": ALL, "rank_pattern": {"conv": 1, r"\d": 3}},
    ],
    "embedding_and_convolution": [{"modules": ALL}] * 3,
    "bias_all": [{"bias": "all"}] * 3,
    "bias_lora_only": [{"bias": "lora_only"}] * 3,
    "bias_of_B": [{"lora_bias": True, "lora_alpha": 3}, {"lora_bias": True}, {"lora_bias": True, "use_rslora": True}],
    "modules_to_save": [{"modules_to_save": ["head"]}] * 3,
    "starts": [{"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"}, {}],
}  # fmt: skip


@pytest.mark.parametrize("weights", [None, [3, 1, 2]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_mean_of_adapters_is_the_mean_of_their_models(tmp_path, variant, weights):
    folders = [adapter(tmp_path / str(i), i, **options) for i, options in enumerate(VARIANTS[variant])]
    soup = save_soup(uniform_soup(folders, weights), open_ingredient(folders[0]), tmp_path / "soup")
    check_mean(soup, folders, weights or [1, 1, 1])
    # unmerged too: the forward pass takes scaling from the config, not from the merge
    model = PeftModel.from_pretrained(base(), soup).merge_and_unload().eval()
    assert torch.allclose(outputs(soup), model(torch.arange(24).reshape(4, 6) % 11), atol=1e-5)


def test_factors_of_equal_scaling_keep_their_bits_and_alpha(tmp_path):
    folders = [adapter(tmp_path / str(i), i, dtype=torch.bfloat16) for i in range(3)]
    soup = uniform_soup(folders)
    assert (soup.config["r"], soup.config["lora_alpha"]) == (12, 8)
    singles = [open_ingredient(folder) for folder in folders]
    for key, value in soup.items():
        dim = 0 if "lora_A" in key else 1
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, torch.cat([single.tensor(key) for single in singles], dim))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules": ALL, "use_rslora": True, "bias": "all"}])
def test_one_adapter_is_itself_bit_for_bit(tmp_path, options):
    folder = adapter(tmp_path / "one", 1, **options)
    for soup in (uniform_soup([folder]), uniform_soup([folder], [0.3], rank=1), greedy_soup([folder], len).state_dict):
        out = save_soup(soup, open_ingredient(folder), tmp_path / "soup")
        assert json.loads((out / "adapter_config.json").read_text()) == open_ingredient(folder).config
        assert (out / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
        (out / "adapter_model.safetensors").unlink()
        for file in out.iterdir():
            file.unlink()


def test_equal_adapters_keep_bits_and_rank(tmp_path):
    folder = adapter(tmp_path / "one", 1, modules=ALL, use_rslora=True, bias="all", modules_to_save=["head"])
    soup = uniform_soup([folder] * 16, [i + 1 for i in range(16)])
    assert soup.config == open_ingredient(folder).config
    assert all(torch.equal(value, load_file(folder / "adapter_model.safetensors")[key]) for key, value in soup.items())


def test_adapters_that_are_equal_in_part_are_stacked_once(tmp_path):
    folders = [adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)]
    soup = uniform_soup([folders[0], folders[1], folders[0]])
    assert soup.config["r"] == 8
    save_soup(soup, open_ingredient(folders[0]), tmp_path / "soup")
    check_mean(tmp_path / "soup", folders, [2, 1])


def test_a_cut_is_the_best_of_its_rank_and_its_error_is_told(tmp_path):
    folders = [adapter(tmp_path / str(i), i, modules=ALL, lora_alpha=3 + i) for i in range(3)]
    soup = uniform_soup(folders, rank=5)
    save_soup(soup, open_ingredient(folders[0]), tmp_path / "soup")
    got, parts, plain = merged(tmp_path / "soup"), [merged(folder) for folder in folders], base().double().state_dict()
    lost = whole = 0.0
    for module in ALL:
        delta, exact = (value - plain[f"{module}.weight"] for value in
                        (got[f"{module}.weight"], sum(part[f"{module}.weight"] for part in parts) / 3))  # fmt: skip
        values = torch.linalg.svdvals(exact.flatten(1))
        assert soup.errors.get(module, 0.0) == pytest.approx(float(values[5:].norm() / values.norm()), abs=1e-6)
        assert float((delta - exact).norm()) == pytest.approx(float(values[5:].norm()), abs=1e-5)
        lost, whole = lost + float(values[5:].square().sum()), whole + float(values.square().sum())
    assert soup.error == pytest.approx((lost / whole) ** 0.5, rel=1e-5)
    assert max(soup.errors.values()) > 0.01
    assert uniform_soup(folders, rank=12).errors == {}


def test_greedy_evaluates_what_it_writes(tmp_path):
    folders = [adapter(tmp_path / str(i), i) for i in range(3)]
    goal = sum(merged(folder)["inner.0.weight"] for folder in folders[:2]) / 2
    seen = []

    def evaluate(weights):
        assert isinstance(weights, AdapterWeights)
        seen.append((weights.config["r"], weights["base_model.model.inner.0.lora_A.weight"].shape[0]))
        model = get_peft_model(base(), LoraConfig(**weights.config))
        set_peft_model_state_dict(model, weights)
        return -float((model.merge_and_unload().inner[0].weight - goal).norm())

    result = greedy_soup(folders, evaluate, journal=tmp_path / "journal.json")
    assert sorted(result.ingredients) == [str(folder) for folder in folders[:2]]
    assert result.score == pytest.approx(0, abs=1e-5)
    assert seen == [(4, 4)] * 3 + [(8, 8), (12, 12)]
    again = greedy_soup(folders, evaluate, journal=tmp_path / "journal.json")
    assert len(seen) == 5
    assert all(torch.equal(again.state_dict[key], value) for key, value in result.state_dict.items())
    with pytest.raises(CheckpointError, match="its rank were None, now 2"):
        greedy_soup(folders, evaluate, journal=tmp_path / "journal.json", rank=2)
    assert "rank_errors" in path_json(greedy_soup(folders, lambda weights: 0.0, rank=2))


def test_a_nan_leaves_an_adapter_out(tmp_path):
    folders = [adapter(tmp_path / str(i), i) for i in range(2)]
    state = load_file(folders[0] / "adapter_model.safetensors")
    next(iter(state.values()))[0] = float("nan")
    save_file(state, folders[0] / "adapter_model.safetensors")
    result = greedy_soup(folders, lambda weights: 0.0)
    assert result.ingredients == [str(folders[1])]
    assert "lora_A" in result.history[1]["reason"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_dora": True}, "use_dora, got it: DoRA divides"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes"),
        ({"modules": ("inner.0",)}, "same target_modules.*'inner.2'"),
        ({"task_type": "SEQ_CLS"}, "same task_type"),
        ({"bias": "all"}, "same bias"),
        ({"modules_to_save": ["head"]}, "same modules_to_save"),
        ({"base_model_name_or_path": "other"}, "same base_model_name_or_path"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"rank_pattern": [3]}, r"rank_pattern must be a .*got \[3\]"),
        ({"r": 9}, r"rank 9 as the config says, got 4 in A"),
    ],
)
def test_what_is_no_mean_is_refused_by_name(tmp_path, options, match):
    edits = {key: options.pop(key) for key in ("base_model_name_or_path", "peft_type", "task_type", "r",
                                               "rank_pattern")
             if key in options}  # fmt: skip
    folders = [adapter(tmp_path / "plain", 0), adapter(tmp_path / "odd", 1, **options)]
    for folder, changed in zip(folders, ({"base_model_name_or_path": "mine"}, edits), strict=True):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(CheckpointError, match=match):
        uniform_soup(folders)


def test_damaged_and_misplaced_adapters_are_refused(tmp_path):
    folder = adapter(tmp_path / "one", 0)
    torch.save(base().state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"whole models or adapters.*merge_and_unload"):
        uniform_soup([folder, tmp_path / "model.pt"])
    with pytest.raises(ConfigError, match="rank must be given for adapters only, got 3 for state dict files"):
        uniform_soup([tmp_path / "model.pt"], rank=3)
    with pytest.raises(ConfigError, match=r"rank must be in \[1, inf\), got 0"):
        uniform_soup([folder], rank=0)
    with pytest.raises(ConfigError, match="into must be given for whole models only, got it for PEFT adapters"):
        uniform_soup([folder], into={})
    state = load_file(folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="must be `AdapterWeights`"):
        save_soup(state, open_ingredient(folder), tmp_path / "soup")
    lacking = copy.copy(state)
    lacking.pop("base_model.model.inner.0.lora_B.weight")
    save_file(lacking, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"'base_model.model.inner.0.lora_B.weight'"):
        open_ingredient(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="one of adapter_model"):
        open_ingredient(folder)
    torch.save(state, folder / "adapter_model.bin")
    out = save_soup(uniform_soup([folder]), open_ingredient(folder), tmp_path / "soup")
    assert torch.load(out / "adapter_model.bin", weights_only=True).keys() == state.keys()


def test_the_command_takes_a_run_of_adapters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [adapter(tmp_path / "run" / f"checkpoint-{i}", i) for i in (1, 2)]

    eff = functools.partial(commands.eff, "soup")
    result = eff("run", "--kind", "uniform", "--out", "soup")
    check_mean(tmp_path / "soup", folders, [1, 1])
    assert "rank" not in result.stdout
    result = eff("run", "--kind", "uniform", "--out", "cut", "--rank", "3")
    assert "changes the adapter" in result.stdout
    assert set(json.loads((tmp_path / "cut" / "soup_path.json").read_text())["rank_errors"]) == {"inner.0", "inner.2"}
