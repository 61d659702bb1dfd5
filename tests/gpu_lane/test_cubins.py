"""Machine code for three architectures: nothing spills, loads are wide, and no kernel falls behind its row."""

import cubins
import launches
import pytest
import stand_in_driver
from stand_in_driver import ARCHITECTURES

pytestmark = pytest.mark.gpu_lane


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", launches.FAMILIES)
def test_machine_code(family, architecture, tell):
    ceilings, wrong = cubins.read_table(), []
    rows = cubins.measure(family, architecture)
    for key, row in rows.items():
        code = row.codes[architecture]
        faults = cubins.worse(code, ceilings.get(key, {}).get(architecture))
        if code.spilled:
            faults.append("registers spill")
        if row.wide and code.load_bits < 64:
            faults.append(f"loads of {code.load_bits} bits")
        wrong += [f"{', '.join(key)}: {fault}" for fault in faults]
    assert not wrong, "\n".join([*wrong, "make gpu-table writes the table anew, if that is meant"])
    assert {kernel for _, kernel, _, _ in rows} >= stand_in_driver.kernels()[family]
    left = {key for key in ceilings if key[0] == family and architecture in ceilings[key]} - set(rows)
    assert not left, f"in the table and not measured: {left}; make gpu-table"
    tell(architecture, family, len(rows), "cubins within their ceilings")
