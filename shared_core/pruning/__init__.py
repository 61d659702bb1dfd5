"""Pruning: which weights to zero, when, and keeping them zero."""

from shared_core.pruning.config import PruneConfig as PruneConfig
from shared_core.pruning.criteria import magnitude as magnitude
from shared_core.pruning.masks import prune_mask as prune_mask
from shared_core.pruning.masks import prune_masks as prune_masks
from shared_core.pruning.schedules import cubic_sparsity as cubic_sparsity
from shared_core.pruning.schedules import linear_sparsity as linear_sparsity
from shared_core.pruning.schedules import one_shot_sparsity as one_shot_sparsity
from shared_core.pruning.technique import Pruning as Pruning
