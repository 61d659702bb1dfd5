"""The optimizers of benchmarks/optimizers.py: how each is made, and which trainer's loop it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

LEARNING_RATE = 0.02


@dataclass(frozen=True)
class Kind:
    """An optimizer and how it is used.

    Args:
        make: Makes it for a model; None leaves that to the Hugging Face Trainer's ``optim``.
        loop: ``hf`` (the Hugging Face Trainer), ``own`` (a plain loop), or one of `optimizer_runs.LOOPS` (Lightning).
        options: Further training arguments of the Hugging Face Trainer.
        bias: False for a model of matrices alone.
    """

    library: str
    name: str
    make: Callable[[nn.Module], Any] | None = None
    loop: str = "hf"
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = True
    steps_per_batch: int = 1

    @property
    def title(self) -> str:
        return f"{self.library}: {self.name}"


def _of(module: str, name: str, model: nn.Module, **options: Any) -> Optimizer:
    kind = getattr(importlib.import_module(module), name)
    return kind(model.parameters(), **{"lr": LEARNING_RATE, **options})


def _kron(model: nn.Module) -> Optimizer:
    """Return Kron, which draws from torch's generator, with the same draws in every step of every loop."""
    optimizer = _of("pytorch_optimizer", "Kron", model)
    optimizer.register_step_pre_hook(lambda *_: torch.manual_seed(0) and None)
    return optimizer


def _around(name: str, model: nn.Module, **options: Any) -> Optimizer:
    """Return a wrapper of pytorch_optimizer around torch's AdamW."""
    wrapper = getattr(importlib.import_module("pytorch_optimizer"), name)
    return wrapper(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), **options)


def _sam(model: nn.Module) -> Optimizer:
    sam = importlib.import_module("pytorch_optimizer").SAM
    return sam(model.parameters(), base_optimizer=torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)


def _of_whole_model(name: str, model: nn.Module) -> Optimizer:
    return getattr(importlib.import_module("pytorch_optimizer"), name)(model, lr=LEARNING_RATE)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = [*model.parameters()]
    return [one for one in parameters if one.ndim == 2], [one for one in parameters if one.ndim != 2]


def _muon_with_adam(module: str, name: str, model: nn.Module) -> Optimizer:
    matrices, others = _split(model)
    groups = [
        {"params": matrices, "use_muon": True, "lr": LEARNING_RATE},
        {"params": others, "use_muon": False, "lr": LEARNING_RATE},
    ]
    return getattr(importlib.import_module(module), name)(groups)


def _two(model: nn.Module) -> list[Optimizer]:
    matrices, others = _split(model)
    return [torch.optim.Muon(matrices, lr=LEARNING_RATE), torch.optim.AdamW(others, lr=LEARNING_RATE)]


def _released(model: nn.Module) -> Optimizer:
    """Return optimi's AdamW, which steps in hooks of the backward pass."""
    optimi = importlib.import_module("optimi")
    optimizer = optimi.AdamW(model.parameters(), lr=LEARNING_RATE, gradient_release=True)
    optimi.prepare_for_gradient_release(model, optimizer)
    return optimizer


def _wrapped_schedule_free(model: nn.Module) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return importlib.import_module("schedulefree").ScheduleFreeWrapper(base, momentum=0.9)


def _trainer_names() -> list[Kind]:
    """Return the names of the Trainer's ``--optim`` that are not of other processors."""
    from transformers.training_args import OptimizerNames

    low_rank = {"optim_target_modules": ["layers"], "optim_args": "rank=4, update_proj_gap=2"}
    names = [one.value for one in OptimizerNames if not any(kind in one.value for kind in ("xla", "npu"))]
    return [
        Kind(
            "transformers", name, options={"optim": name} | (low_rank if name.startswith(("galore", "apollo")) else {})
        )
        for name in names
    ]


def _plain(library: str, names: str, module: str = "") -> list[Kind]:
    """Return optimizers that need parameters and a learning rate alone."""
    return [Kind(library, name, partial(_of, module or library, name)) for name in names.split()]


def _torch() -> list[Kind]:
    library = "torch.optim"
    search = partial(_of, library, "LBFGS", line_search_fn="strong_wolfe")
    return [
        *_plain(library, "SGD Adam Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD Adafactor"),
        Kind(library, "SGD with momentum", partial(_of, library, "SGD", momentum=0.9)),
        Kind(library, "AdamW(fused=True)", partial(_of, library, "AdamW", fused=True)),
        Kind(library, "Muon", partial(_of, library, "Muon"), bias=False),
        Kind(library, "LBFGS in Lightning", search, "automatic"),
        Kind(library, "Muon and AdamW in Lightning, manual", _two, "two", steps_per_batch=2),
    ]


def _pytorch_optimizer() -> list[Kind]:
    library = "pytorch_optimizer"
    plain = (
        "AdEMAMix ADOPT Lion AdaFactor Shampoo ScalableShampoo SOAP CAME MARS APOLLO SPAM StableSPAM "
        "FlashAdamW ScheduleFreeAdamW Adai Fira"
    )
    wrappers = ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "SafeFP16Optimizer")
    return [
        *_plain(library, plain),
        Kind(library, "Kron", _kron),
        *(Kind(library, name, partial(_of, library, name, lr=1.0)) for name in ("Prodigy", "DAdaptAdam")),
        Kind(library, "Ranger21", partial(_of, library, "Ranger21", num_iterations=8)),
        Kind(library, "AdamMini", partial(_of_whole_model, "AdamMini")),
        Kind(library, "AdaLOMO", partial(_of_whole_model, "AdaLOMO")),
        Kind(library, "Muon", partial(_muon_with_adam, library, "Muon")),
        *(Kind(library, f"{name}(AdamW)", partial(_around, name)) for name in wrappers),
        Kind(library, "SAM in Lightning, manual, two passes", _sam, "two passes"),
        Kind(library, "SAM in Lightning, manual, closure", _sam, "closure"),
        Kind(library, "SophiaH in Lightning, manual", partial(_of, library, "SophiaH", update_period=2), "graph"),
        Kind(library, "AdaHessian in Lightning, manual", partial(_of, library, "AdaHessian"), "graph"),
    ]


def all_kinds() -> list[Kind]:
    """Return every optimizer of the table, also those that are not installed."""
    free = "schedulefree"
    closure, muon = "AdamWScheduleFreeClosure", "SingleDeviceMuonWithAuxAdam"
    return [
        *_trainer_names(),
        *_torch(),
        *_pytorch_optimizer(),
        *_plain(free, "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree AdamWScheduleFreeReference"),
        Kind(free, "ScheduleFreeWrapper(SGD) in an own loop", _wrapped_schedule_free, "own"),
        Kind(free, f"{closure} in Lightning", partial(_of, free, closure), "automatic"),
        Kind("muon", f"{muon} in an own loop", partial(_muon_with_adam, "muon", muon), "own"),
        Kind("torch.optim", "AdamW in an own loop", partial(_of, "torch.optim", "AdamW"), "own"),
        *_plain("torchao", "AdamW8bit AdamW4bit AdamWFp8", "torchao.optim"),
        *_plain("optimi", "AdamW StableAdamW"),
        Kind("optimi", "AdamW(gradient_release=True)", _released),
        *_plain("grokadamw", "GrokAdamW"),
        *_plain("bitsandbytes", "AdamW8bit Lion8bit LAMB", "bitsandbytes.optim"),
    ]
