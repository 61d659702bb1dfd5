"""Plan the needs of a run on each device before it is started: memory and traffic, as functions of sizes and ranks."""

from shared_core.config.model_shape import Cost as Cost
from shared_core.config.model_shape import ModelShape as ModelShape
from shared_core.config.model_shape import PlannedRun as PlannedRun
from shared_core.tools.planning.plan import Plan as Plan
from shared_core.tools.planning.plan import plan as plan
