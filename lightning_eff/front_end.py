"""How Lightning and `eff run` find this package: strategy names, a recipe for a script. Imports no Lightning."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_eff.auto_callback import VARIABLE
from shared_core.errors import require
from shared_core.front_ends.after_import import after_import
from shared_core.front_ends.flags import STEPS_FLAG, asked_steps

if TYPE_CHECKING:
    from shared_core.engine.recipe import Recipe
    from shared_core.runs.short_run import ShortRunConfig


_LOOP_MODULES = ("lightning_fabric.fabric", "lightning.fabric.fabric")
_STRATEGIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "eff_ddp": ("ddp_class", {}, "DDP whose communication hooks run on a CPU too"),
    **{
        f"eff_ddp_{hook}": ("ddp_class", {"comm": {"hook": hook}}, f"DDP that sends gradients by {hook}")
        for hook in ("fp16", "bf16", "powersgd")
    },
    "eff_fsdp": ("fsdp_class", {}, "FSDP2 of a module that shards nothing itself"),
}


def register_strategies() -> None:
    """Register ``Trainer(strategy="eff_fsdp")`` with every Lightning that is or will be imported."""
    for namespace in ("pytorch_lightning", "lightning.pytorch"):
        after_import(f"{namespace}.strategies", _register)


def _register(module: ModuleType) -> None:
    for name, (maker, options, description) in _STRATEGIES.items():
        if name not in module.StrategyRegistry:  # otherwise another import of this package has registered it
            made = functools.partial(_make, maker, module.__name__.rpartition(".")[0])
            module.StrategyRegistry.register(name, made, description, **options)


def _make(maker: str, namespace: str, **options: Any) -> Any:
    strategy_class = getattr(importlib.import_module("lightning_eff.strategies"), maker)(namespace)
    return strategy_class(**options)


class LightningFrontEnd:
    """Adds a recipe to a script's Lightning Trainers, through the callbacks entry point, and to its Fabric loops."""

    name = "lightning"
    libraries = ("pytorch_lightning", "lightning")
    modules = _LOOP_MODULES  # Trainers of child processes get the recipe through the environment

    def __init__(self) -> None:
        self._recipe: Recipe | None = None  # of Fabric loops
        self._has_loop = False

    def install(self, recipe: Recipe) -> None:
        """Write the recipe to a file and name it in the environment, which child processes inherit. Patch Fabric."""
        from shared_core.files.atomic import folder_aside

        self._recipe, self._has_loop = recipe, False
        for name in self.modules:
            after_import(name, self.patch_loops)
        folder = folder_aside(tempfile.gettempdir())
        atexit.register(_remove, folder, os.getpid())
        path = folder / "recipe.yaml"
        path.write_text(recipe.to_yaml(), encoding="utf-8")
        os.environ[VARIABLE] = str(path)

    def shorten(self, run: ShortRunConfig) -> None:
        """Make every `fit` with the recipe a short run."""
        from lightning_eff._short_run import shorten_fit

        self._recipe = None  # a Fabric loop has no end that could be moved
        for name in ("pytorch_lightning", "lightning.pytorch"):
            after_import(f"{name}.trainer.trainer", functools.partial(shorten_fit, run))

    def used(self) -> bool:
        """Return True if training with a recipe was started in this process."""
        module = sys.modules.get("lightning_eff._trainer_hooks")
        return self._has_loop or (module is not None and module.EffCallback.num_started > 0)

    def patch_loops(self, module: ModuleType) -> None:
        """Replace ``Fabric.setup`` in the module that defines it, for a model with one optimizer."""
        stock = module.Fabric.setup
        if hasattr(stock, "eff_stock"):
            return

        @functools.wraps(stock)
        def setup(fabric: Any, model: Any, *optimizers: Any, **options: Any) -> Any:
            from shared_core.engine.checks.model_guards import has_session

            # A script may also call our own `setup`, which has attached the techniques before it calls Fabric's.
            if not self._recipe or len(optimizers) != 1 or has_session(getattr(model, "_orig_mod", model)):
                return stock(fabric, model, *optimizers, **options)
            from lightning_eff.fabric_loop import setup as set_up

            steps = asked_steps()
            rule = f"the number of optimizer steps must be given for a Fabric loop, as --{STEPS_FLAG} N"
            require(steps, "eff run", rule, "or call efftrain.lightning.setup in the script")
            self._has_loop = True
            return set_up(fabric, model, optimizers[0], recipe=self._recipe, total_steps=steps or 0, **options)

        setup.eff_stock = stock  # type: ignore[attr-defined]
        module.Fabric.setup = setup  # type: ignore[attr-defined]


def _remove(folder: Path, owner: int) -> None:
    # A forked child exits too, and must not delete the file that its siblings need.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


FRONT_END = LightningFrontEnd()
