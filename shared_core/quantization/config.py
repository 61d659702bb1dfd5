"""The options of quantization-aware training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import EFFICIENT_LOADING, NO_WHOLE_WEIGHTS, RUN_ENVIRONMENTS, Ability
from shared_core.config.options import Figure, OverridableConfig, coerce, option
from shared_core.config.training_time import Position
from shared_core.errors import ConfigError
from shared_core.quantization.schemes import (
    FEW,
    INPUTS,
    SCHEMES,
    WEIGHTS,
    WITH_RANGE,
    Inputs,
    LayerScheme,
    Scheme,
    Weights,
    preset_name,
)

if TYPE_CHECKING:
    import torch

_FORMATS = ("weights", "inputs", "weight_bits", "activation_bits", "group_size", "include", "overrides")
"""Options that give formats to layers."""
Range = Literal["ema", "minmax", "percentile", "kl", "mse", "lsq", "lsq_plus", "pact"]
_WITHOUT_ZERO_POINT = ("ema", "minmax", "percentile", "kl", "mse", "lsq")
"""Ranges that do not need a zero point or unsigned codes."""
_ROUNDED_WEIGHTS = ("ema", "minmax", "percentile", "kl", "mse", "pact")
"""Ranges for which weights have no learned scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QatConfig(OverridableConfig):
    """Trains with weights and activations rounded to few bits.

    Example:
        >>> QatConfig(scheme="int8", overrides={"head": {"weight_bits": 4}}).overrides
        ('head:weight_bits=4',)
    """

    about: ClassVar[str] = "Trains with weights and inputs rounded to few bits."
    key: ClassVar[str] = "qat"
    switch: ClassVar[str] = "scheme"
    other_switches: ClassVar[tuple[str, ...]] = ("weights", "init")

    # The soup evaluates with active quantizers. Hooks on a layer's forward must be gone before layers become plain.
    finishes_after: ClassVar[tuple[str, ...]] = ("soup", "checkpointing", "activations")
    conflicts: ClassVar[Mapping[str, str]] = {
        "fp8": "both replace the same linear layers; train in FP8 first and with qat in a second run, or drop one",
        "averaging_callback": "ranges are observed on the weights in training, and an average lies between the codes; "
        "the technique average does both",
        "vllm_rollouts": "TRL sends the engine the float weights under training, not the rounded ones; leave out "
        "use_vllm: transformers generates with the rounded weights",
        **NO_WHOLE_WEIGHTS,
    }
    works_in: ClassVar[tuple[str, ...]] = ("tensor_parallel",)
    figures: ClassVar[Mapping[str, Figure]] = {
        "active": Figure("1 while values are rounded, 0 before `begin`", in_bar=True),
        "layers": Figure("number of quantized layers"),
        "range_updates": Figure("number of range updates"),
    }
    conditions: ClassVar[Mapping[str, str]] = {
        "is_static": "inputs of int8_static or fp8_static, as in scheme int8",
        "has_static_integers": "inputs of int8_static, as in scheme int8",
        "has_integers": "weights of int8, int4 or int4_asym",
        "has_groups": "weights of int4 or int4_asym",
        "has_integer_inputs": "inputs of int8_static, int8_token or int8_token_asym, or with ternary or binary alone",
        "has_few_codes": "inputs other than fp8_static and int16_static",
    }
    overridable: ClassVar[tuple[str, ...]] = (
        "scheme", "weights", "inputs", "weight_bits", "activation_bits", "group_size"
    )  # fmt: skip

    scheme: Scheme | None = option(
        None,
        help="formats of weights and inputs by one name, in any case: int8 (inputs with fixed ranges), int8_weight, "
        "int8_dynamic, int16 (int8 weights, int16 inputs with fixed ranges), int4_weight, int8_dynamic_int4_weight, "
        "fp16 and bf16 (weights alone), fp8, fp8_static, fp8_block, mxfp4, nvfp4, ternary, binary, xnor_net (binary "
        "weights and binary_scaled inputs), released (those of the folder that the model was loaded from, with its "
        "scales), or compressed-tensors' names W2A16 to W8A16, W4A16_ASYM, W8A8, W4A8, W4AFP8, FP8_DYNAMIC, NVFP4A16, "
        "MXFP4A16, MXFP4XFP8, MXFP6A16, MXFP6A8, MXFP8A16, MXFP8",
        flag_type=str | None,
    )
    weights: Weights | None = option(
        None,
        help="format of weights, instead of the scheme's. int8: per channel; int4, int4_asym: in groups, without or "
        "with zero points; fp16, bf16: 16 bits; fp8: per channel; fp8_tensor: one scale; fp8_block: blocks of "
        "128 x 128; mxfp4, mxfp6, mxfp8: blocks of 32; nvfp4: of 16",
    )
    init: str | None = option(
        None,
        help="folder of eff quantize, or of a released model, to start from. Gives weights, their scales, input ranges "
        "and, without scheme and weights, the formats",
    )
    inputs: Inputs = option(
        "auto",
        help="format of inputs; auto: the scheme's, or none (float) with weights alone. static: one range per layer, "
        "in int16_static symmetric: s = max|x| / 32767; token: one per token, with zero points in int8_token_asym; "
        "fp8_group: one per 128 features; mxfp4, mxfp8, nvfp4: blocks as in weights; binary: signs; binary_scaled: "
        "signs times mean magnitudes, as in XNOR-Net",
    )
    symmetric: bool = option(
        False,
        help="signed codes without a zero point for static inputs, s = max|x| / (2^(b-1) - 1), as TensorRT needs",
        only_with={"has_static_integers": (True,), "range": _WITHOUT_ZERO_POINT},
    )
    begin: Position = option(0.0, help="when fake quantization starts; ranges are observed from the first step")
    freeze_observers: Position = option(1.0, help="when activation ranges are frozen; at least step 1")
    fold_batch_norm: bool = option(True, help="fold batch norms into the weights before quantizing, as at inference")
    freeze_bn: Position = option(1.0, help="when folded batch norms switch to their running statistics for good")
    range: Range = option(
        "ema",
        help="activation ranges from the moving average of each step's minimum and maximum (ema), from all steps "
        "(minmax, percentile, kl, mse), or learned (lsq, lsq_plus with a zero point, pact)",
        only_with={"is_static": (True,)},
        each={kind: {"has_few_codes": (True,)} for kind in ("kl", "mse", "lsq", "lsq_plus", "pact")},
    )
    ema_constant: float = option(
        0.01,
        help="minimum weight c of a new step in the average: r = r + max(c, 9/(n + 10))·(w - r) after n steps",
        above=0.0,
        high=1.0,
        only_with={"range": ("ema",)},
    )
    percentile: float = option(
        99.99,
        help="share of the values inside the range, in percent",
        above=50.0,
        high=100.0,
        only_with={"range": ("percentile",)},
    )
    clip_gelu: float | None = option(
        None,
        help="upper limit of the range where a layer reads a GELU output; 10 is usual",
        above=0.0,
        only_with={"is_static": (True,), "range": _ROUNDED_WEIGHTS},
    )
    weight_bits: int | None = option(
        None,
        help="bits b per weight, -(2^(b-1) - 1) to 2^(b-1) - 1; default: the scheme's",
        low=2,
        high=8,
        only_with={"has_integers": (True,)},
    )
    activation_bits: int | None = option(
        None,
        help="bits b per activation, -2^(b-1) to 2^(b-1) - 1; default: the scheme's. With ternary or binary weights, 1 "
        "stands for inputs of binary",
        low=1,
        high=8,
        only_with={"has_integer_inputs": (True,)},
    )
    group_size: int | None = option(
        None,
        help="weights per scale; default: the largest of 128, 64, 32 that divides the inputs",
        low=2,
        only_with={"has_groups": (True,)},
    )
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        help="rounding of weights in training: nearest, or up with the probability of the remainder; saved weights use "
        "nearest",
        only_with={"has_integers": (True,), "range": _ROUNDED_WEIGHTS},
    )
    gate: Literal["unrounded", "rounded"] = option(
        "unrounded",
        help="pass gradients where x/s + z, or its rounded value (as torch's ops), is in range",
    )
    recompute_weights: bool = option(
        False,
        help="round weights again in backward instead of keeping the rounded ones: saves their memory, costs a second "
        "rounding",
    )
    calibration_batches: int = option(
        10, help="training batches to re-estimate ranges of replaced weights, as in a soup", low=1
    )
    include: tuple[str, ...] = option((), help="modules to include: name globs, types, first, last; default: all")
    skip: tuple[str, ...] = option((), help="modules to leave in float: name globs, types, first, last")
    min_size: int = option(0, help="leave modules with fewer weights in float", low=0)
    overrides: tuple[str, ...] = option(
        (),
        help="options of single modules: PATTERN:OPTION=VALUE, such as head:weight_bits=8 or *.experts*:weights=mxfp4, "
        "or a mapping in YAML; the last match counts",
    )
    keep: bool = option(False, help="keep the fake-quantizing modules in the model after training")

    def __post_init__(self) -> None:
        """Take names of formats in any case, then check every option."""
        if isinstance(self.scheme, str):
            object.__setattr__(self, "scheme", _preset(self.scheme))
        for name in ("weights", "inputs"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, value.lower())
        super().__post_init__()

    def validate(self) -> None:
        """Raise `ConfigError` without formats, for formats that cannot be multiplied, and for invalid overrides."""
        is_given = self.scheme or self.weights or self.init
        self.require(is_given, "scheme or weights or init must be given, got none", "add one")
        if self.is_open:
            source = "scheme released" if self.scheme else "init without scheme"
            odd = [name for name in _FORMATS if self.is_given(name)]
            rule = f"{source} takes the formats of layers from a folder, got {', '.join(odd)} too"
            self.require(not odd, rule, "leave them out; skip keeps layers in float")
        keeps = self.scheme == "released" or self.init is not None
        rule = f"range {self.range} learns weight scales, but scheme released and init keep those of a folder"
        self.require(not keeps or self.range not in ("lsq", "lsq_plus"), rule, "use another range")
        both = self.init is not None and self.scheme == "released"
        self.require(not both, "scheme released and init are two sources of weight scales", "give one of them")
        why = self.layer_scheme.mismatch
        self.require(not why, f"weights and inputs cannot be combined, because {why}", "choose other inputs, or none")
        if self.activation_bits is not None:
            rule = "one bit stands for signs, and these inputs have 2 to 8 bits, got 1"
            is_binary = self.layer_scheme.has_binary_inputs
            self.require((self.activation_bits == 1) == is_binary, rule, "set inputs=binary without activation_bits")
        hints = self.hints()
        for pattern, name, value in self.override_options():
            is_float = name in ("scheme", "weights") and value.lower() in ("none", "null")
            self.require(not is_float, f"overrides must give {pattern} a format as {name}, got {value}", "use skip")
            is_one = not (name == "scheme" and value.lower() == "released")
            self.require(is_one, "overrides cannot give single layers the scheme released", "use it for all, with skip")
            if name in ("scheme", "weights", "inputs"):
                coerce(_preset(value) if name == "scheme" else value.lower(), hints[name], "qat.overrides", name)

    def of_layer(self, options: Mapping[str, str]) -> QatConfig:
        """Return the config of a layer with these overrides, which start from the formats given for all layers.

        Raises:
            ConfigError: If the formats cannot be multiplied, or an option needs others.
        """
        replaced = {*self.overridable} if "scheme" in options else {*options}
        for half, bits in {"weights": "weight_bits", "inputs": "activation_bits"}.items():
            replaced |= {bits, "group_size"} if half in options else set()
        kept = {name: getattr(self, name) for name in self.overridable if name not in replaced}
        own = QatConfig.from_dict({**kept, **options})
        if own.has_groups and own.group_size is None:
            own = dataclasses.replace(own, group_size=self.group_size)
        if not own.is_static:
            return own
        return dataclasses.replace(own, range=self.range, symmetric=self.symmetric and own.has_static_integers)

    @property
    def is_open(self) -> bool:
        """True if the formats are those of a folder, which is read when the model is known."""
        return self.scheme == "released" or (self.init is not None and not (self.scheme or self.weights))

    @property
    def layer_scheme(self) -> LayerScheme:
        """The scheme of a layer without overrides. Groups have no size yet."""
        found = self._formats
        change: dict[str, Any] = {}
        if self.weight_bits is not None:
            change["weight_bits"] = self.weight_bits
        if self.activation_bits is not None:
            change["activation_bits"] = self.activation_bits
            if found.input == "none" and found.weight in FEW:
                change["input"] = "binary" if self.activation_bits == 1 else "static"
        symmetric = self.symmetric and change.get("input", found.input) == "static"
        return dataclasses.replace(found, symmetric=symmetric or found.symmetric, **change)

    @property
    def _formats(self) -> LayerScheme:
        """The scheme of a layer without `weight_bits`, `activation_bits` and `symmetric`."""
        preset = SCHEMES.get(str(self.scheme), LayerScheme(*WEIGHTS["int8"], *INPUTS["none"]))
        of_weight = preset.of_weight if self.weights is None else WEIGHTS[self.weights]
        return LayerScheme(*of_weight, *INPUTS.get(self.inputs, preset.of_input))

    @property
    def preset_or_formats(self) -> str:
        """The preset's name, or the formats in words if they are not a preset's."""
        if self.is_open:
            return f"the formats of {self.init or 'the released model'}"
        is_preset = self.layer_scheme == SCHEMES.get(str(self.scheme))
        return str(self.scheme if is_preset else self.layer_scheme)

    @property
    def formats(self) -> str:
        """The formats in words, with the preset's name."""
        name, words = self.preset_or_formats, str(self.layer_scheme)
        return words if name == words else f"{name} ({words})"

    @property
    def is_static(self) -> bool:
        """True if activations have observed ranges, or may have them."""
        return self.layer_scheme.has_range or self.is_open

    @property
    def has_static_integers(self) -> bool:
        """True if inputs are integers with observed ranges, or may be."""
        return self.layer_scheme.input == "static" or self.is_open

    @property
    def has_integers(self) -> bool:
        """True if weights are integers of `weight_bits` bits."""
        return self.layer_scheme.has_integers

    @property
    def has_groups(self) -> bool:
        """True if weights are integers in groups."""
        return self.layer_scheme.weight == "group"

    @property
    def has_integer_inputs(self) -> bool:
        """True if inputs are integers of `activation_bits` bits, or can be."""
        found = self._formats
        can_be = found.weight in FEW and found.input == "none"
        return can_be or (found.has_byte_inputs)

    @property
    def has_few_codes(self) -> bool:
        """True unless inputs have FP8 or 16 bits and a range: too many codes to search for one, or to learn it."""
        return self.layer_scheme.input != "fp8_static" and not self.layer_scheme.has_wide_inputs

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return native, with the kernels that run converted layers."""
        kernels = "torchao's kernels" if find_spec("torchao") else "torch's integer products; torchao has faster ones"
        return Ability("native", f"training computes on float values; `convert` then uses {kernels}")

    @property
    def learns_ranges(self) -> bool:
        """True if training learns the ranges with the weights instead of observing them."""
        return self.range in ("lsq", "lsq_plus", "pact")

    @property
    def observes_activations(self) -> bool:
        """True if layers may have input ranges, which must be re-estimated for other weights."""
        others = self.override_options()
        schemes = [self.layer_scheme, *(SCHEMES[_preset(value)] for _, name, value in others if name == "scheme")]
        gets_bits = any(name == "activation_bits" for _, name, _ in others)
        ranged = [name for name, (kind, *_) in INPUTS.items() if kind in WITH_RANGE]
        gets_range = any(name == "inputs" and value in ranged for _, name, value in others)
        formats = {one.weight for one in schemes} | {value for _, name, value in others if name == "weights"}
        has_few = bool(formats & {*FEW})
        return self.is_open or gets_range or (gets_bits and has_few) or any(one.has_range for one in schemes)

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        averages = [key for key in ("average", "soup") if key in recipe]
        if self.keep and "lora" in recipe:
            yield (
                "qat with keep cannot be combined with lora: adapters are merged into plain layers at the end; "
                "apply_ranges restores quantizers in these"
            )
        if (self.scheme == "released" or self.init is not None) and "lora" in recipe:
            yield (
                "qat with scheme released or init cannot be combined with lora: the folder's scales belong to whole "
                "weights, which forward passes with adapters never form; train with lora alone, and let "
                "`eff export --format released` round the merged weights, or give qat a scheme by name"
            )
        others = {value for _, name, value in self.override_options() if name in ("weights", "scheme")}
        if "prune" in recipe and (self.layer_scheme.weight == "binary" or others & {"binary", "xnor_net"}):
            yield (
                "qat with binary weights cannot be combined with prune: a binary weight is never 0, so pruned weights "
                "would come back; use ternary, whose zeros stay, or drop prune"
            )
        if self.learns_ranges and "efficient_loading" in environment:
            yield (
                f"qat with range {self.range} cannot be combined with {RUN_ENVIRONMENTS['efficient_loading']}: "
                f"{EFFICIENT_LOADING.format('weights and no ranges')}"
            )
        if "tensor_parallel" in environment and (self.range not in ("ema", "minmax") or self.clip_gelu is not None):
            yield (
                f"qat with range {self.range}{' and clip_gelu' if self.clip_gelu else ''} cannot be combined with "
                f"{RUN_ENVIRONMENTS['tensor_parallel']}: replicated inputs would be counted once per process, "
                "the plan has no learned scales, and GELU outputs cannot be recognized; use ema or "
                "minmax, without clip_gelu"
            )
        for key in averages:
            if self.learns_ranges:
                yield (
                    f"qat with range {self.range} cannot be combined with {key}: averaged weights have no learned "
                    "scales; use an observed range, such as ema, which is re-estimated for them"
                )
            if self.observes_activations and "manual_optimization" in environment:
                yield (
                    f"{key} with ranges of qat cannot be combined with {RUN_ENVIRONMENTS['manual_optimization']}: "
                    "averaged weights need new ranges, estimated by running training_step, which here steps the "
                    "optimizer; use scheme int8_dynamic or int8_weight"
                )


def _preset(name: str) -> str:
    try:
        return preset_name(name)
    except ValueError as error:
        raise ConfigError("qat.scheme", str(error), "choose a name that has one meaning") from error
