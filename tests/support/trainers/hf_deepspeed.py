"""A process that trains with DeepSpeed on a CPU, or without: ``hf_deepspeed.py FOLDER [CONFIG ...]``.

RANK and the like are set for DeepSpeed, DS_ACCELERATOR too. Each recipe is trained, saved, and resumed from its middle.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from hf_eff import attach
from shared_core.errors import CompatibilityError

sys.path.insert(0, str(Path(__file__).parents[2] / "hf_eff"))
from conftest import make_language_model, make_texts, make_trainer

PRUNE = {"sparsity": 0.6, "end": 4, "every": 1}
AVERAGE = {"kind": "swa", "begin": 2}
RECIPES = {
    "nothing": {},
    "prune": {"prune": PRUNE},
    "taylor": {"prune": {**PRUNE, "criterion": "taylor", "scope": "local"}},
    "rigl": {"prune": {"sparsity": 0.6, "schedule": "one_shot", "begin": 0, "end": 5, "every": 1, "dynamic": "rigl"}},
    "movement": {"prune": {**PRUNE, "criterion": "movement"}},
    "qat": {"qat": {"scheme": "int8"}},
    "average": {"average": AVERAGE},
    "prune+qat+average": {"prune": {**PRUNE, "end": 3}, "qat": {"scheme": "int8_weight"}, "average": AVERAGE},
    "checkpointing": {"checkpointing": {"policy": "block"}},
    "activations": {"activations": {"pack": "exact", "min_size": 16}},
    "low_rank": {"low_rank": {"rank": 4, "min_size": 64}},
    "lora": {"lora": {"rank": 4, "base": "none"}},
    "distill": {"distill": {"alpha": 0.3}},
    "attention": {"distill": {"attention": ["model.layers.0.self_attn=model.layers.0.self_attn"]}},
    "ema": {"distill": {"teacher": "ema"}},
}
BF16 = ("prune", "movement", "qat", "average", "lora")
IN_TWO = ("nothing", "prune", "rigl", "qat", "average", "prune+qat+average", "lora", "distill")
REFUSED = {
    "3": ["prune", "qat", "average", "low_rank", "lora", "activations", "distill"],
    "2-fp16": ["prune"],
}


def names_of(config, world):
    """Return the recipes that are run with a config in so many processes."""
    if config == "3":
        return ("nothing", "checkpointing")
    return BF16 if "bf16" in config else IN_TWO if world == 2 else tuple(RECIPES)


def zero(config):
    stage = {"stage": int(config[0])}
    if config.endswith("offload"):
        stage["offload_optimizer"] = {"device": "cpu"}
    if config == "3":
        stage |= {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": stage,
        **({"bf16": {"enabled": True}} if "bf16" in config else {}),
        **({"fp16": {"enabled": True}} if "fp16" in config else {}),
    }


class Stepped(TrainerCallback):
    """Keeps the float32 weights that DeepSpeed steps, after each step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        from deepspeed.utils import safe_get_full_fp32_param

        found = {name: safe_get_full_fp32_param(parameter) for name, parameter in model.named_parameters()}
        self.weights.append({name: value for name, value in found.items() if value is not None})


def train(folder, recipe, config=None, resume=None, callbacks=None, final="final"):
    settings = {
        "optim": "adamw_torch", "adam_epsilon": 1e-4, "max_steps": 6, "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5, "per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", 1)),
        "save_strategy": "steps", "save_steps": 3, "report_to": "none",
    }  # fmt: skip
    if config is not None:
        settings |= {"deepspeed": zero(config), "bf16": "bf16" in config, "fp16": "fp16" in config}
    model = make_language_model()
    trainer = make_trainer(folder, model=model, data=make_texts(64), callbacks=callbacks, **settings)
    if "distill" in recipe and "teacher" not in recipe["distill"]:
        wide = 16 if "attention" in recipe["distill"] else 32
        recipe = {"distill": {**recipe["distill"], "teacher": make_language_model(seed=9, hidden_size=wide)}}
    attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / final))
    return trainer


def run(folder, name, config):
    """Train, and go on from the middle again; both final models are kept."""
    train(folder, RECIPES[name], config, final="whole")
    train(folder, RECIPES[name], config, resume=str(folder / "checkpoint-3"))


def steps_of_bf16(folder):
    """Return the shares of an average that are not that of the float32 and of the bf16 weights; zeros under masks."""
    stepped = Stepped()
    trainer = train(folder, RECIPES["average"], "1-bf16", callbacks=[stepped])
    counts = torch.zeros(3)
    for name, parameter in trainer.model.named_parameters():
        wide = torch.stack([weights[name] for weights in stepped.weights[1:]])
        means = [values.double().mean(0).bfloat16() for values in (wide, wide.bfloat16())]
        counts += torch.tensor([*(int((parameter != mean).sum()) for mean in means), parameter.numel()])
    away = (counts[:2] / counts[2]).tolist()
    stepped.weights.clear()
    trainer = train(folder.with_name("masked"), RECIPES["prune"], "1-bf16", callbacks=[stepped])
    zeros = [sum(int((weights == 0).sum()) for weights in found.values()) for found in stepped.weights]
    return away, zeros, sum(int((parameter == 0).sum()) for parameter in trainer.model.parameters())


def reason(folder, recipe, config):
    try:
        train(folder, recipe, config)
    except CompatibilityError as error:
        return str(error)
    return None


def main(folder, configs):
    torch.set_num_threads(1)
    if not configs:
        for name, recipe in RECIPES.items():
            train(folder / "plain" / name, recipe)
        return
    import deepspeed.comm.torch  # noqa: F401

    # it would compile C++ for minutes
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    rank, told = os.environ["RANK"], {}
    for config in configs:
        for name in names_of(config, int(os.environ["WORLD_SIZE"])):
            run(folder / config / name, name, config)
    if "1-bf16" in configs:
        told["away"], told["zeros"], told["end"] = steps_of_bf16(folder / "averaged")
        told["mutual"] = reason(folder / "refused", {"distill": {"teacher": "mutual"}}, "2")
        for config, keys in REFUSED.items():
            told |= {f"{config} {key}": reason(folder / "refused", RECIPES[key], config) for key in keys}
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
