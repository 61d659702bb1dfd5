"""Scorers: how much weights and structures matter, by criterion. `SCORERS` holds those imported here."""

from shared_core.pruning.scorers.capture import Wanda as Wanda
from shared_core.pruning.scorers.gradient_scorers import Fisher as Fisher
from shared_core.pruning.scorers.gradient_scorers import Movement as Movement
from shared_core.pruning.scorers.gradient_scorers import NeuronTaylor as NeuronTaylor
from shared_core.pruning.scorers.gradient_scorers import Taylor as Taylor
from shared_core.pruning.scorers.group_scores import GROUP_CRITERIA as GROUP_CRITERIA
from shared_core.pruning.scorers.group_scores import GroupTaylor as GroupTaylor
from shared_core.pruning.scorers.group_scores import UnitSlices as UnitSlices
from shared_core.pruning.scorers.group_scores import gather_units as gather_units
from shared_core.pruning.scorers.group_scores import group_scores as group_scores
from shared_core.pruning.scorers.group_scores import relative_scores as relative_scores
from shared_core.pruning.scorers.group_scores import shapley_values as shapley_values
from shared_core.pruning.scorers.layer_costs import HOROWITZ_45NM as HOROWITZ_45NM
from shared_core.pruning.scorers.layer_costs import CostWatch as CostWatch
from shared_core.pruning.scorers.layer_costs import layer_costs as layer_costs
from shared_core.pruning.scorers.layer_costs import observe_positions as observe_positions
from shared_core.pruning.scorers.scorer import SCORERS as SCORERS
from shared_core.pruning.scorers.scorer import Magnitude as Magnitude
from shared_core.pruning.scorers.scorer import Random as Random
from shared_core.pruning.scorers.scorer import Scorer as Scorer
from shared_core.pruning.scorers.scorer import make_scorer as make_scorer
