"""TRL's script under `eff run`, and launchers that train in processes of their own: TRL's, accelerate's, torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.slow

EFF = [sys.executable, "-P", "-c", "from shared_core.cli import main; main()", "run"]
TRL = str(Path(sys.executable).with_name("trl"))
CONFIG = """
model_name_or_path: model
dataset_name: data
output_dir: out
max_steps: 6
per_device_train_batch_size: 2
use_cpu: true
report_to: none
save_strategy: "no"
max_length: 16
dtype: float32
"""
UNSEEN = """
import torch
p = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([p], lr=1.0)
p.sum().backward()
optimizer.step()
open("trained", "w")
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *(f"w{n}" for n in range(61))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    ).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": " ".join(f"w{(7 * row + place) % 61}" for place in range(9))}) for row in range(32)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "sft.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)


def zeros(folder):
    weights = [one for name, one in load_file(folder / "model.safetensors").items() if name.endswith("proj.weight")]
    return sum(int((one == 0).sum()) for one in weights) / sum(one.numel() for one in weights)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*EFF, "trl.scripts.sft", "--config", "sft.yaml"], marks=pytest.mark.matrix),
        [*EFF, TRL, "sft", "--config", "sft.yaml"],
        [*EFF, "accelerate.commands.launch", "-m", "trl.scripts.sft", "--config", "sft.yaml"],
        [*EFF, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trl.scripts.sft", "--config",
         "sft.yaml"],
    ],
    ids=["script", "trl", "accelerate", "torchrun"],
)  # fmt: skip
def test_a_launcher_hands_the_techniques_on(room, command):
    done = run(*command, "--prune_sparsity", "0.75", "--prune_scope", "local")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("efftrain receipt: 6 steps applied") == 1
    assert zeros(room / "out") == pytest.approx(0.75, abs=0.01)


def test_a_launched_script_that_no_front_end_sees_stops_at_its_first_step(room):
    (room / "loop.py").write_text(UNSEEN)
    done = run(*EFF, "accelerate.commands.launch", "loop.py", "--prune_sparsity", "0.5")
    assert done.returncode != 0
    assert "an optimizer stepped before any of them took the recipe" in done.stderr
    assert not (room / "trained").exists()


def test_a_launcher_that_trains_nothing_is_told_so_though_it_ends_by_sys_exit(room):
    (room / "start.py").write_text("import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', '']))\n")
    done = run(*EFF, "start.py", "--prune_sparsity", "0.5")
    assert done.returncode == 2
    assert "error: eff run: start.py must train with" in done.stderr
    assert "no training by any of them was seen" in done.stderr
