"""What a Lightning run saves and loads with techniques: its state, the best checkpoints, the final model.

Only checkpoints that meet their targets compete for the best. Early stopping waits for the first of them. After all
other callbacks, the final module and files are compared with the receipt.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_eff._checkpoints import bake_saved, restore_raw
from lightning_eff._run_environment import run_environment
from shared_core.checkpoint_formats import RUN_KEY, load_checkpoint, open_ingredient
from shared_core.checkpoint_formats.files import stored_weights
from shared_core.checkpoint_formats.plain import DEPLOYMENT_KEY
from shared_core.distributed.collectives import from_main
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.checks.claims import Where
from shared_core.engine.receipt import RECEIPT_KEY, ReceiptPlace
from shared_core.engine.saving.session_state import fit_to
from shared_core.errors import ReceiptError
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped

if TYPE_CHECKING:
    from lightning_eff._adapters import Adapter
    from lightning_eff._resume import ExactResume
    from lightning_eff._services import LightningServices

_STATE_KEY, _RESUME_KEY = "eff_state", "eff_resume"


class Saving:
    """Adds the run's state and finished weights to checkpoints, and restores them."""

    def __init__(
        self, trainer: Any, session: Session, services: LightningServices, final: Any, trains_on: bool
    ) -> None:
        self._trainer, self._session, self._services = trainer, session, services
        self.final: Mapping[str, Any] | None = final  # the state at the end of this run, or of the one before it
        self.begins_with: Mapping[str, Any] | None = final if trains_on else None  # pruned weights stay pruned
        """The state that training begins with, None for a new run."""
        self.best = BestCheckpoints(trainer, session)
        self._recount: Recount | None = None
        self._validated_at = -1
        self._place: ReceiptPlace | None = None

    def wrapped(self, module: Any, adapters: Sequence[Adapter]) -> list[Wrapped]:
        """Return wrappers of checkpoint writing, which adapters also see, and start checking saved files."""
        self._adapters = adapters
        self._recount = Recount(self._trainer, module, self._session, self.leave_receipt)
        return [
            Wrapped(module, "on_save_checkpoint", self._save_weights),
            Wrapped(module, "on_load_checkpoint", self._load_weights),
            Wrapped(self._trainer, "save_checkpoint", self._save),
            *self.best.wrapped(),
        ]

    def _save(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # Inside `swapped`: all processes gather sharded state, including those that write nothing.
        with self._session.swapped("checkpoint"):
            original(*args, **kwargs)
        path = str(args[0] if args else kwargs["filepath"])
        if self._recount is not None:
            self._recount.saved(path)
        for adapter in self._adapters:
            adapter.saved(path)

    def close(self) -> None:
        """Stop checking saved files: the module's weights change from now on."""
        if self._recount is not None:
            self._recount.close()

    def end(self) -> None:
        """Validate the finished model if its weights changed, save it if no checkpoint has it, and report."""
        if self._services.can_validate:
            self._session.validation.of_final(self._services.evaluate, after_steps=self.best.is_missing)
        self.best.save_last()
        if self._recount is not None:
            self._recount.keep_final()
        self.leave_receipt()

    def find_place(self) -> None:
        """Choose the place of the receipt. Every process must call this."""
        trainer = self._trainer
        folders = [str(found) for each in trainer.checkpoint_callbacks if (found := getattr(each, "dirpath", None))]
        self._place = ReceiptPlace(trainer.log_dir or trainer.default_root_dir, folders)  # every process must ask

    def validates(self) -> None:
        """Record that metrics are of this step. Checkpoints never carry those of the sanity check."""
        self._validated_at = -1 if self._trainer.sanity_checking else self._session.step

    def add_state(self, checkpoint: dict[str, Any], resume: ExactResume, skipped: bool) -> None:
        """Add to a checkpoint what an exact resume needs."""
        session = self._session
        # After the end the module is baked, and its current state is not a training state: keep the state at the end.
        checkpoint[_STATE_KEY] = (ended := session.is_finished and self.final) or session.state_dict()
        if ended:
            checkpoint[DEPLOYMENT_KEY] = session.files.deployment()
        checkpoint[_RESUME_KEY] = resume.state_dict(checkpoint[_STATE_KEY], skipped)
        if self._place is not None and self._place.is_in_checkpoints:
            checkpoint[RECEIPT_KEY] = session.receipt().json()

    def take_state(self, checkpoint: Mapping[str, Any], resume: ExactResume) -> None:
        """Keep a checkpoint's state until training starts."""
        self.begins_with = resume.load_state_dict(checkpoint.get(_RESUME_KEY), checkpoint.get(_STATE_KEY))
        saved_run = checkpoint.get(RUN_KEY)
        if isinstance(saved_run, dict):
            self._services.run = saved_run.get("id", self._services.run)
        if self.begins_with is None:
            self._session.is_changed = True
            self._session.note("the checkpoint was saved without these techniques, so they start at step 0")

    def _save_weights(self, original: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
        metrics = self._trainer.callback_metrics if self._validated_at == self._session.step else {}
        bake_saved(self._session, checkpoint, self._services.run, metrics)  # before the user's hook may drop keys
        original(checkpoint)

    def _load_weights(self, original: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
        original(checkpoint)
        module = self._trainer.lightning_module
        # Before weights are loaded: the checkpoint's adapters and quantizers must exist for its keys to fit.
        fit_to(self._session, checkpoint.get(_STATE_KEY, {}), run_environment(self._trainer, module))
        restore_raw(module, checkpoint)

    def leave_receipt(self) -> None:
        """Write the receipt to its place, and print its line."""
        trainer, receipt = self._trainer, self._session.receipt()
        if not trainer.is_global_zero:
            return
        if not trainer.fast_dev_run and self._place is not None:
            receipt.leave(self._place)
        self._services.say(receipt.final_text())


class BestCheckpoints:
    """Wraps the comparisons of a Trainer's ``ModelCheckpoint`` and ``EarlyStopping``."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self._passed_over: list[Any] = []
        self._savers = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "monitor", None)]
        self._stoppers = list(trainer.early_stopping_callbacks)

    def wrapped(self) -> list[Wrapped]:
        """Return the wrappers of the comparisons."""
        save, stop = "_save_monitor_checkpoint", "_evaluate_stopping_criteria"
        return [
            *(Wrapped(each, save, functools.partial(self._save, each)) for each in self._savers),
            *(Wrapped(each, stop, functools.partial(self._stop, each)) for each in self._stoppers),
        ]

    def forget(self) -> None:
        """Restart the comparison: the resumed run's best so far had another recipe."""
        if any(callback.best_model_path for callback in self._savers):
            self._session.note("the best checkpoint so far had another recipe: the comparison starts anew")
        # The files stay on disk, only the comparison forgets them.
        for callback in self._savers:
            callback.best_k_models, callback.best_model_path, callback.kth_best_model_path = {}, "", ""
            callback.best_model_score = None
        for callback in self._stoppers:
            callback.wait_count, callback.best_score = 0, _worst(callback)

    def _save(self, callback: Any, original: Callable[..., None], trainer: Any, candidates: dict[str, Tensor]) -> None:
        """Also save a model that is not compared, for resuming, with the worst score: any other replaces it."""
        # Lightning (2.6) writes the last checkpoint only after one of the best was saved.
        if self._session.progress.may_be_best() or callback.monitor not in candidates:
            original(trainer, candidates)
            return
        if callback not in self._passed_over:
            self._passed_over.append(callback)
        # With the callback's own method, which handles save_top_k, links and file names.
        callback._update_best_and_save(_worst(callback), trainer, candidates)

    def _stop(self, callback: Any, original: Callable[..., Any], current: Tensor) -> Any:
        """Stop only on NaN or divergence: neither patience nor the best score count."""
        if self._session.progress.may_be_best():
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
        """True if a callback has no best checkpoint because no model met its targets."""
        return any(callback.best_model_score == _worst(callback) for callback in self._passed_over)

    def save_last(self) -> None:
        """Without a best model, save the finished one as best, so that `trainer.test(ckpt_path="best")` finds it."""
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
                    "no evaluated checkpoint met the targets: the model of the last step is saved as "
                    f"the best, {callback.best_model_path}"
                )


def _worst(callback: Any) -> Tensor:
    return torch.tensor(math.inf if callback.mode == "min" else -math.inf)


_HARMLESS = {"EffCallback", "ProgressBar", "ModelSummary", "Checkpoint"}


class Recount:
    """Compares a run's module and files with its receipt when training ends, and later files when they are saved."""

    def __init__(self, trainer: Any, module: Any, session: Session, differs: Callable[[], None]) -> None:
        self._trainer, self._module, self._session, self._differs = trainer, module, session, differs
        self._files: dict[Path, tuple[int, bool]] = {}
        self._last_step = -1
        self._wrapped = [
            # the last moment when processes can gather sharded weights
            Wrapped(trainer.strategy, "teardown", self._before_teardown),
            Wrapped(module, "teardown", self._at_last),
        ]

    def close(self) -> None:
        """Stop checking: the model changes from now on."""
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        self._wrapped = []

    def saved(self, path: Any) -> None:
        """Remember a file written in this run. It is read when the run has ended."""
        self._files[Path(str(path))] = self._session.step, self._session.is_finished

    def keep_final(self) -> None:
        """Save the finished module if techniques replaced its weights and no checkpoint has them.

        ModelCheckpoint saves before training ends. The soup, or an average's ranges and batch norms, come later.
        """
        trainer, session = self._trainer, self._session
        folders = [found for one in trainer.checkpoint_callbacks if (found := getattr(one, "dirpath", None))]
        replaced = [key for key, one in session.techniques.items() if one.replaces_weights]
        if trainer.fast_dev_run or not (folders and replaced) or from_main(self._file_of_final()):
            return
        # In its own folder, so that a search for checkpoints to resume from or to average does not find it.
        path = Path(from_main(str(_free(Path(folders[0]) / "final" / "final.ckpt"))))
        trainer.save_checkpoint(path, weights_only=True)
        session.note(f"{' and '.join(replaced)}: the final model is saved in {path}, since no other checkpoint has it")

    def _file_of_final(self) -> str:
        """Return this run's checkpoint with the finished module, empty if there is none."""
        final, context = self._module.state_dict(), self._session.context
        # Sharded weights are not compared. Ranges that are estimated again at the end do not show in the weights.
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
        # Once: a callback's nested `fit` tears down too.
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
        # Trained further, or another module: the receipt does not describe these weights.
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
        self._session.files.verify(None, "the trained module", self._others(), gather=gather)

    def _verify_files(self) -> None:
        found = ""
        for path, (step, is_final) in self._files.items() if self._trainer.is_global_zero else ():
            # Files of the last step and those saved after the end. The receipt does not describe earlier ones.
            if not path.exists() or not (is_final or step == self._session.step):
                continue
            # shards to resume from hold the weights in training
            before = Where.TRAINED if path.is_dir() else Where.SAVED
            try:
                self._verify_file(path, Where.END if is_final else before)
            except ReceiptError as error:
                found = found or str(error)
        self._session.files.refuse_on_all(found)

    def _verify_file(self, path: Path, where: Where) -> None:
        if not self._session.files.claims.any_hold(where):
            return
        try:
            weights = _weights_in(path)
        except Exception as error:  # a user's CheckpointIO may raise anything
            self._session.note(f"{path} was not checked against the receipt: {type(error).__name__}: {error}")
            return
        self._session.files.verify(weights, str(path), self._others(), where=where)

    def _others(self) -> list[str]:
        kinds = [type(callback) for callback in self._trainer.callbacks]
        return [kind.__name__ for kind in kinds if not _HARMLESS & {base.__name__ for base in kind.__mro__}]


def _holds(path: Path, final: Mapping[str, Any]) -> bool:
    try:
        weights = _weights_in(path)
        # a user's hook may leave some out, such as a frozen teacher's
        return weights.keys() <= final.keys() and all(
            torch.equal(weights[name].cpu(), final[name].detach().cpu()) for name in weights
        )
    except Exception:  # a user's CheckpointIO may raise anything
        return False


def _free(path: Path) -> Path:
    """Return an unused path: with a version after the name, as ModelCheckpoint adds one."""
    versions = (path.with_stem(f"{path.stem}-v{version}") for version in itertools.count(1))
    return next(one for one in itertools.chain([path], versions) if not one.exists())


def _weights_in(path: Path) -> Mapping[str, Tensor]:
    """Return the weights that a user's module loads from a checkpoint."""
    if path.is_dir():
        return stored_weights(open_ingredient(path))
    weights: Mapping[str, Tensor] = load_checkpoint(path)["state_dict"]
    return weights
