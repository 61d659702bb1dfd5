"""Quantised models that a command reads: of a folder or of the user's function, with the ranges that qat saved."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.cli.arguments import alone
from shared_core.cli.loading import load_weights, open_model
from shared_core.cli.shrink import made_up_inputs
from shared_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

BETWEEN = "between_layers"
"""Of qat's part of ``eff_deployment.json``: scale and zero point of tensors that no layer's range is of."""


def model_and_inputs(asked: Any, default_length: int | None, *, traced: bool) -> tuple[nn.Module, Any]:
    """Return the model that `eff export` is asked for, as it quantised in training, and example inputs."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE
    from shared_core.quantization import apply_ranges

    length, is_folder = asked.length, Path(asked.model).is_dir()
    if length is not None and not is_folder:
        told = f"--length must come with a folder, got {asked.model}"
        raise ConfigError(asked.key, told, "its function returns the inputs")
    has_ranges = asked.weights is not None and _has_ranges(asked.weights)
    network: Any
    network, example, folder = open_model(
        asked.model, asked.weights, asked.key, load_quantized if has_ranges else load_weights
    )
    if folder is None:
        if example is None:
            raise alone(asked)
        return network, example
    network = network.float()
    for module in network.modules() if traced else ():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # the exporters know no cache among the outputs (torch 2.13)
    if traced:
        network.set_experts_implementation("batched_mm")  # ONNX has no grouped_mm, the default (transformers 5.23)
    if (folder / DEPLOYMENT_FILE).exists() and (ranges := _saved_ranges(folder)):
        apply_ranges(network, ranges)
    inputs = _inputs(network, default_length if length is None else length)
    if length is not None and not {"input_ids", "decoder_input_ids"} & inputs.keys():
        read = f"{type(network).__name__}, which reads {', '.join(inputs)}"
        raise ConfigError(asked.key, f"--length must come with a model that reads tokens, got {read}", "leave it out")
    return network, inputs


def _inputs(network: nn.Module, length: int | None) -> dict[str, Any]:
    import torch

    inputs = made_up_inputs(network, "eff export", length or 8)
    if (tokens := inputs.get("input_ids")) is None:
        return inputs
    if length is None or length < 2:
        raise ConfigError("eff export", f"--length must be at least 2 for a model that reads tokens, got {length}")
    if "attention_mask" in inspect.signature(network.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][1, -1] = 0  # the comparison with the model then sees padding
    return inputs


def _has_ranges(weights: Path) -> bool:
    """Return whether a file or folder is what qat saved, or may be: weights without what qat writes are in float."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE, LIGHTNING_META

    folder = weights if weights.is_dir() else weights.parent
    return weights.suffix == ".ckpt" or any((folder / name).exists() for name in (DEPLOYMENT_FILE, LIGHTNING_META))


def _saved_ranges(folder: Path) -> dict[str, Any]:
    return _of_qat(folder, "ranges")


def _of_qat(folder: Path, key: str) -> dict[str, Any]:
    from shared_core.checkpoint_formats.plain import read_deployment

    values: dict[str, Any] = read_deployment(folder).get("qat", {}).get(key, {})
    return values


def saved_codes(model: str, weights: Path | None) -> dict[str, tuple[float, int]] | None:
    """Return the codes between layers that `eff quantize` kept beside the weights; None without."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE

    path = Path(model) if weights is None else weights
    folder = path.parent if path.suffix == ".safetensors" else path
    found = _of_qat(folder, BETWEEN) if (folder / DEPLOYMENT_FILE).exists() else {}
    return {name: (scale, zero_point) for name, (scale, zero_point) in found.items()} or None


def load_quantized(model: nn.Module, path: Path, where: str = "eff export") -> None:
    """Load the baked weights and the ranges that training with qat saved into a plain model."""
    from shared_core.quantization import apply_ranges

    beside = path if path.is_dir() or path.suffix == ".ckpt" or not path.exists() else path.parent
    ranges = _saved_ranges(beside)
    prefix = load_weights(model, path, where)
    apply_ranges(model, {name.removeprefix(prefix): value for name, value in ranges.items() if name.startswith(prefix)})
