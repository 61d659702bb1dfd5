"""Resolve a scheme for one layer: which quantiser for its weight, which for its input, at how many bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from torch import nn

from shared_core.errors import ConfigError
from shared_core.modules.experts import StackedExperts, gates_between_products
from shared_core.modules.matching import options_by_module
from shared_core.modules.weight_views import RECURRENT, as_rows, weights_of
from shared_core.quantization.config import QatConfig

Weight = Literal["channel", "group", "fp8", "fp8_block", "mxfp4", "nvfp4", "ternary", "binary"]
Input = Literal["none", "static", "token", "fp8", "fp8_static", "fp8_group", "mxfp4", "nvfp4"]
WITH_RANGE = ("static", "fp8_static")
"""Inputs whose range is observed and kept."""


@dataclasses.dataclass(frozen=True)
class LayerScheme:
    """The quantisation of one layer, as plain values.

    Args:
        weight: What shares a scale, or the number format; ``channel``: an output channel, ``fp8`` too; ``fp8_block``:
            `group_size` inputs of 128 channels.
        weight_bits: Bits of an integer code.
        input: ``static``: one range a layer; ``token``: a range for each vector, found when it is seen, ``fp8`` too;
            ``fp8_group``: for each `group_size` features of it.
        activation_bits: Bits of an integer code.
        group_size: Weights that share a scale; 0 unless `weight` is ``group`` or ``fp8_block``.
        affine: Whether groups have a zero point.
        affine_input: Whether tokens have one.
    """

    weight: Weight = "channel"
    weight_bits: int = 8
    input: Input = "static"
    activation_bits: int = 8
    group_size: int = 0
    affine: bool = False
    affine_input: bool = False

    @property
    def of_weight(self) -> tuple[str, int, int, bool]:
        """The fields that concern the weight alone."""
        return self.weight, self.weight_bits, self.group_size, self.affine

    @property
    def has_range(self) -> bool:
        """Whether the input has a range that is observed and kept."""
        return self.input in WITH_RANGE

    @property
    def spans_rows(self) -> bool:
        """Whether weights of several rows share a scale."""
        return self.weight in ("fp8_block", "nvfp4")

    def group_of(self, width: int) -> int:
        """Return how many weights of a row of this width share a scale: all, where groups do not divide it."""
        return width if width % self.group_size else self.group_size

    @property
    def weight_qmax(self) -> int:
        """Largest code of a symmetric weight; the smallest is its negative."""
        return (1 << (self.weight_bits - 1)) - 1

    @property
    def input_range(self) -> tuple[int, int]:
        """Smallest and largest code of an input."""
        return -(2 ** (self.activation_bits - 1)), 2 ** (self.activation_bits - 1) - 1


# Zero points where torchao's kernels of that scheme have them: in int4 groups, and in the tokens beside them.
SCHEMES: dict[str, LayerScheme] = {
    "int8": LayerScheme("channel", 8, "static", 8),
    "int8_weight": LayerScheme("channel", 8, "none", 0),
    "int8_dynamic": LayerScheme("channel", 8, "token", 8),
    "int4_weight": LayerScheme("group", 4, "none", 0, affine=True),
    "int8_dynamic_int4_weight": LayerScheme("group", 4, "token", 8, affine_input=True),
    "fp8": LayerScheme("fp8", 8, "fp8", 8),
    "fp8_static": LayerScheme("fp8", 8, "fp8_static", 8),
    "fp8_block": LayerScheme("fp8_block", 8, "fp8_group", 8, group_size=128),
    "mxfp4": LayerScheme("mxfp4", 4, "mxfp4", 4),
    "nvfp4": LayerScheme("nvfp4", 4, "nvfp4", 4),
    "ternary": LayerScheme("ternary", 2, "none", 0),
    "binary": LayerScheme("binary", 1, "none", 0),
}
_GROUP_SIZES = (128, 64, 32)


def layer_schemes(config: QatConfig, layers: dict[str, nn.Module]) -> dict[str, LayerScheme]:
    """Return how each layer is quantised: the config's scheme, with its overrides for the layers they match.

    Example:
        >>> config = QatConfig(scheme="int8", overrides={"0": {"weight_bits": 4}})
        >>> schemes = layer_schemes(config, {"0": nn.Linear(4, 2), "1": nn.Linear(2, 2)})
        >>> schemes["0"].weight_bits, schemes["1"].weight_bits
        (4, 8)
    """
    options = options_by_module("qat", config.override_options(), layers, "quantised layer")
    resolved = {}
    for name, layer in layers.items():
        own = config
        if options[name]:
            # an override of the scheme starts from that scheme's own widths
            base = {} if "scheme" in options[name] else _widths(config)
            own = QatConfig.from_dict({"scheme": config.scheme, **base, **options[name]})
        resolved[name] = _layer_scheme(own, name, layer)
        if isinstance(layer, StackedExperts) and "activation_bits" in options[name] and resolved[name].input == "none":
            raise ConfigError(
                "qat.overrides",
                f"activation_bits must be left out for stacked experts whose inputs stay in float, got {name}",
                "name its weight_bits alone, or take int8_dynamic",
            )
    _check_shared(layers, resolved)
    return resolved


def _check_shared(layers: dict[str, nn.Module], schemes: dict[str, LayerScheme]) -> None:
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        for weight in weights_of(layer).values():
            first = owners.setdefault(id(weight), name)
            # One weight has one set of codes: all layers that share it must be quantised alike.
            if schemes[first].of_weight != schemes[name].of_weight:
                raise ConfigError(
                    "qat",
                    f"{name} must be quantised like {first}, with which it shares its weight, got "
                    f"{schemes[name].of_weight} and {schemes[first].of_weight}",
                    "override both",
                )


def _widths(config: QatConfig) -> dict[str, int]:
    names = ("weight_bits", "activation_bits", "group_size")
    return {name: getattr(config, name) for name in names if getattr(config, name) is not None}


def _layer_scheme(config: QatConfig, name: str, layer: nn.Module) -> LayerScheme:
    scheme = SCHEMES[config.scheme]
    change: dict[str, Any] = {}
    if config.weight_bits is not None:
        change["weight_bits"] = config.weight_bits
    if config.activation_bits is not None:
        change["activation_bits"] = config.activation_bits
        if scheme.input == "none":
            change["input"] = "static"
    if scheme.input == "fp8_static" and isinstance(layer, StackedExperts):
        change["input"] = "fp8"  # no range of what is made inside
    # of experts both products' tokens, whose second are made inside; an embedding's inputs are indices
    seen = change.get("input", scheme.input) not in ("none", *WITH_RANGE) and gates_between_products(layer)
    if isinstance(layer, nn.Embedding) or (
        isinstance(layer, StackedExperts) and not seen
    ):  # an embedding's are indices
        change |= {"input": "none", "activation_bits": 0}
    if scheme.weight == "group":
        change["group_size"] = _group_size(config, name, layer)
    return dataclasses.replace(scheme, **change)


def _group_size(config: QatConfig, name: str, layer: nn.Module) -> int:
    widths = {as_rows(layer, weight.detach()).shape[1] for weight in weights_of(layer).values()}
    wanted = _GROUP_SIZES if config.group_size is None else (config.group_size,)
    for size in wanted:
        if all(width % size == 0 for width in widths):
            return size
    if config.group_size is not None:
        raise ConfigError(
            "qat.group_size",
            f"group_size must divide the {sorted(widths)} weights of a channel of {name}, got {config.group_size}",
            "skip the layer, or override its group_size",
        )
    if isinstance(layer, RECURRENT):
        # a few inputs beside the hidden size: rows that no group divides are one, and the others keep usual groups
        return next((size for size in wanted if any(width % size == 0 for width in widths)), min(widths))
    size = math.gcd(*widths)  # no usual size divides: a channel is one group, unless there are several widths
    if size < 4 and len(widths) > 1:
        raise ConfigError(
            "qat.scheme",
            f"groups of at least 4 must divide the weights of {name}, got {sorted(widths)} a channel",
            "skip the layer, or override its scheme with int8_weight",
        )
    return size
