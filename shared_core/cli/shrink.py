"""`eff shrink`: a model whose zero units are gone from its tensors and its configuration, or one of given sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared_core.cli.arguments import LossOptions, alone, bar, takes
from shared_core.cli.loading import check_new, function, save_folder
from shared_core.cli.output import print_report, table
from shared_core.config.options import option
from shared_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.tools.shrink import ShrinkResult

REPORT_FILE = "eff_shrink.json"


_SIZES = ("layers", "hidden_size", "intermediate_size", "attention_heads", "key_value_heads")


@dataclass(frozen=True, kw_only=True)
class ShrinkOptions(LossOptions):
    """Options of `eff shrink`."""

    key: ClassVar[str] = "eff shrink"
    needs: ClassVar = dict.fromkeys(_SIZES, ("calibration",))
    without: ClassVar = {"multiple_of": _SIZES, "allow_inexact": _SIZES}

    model: str = option(
        help="A Hugging Face folder, or module:function that returns (model, example_inputs).", argument=True
    )
    inputs: str | None = option(None, "module:function that returns example inputs; without it a folder's are made up.")
    multiple_of: int = option(1, "Leave a multiple of this many neurons or channels.")
    allow_inexact: bool = option(False, "Also narrow what layer norms normalise, which is not exact.")
    layers: int | None = option(None, "Layers, of a model cut to sizes.")
    hidden_size: int | None = option(None, "Channels of the residual stream, of a model cut to sizes.")
    intermediate_size: int | None = option(None, "Neurons of each MLP, of a model cut to sizes.")
    attention_heads: int | None = option(None, "Query heads of each layer, of a model cut to sizes.")
    key_value_heads: int | None = option(None, "Key-value heads of each layer, of a model cut to sizes.")
    batches: int = option(100, "Calibration batches to run, at most.", low=1)
    criterion: str = option("activations", "What units of given sizes are kept by: activations, magnitude or random.")
    layer_criterion: str = option("block_influence", "What layers are kept by: block_influence, loss or random.")
    seed: int = option(0, "Of random choices.")

    def sizes(self) -> dict[str, int]:
        """Return those that the model is to be cut to."""
        return {name: getattr(self, name) for name in _SIZES if self.is_given(name)}

    def validate(self) -> None:
        """Refuse batches that nothing is measured on."""
        if self.calibration is not None and not self.sizes():
            raise ConfigError(self.key, "--calibration must come with sizes, as --layers 8, got none")


@takes(ShrinkOptions)
def shrink(asked: ShrinkOptions) -> None:
    """Remove the units of a pruned model that are zero: channels, neurons, attention heads, residual width.

    With sizes, such as --layers 8 --hidden-size 512, and --calibration: cut a trained decoder to them, the layers,
    channels, neurons and heads gone that do least on the batches (Minitron); then train it, with --distill_teacher.

    A folder's model comes out as a folder that from_pretrained loads, its tokenizer beside it; that it does, with the
    same outputs, is checked. Another model comes out as model.safetensors, in the shapes that eff_shrink.json tells.
    """
    from shared_core.tools.shrink import shrink as remove
    from shared_core.tools.shrink import shrink_to

    check_new(asked.out, asked.key)
    run_batch = asked.batch_loss()
    network, example, folder = asked.open()
    example = function(asked.inputs, "eff shrink: --inputs")() if asked.inputs else example
    if example is None:
        if folder is None:
            raise alone(asked)
        example = made_up_inputs(network)
    result: ShrinkResult
    if (data := asked.data(asked.batches)) is None:
        with bar("shrinking"):
            result = remove(network, example, multiple_of=asked.multiple_of, allow_inexact=asked.allow_inexact)
    else:
        with bar("cutting"):
            result = shrink_to(
                network, asked.sizes(), data, example, criterion=asked.criterion,
                layer_criterion=asked.layer_criterion, loss=run_batch, seed=asked.seed,
            )  # fmt: skip
    report = _report(result)
    save_folder(asked.out, result.model, folder, {REPORT_FILE: report}, asked.key, example)
    print_report(report, _lines(asked.out, result), as_json=asked.as_json)


def made_up_inputs(model: nn.Module, where: str = "eff shrink", length: int = 8) -> dict[str, Any]:
    """Return random example inputs for a model of transformers, from its configuration."""
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


def _lines(out: Path, result: ShrinkResult) -> Iterator[str | Table]:
    if result.removed:
        rows = [(name, result.units[name], count) for name, count in result.removed.items()]
        yield table(f"shrunk: {out}", ("group",), ("group", "units", "removed"), rows)
    yield from (f"kept: {name}: {reason}" for name, reason in result.kept.items())
    yield from (f"config: {name}: {before} -> {after}" for name, (before, after) in result.config.items())
    yield from (f"note: {note}" for note in result.notes)
    yield str(result)
    yield f"largest difference of the outputs: {result.largest_difference:.1e}"
