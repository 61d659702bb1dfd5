"""A teacher in fewer bits than it was saved in."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, MatchError, MissingExtraError

TeacherDtype = Literal["as_saved", "float32", "bfloat16", "float16", "int8", "nf4"]


def change_dtype_(teacher: nn.Module, dtype: TeacherDtype) -> None:
    """Turn a teacher's weights into another format, in place.

    ``int8`` (one scale a row, torchao) and ``nf4`` (64 weights a scale, bitsandbytes) are of linear layers alone, but
    for the output head; what else there is stays as it was saved.

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
    linears = {
        name: layer for name, layer in teacher.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    if not linears:
        raise MatchError(f"distill: teacher_dtype {dtype} needs a linear layer, got {type(teacher).__name__} without")
    # a run attaches more than once
    found = [name for name, layer in linears.items() if is_plain(layer.weight)]
    try:
        _to_int8_(teacher, found) if dtype == "int8" else _to_nf4_(teacher, found)
    except (NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise CompatibilityError(
            f"distill: teacher_dtype {dtype} must run on the teacher's device, got {type(error).__name__}: {error}; "
            "take bfloat16, which runs anywhere"
        ) from error


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight is of floating point and not packed by a library.

    Example:
        >>> is_plain(torch.zeros(2)), is_plain(torch.zeros(2, dtype=torch.int8))
        (True, False)
    """
    return weight.is_floating_point() and type(weight.data) is Tensor


def _to_int8_(teacher: nn.Module, names: list[str]) -> None:
    torchao: Any = _library("torchao.quantization", "torchao")
    torchao.quantize_(teacher, torchao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name in names)


def _to_nf4_(teacher: nn.Module, names: list[str]) -> None:
    bnb: Any = _library("bitsandbytes", "bnb")
    for name in names:
        linear = teacher.get_submodule(name)
        weight: Tensor = linear.weight.detach()  # type: ignore[assignment, operator]
        layer = bnb.nn.Linear4bit(
            weight.shape[1], weight.shape[0], bias=linear.bias is not None, compute_dtype=weight.dtype, device="meta"
        )
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer).to(weight.device)
        # bitsandbytes (0.50) would repack the codes in evaluation, and fails at sizes that are not full blocks
        layer.support_avx512bf16_for_cpu = False
        layer.bias = linear.bias
        teacher.set_submodule(name, layer.train(linear.training))


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError("distill", name.partition(".")[0], extra) from error
