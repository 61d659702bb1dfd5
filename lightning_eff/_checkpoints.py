"""Lightning's checkpoints: their weights and files.

A file holds the baked weights that the user's module loads, and the weights that training resumes from.
Lightning (2.6) writes into TMPDIR and moves the file. From another filesystem the move overwrites the old checkpoint,
and a crash leaves it half-written. So we write to a temporary file and rename, and skip damaged files on resume.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_eff._fsdp2 import load_optimizers_apart
from shared_core.checkpoint_formats import RAW_KEY, RUN_KEY, check_indexes, load_checkpoint
from shared_core.checkpoint_formats.plain import DEPLOYMENT_KEY
from shared_core.distributed.sharded_tensors import fill_parameters_, is_sharded
from shared_core.engine.saving.session_state import loading
from shared_core.errors import CheckpointError
from shared_core.files.atomic import atomic_write, make_folder
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped

_BAKED_ALONE = "eff_baked_names"
"""Names that only baked weights of a factorized layer have."""


def bake_saved(session: Session, checkpoint: dict[str, Any], run: str, metrics: Mapping[str, Any]) -> None:
    """Bake the weights in a checkpoint, keep the originals that it changes, and add the run and step.

    If all processes write a distributed checkpoint, Lightning saves only one copy of the weights. A checkpoint to
    resume from then keeps the weights in training.
    """
    found = {name: float(value) for name, value in metrics.items()}
    checkpoint[RUN_KEY] = {"id": run, "step": session.step, "metrics": found}
    checkpoint[DEPLOYMENT_KEY] = session.files.deployment()
    weights = checkpoint.get("state_dict")
    if not weights or not session.is_attached:
        return
    # With optimizer states it is a checkpoint to resume from, and shards cannot be stored twice.
    distributed = any(map(is_sharded, weights.values()))
    if distributed and "optimizer_states" in checkpoint:
        return
    baked = session.files.bake(weights)
    # Only tensors that baking changed are stored twice: a dense model's file does not grow.
    raw = {name: value for name, value in weights.items() if not (distributed or _same(value, baked.get(name)))}
    checkpoint["state_dict"] = type(weights)(baked)
    if raw:
        checkpoint[RAW_KEY] = raw
    if alone := [name for name in baked if name not in weights]:
        checkpoint[_BAKED_ALONE] = alone


def wrap_loading(strategy: Any, session: Session) -> list[Wrapped]:
    """Return wrappers of a strategy's loading: files are checked, and sharded weights find the user's own layers.

    Lightning (2.6) looks up parameter names for weights only. Optimizers, loaded in the same call, belong to the layers
    in training.
    """
    checked = Wrapped(strategy, "load_checkpoint", load_checked)
    # The strategy's module imports the function by name, so replace it there.
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
            # Weights and optimizers separately: see `load_optimizers_apart`.
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
    # Drop names of baked weights only, and restore what baking changed.
    kept = {name: value for name, value in checkpoint["state_dict"].items() if name not in alone}
    return {**kept, **checkpoint.get(RAW_KEY, {})}


def load_checked(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the strategy loads from a checkpoint. Raise `CheckpointError` if it has more than plain values."""
    # An index is a pickle: check it before torch reads it.
    if Path(path).is_dir():
        check_indexes(Path(path))
    try:
        return load(path, *args, **kwargs)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "resume", f"{path} must hold only tensors and plain values, got {str(error)[:300]}", "no code was run"
        ) from error


def restore_raw(module: Any, checkpoint: dict[str, Any]) -> None:
    """Load the weights stored with the baked ones, so that training continues from them."""
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = latent_weights(checkpoint)
        if module.trainer.precision_plugin.precision == "64-true":
            module.double()  # Lightning (2.6) does it after loading, but float32 would round the weights
    else:  # a strategy that shards has loaded it already
        fill_parameters_(module, checkpoint.get(RAW_KEY, {}))


def _same(value: Any, baked: Any) -> bool:
    if value is baked:
        return True
    return isinstance(value, Tensor) and isinstance(baked, Tensor) and torch.equal(value, baked)


def whole_files(trainer: Any, note: Callable[[str], None]) -> list[Wrapped]:
    """Wrap the Trainer's writing and reading of checkpoint files, and return the wrappers."""
    wrapped = [Wrapped(trainer._checkpoint_connector, "resume_start", functools.partial(_resume, trainer, note))]
    writer = trainer.strategy.checkpoint_io
    if type(writer).__name__ == "TorchCheckpointIO":
        wrapped.append(Wrapped(writer, "save_checkpoint", _save))
    return wrapped


def _save(original: Callable[..., None], checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    # A URL or options of another file system: use Lightning's own writer.
    if storage_options is not None or "://" in str(path):
        original(checkpoint, path, storage_options)
        return
    make_folder(Path(path).parent)
    with atomic_write(path) as temporary:
        torch.save(checkpoint, temporary)


def damage(file: Path) -> str | None:
    """Return why a checkpoint file is damaged, None if it is not. torch stores a checksum of each tensor."""
    try:
        with zipfile.ZipFile(file) as archive:
            # without this torch option the checksums are not computed
            wrong = archive.testzip() if torch.serialization.get_crc32_options() else None
        with contextlib.suppress(pickle.UnpicklingError):  # a class that the user may allow
            torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # both may raise anything on a damaged file
        return f"it is truncated or not a checkpoint ({error})"
    return None if wrong is None else f"{wrong} in it is damaged"


def _resume(
    trainer: Any, note: Callable[[str], None], original: Callable[..., None], path: Any = None, *args: Any, **more: Any
) -> None:
    file = Path(str(path or ""))
    reason = damage(file) if file.is_file() else None
    if reason is None:
        original(path, *args, **more)
        return
    others = [other for other in file.parent.glob("*.ckpt") if other.is_file() and other != file]
    # The newest complete one, not just the previous one.
    others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    whole = next((other for other in others if damage(other) is None), None)
    # Only a file that Lightning chose may be replaced. A path that the user gave is loaded or refused.
    if whole is None or not _is_found_by_lightning(trainer, file):
        advice = f"pass {whole}, which is complete" if whole else "there is no other in its folder; start again"
        raise CheckpointError("resume", f"{file} is not a complete checkpoint: {reason}", advice)
    note(f"not resumed from {file}: {reason}; resumed from {whole} instead")
    original(str(whole), *args, **more)


def _is_found_by_lightning(trainer: Any, file: Path) -> bool:
    """Return True if `fit` finds such a file itself: ``ckpt_path`` "last" and "hpc"."""
    found = {Path(trainer.default_root_dir) / file.name} if file.name.startswith("hpc_ckpt_") else set()
    for callback in trainer.checkpoint_callbacks:
        if type(callback).__name__ == "OnExceptionCheckpoint":
            found.add(Path(callback.ckpt_path))
        elif (
            (last := getattr(callback, "CHECKPOINT_NAME_LAST", None))
            and file.name.startswith(last)
            and callback.dirpath
        ):
            found.add(Path(callback.dirpath) / file.name)
    return file.absolute() in {path.absolute() for path in found}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what is in a checkpoint file."""
    content = load_checkpoint(path)
    if not isinstance(content, dict):
        raise CheckpointError("checkpoint", f"{path} must hold a dict, got {type(content).__name__}", "check the path")
    return content
