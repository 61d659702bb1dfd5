"""A model of transformers as a folder in the format of compressed-tensors, which vLLM and transformers load."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError, MissingExtraError
from shared_core.files.atomic import atomic_folder
from shared_core.modules.experts import StackedExperts
from shared_core.modules.matching import is_transformers_conv1d
from shared_core.modules.weight_views import weights_of
from shared_core.numerics.block_formats import mx_encode
from shared_core.quantization.layers.fake_quant_layers import STOCK, layer_entry
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.expert_layers import split_experts_
from shared_core.tools.export.source import baked_copy, float_layers, quantized_reference, quiet
from shared_core.tools.measuring import difference, outputs

_WHERE = "export_compressed_tensors"
_GROUP_SIZES = (32, 64, 128)
_OUTPUTS = 32
_MX_BLOCK = 32
# What vLLM multiplies as one matrix: its parts have one scheme and one range of their input.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclasses.dataclass(frozen=True)
class ServedReport:
    """What `export_compressed_tensors` wrote.

    Attributes:
        path: The folder.
        bytes: Of its files of weights.
        format: How codes lie in them, in the format's words.
        quantized: Layers with codes in the file; of stacked experts each matrix, by its name there.
        values: Embeddings and heads tied to one, with the values of their codes in float.
        unrounded_inputs: Those of `values` whose input training rounded, and engines do not.
        float_layers: Layers of the same types that stay in float.
        equal_layers: Layers whose codes stand for exactly the weights of the model; None if they were not compared.
        largest_difference: Of transformers' outputs to the model's, both with inputs of layers in float, relative to
            the largest output; None if they were not compared: transformers loads neither float experts, nor those
            in W8A8 or with zero points, nor zero points of other layers beside other schemes.
        relative_change: The same with inputs rounded as transformers does; its ranges of tokens are others than the
            model's and vLLM's.
        scale_error: What scales of float16 (GGUF), and weights saved in 16 bits, change, of the largest weight of a
            layer; None elsewhere.
    """

    path: Path
    bytes: int
    format: str
    quantized: tuple[str, ...]
    values: tuple[str, ...]
    unrounded_inputs: tuple[str, ...]
    float_layers: tuple[str, ...]
    equal_layers: int | None
    largest_difference: float | None
    relative_change: float | None
    scale_error: float | None = None


def export_compressed_tensors(
    model: nn.Module, folder: Path | str, *, example_inputs: Any = None, verify: bool = True
) -> ServedReport:
    """Write a quantised model to a folder that vLLM and `from_pretrained` load; return what was written.

    The codes are those that training saw: dequantised, the file gives the weights of the model, to the bit.

    Args:
        model: A model of transformers in or after quantization-aware training, or one on which `apply_ranges` was
            called; float32. Its configuration tells the type that weights without codes are saved in. It is not
            changed.
        folder: New or empty.
        example_inputs: What the model and the folder, loaded by transformers, are compared on.
        verify: Compare the weights of the file with the model's and, with `example_inputs`, the outputs.

    Raises:
        MissingExtraError: If compressed-tensors is not installed.
        CompatibilityError: If the format or vLLM has no place for a layer, or the folder is not the model; nothing is
            written.
        ConfigError: If an argument breaks its rule.

    Source: compressed-tensors 0.20; vLLM 0.32.

    Example:
        ``export_compressed_tensors(apply_ranges(model, ranges), "served").format``
    """
    if importlib.util.find_spec("compressed_tensors") is None:
        raise MissingExtraError(_WHERE, "compressed-tensors", "compressed-tensors")
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(_WHERE, f"model must be one of transformers, got {type(model).__name__}", "load its folder")
    check_no_conv1d(model, _WHERE, "compressed-tensors")
    reference, names = quantized_reference(model, _WHERE, check_servable)
    if not names:
        raise ConfigError(_WHERE, "model must have quantised layers, got none", "train with qat, or eff quantize first")
    _check_fused(reference, names)
    exported, layers, schemes, qparams = baked_copy(reference, names)
    embedded = {id(layer.weight) for layer in layers.values() if isinstance(layer, nn.Embedding)}
    values = tuple(name for name, layer in layers.items() if not embedded.isdisjoint(map(id, layer.parameters())))
    coded = tuple(name for name in names if name not in values)
    if not coded:
        raise CompatibilityError(_WHERE, "model must have a linear layer with codes, got embeddings alone", "quantise")
    dtype, loaded_in = saved_type(model), torch.float32
    if any(schemes[name].weight == "mxfp4" for name in coded):
        dtype = loaded_in = torch.bfloat16  # the format's package dequantises MXFP4 to it, whatever the model's type
        exported = exported.to(dtype)
    mixture = [name for name in coded if isinstance(layers[name], StackedExperts)]
    float_experts = _has_experts(exported, mixture)
    loads = _transformers_loads(
        float_experts, {schemes[name] for name in coded if name not in mixture}, {schemes[name] for name in mixture}
    )
    compares = verify and example_inputs is not None and loads
    expected = (outputs(exported, example_inputs), outputs(reference, example_inputs)) if compares else None
    left = tuple(name for name in float_layers(exported) if name not in names)
    experts = split_experts_(exported, mixture, _WHERE)
    coded = tuple(name for name in coded if name not in mixture)
    for name, parts in zip(mixture, experts.values(), strict=True):
        layers |= parts
        schemes |= dict.fromkeys(parts, schemes[name])
        coded += tuple(parts)
    weights = {name: layers[name].weight.detach().to(dtype) for name in coded}
    for name in coded:
        entry = layer_entry(reference.get_submodule(name)) if name in names else None
        _set_codes(name, layers[name], schemes[name], entry or {}, dtype)
        if schemes[name].input == "static":
            _set_input(layers[name], qparams[name])
    with atomic_folder(folder) as temporary:
        kind = _write(exported, {name: layers[name] for name in coded}, experts, dtype, temporary)
        if loads if experts else [scheme.affine for scheme in {schemes[name] for name in coded}] == [True]:
            _load_as_float(temporary)
        if verify:
            _check_weights(temporary, weights, layers)
        change = (
            (None, None)
            if expected is None
            else _check_outputs(temporary, model, expected, example_inputs, dtype, loaded_in)
        )
        size = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
    return ServedReport(
        path=Path(folder), bytes=size, format=kind, quantized=coded, values=values,
        unrounded_inputs=tuple(name for name in values if schemes[name].input != "none"),
        float_layers=left,
        equal_layers=len(coded) if verify else None, largest_difference=change[0], relative_change=change[1],
    )  # fmt: skip


def saved_type(model: Any) -> torch.dtype:
    """Return the type that a model of transformers saves its weights in."""
    dtype = getattr(model.config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a string once the model was saved


def _transformers_loads(float_experts: bool, schemes: set[LayerScheme], experts: set[LayerScheme]) -> bool:
    """Return whether transformers (5.23) loads the folder.

    Not zero points beside other schemes, nor float experts. Of others it reads FP8 and packed codes without zero
    points, and then one scheme of the layers beside them.
    """
    if experts:
        read = all(scheme.weight == "fp8" or (scheme.input == "none" and not scheme.affine) for scheme in experts)
        return read and len(experts) == 1 and len(schemes) <= 1 and not float_experts
    mixed = len(schemes) > 1 and any(scheme.affine for scheme in schemes)
    return not mixed and not float_experts


def _has_experts(model: nn.Module, coded: Iterable[str] = ()) -> bool:
    """Return whether a model has the matrices of several experts in one parameter, beside those of some modules."""
    inside = {id(value) for name in coded for value in model.get_submodule(name).parameters()}
    return any(value.dim() > 2 and id(value) not in inside for value in model.parameters())


def check_no_conv1d(model: nn.Module, where: str, engine: str) -> None:
    """Refuse GPT-2's linear layers, whose weights lie the other way round.

    Raises:
        CompatibilityError: If there is one that is quantised.
    """
    for name, module in model.named_modules():
        if is_transformers_conv1d(module) and layer_entry(module) is not None:
            raise CompatibilityError(
                where, f"{name} must be a linear layer for {engine}, got transformers' Conv1D", "use onnx"
            )


def check_servable(name: str, module: Any, where: str) -> None:
    """Refuse a fake-quantising layer that the format, or vLLM that reads it, has no place for.

    Raises:
        CompatibilityError: Naming the layer, the engine, and what would work.
    """
    scheme: LayerScheme = module.quantizer.scheme
    kind = STOCK[type(module)]
    pair = (scheme.weight, "none" if kind is nn.Embedding else scheme.input)
    known = {
        ("channel", "none"),
        ("channel", "token"),
        ("channel", "static"),
        ("group", "none"),
        ("fp8", "fp8"),
        ("mxfp4", "mxfp4"),
    }
    experts = isinstance(module, StackedExperts)
    if kind not in (nn.Linear, nn.Embedding) and not experts:
        raise CompatibilityError(
            where, f"{name} must be Linear, Embedding or experts for vLLM, got {kind.__name__}", "skip it in qat"
        )
    if kind is nn.Embedding:
        return  # its values are written
    rounds = scheme.input in ("token", "static")
    if pair not in known or (rounds and (scheme.affine_input or scheme.activation_bits != 8)):
        tokens = " with zero points" if scheme.affine_input else ""
        raise CompatibilityError(
            where,
            f"{name} must have codes that vLLM multiplies, got weight {scheme.weight} of {scheme.weight_bits} bits and "
            f"input {scheme.input}{tokens} of {scheme.activation_bits} bits",
            "choose scheme int8, int8_dynamic, int8_weight, int4_weight, fp8 or mxfp4",
        )
    if scheme.weight == "mxfp4" and experts:
        raise CompatibilityError(
            where,
            f"{name} must have codes of integers or FP8, got experts in MXFP4, not tried in vLLM",
            "skip it in qat",
        )
    if scheme.weight == "mxfp4" and module.in_features % _MX_BLOCK:
        raise CompatibilityError(
            where,
            f"{name} must have a multiple of {_MX_BLOCK} inputs for MXFP4, got {module.in_features}",
            "skip it in qat",
        )
    # an expert's second matrix has the inputs that its first one's halves give
    sizes = [size for stack in weights_of(module).values() for size in stack.shape[1:]] if experts else []
    odd = [size for size in sizes or [module.out_features] if size % _OUTPUTS]
    if scheme.input == "none" and odd:
        raise CompatibilityError(
            where,
            f"{name} must have a multiple of {_OUTPUTS} outputs for vLLM's kernels of float inputs, got {odd[0]}",
            "skip it in qat",
        )
    if scheme.weight == "group" and scheme.group_size not in _GROUP_SIZES:
        raise CompatibilityError(
            where,
            f"{name} must have a group_size of {', '.join(map(str, _GROUP_SIZES))} for vLLM, got {scheme.group_size}",
            "set qat.group_size, or skip the layer",
        )
    if scheme.input == "static" and not module.quantizer.has_range:
        raise CompatibilityError(where, f"{name} must have a range of its input for vLLM, got none", "skip it in qat")


def _check_fused(reference: nn.Module, names: Iterable[str]) -> None:
    """Refuse layers that vLLM fuses and that do not fit together."""
    known = set(names)
    for parent, module in reference.named_modules():
        for parts in _FUSED:
            layers = {f"{parent}.{part}": getattr(module, part) for part in parts if hasattr(module, part)}
            if not known & layers.keys():
                continue
            found = {name: _as_served(layer) if name in known else "float" for name, layer in layers.items()}
            first, *others = found
            other = next((name for name in others if found[name] != found[first]), None)
            if other is not None:
                raise CompatibilityError(
                    _WHERE,
                    f"{first} and {other} must be quantised alike for vLLM, which multiplies them as one matrix, got "
                    f"{found[first]} and {found[other]}",
                    "override or skip both; with learned ranges take an observed one",
                )


def _as_served(layer: Any) -> str:
    """Return in words what layers that are one matrix must have in common."""
    scheme: LayerScheme = layer.quantizer.scheme
    group = f" by {scheme.group_size}" if scheme.group_size else ""
    words = f"{scheme.weight}{group} of {scheme.weight_bits} bits, input {scheme.input}"
    qparams = layer.quantizer.qparams(layer)
    return words if qparams is None else f"{words} of scale {float(qparams[0])!r}, zero point {int(qparams[1])}"


def exact_grid(
    rows: Tensor, largest: Iterable[float], levels: torch.dtype, dtype: torch.dtype, span: float = torch.inf
) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) whose products, rounded to a type, are exactly the values of each row; None if none are.

    A row's scale is ``max|w|/m`` for the first m of `largest` for which such codes exist, moved to the middle of the
    numbers that give every value of the row.

    Args:
        rows: (rows, values), float32, finite, with values of `dtype`.
        largest: Magnitudes that the largest code may have.
        levels: int8 or an FP8 type: what codes are rounded to.
        dtype: The type that the values were saved in.
        span: Largest difference between the codes of a row, 0 among them.

    Returns:
        Both float32; a row of zeros has scale 1.

    Example:
        >>> codes, scale = exact_grid(torch.tensor([[0.5, -1.0, 1.5]]), [7, 3], torch.int8, torch.float32)
        >>> codes.tolist(), scale.tolist()
        ([[1.0, -2.0, 3.0]], [0.5])
    """
    peaks = rows.abs().amax(1)
    codes, scale = torch.zeros_like(rows), torch.ones_like(peaks)
    left = torch.arange(len(rows))[peaks > 0]
    for top in largest:
        if not len(left):
            break
        exact = rows[left]
        found = _rounded(exact / (peaks[left] / top).unsqueeze(1), levels)
        step = _common_scale(exact, found, dtype)
        fits = ((found * step.unsqueeze(1)).to(dtype) == exact.to(dtype)).all(1)
        fits &= found.amax(1).clamp(min=0) - found.amin(1).clamp(max=0) <= span
        codes[left[fits]], scale[left[fits]] = found[fits], step[fits]
        left = left[~fits]
    return None if len(left) else (codes, scale)


def _rounded(codes: Tensor, levels: torch.dtype) -> Tensor:
    return codes.to(levels).float() if levels.is_floating_point else codes.round()


def _common_scale(values: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each row the middle of the scales that, times its codes, round to its values."""
    value, code = values.abs().double(), codes.abs().double()
    low, high = (_neighbour(values.abs().to(dtype), way).double() for way in (0.0, torch.inf))
    never = torch.full_like(value, torch.inf)
    some = code > 0
    below = torch.where(some, (value + low) / 2 / code, -never).amax(1)
    above = torch.where(some, (value + high) / 2 / code, never).amin(1)
    return ((below + above) / 2).float()


def _neighbour(values: Tensor, way: float) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, way))


def codes_of(
    where: str, name: str, rows: Tensor, scheme: LayerScheme, entry: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a weight that holds the values of its codes.

    Args:
        where: The function, for errors.
        name: The layer.
        rows: Its weight, (outputs, inputs), float32.
        scheme: How it is quantised.
        entry: What deployment knows of it.
        dtype: The type that its values were saved in.

    Returns:
        Codes of rows, or of groups (groups, values), and a scale for each; codes of affine groups lie around 0, see
        `zero_points`.

    Raises:
        CompatibilityError: If the weight is not finite, or lies on no grid.
    """
    if not bool(torch.isfinite(rows).all()):
        raise CompatibilityError(
            where, f"weights of {name} must be finite, got NaN or infinity", "look for the diverged step"
        )
    groups = rows.reshape(-1, scheme.group_size) if scheme.weight == "group" else rows
    levels = torch.float8_e4m3fn if scheme.weight == "fp8" else torch.int8
    qmax: float = 448.0 if scheme.weight == "fp8" else scheme.weight_qmax
    if "weight_scale" in entry:
        scale = torch.tensor(entry["weight_scale"], dtype=torch.float32).view(-1)
        codes = (groups / scale.unsqueeze(1)).round()
        found = (codes, scale) if torch.equal((codes * scale.unsqueeze(1)).to(dtype), groups.to(dtype)) else None
    elif scheme.affine:
        span = 2**scheme.weight_bits - 1
        found = exact_grid(groups, range(span, 0, -1), levels, dtype, span)
    else:
        found = exact_grid(groups, [qmax], levels, dtype)
    if found is None:
        raise CompatibilityError(
            where,
            f"{name} must have weights on the grid of its codes, got {scheme.weight} of {scheme.weight_bits} bits that "
            "are not",
            "export what qat or eff quantize saved, unchanged",
        )
    return found


def zero_points(codes: Tensor, bits: int) -> Tensor:
    """Return what each affine group adds to its codes: the smallest value, or 0, has the smallest, as in training."""
    lowest: Tensor = codes.amin(1).clamp(max=0).neg().sub(2 ** (bits - 1))
    return lowest


def _set_codes(name: str, layer: Any, scheme: LayerScheme, entry: dict[str, Any], dtype: torch.dtype) -> None:
    """Give a stock layer whose weight holds the values of its codes their scales and zero points."""
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

    rows = layer.weight.detach().float()
    layer.quantization_scheme = _format_scheme(scheme)
    initialize_module_for_quantization(layer, force_zero_point=False)
    if scheme.weight == "mxfp4":  # a power of two for each block, which the largest code keeps
        layer.weight_scale.data = torch.exp2(mx_encode(rows).scale.float() - 127)
        return
    codes, scale = codes_of(_WHERE, name, rows, scheme, entry, dtype)
    layer.weight_scale.data = scale.view(len(rows), -1)
    if scheme.affine:
        layer.weight_zero_point.data = zero_points(codes, scheme.weight_bits).to(torch.int8).view(len(rows), -1)


def _set_input(layer: Any, qparams: tuple[Tensor, Tensor] | None) -> None:
    assert qparams is not None  # noqa: S101  # `check_servable`
    scale, zero_point = qparams
    layer.input_scale.data = scale.float().view(1)
    layer.input_zero_point.data = zero_point.to(torch.int8).view(1)


def _format_scheme(scheme: LayerScheme) -> Any:
    """Return a scheme in the format's words, without targets."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP4

    if scheme.weight == "mxfp4":
        return QuantizationScheme(targets=["Linear"], **MXFP4)
    kind = "float" if scheme.weight == "fp8" else "int"
    # engines have kernels for 4 and 8 bits, and beside codes of inputs for 8 alone; fewer are the same codes
    bits = 4 if scheme.input == "none" and scheme.weight_bits <= 4 else 8
    weights = QuantizationArgs(
        num_bits=bits, type=kind, symmetric=not scheme.affine, dynamic=False,
        strategy="group" if scheme.weight == "group" else "channel", group_size=scheme.group_size or None,
    )  # fmt: skip
    inputs = None
    if scheme.input != "none":
        static = scheme.input == "static"
        inputs = QuantizationArgs(
            num_bits=8, type=kind, symmetric=not static, dynamic=not static, strategy="tensor" if static else "token"
        )
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


def _write(
    exported: Any,
    layers: dict[str, Any],
    experts: dict[str, dict[str, nn.Linear]],
    dtype: torch.dtype,
    folder: Path,
) -> str:
    """Write the folder; return its format."""
    from compressed_tensors.compressors import ModelCompressor, compress_module

    shared: dict[str, Any] = {}
    for layer in layers.values():
        layer.quantization_scheme = shared.setdefault(repr(layer.quantization_scheme), layer.quantization_scheme)
    head = exported.get_output_embeddings()
    patterns = {name: pattern for pattern, parts in experts.items() for name in parts}
    for scheme in shared.values():
        of_scheme = [name for name, layer in layers.items() if layer.quantization_scheme is scheme]
        # vLLM counts experts as "Linear", and heads not
        everywhere = len(shared) == 1 and not experts and not _has_experts(exported)
        heads = [name for name in of_scheme if layers[name] is head]
        scheme.targets = ["Linear", *heads] if everywhere else [*dict.fromkeys(patterns.get(n, n) for n in of_scheme)]
    for layer in layers.values():
        compress_module(layer)
    for module in exported.modules():
        for name, value in module._parameters.items():
            if value is not None and value.dtype == torch.float32 and not name.endswith("_scale"):
                value.data = value.data.to(dtype)
    compressor = ModelCompressor.from_pretrained_model(exported)
    exported.save_pretrained(folder)
    compressor.update_config(folder)
    return str(compressor.quantization_config.format.value)


def _load_as_float(folder: Path) -> None:
    """Have transformers dequantise while it loads: it reads packed zero points and experts in no other way (5.23)."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"]["dequantize"] = True
    file.write_text(json.dumps(values, indent=2) + "\n")


def _check_weights(folder: Path, weights: dict[str, Tensor], layers: dict[str, Any]) -> None:
    """Dequantise the file layer by layer, as the format's package does, and compare with the model's weights.

    Raises:
        CompatibilityError: Naming the first layer that is not in the file or has other weights there.
    """
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import load_file

    found: dict[str, dict[str, Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        for key, value in load_file(file).items():
            name, _, part = key.rpartition(".")
            if name in weights:
                found.setdefault(name, {})[part] = value
    for name, expected in weights.items():
        scheme = layers[name].quantization_scheme
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        if name not in found:
            raise CompatibilityError(_WHERE, f"{name} must be in the file, got another name", "skip it in qat")
        values = compressor.decompress(found[name], scheme)["weight"]
        if not torch.equal(values.to(expected.dtype), expected):
            raise CompatibilityError(
                _WHERE,
                f"{name} must have the weights of the model in the file, got a difference of "
                f"{float((values - expected.float()).abs().max()):.3g}",
                "nothing was written",
            )


def _check_outputs(
    folder: Path, model: Any, expected: tuple[Any, Any], inputs: Any, dtype: torch.dtype, loads: torch.dtype
) -> tuple[float, float]:
    with quiet():
        loaded = type(model).from_pretrained(folder, dtype=loads)
        outputs(loaded, inputs)  # weights are dequantised in the first forward

    def switch(rounds: bool) -> None:
        for module in loaded.modules():
            module.quantization_enabled = rounds

    # what was rounded to 16 bits is not, in float32
    return compare_outputs(_WHERE, loaded, switch, expected, inputs, 1e-4 if dtype == torch.float32 else 5e-2)


def compare_outputs(
    where: str,
    loaded: nn.Module,
    switch: Callable[[bool], None],
    expected: tuple[Any, Any],
    inputs: Any,
    tolerance: float,
) -> tuple[float, float]:
    """Return what a loaded model's outputs differ by with inputs of layers in float, and rounded.

    Args:
        where: The function, for errors.
        loaded: The model.
        switch: Turns the rounding of its inputs off and on.
        expected: The outputs that it should have without, and with it.
        inputs: What it is called with.
        tolerance: Of the first difference, relative to the largest output.

    Raises:
        CompatibilityError: If they differ with inputs in float.
    """
    found = []
    for rounds in (False, True):
        switch(rounds)
        with quiet():
            found.append(outputs(loaded, inputs))
    plain, rounded = (difference(*pair) for pair in zip(expected, found, strict=True))
    if not plain <= tolerance:
        raise CompatibilityError(
            where,
            f"outputs of the folder, loaded by transformers, must equal the model's to {tolerance:g}, got a difference "
            f"of {plain:.3g}",
            "nothing was written",
        )
    return plain, rounded
