"""Convert a model with quantizers, or a baked one with ranges, to a model that computes on integers.

It runs on exact reference layers, or with the same codes on torchao's and oneDNN's kernels.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from eff_kernels.quantization.integer_linear import sums_exactly
from torch import Tensor, nn

from shared_core.errors import ConfigError, MatchError, MissingExtraError, nearest
from shared_core.modules.like_stock import stock_kind
from shared_core.modules.matching import check_model, plain_name, replaced
from shared_core.modules.own_forward import fast_paths_off
from shared_core.quantization.fake_quant_layers import (
    STOCK,
    FakeQuantLinear,
    bake_,
    conv1d_as_linear,
    layer_entry,
    restore,
)
from shared_core.quantization.integer.binary import BINARY, BinaryLayer, binary_layer
from shared_core.quantization.integer.layers import (
    INTEGER,
    IntConv2d,
    IntegerLayer,
    IntEmbedding,
    IntLinear,
    PackedLayer,
    PackedRecurrent,
    channel_codes,
)
from shared_core.quantization.integer.onednn import OneDnnConv2d, OneDnnLinear, OneDnnTokenLinear
from shared_core.quantization.ranges.kv_cache import take_cache_scales_
from shared_core.quantization.ranges.saved_ranges import (
    apply_ranges,
    check_range,
    find_layers,
    merge_folds_,
    saved_scheme,
)

Backend = Literal["reference", "torchao", "auto"]


def convert(
    model: nn.Module, ranges: Mapping[str, Mapping[str, Any]] | None = None, *, backend: Backend = "reference"
) -> nn.Module:
    """Return a new model whose quantized layers hold int8 codes and sum integers. `model` is not changed.

    This applies to weights per channel with observed input ranges. Binary weights with binary inputs become bits,
    multiplied by XNOR and popcount. Layers of other schemes compute in float on
    quantized values. Weight codes equal those of the fake-quantizing model,
    and so do activation codes, up to float rounding in earlier layers. The new model is in evaluation
    mode and cannot be trained.

    The reference is exact and portable, not fast. ``backend="torchao"`` runs linear layers on int8 kernels with equal
    codes if their inputs have a range or are quantized per token: oneDNN's on CPUs, which sum the same integers,
    torchao's elsewhere. Linear layers with only int8 weights, or int4 weights on CPUs, run on torchao's kernels too,
    and 2-d convolutions on CPUs on oneDNN's. Up to 32 rows run on FBGEMM where it's faster, with the same sums and one
    more copy of the weight codes. LSTM and GRU with ``int8_dynamic`` run on FBGEMM's, which quantizes states
    too (`PackedRecurrent`). Other layers stay on the reference: see `conversion_report`.
    On a CPU a compiled model is faster still: ``torch.compile(model, options={"freezing": True})``
    under `torch.no_grad`. This changes no settings of other models.

    Args:
        model: A model in or after quantization-aware training, or a plain one with baked weights.
        ranges: Module name → ``{"min", "max", "weight_bits", "activation_bits"}``, as
            `QuantizationAwareTraining.ranges` returns it; None: those that the layers of `model` carry.
        backend: ``"reference"``, ``"torchao"`` (with oneDNN), or ``"auto"``: torchao if installed, else only oneDNN.

    Raises:
        ConfigError: If the backend is unknown.
        MissingExtraError: If the backend is ``"torchao"`` and it is not installed.
        MatchError: If no layer carries a range, or `ranges` names none of the model's layers.
        CompatibilityError: If a layer's weights are not finite, or its sums could overflow 32 bits.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.copy_(torch.tensor([[0.5, 1.27]]))
        >>> integer = convert(net, {"0": {"min": 0.0, "max": 2.55}})
        >>> integer[0].weight_codes.tolist()
        [[50, 127]]
        >>> round(integer(torch.tensor([[1.0, 2.0]])).item(), 4)
        3.04
    """
    check_model(model, "convert")
    fast = wants_kernels(backend)
    converted = conv1d_as_linear(copy.deepcopy(model))
    merge_folds_(converted, ranges)
    entries = _carried(converted) if ranges is None else take_cache_scales_(converted, ranges)
    integer: dict[nn.Module, nn.Module] = {}
    baked: set[int] = set()
    for name, module in find_layers(converted, entries, "convert").items():
        made = _on_codes(f"convert: {name}", module, entries[name], baked)
        if made is not None:
            integer[module] = made
            continue
        if type(module) in STOCK and not module.quantizer.baked:  # type: ignore[union-attr]
            # Bake weights that are not baked yet, shared ones once.
            bake_(module, baked)
        restore(module)
        apply_ranges(module, {"": entries[name]})
    converted = replaced(converted, integer)
    if fast:
        converted = to_torchao(converted)
    fast_paths_off(converted, (*ON_INTEGERS, *STOCK))
    return converted.eval()


def _carried(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """Return the ranges that a model's layers carry. Layers whose range is missing become stock again."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, module in model.named_modules():
        entry = layer_entry(module)
        if entry is not None:
            found[plain_name(name)] = entry
        elif type(module) in STOCK:
            warnings.warn(
                f"convert: {name} stays in float, because it got no finite input in training", UserWarning, stacklevel=3
            )
            restore(module)
    if not found:
        raise MatchError(
            "convert",
            "no layer of the model has an activation range",
            "train it with qat for at least one step, or pass ranges=",
        )
    return found


def _on_codes(where: str, module: Any, entry: Mapping[str, Any], baked: set[int]) -> nn.Module | None:
    """Return the integer layer for a layer, which becomes stock; None if there is none."""
    scheme, kind = saved_scheme(entry, where), stock_kind(STOCK.get(type(module), type(module)))
    if scheme.weight == "binary" and scheme.has_binary_inputs and kind in BINARY:
        if type(module) in STOCK and not module.quantizer.baked:
            bake_(module, baked)
        restore(module)
        return binary_layer(module, scheme)
    if scheme.weight != "channel":
        return None
    if scheme.input == "static" and kind in INTEGER:
        bounds = check_range(entry, where)
        restore(module)
        return INTEGER[kind](module, bounds, scheme, entry)
    if kind is nn.Embedding:
        restore(module)
        return IntEmbedding(module, scheme, entry)
    return None


WHERE = "convert: backend=torchao"
_BACKENDS = ("reference", "torchao", "auto")
_FEWEST_ROWS = 32  # torch._int_mm on CUDA refuses 16 and fewer
# A product of codes is at most 255 · 128. With more terms the 32-bit sum may overflow.
_MOST_INPUTS = (2**31 - 1) // (255 * 128)
_GROUPS = (32, 64, 128)  # group sizes of aten::_weight_int4pack_mm_for_cpu that torchao wraps


def wants_kernels(backend: str) -> bool:
    """Return True if the backend uses more than the reference layers."""
    if backend not in _BACKENDS:
        raise ConfigError("convert", f"backend must be a known one, got {backend!r}{nearest(backend, _BACKENDS)}")
    if backend == "torchao" and not _has_torchao():
        raise MissingExtraError(WHERE, "torchao", "torchao")
    return backend != "reference"


def _has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


class TorchaoLinear(nn.Linear):
    """A linear layer whose weight is a quantized tensor of torchao."""

    kind = "Linear"

    def __init__(self, weight: Tensor, bias: Tensor | None, static: bool, kernel: str) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.static, self.kernel = static, kernel

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`. A row with NaN returns NaN."""
        x = input.reshape(-1, self.in_features)
        rows = len(x)
        if not rows:
            return input.new_zeros(*input.shape[:-1], self.out_features)
        if x.is_cuda and rows < _FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, _FEWEST_ROWS - rows))
        if self.static:
            # torchao subtracts the zero point's part in the output's type. In bf16 all digits would cancel.
            y = F.linear(x.float(), self.weight)
            y = y if self.bias is None else y + self.bias
            # NaN has no code, and the kernel would turn it into numbers.
            y = torch.where(x.isnan().any(1, keepdim=True), torch.nan, y).to(x.dtype)
        else:
            y = F.linear(x, self.weight, self.bias)
        return y[:rows].view(*input.shape[:-1], self.out_features)


ON_INTEGERS = (IntegerLayer, TorchaoLinear, PackedLayer)
"""The classes of layers that compute on integers, or on torchao's kernels."""


def to_torchao(model: nn.Module) -> nn.Module:
    """Move layers of a converted model to torchao's and oneDNN's kernels where these exist, in place; return it."""
    made: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        fast, why = _fast(module)
        if fast is not None:
            made[module] = fast
        elif why:
            module.stays_because = why  # type: ignore[assignment]
    return replaced(model, made)


def _fast(module: Any) -> tuple[nn.Module | None, str]:
    """Return (the layer on a kernel, ""), or (None, why it has none); the reason is empty for other modules."""
    if isinstance(module, IntLinear):
        return _fast_static(module)
    if isinstance(module, FakeQuantLinear):
        return _fast_weights(module)
    if isinstance(module, BinaryLayer):
        return None, module.use_int8()
    if isinstance(module, IntConv2d):
        why = _why_no_convolution(module)
        return (None, why) if why else (OneDnnConv2d.take(module, _named("oneDNN int8 static", "onednn.qconv2d")), "")
    kind = stock_kind(STOCK.get(type(module), nn.Module))
    if kind is nn.RNN:
        return None, "torch has no int8 kernel for RNN"
    if kind is nn.MultiheadAttention:
        return None, "its projections have no integer kernel here; ONNX files multiply them in integers"
    if kind in (nn.LSTM, nn.GRU):
        scheme = saved_scheme(layer_entry(module) or {}, WHERE)
        why = PackedRecurrent.why_not(module, scheme)
        return (None, why) if why else (PackedRecurrent(module, scheme), "")
    return None, ""


def _fast_static(module: IntLinear) -> tuple[nn.Module | None, str]:
    device = module.weight_codes.device
    why = _why_no_int8_linear(device, module.weight_bits) or _why_no_float64(module.weight_scale.dtype)
    why = _why_no_wide(module) or why
    if not why and _is_of_onednn(device):
        return OneDnnLinear.take(module, _named("oneDNN int8 static", "onednn.qlinear")), ""
    if not why and module.activation_bits != 8:
        why = f"torchao does not support {module.activation_bits}-bit inputs"
    why = why or _why_no_torchao()
    if why:
        return None, why
    weight = _int8(module.weight_codes, module.weight_scale, torch.float32, module)
    return TorchaoLinear(weight, module.bias, True, _named("torchao int8 static")), ""


def _fast_weights(module: FakeQuantLinear) -> tuple[nn.Module | None, str]:
    entry = layer_entry(module) or {}
    scheme = saved_scheme(entry, WHERE)
    float_weight = module.weight.detach()
    if scheme.weight == "group":
        if why := _why_no_torchao():
            return None, why
        if scheme.input != "none":
            return None, f"torchao's wheels for this processor lack a kernel for {scheme}"
        if scheme.weight_bits > 4:
            return None, f"the int4 kernel takes 4 bits at most, got {scheme.weight_bits}"
        return _int4(module, scheme.group_size)
    if scheme.weight != "channel" or scheme.input not in ("none", "token") or scheme.affine_input:
        return None, f"torchao has no kernel here for {scheme}"
    dynamic = scheme.input == "token"
    why = _why_no_int8_linear(float_weight.device, scheme.weight_bits) if dynamic else ""
    why = why or _why_no_float64(float_weight.dtype)
    if dynamic and not why and _is_of_onednn(float_weight.device):
        if float_weight.shape[1] > _MOST_INPUTS:
            return None, f"sums of {float_weight.shape[1]} products of int8 and uint8 can overflow 32 bits"
        codes, scale = channel_codes(float_weight, scheme, entry)
        kernel = _named("oneDNN int8 dynamic", "onednn.qlinear")
        return OneDnnTokenLinear(codes, scale, module.bias, scheme.activation_bits, kernel), ""
    if dynamic and scheme.activation_bits != 8:
        why = f"torchao does not support {scheme.activation_bits}-bit inputs"
    why = why or _why_no_torchao()
    if why:
        return None, why
    codes, scale = channel_codes(float_weight, scheme, entry)
    weight = _int8(codes, scale, float_weight.dtype, "token" if dynamic else None)
    kernel = _named("torchao int8 dynamic") if dynamic else "torchao int8 weight-only: a product in float"
    return TorchaoLinear(weight, module.bias, False, kernel), ""


def _is_of_onednn(device: torch.device) -> bool:
    # It returns scaled float with the bias added. torchao's kernel returns integers, which need more passes.
    return device.type == "cpu" and hasattr(torch.ops.onednn, "qlinear_pointwise")


def _why_no_int8_linear(device: torch.device, weight_bits: int) -> str:
    return _why_no_int8(device, weight_bits, "linear" if _is_of_onednn(device) else "matmul")


def _why_no_int8(device: torch.device, weight_bits: int, kernel: Literal["linear", "convolution", "matmul"]) -> str:
    if device.type not in ("cpu", "cuda"):
        return f"torch has no int8 matrix product on {device.type}"
    if device.type == "cpu" and weight_bits == 8 and not sums_exactly(kernel):
        return "the kernel saturates here, adding pairs of 8-bit products in 16 bits (no VNNI); quantize to 7 bits"
    return ""


def _why_no_torchao() -> str:
    return "" if _has_torchao() else "torchao is not installed; pip install 'efftrain[torchao]'"


def _why_no_float64(dtype: torch.dtype) -> str:
    return "the kernels compute in float32 at most, the model in float64" if dtype == torch.float64 else ""


def _why_no_convolution(module: IntConv2d) -> str:
    device = module.weight_codes.device
    if device.type != "cpu":
        return f"torch has no int8 convolution on {device.type}"
    no_kernel = _why_no_int8(device, module.weight_bits, "convolution") or _why_no_float64(module.weight_scale.dtype)
    return _why_no_wide(module) or no_kernel or OneDnnConv2d.why_not(module)


def _why_no_wide(module: IntegerLayer) -> str:
    return "no kernel here multiplies int16 by int8" if module.activation_bits > 8 else ""


def _named(kind: str, call: str = "torch._int_mm") -> str:
    return f"{kind}: int8 x int8 -> int32 ({call})"


def _int8(codes: Tensor, scale: Tensor, dtype: torch.dtype, inputs: IntLinear | str | None) -> Tensor:
    from torchao.quantization import Int8Tensor, MappingType, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    extra: dict[str, Any] = {}
    if isinstance(inputs, IntLinear):
        extra["act_quant_kwargs"] = QuantizeTensorToInt8Kwargs(PerTensor(), MappingType.ASYMMETRIC)
        extra["act_quant_scale"] = inputs.input_scale.view(1, 1)
        extra["act_quant_zero_point"] = inputs.input_zero_point.view(1, 1).to(torch.int8)
    elif inputs is not None:
        extra["act_quant_kwargs"] = QuantizeTensorToInt8Kwargs(PerRow())
    tensor: Tensor = Int8Tensor(codes, scale.view(-1, 1), [1, codes.shape[1]], dtype, **extra)
    return tensor


def _int4(module: FakeQuantLinear, group_size: int) -> tuple[TorchaoLinear | None, str]:
    weight = module.weight.detach()
    if weight.device.type != "cpu":
        return None, f"int4 codes can be packed for CPUs only, not for {weight.device.type}"
    if group_size not in _GROUPS or weight.shape[0] % 16:
        return (
            None,
            f"the int4 kernel takes groups of 32, 64 or 128 and outputs in sixteens, got {group_size} and "
            f"{weight.shape[0]}",
        )
    try:
        from torchao.prototype.quantization.int4 import Int4OpaqueTensor
    except ImportError:
        return None, "this version of torchao has no int4 kernel for CPUs"
    codes, scale, low, exact = grid_of_groups(
        weight.float(), group_size, 1e-3 if weight.dtype == torch.float32 else 0.1
    )
    if not exact:
        return None, "its weights do not lie on a grid of 16 values"
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    # the kernel computes (code - 8)·scale + zero
    pairs = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().to(weight.dtype)
    tensor: Tensor = Int4OpaqueTensor(packed, pairs, [1, group_size], weight.shape)
    text = "torchao int4 weight-only: aten::_weight_int4pack_mm_for_cpu"
    return TorchaoLinear(tensor, module.bias, False, text), ""


def grid_of_groups(weight: Tensor, group_size: int, tolerance: float) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return (codes 0 to 15, scale and smallest value per group, True if ``low + code·scale`` is the weight).

    Recomputing the scales from baked weights could be off by a code. Instead, each group gets the coarsest grid of at
    most 16 values that holds all its weights.

    Args:
        weight: Baked, (outputs, inputs), float32.
        group_size: Divides the inputs.
        tolerance: Largest distance from the grid, in steps.

    Example:
        >>> codes, scale, low, exact = grid_of_groups(torch.tensor([[-0.5, 0.0, 0.25, 1.0]]), 4, 1e-3)
        >>> codes.tolist(), scale.tolist(), low.tolist(), exact
        ([[0, 2, 3, 6]], [[0.25]], [[-0.5]], True)
    """
    # A grid has up to 15 steps between the smallest and largest value. Every number is tried.
    groups = weight.view(len(weight), -1, group_size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    span = torch.where(high > low, high - low, torch.ones_like(low))
    scale, found = span / 15, torch.zeros_like(low, dtype=torch.bool)
    for steps in range(1, 16):
        candidate = span / steps
        position = (groups - low) / candidate
        fits = (position - position.round()).abs().amax(-1, keepdim=True) <= tolerance
        # The coarsest grid that fits is the real one. Finer multiples of it fit too.
        scale, found = torch.where(fits & ~found, candidate, scale), found | fits
    codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8)
    return codes.view(weight.shape), scale.squeeze(-1), low.squeeze(-1), bool(found.all())


def conversion_report(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return the kernel of each layer of a converted model: layer → ``{"type", "kernel", "why"}``.

    ``why`` says why a layer could not use the requested backend. Otherwise it is empty.

    Args:
        model: The result of `convert`.

    Example:
        >>> from shared_core.quantization import convert
        >>> integer = convert(nn.Sequential(nn.Linear(2, 1)), {"0": {"min": 0.0, "max": 2.55}})
        >>> conversion_report(integer)["0"]["kernel"]
        'reference: integers, summed in float64'
    """
    report = {}
    for name, module in model.named_modules():
        if isinstance(module, ON_INTEGERS):
            kind, kernel = module.kind, module.kernel
        elif type(module) in STOCK:
            kind, kernel = STOCK[type(module)].__name__, "reference: quantized values, in float"
        elif type(module) in STOCK.values():
            kind, kernel = type(module).__name__, "float"
        else:
            continue
        report[name] = {"type": kind, "kernel": kernel, "why": str(getattr(module, "stays_because", ""))}
    return report
