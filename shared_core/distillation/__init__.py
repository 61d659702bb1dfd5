"""Distillation: a frozen teacher's softened outputs as a second target for the student."""

from shared_core.distillation.config import DistillConfig as DistillConfig
from shared_core.distillation.losses import kd_loss as kd_loss
from shared_core.distillation.losses import kd_sum as kd_sum
from shared_core.distillation.technique import Distillation as Distillation
