"""`eff quantize`: a trained model quantised without training, from the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.loading import build_model, function, load_weights
from shared_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

REPORT_FILE = "eff_quantization.json"


def quantize(
    model: Annotated[str, typer.Argument(help="module:function that returns the model, or (model, example_inputs).")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist or be empty.")],
    scheme: Annotated[
        str, typer.Option(help="As --qat_scheme: int8, int8_weight, int8_dynamic, int4_weight, ...")
    ] = "int8",
    weights: Annotated[Path | None, typer.Option(help="A folder or file with the trained weights.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="module:function that returns batches of inputs: tensors, tuples or dicts.")
    ] = None,
    batches: Annotated[int, typer.Option(help="Calibration batches to run, at most.")] = 100,
    set_options: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another option of qat as NAME=VALUE, such as range=kl; may be repeated."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A bit plan that was saved as YAML; --set and --scheme add to it.")
    ] = None,
    equalize: Annotated[bool, typer.Option("--equalize", help="Even out the ranges of channels first.")] = False,
    correct_bias: Annotated[
        bool, typer.Option("--correct-bias", help="Take the mean error out of the biases.")
    ] = False,
    evaluate: Annotated[
        str | None, typer.Option("--eval", help="module:function that takes a model and returns its quality.")
    ] = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="Time one forward in float, bf16 and quantised; MODEL gives the inputs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantise a trained model and save plain weights, what a deployment needs beside them, and a report.

    The folder holds model.safetensors, whose weights have the values of their codes and load into the plain model (with
    --equalize or --correct-bias, into the plain model without batch norms that were fused);
    eff_deployment.json, with which `apply_ranges`, `convert` and `eff export` make it quantise its inputs; and
    eff_quantization.json, the report.
    """
    from shared_core.quantization import BitPlan, QatConfig, quantize_with_report
    from shared_core.quantization.latency import latencies
    from shared_core.quantization.sizes import quantized_bytes

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"eff quantize: --out must be a new or empty folder, got {out}")
    options: dict[str, Any] = BitPlan.from_yaml(plan).qat_options() if plan is not None else {}
    options |= {"scheme": scheme, **_options(set_options or [])}
    if scheme == "int8":
        options.setdefault("range", "mse")
    config = QatConfig.from_dict(options)
    network, inputs = build_model(model, "eff quantize")
    if latency and inputs is None:
        raise ConfigError(f"eff quantize: {model} must return (model, example_inputs) for --latency, got a model alone")
    if weights is not None:
        load_weights(network, weights, "eff quantize")
    judge = function(evaluate, "eff quantize: --eval") if evaluate else None
    data = None if calibration is None else _shown(function(calibration, "eff quantize: --calibration")(), batches)
    before = None if judge is None else float(judge(network.eval()))
    quantized, report = quantize_with_report(
        network, config, data, num_batches=batches, equalize=equalize, correct_bias=correct_bias
    )
    after = None if judge is None else float(judge(quantized))
    values = {
        "config": config.to_dict(),
        **dataclasses.asdict(report),
        "quality": {"float": before, "quantized": after},
        "milliseconds": latencies(network, quantized, inputs) if latency else {},
        "bytes": {"float": _bytes(network), "quantized": quantized_bytes(quantized)},
    }
    _write(out, quantized, values)
    if as_json:
        typer.echo(json.dumps(values, indent=2, default=str))
        return
    _tell(out, values)


def _options(pairs: list[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"eff quantize: --set must be NAME=VALUE, got {pair!r}")
        options[name] = value
    return options


def _shown(batches: Iterable[Any], count: int) -> Iterator[Any]:
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        bar = progress.add_task("calibration", total=count)
        for batch in batches:
            yield batch
            progress.advance(bar)


def _bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def _write(out: Path, model: nn.Module, values: dict[str, Any]) -> None:
    from safetensors.torch import save_model

    from shared_core.atomic import atomic_folder
    from shared_core.plain_checkpoint import write_deployment

    with atomic_folder(out) as temporary:
        save_model(model, str(temporary / "model.safetensors"))  # shared tensors once
        write_deployment(str(temporary), {"qat": {"ranges": values["ranges"]}})
        (temporary / REPORT_FILE).write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")


def _tell(out: Path, values: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"quantised with {values['config']['scheme']}: {out}", title_justify="left")
    for heading in ("layer", "weights", "bits", "input", "SQNR (dB)"):
        table.add_column(heading, justify="left" if heading in ("layer", "input") else "right")
    for entry in values["layers"]:
        table.add_row(
            entry["name"], f"{entry['weights']:,}", str(entry["weight_bits"]), entry["input"], f"{entry['sqnr_db']:.1f}"
        )
    console = Console()
    console.print(table)
    for name, reason in values["left_out"].items():
        console.print(f"left in float: {name}: {reason}", markup=False)
    for note in values["notes"]:
        console.print(f"note: {note}", markup=False)
    size = values["bytes"]
    ratio = size["float"] / size["quantized"]
    console.print(f"size as codes: {size['quantized']:,} of {size['float']:,} bytes, {ratio:.2f} times smaller")
    if values["milliseconds"]:
        told = ", ".join(f"{name} {found:.2f} ms" for name, found in values["milliseconds"].items())
        console.print(f"one forward, one thread: {told}")
    quality = values["quality"]
    if quality["float"] is not None:
        console.print(f"quality: {quality['float']:.4f} in float, {quality['quantized']:.4f} quantised")
