"""The private names of Lightning that this package needs. If a version lacks one, the error names it.

Lightning has no public hook at these places. Each name was found in every version from `FIRST_SEEN` to `LAST_SEEN`, in
the method given here. A test checks this and reports names that moved.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from packaging.version import Version

from lightning_eff._run_environment import PYTORCH_LIGHTNING
from shared_core.front_ends import wrapped_method
from shared_core.front_ends.wrapped_method import PrivateName

FIRST_SEEN, LAST_SEEN = "2.5.0", "2.6.6"

_ATTRIBUTE = functools.partial(PrivateName, is_method=False)
_TRAINER = "trainer.trainer:Trainer"
_CHECKPOINTS = "trainer.connectors.checkpoint_connector:_CheckpointConnector"
_DATA = "trainer.connectors.data_connector:_DataConnector"
_LOOP, _FIT = "loops.loop:_Loop", "loops.fit_loop:_FitLoop"
_EPOCH, _EVALUATION = "loops.training_epoch_loop:_TrainingEpochLoop", "loops.evaluation_loop:_EvaluationLoop"
_LOADERS = "utilities.combined_loader:CombinedLoader"
_SAVER, _STOPPER = "callbacks.model_checkpoint:ModelCheckpoint", "callbacks.early_stopping:EarlyStopping"
_SWA = "callbacks.stochastic_weight_avg:StochasticWeightAveraging"
_AVERAGING = "callbacks.weight_averaging:WeightAveraging"
_DDP, _SHARDED = "strategies.ddp:DDPStrategy", "strategies.model_parallel:ModelParallelStrategy"
_FABRIC = "fabric.strategies.model_parallel"

NAMES = {
    # the Trainer and its connectors
    "_checkpoint_connector": _ATTRIBUTE("__init__", "its files are checked before they are read", owner=_TRAINER),
    "_data_connector": _ATTRIBUTE("__init__", "batches that are drawn by us are not cut once more", owner=_TRAINER),
    "_logger_connector": _ATTRIBUTE("__init__", "when the Trainer logs, and what callbacks are told", owner=_TRAINER),
    "_loaded_checkpoint": _ATTRIBUTE("resume_start", "a callback that joins late loads its state", owner=_CHECKPOINTS),
    "_requires_distributed_sampler": PrivateName("_resolve_sampler", "drawn batches are not cut again", owner=_DATA),
    "_on_before_batch_transfer": PrivateName(
        f"{_EVALUATION}._evaluation_step", "calibration sees batches as training does",
        owner="core.module:LightningModule",
    ),
    # the loops
    "_restarting": _ATTRIBUTE("on_iteration_done", "no loop believes that it restarts", owner=_LOOP),
    "_restart_stage": _ATTRIBUTE("update_restart_stage", "the start of an epoch is told once", owner=_FIT),
    "_last_train_dl_reload_epoch": _ATTRIBUTE("setup_data", "loaders are made anew when they were due", owner=_FIT),
    "_combined_loader": _ATTRIBUTE("setup_data", "the loaders that training draws from", owner=_FIT),
    "_data_source": _ATTRIBUTE("setup_data", "where loaders are made", owner=_FIT),
    "_should_accumulate": PrivateName(
        "loops.optimization.automatic:_AutomaticOptimization.run", "whether a window is open", owner=_FIT
    ),
    "_skip_backward": _ATTRIBUTE(f"{_SWA}.on_train_epoch_end", "SWA's last epoch has no gradients", owner=_FIT),
    "_on_before_fetch": PrivateName("on_run_start", "generators are recorded before batches are drawn", owner=_EPOCH),
    "_skip_next_val": _ATTRIBUTE("on_advance_end", "a validation before a resume is not run again", owner=_EPOCH),
    "_results": _ATTRIBUTE("teardown", "means of an epoch that are about to be logged", owner=_EPOCH),
    "_on_evaluation_end": PrivateName("on_run_end", "a validation that was cut short is run again", owner=_EVALUATION),
    "_max_batches": _ATTRIBUTE("setup_data", "one batch is validated before the first step", owner=_EVALUATION),
    "_iterator": _ATTRIBUTE("__iter__", "an epoch's iterator is made after generators are restored", owner=_LOADERS),
    # its plugins and callbacks
    "_after_closure": PrivateName(
        "_wrap_closure", "our optimizer_step tells callbacks of unscaled gradients",
        owner="plugins.precision.precision:Precision",
    ),
    "_save_monitor_checkpoint": PrivateName("_save_topk_checkpoint", "only what holds all may be best", owner=_SAVER),
    "_update_best_and_save": PrivateName("_save_monitor_checkpoint", "what may not be best is saved", owner=_SAVER),
    "_evaluate_stopping_criteria": PrivateName(
        "_run_early_stopping_check", "early stopping waits for what holds all", owner=_STOPPER
    ),
    "_average_model": _ATTRIBUTE("setup", "what holds of weights holds of averages", owner=_AVERAGING, since="2.6"),
    # its strategies
    "_configure_launcher": PrivateName(
        "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy",
        "a strategy learns to which of Lightning's two names it belongs", owner=_DDP,
    ),
    "_data_parallel_size": _ATTRIBUTE("setup_environment", "one mesh of all processes", owner=_SHARDED),
    "_load_checkpoint": PrivateName(f"{_SHARDED}.load_checkpoint", "optimizers are loaded as saved", owner=_FABRIC),
    "_load_raw_module_state": PrivateName("_load_checkpoint", "weights find the user's own layers", owner=_FABRIC),
    "_distributed_checkpoint_load": PrivateName("_load_checkpoint", "shards of an optimizer are read", owner=_FABRIC),
}  # fmt: skip
"""Private names that are replaced, called, set or read. Those of Fabric begin with ``fabric.``."""


def find(place: str, namespace: str) -> Any:
    """Return a module, class or function of Lightning under one of its names, None if it does not exist."""
    module, _, path = place.partition(":")
    fabric = "lightning_fabric" if namespace == PYTORCH_LIGHTNING else "lightning.fabric"
    root, module = (fabric, module.removeprefix("fabric.")) if module.startswith("fabric.") else (namespace, module)
    try:
        found: Any = importlib.import_module(f"{root}.{module}")
    except ModuleNotFoundError:
        return None
    for part in path.split(".") if path else ():
        found = getattr(found, part, None)
    return found


def check_private_names(namespace: str) -> None:
    """Raise an error if Lightning lacks a private method that techniques need."""
    version = importlib.import_module(namespace).__version__
    whose = f"lightning: {namespace} {version}"
    # the callback that came with Lightning 2.6 is optional
    names = {name: its for name, its in NAMES.items() if Version(version) >= Version(its.since or "0")}
    package = namespace.partition(".")[0]
    remedy = f"update efftrain, or use {package} {FIRST_SEEN} to {LAST_SEEN}, which were tested"
    wrapped_method.check_private_names(names, lambda its: find(its.owner, namespace), whose, remedy)
