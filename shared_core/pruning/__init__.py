"""Pruning: which weights to zero, when, keeping them zero, removing them, and storing what is left."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.pruning.config import PruneConfig as PruneConfig
    from shared_core.pruning.masks import nm_mask as nm_mask
    from shared_core.pruning.masks import prune_mask as prune_mask
    from shared_core.pruning.masks import prune_masks as prune_masks
    from shared_core.pruning.post_training import PruneReport as PruneReport
    from shared_core.pruning.post_training import prune as prune
    from shared_core.pruning.schedules import SCHEDULES as SCHEDULES
    from shared_core.pruning.schedules import cosine_sparsity as cosine_sparsity
    from shared_core.pruning.schedules import cubic_sparsity as cubic_sparsity
    from shared_core.pruning.schedules import exponential_sparsity as exponential_sparsity
    from shared_core.pruning.schedules import iterative_sparsity as iterative_sparsity
    from shared_core.pruning.schedules import linear_sparsity as linear_sparsity
    from shared_core.pruning.schedules import one_shot_sparsity as one_shot_sparsity
    from shared_core.pruning.scorers.registry import SCORERS as SCORERS
    from shared_core.pruning.scorers.registry import make_scorer as make_scorer
    from shared_core.pruning.scorers.shapley import shapley_values as shapley_values
    from shared_core.pruning.scorers.weight_scorers import below_threshold_mask as below_threshold_mask
    from shared_core.pruning.scorers.weight_scorers import magnitude as magnitude
    from shared_core.pruning.selection import erdos_renyi_sparsities as erdos_renyi_sparsities
    from shared_core.pruning.technique import Pruning as Pruning

export_lazily(__name__)
