"""The file with a session's state in a checkpoint: one safetensors file, written atomically."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from shared_core.checkpoint_formats.foreign import load_checkpoint
from shared_core.checkpoint_formats.plain import LIGHTNING_META
from shared_core.errors import CheckpointError
from shared_core.files.atomic import atomic_write
from shared_core.files.json_yaml import parse_json

STATE_FILE = "eff_state.safetensors"
_FORMAT = 1
_TENSOR = "__tensor__"


def _split(value: Any, tensors: dict[str, Tensor], name: str = "state") -> Any:
    if isinstance(value, Tensor):
        stored = f"t{len(tensors)}"
        # Copy each tensor: safetensors refuses shared storage, and optimizer state may share it.
        tensors[stored] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: stored}
    if isinstance(value, Mapping):
        # JSON keys are always strings.
        return {str(key): _split(item, tensors, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, tensors, f"{name}.{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}: {type(value).__name__} cannot be saved; use tensors, numbers, strings, lists, dicts")


def _join(value: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _join(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    return value


def save_state(folder: Path | str, state: Mapping[str, Any]) -> Path:
    """Write `state` (nested dicts and lists of tensors and plain values) into `folder` and return the file's path.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> path = save_state(folder, {"step": 3, "masks": {"w": torch.tensor([True, False])}})
        >>> load_state(folder)["masks"]["w"].tolist(), load_state(folder)["step"]
        ([True, False], 3)
    """
    tensors: dict[str, Tensor] = {}
    # One file: the tree of plain values is in its metadata, with names in place of tensors.
    tree = json.dumps(_split(state, tensors))
    path = Path(folder) / STATE_FILE
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"eff_format": str(_FORMAT), "state": tree})
    return path


def load_state(folder: Path | str) -> dict[str, Any]:
    """Return what `save_state` wrote into `folder`.

    Raises:
        CheckpointError: If the file is missing, damaged or in a newer format.
    """
    return _read(Path(folder) / STATE_FILE, with_tensors=True)


def sessions_at(path: Path, *, with_tensors: bool = True) -> list[Mapping[str, Any]]:
    """Return the states of sessions in a checkpoint of either trainer. Other files have none.

    Args:
        path: A checkpoint's folder, or Lightning's file.
        with_tensors: False to read only plain values from the Trainer's checkpoint, with None for each tensor.
    """
    if path.is_dir() and (path / STATE_FILE).is_file():
        return [_read(path / STATE_FILE, with_tensors=with_tensors)]
    file = path / LIGHTNING_META if path.is_dir() else path
    # Lightning stores a callback's state under the name of its class.
    saved = load_checkpoint(file) if file.is_file() else None
    found = _mappings(saved.get("callbacks")) if isinstance(saved, Mapping) else []
    return [state for state in found if isinstance(state.get("techniques"), Mapping)]


def _mappings(value: Any, depth: int = 4) -> list[Mapping[str, Any]]:
    """Return a mapping and the mappings in it."""
    if not isinstance(value, Mapping) or depth == 0:
        return []
    return [value, *(found for item in value.values() for found in _mappings(item, depth - 1))]


def _read(path: Path, *, with_tensors: bool) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError("state", f"{path} does not exist", "this checkpoint was saved without efftrain")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) if with_tensors else None for name in names}
        # Files of older versions can be read, newer formats may differ.
        if int(metadata["eff_format"]) > _FORMAT:
            raise CheckpointError("state", f"{path} was written by a newer efftrain", "update it to read this file")
        return dict(_join(parse_json(metadata["state"]), tensors))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            "state", f"cannot read {path}: {error}", "the file is damaged; use another checkpoint"
        ) from error


def packed(state: Mapping[str, Any]) -> bytes:
    """Return a state as bytes, for another process.

    Example:
        >>> unpacked(packed({"step": 3, "mask": torch.tensor([True, False])}))["mask"].tolist()
        [True, False]
    """
    # Eight bytes hold the length of the tree. A separator could also occur in a tensor's bytes.
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_split(state, tensors)).encode()
    return len(tree).to_bytes(8, "little") + tree + save(tensors)


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the state from the bytes that `packed` returned."""
    end = 8 + int.from_bytes(data[:8], "little")
    return dict(_join(json.loads(data[8:end]), load(data[end:])))


def rng_state(*, on_gpu: bool = True) -> dict[str, Any]:
    """Return the state of every random generator that training draws from, as savable values.

    Args:
        on_gpu: True to include the GPUs' generators, which data loader workers must not touch.
    """
    return rng_snapshot(on_gpu=on_gpu)()


def rng_snapshot(*, on_gpu: bool = True) -> Callable[[], dict[str, Any]]:
    """Return a function that builds the present `rng_state`. Building is slow, and most snapshots are never saved."""
    import random

    import numpy as np

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    keys, of_torch = np.array(keys), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if on_gpu and torch.cuda.is_available() else None

    def state() -> dict[str, Any]:
        # Tensors and numbers only, since a state is saved without pickle.
        found: dict[str, Any] = {
            "torch": of_torch,
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "name": name,
                "keys": torch.from_numpy(keys.astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
        }
        return found if of_gpus is None else {**found, "cuda": of_gpus}

    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore every random generator to the result of `rng_state`."""
    import random

    import numpy as np

    torch.set_rng_state(state["torch"].cpu())
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def rng_restored() -> Iterator[None]:
    """Restore every random generator at the end to its state at the start."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
