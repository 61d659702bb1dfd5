"""Estimate memory and traffic per device before a run, from the sizes of the model and the number of ranks."""

from shared_core.contrib.planning.plan import Plan as Plan
from shared_core.contrib.planning.plan import plan as plan
from shared_core.contrib.planning.sizes import Cost as Cost
from shared_core.contrib.planning.sizes import ModelShape as ModelShape
from shared_core.contrib.planning.sizes import PlannedRun as PlannedRun
