"""Names of our strategies in Lightning's registries, without importing Lightning before the user does."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HOMES = {f"{namespace}.strategies": namespace for namespace in ("pytorch_lightning", "lightning.pytorch")}
_NAMES: dict[str, tuple[str, dict[str, Any], str]] = {
    "eff_ddp": ("ddp_class", {}, "DDP whose communication hooks run on a CPU too"),
    **{
        f"eff_ddp_{hook}": ("ddp_class", {"comm": {"hook": hook}}, f"DDP that sends gradients by {hook}")
        for hook in ("fp16", "bf16", "powersgd")
    },
    "eff_fsdp": ("fsdp_class", {}, "FSDP2 of a module that shards nothing itself"),
}


def register_strategies() -> None:
    """Make ``Trainer(strategy="eff_fsdp")`` known to every Lightning that is imported, and to one imported later."""
    later = {home for home in _HOMES if home not in sys.modules}
    for home in _HOMES.keys() - later:
        _register(sys.modules[home])
    if later:
        sys.meta_path.insert(0, _Watch(later))


def _register(module: ModuleType) -> None:
    for name, (maker, options, description) in _NAMES.items():
        # Registered already by another import of this package.
        if name not in module.StrategyRegistry:
            made = functools.partial(_make, maker, _HOMES[module.__name__])
            module.StrategyRegistry.register(name, made, description, **options)


def _make(maker: str, namespace: str, **options: Any) -> Any:
    strategy_class = getattr(importlib.import_module("lightning_eff.strategies"), maker)(namespace)
    return strategy_class(**options)


class _Watch(MetaPathFinder):
    """Finds nothing itself: registers once a module that others found has been executed."""

    def __init__(self, awaited: set[str]) -> None:
        self._awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        # Once: the module is found and executed by its own loader, and registered after.
        self._awaited.discard(fullname)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute, loader, loader.exec_module)
        return spec


def _execute(loader: Loader, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    # The patched method goes: it was on this loader object alone.
    del loader.exec_module  # type: ignore[method-assign]
    execute(module)
    _register(module)
