"""Trains recipes on a model that transformers cuts by its own plan: ``hf_tensor_parallel.py FOLDER``, by each process.

Started as one process it trains the same on the whole model, for comparison.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from hf_gradients import InOrder
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_eff import attach, prepare
from shared_core.errors import CompatibilityError

sys.path.insert(0, str(Path(__file__).parents[2] / "hf_eff"))
from conftest import make_arguments, make_language_model, make_texts

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
DATA = max(1, PROCESSES // 2)  # see other examples, and FSDP2 shards over them
STEPS, RATE = 6, 0.5
RECIPES = {
    "prune average": {
        "prune": {"sparsity": 0.5, "begin": 0.2, "end": 0.8, "every": 2, "criterion": "taylor"},
        "average": {"kind": "ema", "decay": 0.5},
    },
    "qat": {"qat": {"scheme": "int8", "begin": 0.2}},
    "distill": {"distill": {"teacher": "teacher", "alpha": 0.3}},
    "checkpointing": {"checkpointing": {"policy": "block"}},
    "lottery": {"lottery": {"out": "ticket", "rate": 0.5, "rewind_to": 2}},
    "soup": {"soup": {"kind": "uniform", "last": 2}},
}
SHARDED = ("prune average", "qat")
"""Recipes that four processes train."""
LOOPS = ("prune average", "qat", "distill", "checkpointing")
REFUSED = {"lsq": {"qat": {"scheme": "int8", "range": "lsq"}}, "lora": {"lora": {"base": "none", "rank": 2}}}


def cut_model(recipe):
    given = {}
    if PROCESSES > 1:
        from transformers.distributed import DistributedConfig

        size = PROCESSES // DATA
        given = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=size, fsdp_size=DATA)}
    if "distill" in recipe:
        recipe = {"distill": {**recipe["distill"], "teacher": make_language_model(seed=9, hidden_size=32)}}
    return AutoModelForCausalLM.from_pretrained("start", **given), recipe


SIZES = {"tp_size": PROCESSES // DATA, "dp_shard_size": DATA}


def run_loop(folder, recipe, sizes=SIZES):
    """Train in a loop of accelerate."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    model, recipe = cut_model(recipe)
    more = {"parallelism_config": ParallelismConfig(**sizes)} if PROCESSES > 1 else {}
    # a loop averages what processes average: in one process the halves of a batch come one after another
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 // DATA, **more)
    optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)
    loader = DataLoader(make_texts(STEPS * 4), batch_size=2)
    parts = prepare(accelerator, model, optimizer, loader, recipe=recipe, total_steps=STEPS)
    model, optimizer, loader = parts
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(folder, is_main_process=accelerator.is_main_process)


def make_trainer(folder, recipe):
    model, recipe = cut_model(recipe)
    args = make_arguments(
        folder,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=RATE,
        per_device_train_batch_size=4 // DATA,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
        eval_strategy="steps",
        eval_steps=3,
    )
    trainer = InOrder(model, args, train_dataset=make_texts(STEPS * 4), eval_dataset=make_texts(4, seed=2))
    attach(trainer, recipe)
    return trainer


def main(folder):
    os.chdir(folder)
    torch.set_num_threads(1)
    if PROCESSES > 1:
        dist.init_process_group("gloo")
        # accelerate (1.15) takes tensor parallelism for something of GPUs, which it is not
        ParallelismConfig._validate_accelerator = lambda *_: None
    else:
        make_language_model(hidden_size=32).save_pretrained("start")
    losses = {}
    for name in RECIPES if DATA == 1 else SHARDED:
        trainer = make_trainer(name, RECIPES[name])
        trainer.train()
        losses[name] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trainer.save_model(f"{name}/final")
    for name in LOOPS if DATA == 1 else SHARDED:
        run_loop(f"{name} in a loop/final", RECIPES[name])
    told = {}
    for name, recipe in REFUSED.items():
        if PROCESSES > 1:
            try:
                make_trainer(name, recipe).train()
            except CompatibilityError as error:
                told[name] = str(error)
    if PROCESSES > 1:
        try:
            run_loop("nowhere", RECIPES["qat"], {"tp_size": 2} if DATA > 1 else {"tp_size": 1})
        except CompatibilityError as error:
            told["places"] = str(error)
    Path(f"told{os.environ.get('RANK', '')}.json").write_text(json.dumps({**told, "losses": losses}))
    if PROCESSES > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
