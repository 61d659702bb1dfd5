"""Some hundred steps of somebody's script with and without each technique of a recipe, and what that shows."""

from shared_core.tools.try_out.runs import TryOut as TryOut
from shared_core.tools.try_out.verdicts import Findings as Findings
from shared_core.tools.try_out.verdicts import chosen_metric as chosen_metric
from shared_core.tools.try_out.verdicts import findings as findings
