"""A short run of a script that trains with the Hugging Face Trainer or an Accelerate loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.runs.short_run import ShortRunConfig, check_one_process, short_run_of

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_eff.accelerate_loop import AcceleratedLoop


def redirect_arguments(run: ShortRunConfig, module: ModuleType) -> None:
    """Make all `TrainingArguments` use a folder of the run, and report to no service."""
    stock = module.TrainingArguments.__post_init__

    @functools.wraps(stock)
    def post_init(self: Any) -> None:
        self.output_dir, self.report_to, self.push_to_hub = run.output, "none", False
        stock(self)

    module.TrainingArguments.__post_init__ = post_init  # type: ignore[attr-defined]


def shorten_trainer(trainer: Trainer, run: ShortRunConfig) -> None:
    """Set the trainer's steps. Events per epoch or per N steps happen four times."""
    from transformers import EarlyStoppingCallback

    args: Any = trainer.args
    check_one_process(args.world_size)
    args.output_dir, args.max_steps = run.output, run.steps
    for kind in ("eval", "save"):
        if getattr(args, f"{kind}_strategy") in ("steps", "epoch"):
            strategy = type(getattr(args, f"{kind}_strategy"))("steps")
            setattr(args, f"{kind}_strategy", strategy)
            setattr(args, f"{kind}_steps", max(run.steps // 4, 1))
    trainer.remove_callback(EarlyStoppingCallback)
    number = run.eval_batches * args.eval_batch_size
    data: Any = trainer.eval_dataset
    several = {name: _first(one, number) for name, one in data.items()} if isinstance(data, Mapping) else None
    trainer.eval_dataset = _first(data, number) if several is None else several


def _first(data: Any, number: int) -> Any:
    """Return the first examples of a data set. A stream is returned unchanged."""
    from torch.utils.data import Subset

    if not number or not hasattr(data, "__len__") or len(data) <= number:
        return data
    return data.select(range(number)) if hasattr(data, "select") else Subset(data, range(number))


def conclude_trainer(trainer: Trainer) -> NoReturn:
    """Validate, save, and end the process."""
    from hf_eff.callbacks import session_callback_of

    driver: Any = session_callback_of(trainer)

    def metrics() -> Mapping[str, Any]:
        return trainer.evaluate() if trainer.eval_dataset is not None else {}

    short_run_of(driver.session).conclude(driver.session, metrics, lambda place: trainer.save_model(str(place)))


def silence_accelerator(module: ModuleType) -> None:
    """Keep every `Accelerator` of a script from saving and reporting."""
    for name in ("save_state", "save_model", "init_trackers", "log"):
        setattr(module.Accelerator, name, lambda self, *args, **kwargs: None)


def conclude_loop(loop: AcceleratedLoop) -> None:
    """End a loop after its last step."""

    def step(method: Callable[..., Any], *args: Any) -> Any:
        result = method(*args)
        session = loop.session
        if session.step + session.skipped >= loop.plan.total_steps:
            loop.finish()
            short_run_of(session).conclude(session, dict, save)
        return result

    def save(place: Path) -> None:
        from safetensors.torch import save_model

        save_model(loop.inner, str(place))

    Wrapped(loop, "on_step", step)
    if hasattr(loop.inner, "save_pretrained"):
        Wrapped(loop.inner, "save_pretrained", lambda *args, **kwargs: None)
