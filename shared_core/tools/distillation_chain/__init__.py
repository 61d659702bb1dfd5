"""Chains of students: each stage is a run of the user's own training, taught by the model of the stage before."""

from shared_core.tools.distillation_chain.plan import Stage as Stage
from shared_core.tools.distillation_chain.plan import plan_stages as plan_stages
from shared_core.tools.distillation_chain.run import ChainRow as ChainRow
from shared_core.tools.distillation_chain.run import ChainTable as ChainTable
from shared_core.tools.distillation_chain.run import StageError as StageError
from shared_core.tools.distillation_chain.run import TeacherChain as TeacherChain
