"""`eff quantize`: quantize a trained model without training."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.cli.arguments import JudgedOptions, bar, command_with_options, takes
from shared_core.cli.export import BETWEEN, load_quantized
from shared_core.cli.loading import check_new, made_up_inputs, save_folder, user_batches
from shared_core.config.options import option
from shared_core.errors import CompatibilityError, ConfigError, MissingExtraError, require
from shared_core.files.journal import read_object
from shared_core.files.json_yaml import json_text
from shared_core.libraries import optional
from shared_core.printing import counted, echo, listed
from shared_core.tools.quantize_options import StudyOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn  # `eff --help` must not wait for torch

    from shared_core.quantization import QatConfig
    from shared_core.quantization.post_training.gptq import GptqConfig
    from shared_core.tools.quantize import QuantizationStudy, StudyResult

REPORT_FILE = "eff_quantization.json"
PLAN_FILE = "plan.yaml"
_WITHOUT_METHOD = (
    "plan", "equalize", "correct_bias", "sensitivity", "largest_loss", "average_bits", "all_layers", "attack",
    "latency",
)  # fmt: skip
_OF_TRAINING = ("begin", "freeze_observers", "freeze_bn", "rounding", "gate", "calibration_batches", "keep", "init")
QuantizeCommand = command_with_options("qat", lambda: ("scheme", "weights", "inputs", *_OF_TRAINING))


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(StudyOptions, JudgedOptions):
    """Options of `eff quantize`."""

    key: ClassVar[str] = "eff quantize"
    technique: ClassVar[str] = "qat"
    needs: ClassVar = {
        "sensitivity": ("calibration",), "largest_loss": ("evaluate", "calibration"), "method": ("calibration",),
        "correct_bias": ("calibration",), "kv_cache": ("calibration",), "batches": ("calibration",),
        "accept": ("evaluate",), "mode": ("evaluate",),
        "attack_eps": ("attack",), "attack_range": ("attack",), "attack_steps": ("attack",),
        "gptq_grid": ("method",), "average_bits": ("calibration",), "loss": ("sensitivity",),
        "loss_data": ("sensitivity",),
    }  # fmt: skip
    without: ClassVar = {"method": _WITHOUT_METHOD, "largest_loss": ("plan",), "average_bits": ("plan",)}

    calibration: str | None = option(
        None, "module:function that returns batches of inputs: tensors, tuples or dicts.", reads="function"
    )
    loss: str | None = option(
        None,
        "For --sensitivity hessian: module:function of (model, batch) that returns the loss; default: output.loss.",
        reads="function",
    )
    loss_data: str | None = option(
        None,
        "For --sensitivity hessian: module:function that returns its batches; default: --calibration.",
        reads="function",
    )
    scheme: str | None = option(
        None,
        "As --qat_scheme: int8, int8_weight, W4A16, MXFP4A16, ... Default: int8, or the scheme of --method. For a free "
        "pair: --set weights=FORMAT --set inputs=FORMAT.",
    )
    method: str | None = option(None, "Quantize with gptq instead of rounding to nearest.")
    gptq_grid: Literal["published", "pinned"] | None = option(
        None,
        "With --method gptq. published: the scales of the GPTQ paper, saved with the weights. pinned: scales that "
        "rounding the result gives again, with a larger error. Default: published.",
    )
    set_options: tuple[str, ...] = option(
        (), "An option of --method, such as damping=0.05, or of qat. Repeatable.", flag="--set"
    )
    plan: Path | None = option(None, "A bit plan (YAML). It sets the scheme unless --scheme is given.", reads="path")
    qat: Path | None = option(None, "Folder or .ckpt of the same model trained with qat, to compare.", reads="path")
    attack: str | None = option(
        None,
        "module:function that returns batches (images, classes). Measures accuracy under FGSM and PGD.",
        reads="function",
    )
    latency: bool = option(False, "Time a forward pass in float, bf16 and quantized.")
    report: Path | None = option(None, "Write a page with tables and plots: an .html file, and the same as .md.")

    def validate(self) -> None:
        """Check combinations that the table of option pairs does not cover."""
        super().validate()
        is_judged = self.qat is None or self.evaluate or self.attack
        self.require(is_judged, "--qat needs --eval or --attack", "add one of them")
        given = [self.named(name)[1] for name in ("loss", "loss_data") if getattr(self, name) is not None]
        rule = f"{' and '.join(given)} only affect --sensitivity hessian, got {self.sensitivity}"
        self.require(self.sensitivity == "hessian" or not given, rule, "leave them out")
        rule = f"--method must be gptq, got {self.method!r}"
        self.require(self.method in (None, "gptq"), rule, "use llm-compressor for AWQ and SmoothQuant")


@takes(QuantizeOptions)
def quantize(asked: QuantizeOptions, technique: Mapping[str, str]) -> None:
    """Quantize a trained model without training, and report what it costs.

    The folder holds model.safetensors, eff_deployment.json for `eff export`, with --method gptq eff_deployment.tensors
    with its scales, eff_quantization.json with the report and, with --largest-loss or --average-bits, plan.yaml. The
    weights are floats, already rounded to the grid, and load into the plain model. --equalize and --correct-bias fuse
    batch norms, so these weights load into the model without batch norms. A Hugging Face folder is saved as one. Each
    tensor keeps its dtype if that holds the rounded values exactly, and is float32 otherwise. With --scheme fp16 or
    bf16 the weights have that dtype.

    Under torchrun, the processes share the calibration batches.
    """
    from shared_core.distributed.job import Job
    from shared_core.quantization.post_training.quality import quantized_bytes
    from shared_core.reports.page import check_place, write_page
    from shared_core.reports.quantization_page import print_study, sections
    from shared_core.tools.measuring import state_bytes
    from shared_core.tools.quantize import QuantizationStudy

    job = Job.joined()
    check_new(asked.out, asked.key)
    if asked.report is not None:
        check_place(asked.report, "eff quantize: --report", made=asked.out)
        optional("matplotlib", "plots", "eff quantize: --report")
    pairs = [*(f"{name}={value}" for name, value in technique.items()), *asked.set_options]
    config, gptq = _configs(asked, _options(pairs))
    network, inputs, folder = asked.open()
    float_bytes = state_bytes(network)
    study = QuantizationStudy(
        network=network, config=config, gptq=gptq, options=asked, job=job,
        allow_partial=asked.allow_partial, progress=functools.partial(bar, is_shown=job.is_main),
    )  # fmt: skip
    _check(study, asked, inputs, is_folder=folder is not None)
    dtypes = {name: value.dtype for name, value in network.state_dict().items()}
    if folder is not None:
        network.float()  # for exact quantized values
    _load_data(study, asked, inputs)
    with job:
        if not job.is_main:
            study.share()
            return
        result = study.run()
    report = {**asked.asked(), "set": pairs, "scheme": asked.scheme if asked.method else config.preset_or_formats}
    notes = _narrow_(result.model, dtypes, result.values["ranges"])
    plain = {
        name: {key: value for key, value in entry.items() if key != "weight_grids"}  # too long for text
        for name, entry in result.values["ranges"].items()
    }
    values = {"asked": report, **result.values, "ranges": plain, "notes": [*notes, *result.values["notes"]]}
    values["bytes"] = {"float": float_bytes, "quantized": quantized_bytes(result.model)}
    _write(asked, result, values, folder, study.data)
    if asked.report is not None:
        write_page(asked.report, f"Quantization of {asked.model}", sections(values))
    if asked.as_json:
        echo(json_text(values))
        return
    print_study(asked.out, values, every_layer=asked.every_layer)
    if asked.report is not None:
        echo(f"Wrote {asked.report} and {asked.report.with_suffix('.md')}.")


def _check(study: QuantizationStudy, asked: QuantizeOptions, inputs: Any, *, is_folder: bool) -> None:
    """Check what depends on the model, before anything is loaded or measured."""
    if is_folder and (asked.equalize or asked.correct_bias):
        _check_keeps_its_layers(study.network, "--equalize" if asked.equalize else "--correct-bias")
    asked.require_inputs(is_folder or inputs is not None or not asked.latency, "--latency")
    try:
        study.check()
    except CompatibilityError as error:
        hint = "a folder's model is on the CPU; a module:function can put its model elsewhere" if is_folder else ""
        raise CompatibilityError(str(error), remedy=hint) from error


def _load_data(study: QuantizationStudy, asked: QuantizeOptions, inputs: Any) -> None:
    """Load the data for calibration, quality and timing."""
    from shared_core.files.user_code import function
    from shared_core.tools.quantize import SENSITIVITY_BATCHES, static_input

    if asked.qat is not None:
        study.qat_model = copy.deepcopy(study.network)
        load_quantized(study.qat_model, asked.qat, "eff quantize: --qat")
    static = None if asked.calibration is not None else static_input(study.network, study.config)
    rule = f"--calibration must be given with {study.config.formats}, whose inputs have ranges ({static})"
    remedy = "name a function that returns batches, or choose --scheme int8_weight or int8_dynamic, without ranges"
    asked.require(static is None, rule, remedy)
    study.judge = asked.judge()
    if asked.attack is not None:
        study.images = _attack_data(user_batches(asked.attack, "eff quantize: --attack"))
    if asked.calibration is not None:
        batches = user_batches(asked.calibration, "eff quantize: --calibration")
        study.data = list(_loaded(batches, asked.batches, study.job.is_main))
    if asked.loss is not None:
        study.loss = function(asked.loss, "eff quantize: --loss", "model", "batch")
    if asked.loss_data is not None:
        batches = user_batches(asked.loss_data, "eff quantize: --loss-data")
        study.loss_data = list(itertools.islice(batches, SENSITIVITY_BATCHES))
    if asked.latency:
        given = inputs if inputs is not None else study.data[0] if study.data else None
        study.latency_inputs = made_up_inputs(study.network, asked.key) if given is None else given


def _write(
    asked: QuantizeOptions, result: StudyResult, values: dict[str, Any], folder: Path | None, data: list[Any] | None
) -> None:
    import torch

    from shared_core.checkpoint_formats.plain import write_deployment

    between = _between(result, data, values["notes"])

    def add(temporary: Path) -> None:
        if values["ranges"]:
            kept = {BETWEEN: between} if between else {}
            write_deployment(str(temporary), {"qat": {"ranges": result.values["ranges"], **kept}})
        if (file := temporary / "config.json").is_file():
            # transformers would load all weights in the dtype of the first, which may round others
            dtype = functools.reduce(torch.promote_types, [value.dtype for value in result.model.parameters()])
            config = {**read_object(file), "dtype": str(dtype).removeprefix("torch.")}
            file.write_text(json_text(config) + "\n", encoding="utf-8")
        if result.plan is not None:
            result.plan.to_yaml(temporary / PLAN_FILE, scheme=str(result.config.scheme))

    save_folder(asked.out, result.model, folder, {REPORT_FILE: values}, asked.key, add=add)


def _configs(asked: QuantizeOptions, options: dict[str, Any]) -> tuple[QatConfig, GptqConfig | None]:
    """Return (how to quantize, GPTQ's options if it is used)."""
    from shared_core.quantization import BitPlan, QatConfig
    from shared_core.quantization.post_training.gptq import GptqConfig
    from shared_core.quantization.post_training.quantize import as_config

    gptq = None
    scheme, method = asked.scheme, asked.method
    if method == "gptq":
        own: dict[str, Any] = {name: options.pop(name) for name in ("damping", "actorder") if name in options}
        own |= {} if asked.gptq_grid is None else {"grid": asked.gptq_grid}
        gptq = GptqConfig.from_dict(own)
        options = {**({} if "weights" in options else {"scheme": "int4_weight"}), **_named(scheme), **options}
    else:
        default = {} if "weights" in options else {"scheme": "int8"}
        planned = default if asked.plan is None else BitPlan.options_from_yaml(asked.plan)
        options = {**planned, **_named(scheme), **options}
    config = QatConfig.from_dict(options) if method else as_config(options)
    useless = [name for name in _OF_TRAINING if getattr(config, name) != getattr(QatConfig, name)]
    rule = f"--set must name options of quantization, got {', '.join(useless)}, which only affect training"
    asked.require(not useless, rule, "leave it out")
    return config, gptq


def _named(scheme: str | None) -> dict[str, Any]:
    return {} if scheme is None else {"scheme": scheme}


def _attack_data(batches: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the user's batches as a list."""
    from torch import Tensor

    held = list(batches)
    for batch in held:
        is_pair = isinstance(batch, tuple | list) and [isinstance(part, Tensor) for part in batch] == [True, True]
        rule = f"--attack must return pairs of tensors (inputs, class indices), got {type(batch).__name__}"
        require(is_pair, "eff quantize", rule)
    require(held, "eff quantize", "--attack must return at least one batch, got none", "return some images")
    return [(x, y) for x, y in held]


def _narrow_(model: nn.Module, dtypes: Mapping[str, torch.dtype], ranges: Mapping[str, Any]) -> list[str]:
    """Cast tensors to their format's dtype, or the one they came in, where that is exact. Return notes."""
    import torch

    from shared_core.modules.weight_views import weights_of
    from shared_core.quantization.low_bit import HALF_DTYPES

    modules = dict(model.named_modules())
    halves = {
        name: HALF_DTYPES[entry["weight"]] for name, entry in ranges.items() if entry.get("weight") in HALF_DTYPES
    }
    formats = {f"{name}.{own}": dtype for name, dtype in halves.items() for own in weights_of(modules[name])}
    came = {str(dtype).removeprefix("torch.") for dtype in dtypes.values() if dtype in HALF_DTYPES.values()}
    wide = []
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        dtype = formats.get(name, dtypes.get(name, value.dtype))
        if torch.equal(value.to(dtype).to(value.dtype), value):
            value.data = value.data.to(dtype)
        else:
            wide.append(name)
    text = f"{counted(len(wide), 'weight')} became float32, because {listed(sorted(came))} cannot hold quantized values"
    computed = f"the weights came in {listed(sorted(came))}; everything was measured in float32"
    return [f"{text} exactly"] * bool(wide) + [computed] * bool(came)


def _check_keeps_its_layers(network: nn.Module, flag: str) -> None:
    from torch import nn

    norm = next((name for name, at in network.named_modules() if isinstance(at, nn.modules.batchnorm._BatchNorm)), None)
    rule = f"{flag} must be left out for a folder whose model has batch norms, because it fuses them, got {norm}"
    require(norm is None, "eff quantize", rule, "from_pretrained would create new ones")


def _options(pairs: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        require(name and equals and value, "eff quantize", f"--set must be NAME=VALUE, got {pair!r}")
        rule = f"{name} must be given once, got {options.setdefault(name, value)} and {value}"
        require(options[name] == value, "eff quantize", rule)
    return options


def _loaded(batches: Iterable[Any], count: int, is_shown: bool) -> Iterator[Any]:
    with bar("loading batches", is_shown=is_shown) as advance:
        for number, batch in enumerate(itertools.islice(batches, max(count, 0)), 1):
            yield batch
            advance(number, None)


def _between(result: StudyResult, batches: list[Any] | None, notes: list[str]) -> dict[str, tuple[float, int]]:
    """Return the codes that `eff export` gives tensors between convolutions."""
    from shared_core.tools.export.onnx import codes_between_layers

    if not batches or not result.values["ranges"]:
        return {}
    try:
        with bar("codes between convolutions"):
            return codes_between_layers(result.model, batches)
    except (CompatibilityError, ConfigError, MissingExtraError) as error:
        notes.append(f"eff export to onnx will need --calibration: {error}")
        return {}
