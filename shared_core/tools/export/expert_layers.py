"""Stacked experts as linear layers: one for each matrix that transformers' files have, under the names there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.modules.weight_views import as_rows, output_axis, weights_of

_STACK = 2**40
"""Marks count rows below it, and stacks above; float64 is exact to 2^53."""


def split_experts_(model: Any, names: Iterable[str], where: str) -> dict[str, dict[str, nn.Linear]]:
    """Replace modules that stack experts by linear layers, one for each matrix of the files that transformers writes.

    Which rows a file puts where is found by saving marks in place of the weights, so every renaming counts.
    """
    rows: list[Tensor] = []
    owners: list[str] = []
    marks: dict[str, Tensor] = {}
    for name in names:
        module = model.get_submodule(name)
        for stack, weight in weights_of(module).items():
            found = as_rows(module, weight.detach())
            numbers = torch.arange(len(found), dtype=torch.float64) + len(rows) * _STACK
            marks[f"{name}.{stack}"] = numbers.view(len(weight), -1).unsqueeze(3 - output_axis(module))
            rows.append(found)
            owners.append(name)
        if len(module._parameters) > len(weights_of(module)):
            _refuse(name, f"parameters {', '.join(module._parameters)}", where)
    layers: dict[str, dict[str, nn.Linear]] = {name: {} for name in names}
    for key, mark in _saved(model, marks).items() if marks else ():
        numbers = mark.flatten().long()
        index = int(numbers[0]) // _STACK
        name = owners[index]
        if mark.dim() > 2 or not key.endswith(".weight"):
            _refuse(name, f"the stack {key}", where)
        matrix = rows[index][numbers % _STACK]
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        layers[name][key.removesuffix(".weight")] = layer
    return {_put(model, name, found): found for name, found in layers.items()}


def _refuse(name: str, found: str, where: str) -> None:
    raise CompatibilityError(
        where, f"{name} must be a matrix for each expert in transformers' files for vLLM, got {found}", "skip it in qat"
    )


def _saved(model: Any, marks: dict[str, Tensor]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=marks)
        return {key: mark for file in Path(folder).glob("*.safetensors") for key, mark in load_file(file).items()}


def _put(model: nn.Module, name: str, layers: dict[str, nn.Linear]) -> str:
    """Put layers in a module's place, under the last parts of their names; return the pattern of those names."""
    last = f".{name.rpartition('.')[2]}."
    root = nn.Module()
    for key, layer in layers.items():
        *path, leaf = key.rpartition(last)[2].split(".")
        holder = root
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(leaf, layer)
    model.set_submodule(name, root)
    first = next(iter(layers))
    return f"re:^{re.escape(first[: first.rindex(last)] + last)}"
