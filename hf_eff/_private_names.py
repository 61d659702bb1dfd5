"""The private names of transformers' Trainer that this package needs: a version that lacks one is refused by name.

transformers has no public hook at these places. Each name was found in the last version of the Trainer that the tests
ran with, in the method given here; a test looks there again and names what moved.
"""

from __future__ import annotations

import transformers
from transformers import Trainer

from shared_core.front_ends import private_names
from shared_core.front_ends.private_names import PrivateName

FIRST_SEEN, LAST_SEEN = "4.57", "5.23"
"""The oldest and the newest transformers with every name; an older one gets those with a `since` from
`hf_eff._older_versions`, or does without."""

WRAPPED = {
    "_inner_training_loop": PrivateName("train", "techniques attach anew for each try of auto_find_batch_size"),
    "_hp_search_setup": PrivateName("train", "a trial of a search sets the arguments of its own run"),
    "_set_signature_columns_if_needed": PrivateName("_remove_unused_columns", "a column of ours stays in the batch"),
    "_prepare_inputs": PrivateName("training_step", "a column of ours is taken out before the model sees the batch"),
    "_load_rng_state": PrivateName("_run_epoch", "batches drawn ahead of a checkpoint are drawn again"),
    "_maybe_log_save_evaluate": PrivateName("_run_epoch", "an evaluation due at an epoch's end is caught up on"),
    "_clip_grad_norm": PrivateName("_run_epoch", "gradients are complete and not yet clipped", since="5.3"),
    "_get_grad_norm": PrivateName("_run_epoch", "the same where max_grad_norm is 0", since="5.3"),
    "_save_checkpoint": PrivateName("_maybe_log_save_evaluate", "techniques prepare weights before they are saved"),
    "_save": PrivateName("save_model", "saved weights are baked"),
    "_load_from_checkpoint": PrivateName("_prepare_for_training", "layers have to fit the weights that are loaded"),
    "_load_optimizer_and_scheduler": PrivateName("_prepare_for_training", "optimizers are prepared for their state"),
    "_determine_best_metric": PrivateName("_maybe_log_save_evaluate", "only what holds the techniques may be best"),
    "_load_best_model": PrivateName("_finalize_training", "the state beside the best model is loaded with it"),
}
"""Methods that are replaced on the instance."""

USED = {
    "_get_output_dir": PrivateName("_save_checkpoint", "where a trial of a search saves its checkpoints"),
    "_tr_loss": PrivateName("_run_epoch", "the logged loss goes on after a resume", since="5.3", is_method=False),
    "_globalstep_last_logged": PrivateName("_maybe_log_save_evaluate", "the same", is_method=False),
    "_total_loss_scalar": PrivateName("_maybe_log_save_evaluate", "the same", is_method=False),
    "_signature_columns": PrivateName("_set_signature_columns_if_needed", "which columns reach the model",
                                      is_method=False),
    "_eval_dataloaders": PrivateName("get_eval_dataloader", "workers of evaluation that live on", is_method=False),
    "_loss_shifts_labels": PrivateName("_get_num_items_in_batch", "which labels the loss counts; absent: none is "
                                       "shifted", since="5.13", is_method=False),
}  # fmt: skip
"""Private names that are called or read beside them."""


def check_private_names(trainer: Trainer) -> None:
    """Refuse a Trainer without a private method that techniques need."""
    whose = f"hf: the Trainer of transformers {transformers.__version__}"
    remedy = f"install transformers {FIRST_SEEN} to {LAST_SEEN}"
    private_names.check_private_names({**WRAPPED, **USED}, lambda _: trainer, whose, remedy)
