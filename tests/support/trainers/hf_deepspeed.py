"""A process that trains with DeepSpeed on a CPU: ``hf_deepspeed.py FOLDER``, with RANK and DS_ACCELERATOR set."""

import json
import sys
from pathlib import Path

import torch

from hf_eff import attach
from shared_core.engine import compatibility
from shared_core.engine.registry import REGISTRY
from shared_core.errors import CompatibilityError

sys.path.insert(0, str(Path(__file__).parents[2] / "hf_eff"))
from conftest import make_language_model, make_texts, make_trainer


def zero(stage):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }


def train(folder, *, distilled=True, resume=None, **settings):
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "gradient_accumulation_steps": 2, **settings}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(folder, model=make_language_model(), data=make_texts(32), **settings)
    teacher = make_language_model(seed=9, hidden_size=32)
    attach(trainer, {"distill": {"teacher": teacher, "alpha": 0.3}} if distilled else None)
    trainer.train(resume_from_checkpoint=resume)
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def apart(one, other):
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def reason(key, run_environment):
    try:
        compatibility.check([key], run_environment)
    except CompatibilityError as error:
        return str(error)
    return None


if __name__ == "__main__":
    import deepspeed.comm.torch  # noqa: F401

    # it would compile C++ for minutes
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    plain, whole = train(folder / "plain"), train(folder / "zero", deepspeed=zero(2))
    resumed = train(folder / "zero", deepspeed=zero(2), resume=str(folder / "zero" / "checkpoint-2"))
    told = {"accumulated": apart(plain, whole), "resumed": apart(whole, resumed), "keys": list(REGISTRY)}
    told["effect"] = apart(whole, train(folder / "without", distilled=False, deepspeed=zero(2)))
    reasons = {key: reason(key, ["deepspeed"]) for key in REGISTRY}
    told["refused"] = {key: found for key, found in reasons.items() if found}
    try:
        train(folder / "three", deepspeed=zero(3))
    except CompatibilityError as error:
        told["stage_3"] = str(error)
    (folder / "told.json").write_text(json.dumps(told))
