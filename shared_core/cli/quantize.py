"""`eff quantize`: a trained model quantised without training, from the command line."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli import quantize_measures as measures
from shared_core.cli.arguments import AsJson, Evaluate, Model, Out, Weights, bar
from shared_core.cli.export import load_quantized
from shared_core.cli.loading import check_new, function, open_model, save_network, score, user_batches
from shared_core.cli.shrink import made_up_inputs
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.files.json_yaml import json_text
from shared_core.reports.page import check_page, write_page
from shared_core.reports.quantization_page import notes_of_method, section_of_method, sections, tell

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.quantization import QatConfig, SelectivePlan

REPORT_FILE = "eff_quantization.json"
PLAN_FILE = "plan.yaml"
_FLAGS = {"evaluate": "eval", "set_options": "set"}
_WITHOUT_METHOD = ("plan", "equalize", "correct_bias", "sensitivity", "largest_loss", "all_layers", "attack", "latency")
_OF_TRAINING = ("begin", "freeze_observers", "freeze_bn", "rounding", "gate", "calibration_batches", "keep")
_PLACES = ("as_json", "out", "report")  # where a report goes does not change it


def quantize(
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
        typer.Option(help="gptq, awq or smoothquant, by torchao, in place of rounding. Needs --calibration."),
    ] = None,
    weights: Weights = None,
    calibration: Annotated[
        str | None, typer.Option(help="module:function that returns batches of inputs: tensors, tuples or dicts.")
    ] = None,
    batches: Annotated[int, typer.Option(help="Calibration batches to run, at most.")] = 100,
    set_options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Another option of qat (or of --method) as NAME=VALUE, such as range=kl; may be repeated."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A bit plan that was saved as YAML; its scheme holds unless --scheme is given.")
    ] = None,
    equalize: Annotated[bool, typer.Option("--equalize", help="Even out the ranges of channels first.")] = False,
    correct_bias: Annotated[
        bool, typer.Option("--correct-bias", help="Take the mean error out of the biases.")
    ] = False,
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
    as_json: AsJson = False,
) -> None:
    """Quantise a trained model and save plain weights, what a deployment needs beside them, and a report.

    The folder holds model.safetensors, whose weights have the values of their codes and load into the plain model (with
    --equalize or --correct-bias, into the plain model without batch norms that were fused);
    eff_deployment.json, with which `apply_ranges`, `convert` and `eff export` make it quantise its inputs; plan.yaml,
    with --largest-loss; and eff_quantization.json, the report. A folder's model comes out as a folder that
    from_pretrained loads and eff export takes, its tokenizer beside it; weights of 16 bits, in which codes have no
    exact values, become float32. With --method the weights are plain too, no deployment file is written, and quality is
    that of torchao's kernels.
    """
    asked = {_FLAGS.get(name, name): value for name, value in locals().items() if name not in _PLACES}
    import torch

    from shared_core.quantization import BitPlan, QatConfig, quantize_with_report
    from shared_core.quantization.batch_norm import run
    from shared_core.quantization.post_training.latency import latencies
    from shared_core.quantization.post_training.quality import judge_loss, layer_bytes, thresholds
    from shared_core.quantization.post_training.quantize import quantized_bytes
    from shared_core.quantization.post_training.torchao_calibration import (
        TorchaoMethodConfig,
        check_runs,
        quantize_with_torchao,
        to_plain_weights,
    )

    check_new(out, "eff quantize")
    if report is not None:
        check_page(report, "eff quantize: --report", made=out)
    if mode not in ("max", "min"):
        raise ConfigError(f"eff quantize: --mode must be max or min, got {mode!r}")
    thresholds(accept)
    _check_together(
        ("--qat", qat, "--eval or --attack", evaluate or attack),
        ("--sensitivity", sensitivity, "--calibration", calibration),
        ("--largest-loss", largest_loss is not None, "--eval and --calibration", evaluate and calibration),
        ("--all-layers", all_layers, "--largest-loss", largest_loss is not None),
        ("--method", method, "--calibration", calibration),
        ("--correct-bias", correct_bias, "--calibration", calibration),
        ("--accept", accept != "default", "--eval", evaluate),
        ("--mode", mode != "max", "--eval", evaluate),
        ("--batches", batches != 100, "--calibration", calibration),
        ("--attack-eps", attack_eps != "2/255,8/255", "--attack", attack),
        ("--attack-range", attack_range != "0,1", "--attack", attack),
        ("--attack-steps", attack_steps != 20, "--attack", attack),
    )
    alone = [name for name in _WITHOUT_METHOD if method and asked[name] is not None and asked[name] is not False]
    if alone:
        flags = ", ".join("--" + name.replace("_", "-") for name in alone)
        raise ConfigError(f"eff quantize: --method must stand without {flags}, which it cannot serve; leave it out")
    own = dict(_options(set_options or [])) if method else {}
    by_torchao = TorchaoMethodConfig.from_dict({"method": method, "scheme": scheme, **own}) if method else None
    if largest_loss is not None and plan is not None:
        raise ConfigError("eff quantize: --largest-loss must stand without --plan, which it would make; leave one out")
    options: dict[str, Any] = {"scheme": "int8"} if plan is None else BitPlan.options_from_yaml(plan)
    if by_torchao is None:
        options |= {} if scheme is None else {"scheme": scheme}
        scheme = asked["scheme"] = options["scheme"]
        options |= _options(set_options or [])
    else:
        options["scheme"] = by_torchao.scheme
    if scheme == "int8":
        options.setdefault("range", "mse")
    config = QatConfig.from_dict(options)
    useless = [name for name in _OF_TRAINING if getattr(config, name) != getattr(QatConfig, name)]
    if useless:
        raise ConfigError(
            f"eff quantize: --set must hold options of quantising, got {useless[0]}, which only training has; drop it"
        )
    if largest_loss is not None:
        measures.check_plannable(config, largest_loss)
    if sensitivity not in (None, "kl", "rmse"):
        raise ConfigError(f"eff quantize: --sensitivity must be kl or rmse, got {sensitivity!r}")
    settings = measures.attack_settings(attack_eps, attack_range, attack_steps)
    network, inputs, folder = open_model(model, weights, "eff quantize")
    float_bytes = _bytes(network)
    notes = _in_float32(network) if folder and by_torchao is None else []
    if folder and (equalize or correct_bias):
        _check_keeps_its_layers(network, "--equalize" if equalize else "--correct-bias")
    if latency and inputs is None and not folder:
        raise ConfigError(f"eff quantize: {model} must return (model, example_inputs) for --latency, got a model alone")
    if by_torchao is not None:
        some = next((value for value in network.parameters() if value.is_floating_point()), torch.empty(0))
        try:
            check_runs(by_torchao, some.device, some.dtype)  # before batches are loaded and quality is measured
        except CompatibilityError as error:
            if folder is None:
                raise
            raise CompatibilityError(
                f"{error}; a folder's model is on the CPU, one of a module:function where that puts it"
            ) from error
    models = {"float": network}
    if qat is not None:
        models["qat"] = copy.deepcopy(network)
        load_quantized(models["qat"], qat, "eff quantize: --qat")
    if by_torchao is None and calibration is None:
        _check_needs_none(network, config)
    judge = function(evaluate, "eff quantize: --eval", "model") if evaluate else None
    images = None if attack is None else measures.attack_data(user_batches(attack, "eff quantize: --attack"))
    data = None
    if calibration is not None:
        data = list(_loaded(user_batches(calibration, "eff quantize: --calibration"), batches))

    if latency and inputs is None:
        inputs = data[0] if data else made_up_inputs(network, "eff quantize")
    quality: dict[str, float | None] = {"float": None, "quantized": None}
    attacks: list[dict[str, Any]] = []

    def measure(name: str) -> None:
        if judge is not None:
            quality[name] = score(judge, models[name], "eff quantize")
        if images is not None:
            with bar(f"attacks on the {name} model") as advance:
                for row in measures.attacked(name, models[name], network, images, settings):
                    attacks.append(row)
                    advance(len(attacks), None)

    def quantized_as(
        config: QatConfig, show: Callable[[int, int], None] | None = None, *, candidate: bool = False
    ) -> tuple[nn.Module, Any]:
        if by_torchao is not None and data is not None:
            return quantize_with_torchao(
                network, calibration=data, num_batches=batches, progress=show, **by_torchao.to_dict()
            )
        return quantize_with_report(
            network,
            config,
            data,
            num_batches=batches,
            equalize=equalize,
            correct_bias=correct_bias,
            measure_outputs=not candidate,
            progress=show,
        )

    if latency:
        run(network, inputs, f"eff quantize: --latency: the inputs of {model}")
    measure("float")
    with bar("calibration") as advance:
        models["quantized"], done = quantized_as(config, advance)
    costs, found, keep = None, None, dict[str, str]()
    if data is not None and (sensitivity is not None or largest_loss is not None):
        with bar("sensitivity of layers"):
            costs = measures.sensitivities(network, done, data, sensitivity or "rmse")
    if costs is not None and judge is not None and data is not None and largest_loss is not None:
        keep = {} if all_layers else measures.kept_in_float(network, costs, data[0])
        with bar("plan") as advance:
            config, found = measures.selective_plan(
                network, config, costs, lambda chosen: quantized_as(chosen, candidate=True)[0], judge,
                largest_loss=largest_loss, mode=mode, keep=keep,
            )  # fmt: skip
        models["quantized"], done = quantized_as(config)
    for name in ("quantized", *(["qat"] if qat is not None else [])):
        measure(name)
    values = {
        "asked": {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()},
        "config": (by_torchao or config).to_dict(),
        "ranges": {},
        "notes": [] if by_torchao is None else notes_of_method(done),
        **dataclasses.asdict(done),
        "output_sqnr_db": measures.output_sqnr(done),
        "quality": quality,
        "verdicts": {
            name: _no_nan(dataclasses.asdict(judge_loss(quality["float"], value, accept, mode)))  # type: ignore[arg-type]
            for name, value in quality.items()
            if name != "float" and value is not None and quality["float"] is not None
        },
        "milliseconds": latencies(network, models["quantized"], inputs) if latency else {},
        "machine": measures.machine() if latency else {},
        "bytes": {"float": float_bytes},
        "layer_bytes": {name: list(sizes) for name, sizes in layer_bytes(models["quantized"]).items()},
        "sensitivity": None if costs is None else {"metric": sensitivity or "rmse", "layers": costs},
        "plan": None if found is None else measures.plan_values(found, keep, mode),
        "attacks": None if images is None else {**settings, "rows": attacks},
    }
    values["notes"] = [*notes, *values["notes"]]
    if by_torchao is None:
        values["bytes"]["quantized"] = quantized_bytes(models["quantized"])
    else:
        to_plain_weights(models["quantized"])
        values["layer_bytes"] = {entry["name"]: [entry["float_bytes"], entry["bytes"]] for entry in done.layers}
        saved = sum(before - after for before, after in values["layer_bytes"].values())
        values["bytes"]["quantized"] = values["bytes"]["float"] - saved
    _write(out, models["quantized"], values, found, config, folder)
    if report is not None:
        gained = [] if by_torchao is None else [section_of_method(values)]
        write_page(report, f"Quantisation of {model}", [*sections(values), *gained])
    if as_json:
        typer.echo(json_text(values))
        return
    tell(out, values)
    if report is not None:
        typer.echo(f"wrote {report} and {report.with_suffix('.md')}")


def _check_together(*needs: tuple[str, Any, str, Any]) -> None:
    for name, given, other, there in needs:
        if given and not there:
            raise ConfigError(f"eff quantize: {name} must come with {other}; add what is missing")


def _check_needs_none(network: nn.Module, config: QatConfig) -> None:
    """Refuse ranges of inputs without batches that show them, before quality is measured."""
    from shared_core.quantization.schemes import layer_schemes
    from shared_core.quantization.selection import select_layers

    schemes = layer_schemes(config, select_layers(network, config.include, config.skip)[0])
    static = next((name for name, scheme in schemes.items() if scheme.input == "static"), None)
    if static is not None:
        raise ConfigError(
            f"eff quantize: --calibration must be given with {config.scheme}, whose inputs have ranges ({static}), got "
            "none; name a function that returns batches, or choose --scheme int8_weight or int8_dynamic, without ranges"
        )


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
            f"eff quantize: {flag} must be left out for a folder whose model has batch norms, which it fuses away, got "
            f"{norm}; from_pretrained would make new ones"
        )


def _options(pairs: list[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"eff quantize: --set must be NAME=VALUE, got {pair!r}")
        options[name] = value
    return options


def _loaded(batches: Iterable[Any], count: int) -> Iterator[Any]:
    with bar("loading batches") as advance:
        for number, batch in enumerate(itertools.islice(batches, max(count, 0)), 1):
            yield batch
            advance(number, None)


def _no_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _bytes(model: nn.Module) -> int:
    # a shared weight is one
    tensors = {value.data_ptr(): value.numel() * value.element_size() for value in model.state_dict().values()}
    return sum(tensors.values())


def _write(
    out: Path,
    model: nn.Module,
    values: dict[str, Any],
    found: SelectivePlan | None,
    config: QatConfig,
    folder: Path | None,
) -> None:
    from shared_core.checkpoint_formats.plain import write_deployment
    from shared_core.files.atomic import atomic_folder

    with atomic_folder(out) as temporary:
        save_network(model, folder, temporary)
        if values["ranges"]:
            write_deployment(str(temporary), {"qat": {"ranges": values["ranges"]}})
        if found is not None:
            found.plan.to_yaml(temporary / PLAN_FILE, scheme=config.scheme)
        (temporary / REPORT_FILE).write_text(json_text(values) + "\n", encoding="utf-8")
