"""Chains of students: each stage is a run of the user's own training, taught by the model of the stage before."""

from shared_core.chain.plan import Stage as Stage
from shared_core.chain.plan import plan_stages as plan_stages
from shared_core.chain.running import StageError as StageError
from shared_core.chain.running import TeacherChain as TeacherChain
from shared_core.chain.table import ChainRow as ChainRow
from shared_core.chain.table import ChainTable as ChainTable
