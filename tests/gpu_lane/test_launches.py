"""Every launch lowers to Triton's own language, specialised as on a GPU, over the sizes that make a difference."""

import launches
import pytest
import stand_in_driver
from stand_in_driver import ARCHITECTURES

pytestmark = pytest.mark.gpu_lane


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", launches.FAMILIES)
def test_every_launch_lowers(family, tell):
    lowered, failures = {}, {}
    # the least capable first: where a launch specialises alike on several, that one lowers it
    for architecture in ARCHITECTURES:
        seen = set()
        with stand_in_driver.recording(architecture) as record:
            for call in launches.sweep(family):
                for launch in record(call):
                    seen.add(launch.key)
                    if launch.key not in lowered:
                        lowered[launch.key] = launch.kernel.fn.__name__
                        try:
                            launch.lower()
                        except Exception as error:
                            failures.setdefault((launch.kernel.fn.__name__, _cause(error)), []).append(launch.key)
        tell(architecture, family, len(seen), "launches lowered")
    told = (f"{name}: {cause} ({len(keys)} of them, such as {keys[0]})" for (name, cause), keys in failures.items())
    assert not failures, "\n".join(told)
    assert set(lowered.values()) >= stand_in_driver.kernels()[family]


def _cause(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)[-200:]


def test_every_kernel_belongs_to_a_family():
    assert set(stand_in_driver.kernels()) == set(launches.FAMILIES)


def test_a_launch_that_leaves_products_and_sums_open_is_refused():
    from eff_kernels._triton import masks

    bits = launches.empty(8, dtype=launches.torch.uint8)
    with (
        stand_in_driver.recording("sm_90") as record,
        pytest.raises(AssertionError, match="pack: enable_fp_fusion must be given"),
    ):
        record(lambda: masks.pack[(1,)](bits, bits, 8, block=8, num_warps=1))
