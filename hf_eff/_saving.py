"""What the trainer saves and loads with techniques: states beside weights, baked models and their card, the best one.

What is saved of a finished model is compared with the receipt.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
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
from shared_core.checkpoint_formats.plain import CARD, DEPLOYMENT_FILE, add_section, write_deployment
from shared_core.distributed.collectives import from_main
from shared_core.engine.checks.claims import Where
from shared_core.engine.receipt import RECEIPT_FILE, Receipt
from shared_core.engine.saving import rank_states
from shared_core.engine.saving.session_state import fit_to, loading
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.engine.saving.trained_part import TrainedPart
from shared_core.errors import CheckpointError, ReceiptError
from shared_core.files.atomic import atomic_write, make_folder, scratch_folder
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.reports.run_page import card_section

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_eff._services import TrainerServices
    from shared_core.engine.session import Session


_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


class Saving:
    """Bakes what a user saves, leaves the state beside what the trainer saves, and counts again what is claimed."""

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
        self._baking = False  # what is being saved is the user's model
        self._part: TrainedPart | None = None  # what is being saved in place of the whole model

    def around(self) -> dict[str, Callable[..., Any]]:
        """Return what surrounds methods of the trainer."""
        return {"save_model": self._save_model, "_save": self._save, "create_model_card": self._create_model_card}

    def _save_model(
        self, method: Callable[..., Any], output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        # The trainer's own checkpoints keep the latent weights that training goes on from; what a user saves is baked.
        trainer, session = self._trainer, self.session
        self._baking = not _internal_call and session.is_attached and not is_peft(trainer.model)
        is_alone = session.context is not None and session.context.part_alone and session.has_begun
        folder = Path(output_dir or str(trainer.args.output_dir))
        is_complete = not _internal_call and trainer.args.should_save and session.has_begun
        with factors_renamed(folder, cast(nn.Module, trainer.model)) if is_complete else contextlib.nullcontext():
            try:
                with session.swapped("checkpoint" if _internal_call else "export"):
                    self._part = session.part() if is_alone and self._is_ours and trainer.args.should_save else None
                    method(output_dir, _internal_call)
                    if is_complete:
                        write_deployment(folder, session.deployment())
            finally:
                self._baking, self._part = False, None
            if not _internal_call and session.is_finished:
                self._count(folder, Where.END)
                if trainer.is_world_process_zero():
                    leave_section(folder, session.receipt())
        # `_save_checkpoint` calls save_model internally with a folder named after the step: the state goes there.
        step = step_of(output_dir) if output_dir and _internal_call else None
        if step is not None and session.is_attached and session.has_begun:
            self._save_state(folder, step)

    def _save(
        self, method: Callable[..., Any], output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        if self._part is not None:
            self._save_part(self._part, method, Path(output_dir or str(self._trainer.args.output_dir)))
            return
        # FSDP and others hand in what they gathered; else the model's own tensors are baked into copies.
        if self._baking and self._trainer.args.should_save and self.session.context is not None:
            state_dict = self.session.bake(state_dict or self.session.context.model.state_dict())
        method(output_dir, state_dict=state_dict)

    @property
    def _unwrapped(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)

    @property
    def _is_ours(self) -> bool:
        return self.session.context is not None and self._unwrapped is self.session.context.model

    def settle(self) -> None:
        """Decide whether checkpoints hold the trained part alone: where the trainer writes the model's files itself."""
        trainer, context, model = self._trainer, self.session.context, self._unwrapped
        engines = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_peft(model)
        # Other libraries' models have folders of their own layout.
        stock = isinstance(model, PreTrainedModel) or not hasattr(model, "save_pretrained")
        if context is not None:
            context.part_alone = stock and not engines and self.session.saves_part

    def _save_part(self, part: TrainedPart, method: Callable[..., Any], folder: Path) -> None:
        """Save the trained part where the trainer would save the model, and all else as the trainer does."""
        model, is_main = self._unwrapped, self._trainer.args.should_save
        if hasattr(model, "save_pretrained"):
            wrapped = Wrapped(model, "save_pretrained", lambda *_, **__: None, keep_signature=True)
            try:
                method(str(folder), state_dict={})
            finally:
                wrapped.undo()
        elif is_main:
            # Its weights go elsewhere: a file of that name in the folder may be the base.
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
                earlier.unlink()  # of a run whose checkpoint this one replaces
            else:
                told = (
                    "of an earlier save, which may be loaded in place of the adapters; delete it unless it is the base"
                )
                self.session.note(f"{folder} also holds {earlier.name} {told}")

    def _save_state(self, folder: Path, step: int) -> None:
        # Right after the weights and before the trainer's own state, so that a checkpoint that looks complete is.
        saved = self._services.saved_steps
        self._services.saved_steps = [*(earlier for earlier in saved if earlier < step), step]
        state = rank_states.gathered(self.session, self._trainer.model_wrapped, **self._more())
        if self._trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)  # sharded weights are only saved after this
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
        """Count in the model and in the last checkpoint, after every callback's last event; leave the receipt."""
        try:
            self._count_all()
        finally:
            if self._trainer.args.should_save:
                receipt = self.session.receipt()
                receipt.write(self._services.run_folder)
                self._services.say(receipt.told())

    def _count_all(self) -> None:
        session = self.session
        if not session.is_finished or session.context is None:
            return
        session.verify(None, "the trained model", self._given.others())
        folder = checkpoint_folder(self._services.run_folder, session.step)
        found = ""
        try:
            if folder.is_dir():
                self._count(folder, Where.TRAINED)
        except ReceiptError as error:
            found = str(error)
        # One process reads the folder, all must raise: those that go on would hang in the next collective.
        if found := from_main(found):
            raise ReceiptError(found)

    def _count(self, folder: Path, where: Where) -> None:
        """Count in a saved folder, on the process that saves; a folder of PEFT holds adapters alone."""
        session, trainer = self.session, self._trainer
        if session.context is None or not session.claims.any_hold(where) or not trainer.args.should_save:
            return
        if is_peft(trainer.model):
            return
        if session.context.part_alone:
            if where == Where.END:
                session.verify(None, "the trained model", self._given.others(), gather=False)
                session.verify_part(folder)
            return
        try:
            weights = weights_of(folder, session.context.model)
        except CheckpointError as error:
            session.note(f"not counted again in {folder}, whose weights cannot be read as this model's: {error}")
            return
        session.verify(weights, str(folder), self._given.others(), where=where)


def leave_section(folder: Path, receipt: Receipt) -> None:
    """Say in the card of a saved model what was done and how it is loaded; a card is made where there is none."""
    card = folder / CARD
    if not card.is_file():
        if not folder.is_dir():  # what saved it wrote elsewhere
            return
        with atomic_write(card) as temporary:
            temporary.write_text("# Model card\n", encoding="utf-8")
    add_section(card, card_section(receipt.values, has_deployment=(folder / DEPLOYMENT_FILE).is_file()))


def _holds_part(trainer: Trainer, folder: Path) -> bool:
    """Return True if a checkpoint holds adapters and no model, and the trainer trains no model of PEFT."""
    others = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_peft(trainer.model)
    whole = any((folder / name).exists() for name in _WEIGHTS)
    return not (others or whole) and any((folder / name).is_file() for name in ADAPTER_FILES)


class Loading:
    """Restores layers before weights, the state of a resumed run, and the state that belongs to the best model."""

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer, services: TrainerServices, optimizer: Callable[[], Any]) -> None:
        self._trainer, self._services, self._optimizer = trainer, services, optimizer
        self.resumed_from: Path | None = None
        self._passed_over = False  # an evaluated model was not compared: it did not hold what was asked for

    def around(self) -> dict[str, Callable[..., Any]]:
        """Return what surrounds methods of the trainer."""
        return {
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_load_optimizer_and_scheduler": self._load_optimizer_and_scheduler,
            "_determine_best_metric": self._determine_best_metric,
            "_load_best_model": self._load_best_model,
        }

    def state(self) -> Mapping[str, Any]:
        """Load the state of the run that is resumed, and return what else was saved with it; empty for a new run."""
        session, state = self.session, self._trainer.state
        self._services.saved_steps, self._passed_over = [], False
        if self.resumed_from is None:
            return {}
        saved = load_state(self.resumed_from)
        mine = rank_states.load(session, saved)
        # A metric of a model with other sparsity or bits cannot be compared: else the old one would be loaded at the
        # end.
        if session.is_changed and state.best_global_step is not None:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            session.note("the best checkpoint until now was of another recipe: the comparison starts anew")
        self._services.saved_steps = [int(step) for step in saved["saved_steps"]]
        return mine

    def note_best(self) -> None:
        """Tell at the end that no checkpoint could be compared."""
        if self._passed_over and self._trainer.state.best_global_step is None:
            self.session.note(
                "no checkpoint that was compared held what was asked for: the model is that of the last step"
            )

    def _load_from_checkpoint(self, method: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> None:
        if not self.session.has_begun:
            fit_to(self.session, load_state(Path(folder)), run_environment(self._trainer))
        if _holds_part(self._trainer, Path(folder)):
            self._load_part(Path(folder))
            return
        with loading(self.session):
            method(folder, *args, **kwargs)
        # After the trainer's own, which compares names as they stand in the file and only warns of what it did not
        # find.
        self._load_renamed(Path(folder))

    def _load_part(self, folder: Path) -> None:
        if self.session.context is None or not self.session.load_part(folder):
            rule = "it must be a checkpoint of the whole model, but it holds adapters alone"
            raise CheckpointError(folder, rule, "go on with the technique that saved it (--lora_rank)")

    def _load_renamed(self, folder: Path) -> None:
        # FSDP has files of its own, under the model's own names
        if self.session.context is not None and not self._trainer.is_fsdp_enabled:
            load_renamed_(self.session.context.model, folder)

    def _load_optimizer_and_scheduler(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # Before the state is loaded: torch casts what it loads to the parameters that it finds in the groups.
        if self.session.is_attached:
            self.session.prepare_optimizers([self._optimizer()])
        if not self._trainer.is_fsdp_enabled:
            method(*args, **kwargs)
            return
        # torch (2.13) first makes the state that it loads into by a step with zero gradients and learning rate, which
        # accelerate (1.15) hands to the scaler, and that fails before the first loss
        optimizer = cast(Any, self._trainer.optimizer)
        scaler, optimizer.scaler = optimizer.scaler, None
        try:
            method(*args, **kwargs)
        finally:
            optimizer.scaler = scaler

    def _determine_best_metric(self, method: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Compare models that hold what was asked for; early stopping waits for the first of them, too."""
        state, session = self._trainer.state, self.session
        # The trainer writes both before it returns; a model that may not be the best must leave them as they were.
        before = state.best_metric, state.best_global_step
        is_best = method(*args, **kwargs)
        compared = self._trainer.args.metric_for_best_model is not None and session.is_attached
        if not compared or session.ending.may_be_best():
            return is_best
        self._passed_over = True
        state.best_metric, state.best_global_step = before
        return False

    def _load_best_model(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        best, session = Path(str(self._trainer.state.best_model_checkpoint)), self.session
        session.settle_optimizers()  # the optimizer's own other weights are those of the last step
        if _holds_part(self._trainer, best):
            self._load_part(best)
        else:
            with loading(session):
                method(*args, **kwargs)
            self._load_renamed(best)
        session.note(f"the model is the best one, {best.name}, not that of the last step")
        # Techniques go to the state of that checkpoint: its masks and ranges belong to its weights.
        session.load_state_dict(load_state(best))
        session.begin_again()
