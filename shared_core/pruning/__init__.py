"""Pruning: which weights to zero, when, keeping them zero, removing them, and storing what is left."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.pruning.compression import CompressedFile as CompressedFile
    from shared_core.pruning.compression import Compression as Compression
    from shared_core.pruning.compression import ShareConfig as ShareConfig
    from shared_core.pruning.compression import WeightSharing as WeightSharing
    from shared_core.pruning.compression import compress as compress
    from shared_core.pruning.compression import decompress as decompress
    from shared_core.pruning.config import PruneConfig as PruneConfig
    from shared_core.pruning.criteria import below_threshold_mask as below_threshold_mask
    from shared_core.pruning.criteria import magnitude as magnitude
    from shared_core.pruning.distribution import erdos_renyi_sparsities as erdos_renyi_sparsities
    from shared_core.pruning.lottery import LotteryTicket as LotteryTicket
    from shared_core.pruning.lottery import TicketConfig as TicketConfig
    from shared_core.pruning.lottery import TicketTraining as TicketTraining
    from shared_core.pruning.lottery import read_ticket as read_ticket
    from shared_core.pruning.masks import prune_mask as prune_mask
    from shared_core.pruning.masks import prune_masks as prune_masks
    from shared_core.pruning.n_m import nm_mask as nm_mask
    from shared_core.pruning.post_training import PruneReport as PruneReport
    from shared_core.pruning.post_training import prune as prune
    from shared_core.pruning.removal import ChannelGroup as ChannelGroup
    from shared_core.pruning.removal import ShrinkResult as ShrinkResult
    from shared_core.pruning.removal import find_groups as find_groups
    from shared_core.pruning.removal import shrink as shrink
    from shared_core.pruning.schedules import SCHEDULES as SCHEDULES
    from shared_core.pruning.schedules import cosine_sparsity as cosine_sparsity
    from shared_core.pruning.schedules import cubic_sparsity as cubic_sparsity
    from shared_core.pruning.schedules import exponential_sparsity as exponential_sparsity
    from shared_core.pruning.schedules import iterative_sparsity as iterative_sparsity
    from shared_core.pruning.schedules import linear_sparsity as linear_sparsity
    from shared_core.pruning.schedules import one_shot_sparsity as one_shot_sparsity
    from shared_core.pruning.scorers import SCORERS as SCORERS
    from shared_core.pruning.scorers import make_scorer as make_scorer
    from shared_core.pruning.scorers import shapley_values as shapley_values
    from shared_core.pruning.semi_structured import is_two_four as is_two_four
    from shared_core.pruning.semi_structured import pack_two_four as pack_two_four
    from shared_core.pruning.semi_structured import unpack_two_four as unpack_two_four
    from shared_core.pruning.sparse_inference import LayerChoice as LayerChoice
    from shared_core.pruning.sparse_inference import sparse_layers as sparse_layers
    from shared_core.pruning.sparse_inference import to_semi_structured as to_semi_structured
    from shared_core.pruning.sparse_speed import SparseSpeed as SparseSpeed
    from shared_core.pruning.sparse_speed import measure_sparse_speed as measure_sparse_speed
    from shared_core.pruning.technique import Pruning as Pruning

export_lazily(__name__)
