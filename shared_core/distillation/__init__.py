"""Distillation: a teacher's softened outputs, features and relations as further targets for the student."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.distillation.chunked.loss import ChunkedSums as ChunkedSums
    from shared_core.distillation.chunked.loss import chunked_kd_loss as chunked_kd_loss
    from shared_core.distillation.chunked.loss import chunked_kd_sum as chunked_kd_sum
    from shared_core.distillation.config import DistillConfig as DistillConfig
    from shared_core.distillation.layer_init import copy_layers_ as copy_layers_
    from shared_core.distillation.losses.divergences import DIVERGENCES as DIVERGENCES
    from shared_core.distillation.losses.divergences import jsd as jsd
    from shared_core.distillation.losses.divergences import kd_loss as kd_loss
    from shared_core.distillation.losses.divergences import kd_sum as kd_sum
    from shared_core.distillation.losses.divergences import mean_teacher as mean_teacher
    from shared_core.distillation.losses.divergences import reverse_kl as reverse_kl
    from shared_core.distillation.losses.features import linear_cka as linear_cka
    from shared_core.distillation.losses.features import rkd_loss as rkd_loss
    from shared_core.distillation.technique import Distillation as Distillation

export_lazily(__name__)
