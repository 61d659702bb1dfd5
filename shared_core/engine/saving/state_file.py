"""The file that holds a session's state beside a checkpoint: one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.files.atomic import atomic_write
from shared_core.files.json_yaml import parse_json

STATE_FILE = "eff_state.safetensors"
_FORMAT = 1
_TENSOR = "__tensor__"


def _split(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        # A copy each: safetensors refuses two names for one storage, and optimizer state may share it.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        # JSON has no other keys than texts.
        return {str(key): _split(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state: {type(value).__name__} cannot be saved; use tensors, numbers, strings, lists, dicts")


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
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
    # One file: the tree of plain values in its metadata, with names in the tensors' places.
    tree = json.dumps(_split(state, tensors))
    path = Path(folder) / STATE_FILE
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"eff_format": str(_FORMAT), "state": tree})
    return path


def load_state(folder: Path | str) -> dict[str, Any]:
    """Return what `save_state` wrote into `folder`.

    Raises:
        CheckpointError: If the file is missing, damaged or of a newer format.
    """
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            "state", f"{path} must exist, but it does not", "this checkpoint was saved without efftrain"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # Files of older versions can be read; a newer one may mean something else.
        if int(metadata["eff_format"]) > _FORMAT:
            raise CheckpointError("state", f"{path} was written by a newer efftrain", "update it to read this file")
        return dict(_join(parse_json(metadata["state"]), tensors))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            "state", f"{path} must be a whole state file, got {error}", "the file is damaged"
        ) from error


def packed(state: Mapping[str, Any]) -> bytes:
    """Return a state as bytes, for another process.

    Example:
        >>> unpacked(packed({"step": 3, "mask": torch.tensor([True, False])}))["mask"].tolist()
        [True, False]
    """
    # Eight bytes tell where the tree ends: no separator that a tensor's bytes could hold.
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_split(state, tensors)).encode()
    return len(tree).to_bytes(8, "little") + tree + save(tensors)


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the state that `packed` made these bytes of."""
    end = 8 + int.from_bytes(data[:8], "little")
    return dict(_join(json.loads(data[8:end]), load(data[end:])))


def rng_state(*, on_gpu: bool = True) -> dict[str, Any]:
    """Return the state of every random generator that training draws from, as savable values.

    Args:
        on_gpu: Whether those of GPUs are among them, which a data loader's workers must leave alone.
    """
    return rng_snapshot(on_gpu=on_gpu)()


def rng_snapshot(*, on_gpu: bool = True) -> Callable[[], dict[str, Any]]:
    """Return what makes `rng_state` of now when it is called: most snapshots are never saved, and making it is dear."""
    import random

    import numpy as np

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    keys, of_torch = np.array(keys), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if on_gpu and torch.cuda.is_available() else None

    def state() -> dict[str, Any]:
        # As tensors and numbers: a state is saved without pickle.
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
    """Put every random generator back to where `rng_state` found it."""
    import random

    import numpy as np

    torch.set_rng_state(state["torch"].cpu())
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
