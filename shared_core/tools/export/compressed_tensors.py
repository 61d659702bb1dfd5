"""Write a transformers model as a compressed-tensors folder, which vLLM and transformers load.

Stacked experts become linear layers: one per matrix in transformers' files, under the names there.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.checkpoint_formats.saved_rows import saved_rows
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.files.atomic import atomic_folder
from shared_core.modules.calls import call_model, evaluated
from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import as_rows, weights_of
from shared_core.numerics.block_formats import mx_encode, mx_round_to, nvfp4_binary_scale, nvfp4_encode
from shared_core.numerics.rounding import decode, round_to
from shared_core.quantization.fake_quant_layers import STOCK
from shared_core.quantization.ranges.kv_cache import rounding_kv_cache
from shared_core.quantization.schemes import FP8_GROUP, MX, LayerScheme
from shared_core.tools.export.served import (
    FUSED,
    ServedModel,
    ServedReport,
    compare_outputs,
    off_grid,
    served_model,
)
from shared_core.tools.export.source import quiet
from shared_core.tools.measuring import outputs


def split_experts_(model: Any, names: Iterable[str], where: str) -> dict[str, dict[str, nn.Linear]]:
    """Replace modules that stack experts by linear layers, one per matrix in the files that transformers writes.

    `saved_rows` finds where a file puts each row, so every renaming is covered.
    """
    names = tuple(names)
    weights = {
        f"{name}.{stack}": (name, as_rows(module, weight.detach()))
        for name in names
        for module in [model.get_submodule(name)]
        for stack, weight in weights_of(module).items()
    }
    odd = [
        f"{name} with parameters {', '.join(module._parameters)}"
        for name in names
        for module in [model.get_submodule(name)]
        if len(module._parameters) > len(weights_of(module))
    ]
    saved = saved_rows(model, weights) if weights and not odd else {}
    odd += [f"the stack {key}" for key, at in saved.items() if len(at.shape) > 2 or not key.endswith(".weight")]
    if odd:
        rule = f"experts must be one matrix each in transformers' files for vLLM, got {odd[0]}"
        raise CompatibilityError(where, rule, "skip them in qat")
    rows = {parameter: found for parameter, (_, found) in weights.items()}
    layers: dict[str, dict[str, nn.Linear]] = {name: {} for name in names}
    for key, at in saved.items():
        matrix = at.gather(rows)
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        owner, *_ = at.held
        layers[weights[owner][0]][key.removesuffix(".weight")] = layer
    return {_put(model, name, found): found for name, found in layers.items()}


def _put(model: nn.Module, name: str, layers: dict[str, nn.Linear]) -> str:
    """Replace a module by layers, under the last parts of their names; return the pattern of those names."""
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


_WHERE = "export_compressed_tensors"
_GROUP_SIZES = (32, 64, 128)
_OUTPUTS = 32


def export_compressed_tensors(
    model: nn.Module,
    folder: Path | str,
    *,
    example_inputs: Any = None,
    calibration: Iterable[Any] | None = None,
    verify: bool = True,
) -> ServedReport:
    """Write a quantized model to a folder that vLLM and `from_pretrained` load; return a report.

    The codes are those of training: dequantized, the file gives the model's weights, to the bit.

    Args:
        model: A float32 transformers model in or after quantization-aware training, or with `apply_ranges` called. Its
            config gives the dtype of weights without codes. It is not changed.
        folder: New or empty.
        example_inputs: Inputs on which the model and the folder, loaded by transformers, are compared.
        calibration: Batches for the fixed tensor scales of NVFP4 inputs (W4A4): powers of two for the largest input
            seen, so that inputs have the same values as in training; larger ones saturate.
            None: W4A16, inputs stay in float.
        verify: Compare the file's weights with the model's and, with `example_inputs`, the outputs.

    Raises:
        MissingExtraError: If compressed-tensors is not installed.
        CompatibilityError: If the format or vLLM does not support a layer, or the folder differs from the model;
            nothing is written.
        ConfigError: If an argument breaks its rule.

    Source: compressed-tensors 0.20; vLLM 0.32.

    Example:
        ``export_compressed_tensors(apply_ranges(model, ranges), "served").format``
    """
    served = served_model(model, _WHERE, "vLLM", "compressed-tensors", check_servable, experts=True)
    reference, exported, layers, schemes = served.reference, served.exported, served.layers, served.schemes
    _check_fused(reference, served.names)
    embedded = {id(layer.weight) for layer in layers.values() if isinstance(layer, nn.Embedding)}
    values = tuple(name for name, layer in layers.items() if not embedded.isdisjoint(map(id, layer.parameters())))
    coded = tuple(name for name in layers if name not in values)
    if not coded:
        raise CompatibilityError(_WHERE, "model must have a linear layer with codes, got only embeddings", "quantize")
    fp4 = tuple(name for name in coded if schemes[name].weight == "nvfp4")
    fp4_inputs = tuple(name for name in coded if schemes[name].input == "nvfp4")
    if calibration is not None and not (fp4_inputs or served.cache):
        raise ConfigError(_WHERE, "calibration needs inputs in NVFP4, got none", "leave it out")
    inputs = {} if calibration is None else _input_scales(reference, fp4_inputs, calibration)
    for name in fp4_inputs if calibration is None else ():
        reference.get_submodule(name).quantizer.input = lambda module, x: x  # type: ignore[union-attr]
    # the format's package dequantizes blocks to bfloat16, whatever the model's dtype
    has_blocks = any(schemes[name].block for name in coded)
    loaded_in = torch.bfloat16 if has_blocks else torch.float32
    mixture = [name for name in coded if isinstance(layers[name], StackedExperts)]
    float_experts = _has_experts(exported, mixture)
    loads = _transformers_loads(
        float_experts, {schemes[name] for name in coded if name not in mixture}, {schemes[name] for name in mixture}
    )
    compares = verify and example_inputs is not None and loads
    with rounding_kv_cache(reference):
        # a copy, because codes of other layers are found in the exact weights
        shown = _cast(copy.deepcopy(exported), loaded_in) if compares and has_blocks else exported
        expected = (outputs(shown, example_inputs), outputs(reference, example_inputs)) if compares else None
    _set_cache(exported, served.cache)
    experts = split_experts_(exported, mixture, _WHERE)
    coded = tuple(name for name in coded if name not in mixture)
    for name, parts in zip(mixture, experts.values(), strict=True):
        layers |= parts
        schemes |= dict.fromkeys(parts, schemes[name])
        coded += tuple(parts)
    dtype = loaded_in if has_blocks else served.dtype
    weights = {name: layers[name].weight.detach().to(dtype) for name in coded}
    tensor_scales = _tensor_scales(exported, fp4)
    for name in coded:
        _set_codes(served, name, tensor_scales.get(name), inputs.get(name))
        if schemes[name].has_range:
            _set_input(layers[name], served.qparams[name])
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
    return served.report(
        folder, size, kind, quantized=coded, values=values,
        unrounded_inputs=tuple(
            name for name in (*values, *(fp4_inputs if calibration is None else ())) if schemes[name].input != "none"
        ),
        equal_layers=len(coded) if verify else None, largest_difference=change[0], relative_change=change[1],
        kv_cache=tuple(served.cache),
    )  # fmt: skip


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters as `from_pretrained` does, which keeps frequencies of position embeddings in float32."""
    for value in model.parameters():
        value.data = value.data.to(dtype)
    return model


def _transformers_loads(float_experts: bool, schemes: set[LayerScheme], experts: set[LayerScheme]) -> bool:
    """Return True if transformers (5.23) loads the folder."""
    # Not zero points together with other schemes, nor float experts. Otherwise it reads FP8 and packed codes without
    # zero points, and only one scheme for the other layers.
    if experts:
        read = all(
            scheme.weight in ("fp8", "mxfp4")
            or (scheme.input == "none" and not scheme.affine and scheme.weight != "mxfp8")
            for scheme in experts
        )
        return read and len(experts) == 1 and len(schemes) <= 1 and not float_experts
    mixed = len(schemes) > 1 and any(scheme.affine for scheme in schemes)
    return not mixed and not float_experts


def _has_experts(model: nn.Module, coded: Iterable[str] = ()) -> bool:
    """Return True if a model has several experts' matrices in one parameter, apart from those of some modules."""
    inside = {id(value) for name in coded for value in model.get_submodule(name).parameters()}
    inside |= {id(at.weight) for at in model.modules() if isinstance(at, nn.modules.conv._ConvNd)}
    return any(value.dim() > 2 and id(value) not in inside for value in model.parameters())


_SERVED = {
    "channel": ("none", "token", "static"), "group": ("none", "token", "fp8"), "fp8": ("none", "fp8", "fp8_static"),
    "fp8_tensor": ("fp8_static",), "fp8_block": ("fp8_group",), "mxfp4": ("none", "mxfp4", "mxfp8", "fp8_group"),
    "mxfp6": ("none", "mxfp8"), "mxfp8": ("none", "mxfp8"), "nvfp4": ("none", "nvfp4"),
}  # fmt: skip
"""Weights → inputs that the format describes together and engines multiply."""


def check_servable(name: str, module: Any, where: str) -> None:
    """Raise an error for a fake-quantizing layer that the format or vLLM does not support."""
    if STOCK[type(module)] is not nn.Embedding:  # an embedding is stored as values
        broken = next(_not_served(module, module.quantizer.scheme), None)
        if broken is not None:
            raise CompatibilityError(where, f"{name} must {broken[0]}", broken[1])


def _not_served(module: Any, scheme: LayerScheme) -> Iterator[tuple[str, str]]:
    """Yield the rules that a layer breaks, with a remedy."""
    skip = "skip it in qat"
    odd_inputs = scheme.has_integer_inputs and (scheme.affine_input or scheme.activation_bits != 8)
    odd_groups = scheme.weight == "group" and scheme.input != "none" and (scheme.affine or scheme.weight_bits > 4)
    if scheme.input not in _SERVED.get(scheme.weight, ()) or odd_inputs or odd_groups:
        remedy = "choose a scheme of compressed-tensors, such as W4A16, W8A8 or MXFP4A16"
        yield f"have codes that vLLM multiplies, got {scheme}", remedy
    experts = isinstance(module, StackedExperts)
    block, kind = scheme.block, scheme.weight.upper()
    if experts and scheme.weight in ("nvfp4", "fp8_tensor"):
        yield f"have no scale per tensor, got experts in {kind}, whose matrices share one", skip
    elif block and not experts and module.in_features % block:
        yield f"have a multiple of {block} inputs for {kind}, got {module.in_features}", skip
    if scheme.input == "fp8_group" and (experts or module.in_features % FP8_GROUP):
        yield f"be a matrix with a multiple of {FP8_GROUP} inputs for {scheme}", skip
    if scheme.weight == "fp8_block" and (experts or module.in_features % 128 or module.out_features % 128):
        found = "stacked experts" if experts else f"{module.out_features} x {module.in_features}"
        rule = f"be a matrix whose sizes are multiples of 128 for vLLM's blocks of FP8, got {found}"
        yield rule, "override its scheme with fp8, or skip it in qat"
    # an expert's second matrix reads the halves of the first one's output
    sizes = [size for stack in weights_of(module).values() for size in stack.shape[1:]] if experts else []
    odd = [size for size in sizes or [module.out_features] if size % _OUTPUTS]
    if scheme.input == "none" and odd:
        yield f"have a multiple of {_OUTPUTS} outputs for vLLM's kernels of float inputs, got {odd[0]}", skip
    if scheme.weight == "group" and scheme.group_size not in _GROUP_SIZES:
        rule = f"have a group_size of {', '.join(map(str, _GROUP_SIZES))} for vLLM, got {scheme.group_size}"
        yield rule, "set qat.group_size, or skip the layer"
    if scheme.has_range and not module.quantizer.has_range:
        yield "have a range of its input for vLLM, got none", skip


def _check_fused(reference: nn.Module, names: Iterable[str]) -> None:
    """Raise an error for layers that vLLM fuses but that do not fit together."""
    known = set(names)
    for layers in _fused(reference):
        if not known & layers.keys():
            continue
        found = {name: _as_served(layer) if name in known else "float" for name, layer in layers.items()}
        first, *others = found
        other = next((name for name in others if found[name] != found[first]), None)
        if other is not None:
            rule = f"{first} and {other} must be quantized alike for vLLM, which multiplies them as one matrix, got"
            remedy = "override or skip both; with learned ranges use an observed one"
            raise CompatibilityError(_WHERE, f"{rule} {found[first]} and {found[other]}", remedy)


def _fused(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the layers, by name, that vLLM fuses into one matrix."""
    for parent, module in model.named_modules():
        for parts in FUSED:
            if layers := {f"{parent}.{part}": getattr(module, part) for part in parts if hasattr(module, part)}:
                yield layers


def _tensor_scales(exported: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return NVFP4's tensor scale of each layer. Fused layers share one."""
    weights = {name: exported.get_parameter(f"{name}.weight").detach().float() for name in names}
    fused = [[name for name in layers if name in weights] for layers in _fused(exported)]
    single = [[name] for name in weights.keys() - {name for parts in fused for name in parts}]
    found: dict[str, Tensor] = {}
    for parts in filter(None, (*fused, *single)):
        scale = nvfp4_binary_scale(torch.stack([weights[name].abs().amax() for name in parts]).amax())
        # Kept scales of blocks may be too large for e4m3 beside it.
        wider = (scale * 2**power for power in range(6))
        fits = (one for one in wider if not any(_nvfp4_scales(weights[name], one).isnan().any() for name in parts))
        found |= dict.fromkeys(parts, next(fits, scale))
    return found


def _input_scales(reference: nn.Module, names: Iterable[str], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return NVFP4's tensor scale of the largest input of each layer over batches."""
    largest: dict[str, Tensor] = {}

    def observe(name: str, module: Any, args: Any) -> None:
        found = args[0].detach().abs().amax()
        largest[name] = torch.maximum(found, largest.get(name, found))  # NaN stays

    handles = [
        reference.get_submodule(name).register_forward_pre_hook(functools.partial(observe, name)) for name in names
    ]
    for batch in batches:
        with evaluated(reference):
            call_model(reference, batch, f"{_WHERE}: calibration")
    for handle in handles:
        handle.remove()
    for name in names:
        if name not in largest or not bool(largest[name].isfinite()):
            got = largest[name].item() if name in largest else "none"
            raise ConfigError(_WHERE, f"calibration must give finite inputs of {name}, got {got}", "use other batches")
    return {name: nvfp4_binary_scale(found) for name, found in largest.items()}


def _as_served(layer: Any) -> str:
    """Describe what layers in one fused matrix must share."""
    scheme: LayerScheme = layer.quantizer.scheme
    words = str(scheme)
    qparams = layer.quantizer.qparams(layer)
    return words if qparams is None else f"{words} of scale {float(qparams[0])!r}, zero point {int(qparams[1])}"


def _set_codes(served: ServedModel, name: str, tensor_scale: Tensor | None, input_scale: Tensor | None) -> None:
    """Add scales and zero points to a stock layer whose weight has quantized values."""
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

    layer, scheme = served.layers[name], served.schemes[name]
    rows = layer.weight.detach().float()
    layer.quantization_scheme = _format_scheme(scheme, input_scale is not None)
    initialize_module_for_quantization(layer, force_zero_point=False)
    if scheme.block == 32:  # one power of two per block, which the largest code determines
        element = MX[scheme.weight]
        scale = torch.exp2(mx_encode(rows, element).scale.float() - 127)
        # A kept scale may have 240 as its largest code. As 480 at half of it, e4m3 would saturate.
        off = F.pad(mx_round_to(rows, element) != rows, (0, -rows.shape[1] % 32)).view(*scale.shape, 32).any(-1)
        layer.weight_scale.data = scale.where(~off, 2 * scale)
        return
    if tensor_scale is not None:
        scales = _nvfp4_scales(rows, tensor_scale)
        if bool(scales.isnan().any()):
            raise off_grid(_WHERE, name, scheme)
        layer.weight_scale.data = scales
        layer.weight_global_scale.data = tensor_scale.reciprocal().view(1)
        if input_scale is not None:
            layer.input_global_scale.data = input_scale.reciprocal().view(1)
        return
    codes, scale = served.codes(name, rows)
    # vLLM would round fused matrices with one scale each again, to their largest
    scale = scale.expand(len(rows)) if scheme.weight == "fp8_tensor" else scale
    layer.weight_scale.data = scale.view(len(rows) // (128 if scheme.weight == "fp8_block" else 1), -1)
    if scheme.affine:
        layer.weight_zero_point.data = served.zero_points(name, codes).to(torch.int8).view(len(rows), -1)


def _nvfp4_scales(rows: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return the scale of each block with which codes give its values exactly; NaN if there is none."""
    blocks = rows.view(len(rows), -1, 16)
    found = torch.full(blocks.shape[:2], torch.nan)
    usual = decode(nvfp4_encode(rows, per_tensor_scale=tensor_scale).scale, "fp8_e4m3")
    # Blocks whose scales training kept need not reach the largest code, 6.
    codes = decode(torch.arange(6, 0, -1), "fp4_e2m1").tolist()
    kept = ((blocks.abs().amax(2) / code / tensor_scale).to(torch.float8_e4m3fn).float() for code in codes)
    for scale in itertools.chain([usual], kept):
        step = (scale * tensor_scale).unsqueeze(2)
        fits = (round_to(blocks / step, "fp4_e2m1") * step == blocks).all(2)
        found = scale.where(fits & found.isnan(), found)
        if not bool(found.isnan().any()):
            break
    return found


def _set_input(layer: Any, qparams: tuple[Tensor, Tensor] | None) -> None:
    assert qparams is not None  # noqa: S101  # `check_servable`
    scale, zero_point = qparams
    layer.input_scale.data = scale.float().view(1)
    if hasattr(layer, "input_zero_point"):  # FP8 has none
        layer.input_zero_point.data = zero_point.to(torch.int8).view(1)


def _set_cache(exported: nn.Module, scales: dict[str, dict[str, float]]) -> None:
    """Add cache scales to attention layers."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module

    known = {name for name, module in exported.named_modules() if scales and is_cached_attention_module(module)}
    latent = {name for name in scales if hasattr(exported.get_submodule(name), "kv_b_proj")}
    if odd := sorted(known ^ scales.keys() | latent):
        why = "a latent in vLLM" if odd[0] in latent else "scales" if odd[0] in scales else "none"
        rule = (
            f"{odd[0]} must have a cache of its keys and values, with scales, as the format knows it (k_proj, v_proj)"
        )
        # transformers 5.24 renamed the argument, which compressed-tensors 0.20 does not know
        raise CompatibilityError(_WHERE, f"{rule}, got {why}", "leave kv_cache out, or use transformers before 5.24")
    cached = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
    scheme = QuantizationScheme(targets=[], input_activations=cached)
    for name, entry in scales.items():
        module = exported.get_submodule(name)
        module.quantization_scheme = scheme
        for scale, value in entry.items():
            module.register_parameter(scale, nn.Parameter(torch.tensor([value]), requires_grad=False))


def _format_scheme(scheme: LayerScheme, rounds_inputs: bool) -> Any:
    """Return a scheme in the format's terms, without targets. NVFP4 rounds inputs if they have a scale."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    if scheme.block:
        weights = PRESET_SCHEMES[f"{scheme.weight.upper()}A16"]["weights"]
    else:
        strategy = {"group": "group", "fp8_block": "block"}.get(scheme.weight, "channel")
        # engines have kernels for 4 and 8 bits, per channel with quantized inputs only 8; fewer bits use the same codes
        few = scheme.weight_bits <= 4 and (scheme.input == "none" or strategy == "group")
        weights = QuantizationArgs(
            num_bits=4 if few else 8, type="int" if scheme.has_integers else "float", symmetric=not scheme.affine,
            dynamic=False, strategy=strategy, group_size=scheme.group_size if strategy == "group" else None,
            block_structure=[128, scheme.group_size] if strategy == "block" else None,
        )  # fmt: skip
    if scheme.input == "none" or (scheme.input == "nvfp4" and not rounds_inputs):
        inputs = None
    elif scheme.input in ("mxfp4", "mxfp8", "nvfp4"):
        inputs = PRESET_SCHEMES[scheme.input.upper()]["input_activations"]
    else:
        strategy = "tensor" if scheme.has_range else "group" if scheme.input == "fp8_group" else "token"
        inputs = QuantizationArgs(
            num_bits=8, type="int" if scheme.has_integer_inputs else "float", symmetric=scheme.input != "static",
            dynamic=not scheme.has_range, strategy=strategy, group_size=FP8_GROUP if strategy == "group" else None,
        )  # fmt: skip
    parts = {"weights": weights, "input_activations": inputs}
    return QuantizationScheme(targets=["Linear"], **copy.deepcopy(parts))


def _write(
    exported: Any, layers: dict[str, Any], experts: dict[str, dict[str, nn.Linear]], dtype: torch.dtype, folder: Path
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
        # vLLM counts experts as "Linear", but not heads
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
    config = compressor.quantization_config
    # the package uses the files' names, for vLLM; transformers (5.23) looks them up by module names
    left = [name for name, at in exported.named_modules() if isinstance(at, nn.Linear) and name not in layers]
    config.ignore = [*dict.fromkeys([*config.ignore, *left])]
    exported.save_pretrained(folder)
    compressor.update_config(folder)
    return str(config.format.value)


def _load_as_float(folder: Path) -> None:
    """Make transformers dequantize on loading, its only way to read packed zero points and experts (5.23)."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"]["dequantize"] = True
    file.write_text(json.dumps(values, indent=2) + "\n")


def _check_weights(folder: Path, weights: dict[str, Tensor], layers: dict[str, Any]) -> None:
    """Dequantize the file layer by layer with the format's package, and compare with the model's weights."""
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import load_file

    found: dict[str, dict[str, Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        for key, value in load_file(file).items():
            name, _, part = key.rpartition(".")
            found.setdefault(name, {})[part] = value
    others = [name for name, parts in found.items() if "weight_scale" in parts and name not in weights]
    for name, expected in weights.items():
        scheme = layers[name].quantization_scheme
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        there = [name] if name in found else _alike(name, others)
        values = [compressor.decompress(dict(found[key]), scheme)["weight"] for key in there]
        if not any(torch.equal(value.to(expected.dtype), expected) for value in values):
            gap = [f"a difference of {float((value - expected.float()).abs().max()):.3g}" for value in values[:1]]
            rule = f"{name} must have the model's weights in the file, got {gap[0] if gap else 'another name'}"
            raise CompatibilityError(_WHERE, rule, "nothing was written; skip it in qat")


def _alike(name: str, others: Iterable[str]) -> list[str]:
    """Return the names with the most similar ending: files of multimodal models order name parts differently.

    Example:
        >>> _alike("model.language_model.layers.0.up", ["language_model.model.layers.0.up", "tower.layers.1.up"])
        ['language_model.model.layers.0.up']
    """

    def shared(other: str) -> int:
        pairs = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    lengths = {other: shared(other) for other in others}
    most = max(lengths.values(), default=0)
    return [other for other, length in lengths.items() if length == most > 0]


def _check_outputs(
    folder: Path, model: Any, expected: tuple[Any, Any], inputs: Any, dtype: torch.dtype, loads: torch.dtype
) -> tuple[float, float]:
    with quiet():
        loaded = type(model).from_pretrained(folder, dtype=loads)
        outputs(loaded, inputs)  # weights are dequantized in the first forward

    def switch(rounds: bool) -> None:
        for module in loaded.modules():
            module.quantization_enabled = rounds

    # in float32, undo the rounding to 16 bits
    return compare_outputs(_WHERE, loaded, switch, expected, inputs, 1e-4 if dtype == torch.float32 else 5e-2)
