"""`eff quantize`: a trained model quantised without training, from the command line."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import (
    AllowPartial,
    AsJson,
    Evaluate,
    Model,
    Out,
    Weights,
    bar,
    command_with_options,
    given_options,
)
from shared_core.cli.loading import check_new, function, open_model, save_network, score, user_batches
from shared_core.cli.quantized_models import BETWEEN, load_quantized
from shared_core.cli.shrink import made_up_inputs
from shared_core.errors import CompatibilityError, ConfigError, MissingExtraError
from shared_core.files.json_yaml import json_text
from shared_core.libraries import optional
from shared_core.printing import echo
from shared_core.reports.page import check_place, write_page
from shared_core.reports.quantization_page import sections, tell

if TYPE_CHECKING:
    from torch import Tensor, nn  # `eff --help` must not wait for torch

    from shared_core.quantization import QatConfig
    from shared_core.quantization.post_training.gptq import GptqConfig
    from shared_core.tools.quantize.study import StudyResult

REPORT_FILE = "eff_quantization.json"
PLAN_FILE = "plan.yaml"
_FLAGS = {"evaluate": "eval", "set_options": "set"}
_WITHOUT_METHOD = ("plan", "equalize", "correct_bias", "sensitivity", "largest_loss", "all_layers", "attack", "latency")
_OF_TRAINING = ("begin", "freeze_observers", "freeze_bn", "rounding", "gate", "calibration_batches", "keep")
_PLACES = ("as_json", "context", "out", "report")  # where a report goes does not change it
QuantizeCommand = command_with_options(
    "shared_core.quantization.config", "QatConfig", lambda: ("scheme", *_OF_TRAINING)
)


def quantize(
    context: typer.Context,
    model: Model,
    out: Out,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="As --qat_scheme: int8 (the default), int8_weight, int8_dynamic, int4_weight, ...; with --method the "
            "method's own by default."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="gptq, in place of rounding. Needs --calibration."),
    ] = None,
    weights: Weights = None,
    calibration: Annotated[
        str | None, typer.Option(help="module:function that returns batches of inputs: tensors, tuples or dicts.")
    ] = None,
    batches: Annotated[int, typer.Option(help="Calibration batches to run, at most.")] = 100,
    set_options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of --method, such as damping=0.05, or of qat; may be repeated."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A bit plan that was saved as YAML; its scheme holds unless --scheme is given.")
    ] = None,
    equalize: Annotated[bool, typer.Option("--equalize", help="Even out the ranges of channels first.")] = False,
    correct_bias: Annotated[
        bool, typer.Option("--correct-bias", help="Take the mean error out of the biases.")
    ] = False,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help="fp8: scales for a cache of keys and values in FP8, which eff export --format compressed-tensors "
            "writes for vLLM. Needs --calibration.",
        ),
    ] = None,
    evaluate: Evaluate = None,
    mode: Annotated[str, typer.Option(help="Whether quality is better when larger (max) or smaller (min).")] = "max",
    accept: Annotated[
        str,
        typer.Option(
            help="Largest loss of quality, as a share of the float model's: a number, default (0.5 % acceptable, over "
            "1 % not) or recommender (0.01 %)."
        ),
    ] = "default",
    qat: Annotated[
        Path | None, typer.Option(help="What qat saved of the same model, to be judged beside it: a folder or .ckpt.")
    ] = None,
    sensitivity: Annotated[
        str | None, typer.Option(help="Measure what each layer costs alone: rmse of the output, or kl. Needs batches.")
    ] = None,
    largest_loss: Annotated[
        float | None,
        typer.Option(help="Quantise as many layers as lose at most this much of --eval, in its own unit."),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="With --largest-loss: do not keep first, last and the like in float.")
    ] = False,
    attack: Annotated[
        str | None,
        typer.Option(help="module:function that returns batches (images, classes): accuracy under FGSM and PGD."),
    ] = None,
    attack_eps: Annotated[
        str, typer.Option(help="Largest changes of an input, in its own unit, such as 2/255,0.03.")
    ] = "2/255,8/255",
    attack_range: Annotated[
        str, typer.Option(help="Smallest and largest value of an input as LOW,HIGH; none.")
    ] = "0,1",
    attack_steps: Annotated[int, typer.Option(help="Steps of PGD, each of 2.5·eps/steps.")] = 20,
    latency: Annotated[
        bool,
        typer.Option("--latency", help="Time one forward in float, bf16 and quantised; a function gives the inputs."),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with tables and plots: an .html file, and a .md beside it.")
    ] = None,
    allow_partial: AllowPartial = False,
    as_json: AsJson = False,
) -> None:
    """Quantise a trained model and save plain weights, what a deployment needs beside them, and a report.

    The folder holds model.safetensors, whose weights have the values of their codes and load into the plain model (with
    --equalize or --correct-bias, into the plain model without batch norms that were fused);
    eff_deployment.json, with which `apply_ranges`, `convert` and `eff export` make it quantise its inputs; plan.yaml,
    with --largest-loss; and eff_quantization.json, the report. A folder's model comes out as a folder that
    from_pretrained loads and eff export takes, its tokenizer beside it; weights of 16 bits, in which codes have no
    exact values, become float32. Under torchrun the processes share the calibration batches.
    """
    set_options = [f"{name}={value}" for name, value in given_options(context).items()] + (set_options or [])
    asked = {_FLAGS.get(name, name): value for name, value in locals().items() if name not in _PLACES}
    from shared_core.distributed.job import Job
    from shared_core.tools.quantize.study import QuantizationStudy, model_bytes, static_input

    job = Job.joined()
    check_new(out, "eff quantize")
    if report is not None:
        check_place(report, "eff quantize: --report", made=out)
        optional("matplotlib", "plots", "eff quantize: --report")
    _check_together(
        ("--qat", qat, "--eval or --attack", evaluate or attack),
        ("--sensitivity", sensitivity, "--calibration", calibration),
        ("--largest-loss", largest_loss is not None, "--eval and --calibration", evaluate and calibration),
        ("--all-layers", all_layers, "--largest-loss", largest_loss is not None),
        ("--method", method, "--calibration", calibration),
        ("--correct-bias", correct_bias, "--calibration", calibration),
        ("--kv-cache", kv_cache, "--calibration", calibration),
        ("--accept", accept != "default", "--eval", evaluate),
        ("--mode", mode != "max", "--eval", evaluate),
        ("--batches", batches != 100, "--calibration", calibration),
        ("--attack-eps", attack_eps != "2/255,8/255", "--attack", attack),
        ("--attack-range", attack_range != "0,1", "--attack", attack),
        ("--attack-steps", attack_steps != 20, "--attack", attack),
    )
    if method is not None:
        _check_method(asked)
    if largest_loss is not None and plan is not None:
        raise ConfigError(
            "eff quantize", "--largest-loss must stand without --plan, which it would make", "leave one out"
        )
    config, gptq = _configs(scheme, method, plan, _options(set_options))
    asked["scheme"] = asked["scheme"] if method else config.scheme
    settings = _attack_settings(attack_eps, attack_range, attack_steps)
    network, inputs, folder = open_model(model, weights, "eff quantize")
    float_bytes = model_bytes(network)
    notes = _in_float32(network) if folder else []
    if folder and (equalize or correct_bias):
        _check_keeps_its_layers(network, "--equalize" if equalize else "--correct-bias")
    if latency and inputs is None and not folder:
        raise ConfigError(
            "eff quantize", f"{model} must return (model, example_inputs) for --latency, got a model alone"
        )
    study = QuantizationStudy(
        network=network, config=config, gptq=gptq, num_batches=batches, equalize=equalize,
        correct_bias=correct_bias, kv_cache=kv_cache, mode=mode, accept=accept, sensitivity=sensitivity,
        largest_loss=largest_loss, all_layers=all_layers, attack=settings, job=job,
        allow_partial=allow_partial,
        progress=functools.partial(bar, is_shown=job.is_main),
    )  # fmt: skip
    study.check()
    if qat is not None:
        study.qat_model = copy.deepcopy(network)
        load_quantized(study.qat_model, qat, "eff quantize: --qat")
    if calibration is None and (static := static_input(network, config)) is not None:
        raise ConfigError(
            "eff quantize",
            f"--calibration must be given with {config.scheme}, whose inputs have ranges ({static}), got none",
            "name a function that returns batches, or choose --scheme int8_weight or int8_dynamic, without ranges",
        )
    if evaluate is not None:
        study.judge = functools.partial(
            score, function(evaluate, "eff quantize: --eval", "model"), where="eff quantize"
        )
    if attack is not None:
        study.images = _attack_data(user_batches(attack, "eff quantize: --attack"))
    if calibration is not None:
        study.data = list(_loaded(user_batches(calibration, "eff quantize: --calibration"), batches, job.is_main))
    if latency:
        given = inputs if inputs is not None else study.data[0] if study.data else None
        study.latency_inputs = made_up_inputs(network, "eff quantize") if given is None else given
    with job:
        if not job.is_main:
            study.share()
            return
        result = study.run()
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}
    values = {"asked": shown, **result.values, "notes": [*notes, *result.values["notes"]]}
    values["bytes"]["float"] = float_bytes
    _write(out, result, values, folder, _between(result, study.data, values["notes"]))
    if report is not None:
        write_page(report, f"Quantisation of {model}", sections(values))
    if as_json:
        echo(json_text(values))
        return
    tell(out, values)
    if report is not None:
        echo(f"wrote {report} and {report.with_suffix('.md')}")


def _check_method(asked: dict[str, Any]) -> None:
    if asked["method"] != "gptq":
        remedy = "use llm-compressor for AWQ and SmoothQuant"
        raise ConfigError("eff quantize", f"--method must be gptq, got {asked['method']!r}", remedy)
    alone = [name for name in _WITHOUT_METHOD if asked[name] is not None and asked[name] is not False]
    if alone:
        flags = ", ".join("--" + name.replace("_", "-") for name in alone)
        raise ConfigError("eff quantize", f"--method must stand without {flags}, which it cannot serve", "leave it out")


def _configs(
    scheme: str | None, method: str | None, plan: Path | None, options: dict[str, Any]
) -> tuple[QatConfig, GptqConfig | None]:
    """Return (how to quantise, GPTQ's options if it is asked for)."""
    from shared_core.quantization import BitPlan, QatConfig
    from shared_core.quantization.post_training.gptq import GptqConfig
    from shared_core.quantization.post_training.quantize import as_config

    gptq = None
    if method:
        own: dict[str, Any] = {name: options.pop(name) for name in ("damping", "actorder") if name in options}
        gptq = GptqConfig.from_dict(own)
        options = {"scheme": scheme or "int4_weight", **options}
    else:
        planned = {"scheme": "int8"} if plan is None else BitPlan.options_from_yaml(plan)
        options = {**planned, **({} if scheme is None else {"scheme": scheme}), **options}
    config = QatConfig.from_dict(options) if method else as_config(options)
    useless = [name for name in _OF_TRAINING if getattr(config, name) != getattr(QatConfig, name)]
    if useless:
        raise ConfigError(
            "eff quantize",
            f"--set must hold options of quantising, got {useless[0]}, which only training has",
            "drop it",
        )
    return config, gptq


def _attack_settings(eps: str, bounds: str, steps: int) -> dict[str, Any]:
    """Return ``eps``, ``low``, ``high`` and ``steps`` of texts such as ``2/255,0.03`` and ``0,1`` or ``none``.

    Raises:
        ConfigError: If one breaks its rule.

    Example:
        >>> _attack_settings("1/4,0.1", "0,1", 20)
        {'eps': [0.1, 0.25], 'low': 0.0, 'high': 1.0, 'steps': 20}
    """
    try:
        strengths = sorted({float(Fraction(part.strip())) for part in eps.split(",")})
    except (ValueError, ZeroDivisionError):
        strengths = []
    if not strengths or strengths[0] <= 0:
        raise ConfigError("eff quantize", f"--attack-eps must be numbers above 0 such as 2/255,0.03, got {eps!r}")
    try:
        low, high = (None, None) if bounds == "none" else (float(part) for part in bounds.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    if low is not None and high is not None and not low < high:
        raise ConfigError("eff quantize", f"--attack-range must be LOW,HIGH such as 0,1, or none, got {bounds!r}")
    if steps < 1:
        raise ConfigError("eff quantize", f"--attack-steps must be at least 1, got {steps}")
    return {"eps": strengths, "low": low, "high": high, "steps": steps}


def _attack_data(batches: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the user's batches as a list.

    Raises:
        ConfigError: If they are no pairs of tensors.
    """
    from torch import Tensor

    held = list(batches)
    for batch in held:
        if not (
            isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)
        ):
            raise ConfigError(
                "eff quantize",
                f"--attack must return pairs of tensors (inputs, class indices), got {type(batch).__name__}",
            )
    if not held:
        raise ConfigError("eff quantize", "--attack must return at least one batch, got none", "return some images")
    return [(x, y) for x, y in held]


def _check_together(*needs: tuple[str, Any, str, Any]) -> None:
    for name, given, other, there in needs:
        if given and not there:
            raise ConfigError("eff quantize", f"{name} must come with {other}", "add what is missing")


def _in_float32(network: nn.Module) -> list[str]:
    """Widen weights of 16 bits, which would round what the codes stand for; return a note where there were any."""
    found = {str(value.dtype) for value in network.parameters() if value.is_floating_point() and value.itemsize == 2}
    if not found:
        return []
    network.float()
    return [f"weights of {', '.join(sorted(found))} became float32: in 16 bits the values of codes lie on no grid"]


def _check_keeps_its_layers(network: nn.Module, flag: str) -> None:
    from torch import nn

    norm = next((name for name, at in network.named_modules() if isinstance(at, nn.modules.batchnorm._BatchNorm)), None)
    if norm is not None:
        raise ConfigError(
            "eff quantize",
            f"{flag} must be left out for a folder whose model has batch norms, which it fuses away, got {norm}",
            "from_pretrained would make new ones",
        )


def _options(pairs: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError("eff quantize", f"--set must be NAME=VALUE, got {pair!r}")
        if options.setdefault(name, value) != value:
            raise ConfigError("eff quantize", f"{name} must be given once, got {options[name]} and {value}")
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


def _write(
    out: Path,
    result: StudyResult,
    values: dict[str, Any],
    folder: Path | None,
    between: dict[str, tuple[float, int]],
) -> None:
    from shared_core.checkpoint_formats.plain import write_deployment
    from shared_core.files.atomic import atomic_folder

    with atomic_folder(out) as temporary:
        save_network(result.model, folder, temporary)
        if values["ranges"]:
            kept = {BETWEEN: between} if between else {}
            write_deployment(str(temporary), {"qat": {"ranges": values["ranges"], **kept}})
        if result.plan is not None:
            result.plan.plan.to_yaml(temporary / PLAN_FILE, scheme=result.config.scheme)
        (temporary / REPORT_FILE).write_text(json_text(values) + "\n", encoding="utf-8")
