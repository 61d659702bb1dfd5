"""Measurements of a quantised model: sensitivity of layers, a plan by quality, accuracy under attack, the machine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError, TrainingError
from shared_core.hardware import cpu_capabilities
from shared_core.modules.weight_views import RECURRENT
from shared_core.quantization import (
    QatConfig,
    QuantizationReport,
    SelectivePlan,
    keep_high,
    layer_sensitivity,
    plan_by_quality,
)
from shared_core.quantization.post_training.adversarial import adversarial_accuracy
from shared_core.quantization.ranges.saved_ranges import saved_scheme
from shared_core.quantization.schemes import quantize_weight

WHERE = "quantize"
SENSITIVITY_BATCHES = 8
Judge = Callable[[nn.Module], float]


def sensitivities(
    network: nn.Module,
    report: QuantizationReport,
    batches: list[Any],
    metric: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[int, float]]:
    """Return layer → bits → cost of quantising this layer's weight alone, in the scheme and width that `report` has.

    Of the first `SENSITIVITY_BATCHES` calibration batches; recurrent layers, which have several weights, are left out.
    """
    widths = {entry["name"]: entry["weight_bits"] for entry in report.layers}
    # A recurrent layer holds several weights, which one cost would not tell apart.
    names = [name for name in widths if not isinstance(network.get_submodule(name), RECURRENT)]
    schemes = {network.get_submodule(name): saved_scheme(report.ranges[name], WHERE) for name in names}

    number = itertools.count(1)

    def in_its_scheme(module: nn.Module, weight: Tensor, bits: int) -> Tensor:
        progress(next(number), len(names))
        return quantize_weight(module, weight, schemes[module])

    # the width asked for is not used: a layer's scheme has its own
    costs = layer_sensitivity(
        network,
        batches[:SENSITIVITY_BATCHES],
        metric=metric,  # type: ignore[arg-type]
        bits=[8],
        layers=names,
        quantize=in_its_scheme,
    )
    return {name: {widths[name]: cost[8]} for name, cost in costs.items()}


def check_plannable(config: QatConfig) -> None:
    """Refuse options with which no plan of one width can be made."""
    if not config.scheme.startswith("int") or config.overrides:
        raise ConfigError(
            WHERE,
            "largest_loss must come with an int scheme without overrides, whose layers share one width, got "
            f"scheme={config.scheme} and overrides={list(config.overrides)}",
        )


def kept_in_float(network: nn.Module, costs: Mapping[str, Any], example: Any) -> dict[str, str]:
    """Return layer → why it should stay in float by rules of thumb, of the layers that have a cost."""
    return {name: why for name, why in keep_high(network, example).items() if name in costs}


def selective_plan(
    network: nn.Module,
    config: QatConfig,
    costs: Mapping[str, Mapping[int, float]],
    quantized: Callable[[QatConfig], nn.Module],
    judge: Judge,
    *,
    largest_loss: float,
    mode: str,
    keep: Mapping[str, str],
) -> tuple[QatConfig, SelectivePlan]:
    """Return (config that leaves in float what the plan does, the plan); every candidate is quantised and judged."""
    if costs.keys() <= keep.keys():
        raise ConfigError(
            WHERE,
            f"largest_loss must have layers to choose from, but all {len(costs)} are of those kept in float (first, "
            "last, after GELU, …)",
            "set all_layers",
        )
    # plan_by_quality takes larger for better.
    sign = 1.0 if mode == "max" else -1.0

    def without(layers: Iterable[str]) -> QatConfig:
        return dataclasses.replace(config, skip=(*config.skip, *layers))

    def apply(_: nn.Module, bits: Mapping[str, int]) -> nn.Module:
        return quantized(without(name for name in costs if name not in bits))

    found = plan_by_quality(
        network,
        lambda model: sign * judge(model),
        costs,
        largest_loss=largest_loss,
        bits=next(iter(next(iter(costs.values())))),
        keep=keep,
        apply=apply,
    )
    if not found.plan.quantized:
        raise TrainingError(
            WHERE, f"largest_loss {largest_loss} must leave a layer to quantise, but each one loses more", "raise it"
        )
    chosen = set(found.plan.quantized)
    return without(name for name in costs if name not in chosen), found


def plan_values(found: SelectivePlan, keep: Mapping[str, str], mode: str) -> dict[str, Any]:
    """Return a plan and its curves as plain values, quality in the user's own sign."""
    sign = 1.0 if mode == "max" else -1.0
    return {
        "bits": found.plan.bits,
        "average_bits": found.plan.average_bits,
        "conversions": found.conversions,
        "kept": dict(keep),
        "curves": {
            start: [{**dataclasses.asdict(point), "quality": sign * point.quality} for point in points]
            for start, points in found.curves.items()
        },
    }


def attacked(
    name: str, model: nn.Module, float_model: nn.Module, data: list[tuple[Tensor, Tensor]], settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield one row an attack, strength and origin: the model's own gradient and, of quantised ones, the float model's.

    Args:
        name: Of the model, for the rows.
        model: Whose accuracy is measured.
        float_model: The origin of attacks that are transferred.
        data: Inputs and class indices.
        settings: ``eps``, ``low``, ``high`` and ``steps``.
    """
    # A float model is its own source: no transferred attack beside.
    origins = {"itself": None} if model is float_model else {"itself": None, "float": float_model}
    for attack in ("fgsm", "pgd"):
        for eps in settings["eps"]:
            for origin, source in origins.items():
                found = adversarial_accuracy(
                    model,
                    data,
                    eps,
                    attack=attack,  # type: ignore[arg-type]
                    steps=settings["steps"],
                    low=settings["low"],
                    high=settings["high"],
                    source=source,
                )
                yield {"attack": attack, "eps": eps, "model": name, "made_on": origin, **dataclasses.asdict(found)}


def machine() -> dict[str, str]:
    """Return the CPU, its instructions for int8 and bf16 products, and torch's version."""
    able = cpu_capabilities()
    names = ("avx2", "avx512_f", "avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "amx_bf16", "i8mm", "bf16")
    return {
        "cpu": str(able.get("cpu_name", "unknown")),
        "instructions": ", ".join(name for name in names if able.get(name)) or "none of them",
        "torch": torch.__version__,
    }
