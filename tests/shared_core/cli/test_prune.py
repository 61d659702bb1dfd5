"""`eff prune`: flags of the config, what is written and that it loads elsewhere, and what is refused at the start."""

import dataclasses
import functools
import json
import subprocess
import sys

import pytest
import torch
from commands import eff, user_module
from reports import report_of, row
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from shared_core.cli.smaller_models import PRUNING_FILE
from shared_core.errors import CheckpointError, ConfigError, MatchError
from shared_core.pruning import PruneConfig
from shared_core.pruning.config import DURING_TRAINING
from shared_core.pruning.post_training import prune

TASK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.BatchNorm2d(6),
        nn.ReLU(), nn.Flatten(), nn.Linear(54, 10), nn.ReLU(), nn.Linear(10, 3),
    )

def model_and_inputs():
    return model(), torch.ones(2, 1, 8, 8)

def images():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(5, 1, 8, 8, generator=generator) for _ in range(1000))

def pairs():
    return ((x, torch.arange(5) % 3) for x in images())

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def quality(model):
    assert not model.training
    return model(torch.ones(1, 1, 8, 8)).sum().item()

def text():
    generator = torch.Generator().manual_seed(2)
    return [
        {"input_ids": torch.randint(20, (4, 6), generator=generator), "labels": torch.arange(4) % 3} for _ in range(3)
    ]

def tokens():
    return [{"input_ids": batch["input_ids"]} for batch in text()]

def nothing(model):
    return None

def unknown(model):
    return float("nan")

def narrow():
    return [torch.ones(2, 1, 3, 8)]

def zeros(model):
    return sum(int((parameter == 0).sum()) for parameter in model.parameters())
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "prune_task", TASK)
    import prune_task

    invoke = functools.partial(eff, "prune")
    invoke.task = prune_task
    return invoke


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=8, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "bert" / "eff_receipt.json").write_text("{}")
    return tmp_path / "bert"


def logits(path):
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(2, 6)).logits


def test_the_folder_holds_plain_weights_and_a_report(run, tmp_path):
    save_file({f"net.{k}": v for k, v in run.task.model().state_dict().items()}, tmp_path / "trained.safetensors")
    result = run(
        "prune_task:model", "--weights", "trained.safetensors", "--out", "out", "--sparsity", "0.7", "--criterion",
        "fisher", "--calibration", "prune_task:pairs", "--loss", "prune_task:loss", "--batches", "4", "--skip",
        "first,last", "--eval", "prune_task:quality", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    report = json.loads((tmp_path / "out" / PRUNING_FILE).read_text())
    assert json.loads(result.stdout) == report
    assert (report["batches"], report["examples"], report["shrink"]) == (4, 20, None)
    assert report["config"]["skip"] == ["first", "last"]
    assert "begin" not in report["config"]
    assert report["asked"]["weights"] == "trained.safetensors"
    expected = run.task.model()
    before = run.task.quality(expected.eval())
    batches = [batch for batch, _ in zip(run.task.pairs(), range(4), strict=False)]
    prune(expected, {"sparsity": 0.7, "criterion": "fisher", "skip": ("first", "last")}, batches, loss=run.task.loss)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in expected.state_dict().items())
    assert report["quality"] == {"dense": before, "pruned": run.task.quality(expected.eval())}
    assert report["pruned"] == int((written["3.weight"] == 0).sum() + (written["7.weight"] == 0).sum())
    text = report_of(tmp_path / "out")
    quality, pruned = report["quality"], report["pruned"]
    assert row(text, "quality, dense and pruned")[:2] == [f"{quality['dense']:.6g}", f"{quality['pruned']:.6g}"]
    assert row(text, "zeros among the prunable weights")[:2] == ["–", f"{pruned:,}"]
    assert row(text, "criterion") == ["fisher"]


def test_a_table_tells_what_was_pruned(run):
    out = run("prune_task:model", "--out", "out", "--sparsity", "0.5", "--eval", "prune_task:zeros").stdout
    for told in ("50.0 % of 1,074 weights", "magnitude", "global", "dense 14, pruned 551"):
        assert told in out
    assert "not get faster" in " ".join(out.split())


def test_units_are_removed_from_a_plain_model(run, tmp_path):
    result = run(
        "prune_task:model_and_inputs", "--out", "out", "--sparsity", "0.5", "--granularity", "channel", "--criterion",
        "l1_norm", "--shrink", "--eval", "prune_task:quality",
    )  # fmt: skip
    assert result.exit_code == 0
    for told in ("7 of 14 units", "l1_norm", "Removed 7 units"):
        assert told in result.stdout
    report = json.loads((tmp_path / "out" / PRUNING_FILE).read_text())
    assert report["shrink"]["bytes"][1] < report["shrink"]["bytes"][0]
    assert report["quality"]["shrunk"] == pytest.approx(report["quality"]["pruned"], rel=1e-5)
    small = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2), nn.BatchNorm2d(3),
        nn.ReLU(), nn.Flatten(), nn.Linear(27, 10), nn.ReLU(), nn.Linear(10, 3),
    ).eval()  # fmt: skip
    small.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    whole = run.task.model()
    prune(
        whole, {"sparsity": 0.5, "granularity": "channel", "scope": "local", "criterion": "l1_norm"}, run.task.images()
    )
    x = torch.randn(3, 1, 8, 8)
    assert torch.allclose(small(x), whole.eval()(x), atol=1e-5)


def test_quality_must_be_a_number_and_one_that_is_unknown_is_null_in_json(run, tmp_path):
    arguments = ("prune_task:model", "--out", "out", "--sparsity", "0.5", "--eval")
    with pytest.raises(ConfigError, match="eff prune: --eval must return a number, got NoneType None; return one"):
        run(*arguments, "prune_task:nothing")
    assert not (tmp_path / "out").exists()
    told = run(*arguments, "prune_task:unknown", "--json").stdout
    assert json.loads(told, parse_constant=pytest.fail)["quality"] == {"dense": None, "pruned": None}
    assert "quality, dense and pruned" in report_of(tmp_path / "out")


def test_a_folder_comes_out_as_a_folder(run, folder, tmp_path):
    result = run(
        "bert", "--out", "out", "--sparsity", "0.5", "--criterion", "wanda", "--calibration", "prune_task:text",
        "--skip", "last", "--eval", "prune_task:zeros",
    )  # fmt: skip
    assert result.exit_code == 0
    report = json.loads((tmp_path / "out" / PRUNING_FILE).read_text())
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer_config.json", PRUNING_FILE,
    }  # fmt: skip
    expected = AutoModelForSequenceClassification.from_pretrained(folder)
    prune(expected, {"sparsity": 0.5, "criterion": "wanda", "skip": ("last",)}, run.task.text())
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in expected.state_dict().items())
    assert report["sparsity"] == 0.5
    assert report["quality"]["pruned"] - report["quality"]["dense"] == report["pruned"]
    assert report["examples"] == 12


@pytest.mark.parametrize("pattern", [(), ("--granularity", "n_m")], ids=["unstructured", "n_m"])
def test_a_decoder_is_pruned_by_sparsegpt_block_by_block(run, tmp_path, pattern):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    result = run(
        "llama", "--out", "out", "--sparsity", "0.5", "--criterion", "sparsegpt", *pattern,
        "--calibration", "prune_task:tokens", "--skip", "lm_head", "--eval", "prune_task:zeros",
    )  # fmt: skip
    assert result.exit_code == 0
    report = json.loads((tmp_path / "out" / PRUNING_FILE).read_text())
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert report["criterion"] == "sparsegpt"
    assert report["sparsity"] == 0.5
    assert len(report["tensors"]) == 14
    for entry in report["tensors"]:
        zero = loaded.get_parameter(entry["name"]) == 0
        assert zero.sum() == entry["pruned"]
        assert not pattern or (zero.unflatten(1, (-1, 4)).sum(2) == 2).all()


def test_a_granularity_that_finds_nothing_names_those_that_do_in_a_readable_line(run, folder):
    with pytest.raises(MatchError, match=r"at least one channel to prune, got none: .* granularity neuron") as told:
        run("bert", "--out", "out", "--sparsity", "0.5", "--granularity", "channel")
    assert "and head" in str(told.value)
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_shrunk_folder_loads_smaller_with_the_outputs_of_the_masked_model(run, folder, tmp_path, calibrated):
    options = ["--sparsity", "0.5", "--granularity", "neuron", "--scope", "local", "--include", "*.intermediate.dense"]
    options += ["--criterion", "taylor", "--calibration", "prune_task:text"] if calibrated else []
    assert run("bert", "--out", "masked", *options).exit_code == 0
    result = run("bert", "--out", "small", *options, "--shrink")
    assert result.exit_code == 0
    assert "Removed 24 units" in result.stdout
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["intermediate_size"] == 12
    assert torch.allclose(logits(tmp_path / "small"), logits(tmp_path / "masked"), atol=1e-5)
    assert not torch.allclose(logits(tmp_path / "small"), logits(folder), atol=1e-3)


def test_every_option_that_applies_is_a_flag_and_help_needs_no_torch(run):
    told = eff("prune", "--help", env={"COLUMNS": "200"}).stdout
    for field in dataclasses.fields(PruneConfig):
        assert (f"--{field.name.replace('_', '-')} " in told) == (field.name not in DURING_TRAINING), field.name
    code = (
        "import sys; from shared_core.cli import app; app(['--help'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("False\n")
    assert "prune" in shown


SPARSE = ["prune_task:model", "--out", "out", "--sparsity", "0.5"]


@pytest.mark.parametrize(("args", "error", "message"), [
    (["prune_task:model", "--out", "full", "--sparsity", "0.5"], CheckpointError, "--out must be a new or empty"),
    (["prune_task:nobody", "--out", "full/kept/out", "--sparsity", "0.5"], CheckpointError, "cannot write to full"),
    (["nobody", "--out", "out", "--sparsity", "0.5"], ConfigError, "MODEL must be module:function"),
    (["prune_task:loss", *SPARSE[1:]], ConfigError, "MODEL must name a function without arguments, got"),
    ([*SPARSE, "--eval", "prune_task:text"], ConfigError, "--eval must name a function that takes .model., got"),
    ([*SPARSE, "--criterion", "wanda", "--calibration", "prune_task:narrow"], ConfigError,
     "calibration must hold what the model takes: .*, got Tensor .RuntimeError: "),
    (["prune_task:model", "--out", "out", "--sparsity", "1"], ConfigError, "sparsity must be in"),
    (["prune_task:model", "--out", "out", "--sparsity", "half"], ConfigError, "sparsity must be a finite number"),
    ([*SPARSE, "--criterion", "wnda"], ConfigError, "did you mean 'wanda'"),
    ([*SPARSE, "--criterion", "movement"], ConfigError, "criterion must.*after training"),
    ([*SPARSE, "--criterion", "wanda"], ConfigError, "--calibration must be given with criterion wanda"),
    ([*SPARSE, "--granularity", "n_m", "--n-m", "1:4"], ConfigError, "sparsity must be 0.75 with n_m = 1:4"),
    ([*SPARSE, "--granularity", "filter", "--shrink"], ConfigError, "--shrink .*--granularity neuron"),
    ([*SPARSE, "--granularity", "channel"], ConfigError, "must return .model, example_inputs."),
    ([*SPARSE, "--granularity", "channel", "--shrink", "--calibration", "prune_task:pairs", "--loss",
      "prune_task:loss"], ConfigError, "must return .model, example_inputs."),
    ([*SPARSE, "--criterion", "taylor", "--calibration", "prune_task:images"], ConfigError, "loss must be a scalar"),
    ([*SPARSE, "--criterion", "taylor", "--calibration", "prune_task:pairs", "--batches", "0"], ConfigError,
     "--batches must be in"),
    ([*SPARSE, "--loss", "prune_task:loss"], ConfigError, "--loss .*--calibration"),
    ([*SPARSE, "--weights", "nothing"], CheckpointError, "nothing"),
    (["full", "--weights", "full", "--out", "out", "--sparsity", "0.5"], ConfigError, "--weights must be left out"),
    (["full", "--out", "out", "--sparsity", "0.5"], CheckpointError, "no config.json"),
])  # fmt: skip
def test_refusals_write_nothing(run, tmp_path, args, error, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    with pytest.raises(error, match=message):
        run(*args)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept"]


def test_a_list_may_be_given_twice_or_with_commas(run, tmp_path):
    for out, skip in (("a", ["--skip", "0", "--skip", "9"]), ("b", ["--skip", "0,9"])):
        assert run("prune_task:model", "--out", out, "--sparsity", "0.5", *skip).exit_code == 0
        left_out = json.loads((tmp_path / out / PRUNING_FILE).read_text())["left_out"]
        assert list(left_out) == ["0.weight", "9.weight"]


def test_a_flag_of_training_is_no_flag(run):
    result = run(*SPARSE, "--begin", "0.1")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_a_folder_that_diverged_is_named_once(tmp_path):
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    model = BertForSequenceClassification(config)
    model.classifier.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "run")
    told = "classifier.weight must be finite, got nan; the run that saved it had diverged"
    with pytest.raises(CheckpointError, match=f"^eff prune: cannot load {tmp_path / 'run'}: {told}$"):
        eff("prune", tmp_path / "run", "--sparsity", "0.5", "--out", tmp_path / "o")
