"""`eff shrink`: a model whose zero units are gone from its tensors and its configuration, or one of given sizes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import AsJson, Calibration, Loss, Out, Weights, bar
from shared_core.cli.loading import check_new, function, open_model, save_network, user_batches
from shared_core.errors import ConfigError
from shared_core.files.json_yaml import json_text
from shared_core.printing import echo

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.tools.shrink import ShrinkResult

REPORT_FILE = "eff_shrink.json"


def _size(what: str) -> Any:
    return typer.Option(help=f"{what}, of a model cut to sizes.")


def shrink(
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, or module:function that returns (model, example_inputs)."),
    ],
    out: Out,
    weights: Weights = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="module:function that returns example inputs; without it a folder's are made up."),
    ] = None,
    multiple_of: Annotated[int, typer.Option(help="Leave a multiple of this many neurons or channels.")] = 1,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Also narrow what layer norms normalise, which is not exact.")
    ] = False,
    layers: Annotated[int | None, _size("Layers")] = None,
    hidden_size: Annotated[int | None, _size("Channels of the residual stream")] = None,
    intermediate_size: Annotated[int | None, _size("Neurons of each MLP")] = None,
    attention_heads: Annotated[int | None, _size("Query heads of each layer")] = None,
    key_value_heads: Annotated[int | None, _size("Key-value heads of each layer")] = None,
    calibration: Calibration = None,
    batches: Annotated[int, typer.Option(help="Calibration batches to run, at most.")] = 100,
    loss: Loss = None,
    criterion: Annotated[
        str, typer.Option(help="What units of given sizes are kept by: activations, magnitude or random.")
    ] = "activations",
    layer_criterion: Annotated[
        str, typer.Option(help="What layers are kept by: block_influence, loss or random.")
    ] = "block_influence",
    seed: Annotated[int, typer.Option(help="Of random choices.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Remove the units of a pruned model that are zero: channels, neurons, attention heads, residual width.

    With sizes, such as --layers 8 --hidden-size 512, and --calibration: cut a trained decoder to them, the layers,
    channels, neurons and heads gone that do least on the batches (Minitron); then train it, with --distill_teacher.

    A folder's model comes out as a folder that from_pretrained loads, its tokenizer beside it; that it does, with the
    same outputs, is checked. Another model comes out as model.safetensors, in the shapes that eff_shrink.json tells.
    """
    from shared_core.files.atomic import atomic_folder
    from shared_core.tools.shrink import shrink as remove
    from shared_core.tools.shrink import shrink_to

    check_new(out, "eff shrink")
    given = {"layers": layers, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
             "attention_heads": attention_heads, "key_value_heads": key_value_heads}  # fmt: skip
    sizes = {name: value for name, value in given.items() if value is not None}
    if sizes and (multiple_of != 1 or allow_inexact):
        raise ConfigError("eff shrink", "--multiple-of and --allow-inexact must be left out with sizes, got one")
    if bool(sizes) != bool(calibration):
        what = "--calibration must come with sizes, as --layers 8" if calibration else "sizes must have --calibration"
        raise ConfigError("eff shrink", f"{what}, got none")
    run_batch = function(loss, "eff shrink: --loss", "model", "batch") if loss else None
    network, example, folder = open_model(model, weights, "eff shrink")
    example = function(inputs, "eff shrink: --inputs")() if inputs else example
    if example is None:
        if folder is None:
            raise ConfigError("eff shrink", f"{model} must return (model, example_inputs), got a model alone")
        example = made_up_inputs(network)
    result: ShrinkResult
    if calibration is None:
        with bar("shrinking"):
            result = remove(network, example, multiple_of=multiple_of, allow_inexact=allow_inexact)
    else:
        data = list(itertools.islice(user_batches(calibration, "eff shrink: --calibration"), max(batches, 0)))
        with bar("cutting"):
            result = shrink_to(
                network, sizes, data, example, criterion=criterion, layer_criterion=layer_criterion, loss=run_batch,
                seed=seed,
            )  # fmt: skip
    report = _report(result)
    with atomic_folder(out) as temporary:
        save_network(result.model, folder, temporary, "eff shrink", example)
        (temporary / REPORT_FILE).write_text(json_text(report) + "\n", encoding="utf-8")
    if as_json:
        echo(json_text(report))
    else:
        _tell(out, result)


def made_up_inputs(model: nn.Module, where: str = "eff shrink", length: int = 8) -> dict[str, Any]:
    """Return random example inputs for a model of transformers, from its configuration.

    Args:
        model: Whose ``main_input_name`` is token ids, pixels or speech: a wave, or Whisper's spectrogram.
        where: The command, for errors.
        length: Of sequences of tokens, of Whisper those that its decoder reads.

    Raises:
        ConfigError: If it is something else: then inputs must be given.
    """
    import torch

    described: Any = model
    name, config = described.main_input_name, described.config
    taken = inspect.signature(described.forward).parameters
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    if name == "input_ids":
        text = getattr(config, "text_config", config)
        inputs[name] = torch.randint(1, text.vocab_size, (2, length), generator=generator)
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs[name][:, :5].clone()
    elif name == "input_features" and hasattr(config, "max_source_positions"):  # Whisper halves the frames of 30 s
        frames = 2 * config.max_source_positions
        inputs[name] = torch.randn((2, config.num_mel_bins, frames), generator=generator)
        inputs["decoder_input_ids"] = torch.randint(1, config.vocab_size, (2, length), generator=generator)
    elif name == "input_values" and hasattr(config, "conv_stride"):  # wav2vec 2.0 and its kin: a second of sound
        inputs[name] = torch.randn((2, 16_000), generator=generator)
    # a model of pairs, which has a loss of its own as CLIP has, reads both
    if name == "pixel_values" or (inputs and {"pixel_values", "return_loss"} <= taken.keys()):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (2, getattr(vision, "num_channels", 3), height, width)
        inputs["pixel_values"] = torch.randn(shape, generator=generator)
    if not inputs:
        raise ConfigError(
            where,
            f"model must read tokens, pixels or speech, for which inputs are made up, got {name}",
            "name a function that returns them",
        )
    return inputs


def _report(result: ShrinkResult) -> dict[str, Any]:
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "model"}
    for name in ("bytes", "flops", "milliseconds", "parameters", "loss"):
        if values.get(name) is not None:
            values[name] = dict(zip(("before", "after"), values[name], strict=True))
    return values


def _tell(out: Path, result: ShrinkResult) -> None:
    from rich.table import Table

    from shared_core.reports.console import Console

    console = Console()
    if result.removed:
        table = Table(title=f"shrunk: {out}", title_justify="left")
        for heading in ("group", "units", "removed"):
            table.add_column(heading, justify="left" if heading == "group" else "right", overflow="fold")
        for name, count in result.removed.items():
            table.add_row(name, str(result.units[name]), str(count))
        console.print(table)
    for name, reason in result.kept.items():
        console.print(f"kept: {name}: {reason}", markup=False)
    for name, (before, after) in result.config.items():
        console.print(f"config: {name}: {before} -> {after}", markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    console.print(str(result), markup=False)
    console.print(f"largest difference of the outputs: {result.largest_difference:.1e}")
