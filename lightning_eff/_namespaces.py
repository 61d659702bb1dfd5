"""Lightning under its two names: which are installed, and what of them our classes must derive from."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from shared_core.errors import MissingExtraError

if TYPE_CHECKING:
    import lightning.pytorch as unified
    import pytorch_lightning as pl

    # A type checker takes our classes for those of either name; what is really made has the one base that it needs.
    class Callback(pl.Callback, unified.Callback): ...  # type: ignore[misc]

    class MixedPrecision(pl.plugins.MixedPrecision, unified.plugins.MixedPrecision): ...  # type: ignore[misc]

    class DDPStrategy(pl.strategies.DDPStrategy, unified.strategies.DDPStrategy): ...  # type: ignore[misc]

    class ModelParallelStrategy(  # type: ignore[misc]
        pl.strategies.ModelParallelStrategy, unified.strategies.ModelParallelStrategy
    ): ...


PYTORCH_LIGHTNING, LIGHTNING = "pytorch_lightning", "lightning.pytorch"


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the import names under which Lightning is installed.

    Raises:
        MissingExtraError: If it is not.
    """
    names = tuple(
        name for name in (PYTORCH_LIGHTNING, LIGHTNING) if importlib.util.find_spec(name.partition(".")[0]) is not None
    )
    if not names:
        raise MissingExtraError("lightning_eff", "pytorch-lightning", "lightning")
    return names


def namespace_of(trainer_or_module: object) -> str:
    """Return under which name Lightning defines this object's class: Lightning rejects plugins of the other one."""
    for kind in type(trainer_or_module).__mro__:
        for name in installed():
            if kind.__module__.startswith(f"{name}."):
                return name
    return installed()[0]


def callback_kinds(trainer: Any) -> set[str]:
    """Return the names of the classes that a Trainer's callbacks are of, in whichever namespace they are."""
    return {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}


def _callback_base() -> type[Callback]:
    # A callback of one name alone is accepted by the other's Trainer but not by its command line.
    bases = tuple(importlib.import_module(name).Callback for name in installed())
    return type("LightningCallback", bases, {"__module__": __name__, "__doc__": "A callback of every installed name."})


if not TYPE_CHECKING:
    Callback = _callback_base()


def strategies(namespace: str) -> Any:
    """Return the strategies module of one name."""
    return importlib.import_module(f"{namespace}.strategies")


def plugins(namespace: str) -> Any:
    """Return the plugins module of one name."""
    return importlib.import_module(f"{namespace}.plugins")
