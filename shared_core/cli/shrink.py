"""`eff shrink`: a model whose zero units are gone from its tensors and its configuration."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import AsJson, Out, Weights, bar
from shared_core.cli.loading import check_new, function, open_model, save_network
from shared_core.errors import ConfigError
from shared_core.files.json_yaml import json_text

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.tools.shrink import ShrinkResult

REPORT_FILE = "eff_shrink.json"


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
    as_json: AsJson = False,
) -> None:
    """Remove the units of a pruned model that are zero: channels, neurons, attention heads, residual width.

    A folder's model comes out as a folder that from_pretrained loads, its tokenizer beside it; that it does, with the
    same outputs, is checked. Another model comes out as model.safetensors, in the shapes that eff_shrink.json tells.
    """
    from shared_core.files.atomic import atomic_folder
    from shared_core.tools.shrink import shrink as remove

    check_new(out, "eff shrink")
    network, example, folder = open_model(model, weights, "eff shrink")
    example = function(inputs, "eff shrink: --inputs")() if inputs else example
    if example is None:
        if folder is None:
            raise ConfigError("eff shrink", f"{model} must return (model, example_inputs), got a model alone")
        example = made_up_inputs(network)
    with bar("shrinking"):
        result = remove(network, example, multiple_of=multiple_of, allow_inexact=allow_inexact)
    report = _report(result)
    with atomic_folder(out) as temporary:
        save_network(result.model, folder, temporary, "eff shrink", example)
        (temporary / REPORT_FILE).write_text(json_text(report) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json_text(report))
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
    for name in ("bytes", "flops", "milliseconds"):
        values[name] = dict(zip(("before", "after"), values[name], strict=True))
    return values


def _tell(out: Path, result: ShrinkResult) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if result.removed:
        table = Table(title=f"shrunk: {out}", title_justify="left")
        for heading in ("group", "units", "removed"):
            table.add_column(heading, justify="left" if heading == "group" else "right")
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
