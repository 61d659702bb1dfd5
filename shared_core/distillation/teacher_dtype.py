"""A teacher in fewer bits than it was saved in."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
from torch import nn

from shared_core.errors import CompatibilityError, MatchError, MissingExtraError

TeacherDtype = Literal["as_saved", "float32", "bfloat16", "float16", "int8", "nf4"]


def change_dtype_(teacher: nn.Module, dtype: TeacherDtype) -> None:
    """Turn a teacher's weights into another format, in place.

    ``int8`` (one scale a row, torchao) and ``nf4`` (64 weights a scale, bitsandbytes) are of linear layers alone, but
    for the output head; what else there is stays as it was saved. All formats but float32 are for inference alone.

    Args:
        teacher: Any model; its parameters are frozen.
        dtype: Of its weights.

    Raises:
        MatchError: If there is no linear layer to quantise.
        MissingExtraError: If the library is not installed.
        CompatibilityError: If it does not run on the teacher's device.

    Source: Dettmers et al., 2023, arXiv:2305.14314, section 3.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> change_dtype_(teacher, "bfloat16")
        >>> teacher.weight.dtype
        torch.bfloat16
    """
    if dtype == "as_saved":
        return
    if dtype not in ("int8", "nf4"):
        teacher.to(getattr(torch, dtype))
        return
    head = getattr(teacher, "get_output_embeddings", lambda: None)()
    found = [name for name, layer in teacher.named_modules() if type(layer) is nn.Linear and layer is not head]
    if not found:
        raise MatchError(f"distill: teacher_dtype {dtype} needs a linear layer, got {type(teacher).__name__} without")
    try:
        _to_int8_(teacher, found) if dtype == "int8" else _to_nf4_(teacher, found)
    except (NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise CompatibilityError(
            f"distill: teacher_dtype {dtype} must run on the teacher's device, got {type(error).__name__}: {error}; "
            "take bfloat16, which runs anywhere"
        ) from error


def _to_int8_(teacher: nn.Module, names: list[str]) -> None:
    torchao: Any = _library("torchao.quantization", "torchao")
    torchao.quantize_(teacher, torchao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name in names)


def _to_nf4_(teacher: nn.Module, names: list[str]) -> None:
    bnb: Any = _library("bitsandbytes", "bnb")
    for name in names:
        linear = teacher.get_submodule(name)
        weight: torch.Tensor = linear.weight.detach()  # type: ignore[assignment, operator]
        layer = bnb.nn.Linear4bit(
            weight.shape[1], weight.shape[0], bias=linear.bias is not None, compute_dtype=weight.dtype, device="meta"
        )
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer).to(weight.device)
        layer.bias = linear.bias
        teacher.set_submodule(name, layer.train(linear.training))


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("distill", name.partition(".")[0], extra) from error
