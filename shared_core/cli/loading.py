"""Load the user's models, weights and folders for a command."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.errors import CheckpointError, ConfigError, MissingExtraError, first_line, require
from shared_core.files.atomic import atomic_folder, atomic_write, check_writable, is_free
from shared_core.files.journal import read_object
from shared_core.files.json_yaml import json_text
from shared_core.files.user_code import check_function, function
from shared_core.front_ends.finding import front_ends
from shared_core.printing import echo, listed

if TYPE_CHECKING:
    from torch import Tensor, nn  # `eff --help` must not wait for torch


def user_batches(name: str, where: str) -> Iterable[Any]:
    """Return the batches that the user's function returns or yields."""
    batches = function(name, where)()
    rule = f"{where} must return batches, got {type(batches).__name__}"
    require(isinstance(batches, Iterable), rule, "", "return a list of them, or yield them")
    return batches  # type: ignore[no-any-return]


def score(judge: Callable[[nn.Module], Any], model: nn.Module, where: str) -> float:
    """Return the quality of a model in evaluation mode, from the user's function."""
    found = judge(model.eval())
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        rule = f"--eval must return a number, got {type(found).__name__} {found!r:.40}"
        raise ConfigError(where, rule, "return one, such as the accuracy") from error


def check_path(path: Path | str, where: str, asked: str) -> None:
    """Raise `CheckpointError` if nothing lies at a path."""
    is_there = Path(path).expanduser().exists()
    rule = f"{asked} must be an existing file or folder, got {str(path)!r}"
    require(is_there, where, rule, "check the path", CheckpointError)


def check_model(name: str, where: str, asked: str = "MODEL") -> None:
    """Raise an error if a name is neither a folder nor ``module:function`` of a module that exists."""
    if Path(name).is_dir():
        return
    rule = f"{asked} must be module:function, file.py:function, or an existing model folder, got {name!r}"
    require(":" in name, where, rule, "check the path, or write my_module.py:build for build of that file")
    check_function(name, f"{where}: {asked}")


_CHECKS: Mapping[str, Callable[[str, str, str], None]] = {
    "path": check_path,
    "function": lambda name, where, asked: check_function(name, f"{where}: {asked}"),
    "model": check_model,
}


def check_named(name: object, reads: str, where: str, asked: str) -> None:
    """Raise an error if what an option names does not exist. Neither torch nor the user's code is imported.

    Args:
        name: Its value.
        reads: What it names: ``path``, ``function`` or ``model``.
        where: The command.
        asked: The option, as the command line spells it.
    """
    _CHECKS[reads](str(name), where, asked)


def build_model(name: str, where: str, asked: str = "MODEL") -> tuple[nn.Module, Any]:
    """Return the result of the user's function: (model, example inputs or None)."""
    check_model(name, where, asked)
    from torch import nn

    built = function(name, f"{where}: {asked}")()
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    rule = f"{name} must return a model, or (model, example_inputs), got {type(built).__name__}"
    require(isinstance(model, nn.Module), where, rule)
    return model, inputs


def device_name(name: str, where: str) -> str:
    """Return the name of a device of this machine; ``auto`` selects one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise ConfigError(
            where, f"--device must exist on this machine, got {name!r}: {first_line(error):.120}"
        ) from error
    return name


def load_weights(model: nn.Module, path: Path, where: str) -> str:
    """Load trained weights into a plain model; return the name prefix that the model's names lack."""
    return fit_weights_(model, state_dict_of(path, where), str(path), where)


def fit_weights_(model: nn.Module, state_dict: Mapping[str, Tensor], source: str, where: str) -> str:
    """Load a state dict into a plain model; return the name prefix that the model's names lack.

    Other weights in it, such as a teacher's, are ignored.
    """
    from shared_core.checkpoint_formats.opening import named_as
    from shared_core.checkpoint_formats.plain import check_values, unlike
    from shared_core.front_ends.finding import own_weights

    names = list(model.state_dict())
    first = next((key for key in state_dict if names and key.endswith(names[0])), "")
    prefix = first.removesuffix(names[0]) if first else ""
    own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    called = named_as(list(own), names)
    own = own_weights(model, names, {called[key]: value for key, value in own.items()})
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    missing, unexpected = unlike(model, own)
    other = next((key for key, value in own.items() if shapes.get(key, value.shape) != value.shape), None)
    if other is not None:
        got = f"{other} has shape {tuple(own[other].shape)}, the model's has {tuple(shapes[other])}"
    else:
        got = f"missing {missing[:5]} and unexpected {unexpected[:5]}" if missing or unexpected else ""
    rule = f"{source} does not hold the weights of this model: {got}"
    require(not got, where, rule, "build the model that was trained", CheckpointError)
    check_values(model, own, f"{where}: {source}")
    model.load_state_dict(own, strict=False)
    return prefix


def note_unfinished(path: Path) -> None:
    """Print a note if a path is a checkpoint of a run whose techniques had more to do."""
    from shared_core.distributed.collectives import is_main
    from shared_core.engine.saving.state_file import STATE_FILE, sessions_at

    is_weights = path.is_file() and path.suffix != ".ckpt"
    place = path.parent if is_weights and (path.parent / STATE_FILE).is_file() else path
    if not is_main() or (is_weights and place is path):
        return
    is_baked = place.is_file()  # Lightning's files hold the weights that training would end with
    for state in sessions_at(place, with_tensors=False):
        keys = dict.fromkeys(key for key, at, _ in state.get("ahead", ()) if at is not None or not is_baked)
        if keys:
            text = f"{path} was saved at step {state['step']}, before {listed(keys)} finished."
            remedy = "Use the model that training saves at its end, or resume the run to finish it."
            echo(f"note: {text} {remedy}", err=True)


def state_dict_of(path: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors in a folder, a ``.safetensors``, a ``.ckpt`` or another weights file."""
    from shared_core.checkpoint_formats import ADAPTER, DistributedWeights, load_checkpoint, open_ingredient
    from shared_core.checkpoint_formats.distributed import index_folder

    # opened as a soup's ingredient, a Lightning checkpoint would give the latent weights
    if path.is_dir() and (shards := index_folder(path)) is not None:
        return dict(DistributedWeights(shards))
    if path.suffix == ".ckpt" and not path.is_dir():
        content = load_checkpoint(path)
        is_one = isinstance(content, dict) and isinstance(content.get("state_dict"), dict)
        require(is_one, where, f"{path} is not a Lightning checkpoint: it has no state_dict", error=CheckpointError)
        return dict(content["state_dict"])
    opened = open_ingredient(path)
    rule = f"{path} must be a whole model, got a PEFT adapter"
    remedy = "save PeftModel.from_pretrained(model, FOLDER).merge_and_unload(), or train with --lora_save merged"
    require(opened.kind != ADAPTER, where, rule, remedy, CheckpointError)
    return {key: opened.tensor(key) for key in (*opened.specs, *opened.ties)}


_OTHERS = (".index.json", "_results.json", ".eff.json")
_BESIDE = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe"})
_LEFT_BEHIND = frozenset({
    "config.json", "generation_config.json", "trainer_state.json", "adapter_config.json", "eff_adapters.json",
})  # fmt: skip


def check_new(folder: Path, where: str) -> None:
    """Raise an error if the output folder is not empty or not writable."""
    rule = f"--out must be a new or empty folder, got {folder}"
    require(is_free(folder), where, rule, "choose another, or add --force", CheckpointError)
    check_writable(folder.resolve() if folder.is_symlink() else folder, f"{where}: --out")


def load_folder(
    folder: Path, where: str, *, trust_remote_code: bool = False, allow_codes: bool = False, dequantize: bool = False
) -> nn.Module:
    """Return the model in a Hugging Face folder, in evaluation mode, with all its parameters trainable."""
    from shared_core.libraries import collecting_later

    with collecting_later():  # it imports torch and transformers
        from torch import nn

        model = _from_folder(
            "load_teacher", folder, where, nn.Module(), trust_remote_code=trust_remote_code, dequantize=dequantize
        )
    is_float, rule = not getattr(model, "is_quantized", False), f"{folder} must hold float weights, got quantized ones"
    require(allow_codes or is_float, where, rule, "give the folder that they were quantized from", CheckpointError)
    return model.requires_grad_(True).eval()


def empty_folder(folder: Path, where: str) -> nn.Module:
    """Return the model that a Hugging Face folder's config describes, on the meta device, without values."""
    return _from_folder("empty_model", folder, where)


def _from_folder(way: str, folder: Path, where: str, *student: nn.Module, **options: bool) -> nn.Module:
    from shared_core.checkpoint_formats.adapter import ADAPTER_CONFIG

    for front_end in front_ends():
        load = getattr(front_end, way, None)
        if load is not None:
            rule = f"{folder} is not a model folder: it has no config.json"
            remedy = f"for your own class, write my_module:build, a function that builds it, and --weights {folder}"
            known = ("config.json", ADAPTER_CONFIG)
            is_whole = not folder.is_dir() or any((folder / name).is_file() for name in known)  # else a student's
            require(is_whole, where, rule, remedy, CheckpointError)
            try:
                loaded: nn.Module = load(str(folder), *student, **options)
            except CheckpointError as error:
                # models are loaded with the code for teachers
                reason = str(error).replace(f"distill: teacher {str(folder)!r}: ", "", 1)
                reason = reason.replace("distill: teacher's", "its", 1).replace("distill: teacher", "it", 1)
                reason = reason.removesuffix("; it would teach from random weights")
                raise CheckpointError(where, f"cannot load {folder}: {reason}") from error
            return loaded
    raise MissingExtraError(f"{where}: a model folder", "transformers", "hf")


def open_model(
    model: str,
    weights: Path | None,
    where: str,
    load: Callable[[nn.Module, Path, str], object] = load_weights,
    *,
    dequantize: bool = False,
) -> tuple[nn.Module, Any, Path | None]:
    """Return (model, example inputs or None, its folder or None) of a folder or of ``module:function``."""
    note_unfinished(Path(model) if weights is None else weights)
    if (folder := Path(model)).is_dir():
        require(weights is None, where, f"--weights must be left out for a folder, got {weights}")
        return load_folder(folder, where, dequantize=dequantize), None, folder
    network, example = build_model(model, where)
    if weights is not None:
        load(network, weights, where)
    return network, example, None


def made_up_inputs(model: nn.Module, where: str = "eff shrink", length: int = 8) -> dict[str, Any]:
    """Return random example inputs for a transformers model, from its config."""
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
    # a model of pairs with its own loss, such as CLIP, reads both
    if name == "pixel_values" or (inputs and {"pixel_values", "return_loss"} <= taken.keys()):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or _processed_size(Path(config._name_or_path))
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (2, getattr(vision, "num_channels", 3), height, width)
        inputs["pixel_values"] = torch.randn(shape, generator=generator)
    rule = f"cannot generate inputs for {name}, because it is neither tokens, pixels nor speech"
    require(inputs, where, rule, "name a function that returns them")
    return inputs


def _processed_size(folder: Path) -> int | tuple[int, int]:
    """Return the size of the images that a folder's image processor makes; 224 if it doesn't tell."""
    file = folder / "preprocessor_config.json"
    found = read_object(file) if file.is_file() else {}
    size = found.get("crop_size" if found.get("do_center_crop") else "size")
    if isinstance(size, dict):
        size = size.get("shortest_edge") or (size.get("height"), size.get("width"))
    is_size = all(type(one) is int and one > 0 for one in (size if isinstance(size, tuple) else [size]))
    return size if is_size else 224  # type: ignore[return-value]


def keep_report(out: Path, values: Mapping[str, Any]) -> None:
    """Write a command's report beside the file that it wrote, for `eff report`."""
    with atomic_write(out.with_name(f"{out.name}.eff.json")) as temporary:
        temporary.write_text(json_text(values) + "\n", encoding="utf-8")


def save_folder(
    out: Path,
    network: nn.Module,
    source: Path | None,
    reports: Mapping[str, Any],
    where: str,
    example: Any = None,
    add: Callable[[Path], None] = lambda temporary: None,
    file: str = "model.safetensors",
) -> None:
    """Write a model to a folder like its source, with its tokenizer, or only its weights if it has no folder.

    With example inputs, what is written is loaded and compared; `add` writes more into the folder.
    """
    from safetensors.torch import save_model

    from shared_core.tools.measuring import difference, outputs

    saved: Any = network
    with atomic_folder(out) as temporary:
        if source is None:
            save_model(network, str(temporary / file))  # shared tensors once
        else:
            saved.save_pretrained(temporary)
            copy_beside(source, temporary)
            if example is not None:
                gap = difference(outputs(network, example), outputs(load_folder(temporary, where), example))
                rule = f"the outputs of the saved model differ by {gap} after loading"
                require(gap <= 1e-5, where, rule, error=CheckpointError)
        add(temporary)
        for name, values in reports.items():
            (temporary / name).write_text(json_text(values) + "\n", encoding="utf-8")


def copy_beside(source: Path, target: Path) -> None:
    """Copy the tokenizer and other files beside a model's weights, except existing files and our reports."""
    for file in source.iterdir():
        wanted = file.suffix in _BESIDE and not file.name.endswith(_OTHERS) and file.name not in _LEFT_BEHIND
        if file.is_file() and wanted and not file.name.startswith("eff_") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
