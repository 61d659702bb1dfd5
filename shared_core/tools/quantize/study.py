"""Quantise a trained model and measure the result: quality, sensitivity of layers, attacks, latency, bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shared_core.distributed.job import Job, check_alone
from shared_core.errors import ConfigError
from shared_core.quantization import QatConfig, SelectivePlan, quantize_with_report
from shared_core.quantization.batch_norm import run
from shared_core.quantization.post_training.gptq import GptqConfig
from shared_core.quantization.post_training.quality import (
    judge_loss,
    latencies,
    layer_bytes,
    quantized_bytes,
    thresholds,
)
from shared_core.quantization.ranges.kv_cache import check_kv_cache
from shared_core.quantization.selection import layer_schemes, select_layers
from shared_core.tools.quantize import measures
from shared_core.tools.quantize.options import StudyOptions

Progress = Callable[[str], AbstractContextManager[Callable[[int, "int | None"], None]]]
"""Called with what is about to run; surrounds it and returns a function of (done, total)."""


@contextlib.contextmanager
def no_progress(_: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show nothing."""
    yield lambda done, total: None


@dataclass(frozen=True)
class StudyResult:
    """A quantised model and what was measured of it.

    Args:
        model: Quantised; its layers quantise their inputs too.
        values: The report, as plain values that JSON can hold.
        config: What the model was quantised with; a plan may have left out layers.
        plan: Which layers were left in float for the quality asked for; None without `largest_loss`.
    """

    model: nn.Module
    values: dict[str, Any]
    config: QatConfig
    plan: SelectivePlan | None


@dataclass(kw_only=True)
class QuantizationStudy:
    """One quantisation of a trained model, and what is to be measured of it.

    Args:
        network: Trained, in float; stays as it is.
        config: How to quantise it.
        gptq: Options of GPTQ, in place of rounding.
        data: Calibration batches: tensors, tuples or dicts of inputs.
        options: What is corrected, and what is measured.
        judge: Model → quality, a number.
        qat_model: The same model after quantisation-aware training, judged beside the quantised one.
        images: Batches (inputs, classes) on which accuracy under attack is measured.
        latency_inputs: Inputs of the forward that is timed; None: none is.
        allow_partial: Go on where less than half of the weights that multiply activations are within reach.
        progress: Shows what runs.
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
    judge: measures.Judge | None = None
    qat_model: nn.Module | None = None
    images: list[tuple[Tensor, Tensor]] | None = None
    latency_inputs: Any = None
    allow_partial: bool = False
    progress: Progress = no_progress
    job: Job = field(default_factory=Job)

    def check(self) -> None:
        """Refuse options that break their rule, before batches are loaded and quality is measured."""
        thresholds(self.options.accept)
        if self.gptq or self.config.clip_gelu or static_input(self.network, self.config) is None:
            check_alone("quantize", " where no ranges are observed, with --method and with clip_gelu", self.job.size)
        if self.options.kv_cache is not None:
            check_kv_cache(self.network, self.options.kv_cache, "quantize")
        if self.options.largest_loss is not None:
            measures.check_plannable(self.config)

    def share(self) -> None:
        """Calibrate this process's share for the main one, which does all the rest."""
        self._quantized(self.config, candidate=True, job=self.job)

    def run(self) -> StudyResult:
        """Quantise and measure."""
        self.check()
        # Once before the long part: inputs that the model does not take are told at once.
        if self.latency_inputs is not None:
            run(self.network, self.latency_inputs, "quantize: latency: the inputs of the model")
        measured = {"float": self._measured("float", self.network)}
        with self.progress("calibration") as advance:
            model, report = self._quantized(self.config, advance, job=self.job)
        costs = self._costs(report)
        config, plan, keep = self.config, None, dict[str, str]()
        if costs is not None and self.options.largest_loss is not None:
            config, plan, keep = self._planned(costs)
            # Again, with the layers that the plan leaves in float.
            model, report = self._quantized(config)
        measured["quantized"] = self._measured("quantized", model)
        if self.qat_model is not None:
            measured["qat"] = self._measured("qat", self.qat_model)
        values = {
            "config": config.to_dict(),
            **dataclasses.asdict(report),
            **self._quality({name: quality for name, (quality, _) in measured.items()}),
            **self._latency(model),
            **self._bytes(model),
            "sensitivity": None if costs is None else {"metric": self.options.sensitivity or "rmse", "layers": costs},
            "plan": None if plan is None else measures.plan_values(plan, keep, self.options.mode),
            "attacks": self._attacks([row for _, rows in measured.values() for row in rows]),
        }
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
            # Candidates of a plan are judged by quality alone.
            measure_outputs=not candidate,
            gptq=self.gptq,
            kv_cache=None if candidate else self.options.kv_cache,
            allow_partial=self.allow_partial,
            progress=show,
            job=job,
        )

    def _measured(self, name: str, model: nn.Module) -> tuple[float | None, list[dict[str, Any]]]:
        """Return (quality, rows of accuracy under attack), as far as they are asked for."""
        quality = None if self.judge is None else self.judge(model)
        if name == "float" and quality is not None and not math.isfinite(quality):
            raise ConfigError("quantize", f"the quality of the float model must be finite, got {quality}", "see --eval")
        rows: list[dict[str, Any]] = []
        if self.images is not None:
            with self.progress(f"attacks on the {name} model") as advance:
                for row in measures.attacked(name, model, self.network, self.images, self.options.attack_settings()):
                    rows.append(row)
                    advance(len(rows), None)
        return quality, rows

    def _attacks(self, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        return None if self.images is None else {**self.options.attack_settings(), "rows": rows}

    def _costs(self, report: Any) -> dict[str, dict[int, float]] | None:
        if self.data is None or (self.options.sensitivity is None and self.options.largest_loss is None):
            return None
        with self.progress("sensitivity of layers") as advance:
            return measures.sensitivities(self.network, report, self.data, self.options.sensitivity or "rmse", advance)

    def _planned(self, costs: dict[str, dict[int, float]]) -> tuple[QatConfig, SelectivePlan, dict[str, str]]:
        """Return (config without the layers that stay in float, the plan, layers kept by rules of thumb)."""
        if self.data is None or self.judge is None or self.options.largest_loss is None:
            raise ConfigError("quantize", "largest_loss must come with judge and data, got it without", "add them")
        keep = {} if self.options.all_layers else measures.kept_in_float(self.network, costs, self.data[0])
        with self.progress("plan"):
            config, plan = measures.selective_plan(
                self.network,
                self.config,
                costs,
                lambda chosen: self._quantized(chosen, candidate=True)[0],
                self.judge,
                largest_loss=self.options.largest_loss,
                mode=self.options.mode,
                keep=keep,
            )
        return config, plan, keep

    def _quality(self, quality: dict[str, float | None]) -> dict[str, Any]:
        before = quality["float"]
        verdicts = {
            name: _without_nan(dataclasses.asdict(judge_loss(before, value, self.options.accept, self.options.mode)))
            for name, value in quality.items()
            if name != "float" and value is not None and before is not None
        }
        return {"quality": quality, "verdicts": verdicts}

    def _latency(self, model: nn.Module) -> dict[str, Any]:
        if self.latency_inputs is None:
            return {"milliseconds": {}, "machine": {}}
        return {
            "milliseconds": latencies(self.network, model, self.latency_inputs),
            "machine": measures.machine(),
        }

    def _bytes(self, model: nn.Module) -> dict[str, Any]:
        """Return the bytes of the whole model and of each layer."""
        layers = {name: list(sizes) for name, sizes in layer_bytes(model).items()}
        whole = {"float": model_bytes(self.network), "quantized": quantized_bytes(model)}
        return {"bytes": whole, "layer_bytes": layers}


def static_input(network: nn.Module, config: QatConfig) -> str | None:
    """Return the first layer whose inputs have ranges, which only calibration batches show; None: no layer has."""
    schemes = layer_schemes(config, select_layers(network, config.include, config.skip, config.min_size)[0])
    return next((name for name, scheme in schemes.items() if scheme.has_range), None)


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's state; a shared tensor counts once."""
    # By address: a tied tensor stands in the state dict under two names.
    tensors = {value.data_ptr(): value.numel() * value.element_size() for value in model.state_dict().values()}
    return sum(tensors.values())


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
