"""Quantize a trained model and measure it: quality, layer sensitivity, a plan by quality, attacks, latency, bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shared_core.distributed.job import Job, check_alone
from shared_core.errors import ConfigError, TrainingError
from shared_core.hardware import cpu_capabilities
from shared_core.modules.calls import call_model, loss_of
from shared_core.modules.weight_views import PACKED
from shared_core.printing import listed
from shared_core.quantization import (
    BitPlan,
    QatConfig,
    QuantizationReport,
    SelectivePlan,
    hessian_trace,
    keep_high,
    layer_sensitivity,
    plan_bits,
    plan_by_quality,
    quantize_with_report,
)
from shared_core.quantization.batch_norm import run
from shared_core.quantization.post_training.adversarial import adversarial_accuracy
from shared_core.quantization.post_training.gptq import GptqConfig
from shared_core.quantization.post_training.quality import (
    judge_loss,
    latencies,
    layer_bytes,
    quantized_bytes,
    thresholds,
)
from shared_core.quantization.post_training.sensitivity import Loss, TraceEstimate
from shared_core.quantization.ranges.kv_cache import check_kv_cache
from shared_core.quantization.ranges.saved_ranges import saved_scheme
from shared_core.quantization.rounding import quantize_weight
from shared_core.quantization.selection import layer_schemes, select_layers
from shared_core.tools.measuring import state_bytes
from shared_core.tools.quantize_options import StudyOptions

SENSITIVITY_BATCHES = 8
CANDIDATES = (3, 4, 8)
"""Bits that a plan for an average gives weights."""
Judge = Callable[[nn.Module], float]
Costs = dict[str, dict[int, float]]
"""Layer → bits → cost."""


Progress = Callable[[str], AbstractContextManager[Callable[[int, "int | None"], None]]]
"""Called with a description of the next task. A context manager that yields a function of (done, total)."""


@dataclass(frozen=True)
class StudyResult:
    """A quantized model and its measurements."""

    model: nn.Module
    values: dict[str, Any]
    config: QatConfig
    plan: BitPlan | None


@dataclass(kw_only=True)
class QuantizationStudy:
    """Quantize a trained model and measure the result.

    Args:
        network: A trained float model. It is not changed.
        config: How to quantize it.
        gptq: Options of GPTQ, used instead of rounding.
        data: Calibration batches: tensors, tuples or dicts of inputs.
        options: Corrections and measurements.
        judge: Function from a model to its quality, a number.
        loss: Function of (model, batch) that returns its mean loss, for sensitivity by the Hessian. None: the ``loss``
            of the model's output.
        loss_data: Batches for it. None: `data`.
        qat_model: The same model after quantization-aware training, for comparison.
        images: Batches (inputs, classes) for measuring accuracy under attack.
        latency_inputs: Inputs for timing a forward pass; None: not timed.
        allow_partial: Continue if less than half of the weights that multiply activations are in scope.
        progress: Shows the current task.
        job: Other processes, which calibrate with this one; they call `share`.

    Example:
        >>> import torch
        >>> study = QuantizationStudy(network=nn.Sequential(nn.Linear(64, 10)), config=QatConfig(scheme="int8_weight"))
        >>> study.run().values["bytes"]
        {'float': 2600, 'quantized': 720}
    """

    network: nn.Module
    config: QatConfig
    gptq: GptqConfig | None = None
    data: list[Any] | None = None
    options: StudyOptions = field(default_factory=StudyOptions)
    judge: Judge | None = None
    loss: Loss | None = None
    loss_data: list[Any] | None = None
    qat_model: nn.Module | None = None
    images: list[tuple[Tensor, Tensor]] | None = None
    latency_inputs: Any = None
    allow_partial: bool = False
    progress: Progress = lambda what: contextlib.nullcontext(lambda done, total: None)
    job: Job = field(default_factory=Job)

    def check(self) -> None:
        """Raise an error for invalid options, before batches are loaded and quality is measured."""
        thresholds(self.options.accept)
        if self.gptq or self.config.clip_gelu or static_input(self.network, self.config) is None:
            check_alone("quantize", " where no ranges are observed, with --method and with clip_gelu", self.job.size)
        if self.options.kv_cache is not None:
            check_kv_cache(self.network, self.options.kv_cache, "quantize")
        config = self.config
        is_pair = config.weights is not None or config.inputs != "auto"
        plans = {"largest_loss": self.options.largest_loss, "average_bits": self.options.average_bits}
        asked = next((name for name, value in plans.items() if value is not None), None)
        if asked is not None and (not config.has_integers or config.overrides or is_pair):
            got = f"{config.formats} and overrides={list(config.overrides)}"
            rule = f"{asked} needs an int scheme without overrides, weights and inputs: one width, got"
            raise ConfigError("quantize", f"{rule} {got}")

    def share(self) -> None:
        """Calibrate this process's share. The main process does the rest."""
        self._quantized(self.config, candidate=True, job=self.job)

    def run(self) -> StudyResult:
        """Quantize and measure."""
        self.check()
        # Once before the long part, so that unsuitable inputs are reported at once.
        if self.latency_inputs is not None:
            run(self.network, self.latency_inputs, "quantize: latency: the inputs of the model")
        measured = {"float": self._measured("float", self.network)}
        with self.progress("calibration") as advance:
            model, report = self._quantized(self.config, advance, job=self.job)
        found = self._costs(report)
        costs, errors, traces = (None, None, None) if found is None else found
        config, plan, plan_values = self.config, None, None
        if costs is not None and self.options.largest_loss is not None:
            config, selected, keep = self._planned(costs)
            plan, plan_values = selected.plan, self._plan_values(selected, keep)
        elif costs is not None and self.options.average_bits is not None:
            config, plan, keep = self._allocated(costs, report, self.options.average_bits)
            plan_values = {
                "bits": plan.bits, "average_bits": plan.average_bits, "conversions": plan.conversions, "kept": keep,
                "curves": {},
            }  # fmt: skip
        if plan is not None:
            # Again, with the bits of the plan.
            model, report = self._quantized(config)
        measured["quantized"] = self._measured("quantized", model)
        if self.qat_model is not None:
            measured["qat"] = self._measured("qat", self.qat_model)
        values = {
            "config": config.to_dict(),
            "formats": config.formats,
            **dataclasses.asdict(report),
            **self._quality({name: quality for name, (quality, _) in measured.items()}),
            **self._latency(model),
            **self._bytes(model),
            "sensitivity": None
            if costs is None
            else {
                "metric": self.options.sensitivity or "rmse",
                "layers": costs,
                "traces": None if traces is None else {name: vars(one) for name, one in traces.items()},
                "errors": errors,
            },
            "plan": plan_values,
            "attacks": None,
        }
        if self.images is not None:
            rows = [row for _, rows in measured.values() for row in rows]
            values["attacks"] = {**self.options.attack_settings(), "rows": rows}
        return StudyResult(model, values, config, plan)

    def _quantized(
        self,
        config: QatConfig,
        show: Callable[[int, int], None] | None = None,
        *,
        candidate: bool = False,
        job: Job | None = None,
    ) -> tuple[nn.Module, Any]:
        return quantize_with_report(
            self.network,
            config,
            self.data,
            num_batches=self.options.batches,
            equalize=self.options.equalize,
            correct_bias=self.options.correct_bias,
            # Candidates of a plan are judged only by quality.
            measure_outputs=not candidate,
            gptq=self.gptq,
            keep_sensitive=self.options.keep_sensitive and self.options.average_bits is None,
            kv_cache=None if candidate else self.options.kv_cache,
            allow_partial=self.allow_partial,
            progress=show,
            job=job,
        )

    def _measured(self, name: str, model: nn.Module) -> tuple[float | None, list[dict[str, Any]]]:
        """Return (quality, rows of accuracy under attack), if requested."""
        quality = None if self.judge is None else self.judge(model)
        if name == "float" and quality is not None and not math.isfinite(quality):
            raise ConfigError("quantize", f"the quality of the float model must be finite, got {quality}", "see --eval")
        rows: list[dict[str, Any]] = []
        if self.images is not None:
            with self.progress(f"attacks on the {name} model") as advance:
                for row in self._attacked(name, model, self.images):
                    rows.append(row)
                    advance(len(rows), None)
        return quality, rows

    def _attacked(self, name: str, model: nn.Module, images: list[tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
        """Yield one row per attack, strength and source of gradients: the model's own or the float model's."""
        settings = self.options.attack_settings()
        strengths = settings.pop("eps")
        # For the float model both sources are the same.
        origins = {"itself": None} if model is self.network else {"itself": None, "float": self.network}
        attacks: tuple[Literal["fgsm", "pgd"], ...] = ("fgsm", "pgd")
        for attack, eps, (origin, source) in itertools.product(attacks, strengths, origins.items()):
            found = adversarial_accuracy(model, images, eps, attack=attack, source=source, **settings)
            yield {"attack": attack, "eps": eps, "model": name, "made_on": origin, **dataclasses.asdict(found)}

    def _costs(self, report: QuantizationReport) -> tuple[Costs, Costs | None, dict[str, TraceEstimate] | None] | None:
        """Return the cost of quantizing only one layer's weight in its scheme, if asked for.

        For the Hessian, also the standard errors of the costs, and the traces.

        Measured on the first `SENSITIVITY_BATCHES` batches. Attention and recurrent layers are left out, because one
        cost cannot describe several weights.
        """
        options = self.options
        asked = (options.sensitivity, options.largest_loss, options.average_bits)
        if self.data is None or all(one is None for one in asked):
            return None
        network, number, metric = self.network, itertools.count(1), options.sensitivity or "rmse"
        widths = {entry["name"]: entry["weight_bits"] for entry in report.layers}
        names = [name for name in widths if not isinstance(network.get_submodule(name), PACKED)]  # of one weight
        schemes = {network.get_submodule(name): saved_scheme(report.ranges[name], "quantize") for name in names}
        # without an average, the requested width is not used: a layer's scheme has its own
        bits = [8] if options.average_bits is None else [*CANDIDATES]
        held = self.data[:SENSITIVITY_BATCHES]
        traces = self._traces(names) if metric == "hessian" else None
        total = len(names) * len(bits) * (1 if traces is None else 2)
        with self.progress("sensitivity of layers") as advance:

            def in_its_scheme(module: nn.Module, weight: Tensor, width: int) -> Tensor:
                advance(next(number), total)
                scheme = schemes[module]
                if options.average_bits is not None:
                    scheme = dataclasses.replace(scheme, weight_bits=width)
                return quantize_weight(module, weight, scheme)

            def measured(traces: dict[str, TraceEstimate] | None) -> Costs:
                costs = layer_sensitivity(
                    network, held, metric=metric, bits=bits, layers=names, quantize=in_its_scheme, traces=traces
                )
                if options.average_bits is not None:
                    return costs
                return {name: {widths[name]: cost[8]} for name, cost in costs.items()}

            costs = measured(traces)
            if traces is None:
                return costs, None, None
            # the error of the weights is exact, so a cost is as uncertain as its trace
            spread = {name: dataclasses.replace(one, trace=one.standard_error) for name, one in traces.items()}
            return costs, measured(spread), traces

    def _traces(self, names: list[str]) -> dict[str, TraceEstimate]:
        """Return the trace of each layer's block of the Hessian, on the first batches."""
        data = self.data if self.loss_data is None else self.loss_data
        with self.progress("curvature of layers"):
            return hessian_trace(
                self.network, self.loss or _own_loss, (data or [])[:SENSITIVITY_BATCHES], layers=names,
                probes=self.options.probes,
            )  # fmt: skip

    def _allocated(
        self, costs: Costs, report: QuantizationReport, budget: float
    ) -> tuple[QatConfig, BitPlan, dict[str, str]]:
        """Return (config with the bits of each layer, the plan of least cost, layers with 8 bits by rules of thumb)."""
        sizes = {entry["name"]: entry["weights"] for entry in report.layers}
        # attention and recurrent layers have no cost, and keep the bits of their scheme
        fixed = {entry["name"]: entry["weight_bits"] for entry in report.layers if entry["name"] not in costs}
        found = keep_high(self.network, self.data[0]) if self.options.keep_sensitive and self.data else {}
        keep = {name: why for name, why in found.items() if name in costs}
        fixed |= dict.fromkeys(keep, max(CANDIDATES))
        least = sum(size * fixed.get(name, min(CANDIDATES)) for name, size in sizes.items()) / sum(sizes.values())
        if budget < least:
            rule = f"average_bits must be at least {least:.4g} with {listed(fixed)} at fixed bits, got {budget}"
            raise ConfigError("quantize", rule, "raise it" + (", or keep no sensitive layers" if keep else ""))
        plan = plan_bits(costs, sizes, budget, CANDIDATES, fixed=fixed)
        return dataclasses.replace(self.config, overrides=plan.qat_options()["overrides"]), plan, keep

    def _planned(self, costs: Costs) -> tuple[QatConfig, SelectivePlan, dict[str, str]]:
        """Return (config without the layers that stay in float, the plan, layers kept by rules of thumb)."""
        judge, largest_loss, config = self.judge, self.options.largest_loss, self.config
        if self.data is None or judge is None or largest_loss is None:
            raise ConfigError("quantize", "largest_loss needs judge and data", "add them")
        kept = {} if self.options.all_layers else keep_high(self.network, self.data[0])
        keep = {name: why for name, why in kept.items() if name in costs}
        if costs.keys() <= keep.keys():
            text = f"all {len(costs)} are kept in float (first, last, after GELU, …)"
            rule = f"largest_loss must have layers to choose from, but {text}"
            raise ConfigError("quantize", rule, "set all_layers")

        def with_only(layers: Collection[str]) -> QatConfig:
            return dataclasses.replace(config, skip=(*config.skip, *(name for name in costs if name not in layers)))

        with self.progress("plan"):
            found = plan_by_quality(
                self.network,
                lambda model: self._sign * judge(model),  # it expects larger to be better
                costs,
                largest_loss=largest_loss,
                bits=next(iter(next(iter(costs.values())))),
                keep=keep,
                apply=lambda _, bits: self._quantized(with_only(bits), candidate=True)[0],
            )
        if not found.plan.quantized:
            rule = f"largest_loss {largest_loss} must leave a layer to quantize, but each one loses more"
            raise TrainingError("quantize", rule, "raise it")
        return with_only(found.plan.quantized), found, keep

    @property
    def _sign(self) -> float:
        return 1.0 if self.options.mode == "max" else -1.0

    def _plan_values(self, found: SelectivePlan, keep: Mapping[str, str]) -> dict[str, Any]:
        """Return a plan and its curves as plain values, with the user's sign of quality."""
        curves = {
            start: [{**dataclasses.asdict(point), "quality": self._sign * point.quality} for point in points]
            for start, points in found.curves.items()
        }
        plan = found.plan
        return {
            "bits": plan.bits, "average_bits": plan.average_bits, "conversions": found.conversions, "kept": dict(keep),
            "curves": curves,
        }  # fmt: skip

    def _quality(self, quality: dict[str, float | None]) -> dict[str, Any]:
        before = quality["float"]
        verdicts = {}
        for name, value in quality.items():
            if name != "float" and value is not None and before is not None:
                found = dataclasses.asdict(judge_loss(before, value, self.options.accept, self.options.mode))
                verdicts[name] = {key: None if each != each else each for key, each in found.items()}  # NaN
        return {"quality": quality, "verdicts": verdicts}

    def _latency(self, model: nn.Module) -> dict[str, Any]:
        if self.latency_inputs is None:
            return {"milliseconds": {}, "machine": {}}
        able = cpu_capabilities()
        names = ("avx2", "avx512_f", "avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "amx_bf16", "i8mm", "bf16")
        machine = {
            "cpu": str(able.get("cpu_name", "unknown")),
            "instructions": ", ".join(name for name in names if able.get(name)) or "none of them",
            "torch": torch.__version__,
        }
        return {"milliseconds": latencies(self.network, model, self.latency_inputs), "machine": machine}

    def _bytes(self, model: nn.Module) -> dict[str, Any]:
        """Return the bytes of the whole model and of each layer."""
        layers = {name: list(sizes) for name, sizes in layer_bytes(model).items()}
        whole = {"float": state_bytes(self.network), "quantized": quantized_bytes(model)}
        return {"bytes": whole, "layer_bytes": layers}


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss in a model's output."""
    output = call_model(model, batch, "quantize: batches of sensitivity hessian", "or pass loss(model, batch)")
    found = loss_of(output)
    if not isinstance(found, Tensor):
        rule = "loss must be given for sensitivity hessian, because the model's output has none for these batches"
        raise ConfigError("quantize", rule, "name a function of (model, batch), or add labels to the batches")
    return found


def static_input(network: nn.Module, config: QatConfig) -> str | None:
    """Return the first layer whose input ranges need calibration batches; None if there is none."""
    schemes = layer_schemes(config, select_layers(network, config.include, config.skip, config.min_size)[0])
    return next((name for name, scheme in schemes.items() if scheme.has_range), None)
