"""`eff quantize`: what is written, that it loads, that it deploys, and what is refused before any work."""

import functools
import itertools
import json

import pytest
import torch
from commands import eff, user_module
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.quantization import BitPlan, apply_ranges, quantize
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.served import codes_of

TASK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

def batches():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(8, 64, generator=generator) for _ in range(1000))

def one_hot():
    return [torch.eye(64)[torch.arange(start, start + 200) % 64] for start in range(3)]

def quality(model):
    return model(torch.ones(1, 64)).sum().item()

def nothing():
    return None

def model_and_inputs():
    return model(), torch.ones(4, 64)

def pairs():
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(64, 64, generator=generator)
    return [(x[:40], model()(x[:40]).argmax(1)), (x[40:], model()(x[40:]).argmax(1))]

def agreement(net):
    return sum((net(x).argmax(1) == y).sum().item() for x, y in pairs()) / 64

def error(net):
    return 1.5 - agreement(net)

def deep():
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return nn.Sequential(*layers)

def eights():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, 8, generator=generator) for _ in range(2)]

def labelled():
    generator = torch.Generator().manual_seed(3)
    return [(x, torch.randint(4, (16,), generator=generator)) for x in eights()]

def loss(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])

def unpaired():
    return [torch.ones(2, 64)]

def tokens():
    generator = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(32, (4, 9), generator=generator)} for _ in range(2)]

def narrow():
    return [torch.ones(2, 63)]

def narrow_inputs():
    return model(), torch.ones(4, 63)

def texts():
    return ["a text"]

def no_batches():
    return []

def word(net):
    return "good"

def unknown(net):
    return float("nan")

def lost(net, seen=[]):
    seen.append(net)
    return 0.5 if len(seen) == 1 else float("nan")
"""


SCHEME = ["quantize_task:model", "--out", "out", "--scheme", "int8_weight"]
STATIC = ["quantize_task:model", "--out", "out", "--calibration"]
ATTACKED = [*SCHEME, "--attack", "quantize_task:pairs"]
JUDGED = ["quantize_task:model", "--out", "out", "--eval", "quantize_task:quality"]
PLANNED = [
    *SCHEME,
    "--calibration",
    "quantize_task:batches",
    "--eval",
    "quantize_task:agreement",
    "--largest-loss",
    "0",
]
CURVED = [
    "quantize_task:deep", "--out", "out", "--scheme", "int8_weight", "--calibration", "quantize_task:eights",
    "--sensitivity", "hessian",
]  # fmt: skip
WITH_LOSS = ["--loss", "quantize_task:loss", "--loss-data", "quantize_task:labelled"]
GPTQ = ["quantize_task:model", "--out", "out", "--calibration", "quantize_task:batches", "--method", "gptq"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "quantize_task", TASK)
    import quantize_task

    invoke = functools.partial(eff, "quantize")
    invoke.task = quantize_task
    return invoke


def test_the_folder_holds_plain_weights_ranges_and_a_report(run, tmp_path):
    result = run(
        "quantize_task:model", "--out", "out", "--calibration", "quantize_task:batches", "--batches", "5",
        "--eval", "quantize_task:quality", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    report = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())
    assert json.loads(result.stdout) == report
    assert report["batches"] == 5
    assert report["config"]["range"] == "mse"
    assert report["bytes"]["quantized"] == 64 * 32 + 32 * 10 + 4 * (32 + 10) + 4 * (32 + 10)
    model = run.task.model()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    ranges = read_deployment(tmp_path / "out")["qat"]["ranges"]
    batches = [batch for batch, _ in zip(run.task.batches(), range(5), strict=False)]
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = quantize(run.task.model(), "int8", batches)(x)
        assert torch.equal(apply_ranges(model, ranges).eval()(x), expected)
    assert report["quality"]["quantized"] != report["quality"]["float"]


def decibels(exact, rounded):
    return 10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()).item()


def test_what_the_outputs_lose_is_told_and_one_hot_inputs_lose_little(run):
    told = run("quantize_task:model", "--out", "out", "--calibration", "quantize_task:one_hot", "--json").stdout
    values, model, x = json.loads(told), run.task.model(), torch.cat(run.task.one_hot())
    quantized = quantize(model, "int8", run.task.one_hot())
    with torch.no_grad():
        assert values["output_sqnr_db"] == pytest.approx(decibels(model(x), quantized(x)), abs=0.01)
        hidden = model[1](model[0](x))
        alone = decibels(model[2](hidden), quantized[2](hidden))
    assert values["layers"][1]["output_sqnr_db"] == pytest.approx(alone, abs=0.01)
    assert min(values["output_sqnr_db"], *(entry["output_sqnr_db"] for entry in values["layers"])) > 30

    shown = run("quantize_task:model", "--out", "again", "--calibration", "quantize_task:one_hot").stdout
    assert f"output: {values['output_sqnr_db']:.1f} dB" in shown
    assert f"{values['layers'][0]['output_sqnr_db']:.1f}" in shown


def test_that_outputs_were_not_measured_without_batches_is_told(run, tmp_path):
    shown = run(*SCHEME, "--report", "page.html").stdout
    assert "not measured. --calibration" in shown
    assert "Not measured; --calibration" in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "out" / "eff_quantization.json").read_text())["output_sqnr_db"] is None


def test_weights_plan_and_options_are_taken(run, tmp_path):
    torch.manual_seed(3)
    trained = {f"net.{key}": torch.randn_like(value) for key, value in run.task.model().state_dict().items()}
    save_file(trained, tmp_path / "trained.safetensors")
    BitPlan({"0": 4, "2": 16}, {"0": 2048, "2": 320}).to_yaml(tmp_path / "plan.yaml", scheme="int8_weight")
    result = run(
        "quantize_task:model", "--out", "out", "--weights", "trained.safetensors", "--scheme", "int8_weight",
        "--plan", "plan.yaml", "--set", "rounding=nearest",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "times smaller" in result.stdout
    written = load_file(tmp_path / "out" / "model.safetensors")
    scale = trained["net.0.weight"].abs().amax(1, keepdim=True) / 7
    assert torch.allclose(written["0.weight"], (trained["net.0.weight"] / scale).round() * scale, atol=1e-5)
    assert torch.equal(written["2.weight"], trained["net.2.weight"])


@pytest.mark.parametrize(("args", "error", "message"), [
    (["quantize_task:model", "--out", "full"], CheckpointError, "--out must be a new or empty folder"),
    (["quantize_task:cnn", "--out", "quantize_task.py/out"], CheckpointError, "eff quantize: --out: cannot write to"),
    (["quantize_task", "--out", "out"], ConfigError, "MODEL must be module:function"),
    (["quantize_task:nobody", "--out", "out"], ConfigError, "must name a function of quantize_task"),
    (["no_such_module:f", "--out", "out"], ConfigError, "must name an importable module"),
    (["quantize_task:nothing", "--out", "out"], ConfigError, "must return a model"),
    (["quantize_task:model", "--out", "out"], ConfigError, "calibration must be given"),
    (["quantize_task:model", "--out", "out", "--latency"], ConfigError, "for --latency, got a model alone"),
    (["quantize_task:model", "--out", "out", "--scheme", "int7"], ConfigError, "scheme must be one of"),
    (["quantize_task:model", "--out", "out", "--set", "range"], ConfigError, "--set must be NAME=VALUE"),
    (["quantize_task:model", "--out", "out", "--set", "rnge=kl"], ConfigError, "did you mean 'range'"),
    ([*SCHEME, "--set", "range=kl", "--range", "mse"], ConfigError, "range must be given once, got mse and kl"),
    (["quantize_task:model", "--out", "out", "--report", "page.pdf"], ConfigError, "--report must be an .html file"),
    ([*JUDGED, "--mode", "up"], ConfigError, "--mode must be one of max, min, got"),
    ([*JUDGED, "--accept", "2"], ConfigError, "accept must be default, recommender or"),
    (["quantize_task:model", "--out", "out", "--qat", "full"], ConfigError, "--qat .*--eval or --attack"),
    (["quantize_task:model", "--out", "out", "--qat", "full", "--eval", "quantize_task:quality"], CheckpointError,
     "from full/eff_deployment.json"),
    (["quantize_task:model", "--out", "out", "--sensitivity", "kl"], ConfigError, "--calibration"),
    ([*SCHEME, "--calibration", "quantize_task:batches", "--sensitivity", "l1"], ConfigError, "hessian, kl, rmse"),
    (CURVED, ConfigError, "loss must be given for sensitivity hessian"),
    ([*CURVED, *WITH_LOSS, "--average-bits", "2"], ConfigError, r"--average-bits must be in \[3, 8\], got 2"),
    ([*CURVED[:-1], "kl", *WITH_LOSS], ConfigError, "--loss and --loss-data only affect --sensitivity hessian, got kl"),
    ([*CURVED[:-1], "kl", "--probes", "9"], ConfigError, "--probes only affects sensitivity hessian, got kl"),
    ([*CURVED[:-2], *WITH_LOSS], ConfigError, "--loss .*--sensitivity"),
    ([*CURVED, *WITH_LOSS[2:]], ConfigError, "batches of sensitivity hessian must hold what the model takes"),
    ([*CURVED, "--plan", "plan.yaml", "--average-bits", "5"], ConfigError, "--average-bits .*--plan"),
    ([*PLANNED, "--average-bits", "5"], ConfigError, "--average-bits .*--largest-loss"),
    ([*CURVED[:3], "--scheme", "fp8", *CURVED[5:7], "--average-bits", "5"], ConfigError, "average.bits needs an int"),
    ([*PLANNED, "--all-layers", "--keep-sensitive"], ConfigError, "--all-layers .*--keep-sensitive"),
    ([*SCHEME, "--keep-sensitive"], ConfigError, r"must leave a layer to quantize, but it keeps 0 \(the first layer\)"),
    ([*CURVED, *WITH_LOSS, "--average-bits", "4", "--keep-sensitive"], ConfigError, "bits must be .* with 0, 2"),
    ([*SCHEME, "--largest-loss", "0.1"], ConfigError, "--eval and --calibration"),
    ([*SCHEME, "--all-layers"], ConfigError, "--all-layers .*--largest-loss"),
    ([*PLANNED[:-1], "-0.1"], ConfigError, r"--largest-loss must be in \[0, inf\), got -0.1"),
    ([*PLANNED[:-1], "nan"], ConfigError, "--largest-loss must be a finite number, got nan"),
    ([*PLANNED, "--plan", "plan.yaml"], ConfigError, "--largest-loss .*--plan"),
    ([*PLANNED, "--set", "overrides=0:weight_bits=4"], ConfigError, "without overrides"),
    ([*PLANNED, "--scheme", "fp8"], ConfigError, "an int scheme"),
    (PLANNED, ConfigError, "but all 2 are kept in float.*set all_layers"),
    ([*PLANNED, "--all-layers", "--set", "weight_bits=2"], TrainingError, "but each one loses more; raise it"),
    ([*ATTACKED, "--attack-eps", "2/0"], ConfigError, "--attack-eps must be numbers above 0"),
    ([*ATTACKED, "--attack-eps", "0"], ConfigError, "--attack-eps must be numbers above 0"),
    ([*ATTACKED, "--attack-range", "1,0"], ConfigError, "--attack-range must be LOW,HIGH"),
    ([*ATTACKED, "--attack-range", "1"], ConfigError, "--attack-range must be LOW,HIGH"),
    ([*ATTACKED, "--attack-steps", "0"], ConfigError, r"--attack-steps must be in \[1, inf\), got 0"),
    ([*ATTACKED, "--attack-range", "0.4,0.5"], ConfigError, "x must lie between low and high"),
    ([*SCHEME, "--attack", "quantize_task:unpaired"], ConfigError, "must return pairs of tensors.*got Tensor$"),
    ([*SCHEME, "--attack", "quantize_task:no_batches"], ConfigError, "--attack must return at least one batch"),
    ([*SCHEME, "--attack", "quantize_task:nothing"], ConfigError, "--attack must return batches, got NoneType"),
    ([*SCHEME, "--weights", "other.safetensors"], CheckpointError, r"0.weight has shape \(32, 63\)"),
    ([*STATIC, "quantize_task:nothing"], ConfigError, "--calibration must return batches, got NoneType"),
    ([*STATIC, "quantize_task:narrow"], ConfigError, "calibration must hold what the model takes.*63"),
    ([*STATIC, "quantize_task:narrow", "--equalize"], ConfigError, "calibration must hold what the model takes.*63"),
    ([*STATIC, "quantize_task:texts"], ConfigError, "calibration must hold what the model takes.*got str"),
    (["quantize_task:narrow_inputs", *SCHEME[1:], "--latency"], ConfigError, "latency: the inputs of.*63"),
    ([*SCHEME, "--eval", "quantize_task:word"], ConfigError, "--eval must return a number, got str 'good'"),
    ([*SCHEME, "--eval", "quantize_task:unknown"], ConfigError, "quality of the float model must be finite, got nan"),
    ([*SCHEME, "--set", "begin=0.5"], ConfigError, "--set must .* got begin"),
    ([*SCHEME, "--set", "gate=rounded"], ConfigError, "--set must .* got gate"),
    ([*SCHEME, "--accept", "0.1"], ConfigError, "--accept .*--eval"),
    ([*SCHEME, "--mode", "min"], ConfigError, "--mode .*--eval"),
    ([*SCHEME, "--batches", "3"], ConfigError, "--batches .*--calibration"),
    ([*SCHEME, "--attack-steps", "3"], ConfigError, "--attack-steps .*--attack"),
    ([*SCHEME, "--method", "gptq"], ConfigError, "--method .*--calibration"),
    ([*GPTQ, "--scheme", "fp8"], ConfigError, "scheme must give linear layers integer codes"),
    ([*GPTQ, "--set", "damping=0"], ConfigError, "damping must be"),
    ([*GPTQ, "--method", "awq"], ConfigError, "--method must be gptq, got 'awq'; use llm-compressor for AWQ"),
    ([*GPTQ, "--gptq-grid", "fixed"], ConfigError, "--gptq-grid must be one of published, pinned"),
    ([*SCHEME, "--gptq-grid", "pinned"], ConfigError, "--gptq-grid .*--method"),
    ([*GPTQ, "--equalize", "--latency"], ConfigError, "--method .*--equalize, --latency"),
    ([*GPTQ, "--eval", "quantize_task:quality", "--largest-loss", "0"], ConfigError, "--largest-lo"),
])  # fmt: skip
def test_refusals_write_nothing(run, tmp_path, args, error, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    wide = run.task.model().state_dict()
    save_file({**wide, "0.weight": wide["0.weight"][:, 1:].clone()}, tmp_path / "other.safetensors")
    with pytest.raises(error, match=message):
        run(*args)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept"]


def test_a_plan_brings_its_scheme(run, tmp_path):
    BitPlan({"0": 4, "2": 8}, {"0": 2048, "2": 320}).to_yaml(tmp_path / "plan.yaml", scheme="int8_weight")
    asked = ["quantize_task:model", "--plan", "plan.yaml", "--json"]
    assert json.loads(run(*asked, "--out", "a").stdout)["config"]["scheme"] == "int8_weight"
    assert json.loads(run(*asked, "--out", "b", "--scheme", "int8_dynamic").stdout)["asked"]["scheme"] == "int8_dynamic"


def test_an_unknown_quality_is_null_in_json(run, tmp_path):
    told = run(*SCHEME, "--eval", "quantize_task:lost", "--json").stdout
    assert told == (tmp_path / "out" / "eff_quantization.json").read_text()
    assert json.loads(told, parse_constant=pytest.fail)["quality"] == {"float": 0.5, "quantized": None}


def test_a_model_with_a_shared_weight_is_saved_once(run, tmp_path, monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 16), nn.Linear(16, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    monkeypatch.setattr(run.task, "model", Tied)
    assert run("quantize_task:model", "--out", "out", "--scheme", "int8_weight").exit_code == 0
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["embed.weight"]
    told = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())["bytes"]
    assert told == {"float": 9 * 16 * 4, "quantized": 9 * 16 + 9 * 4}


def test_latencies_are_told_of_every_form_that_runs(run, tmp_path):
    result = run("quantize_task:model_and_inputs", "--out", "out", "--scheme", "int8_dynamic", "--latency")
    assert result.exit_code == 0
    told = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())["milliseconds"]
    assert set(told) == {"float32", "bfloat16", "int8 reference", "torchao"}
    assert all(value > 0 for value in told.values())
    assert "on one thread: float32" in result.stdout
    assert torch.get_num_threads() >= 1


def test_a_form_without_kernels_is_left_out():
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())  # a bf16 weight meets a float32 input

    from shared_core.quantization.post_training.quality import latencies

    model = nn.Sequential(Wide(8, 8), nn.Linear(8, 4))
    found = latencies(model, quantize(model, "int8_weight", allow_partial=True), torch.ones(2, 8), repeats=1)
    assert "bfloat16" not in found
    assert "float32" in found


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_for_terminals(run, terminal):
    result = run(
        "quantize_task:model", "--out", "out", "--calibration", "quantize_task:batches", "--batches", "3", "--json",
        env={"FORCE_COLOR": "1"} if terminal else {"FORCE_COLOR": None, "TTY_COMPATIBLE": None},
    )  # fmt: skip
    assert json.loads(result.stdout)["batches"] == 3
    assert ("calibration" in result.stderr) == terminal
    assert ("loading batches" in result.stderr) == terminal
    assert terminal or result.stderr == ""


def test_progress_is_told_to_python_too():
    seen = []
    batches = (torch.randn(4, 8) for _ in range(9))
    quantize(nn.Linear(8, 4), "int8", batches, num_batches=3, progress=lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def traces_of(net, batches, loss):
    """Return the trace of each layer's block of the Hessian over its size, by second derivatives in float64."""
    net, found = net.double(), {}
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight

            def mean(value, name=name):
                def run(x):
                    return torch.func.functional_call(net, {f"{name}.weight": value}, (x,))

                return sum(loss(run, (x.double(), y)) for x, y in batches) / len(batches)

            hessian = torch.autograd.functional.hessian(mean, weight.detach())
            found[name] = hessian.view(weight.numel(), -1).trace().item() / weight.numel()
    return found


def test_layers_are_ranked_by_curvature_and_bits_allocated(run, tmp_path):
    result = run(*CURVED, *WITH_LOSS, "--probes", "300", "--average-bits", "5", "--report", "page.html")
    assert result.exit_code == 0
    values = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())
    found, net = values["sensitivity"], run.task.deep()
    exact = traces_of(run.task.deep(), run.task.labelled(), run.task.loss)
    for name, trace in found["traces"].items():
        assert trace["probes"] == 300
        error = trace["standard_error"] / trace["weights"]
        assert abs(trace["trace"] / trace["weights"] - exact[name]) < 5 * error
        for bits in (3, 4, 8):
            weight = net.get_submodule(name).weight.detach().double()
            scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            noise = ((weight / scale).round() * scale - weight).square().sum().item()
            cost = max(trace["trace"] / trace["weights"], 0) * noise
            assert found["layers"][name][str(bits)] == pytest.approx(cost, rel=1e-3)
            assert found["errors"][name][str(bits)] == pytest.approx(error * noise, rel=1e-3)
    # the plan is the best of all
    sizes = {name: net.get_submodule(name).weight.numel() for name in exact}
    plans = [dict(zip(exact, bits, strict=True)) for bits in itertools.product((3, 4, 8), repeat=len(exact))]
    fitting = [bits for bits in plans if sum(bits[name] * sizes[name] for name in exact) <= 5 * sum(sizes.values())]

    def cost(bits):
        return sum(found["layers"][name][str(width)] for name, width in bits.items())

    plan = BitPlan.from_yaml(tmp_path / "out" / "plan.yaml")
    assert cost(plan.bits) == pytest.approx(min(map(cost, fitting)))
    assert values["plan"]["bits"] == plan.bits
    assert {entry["name"]: entry["weight_bits"] for entry in values["layers"]} == plan.bits
    assert "Most sensitive by hessian: " in result.stdout
    assert "with 300 probes; ± is its standard error" in result.stdout
    assert "with 300 probes; ± is its standard error" in (tmp_path / "page.md").read_text()


def test_sensitive_layers_are_kept_and_told(run, tmp_path):
    arguments = ["quantize_task:deep", "--scheme", "int8_weight", "--calibration", "quantize_task:eights", "--out"]
    shown = run(*arguments, "out", "--keep-sensitive", "--allow-partial")
    assert shown.exit_code == 0
    assert "0 (keep_sensitive: the first layer)" in shown.stdout
    assert "2 (keep_sensitive: it reads the output of Tanh '1')" in shown.stdout
    written = load_file(tmp_path / "out" / "model.safetensors")
    same = {name for name in "0246" if torch.equal(written[f"{name}.weight"], run.task.deep()[int(name)].weight)}
    assert same == {"0", "2", "6"}
    # with an average, they get 8 bits
    run(*arguments, "planned", "--keep-sensitive", "--average-bits", "8")
    values = json.loads((tmp_path / "planned" / "eff_quantization.json").read_text())
    assert values["plan"]["kept"]["0"] == "the first layer"
    assert values["plan"]["kept"]["2"] == "it reads the output of Tanh '1'"
    assert all(values["plan"]["bits"][name] == 8 for name in values["plan"]["kept"])


@pytest.mark.parametrize("grid", ["published", "pinned"])
def test_gptq_quantizes_a_decoder_on_the_cpu_for_export(run, tmp_path, grid):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    result = run(
        "llama", "--out", "out", "--method", "gptq", "--calibration", "quantize_task:tokens", "--gptq-grid", grid,
        "--group-size", "32", "--set", "actorder=false", "--skip", "Embedding", "--skip", "lm_head",
    )  # fmt: skip
    assert result.exit_code == 0
    values = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())
    assert values["config"]["scheme"] == "int4_weight"
    assert values["batches"] == 2
    assert len(values["layers"]) == 14
    assert sum(e["output_error"] for e in values["layers"]) < sum(e["rounded_output_error"] for e in values["layers"])
    made = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    entries = read_deployment(tmp_path / "out")["qat"]["ranges"]
    assert all(("weight_grids" in entry) == (grid == "published") for entry in entries.values())
    for entry in values["layers"]:
        weight = made.get_submodule(entry["name"]).weight.detach()
        codes, scale = codes_of(
            "test", entry["name"], weight, LayerScheme("group", 4, 32, True, "none", 0), entries[entry["name"]],
            weight.dtype,
        )  # fmt: skip
        assert torch.equal((codes * scale.unsqueeze(1)).view_as(weight), weight)
    export = ["export", "out", "--format", "compressed-tensors", "--out", "served"]
    assert eff(*export).exit_code == 0
    served = load_file(tmp_path / "served" / "model.safetensors")
    for name, entry in entries.items() if grid == "published" else ():
        assert torch.equal(served[f"{name}.weight_scale"], entry["weight_grids"]["weight"]["scale"])
