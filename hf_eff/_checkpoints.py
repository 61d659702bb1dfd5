"""The trainer's checkpoint folders: find them, check that they are complete, read their weights by the model's names.

Weights and buffers come from the main process's file. State that differs per process is saved separately.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import safe_globals  # type: ignore[attr-defined]  # in trainer_pt_utils since 5.2
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from shared_core.checkpoint_formats import check_indexes, load_torch_file, open_ingredient, read_json, storage_key
from shared_core.checkpoint_formats.files import LazyTensors
from shared_core.checkpoint_formats.opening import MODULES, parts_of
from shared_core.distributed.collectives import (
    world_size,
)
from shared_core.engine.saving.state_file import STATE_FILE, load_state
from shared_core.errors import CheckpointError
from shared_core.files.atomic import clean_strays, is_stray, named_failure
from shared_core.files.journal import begin_list, damage_by_list, finish_list, is_unfinished
from shared_core.front_ends.session import Session

_STATE = "trainer_state.json"
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def step_of(folder: Path | str) -> int | None:
    """Return the step in a checkpoint folder's name, None for any other folder.

    Example:
        >>> step_of("run/checkpoint-20"), step_of("run")
        (20, None)
    """
    prefix, _, step = Path(folder).name.rpartition("-")
    return int(step) if prefix == PREFIX_CHECKPOINT_DIR and step.isdigit() else None


def checkpoint_folder(run: Path | str, step: int) -> Path:
    """Return the folder that the trainer saves step `step` into."""
    return Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def damage(folder: Path) -> str | None:
    """Return why a run with techniques cannot resume from this checkpoint, None if it can.

    Files are compared with the checkpoint's list of files. Without a list, weights are checked by their headers, and
    ``torch.save`` files by their zip directory, which a truncated file lacks. Both, and indexes, are checked for
    unsafe pickles.
    """
    if not folder.is_dir():
        return "it is not a folder"
    shards = sorted(folder.glob(f"{FSDP_MODEL_NAME}_*/.metadata"))  # written last
    shards += folder.glob("global_step*/*model_states.pt")  # DeepSpeed: stage 3 saves no other model file
    try:
        # The list first: it has a checksum per file, and shows by itself if the writer was stopped.
        if reason := damage_by_list(folder, functools.partial(_is_replaced, folder)):
            return reason
        # A folder with only shards or adapters has no file of the whole model.
        if not shards and not any((folder / name).exists() for name in ADAPTER_FILES):
            open_ingredient(folder).close()
        for adapter in filter(Path.exists, (folder / name for name in ADAPTER_FILES)):
            open_ingredient(adapter).close()
        if "global_step" not in read_json(folder / _STATE):
            return f"{_STATE} holds no global_step"
        if not (folder / STATE_FILE).is_file():
            return f"it has no {STATE_FILE}: it was saved without these techniques, or is incomplete"
        load_state(folder)
        check_indexes(folder)
        for file in (
            *sorted(folder.glob("*.pt*")),
            folder / f"{FSDP_MODEL_NAME}.bin",
            folder / f"{OPTIMIZER_NAME}.bin",
        ):
            # Skip .safetensors, which were read above. Optimizer and scheduler are checked too: a damaged one would
            # make the resume fail.
            if file.is_file() and file.suffix in (".pt", ".pth", ".bin"):
                if not zipfile.is_zipfile(file):
                    return f"{file.name} is truncated or not a checkpoint"
                with safe_globals():  # type: ignore[no-untyped-call]  # of the generators' states
                    load_torch_file(file)
    except CheckpointError as error:
        return str(error)
    return None


def _is_replaced(folder: Path, name: str) -> bool:
    """Return True if the trainer loads other files (shards or merged shards) instead of this weight file."""
    stands_in = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    return bool(_WEIGHTS.fullmatch(name)) and any((folder / other).is_file() for other in stands_in)


def save_whole(trainer: Trainer, method: Callable[..., None], model: Any, trial: Any) -> None:
    """Let the trainer save a checkpoint, and write its list of files before an older checkpoint is deleted."""
    folder = checkpoint_folder(trainer._get_output_dir(trial), trainer.state.global_step)
    state, is_new, is_whole = trainer.state, not folder.exists(), False
    # Patched on the instance for this save only: the Trainer writes its state last and then deletes older checkpoints,
    # so the list must be complete in between.
    write_state = state.save_to_json

    def write_state_and_list(path: str) -> None:
        nonlocal is_whole
        write_state(path)  # the trainer's last file
        _wait_for_others()
        finish_list(folder)
        is_whole = True

    if not trainer.args.should_save:
        method(model, trial)
        _wait_for_others()
        return
    try:
        begin_list(folder)
        vars(state)["save_to_json"] = write_state_and_list
        method(model, trial)
    except BaseException:
        if is_whole:  # a later step failed, such as a push to the Hub
            raise
        # A half-written new folder is useless. An existing folder is kept and marked as unfinished.
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        with named_failure(folder, "the partial files are removed" if is_new else "it is incomplete"):
            raise
    finally:
        vars(state).pop("save_to_json", None)


def _wait_for_others() -> None:
    if world_size() > 1:
        dist.barrier()


def clean_run(run: Path | str) -> None:
    """Remove files that a killed run left half-written."""
    for folder in (Path(run), *Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        clean_strays(folder)


@contextlib.contextmanager
def factors_renamed(folder: Path, model: nn.Module) -> Iterator[None]:
    """Rename weights of factorized layers that are saved inside the block and recounted after it."""
    from shared_core.low_rank.factorize import hide
    from shared_core.low_rank.layers import factorized

    try:
        yield
    finally:
        if factorized(model):
            hide(folder)


def newest_whole(run: Path | str) -> tuple[Path | None, dict[Path, str]]:
    """Return a run's newest complete checkpoint, and the newer incomplete ones, each with the reason.

    The checkpoint is None if the run was killed while it wrote its first.
    """
    folders = [folder for folder in Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(folder) is not None]
    damaged: dict[Path, str] = {}
    # From the newest: the first whole one wins.
    for folder in sorted(folders, key=lambda folder: step_of(folder) or 0, reverse=True):
        reason = damage(folder)
        if reason is None:
            return folder, damaged
        damaged[folder] = reason
    # Only interrupted saves: no finished checkpoint was lost. If all are really damaged, the run must not silently
    # start anew.
    if not all(map(_was_cut_short, damaged)):
        lines = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
        raise CheckpointError("resume", f"{run} has no complete checkpoint: {lines}")
    return None, damaged


def _was_cut_short(folder: Path) -> bool:
    """Return True if the writer was stopped while saving this checkpoint. Earlier checkpoints are not affected."""
    if folder.is_dir() and all(is_stray(Path(path.name)) for path in folder.iterdir()):
        return True  # stopped before its list was started
    with contextlib.suppress(CheckpointError):
        return is_unfinished(folder)
    return False


def resumed_from(resume: Any, trainer: Trainer, trial: Any, session: Session) -> str | None:
    """Return the checkpoint to resume from, None to start anew. Report incomplete newer ones, and an unused flag.

    Scripts that pass their newest checkpoint, as transformers' examples do, get the newest complete one if the run
    was killed during a save.
    """
    if resume is None or resume is False:
        if resume is None and (unused := trainer.args.resume_from_checkpoint):
            session.note(
                f"--resume_from_checkpoint {unused} is not used, so the run starts at step 0: the script must call "
                "trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            )
        return None
    run = trainer._get_output_dir(trial)
    # An incomplete folder of this run, given by path, may be replaced by an earlier one of the run. Any other folder is
    # loaded or refused.
    of_run = resume is True or Path(resume).absolute().parent == Path(run).absolute()
    if not of_run or (resume is not True and not _was_cut_short(Path(resume))):
        if broken := damage(Path(resume)):
            why = f"it is not a complete checkpoint of a run with these techniques: {broken}"
            # start with transformers' own message: scripts may look for it
            raise CheckpointError(
                f"Can't find a valid checkpoint at {resume}",
                why if Path(resume).exists() else "there is no such folder",
                _remedy(Path(resume), run),
            )
        _note_missing(Path(resume), session)
        return str(resume)
    newest, damaged = newest_whole(run)
    instead = f"resumed from {newest} instead" if newest else "there is no earlier one, so the run starts at step 0"
    for folder, reason in damaged.items():
        session.note(f"not resumed from {folder}: {reason.removeprefix(f'{folder}: ')}; {instead}")
    if newest is None and damaged:
        return None
    if newest is None:
        raise CheckpointError(
            f"No valid checkpoint found in output directory ({run})", "there is nothing to resume from"
        )
    _note_missing(newest, session)
    return str(newest)


def _remedy(given: Path, run: str) -> str:
    for folder in (given, Path(run)):
        with contextlib.suppress(CheckpointError):
            if newest := newest_whole(folder)[0]:
                return f"give its newest complete one, {newest}" if folder == given else f"the newest is {newest}"
    return "check the path"


def _note_missing(folder: Path, session: Session) -> None:
    if not any(folder.glob("optimizer*")) and not any(folder.glob("global_step*")):  # the latter is DeepSpeed's
        session.note(
            f"resumed from {folder}, which has no optimizer state (save_only_model): optimizer, learning rate schedule "
            "and random numbers start anew, so the run differs from an uninterrupted one"
        )


class ModelWeights(LazyTensors):
    """A checkpoint's tensors under the names of a model's state dict, read on access.

    Files keep one name of a tied tensor. The others are found through the model's own ties. If the class saves under
    older names than it uses (ViT in transformers 5), the whole model is read through that class.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        ingredient = open_ingredient(folder, alone=True)
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        # A tied weight may be stored under its other name.
        saved_under = {storage_key(value): name for name, value in state.items() if ingredient.has(name)}
        sources = {
            name: name if ingredient.has(name) else saved_under.get(storage_key(value), "")
            for name, value in state.items()
        }
        lacking = [name for name, source in sources.items() if not source]
        self.renamed = bool(lacking)  # True if the file's names are not the model's
        # Try transformers' renaming of file names (experts, tied heads), name by name.
        found = {
            storage_key(state[name]): other for name in lacking if ingredient.has(other := saved_name(model, name))
        }
        sources |= {name: found.get(storage_key(state[name]), "") for name in lacking}
        if all(sources.values()):
            super().__init__(sources, ingredient.tensor)
            return
        # Otherwise load through the class: some conversions involve several tensors.
        loaded, _ = _through_class(model, folder)  # without factors, which the class does not know
        unknown = next((name for name, source in sources.items() if not source and name not in loaded), None)
        if unknown is not None:
            raise CheckpointError(folder, f"the weights lack {unknown} of this model", "check the path")
        read = ingredient.tensor
        names = {name: name for name in state}
        super().__init__(names, lambda name: loaded[name] if name in loaded else read(sources[name]))


class ModuleWeights(LazyTensors):
    """`ModelWeights` for a folder whose modules have their own folders, as sentence-transformers saves."""

    renamed = False  # its trainer loads it with the modules' own classes

    def __init__(self, folder: Path, model: nn.Module) -> None:
        held: dict[str, tuple[ModelWeights, str]] = {}
        for part in parts_of(folder):
            if not any(_WEIGHTS.fullmatch(file.name) for file in (folder / part.folder).iterdir()):
                continue
            try:
                module = model.get_submodule(part.module)
            except AttributeError as error:
                raise CheckpointError(folder, f"module {part.module!r} does not fit the model") from error
            # A module that wraps one transformers model saves that model's files.
            wrapped = [name for name, child in module.named_children() if isinstance(child, PreTrainedModel)]
            inner = wrapped[0] if len(wrapped) == 1 else ""
            weights = ModelWeights(folder / part.folder, module.get_submodule(inner))
            prefix = part._replace(inner=inner).prefix
            held |= {prefix + name: (weights, name) for name in weights}
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        tied = {storage_key(value): held[name] for name, value in state.items() if name in held}
        places = {name: held.get(name) or tied.get(storage_key(value)) for name, value in state.items()}
        lacking = next((name for name, place in places.items() if place is None), None)
        if lacking is not None:
            raise CheckpointError(folder, f"the weights lack {lacking} of this model", "check the path")
        super().__init__(places, lambda place: place[0][place[1]])


def weights_of(folder: Path, model: nn.Module) -> ModelWeights | ModuleWeights:
    """Return a checkpoint's tensors under the model's names, read on access."""
    return (ModuleWeights if (folder / MODULES).is_file() else ModelWeights)(folder, model)


def saved_name(model: nn.Module, name: str) -> str:
    """Return the name that transformers saves a tensor under; its own name if more than the name would change."""
    if not isinstance(model, PreTrainedModel):
        return name
    # An empty probe: only the name is converted.
    probe = torch.empty(0)
    try:
        from transformers.core_model_loading import revert_weight_conversion

        found = revert_weight_conversion(model, {name: probe})
    except Exception:  # conversions that need other tensors raise any error; transformers 4 has no conversion
        return name
    return next((other for other, value in found.items() if value is probe), name)


def own_weights(model: nn.Module, names: Collection[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return saved weights under the model's own names, undoing transformers' renaming and splitting."""
    by_saved = {saved_name(model, name): name for name in names}
    own = {name if name in names else by_saved.get(name, name): value for name, value in state.items()}
    others = own.keys() - set(names)
    lacking = model.state_dict().keys() - own.keys()
    # All names are known: nothing to convert.
    if not others or not lacking:
        return own
    loaded, left_over = _through_class(model, state)
    unknown = {name: own.get(name, torch.empty(0)) for name in left_over - set(names)}
    own = {name: value for name, value in own.items() if name not in others}
    return own | unknown | {name: loaded[name] for name in lacking if name in loaded}


def _through_class(model: nn.Module, source: Path | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the weights that a model's class reads from a folder or state dict, and the names it does not know."""
    if not isinstance(model, PreTrainedModel):
        return {}, set()
    stock: Any = type(model)
    folder, given = (source, {}) if isinstance(source, Path) else (None, {"state_dict": dict(source)})
    report = logging.getLogger("transformers.modeling_utils")  # silence its list of missing and unused names
    level = report.level
    report.setLevel(logging.ERROR)
    # from_pretrained draws missing weights at random: fork, so that the caller's random state does not change.
    try:
        with torch.random.fork_rng(devices=[]):
            loaded, info = stock.from_pretrained(
                folder, config=model.config, output_loading_info=True, ignore_mismatched_sizes=True, **given
            )
    except RuntimeError as error:
        raise CheckpointError(
            folder or "weights", f"the weights do not load into {stock.__name__}: {error}", "check the path"
        ) from error
    finally:
        report.setLevel(level)
    absent = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    found = {name: value for name, value in loaded.state_dict().items() if name not in absent}
    return found, set(info["unexpected_keys"])


def load_renamed_(model: nn.Module, folder: Path) -> bool:
    """Load a checkpoint whose names differ from the model's. If they match, the trainer has loaded it: return False.

    The trainer compares the names in the file and only warns about missing ones.
    """
    if any((folder / name).exists() for name in ADAPTER_FILES):
        return False
    weights = weights_of(folder, model)
    if weights.renamed:
        model.load_state_dict(dict(weights))
    return weights.renamed
