"""Two processes on the joined batch do what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from conftest import make_language_model, make_texts, make_trainer
from torch.utils.data import SequentialSampler
from transformers import Trainer
from hf_eff import attach
from shared_core.distributed.collectives import rank, world_size

class InOrder(Trainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)

folder = sys.argv[2]
# a causal LM: BERT's classifier ignores num_items_in_batch, so the trainer itself scales its loss by the processes
model = make_language_model()
size = 8 // int(sys.argv[3])
trainer = make_trainer(folder, trainer_class=InOrder, model=model, data=make_texts(32),
                       per_device_train_batch_size=size, max_steps=4,
                       optim="sgd", learning_rate=0.05, save_strategy="steps", save_steps=2)
assert world_size() == int(sys.argv[3])
attach(trainer, {
    "prune": {"sparsity": 0.5, "begin": 1, "end": 3, "every": 1},
    "qat": {"scheme": "int8", "begin": 2},
    "distill": {"teacher": make_language_model(seed=9, hidden_size=32)},
    "loss_scale": {"kind": "dynamic"},
    "soup": {"kind": "greedy", "metric": "eval_loss"},
})
trainer.train()
torch.save(trainer.model.state_dict(), f"{folder}/rank{rank()}.pt")
trainer.save_model(f"{folder}/final")
"""


def run(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / f"run{processes}"
    arguments = [str(script), str(Path(__file__).parents[1]), str(folder), str(processes)]
    command = [sys.executable, "-P"]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done.stdout


@pytest.mark.slow
def test_two_processes_agree_with_each_other_and_with_one(tmp_path):
    alone, _ = run(tmp_path, 1)
    together, output = run(tmp_path, 2)
    ranks = [torch.load(together / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    one, two = (load_file(folder / "checkpoint-2" / "model.safetensors") for folder in (alone, together))
    for name in one:
        # two sums of the same gradients differ in the last bit, which decides between weights at the threshold
        flipped = (one[name] == 0) != (two[name] == 0)
        assert int(flipped.sum()) <= 1, name
        assert torch.allclose(two[name][~flipped], one[name][~flipped], atol=1e-3), name
    assert output.count("efftrain receipt") == 1
