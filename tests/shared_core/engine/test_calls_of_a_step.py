"""How much of the library one step of training runs through: what a reader must follow, and what each step costs."""

import pytest
from size_of_code import RECIPE, calls_of_step


@pytest.mark.parametrize(("step", "calls", "files"), [(3, 450, 40), (5, 700, 45)], ids=["masks_stay", "new_masks"])
def test_a_step_of_three_techniques_stays_short(step, calls, files):
    entered = calls_of_step(RECIPE, step)
    # other sessions of this process look at each optimizer's steps too
    without = calls_of_step({}, step)
    assert 0 < entered.total() - without.total() <= calls
    assert len(entered) <= files
