"""Write a transformers model as a folder of torchao tensors, which `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.files.atomic import atomic_folder
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.served import ServedReport, compare_outputs, served_model
from shared_core.tools.export.source import quiet
from shared_core.tools.measuring import outputs

_WHERE = "export_torchao"


def export_torchao(
    model: nn.Module, folder: Path | str, *, example_inputs: Any = None, verify: bool = True
) -> ServedReport:
    """Write a quantized model to a folder that `from_pretrained` loads with torchao's kernels; return a report.

    The codes of linear layers and embeddings are those of training: dequantized, the file gives the model's weights,
    to the bit. A head tied to an embedding gets its own codes, because its input is rounded and the
    embedding's is not. Weights are in safetensors; nothing is pickled.

    Args:
        model: A float32 transformers model in or after quantization-aware training, or with `apply_ranges` called. Its
            config gives the dtype in which the folder computes. It is not changed.
        folder: New or empty.
        example_inputs: Inputs on which the model and the folder, loaded by transformers, are compared.
        verify: Compare the folder's weights with the model's and, with `example_inputs`, the outputs.

    Raises:
        MissingExtraError: If torchao is not installed.
        CompatibilityError: If torchao, or transformers' loader for it, does not support a layer, or the folder
            differs from the model; nothing is written.
        ConfigError: If an argument breaks its rule.

    Source: torchao 0.18; transformers 5.23.

    Example:
        ``export_torchao(apply_ranges(model, ranges), "served").equal_layers``
    """
    served = served_model(model, _WHERE, "torchao", "torchao", _check_layer)
    reference, exported, layers, dtype = served.reference, served.exported, served.layers, served.dtype
    unrounded = tuple(name for name in layers if served.schemes[name].input == "fp8")
    for name in unrounded:
        reference.get_submodule(name).quantizer.input = lambda module, x: x  # type: ignore[union-attr]
    weights = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    for value in exported.parameters():
        value.data = value.data.to(dtype) if value.dtype == torch.float32 else value.data
    compares = verify and example_inputs is not None
    expected = (outputs(exported, example_inputs), outputs(reference, example_inputs)) if compares else None
    for name, layer in layers.items():
        codes, scale = served.codes(name, weights[name])
        zeros = served.zero_points(name, codes) if served.schemes[name].affine else torch.zeros(len(codes))
        made = _tensor(served.schemes[name], codes, scale, zeros, layer, dtype)
        layer.weight = nn.Parameter(made, requires_grad=False)
    head = exported.get_output_embeddings()
    if head is not None and head in layers.values():
        # transformers cannot load a tied weight that is one of these tensors (5.23)
        exported.config.tie_word_embeddings = exported.config.get_text_config().tie_word_embeddings = False
    with atomic_folder(folder) as temporary:
        _write(exported, served.float_layers, dtype, temporary)
        check = (temporary, model, weights, expected, example_inputs, dtype)
        change = _check_folder(*check) if verify else (None, None)
        size = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
    kinds = sorted({type(layer.weight).__name__ for layer in layers.values()})
    return served.report(
        folder, size, ", ".join(kinds), unrounded_inputs=unrounded, equal_layers=len(layers) if verify else None,
        largest_difference=change[0], relative_change=change[1],
    )  # fmt: skip


def _check_layer(name: str, module: Any, where: str) -> None:
    """Raise an error for a layer that torchao's tensors cannot represent."""
    scheme: LayerScheme = module.quantizer.scheme
    inputs = {"channel": ("none", "token"), "group": ("none",), "fp8": ("none", "fp8")}.get(scheme.weight, ())
    if scheme.input not in inputs or (scheme.input == "token" and (scheme.activation_bits != 8 or scheme.affine_input)):
        rule = f"{name} must have codes that transformers' torchao loader supports, got"
        got = str(scheme)
        remedy = "choose scheme int8_dynamic, int8_weight, int4_weight or fp8, or --format compressed-tensors"
        raise CompatibilityError(where, f"{rule} {got}", remedy)


def _tensor(scheme: LayerScheme, codes: Tensor, scale: Tensor, zero: Tensor, layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the torchao tensor with a layer's codes and scales."""
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    rows, width = layer.weight.shape
    scale = scale.view(rows, -1)
    made: Tensor
    if scheme.weight == "fp8":
        made = Float8Tensor(codes.to(torch.float8_e4m3fn), scale, block_size=[1, width], dtype=dtype)
    elif scheme.weight == "channel":
        kwargs = QuantizeTensorToInt8Kwargs(PerRow()) if scheme.input == "token" else None
        made = Int8Tensor(codes.to(torch.int8), scale, [1, width], dtype, act_quant_kwargs=kwargs)
    else:
        made = IntxUnpackedToInt8Tensor(
            (codes + zero.unsqueeze(1)).to(torch.int8).view(rows, width), scale, zero.to(torch.int8).view(rows, -1),
            getattr(torch, f"int{scheme.weight_bits}"), (1, scheme.group_size), dtype,
            None,
        )  # fmt: skip
    return made


def _write(exported: Any, left: tuple[str, ...], dtype: torch.dtype, folder: Path) -> None:
    from safetensors.torch import save_file
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig

    # each layer's tensor type is in the weights file; the type named here is not used for those
    kind = {"default": config_to_dict(Int8WeightOnlyConfig(set_inductor_config=False))}
    exported.config.quantization_config = {
        "quant_method": "torchao", "quant_type": kind, "modules_to_not_convert": list(left),
        "include_input_output_embeddings": True,
    }  # fmt: skip
    exported.config.dtype, exported.config.architectures = dtype, [type(exported).__name__]
    exported.config.save_pretrained(folder)
    if getattr(exported, "generation_config", None) is not None:
        exported.generation_config.save_pretrained(folder)
    once = {id(value): (name, value) for name, value in reversed(exported.state_dict(keep_vars=True).items())}
    tensors, metadata = flatten_tensor_state_dict({name: value.detach() for name, value in once.values()})
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **metadata})


def _check_folder(
    folder: Path,
    model: Any,
    weights: dict[str, Tensor],
    expected: tuple[Any, Any] | None,
    inputs: Any,
    dtype: torch.dtype,
) -> tuple[float | None, float | None]:
    """Load the folder as users do, compare each layer's weight and the outputs, and return the differences."""
    with quiet():
        loaded = type(model).from_pretrained(folder, dtype=dtype)
    made = {name: loaded.get_submodule(name).weight for name in weights}
    for name, weight in weights.items():
        found = made[name].dequantize().float() if hasattr(made[name], "qdata") else None
        if found is None or not torch.equal(found, weight.to(dtype).float()):
            rule = f"weights of {name} differ between the folder and the model"
            raise CompatibilityError(_WHERE, rule, "nothing was written")
    if expected is None:
        return None, None
    rounding = [(value, value.act_quant_kwargs) for value in made.values() if hasattr(value, "act_quant_kwargs")]

    def switch(rounds: bool) -> None:
        for value, how in rounding:
            value.act_quant_kwargs = how if rounds else None

    return compare_outputs(_WHERE, loaded, switch, expected, inputs, 1e-4 if dtype == torch.float32 else 5e-2)
