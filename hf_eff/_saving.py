"""Save and load with techniques: state beside weights, baked models and their model card, the best model.

Saved files of a finished model are compared with the receipt.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_eff._checkpoints import (
    ADAPTER_FILES,
    checkpoint_folder,
    factors_renamed,
    load_renamed_,
    step_of,
    weights_of,
)
from hf_eff._run_environment import GivenCallbacks, is_peft, run_environment
from shared_core.checkpoint_formats import open_ingredient
from shared_core.checkpoint_formats.files import stored_weights
from shared_core.checkpoint_formats.plain import CARD, DEPLOYMENT_FILE, add_section, write_deployment
from shared_core.engine.checks.claims import Where
from shared_core.engine.checks.saved_names import under_own_names
from shared_core.engine.protocols import TrainedPart
from shared_core.engine.receipt import RECEIPT_FILE, Receipt
from shared_core.engine.saving.session_state import fit_to, gathered, load_of_rank, loading
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.errors import CheckpointError, ReceiptError
from shared_core.files.atomic import atomic_write, make_folder, scratch_folder
from shared_core.front_ends.wrapped_method import Wrapped

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_eff._services import TrainerServices
    from shared_core.front_ends.session import Session


_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


class Saving:
    """Bakes what users save, adds technique state to checkpoints, and checks files against the receipt."""

    session: Session
    """The trainer's."""

    def __init__(
        self,
        trainer: Trainer,
        given: GivenCallbacks,
        services: TrainerServices,
        more: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._trainer, self._given, self._services, self._more = trainer, given, services, more
        self._baking = False  # True while the user's model is saved
        self._part: TrainedPart | None = None  # saved instead of the whole model

    def around(self) -> dict[str, Callable[..., Any]]:
        """Return the wrappers of the trainer's methods."""
        return {"save_model": self._save_model, "_save": self._save, "create_model_card": self._create_model_card}

    def _save_model(
        self, method: Callable[..., Any], output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        # The trainer's checkpoints keep the latent weights for resuming. Models that users save are baked.
        trainer, session = self._trainer, self.session
        self._baking = not _internal_call and session.is_attached and not is_peft(trainer.model)
        is_alone = session.context is not None and session.context.part_alone and session.has_begun
        folder = Path(output_dir or str(trainer.args.output_dir))
        is_complete = not _internal_call and trainer.args.should_save and session.has_begun
        with factors_renamed(folder, cast(nn.Module, trainer.model)) if is_complete else contextlib.nullcontext():
            try:
                with session.swapped("checkpoint" if _internal_call else "export"):
                    self._part = (
                        session.files.part() if is_alone and self._is_ours and trainer.args.should_save else None
                    )
                    method(output_dir, _internal_call)
                    if is_complete:
                        write_deployment(folder, session.files.deployment())
            finally:
                self._baking, self._part = False, None
            if not _internal_call and session.is_finished:
                self._count(folder, Where.END)
                if trainer.is_world_process_zero():
                    leave_section(folder, session.receipt())
        # `_save_checkpoint` calls save_model with a folder named after the step: add the state there.
        step = step_of(output_dir) if output_dir and _internal_call else None
        if step is not None and session.is_live:
            self._save_state(folder, step)

    def _save(
        self, method: Callable[..., Any], output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        if self._part is not None:
            self._save_part(self._part, method, Path(output_dir or str(self._trainer.args.output_dir)))
            return
        # FSDP and others pass the gathered weights. Otherwise copies of the model's own tensors are baked.
        if self._baking and self._trainer.args.should_save and self.session.context is not None:
            state_dict = self.session.files.bake(state_dict or self.session.context.model.state_dict())
        method(output_dir, state_dict=state_dict)

    @property
    def _unwrapped(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)

    @property
    def _is_ours(self) -> bool:
        return self.session.context is not None and self._unwrapped is self.session.context.model

    def settle(self) -> None:
        """Decide if checkpoints hold only the trained part: only if the trainer writes the model's files itself."""
        trainer, context, model = self._trainer, self.session.context, self._unwrapped
        engines = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_peft(model)
        # Other libraries' models have their own folder layout.
        stock = isinstance(model, PreTrainedModel) or not hasattr(model, "save_pretrained")
        if context is not None:
            context.part_alone = stock and not engines and self.session.files.saves_part

    def _save_part(self, part: TrainedPart, method: Callable[..., Any], folder: Path) -> None:
        """Save the trained part instead of the model, and all else as the trainer does."""
        model, is_main = self._unwrapped, self._trainer.args.should_save
        if hasattr(model, "save_pretrained"):
            wrapped = Wrapped(model, "save_pretrained", lambda *_, **__: None, keep_signature=True)
            try:
                method(str(folder), state_dict={})
            finally:
                wrapped.undo()
        elif is_main:
            # Its weights go into another file: a weights file in the folder may be the base model.
            with scratch_folder() as aside:
                method(str(aside), state_dict={})
                make_folder(folder)
                for file in (file for file in aside.iterdir() if file.name not in _WEIGHTS):
                    shutil.move(file, folder / file.name)
        if not is_main:
            return
        part.write(folder)
        for earlier in (folder / name for name in _WEIGHTS if (folder / name).exists()):
            if step_of(folder) is not None:
                earlier.unlink()  # from a run whose checkpoint this one replaces
            else:
                text = (
                    "from an earlier save, which may be loaded instead of the adapters; delete it unless it is the base"
                )
                self.session.note(f"{folder} also holds {earlier.name} {text}")

    def _save_state(self, folder: Path, step: int) -> None:
        # After the weights and before the trainer's own state, so a checkpoint that looks complete is complete.
        saved = self._services.saved_steps
        self._services.saved_steps = [*(earlier for earlier in saved if earlier < step), step]
        state = gathered(self.session, self._trainer.model_wrapped, **self._more())
        if self._trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)  # sharded weights are saved after this
            save_state(folder, {**state, "saved_steps": self._services.saved_steps})

    def _create_model_card(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        trainer, session = self._trainer, self.session
        folder = Path(str(trainer.args.output_dir))
        if session.recipe and session.has_begun and trainer.is_world_process_zero() and (folder / CARD).is_file():
            ended = session.is_finished and (folder / RECEIPT_FILE).is_file()
            leave_section(folder, Receipt.read(folder) if ended else session.receipt())
        return output

    def trained(self) -> None:
        """Check the model and the last checkpoint after the last event of all callbacks, and write the receipt."""
        try:
            self._count_all()
        finally:
            if self._trainer.args.should_save:
                receipt = self.session.receipt()
                receipt.write(self._services.run_folder)
                self._services.say(receipt.final_text())

    def _count_all(self) -> None:
        session = self.session
        if not session.is_finished or session.context is None:
            return
        session.files.verify(None, "the trained model", self._given.others())
        folder = checkpoint_folder(self._services.run_folder, session.step)
        found = ""
        try:
            if folder.is_dir():
                self._count(folder, Where.TRAINED)
        except ReceiptError as error:
            found = str(error)
        session.files.refuse_on_all(found)

    def _count(self, folder: Path, where: Where) -> None:
        """Check a saved folder on the process that saves. A PEFT folder holds only adapters."""
        session, trainer = self.session, self._trainer
        if session.context is None or not session.files.claims.any_hold(where) or not trainer.args.should_save:
            return
        if is_peft(trainer.model):
            return
        if session.context.part_alone:
            if where == Where.END:
                session.files.verify(None, "the trained model", self._given.others(), gather=False)
                session.files.verify_part(folder)
            return
        try:
            weights = self._weights_in(folder, session.context.model)
        except CheckpointError as error:
            session.note(
                f"{folder} was not checked against the receipt: its weights are not readable as this model's: {error}"
            )
            return
        session.files.verify(weights, str(folder), self._given.others(), where=where)

    @staticmethod
    def _weights_in(folder: Path, model: nn.Module) -> Mapping[str, Tensor]:
        """Return a folder's weights: the model's, or those of the part that the user's trainer saves."""
        try:
            return weights_of(folder, model)
        except CheckpointError:
            part = stored_weights(open_ingredient(folder, alone=True))
            named, _ = under_own_names(part, model)
            if len(named) < len(part) or not named.keys() <= model.state_dict().keys():
                raise
            return part


def leave_section(folder: Path, receipt: Receipt) -> None:
    """Add what was done and how to load the model to its model card, which is created if missing."""
    from shared_core.reports.run_page import card_section  # imports rich

    card = folder / CARD
    if not card.is_file():
        if not folder.is_dir():  # it was saved elsewhere
            return
        with atomic_write(card) as temporary:
            temporary.write_text("# Model card\n", encoding="utf-8")
    add_section(card, card_section(receipt.values, has_deployment=(folder / DEPLOYMENT_FILE).is_file()))


def _holds_part(trainer: Trainer, folder: Path) -> bool:
    """Return True if a checkpoint holds adapters only, and the trainer does not train a PEFT model."""
    others = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_peft(trainer.model)
    whole = any((folder / name).exists() for name in _WEIGHTS)
    return not (others or whole) and any((folder / name).is_file() for name in ADAPTER_FILES)


@contextlib.contextmanager
def without_scaler(optimizer: Any) -> Iterator[None]:
    """Save or load without accelerate's scaler.

    torch (2.13) creates the state of sharded parameters by a step with zero gradients and learning rate. accelerate
    (1.15) passes that step to the scaler, which fails before the first loss.
    """
    scaler, optimizer.scaler = optimizer.scaler, None
    try:
        yield
    finally:
        optimizer.scaler = scaler


class Loading:
    """Restores layers before weights, the state of a resumed run, and the state of the best model."""

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer, services: TrainerServices, optimizer: Callable[[], Any]) -> None:
        self._trainer, self._services, self._optimizer = trainer, services, optimizer
        self.resumed_from: Path | None = None
        self._passed_over = False  # True if an evaluated model did not meet its targets and was not compared

    def around(self) -> dict[str, Callable[..., Any]]:
        """Return the wrappers of the trainer's methods."""
        return {
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_load_optimizer_and_scheduler": self._load_optimizer_and_scheduler,
            "_determine_best_metric": self._determine_best_metric,
            "_load_best_model": self._load_best_model,
        }

    def state(self) -> Mapping[str, Any]:
        """Load the state of the resumed run. Return what else was saved with it, empty for a new run."""
        session, state = self.session, self._trainer.state
        self._services.saved_steps, self._passed_over = [], False
        if self.resumed_from is None:
            return {}
        saved = load_state(self.resumed_from)
        mine = load_of_rank(session, saved)
        # Metrics at another sparsity or bit width are not comparable: the old checkpoint would be loaded at the end.
        if session.is_changed and state.best_global_step is not None:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            session.note("the best checkpoint so far had another recipe: the comparison starts anew")
        self._services.saved_steps = [int(step) for step in saved["saved_steps"]]
        return mine

    def note_best(self) -> None:
        """Report at the end if no checkpoint was comparable."""
        if self._passed_over and self._trainer.state.best_global_step is None:
            self.session.note("no evaluated checkpoint met the targets: the model is that of the last step")

    def _load_from_checkpoint(self, method: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> None:
        if not self.session.has_begun:
            fit_to(self.session, load_state(Path(folder)), run_environment(self._trainer))
        if _holds_part(self._trainer, Path(folder)):
            self._load_part(Path(folder))
            return
        with loading(self.session):
            method(folder, *args, **kwargs)
        # After the trainer's own loading, which compares names in the file and only warns about missing ones.
        self._load_renamed(Path(folder))

    def _load_part(self, folder: Path) -> None:
        if self.session.context is None or not self.session.files.load_part(folder):
            rule = "the checkpoint holds only adapters, not the whole model"
            raise CheckpointError(folder, rule, "resume with the technique that saved it (--lora_rank)")

    def _load_renamed(self, folder: Path) -> None:
        # FSDP has its own files, under the model's own names
        context = self.session.context
        if context is not None and not self._trainer.is_fsdp_enabled and load_renamed_(context.model, folder):
            # said, not noted: the receipt is that of a run that never stopped
            context.services.say(
                f"efftrain: {folder} names the weights differently than the model. They were loaded all the same, so "
                "ignore transformers' warnings about missing and unexpected keys"
            )

    def _load_optimizer_and_scheduler(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # Before the state is loaded: torch casts it to the parameters in the groups.
        if self.session.is_attached:
            self.session.prepare_optimizers([self._optimizer()])
        with without_scaler(self._trainer.optimizer) if self._trainer.is_fsdp_enabled else contextlib.nullcontext():
            method(*args, **kwargs)

    def _determine_best_metric(self, method: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Compare only models that meet their targets. Early stopping also waits for the first of them."""
        state, session = self._trainer.state, self.session
        # The trainer writes both before it returns. Undo this for a model that may not be the best.
        before = state.best_metric, state.best_global_step
        is_best = method(*args, **kwargs)
        compared = self._trainer.args.metric_for_best_model is not None and session.is_attached
        if not compared or session.progress.may_be_best():
            return is_best
        self._passed_over = True
        state.best_metric, state.best_global_step = before
        return False

    def _load_best_model(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        best, session = Path(str(self._trainer.state.best_model_checkpoint)), self.session
        session.settle_optimizers()  # the optimizer's extra weights are those of the last step
        if _holds_part(self._trainer, best):
            self._load_part(best)
        else:
            with loading(session):
                method(*args, **kwargs)
            self._load_renamed(best)
        session.note(f"the model is the best one, {best.name}, not that of the last step")
        # Restore the techniques' state of that checkpoint: its masks and ranges belong to its weights.
        session.load_state_dict(load_state(best))
        session.begin_again()
