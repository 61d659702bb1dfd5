"""The weights in a checkpoint: those that the user's module loads, and beside them those that training goes on from."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_eff._sharded_optimizers import load_optimizers_apart
from lightning_eff._wrapped import Wrapped
from shared_core.errors import CheckpointError
from shared_core.plain_checkpoint import DEPLOYMENT_KEY
from shared_core.resuming import loading
from shared_core.session import Session
from shared_core.sharded import fill_parameters_, is_sharded
from shared_core.soup.sources import RAW_KEY, RUN_KEY, check_indexes

_BAKED_ALONE = "eff_baked_names"
"""Names that only baked weights have: a factorised layer's."""


def bake_saved(session: Session, checkpoint: dict[str, Any], run: str, metrics: Mapping[str, Any]) -> None:
    """Bake the weights in a checkpoint, keep those beside them that it changes, and say of which run and step they are.

    Of a distributed checkpoint Lightning writes the weights alone by all processes: one that training goes on from
    keeps the weights in training, as nothing can lie beside them.
    """
    found = {name: float(value) for name, value in metrics.items()}
    checkpoint[RUN_KEY] = {"id": run, "step": session.step, "metrics": found}
    checkpoint[DEPLOYMENT_KEY] = session.deployment()
    weights = checkpoint.get("state_dict")
    if not weights or not session.is_attached:
        return
    distributed = any(map(is_sharded, weights.values()))
    if distributed and "optimizer_states" in checkpoint:
        return
    baked = session.bake(weights)
    raw = {name: value for name, value in weights.items() if not (distributed or _same(value, baked.get(name)))}
    checkpoint["state_dict"] = type(weights)(baked)
    if raw:
        checkpoint[RAW_KEY] = raw
    if alone := [name for name in baked if name not in weights]:
        checkpoint[_BAKED_ALONE] = alone


def wrap_loading(strategy: Any, session: Session) -> list[Wrapped]:
    """Return the wrappers of a strategy: what it loads is checked, and finds the user's own layers if it shards.

    Lightning (2.6) goes through the parameters' names for weights alone; optimizers, which it loads in the same call,
    are of the layers in training.
    """
    checked = Wrapped(strategy, "load_checkpoint", load_checked)
    owner = sys.modules[type(strategy).load_checkpoint.__module__]
    load = getattr(owner, "_load_checkpoint", None)
    if load is None:
        return [checked]
    fabric = sys.modules[load.__module__]

    def load_weights(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with loading(session):
            original(*args, **kwargs)

    def load_all(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = (
            Wrapped(fabric, "_load_raw_module_state", load_weights),
            Wrapped(owner, "_load_checkpoint", functools.partial(load_optimizers_apart, fabric)),
        )
        try:
            return original(*args, **kwargs)
        finally:
            for part in parts:
                part.undo()

    return [checked, Wrapped(strategy, "load_checkpoint", load_all)]


def latent_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's weights as they were before `bake_saved`."""
    alone = checkpoint.get(_BAKED_ALONE, ())
    kept = {name: value for name, value in checkpoint["state_dict"].items() if name not in alone}
    return {**kept, **checkpoint.get(RAW_KEY, {})}


def load_checked(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the strategy loads from a checkpoint; an error of ours where that is more than plain values.

    Raises:
        CheckpointError: If it names code, in an index of shards too, which torch (2.13) unpickles whatever it holds.
    """
    if Path(path).is_dir():
        check_indexes(Path(path))
    try:
        return load(path, *args, **kwargs)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"resume: {path} must hold only tensors and plain values, got {str(error)[:300]}; no code was run"
        ) from error


def restore_raw(module: Any, checkpoint: dict[str, Any]) -> None:
    """Let training go on from the weights that were kept beside the baked ones."""
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = latent_weights(checkpoint)
        if module.trainer.precision_plugin.precision == "64-true":
            module.double()  # which Lightning (2.6) does after loading: float32 would round the weights
    else:  # a strategy that shards has loaded it already
        fill_parameters_(module, checkpoint.get(RAW_KEY, {}))


def _same(value: Any, baked: Any) -> bool:
    if value is baked:
        return True
    return isinstance(value, Tensor) and isinstance(baked, Tensor) and torch.equal(value, baked)
