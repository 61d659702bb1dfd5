"""Of many cases a share for each run of the tests, so that some runs in a row go through all of them."""

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")
# Days count the turns, so that a failure can be seen again on the same day; later EFF_TURN names the turn. Set for the
# workers of xdist too, which must not be on two sides of midnight.
TURN = int(os.environ.setdefault("EFF_TURN", str(datetime.date.today().toordinal())))


def share(cases: Sequence[Case], count: int) -> list[Case]:
    """Return the `count` cases, or one fewer, whose turn it is."""
    rounds = -(-len(cases) // count)
    return list(cases[TURN % rounds :: rounds])
