"""What a run needs of each device before it is started: memory and traffic, as functions of sizes and ranks."""

from shared_core.scale.cost import Cost
from shared_core.scale.plan import Plan, plan
from shared_core.scale.run import PlannedRun
from shared_core.scale.shape import ModelShape

__all__ = ["Cost", "ModelShape", "Plan", "PlannedRun", "plan"]
