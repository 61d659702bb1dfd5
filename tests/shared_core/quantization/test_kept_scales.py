"""Weight scales that training keeps: rounding to a given grid, runs that start from a quantized folder, refusals."""

import json
import shutil

import numpy as np
import pytest
import torch
from promise_drivers import assert_resumes, difference, hf_trainer, run_bare, run_hf, run_lightning
from promise_table import make_net, train_examples
from quantization_runs import small_net
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core.checkpoint_formats.plain import read_deployment, write_deployment
from shared_core.checkpoint_formats.released import Grid
from shared_core.engine.checks.compatibility import check
from shared_core.engine.recipe import Recipe
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError
from shared_core.quantization import QatConfig, QuantizationAwareTraining, apply_ranges, quantize_with_report
from shared_core.quantization.ranges.kept_scales import KeptScale
from shared_core.quantization.schemes import WEIGHTS, LayerScheme

RUNS = {"hf": run_hf, "lightning": run_lightning}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = sorted({(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} | {m / 512 for m in range(8)})[:-1]
CODES = {"mxfp4": (E2M1, 7.0), "nvfp4": (E2M1, 7.0), "mxfp8": (E4M3, 464.0), "fp8": (E4M3, 464.0),
         "fp8_tensor": (E4M3, 464.0), "fp8_block": (E4M3, 464.0)}  # fmt: skip


SIZES = {
    "int8": 40, "int4": 8, "int4_asym": 8, "fp8": 40, "fp8_tensor": 40, "fp8_block": 16, "mxfp4": 32, "mxfp8": 32,
    "nvfp4": 16,
}  # fmt: skip


def codes_of(scheme):
    """Return all codes, and where values are clipped below and above, in steps of the scale."""
    if scheme.has_integers:
        low, high = -(2 ** (scheme.weight_bits - 1)), 2 ** (scheme.weight_bits - 1) - 1
        return np.arange(low, high + 1.0), low - 0.5, high + 0.5
    positive, beyond = CODES[scheme.weight]
    return np.array(sorted({-code for code in positive} | {*positive})), -beyond, beyond


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kind", "size"), SIZES.items())
def test_values_round_to_the_nearest_code_of_a_given_scale(kind, size, dtype):
    scheme = LayerScheme(*WEIGHTS[kind], input="none")
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(40, 6, bias=False, dtype=dtype)
    scale = torch.rand(6, -(-40 // size), generator=generator) + 0.5
    zeros = torch.randint(-8, 8, scale.shape, generator=generator).float() if scheme.affine else None
    codes, low, high = codes_of(scheme)
    weight = (torch.rand(6, 40, generator=generator, dtype=torch.float64) * 2.4 - 1.2) * codes.max()
    weight = weight.to(dtype).requires_grad_()
    kept = KeptScale({"weight": Grid(scale, zeros, size)}, scheme)
    found = kept.quantize(layer, weight)
    found.sum().backward()
    steps = scale.double().repeat_interleave(size, 1)[:, :40].numpy()
    zero = 0.0 if zeros is None else zeros.double().repeat_interleave(size, 1)[:, :40].numpy()
    exact = weight.detach().double().numpy() / steps + zero
    nearest = codes[np.abs(exact[..., None] - codes).argmin(-1)]
    expected = torch.tensor((nearest - zero) * steps)
    torch.testing.assert_close(
        found.detach().double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    clipped = torch.tensor((exact < low) | (exact > high))
    assert torch.equal(weight.grad == 0, clipped)
    assert set(weight.grad.unique().tolist()) <= {0.0, 1.0}
    assert kept.clipped(layer, weight.detach()) == clipped.sum() > 0
    again = found.detach().clone().requires_grad_()
    kept.quantize(layer, again).sum().backward()
    # a value on the grid keeps its gradient, also that of the largest code
    assert torch.equal(kept.quantize(layer, again), again)
    assert bool((again.grad == 1).all())


def quantized_folder(folder, model, config, data=None, **options):
    """Write what `eff quantize` writes; return the folder and the ranges."""
    quantized, report = quantize_with_report(model, config, data, allow_partial=True, **options)
    folder.mkdir()
    save_file(quantized.state_dict(), folder / "model.safetensors")
    write_deployment(folder, {"qat": {"ranges": report.ranges}})
    return folder


def inputs(count=4):
    return [example["x"].unsqueeze(0) for example in train_examples()[:count]]


SOURCES = {
    "int8": {"scheme": "int8"}, "int16": {"scheme": "int16"},
    "int8-mse": {"scheme": "int8_weight", "weight_bits": 4, "range": "ema"},
    "gptq": {"scheme": "W4A16", "overrides": {"head": {"weights": "int8"}}}, "int4_asym": {"scheme": "int4_weight"},
    "mxfp4": {"scheme": "mxfp4"}, "nvfp4": {"scheme": "NVFP4A16"}, "fp8": {"scheme": "fp8_static"},
    "fp8_block": {"scheme": "fp8_block"},
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_starts_from_the_weights_and_ranges_of_a_quantized_folder(name, tmp_path):
    gptq = {"gptq": {}} if name == "gptq" else {}
    folder = quantized_folder(tmp_path / "q", make_net(seed=3, batch_norm=False), SOURCES[name], inputs(), **gptq)
    there, entries = load_file(folder / "model.safetensors"), read_deployment(folder)["qat"]["ranges"]
    model = make_net(seed=0, batch_norm=False)
    technique = QuantizationAwareTraining(QatConfig(init=str(folder)))
    context = Context(model=model, total_steps=1)
    technique.attach(context)
    technique.begin(context, None)
    for own, entry in technique.ranges().items():
        assert {key: entry[key] for key in ("min", "max") if key in entry} == {
            key: entries[own][key] for key in ("min", "max") if key in entries[own]
        }
        assert (
            technique.schemes[own].of_weight
            == LayerScheme(
                **{key: entries[own][key] for key in ("weight", "weight_bits", "group_size", "affine")}
            ).of_weight
        )
    assert technique.report()["kept_scales"] == {"from": str(folder), "layers": len(entries), "clipped": 0.0}
    assert str(folder) in " ".join(technique.summary(technique.report()))
    technique.finish(context)
    for key, value in model.state_dict().items():
        # a zero point hides the last bit of some scales
        torch.testing.assert_close(value, there[key], rtol=3e-7 if "asym" in name else 0, atol=0)


def test_scales_stay_and_the_share_of_clipped_weights_is_told(tmp_path):
    folder = quantized_folder(tmp_path / "q", small_net(), {"scheme": "W4A16"})
    technique = QuantizationAwareTraining(QatConfig(init=str(folder)))
    context = Context(model=small_net(), total_steps=1)
    technique.attach(context)
    technique.begin(context, None)
    weight = technique.layers["0"].weight
    with torch.no_grad():
        weight[0, 0] = -1.0
        weight[0, 1:] /= 4
    grid = technique.policy.kept["0"].grids["weight"]
    scale = grid.scale[0].item()
    baked = technique.bake(context.model.state_dict())["0.weight"]
    assert baked[0, 0].item() == pytest.approx(-8 * scale)
    assert technique.report()["kept_scales"]["clipped"] == 1 / sum(
        layer.weight.numel() for layer in technique.layers.values()
    )
    claim = technique.claims(context)["0.weight"]
    assert claim.wrong(baked, 0) is None
    assert "nearest code" in claim.wrong(baked + scale / 2, 0)
    assert claim.wrong(baked * 2, 0) is not None


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_trainers_end_with_the_weights_of_a_loop(front_end, tmp_path):
    folder = quantized_folder(tmp_path / "q", make_net(seed=3), {"scheme": "int8"}, inputs())
    recipe = {"qat": {"init": str(folder), "begin": 2, "freeze_observers": 6}}
    bare = run_bare(recipe)
    other = RUNS[front_end](recipe, tmp_path / front_end, **({"seed": 0} if front_end == "hf" else {}))
    assert difference(bare.weights, other.weights) is None
    kept = [each.receipt["techniques"]["qat"]["kept_scales"] for each in (bare, other)]
    assert kept[0] == kept[1]
    assert kept[0]["from"] == str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_a_resumed_run_ends_bit_for_bit_the_same(front_end, tmp_path):
    scheme = {"scheme": "int8_dynamic_int4_weight"}
    folder = quantized_folder(tmp_path / "q", make_net(seed=3), scheme, inputs(), gptq={})
    recipe = {"qat": {"init": str(folder), "begin": 2}}
    assert_resumes(RUNS[front_end], lambda: json.loads(json.dumps(recipe)), tmp_path, (3,))


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_what_trainers_save_has_the_scales_of_gptq(front_end, tmp_path):
    scheme = {"scheme": "int4_weight"}
    folder = quantized_folder(tmp_path / "q", make_net(seed=3), scheme, inputs(), gptq={})
    recipe, saved = {"qat": {"init": str(folder), "begin": 2}}, tmp_path / "final"
    if front_end == "hf":
        trainer = hf_trainer(recipe, tmp_path / "run")
        trainer.train()
        trainer.save_model(str(saved))
    else:
        saved = run_lightning(recipe, tmp_path / "run", save_every=4).checkpoints[4]
    found, before = (read_deployment(one)["qat"]["ranges"] for one in (saved, folder))
    grids = {name: entry["weight_grids"]["weight"] for name, entry in before.items() if "weight_grids" in entry}
    assert grids
    for name, parts in grids.items():
        for part, value in parts.items():
            kept = found["net." * (front_end == "lightning") + name]["weight_grids"]["weight"][part]
            assert torch.equal(kept.to(value.dtype), value)


def test_a_resumed_run_takes_scales_from_its_state(tmp_path):
    folder = quantized_folder(tmp_path / "q", small_net(), {"scheme": "W4A16"})
    first = QuantizationAwareTraining(QatConfig(init=str(folder)))
    context = Context(model=small_net(), total_steps=4)
    first.attach(context)
    first.begin(context, None)
    state = first.state_dict()
    shutil.rmtree(folder)
    again = QuantizationAwareTraining(QatConfig(init=str(folder)))
    context = Context(model=small_net(), total_steps=4, resumed={"qat": state})
    again.attach(context)
    again.begin(context, state)
    found, expected = (one.policy.kept["0"].grids["weight"].scale for one in (again, first))
    assert torch.equal(found, expected)
    assert again.schemes == first.schemes
    with pytest.raises(CheckpointError, match="existing folder"):
        QuantizationAwareTraining(QatConfig(init=str(folder))).attach(Context(model=small_net()))


def test_layers_of_another_format_get_scales_from_their_weights(tmp_path):
    folder = quantized_folder(tmp_path / "q", small_net(), {"scheme": "int8_weight"})
    notes = []
    technique = QuantizationAwareTraining(
        QatConfig(init=str(folder), scheme="W4A16", overrides=("2:scheme=int8_weight",))
    )
    technique.attach(Context(model=small_net(), note=notes.append))
    assert [*technique.policy.kept] == ["2"]
    assert any("scales of 0 follow the weights" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scheme": "released", "weights": "int8"}, "weights"),
        ({"scheme": "released", "group_size": 32}, "group_size"),
        ({"scheme": "released", "overrides": ("a:weights=int8",)}, "overrides"),
        ({"scheme": "released", "init": "q"}, "two sources"),
        ({"init": "q", "inputs": "int8_token"}, "inputs"),
        ({"init": "q", "weight_bits": 4}, "weight_bits"),
        ({"init": "q", "scheme": "int8", "range": "lsq"}, "learns weight scales"),
        ({"scheme": "int8", "overrides": ("a:scheme=released",)}, "single layers"),
    ],
)
def test_contradicting_options_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        QatConfig(**options)


def test_a_folder_of_another_model_is_refused(tmp_path):
    folder = quantized_folder(tmp_path / "q", small_net(), {"scheme": "int8_weight"})
    other = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    with pytest.raises(CheckpointError, match=r"0\.(weight|bias)"):
        QuantizationAwareTraining(QatConfig(init=str(folder))).attach(Context(model=other))
    with pytest.raises(MatchError, match="2"):
        QuantizationAwareTraining(QatConfig(init=str(folder))).attach(Context(model=nn.Sequential(nn.Linear(6, 8))))
    with pytest.raises(CheckpointError, match="know the folder"):
        QuantizationAwareTraining(QatConfig(scheme="released")).attach(Context(model=small_net()))


@pytest.mark.parametrize("options", [{"scheme": "released"}, {"init": "q"}])
def test_adapters_and_post_training_quantization_are_refused(options):
    with pytest.raises(CompatibilityError, match="lora"):
        check(Recipe.from_dict({"qat": options, "lora": {"rank": 2, "base": "none", "save": "merged"}}), ())
    model = small_net()
    model[0].get_base_layer = lambda: model[0]
    with pytest.raises(CompatibilityError, match="without adapters"):
        QuantizationAwareTraining(QatConfig(**options)).attach(Context(model=model))
    with pytest.raises(ConfigError, match="start a training"):
        quantize_with_report(small_net(), options)


def test_ranges_are_not_a_folder():
    with pytest.raises(ConfigError, match=r"ranges must map names .* got str; pass read_deployment"):
        apply_ranges(nn.Linear(2, 2), "runs/a")
