"""Lightning's checkpoints: their weights, their files, which of them may be the best, and the recount at the end.

A file holds the baked weights that the user's module loads, and beside them the weights that training resumes from.
Lightning (2.6) writes into TMPDIR and moves the file. From another filesystem the move copies over the old checkpoint,
which a crash leaves half-written. So files are written aside and renamed here, and a damaged one is passed over on
resume. Only checkpoints that hold what was asked for compete for the best; early stopping waits for the first of them.
After all other callbacks, the final module and the final files are counted again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_eff._fsdp2 import load_optimizers_apart
from shared_core.checkpoint_formats import RAW_KEY, RUN_KEY, check_indexes, load_checkpoint, open_ingredient
from shared_core.checkpoint_formats.plain import DEPLOYMENT_KEY
from shared_core.distributed.collectives import from_main
from shared_core.distributed.sharded_tensors import fill_parameters_, is_sharded
from shared_core.engine.claims import Where
from shared_core.engine.session import Session
from shared_core.engine.session_state import loading
from shared_core.errors import CheckpointError, ReceiptError
from shared_core.files.atomic import atomic_write, make_folder
from shared_core.front_ends.wrapped_method import Wrapped

_BAKED_ALONE = "eff_baked_names"
"""Names that only baked weights have: a factorised layer's."""


def bake_saved(session: Session, checkpoint: dict[str, Any], run: str, metrics: Mapping[str, Any]) -> None:
    """Bake the weights in a checkpoint, keep those beside them that it changes, and say of which run and step they are.

    Of a distributed checkpoint Lightning writes the weights alone by all processes: one that training goes on from
    keeps the weights in training, as nothing can lie beside them.
    """
    found = {name: float(value) for name, value in metrics.items()}
    checkpoint[RUN_KEY] = {"id": run, "step": session.step, "metrics": found}
    checkpoint[DEPLOYMENT_KEY] = session.deployment()
    weights = checkpoint.get("state_dict")
    if not weights or not session.is_attached:
        return
    # With optimizer states it is a checkpoint to go on from, and shards cannot be kept twice.
    distributed = any(map(is_sharded, weights.values()))
    if distributed and "optimizer_states" in checkpoint:
        return
    baked = session.bake(weights)
    # Only what baking changed is kept twice: a dense model's file stays as large as it was.
    raw = {name: value for name, value in weights.items() if not (distributed or _same(value, baked.get(name)))}
    checkpoint["state_dict"] = type(weights)(baked)
    if raw:
        checkpoint[RAW_KEY] = raw
    if alone := [name for name in baked if name not in weights]:
        checkpoint[_BAKED_ALONE] = alone


def wrap_loading(strategy: Any, session: Session) -> list[Wrapped]:
    """Return the wrappers of a strategy: what it loads is checked, and finds the user's own layers if it shards.

    Lightning (2.6) goes through the parameters' names for weights alone; optimizers, which it loads in the same call,
    are of the layers in training.
    """
    checked = Wrapped(strategy, "load_checkpoint", load_checked)
    # The function is imported by name into the strategy's module: it has to be replaced there.
    owner = sys.modules[type(strategy).load_checkpoint.__module__]
    load = getattr(owner, "_load_checkpoint", None)
    if load is None:
        return [checked]
    fabric = sys.modules[load.__module__]

    def load_weights(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with loading(session):
            original(*args, **kwargs)

    def load_all(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = (
            Wrapped(fabric, "_load_raw_module_state", load_weights),
            # Weights and optimizers apart: see `load_optimizers_apart`.
            Wrapped(owner, "_load_checkpoint", functools.partial(load_optimizers_apart, fabric)),
        )
        try:
            return original(*args, **kwargs)
        finally:
            for part in parts:
                part.undo()

    return [checked, Wrapped(strategy, "load_checkpoint", load_all)]


def latent_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's weights as they were before `bake_saved`."""
    alone = checkpoint.get(_BAKED_ALONE, ())
    # What only baked weights have goes; what baking changed comes back from beside.
    kept = {name: value for name, value in checkpoint["state_dict"].items() if name not in alone}
    return {**kept, **checkpoint.get(RAW_KEY, {})}


def load_checked(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the strategy loads from a checkpoint; an error of ours where that is more than plain values."""
    # An index is a pickle: checked before torch reads it.
    if Path(path).is_dir():
        check_indexes(Path(path))
    try:
        return load(path, *args, **kwargs)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "resume", f"{path} must hold only tensors and plain values, got {str(error)[:300]}", "no code was run"
        ) from error


def restore_raw(module: Any, checkpoint: dict[str, Any]) -> None:
    """Let training go on from the weights that were kept beside the baked ones."""
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = latent_weights(checkpoint)
        if module.trainer.precision_plugin.precision == "64-true":
            module.double()  # which Lightning (2.6) does after loading: float32 would round the weights
    else:  # a strategy that shards has loaded it already
        fill_parameters_(module, checkpoint.get(RAW_KEY, {}))


def _same(value: Any, baked: Any) -> bool:
    if value is baked:
        return True
    return isinstance(value, Tensor) and isinstance(baked, Tensor) and torch.equal(value, baked)


def whole_files(trainer: Any, note: Callable[[str], None]) -> list[Wrapped]:
    """Surround the Trainer's own writing and reading of checkpoint files, and return what undoes it."""
    wrapped = [Wrapped(trainer._checkpoint_connector, "resume_start", functools.partial(_resume, trainer, note))]
    writer = trainer.strategy.checkpoint_io
    if type(writer).__name__ == "TorchCheckpointIO":
        wrapped.append(Wrapped(writer, "save_checkpoint", _save))
    return wrapped


def _save(original: Callable[..., None], checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    # A URL or options of another file system: Lightning's own writer knows them.
    if storage_options is not None or "://" in str(path):
        original(checkpoint, path, storage_options)
        return
    make_folder(Path(path).parent)
    with atomic_write(path) as temporary:
        torch.save(checkpoint, temporary)


def damage(file: Path) -> str | None:
    """Return what is wrong with a checkpoint file, None if nothing is; torch keeps a checksum of each tensor in it."""
    try:
        with zipfile.ZipFile(file) as archive:
            # without this option of torch the checksums are not computed
            wrong = archive.testzip() if torch.serialization.get_crc32_options() else None
        with contextlib.suppress(pickle.UnpicklingError):  # of a class that the user may allow
            torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # both raise whatever the damage makes it
        return f"it is truncated or no checkpoint ({error})"
    return None if wrong is None else f"{wrong} in it is damaged"


def _resume(
    trainer: Any, note: Callable[[str], None], original: Callable[..., None], path: Any = None, *args: Any, **more: Any
) -> None:
    file = Path(str(path or ""))
    reason = damage(file) if file.is_file() else None
    if reason is None:
        original(path, *args, **more)
        return
    others = [other for other in file.parent.glob("*.ckpt") if other.is_file() and other != file]
    # The newest that is whole, not only the one before.
    others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    whole = next((other for other in others if damage(other) is None), None)
    # Only what Lightning chose by itself may be replaced; a path that a user gave is taken or refused.
    if whole is None or not _is_found_by_lightning(trainer, file):
        advice = f"pass {whole}, which is" if whole else "none beside it is; start again"
        raise CheckpointError("resume", f"{file} must be a whole checkpoint, but {reason}", advice)
    note(f"not resumed from {file}, because {reason}; resumed from {whole} instead")
    original(str(whole), *args, **more)


def _is_found_by_lightning(trainer: Any, file: Path) -> bool:
    """Return whether `fit` looks for such a file itself: ``ckpt_path`` "last" and "hpc"."""
    found = {Path(trainer.default_root_dir) / file.name} if file.name.startswith("hpc_ckpt_") else set()
    for callback in trainer.checkpoint_callbacks:
        if type(callback).__name__ == "OnExceptionCheckpoint":
            found.add(Path(callback.ckpt_path))
        elif (
            (last := getattr(callback, "CHECKPOINT_NAME_LAST", None))
            and file.name.startswith(last)
            and callback.dirpath
        ):
            found.add(Path(callback.dirpath) / file.name)
    return file.absolute() in {path.absolute() for path in found}


class BestCheckpoints:
    """Surrounds the comparisons of a Trainer's ``ModelCheckpoint`` and ``EarlyStopping``."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self._passed_over: list[Any] = []
        self._savers = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "monitor", None)]
        self._stoppers = list(trainer.early_stopping_callbacks)
        self.wrapped = [
            *(Wrapped(each, "_save_monitor_checkpoint", functools.partial(self._save, each)) for each in self._savers),
            *(
                Wrapped(each, "_evaluate_stopping_criteria", functools.partial(self._stop, each))
                for each in self._stoppers
            ),
        ]

    def forget(self) -> None:
        """Compare anew: what a resumed run had found so far was of another recipe."""
        if any(callback.best_model_path for callback in self._savers):
            self._session.note("the best checkpoint until now was of another recipe: the comparison starts anew")
        # The files stay on disk; only the comparison forgets them.
        for callback in self._savers:
            callback.best_k_models, callback.best_model_path, callback.kth_best_model_path = {}, "", ""
            callback.best_model_score = None
        for callback in self._stoppers:
            callback.wait_count, callback.best_score = 0, _worst(callback)

    def _save(self, callback: Any, original: Callable[..., None], trainer: Any, candidates: dict[str, Tensor]) -> None:
        """Save what is not compared too, for a run to go on from, with the worst score: any other replaces it."""
        # Lightning (2.6) writes the last checkpoint only where it has saved one of the best.
        if self._session.ending.may_be_best() or callback.monitor not in candidates:
            original(trainer, candidates)
            return
        if callback not in self._passed_over:
            self._passed_over.append(callback)
        # By the callback's own method, so that save_top_k, links and file names stay its business.
        callback._update_best_and_save(_worst(callback), trainer, candidates)

    def _stop(self, callback: Any, original: Callable[..., Any], current: Tensor) -> Any:
        """Stop for what is not finite or diverges alone: neither patience nor the best score count."""
        if self._session.ending.may_be_best():
            return original(current)
        names = ("best_score", "wait_count", "patience", "stopping_threshold")
        before = {name: getattr(callback, name) for name in names}
        # Infinite patience and no threshold: only NaN and divergence can stop then.
        callback.patience, callback.stopping_threshold = math.inf, None
        try:
            return original(current)
        finally:
            vars(callback).update(before)

    @property
    def is_missing(self) -> bool:
        """Whether a callback has no best checkpoint because none held what was asked for."""
        return any(callback.best_model_score == _worst(callback) for callback in self._passed_over)

    def save_last(self) -> None:
        """Save the finished model as the best where there is none: `trainer.test(ckpt_path="best")` finds the run's."""
        for callback in self._passed_over:
            candidates = {
                "epoch": torch.tensor(self._trainer.current_epoch),
                "step": torch.tensor(self._trainer.global_step),
                **self._trainer.callback_metrics,
            }
            # Nothing better than the worst score was ever saved.
            if (
                callback.best_model_score == _worst(callback)
                and (metric := candidates.get(callback.monitor)) is not None
            ):
                callback._update_best_and_save(metric, self._trainer, candidates)
                self._session.note(
                    "no checkpoint that was compared held what was asked for: the model of the last step is saved as "
                    f"the best, {callback.best_model_path}"
                )


def _worst(callback: Any) -> Tensor:
    return torch.tensor(math.inf if callback.mode == "min" else -math.inf)


_HARMLESS = {"EffCallback", "ProgressBar", "ModelSummary", "Checkpoint"}


class Recount:
    """Compares a run's module and files with its receipt when training ends, and files that are saved later."""

    def __init__(self, trainer: Any, module: Any, session: Session, differs: Callable[[], None]) -> None:
        self._trainer, self._module, self._session, self._differs = trainer, module, session, differs
        self._files: dict[Path, tuple[int, bool]] = {}
        self._last_step = -1
        self._wrapped = [
            # the last moment at which sharded weights lie where processes can gather them
            Wrapped(trainer.strategy, "teardown", self._before_teardown),
            Wrapped(module, "teardown", self._at_last),
        ]

    def close(self) -> None:
        """Count no more: the model becomes another one."""
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        self._wrapped = []

    def saved(self, path: Any) -> None:
        """Remember a file that was written in this run; it is read when the run is over."""
        self._files[Path(str(path))] = self._session.step, self._session.is_finished

    def keep_final(self) -> None:
        """Save the finished module where techniques replaced its weights and no checkpoint holds them.

        ModelCheckpoint saves before training ends: the soup, or ranges and batch norms of an average, come after that.
        """
        trainer, session = self._trainer, self._session
        folders = [found for one in trainer.checkpoint_callbacks if (found := getattr(one, "dirpath", None))]
        replaced = [key for key, one in session.techniques.items() if one.replaces_weights]
        if trainer.fast_dev_run or not (folders and replaced) or from_main(self._file_of_final()):
            return
        # In a folder of its own: what looks for checkpoints to resume from, or to average, does not find it.
        path = Path(from_main(str(_free(Path(folders[0]) / "final" / "final.ckpt"))))
        trainer.save_checkpoint(path, weights_only=True)
        session.note(f"{' and '.join(replaced)}: the final model is saved in {path}, as no other checkpoint holds it")

    def _file_of_final(self) -> str:
        """Return the checkpoint of this run that holds the finished module, empty if none does."""
        final, context = self._module.state_dict(), self._session.context
        # Sharded weights are not compared; ranges that are estimated again at the end show in no weight.
        alone = any(map(is_sharded, final.values())) or (
            context is not None and any(plan.looks_at_batches for plan in context.plans.values())
        )
        for path, (step, is_final) in self._files.items():
            if not path.exists():
                continue
            if is_final or (step == self._session.step and not alone and _holds(path, final)):
                return str(path)
        return ""

    def _before_teardown(self, original: Callable[[], None]) -> None:
        # Once: a nested `fit` of a callback tears down too.
        if self._session.is_finished and self._last_step < 0:
            self._last_step = self._trainer.global_step
            self._counted(lambda: self._verify(gather=True))
        original()

    def _at_last(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if self._last_step < 0 or self._trainer.interrupted:
            self.close()
            return
        self.close()
        self._counted(lambda: self._verify(gather=False))
        self._counted(self._verify_files)
        self._wrapped = [Wrapped(self._trainer, "save_checkpoint", self._save_later)]

    def _save_later(self, original: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        original(filepath, *args, **kwargs)
        # Trained on, or another module: the receipt is not of these weights.
        if self._trainer.global_step != self._last_step or self._trainer.lightning_module is not self._module:
            self.close()
        elif self._trainer.is_global_zero:
            self._verify_file(Path(str(filepath)), Where.END)

    def _counted(self, verify: Callable[[], None]) -> None:
        try:
            verify()
        except ReceiptError:
            self._differs()
            raise

    def _verify(self, *, gather: bool) -> None:
        self._session.verify(None, "the trained module", self._others(), gather=gather)

    def _verify_files(self) -> None:
        found = ""
        # The main process reads; all raise, or the others would wait.
        for path, (step, is_final) in self._files.items() if self._trainer.is_global_zero else ():
            # Files of the last step and those that were saved after the end: earlier ones are not what the receipt
            # describes.
            if not path.exists() or not (is_final or step == self._session.step):
                continue
            # of shards that training goes on from, the weights in training are saved
            before = Where.TRAINED if path.is_dir() else Where.SAVED
            try:
                self._verify_file(path, Where.END if is_final else before)
            except ReceiptError as error:
                found = found or str(error)
        if found := from_main(found):
            raise ReceiptError(found)

    def _verify_file(self, path: Path, where: Where) -> None:
        if not self._session.claims.any_hold(where):
            return
        try:
            weights = _weights_in(path)
        except Exception as error:  # whatever a CheckpointIO of the user's own makes of it
            self._session.note(f"not counted again in {path}, which cannot be read: {type(error).__name__}: {error}")
            return
        self._session.verify(weights, str(path), self._others(), where=where)

    def _others(self) -> list[str]:
        kinds = [type(callback) for callback in self._trainer.callbacks]
        return [kind.__name__ for kind in kinds if not _HARMLESS & {base.__name__ for base in kind.__mro__}]


def _holds(path: Path, final: Mapping[str, Any]) -> bool:
    try:
        weights = _weights_in(path)
        # a user's hook may leave some out, as those of a frozen teacher
        return weights.keys() <= final.keys() and all(
            torch.equal(weights[name].cpu(), final[name].detach().cpu()) for name in weights
        )
    except Exception:  # whatever a CheckpointIO of the user's own makes of it
        return False


def _free(path: Path) -> Path:
    """Return a path at which nothing lies yet: with a version after the name, as ModelCheckpoint adds one."""
    versions = (path.with_stem(f"{path.stem}-v{version}") for version in itertools.count(1))
    return next(one for one in itertools.chain([path], versions) if not one.exists())


class _Shards(Mapping[str, Tensor]):
    """The weights in a folder of shards, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._read = open_ingredient(folder)

    def __getitem__(self, name: str) -> Tensor:
        return self._read.tensor(name)

    def __iter__(self) -> Any:
        return iter([*self._read.specs, *self._read.ties])

    def __len__(self) -> int:
        return len(self._read.specs) + len(self._read.ties)


def _weights_in(path: Path) -> Mapping[str, Tensor]:
    """Return the weights that a user's module loads from a checkpoint."""
    if path.is_dir():
        return _Shards(path)
    weights: Mapping[str, Tensor] = load_checkpoint(path)["state_dict"]
    return weights


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what is in a checkpoint file."""
    content = load_checkpoint(path)
    if not isinstance(content, dict):
        raise CheckpointError("checkpoint", f"{path} must hold a dict, got {type(content).__name__}", "it is another's")
    return content
