"""Plan the needs of a run on each device before it is started: memory and traffic, as functions of sizes and ranks."""

from shared_core.contrib.planning.plan import Plan as Plan
from shared_core.contrib.planning.plan import plan as plan
from shared_core.contrib.planning.sizes import Cost as Cost
from shared_core.contrib.planning.sizes import ModelShape as ModelShape
from shared_core.contrib.planning.sizes import PlannedRun as PlannedRun
