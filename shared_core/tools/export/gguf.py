"""A decoder of transformers as a GGUF file, which llama.cpp runs."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError
from shared_core.files.atomic import atomic_write
from shared_core.modules.weight_views import weights_of
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.gguf_architectures import (
    ARCHITECTURES,
    add_shape,
    architecture_of,
    file_tensors,
    float_tensor,
)
from shared_core.tools.export.gguf_tokenizer import add_tokenizer
from shared_core.tools.export.served import ServedReport, served_model
from shared_core.tools.export.source import quiet
from shared_core.tools.measuring import difference, outputs

_WHERE = "export_gguf"
_BLOCK = 32  # weights that share a scale in the file
_TOLERANCE = {torch.float32: 1e-2}  # of outputs: scales are float16 in the file


def export_gguf(
    model: nn.Module,
    path: Path | str,
    *,
    tokenizer: Path | str | None = None,
    example_inputs: Any = None,
    verify: bool = True,
) -> ServedReport:
    """Write a quantised decoder to a GGUF file that llama.cpp runs; return what was written.

    The codes are those that training saw, of linear layers and embeddings; their scales are float16, as the format
    has them: `ServedReport.scale_error` says what that changes. llama.cpp rounds inputs in blocks of 32 by itself.

    Args:
        model: A decoder of transformers (`ARCHITECTURES`) in or after quantization-aware training, or one on which
            `apply_ranges` was called; float32. Its configuration tells the type of weights without codes. It is not
            changed.
        path: The file.
        tokenizer: A folder with ``tokenizer.json``, which goes into the file; None: the file has no tokenizer, and
            llama.cpp takes tokens by number.
        example_inputs: What the model and the file, loaded by transformers, are compared on.
        verify: Compare the codes of the file with the model's and, with `example_inputs`, the outputs.

    Raises:
        MissingExtraError: If gguf is not installed.
        CompatibilityError: If the format or llama.cpp has no place for a layer, a setting or the tokenizer, or the file
            is not the model; nothing is written.
        ConfigError: If an argument breaks its rule.

    Source: gguf 0.19; llama.cpp's convert_hf_to_gguf.py.

    Example:
        ``export_gguf(apply_ranges(model, ranges), "model.gguf", tokenizer="runs/student").format``
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(_WHERE, f"model must be one of {known} for llama.cpp, got {kind}", "take another format")
    served = served_model(model, _WHERE, "llama.cpp", "gguf", _check_layer, experts=True, conv1d=True)
    exported, dtype = served.exported, served.dtype
    made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for name, layer in served.layers.items():
        for weight in weights_of(layer).values():
            codes, scale = served.codes(name, weight.detach().flatten(0, -2))
            made[id(weight)] = _blocks(name, codes, scale, weight, served.schemes[name])
    compares = verify and example_inputs is not None and ARCHITECTURES[kind].loads
    expected = outputs(exported, example_inputs) if compares else None
    with atomic_write(path) as temporary:
        types = _write(exported, made, dtype, temporary, None if tokenizer is None else Path(tokenizer))
        change = (
            None
            if expected is None
            else _check_outputs(temporary, exported, expected, example_inputs, _TOLERANCE.get(dtype, 5e-2))
        )
        error = _check_codes(temporary, exported, made) if verify else None
        size = temporary.stat().st_size
    return served.report(
        path, size, ", ".join(types), equal_layers=len(served.layers) if verify else None,
        largest_difference=change, scale_error=error,
    )  # fmt: skip


def _check_layer(name: str, module: Any, where: str) -> None:
    """Refuse a layer that no type of the format holds."""
    scheme: LayerScheme = module.quantizer.scheme
    wide = scheme.affine and scheme.weight_bits > 4
    if scheme.weight not in ("channel", "group") or wide:
        raise CompatibilityError(
            where,
            f"{name} must have codes of Q8_0, Q4_0 or Q4_1, got weight {scheme.weight} of {scheme.weight_bits} bits",
            "choose scheme int8_dynamic, int8_weight or int4_weight",
        )
    widths = {scheme.group_size or weight.shape[-1] for weight in weights_of(module).values()}
    if width := next((width for width in sorted(widths) if width % _BLOCK), None):
        raise CompatibilityError(
            where,
            f"{name} must have a multiple of {_BLOCK} weights for each scale, got {width}",
            "set qat.group_size, or skip the layer",
        )


def _blocks(
    name: str, codes: Tensor, scale: Tensor, weight: Tensor, scheme: LayerScheme
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, smallest values) of blocks of 32 weights; symmetric ones have no smallest values."""
    repeats = codes.shape[1] // _BLOCK
    low = codes.amin(1).clamp(max=0) if scheme.affine else torch.zeros(0)
    values = (scale * low).half() if scheme.affine else low.half()
    half = scale.half()
    off = (half.float() - scale).abs() > 1e-2 * scale
    if bool(off.any()) or not bool(torch.isfinite(half).all() & torch.isfinite(values).all()):
        raise CompatibilityError(
            _WHERE,
            f"{name} must have scales that float16 holds to 1 %, got {float(scale[off | half.isinf()].max()):.3g}",
            "skip the layer in qat",
        )
    whole = codes - low.unsqueeze(1) if scheme.affine else codes
    shape = (*weight.shape[:-1], weight.shape[-1] // _BLOCK)
    spread = [part.repeat_interleave(repeats).view(shape) if len(part) else part for part in (half, values)]
    return whole.to(torch.int8).view(*shape, _BLOCK), spread[0], spread[1]


def _type_of(block: tuple[Tensor, Tensor, Tensor]) -> str:
    codes, _, low = block
    if low.numel():
        return "Q4_1"
    return "Q4_0" if int(codes.abs().max()) <= 7 else "Q8_0"


def _packed(block: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the bytes of a weight, (outputs, bytes)."""
    codes, scale, low = block
    parts = [scale.unsqueeze(-1).contiguous().view(torch.uint8)]
    if low.numel():
        parts.append(low.unsqueeze(-1).contiguous().view(torch.uint8))
    if _type_of(block) == "Q8_0":
        parts.append(codes.view(torch.uint8))
    else:
        nibbles = (codes if low.numel() else codes + 8).to(torch.uint8)
        parts.append(nibbles[..., : _BLOCK // 2] | nibbles[..., _BLOCK // 2 :] << 4)
    return torch.cat(parts, -1).flatten(-2)


def _values(block: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the weight that a block stands for."""
    codes, scale, low = block
    values = codes.float() * scale.float().unsqueeze(-1)
    return (values + low.float().unsqueeze(-1) if low.numel() else values).flatten(-2)


def _tensors(exported: Any) -> dict[str, Tensor]:
    """Return name → parameter, a tied head left out."""
    state = {id(value): (name, value) for name, value in reversed(exported.state_dict(keep_vars=True).items())}
    return {name: value for name, value in reversed(state.values())}


def _write(
    exported: Any,
    made: dict[int, tuple[Tensor, Tensor, Tensor]],
    dtype: torch.dtype,
    path: Path,
    tokenizer: Path | None,
) -> tuple[str, ...]:
    """Write the file; return the types of its weights with codes, the commonest first."""
    import gguf

    config = exported.config
    kind = gguf.MODEL_ARCH[architecture_of(config).name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    types = Counter(_type_of(block) for block in made.values())
    names = tuple(name for name, _ in types.most_common())
    writer.add_name(config.model_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{names[0]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    factors = add_shape(writer, config)
    add_tokenizer(writer, tokenizer, config.vocab_size, _WHERE)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    of_file = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in _tensors(exported).items():
        block = made.get(id(value))
        rows = float_tensor(name, value.detach(), config, dtype) if block is None else _packed(block)
        raw = None if block is None else gguf.GGMLQuantizationType[_type_of(block)]
        if rows.dtype == torch.bfloat16:
            rows, raw = rows.view(torch.uint8), gguf.GGMLQuantizationType.BF16
        for other, data in file_tensors(name, rows, config, of_file).items():
            writer.add_tensor(other, data.numpy(), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names


def _check_codes(path: Path, exported: Any, made: dict[int, tuple[Tensor, Tensor, Tensor]]) -> float:
    """Dequantise the file with the format's own package; return what float16 scales change, of the largest weight."""
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config = exported.config
    of_file = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture_of(config).name], config.num_hidden_layers)
    worst = 0.0
    for name, value in _tensors(exported).items():
        if id(value) not in made:
            continue
        expected = _values(made[id(value)])
        for other, rows in file_tensors(name, expected, config, of_file).items():
            weight = torch.from_numpy(gguf.dequantize(found[other].data, found[other].tensor_type).copy())
            if not torch.equal(weight.view_as(rows), rows):
                raise CompatibilityError(
                    _WHERE, f"{name} must have the codes of the model in the file, got others", "nothing was written"
                )
        peak = float(value.detach().abs().max())
        worst = max(worst, float((expected - value.detach()).abs().max()) / peak if peak else 0.0)
    return worst


def _check_outputs(path: Path, exported: Any, expected: Any, inputs: Any, tolerance: float) -> float:
    """Return what the outputs of the file, loaded by transformers in float, differ by."""
    with quiet():
        loaded = type(exported).from_pretrained(
            path.parent, gguf_file=path.name, config=copy.deepcopy(exported.config), dtype=torch.float32
        )
    change = difference(expected, outputs(loaded, inputs))
    if not change <= tolerance:
        raise CompatibilityError(
            _WHERE,
            f"outputs of the file, loaded by transformers, must equal the model's to {tolerance:g}, got a difference "
            f"of {change:.3g}",
            "nothing was written",
        )
    return change
