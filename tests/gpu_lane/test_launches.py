"""Every launch lowers to Triton's own language, specialised as on a GPU, over the sizes that make a difference."""

import os
import subprocess
import sys
from pathlib import Path

import addresses
import launches
import pytest
import stand_in_driver
from stand_in_driver import ARCHITECTURES

pytestmark = pytest.mark.gpu_lane


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", launches.FAMILIES)
def test_every_launch_lowers(family, tell):
    lowered, failures, texts, seen_values = {}, {}, {}, set()
    # the least capable first: where a launch specialises alike on several, that one lowers it
    for architecture in ARCHITECTURES:
        seen = set()
        with stand_in_driver.recording(architecture) as record:
            for call in launches.sweep(family):
                for launch in record(call):
                    seen.add(launch.key)
                    name = launch.kernel.fn.__name__
                    if launch.key not in lowered:
                        lowered[launch.key] = name
                        try:
                            texts[launch.key] = launch.lower()
                        except Exception as error:
                            failures.setdefault((name, _cause(error)), []).append(launch.key)
                    passed = launch.key, launch.grid, *launch.values.items()
                    if launch.is_large and launch.key in texts and passed not in seen_values:
                        seen_values.add(passed)
                        for what in addresses.exceeded(texts[launch.key], launch.grid, launch.values):
                            failures.setdefault((name, f"an address needs 64 bits: {what}"), []).append(passed)
        tell(architecture, family, len(seen), "launches lowered")
    told = (f"{name}: {cause} ({len(keys)} of them, such as {keys[0]})" for (name, cause), keys in failures.items())
    assert not failures, "\n".join(told)
    assert set(lowered.values()) >= stand_in_driver.kernels()[family]


def _cause(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)[-200:]


def test_a_product_of_32_bits_in_an_address_is_found():
    with stand_in_driver.recording("sm_90") as record:
        (launch,) = record(launches._round(launches.F, 2**31 + 16, "bf16", "nearest_even"))
    text = launch.lower()
    assert addresses.exceeded(text, launch.grid, launch.values) == []
    found = addresses.exceeded(text.replace("i64", "i32"), launch.grid, launch.values)
    assert any(what.startswith("arith.muli of up to 2147") for what in found)


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


def test_pytest_refuses_gpu_tests_that_would_be_interpreted():
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "must not be interpreted" in done.stderr
