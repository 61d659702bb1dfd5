"""Files of weights and JSON, read without running any of their code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.journal_file import read_object


class MappedSafetensors(Mapping[str, Tensor]):
    """The tensors of safetensors files, each mapped when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._handles = {file: open_safetensors(file) for file in dict.fromkeys(files.values())}

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._handles[self._files[key]].get_tensor(key)
        return tensor

    def __iter__(self) -> Any:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_safetensors(file: Path) -> Any:
    """Return the open safetensors file; raises `CheckpointError` if it is not whole."""
    _check_file(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: file must be whole safetensors, got {error}; it is truncated or not a checkpoint, leave it out"
        ) from error


def load_torch_file(file: Path) -> Any:
    """Return what a file of ``torch.save`` holds, its tensors mapped from the file, running none of its code.

    Raises:
        CheckpointError: If it is missing, empty, truncated, or holds more than tensors and plain values.
    """
    _check_file(file)
    # files from before torch 1.6 cannot be mapped
    return load_torch_stream(file, str(file), mmap=zipfile.is_zipfile(file))


def load_torch_stream(stream: Any, name: str, *, mmap: bool | None = None) -> Any:
    """Return what a file or stream of ``torch.save`` holds, running none of its code; errors call it `name`."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise CheckpointError(f"{name}: file must be a whole checkpoint, got {error}; leave it out") from error
        # torch tells what it met after, or instead of, advice on how to run the file's code
        told = str(error).partition("WeightsUnpickler error:")[2] or str(error).partition("\n")[2] or str(error)
        reason = next((line for line in told.splitlines() if line.strip()), "")
        raise CheckpointError(
            f"{name}: checkpoint must hold only tensors and plain values, got {reason.strip()[:200]}; its code was not "
            "run; save model.state_dict() or safetensors instead"
        ) from error
    except Exception as error:  # torch's readers raise RuntimeError, EOFError, KeyError, UnicodeDecodeError and more
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: file must be a whole checkpoint, got {first_line[:200]}; it is truncated or not a checkpoint, "
            "leave it out"
        ) from error


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: file must exist, got none; check the path")
    if file.stat().st_size == 0:
        raise CheckpointError(f"{file}: file must be a whole checkpoint, got an empty file; leave it out")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: If it cannot be read or holds something else.
    """
    return read_object(file, "leave it out")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's ``config.json``, none if it has none."""
    return read_json(folder / "config.json") if (folder / "config.json").exists() else {}
