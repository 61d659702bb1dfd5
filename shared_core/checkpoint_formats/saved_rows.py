"""Where a transformers model's files put each row of its parameters: under which name, and in which order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.modules.matching import output_axis_of_experts

_STACK = 2**40
"""Marks count rows below it, and parameters above; float64 is exact to 2^53."""
_SAVED_AS_FLOAT = (
    "transformers dequantized this model on loading. It is saved as a float model. "
    "`eff export --format released` writes the format that it was released in."
)


@dataclasses.dataclass(frozen=True)
class SavedRows:
    """The rows that a tensor in transformers' files holds.

    Attributes:
        owners: The parameter of each row, as an index into `names`.
        rows: The row in that parameter, with experts concatenated.
        shape: Shape of the tensor with its inputs counted as 1.
        names: The parameters.
    """

    owners: Tensor
    rows: Tensor
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @functools.cached_property
    def held(self) -> dict[str, Tensor]:
        """Parameters with rows in the tensor, and where these are."""
        return {self.names[owner]: self.owners == owner for owner in torch.unique(self.owners).tolist()}

    @property
    def inputs_last(self) -> bool:
        """False if the file holds (experts, in, out)."""
        return not (len(self.shape) == 3 and self.shape[1] == 1 < self.shape[2])

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor with one row per output."""
        is_turned = len(self.shape) == 2 and self.shape[0] == 1 < self.shape[1]
        return (tensor.mT if is_turned or not self.inputs_last else tensor).reshape(len(self.rows), -1)

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor's rows, from the rows of each parameter by name."""
        found = values[next(iter(self.held))]
        if len(self.held) == 1:
            same = len(self.rows) == len(found) and torch.equal(self.rows, torch.arange(len(found)))
            return found if same else found[self.rows]
        taken = found.new_empty(len(self.rows), *found.shape[1:])
        for name, at in self.held.items():
            taken[at] = values[name][self.rows[at]]
        return taken

    def scatter_(self, into: Mapping[str, Tensor], values: Tensor) -> None:
        """Write the tensor's rows into the rows of each parameter by name."""
        for name, at in self.held.items():
            into[name][self.rows[at]] = values[at]


def saved_rows(model: Any, names: Iterable[str]) -> dict[str, SavedRows]:
    """Return (name in transformers' files → the rows there) of the named parameters and buffers of a model.

    Saving marks instead of the weights shows where a file puts each row, so every renaming and stacking is covered.
    Names are those of a model in float, also if it was dequantized on loading.
    """
    marks: dict[str, Tensor] = {}
    names = tuple(names)
    for number, name in enumerate(names):
        module = model.get_submodule(name.rpartition(".")[0])
        value = getattr(module, name.rpartition(".")[2])
        shape = _shape_of_rows(module, value)
        marks[name] = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + number * _STACK
    found = {}
    for key, mark in _saved(model, marks).items():
        numbers = mark.flatten().long()
        found[key] = SavedRows(numbers // _STACK, numbers % _STACK, tuple(mark.shape), names)
    return found


def row_count(module: nn.Module, value: Tensor) -> int:
    """Return the number of rows of a module's parameter or buffer: one per output, with experts concatenated."""
    return math.prod(_shape_of_rows(module, value))


def _shape_of_rows(module: nn.Module, value: Tensor) -> list[int]:
    """Return the shape with inputs counted as 1."""
    axis = output_axis_of_experts(module) if value.ndim == 3 else None
    return [size if place in (0, axis) else 1 for place, size in enumerate(value.shape)]


def _saved(model: Any, marks: dict[str, Tensor]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder, _float_names(model):
        model.save_pretrained(folder, state_dict=marks)
        return {key: mark for file in Path(folder).glob("*.safetensors") for key, mark in load_file(file).items()}


@contextlib.contextmanager
def _float_names(model: Any) -> Iterator[None]:
    """Make transformers save under a float model's names, and leave the config as it was."""
    hidden = {name: vars(model).pop(name) for name in ("hf_quantizer",) if name in vars(model)}
    if dequantizes(model):
        hidden["_weight_conversions"] = vars(model).pop("_weight_conversions")
    config = {name: getattr(model.config, name, None) for name in ("dtype", "architectures")}
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(model, name, value)
        for name, value in config.items():
            setattr(model.config, name, value)


def save_as_float_(model: nn.Module) -> str:
    """Make ``save_pretrained`` write a model that transformers dequantized as a float model. Return a note, or "".

    Otherwise transformers (5.23) writes files that do not load, see `dequantizes`.
    """
    found = [module for module in model.modules() if dequantizes(module)]
    for module in found:
        delattr(module, "_weight_conversions")
    return _SAVED_AS_FLOAT if found else ""


def dequantizes(model: Any) -> bool:
    """Return True if transformers dequantized a model on loading, and would save it under its quantized names.

    transformers (5.23) then stores float weights of gpt-oss as ``*_blocks`` without scales, which load as random
    experts, and FP8 codes without a ``quantization_config``, which load without their scales. It raises an error for
    FP8 and compressed-tensors experts.
    """
    conversions = vars(model).get("_weight_conversions") or ()
    return any(hasattr(step, "hf_quantizer") for each in conversions for step in getattr(each, "operations", ()))
