"""`eff run` under launchers, as people type it, on scripts that nobody edited: torchrun, accelerate's, TRL's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
# Each process works in a folder of its own, so that what it writes cannot be taken for the other's.
START = """
import os, sys, torch
from torch import nn
os.makedirs(os.environ["RANK"], exist_ok=True); os.chdir(os.environ["RANK"])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.arange(64) % 4)
"""
TRAINER = f"""{START}
from transformers import HfArgumentParser, Trainer, TrainingArguments
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x, labels):
        return {{"loss": nn.functional.cross_entropy(self.net(x), labels)}}
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(Classifier(), args, train_dataset=[dict(x=x, labels=y) for x, y in data])
trainer.train()
trainer.save_model()
"""
LOOP = f"""{START}
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for _ in range(3):
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_model(model, "out")
accelerator.end_training()
"""
MODULE = f"""{START}
import pytorch_lightning as pl
class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
given = dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, enable_checkpointing=False, logger=False)
trainer = pl.Trainer(**given, enable_progress_bar=False, default_root_dir="out")
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=8))
trainer.save_checkpoint("out/model.ckpt", weights_only=True)
"""
SCRIPTS = {  # and what each is given
    "trainer": (TRAINER, "--output_dir out --use_cpu --num_train_epochs 3 --save_strategy no --prune_sparsity .8"),
    "loop": (LOOP, "--prune_sparsity .8 --eff_total_steps 12"),
    "module": (MODULE, "--prune_sparsity .8"),
}
LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 2 {bin}/eff run",  # {bin}/eff is what $(which eff) says
    "torchrun-command": "torchrun --nproc-per-node 2 --no-python eff run",
    "torchrun-module": "torchrun --nproc-per-node 2 -m efftrain run",
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 {bin}/eff run",
    "accelerate-module": "accelerate launch --multi_gpu --num_processes 2 -m efftrain run",
}


def launch(launcher, script, flags, folder):
    (folder / "train.py").write_text(script)
    found = os.pathsep.join([str(BIN), os.environ["PATH"]])
    here = os.environ | {"PATH": found, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
    command = [*LAUNCHERS[launcher].format(bin=BIN).split(), "train.py", *flags.split()]
    return subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=400, check=False)


def saved_weights(folder):
    if (checkpoint := folder / "model.ckpt").exists():
        return torch.load(checkpoint, weights_only=True)["state_dict"]
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        *(("torchrun", script) for script in SCRIPTS),
        pytest.param("torchrun-command", "module", marks=pytest.mark.matrix),
        ("torchrun-module", "loop"),
        ("accelerate", "trainer"),
        ("accelerate", "module"),
        ("accelerate-module", "loop"),
    ],
)
def test_a_launched_script_trains_once_in_two_processes(launcher, script, tmp_path):
    done = launch(launcher, *SCRIPTS[script], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [value for value in saved_weights(tmp_path / "0" / "out").values() if value.dim() > 1]
    assert sum(int((value == 0).sum()) for value in weights) == round(0.8 * sum(map(torch.numel, weights)))
    # 64 examples three times in batches of 8, by two processes
    assert re.findall(r"efftrain receipt: (\d+) steps applied", done.stdout + done.stderr) == ["12"]
    receipts = [path.relative_to(tmp_path) for path in tmp_path.rglob("eff_receipt.json")]
    assert receipts == [Path("0/out/eff_receipt.json")]
    assert not [path for path in (tmp_path / "1").rglob("*") if path.is_file()]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_exit_status_of_a_process_that_fails_reaches_the_launcher(launcher, tmp_path):
    script = START + "if os.environ['RANK'] == '1':\n    sys.exit(7)\nimport time\ntime.sleep(60)\n"
    done = launch(launcher, script, "--prune_sparsity .8", tmp_path)
    assert done.returncode != 0
    assert re.search(r"exitcode\s*: 7 ", done.stderr)
    done = launch(launcher, START, "--prune_sparsty .8", tmp_path)
    assert "--prune_sparsty is not a flag; did you mean '--prune_sparsity'?" in done.stderr
    assert re.search(r"exitcode\s*: 2 ", done.stderr)


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
    assert "an optimizer stepped before any of them" in done.stderr
    assert not (room / "trained").exists()


def test_a_launcher_that_trains_nothing_is_told_so_though_it_ends_by_sys_exit(room):
    (room / "start.py").write_text("import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', '']))\n")
    done = run(*EFF, "start.py", "--prune_sparsity", "0.5")
    assert done.returncode == 2
    assert "error: eff run: start.py must train with" in done.stderr
    assert "none of them trained anything" in done.stderr
