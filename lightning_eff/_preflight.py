"""One validated batch before the first step, where Lightning's sanity check did not tell enough, and no trace of it."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from shared_core.engine.preflight import without_trace

if TYPE_CHECKING:
    from lightning_eff._services import LightningServices
    from shared_core.engine.session import Session


def preflight(trainer: Any, session: Session, services: LightningServices, seen: Collection[str]) -> None:
    """Check that validation logs what techniques go by."""
    if trainer.global_step == 0 and not {*session.recipe.needed_metrics().values()} <= set(seen):
        session.validation.preflight(lambda: _names(trainer, services))


def _names(trainer: Any, services: LightningServices) -> list[str]:
    loop, connector, module = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector, trainer.lightning_module
    # Loops, connector and trainer: a validation writes into all of them.
    with without_trace(module, trainer, loop, loop.batch_progress, connector, module):
        if loop._combined_loader is None:  # check_val_every_n_epoch is above 1
            stage, trainer.validating = trainer.state.stage, True
            loop.setup_data()
            trainer.state.stage = stage
        loaders = loop._combined_loader
        if loaders is None:
            services.check_validation()
        # An iterator with workers that live on stays for the run.
        iterators = [(one, one._iterator) for one in loaders.flattened if hasattr(one, "_iterator")]
        with without_trace(module, loaders, data=[loaders.flattened]):
            loop.batch_progress = copy.deepcopy(loop.batch_progress)
            # Results of its own: logged names are all that is looked for.
            loop._results = type(loop._results)(training=False)
            loop._max_batches = [min(1, batches) for batches in loop._max_batches]
            connector.reset_metrics()
            try:
                return list(services.evaluate())
            finally:
                for loader, iterator in iterators:
                    loader._iterator = iterator
