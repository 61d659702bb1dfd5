"""Use an installed efftrain as a stranger would: ``package.py alone`` or ``package.py trainers``; see noxfile.py."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "EFF_RECIPE")}

MODEL = """
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

def build():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2)), torch.randn(4, 16)

def decoder():
    net, inputs = build()
    net.config = SimpleNamespace(model_type="llama")
    return net, inputs

def attach(recipe):
    from shared_core import Recipe, Session
    Session(Recipe.from_dict(recipe)).attach(build()[0])

def write():
    for value in (0.0, 1.0):
        save_file({"weight": torch.full((2, 3), value)}, f"{int(value)}.safetensors")
    save_file({"weight": torch.randn(64, 64)}, "large.safetensors")
    Path("folder").mkdir()
    Path("folder/config.json").write_text('{"model_type": "bert"}')

def averaged():
    from safetensors.torch import load_file
    assert bool((load_file("soup.safetensors")["weight"] == 0.5).all())
"""
NET = """
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.arange(32) % 2
class Net(Base):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
    def forward(self, x, labels=None):
        logits = self.last(self.first(x).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
    def training_step(self, batch, _):
        return self(*batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
net = Net()
"""
ZEROS = """
print("zeros", sum(int((layer.weight == 0).sum()) for layer in (net.first, net.last)))
"""
HF = f"""
from torch.nn import Module as Base
from transformers import Trainer, TrainingArguments
{NET}
data = [{{"x": one, "labels": label}} for one, label in zip(x, y)]
arguments = TrainingArguments("out", max_steps=4, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
Trainer(net, arguments, train_dataset=data).train()
{ZEROS}"""
LIGHTNING = f"""
import pytorch_lightning as pl
from pytorch_lightning import LightningModule as Base
from torch.utils.data import DataLoader, TensorDataset
{NET}
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
pl.Trainer(max_steps=4, accelerator="cpu", **quiet).fit(net, DataLoader(TensorDataset(x, y), batch_size=8))
{ZEROS}"""

FILES = {"model.py": MODEL, "hf.py": HF, "lightning_script.py": LIGHTNING, "prune.yaml": "prune: {sparsity: 0.5}"}

CORE = [  # a command, what it must print
    ("python -c import(shared_core)", ""),
    ("eff --version", "efftrain"),
    ("eff --help", "cache-teacher"),
    ("eff doctor", "efftrain[hf]"),
    ("eff compat", "refused"),
    ("eff init --goal smaller --out recipe.yaml", "recipe.yaml"),
    ("eff explain recipe.yaml --model model:build --steps 100", "prune"),
    ("python -c model.write()", ""),
    ("eff soup 0.safetensors 1.safetensors --kind uniform --out soup.safetensors", "soup.safetensors"),
    ("python -c model.averaged()", ""),
]
EXTRAS = [  # a command that must fail, and the extra that it must name
    ("python -c import(hf_eff).Pruning", "hf"),
    ("python -c import(lightning_eff).Pruning", "lightning"),
    ("eff run model.py --prune_sparsity 0.5", "hf"),
    ("eff prune folder --sparsity 0.5 --out pruned", "hf"),
    ("eff export model:build --out model.onnx", "onnx"),
    ("eff export model:build --out model.pte --format executorch", "executorch"),
    ("eff export model:build --out served --format compressed-tensors", "compressed-tensors"),
    ("eff export model:build --out served --format torchao", "torchao"),
    ("eff export model:decoder --out served.gguf --format gguf", "gguf"),
    ("eff privacy --noise-multiplier 1.0 --sample-rate 0.01 --steps 100", "privacy"),
    ("eff quantize model:build --out quantized --report page.html", "plots"),
    ("eff compress large.safetensors --out small.eff", "compress"),
    ("eff search model:build --calibration model:build --out small -- python model.py", "search"),
    ("python -c model.attach({'lora':{'rank':2}})", "lora"),
    ("python -c model.attach({'dp':{'noise_multiplier':1}})", "privacy"),
    ("python -c model.attach({'fp8':{'recipe':'tensorwise','backend':'torchao'}})", "torchao"),
]
TRAINERS = [
    ("python hf.py", "zeros 0"),
    ("python lightning_script.py", "zeros 0"),
    ("eff run hf.py --prune_sparsity 0.5", "zeros 80"),
    ("eff run lightning_script.py --prune_sparsity 0.5", "zeros 80"),
    ("EFF_RECIPE=prune.yaml python lightning_script.py", "zeros 80"),
    ("eff doctor", "lightning"),
]


def use(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the tables: ``python -c`` takes the rest as one expression, in which ``model`` is imported."""
    env = CLEAN | {"COLUMNS": "200"}
    words = line.split(" ")
    if "=" in words[0]:
        name, _, env[name] = words.pop(0).partition("=")
    if words[:2] == ["python", "-c"]:
        expression = re.sub(r"import\((\w+)\)", r"__import__('\1')", words[2])
        words = ["python", "-c", f"import model; {expression}"]
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    return subprocess.run(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main(phase: str) -> int:
    rows = [(line, False, f"efftrain[{extra}]") for line, extra in EXTRAS]
    rows = [(line, True, told) for line, told in (CORE if phase == "alone" else TRAINERS)] + rows * (phase == "alone")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="eff-package-") as temporary:
        folder = Path(temporary).resolve()
        for name, text in FILES.items():
            (folder / name).write_text(text)
        for line, passes, told in rows:
            done = use(line, folder)
            if (done.returncode == 0) != passes or told not in done.stdout:
                wrong += 1
                print(f"WRONG: {line}: {told!r} expected\n{done.stdout[-2000:]}", flush=True)  # noqa: T201
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
