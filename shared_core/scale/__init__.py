"""What a run needs of each device before it is started: memory and traffic, as functions of sizes and ranks."""

from shared_core.scale.cost import Cost as Cost
from shared_core.scale.plan import Plan as Plan
from shared_core.scale.plan import plan as plan
from shared_core.scale.run import PlannedRun as PlannedRun
from shared_core.scale.shape import ModelShape as ModelShape
