"""Check that saved models load into the user's own model without this library: same keys, shapes, plain tensors.

Also the deployment file next to the weights, and our section in the model card.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shared_core.checkpoint_formats.foreign import load_checkpoint
from shared_core.errors import CheckpointError, TrainingError
from shared_core.files.atomic import atomic_write

DEPLOYMENT_FILE = "eff_deployment.json"
DEPLOYMENT_TENSORS = "eff_deployment.tensors"
"""Safetensors of what would be too long for text. Its name does not end so, because engines load all such files."""
DEPLOYMENT_KEY = "eff_deployment"
LIGHTNING_META = "meta.pt"  # beside the shards of a folder that Lightning wrote


class PlainKeys:
    """Keys and shapes of the user's model before techniques attach.

    Args:
        model: The user's unchanged model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.read(model)

    def read(self, model: nn.Module) -> None:
        """Record the present keys and shapes of a model as the expected ones.

        Raises:
            TrainingError: If it has lazy parameters, which have no shape before the first forward.
        """
        lazy = [name for name, tensor in model.state_dict().items() if is_lazy(tensor)]
        if lazy:
            rule = f"lazy layers are not initialized: {', '.join(lazy[:5])}"
            raise TrainingError("session", rule, "pass a batch through the model first")
        state = model.state_dict()
        # Extra state (`get_extra_state`) may be any object. Only tensors have a shape to check.
        self._shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        self._names = set(state)

    def check(self, state_dict: Mapping[str, Tensor]) -> None:
        """Refuse a state dict that the untouched model could not load strictly.

        Raises:
            CheckpointError: Lists keys that are missing, unexpected or have another shape.
        """
        missing, unexpected = self._names - set(state_dict), set(state_dict) - self._names
        # Extra state has no shape, so only its presence is checked.
        reshaped = {
            name: (shape, tuple(state_dict[name].shape))
            for name, shape in self._shapes.items()
            if name in state_dict and tuple(state_dict[name].shape) != shape
        }
        if missing or unexpected or reshaped:
            got = f"missing {sorted(missing)}, unexpected {sorted(unexpected)}, other shapes {reshaped}"
            rule = f"the keys differ from those of the plain model: {got}"
            raise CheckpointError("checkpoint", rule, "nothing was written")


def write_deployment(folder: Path | str, values: Mapping[str, Any]) -> None:
    """Write the result of `SavedFiles.deployment` next to the weights in `folder`. An empty one removes an older file.

    Args:
        folder: Existing folder of the weights.
        values: Technique → plain JSON values. Tensors go to a file of their own.
    """
    file, tensors_file = Path(folder) / DEPLOYMENT_FILE, Path(folder) / DEPLOYMENT_TENSORS
    tensors: dict[str, Tensor] = {}
    values = _split(values, tensors)
    if tensors:
        with atomic_write(tensors_file) as temporary:
            save_file(tensors, temporary)
    else:
        tensors_file.unlink(missing_ok=True)
    if not values:
        file.unlink(missing_ok=True)  # of other weights, which an earlier run saved here
        return
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _split(values: Any, tensors: dict[str, Tensor], path: tuple[str, ...] = ()) -> Any:
    """Return values with the name of the file in place of tensors, which are added to `tensors` by their path."""
    if isinstance(values, Tensor):
        tensors[json.dumps(path)] = values.detach().cpu().contiguous()
        return _IN_FILE
    if isinstance(values, Mapping):
        return {key: _split(value, tensors, (*path, key)) for key, value in values.items()}
    return values


def _joined(values: Any, tensors: Mapping[str, Tensor], path: tuple[str, ...] = ()) -> Any:
    if values == _IN_FILE:
        if (key := json.dumps(path)) not in tensors:
            raise ValueError(f"{DEPLOYMENT_TENSORS} must lie beside it with tensor {key}; copy the whole folder")
        return tensors[key]
    if isinstance(values, Mapping):
        return {key: _joined(value, tensors, (*path, key)) for key, value in values.items()}
    return values


_IN_FILE = {"file": DEPLOYMENT_TENSORS}


def read_deployment(path: Path | str) -> dict[str, Any]:
    """Return the deployment values of a model's folder or a Lightning ``.ckpt``, sharded or not.

    Args:
        path: A folder, or a file written by Lightning.

    Raises:
        CheckpointError: If there are none, or they cannot be read.
    """
    path = Path(path)
    file = path / DEPLOYMENT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / LIGHTNING_META).is_file():
        file = path / LIGHTNING_META
    try:
        if file.suffix == ".json":
            tensors_file = file.with_name(DEPLOYMENT_TENSORS)
            tensors = load_file(tensors_file) if tensors_file.is_file() else {}
            return dict(_joined(json.loads(file.read_text(encoding="utf-8")), tensors))
        return dict(load_checkpoint(file)[DEPLOYMENT_KEY])
    except Exception as error:  # torch.load may raise anything for a damaged file
        rule = f"cannot read deployment values from {file}: {type(error).__name__}: {error}"
        remedy = "save the model after training with a technique that writes them (qat)"
        raise CheckpointError("deployment", rule, remedy) from error


# Buffers that models create from their config or count up, and that files of other versions may have or lack: positions
# and causal masks in transformers, and the number of batches in a norm (not saved before torch 0.4.1).
_MADE_BY_MODEL = re.compile(
    r"(?:^|\.)(?:num_batches_tracked|position_ids|token_type_ids|masked_bias|inv_freq|(?:cos|sin)_cached)$"
)
_CAUSAL_MASK = re.compile(r"(?:^|\.)(?:attn|attention)\.bias$")


def is_made_by_model(name: str, shape: Sequence[int]) -> bool:
    """Return True if a tensor is a buffer that a model creates by itself, so that a file may lack it.

    Example:
        >>> is_made_by_model("layers.0.rotary_emb.inv_freq", [32]), is_made_by_model("layers.0.attn.bias", [32])
        (True, False)
    """
    return bool(_MADE_BY_MODEL.search(name) or (len(shape) == 4 and _CAUSAL_MASK.search(name)))


def unlike(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Return names that the weights lack, ignoring ties, and names that are unknown or have another shape.

    Buffers that a model creates by itself (`is_made_by_model`) may be on one side only.

    Args:
        model: The model with the expected names and shapes.
        weights: Name → tensor, as in a state dict.

    Example:
        >>> unlike(nn.Linear(2, 1), {"weight": torch.zeros(1, 3)})
        (['bias'], ['weight'])
    """
    own = model.state_dict()
    # Find ties by address: a file may store a tied weight under only one of its names.
    given = {own[name].data_ptr() for name in weights if name in own}
    missing = [
        name
        for name, value in own.items()
        if name not in weights and value.data_ptr() not in given and not is_made_by_model(name, value.shape)
    ]
    others = [
        name
        for name, value in weights.items()
        if (own[name].shape != value.shape if name in own else not is_made_by_model(name, value.shape))
    ]
    return missing, others


def check_values(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that a model cannot compute with: not finite, or integer instead of float or vice versa.

    Args:
        model: The model, whose parameters have the expected kind of dtype.
        weights: Name → tensor. Unknown names are ignored.
        where: Prefix of the error.

    Raises:
        CheckpointError: Names the weight.

    Example:
        >>> check_values(nn.Linear(2, 1), {"bias": torch.tensor([float("nan")])}, "teacher")
        Traceback (most recent call last):
        shared_core.errors.CheckpointError: teacher: bias must be finite, got nan; the run that saved it had diverged
    """
    for name, own in model.named_parameters(remove_duplicate=False):
        value = weights.get(name)
        if value is None or not value.numel():
            continue
        if value.is_floating_point() != own.is_floating_point():
            raise CheckpointError(
                where, f"{name} must be {own.dtype}, got {value.dtype}", "the weights belong to another model"
            )
        # vector_norm(inf) is NaN or infinite if any element is, and allocates no mask. float8 (1 byte) has no kernel.
        if value.is_floating_point() and value.itemsize > 1:
            try:
                largest = torch.linalg.vector_norm(value.detach(), float("inf"))
            except NotImplementedError:  # torchao's codes
                largest = torch.linalg.vector_norm(value.detach().dequantize(), float("inf"))
            if not torch.isfinite(largest):
                rule = f"{name} must be finite, got {float(largest)}"
                raise CheckpointError(where, rule, "the run that saved it had diverged")


CARD = "README.md"
_BEGIN, _END = "<!-- efftrain: begin -->", "<!-- efftrain: end -->"


def add_section(card: Path, section: str) -> None:
    """Add a section at the end of a card. It replaces our earlier section."""
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2] if begin else ""
    # Keep the text before and after our section: users may have added text below it.
    kept = (before.rstrip() + after).rstrip()
    with atomic_write(card) as temporary:
        temporary.write_text(f"{kept}\n\n{_BEGIN}\n{section}\n{_END}\n", encoding="utf-8")
