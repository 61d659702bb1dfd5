"""Quantize a trained model without training, with ranges from a few batches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from eff_kernels.quantization import affine as kernels
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shared_core.config.options import checked
from shared_core.distributed.collectives import digest
from shared_core.distributed.job import Job
from shared_core.engine.checks import coverage
from shared_core.engine.technique import Context
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.modules.calls import call_model, evaluated
from shared_core.modules.matching import check_model
from shared_core.modules.weight_views import as_rows, weights_of
from shared_core.quantization.batch_norm import folded_weight, fuse_batch_norm
from shared_core.quantization.config import QatConfig
from shared_core.quantization.post_training import equalization
from shared_core.quantization.post_training.bit_allocation import keep_high
from shared_core.quantization.post_training.gptq import GptqConfig, solve_weights, solved_note
from shared_core.quantization.post_training.quality import output_noise
from shared_core.quantization.ranges.histogram import Histogram
from shared_core.quantization.ranges.kept_scales import one_per_channel
from shared_core.quantization.ranges.kv_cache import KvCacheReport, calibrate_kv_cache, check_kv_cache
from shared_core.quantization.ranges.observers import EstimatorBank
from shared_core.quantization.ranges.policy import OWN_SCALES
from shared_core.quantization.ranges.saved_ranges import apply_ranges
from shared_core.quantization.selection import select_layers
from shared_core.quantization.technique import QuantizationAwareTraining

WHERE = "quantize"


@dataclass(frozen=True)
class QuantizationReport:
    """The result of `quantize`.

    Args:
        layers: One entry per quantized layer: scheme, range, error of its weights, and if measured the SQNR of its
            output for float inputs (``output_sqnr_db``; None if no batch reached it).
        left_out: Layer → why it stays in float.
        batches: Number of calibration batches.
        ranges: Layer → scheme and range, as in `apply_ranges`. `write_deployment` saves them. Scales of groups that
            GPTQ chose are tensors.
        notes: What was fused, equalized and corrected, and what could not be.
        output_sqnr_db: Signal to quantization noise ratio of the model's output on the calibration batches, in dB; None
            if not measured.
        kv_cache: Scales of the cache of keys and values (also in `ranges`) and their error; None if not calibrated.
        coverage: The covered part of the model (`shared_core.engine.checks.coverage.Reach`).
    """

    layers: list[dict[str, Any]]
    left_out: dict[str, str]
    batches: int
    ranges: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    output_sqnr_db: float | None = None
    kv_cache: KvCacheReport | None = None
    coverage: dict[str, Any] = field(default_factory=dict)


def quantize(
    model: nn.Module,
    config: QatConfig | Mapping[str, Any] | str,
    calibration: Iterable[Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Return a quantized copy of a trained model, in evaluation mode. `model` is not changed.

    Weights of the copy hold quantized values, and its layers quantize inputs like an integer runtime. Evaluate it, then
    pass it to `convert` or `export_onnx`.

    Args:
        model: Trained, in float.
        config: A scheme such as ``"int8_weight"``, options as in a recipe's ``qat`` section, or a `QatConfig`.
            Without ``range``, static ranges minimize the squared error (``range="mse"``), and so do the scales of
            weights of fewer than 8 bits. ``range="minmax"``, the default of ``fp8_static``, clips nothing.
        calibration: Batches of inputs: each a tensor, a tuple of arguments or a mapping of keyword arguments. Needed
            for static ranges, bias correction, and fusion and equalization of models that torch.fx cannot trace.
        **options: As in `quantize_with_report`.

    Raises:
        ConfigError: If an option breaks its rule, or calibration is missing or not what the model takes.
        CompatibilityError: If a weight is not finite.
        MatchError: If no layer can be quantized, or too few (`allow_partial`).
        TrainingError: If a layer saw no finite input.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.copy_(torch.tensor([[0.5, 1.27]]))
        >>> quantize(net, "int8_weight")(torch.ones(1, 2)).item() == net(torch.ones(1, 2)).item()
        True
    """
    return quantize_with_report(model, config, calibration, **options)[0]


def quantize_with_report(
    model: nn.Module,
    config: QatConfig | Mapping[str, Any] | str,
    calibration: Iterable[Any] | None = None,
    *,
    num_batches: int = 100,
    fuse: bool | None = None,
    equalize: bool = False,
    correct_bias: bool = False,
    measure_outputs: bool = False,
    gptq: GptqConfig | Mapping[str, Any] | None = None,
    keep_sensitive: bool = False,
    kv_cache: str | None = None,
    allow_partial: bool = False,
    progress: Callable[[int, int], None] | None = None,
    job: Job | None = None,
) -> tuple[nn.Module, QuantizationReport]:
    """Return (quantized copy, report); see `quantize`.

    Args:
        model: Trained, in float.
        config: A scheme, options or a `QatConfig`.
        calibration: Batches of inputs.
        num_batches: Largest number of batches to run.
        fuse: Fuse each batch norm into the layer before it, which removes its keys. By default only done
            for `equalize` and `correct_bias`. Quantized weights have batch norms folded in either way.
        equalize: First equalize the ranges of channels across layers (Nagel et al. 2019, arXiv:1906.04721).
        correct_bias: Subtract the mean error of quantization per channel (same source, section 4.2).
        measure_outputs: Run the batches through both models afterwards, and report the SQNR of the outputs of the model
            and its layers.
        gptq: Options of GPTQ (Frantar et al. 2022, arXiv:2210.17323), ``{}`` for the defaults, which chooses the codes
            of linear layers and, unless ``grid`` is ``"pinned"``, the scales of groups, one decoder block at a time, on
            any device. None: round to nearest.
        keep_sensitive: Keep layers in float that often lose most (`keep_high`): the first and the last, depthwise
            convolutions, and those that read the output of softmax, tanh, sigmoid or GELU. Layers that `include` or
            `overrides` name are quantized.
        kv_cache: ``fp8``: measure scales of an FP8 cache of the quantized model (`calibrate_kv_cache`).
        allow_partial: Allow quantizing less than half of the weights that multiply activations.
        progress: Called with (batches run, batches) after each observed batch, for a progress bar.
        job: Other processes that call this with the same arguments. Each observes some of the batches, and all get
            the ranges of a single process: extrema and counts join exactly, averages follow the order of batches.

    Raises:
        ConfigError: If an option breaks its rule, or calibration is missing or not what the model takes.
        CompatibilityError: If a weight is not finite.
        MatchError: If no layer can be quantized, or too few (`allow_partial`).
        TrainingError: If a layer saw no finite input.
    """
    check_model(model, WHERE)
    job = job or Job()
    # a kept quantizer would not be baked; `apply_ranges` recreates the layers
    config = dataclasses.replace(as_config(config), keep=False)
    if config.learns_ranges:
        raise ConfigError(WHERE, f"range must be observed: training learns {config.range!r}", "use mse")
    num_batches = checked(num_batches, int, WHERE, "num_batches", low=1)
    if kv_cache is not None:
        check_kv_cache(model, kv_cache, WHERE)
    batches = None if calibration is None else list(itertools.islice(calibration, num_batches))
    if batches is not None and not batches:
        raise ConfigError(WHERE, "calibration must hold batches, got none")
    solver = GptqConfig.from_dict(gptq) if isinstance(gptq, Mapping) else gptq
    if (correct_bias or solver or kv_cache) and batches is None:
        what = "gptq" if solver else "kv_cache" if kv_cache else "correct_bias"
        raise ConfigError(WHERE, f"calibration must be given for {what}, got none")
    quantized, notes = copy.deepcopy(model).eval(), list[str]()
    example = batches[0] if batches else None
    # Equalization and bias correction need fused batch norms, because a following batch norm would undo either.
    if equalize or correct_bias if fuse is None else fuse:
        _try("batch norms", notes, lambda: _fused(quantized, example))
    if equalize:
        _try(
            "equalization",
            notes,
            lambda: f"{len(equalization.equalize(quantized, example).chains)} chains of layers equalized",
        )
    compares = batches is not None and (correct_bias or measure_outputs)
    kept = dict[str, str]()
    if keep_sensitive:
        config, kept = without_sensitive(quantized, config, example)
    # The reference is the float model after fusing and equalizing, so that layers match one to one.
    reference = copy.deepcopy(quantized) if compares else None
    technique = QuantizationAwareTraining(config, trains=False)
    context = Context(model=quantized, note=notes.append)
    counted = coverage.count(quantized)
    touched = technique.attach(context)
    reached = coverage.after_training(counted, touched, config, quantized, where=WHERE, allow_partial=allow_partial)
    notes += coverage.lines({"qat": reached})
    _check_finite(technique)
    used = _calibrate(quantized, technique, batches, notes, progress, job)
    if config.range == "mse":
        _search_weights(technique)
    solved = dict[str, dict[str, float]]()
    if solver is not None and batches is not None:
        solved = solve_weights(quantized, technique.layers, batches, solver, progress)
        notes.append(solved_note(solved))
    technique.finish(context)
    apply_ranges(quantized, technique.ranges())  # `finish` leaves plain layers
    report = technique.report()
    layers, whole = [{**entry, **solved.get(entry["name"], {})} for entry in report["per_layer"]], None
    if reference is not None and batches is not None:
        if correct_bias:
            _try("biases", notes, lambda: _corrected(quantized, reference, batches))
        if measure_outputs:
            whole, each = output_noise(reference, quantized, [entry["name"] for entry in layers], batches)
            layers = [{**entry, "output_sqnr_db": each.get(entry["name"])} for entry in layers]
    used, ranges, cache = len(batches) if solver and batches else used, technique.ranges(), None
    if kv_cache and batches is not None:
        cache = calibrate_kv_cache(quantized, batches, kv_cache)
        ranges |= cache.scales
    reach = reached.to_dict()
    left_out = report["left_out"] | {name: f"keep_sensitive: {why}" for name, why in kept.items()}
    return quantized, QuantizationReport(layers, left_out, used, ranges, notes, whole, cache, reach)


def as_config(config: QatConfig | Mapping[str, Any] | str) -> QatConfig:
    """Return a `QatConfig` from any form that `quantize` accepts."""
    options = {"scheme": config} if isinstance(config, str) else config
    made = options if isinstance(options, QatConfig) else QatConfig.from_dict(options)
    if made.scheme == "released" or made.init is not None:
        rule = "scheme must name formats: scheme released and init start a training"
        raise ConfigError(WHERE, rule, "choose the formats")
    # a moving average would depend on the order of batches and start from the first
    if isinstance(options, QatConfig) or "range" in options or not made.is_static:
        return made
    return dataclasses.replace(made, range="mse" if made.has_few_codes else "minmax")


def without_sensitive(model: nn.Module, config: QatConfig, example: Any = None) -> tuple[QatConfig, dict[str, str]]:
    """Return a config that skips the layers of `keep_high`, and why each of them stays in float.

    Args:
        model: In float.
        config: How to quantize it. Layers that `include` or `overrides` name are quantized.
        example: Inputs of the model; None: torch.fx traces it.

    Raises:
        CompatibilityError: If the model cannot be traced.
        ConfigError: If no other layer is left.
    """
    chosen = select_layers(model, config.include, config.skip, config.min_size)[0]
    named = [*config.include, *(pattern for pattern, _, _ in config.override_options())]
    kept = {
        name: why
        for name, why in keep_high(model, example).items()
        if name in chosen and not any(fnmatch.fnmatchcase(name, pattern) for pattern in named)
    }
    if chosen.keys() <= kept.keys():
        text = ", ".join(f"{name} ({why})" for name, why in list(kept.items())[:3])
        rule = f"keep_sensitive must leave a layer to quantize, but it keeps {text}"
        raise ConfigError(WHERE, rule, "leave it out, or name layers in include")
    return dataclasses.replace(config, skip=(*config.skip, *kept)), kept


def _try(what: str, notes: list[str], change: Callable[[], str]) -> None:
    try:
        notes.append(change())
    except (CompatibilityError, MatchError) as error:
        notes.append(f"{what} skipped: {error}")


def _fused(model: nn.Module, example: Any) -> str:
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "no batch norms"
    report = fuse_batch_norm(model, example)
    return "; ".join(
        [f"{len(report.fused)} batch norms fused", *(f"{one}: {why}" for one, why in report.refused.items())]
    )


def _corrected(quantized: nn.Module, reference: nn.Module, batches: list[Any]) -> str:
    report = equalization.correct_bias(quantized, reference, batches)
    return f"biases of {len(report.corrected)} layers corrected, {len(report.without_bias)} have none"


def _check_finite(technique: QuantizationAwareTraining) -> None:
    for name, layer in technique.layers.items():
        if not all(bool(torch.isfinite(weight).all()) for weight in weights_of(layer).values()):
            raise CompatibilityError(
                WHERE, f"weights of {name} must be finite, got NaN or infinity", "find the step that diverged"
            )


def _calibrate(
    model: nn.Module,
    technique: QuantizationAwareTraining,
    batches: list[Any] | None,
    notes: list[str],
    progress: Callable[[int, int], None] | None,
    job: Job,
) -> int:
    bank = technique.bank
    if not technique.policy.static:
        return 0
    if batches is None:
        raise ConfigError(
            WHERE,
            "calibration must be given for ranges of activations, got none",
            "pass some batches of inputs, or use a scheme without ranges, such as int8_weight or int8_dynamic",
        )
    bank.move_(next(model.parameters()).device)
    # histograms of all batches form one window, from which ranges are derived once
    at_once = isinstance(bank, EstimatorBank)
    windows, mine = dict[int, Tensor](), list[int]()
    with contextlib.ExitStack() as stack, evaluated(model):
        bank.observing = bank.observes_in_eval = True
        stack.callback(vars(bank).update, observing=False, observes_in_eval=False)
        for done, number in enumerate(job.tickets("calibration", len(batches)), 1):
            with technique.policy.calibrating(model):
                call_model(model, batches[number], f"{WHERE}: calibration")
            technique.policy.settle()
            mine.append(number)
            if not at_once:
                windows[number] = bank.take_window()
            if progress is not None:
                progress(done, len(batches))
    if at_once:
        windows = {job.rank: bank.take_window()}
    if job.size > 1:
        windows = _everyones(windows, model, batches, mine, job)
    if at_once:
        first, *others = map(Histogram.of, windows.values())
        for other in others:
            first.merge(other)
        windows = {0: first.data}
    for number in sorted(windows):  # an average depends on the order of the batches
        bank.commit(windows[number])
    technique.policy.read_known()
    # The rows of the inputs come first. Without a range of its output a layer only loses speed in some engines.
    missing = [name for name, known in zip(technique.policy.static, bank.known.tolist(), strict=False) if not known]
    if missing:
        raise TrainingError(
            WHERE,
            f"calibration gave no finite input to {', '.join(missing[:5])}",
            "skip these layers, or check the batches for NaN",
        )
    odd = [name for name, count in zip(technique.policy.static, bank.non_finite.tolist(), strict=False) if count]
    if odd:
        notes.append(f"NaN or infinity in calibration was ignored in the ranges of {', '.join(odd[:5])}")
    return len(batches)


def _everyones(
    windows: dict[int, Tensor], model: nn.Module, batches: list[Any], mine: list[int], job: Job
) -> dict[int, Tensor]:
    """Check that all processes have the same model and batches, and return their windows."""
    weights = _digest(model.state_dict())
    facts = {"model": weights, "count": len(batches), "batches": {str(n): _digest(batches[n]) for n in mine}}
    for content in job.exchange("calibrated", json.dumps(facts).encode()):
        theirs = json.loads(content)
        if (theirs["model"], theirs["count"]) != (weights, len(batches)) or any(
            _digest(batches[int(n)]) != one for n, one in theirs["batches"].items()
        ):
            raise TrainingError(
                WHERE,
                "model and calibration differ between processes",
                "set the seed in the functions that return them",
            )
    received = job.exchange("windows", save({str(n): one.cpu() for n, one in windows.items()}))
    device = next(model.parameters()).device
    return {int(n): one.to(device) for content in received for n, one in load(content).items()}


def _digest(value: Any) -> str:
    leaves = tree_flatten(dict(value) if isinstance(value, Mapping) else value)[0]
    return hashlib.sha256("\n".join(map(digest, leaves)).encode()).hexdigest()


def _search_weights(technique: QuantizationAwareTraining) -> None:
    """Give weights of few bits the scale of least squared error, which is baked and deployed like a learned one."""
    owners = Counter(id(weight) for layer in technique.layers.values() for weight in weights_of(layer).values())
    for layer in technique.layers.values():
        quantizer: Any = layer.quantizer
        scheme = quantizer.scheme
        # At 8 bits clipping gains nothing. A shared weight is baked once, with the scale of one of its layers.
        if scheme.weight != "channel" or scheme.weight_bits == 8 or isinstance(layer, OWN_SCALES):
            continue
        weight: Any = layer.weight
        if owners[id(weight)] == 1:
            rows = as_rows(layer, folded_weight(layer, weight.detach()))
            scale = least_error_scale(rows, *scheme.weight_range)
            quantizer.weight_scale = one_per_channel(scale, rows.shape[1], scheme)


@torch.no_grad()
def least_error_scale(rows: Tensor, qmin: int, qmax: int, candidates: int = 100) -> Tensor:
    """Return per row the scale of least ``Σ (ŵ − w)²`` among ``k/candidates · max|w|/qmax``; 1 for rows of zeros."""
    rows = rows.to(kernels.compute_dtype(rows.dtype))
    peak = rows.abs().amax(1, keepdim=True) / qmax
    peak = torch.where(peak > 0, peak, torch.ones_like(peak))
    best, least = peak.clone(), torch.full_like(peak, torch.inf)
    # From the widest scale down, so that of equal errors the one that clips least is kept.
    for k in range(candidates, 0, -1):
        scale = peak * (k / candidates)
        error = (rows - (rows / scale).round_().clamp_(qmin, qmax).mul_(scale)).square_().sum(1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best.squeeze(1)
