"""Folders of models that a command reads and writes: the model itself, and what lies beside its weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.atomic import atomic_write, check_writable
from shared_core.cli.loading import build_model, load_weights
from shared_core.cli.run import front_ends
from shared_core.errors import CheckpointError, ConfigError, MissingExtraError
from shared_core.strict_json import json_text

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json", "_results.json")
_BESIDE = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe"})
_LEFT_BEHIND = frozenset({"config.json", "generation_config.json", "trainer_state.json"})


def check_new(folder: Path, where: str) -> None:
    """Refuse a folder to write that holds something, or that cannot be written.

    Raises:
        CheckpointError: If it does, is no folder, or cannot.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{where}: --out must be a new or empty folder, got {folder}")
    check_writable(folder.resolve() if folder.is_symlink() else folder, f"{where}: --out")


def load_folder(folder: Path, where: str) -> nn.Module:
    """Return the model in a Hugging Face folder, in evaluation mode, with all its parameters trainable.

    Raises:
        CheckpointError: If it cannot be loaded.
        MissingExtraError: If transformers is not installed.
    """
    from torch import nn

    return _from_folder("load_teacher", folder, where, nn.Module()).requires_grad_(True).eval()


def empty_folder(folder: Path, where: str) -> nn.Module:
    """Return the model that a Hugging Face folder's config describes, on the meta device: without values.

    Raises:
        CheckpointError: If it cannot be built.
        MissingExtraError: If transformers is not installed.
    """
    return _from_folder("empty_model", folder, where)


def _from_folder(way: str, folder: Path, where: str, *student: nn.Module) -> nn.Module:
    for front_end in front_ends():
        load = getattr(front_end, way, None)
        if load is not None:
            if folder.is_dir() and not (folder / "config.json").is_file():  # bare weights would be those of a student
                raise CheckpointError(
                    f"{where}: {folder} must be a model folder with config.json, got none in it; give the folder that "
                    "save_pretrained wrote, or a module:function that builds the model"
                )
            try:
                loaded: nn.Module = load(str(folder), *student)
            except CheckpointError as error:
                # models to use are loaded as teachers are
                told = str(error).replace(f"distill: teacher {str(folder)!r}: ", "", 1)
                told = told.replace("distill: teacher's", "its", 1).replace("distill: teacher", "it", 1)
                told = told.removesuffix("; it would teach from random weights")
                raise CheckpointError(f"{where}: {folder} must be a model that can be loaded: {told}") from error
            return loaded
    raise MissingExtraError(f"{where}: a model folder", "transformers", "hf")


def open_model(model: str, weights: Path | None, where: str) -> tuple[nn.Module, Any, Path | None]:
    """Return (model, example inputs or None, its folder or None) of a folder or of ``module:function``.

    Args:
        model: As the user gave it.
        weights: For the model of a function: a folder or file with the trained weights.
        where: The command, for errors.

    Raises:
        ConfigError: If a folder comes with weights, or the name is of neither.
    """
    if (folder := Path(model)).is_dir():
        if weights is not None:
            raise ConfigError(f"{where}: --weights must be left out for a folder, got {weights}")
        return load_folder(folder, where), None, folder
    network, example = build_model(model, where)
    if weights is not None:
        load_weights(network, weights, where)
    return network, example, None


def keep_report(out: Path, values: Mapping[str, Any]) -> None:
    """Write what a command tells of the file that it wrote beside it, for `eff report`."""
    with atomic_write(out.with_name(f"{out.name}.eff.json")) as temporary:
        temporary.write_text(json_text(values) + "\n", encoding="utf-8")


def save_network(network: nn.Module, source: Path | None, target: Path, where: str = "", example: Any = None) -> None:
    """Write a model as the folder that it came from, its tokenizer beside it, or without one its weights alone.

    Args:
        network: The model.
        source: The folder that it was loaded from, if it was.
        target: An empty folder.
        where: The command, for errors.
        example: Inputs, if what is written is to be loaded and compared.

    Raises:
        CheckpointError: If the folder does not load with the same outputs.
    """
    if source is None:
        from safetensors.torch import save_model

        save_model(network, str(target / "model.safetensors"))  # shared tensors once
        return
    saved: Any = network
    saved.save_pretrained(target)
    copy_beside(source, target)
    if example is not None:
        from shared_core.pruning.removal.measuring import difference, outputs

        gap = difference(outputs(network, example), outputs(load_folder(target, where), example))
        if not gap <= 1e-5:
            raise CheckpointError(f"{where}: the saved model must load with the same outputs, they differ by {gap}")


def copy_beside(source: Path, target: Path) -> None:
    """Copy the tokenizer and what else lies beside the weights of a model, but for what is there and our reports."""
    for file in source.iterdir():
        wanted = file.suffix in _BESIDE and not file.name.endswith(_OTHERS) and file.name not in _LEFT_BEHIND
        if file.is_file() and wanted and not file.name.startswith("eff_") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
