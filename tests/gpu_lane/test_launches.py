"""Every launch lowers to Triton's own language, specialized as on a GPU, over the sizes that make a difference."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import addresses
import launches
import pytest
import stand_in_driver
import torch
import triton
import triton.language as tl
from eff_kernels._triton.launch import remembering
from stand_in_driver import ARCHITECTURES

pytestmark = pytest.mark.gpu_lane


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", launches.FAMILIES)
def test_every_launch_lowers(family, tell):
    lowered, failures, texts, seen_values = {}, {}, {}, set()
    # the least capable first: where a launch specializes alike on several, that one lowers it
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


class Compiled:
    """In place of machine code: what it was compiled for, and what it was launched with."""

    function = packed_metadata = None

    def __init__(self, *compiled_for):
        self.compiled_for, self.launched = repr(compiled_for), []

    def launch_metadata(self, *_):
        return None

    def run(self, *given):
        self.launched.append((given[:3], given[9:]))

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


def _any_kernel(x, n, factor, y, block: tl.constexpr, flag: tl.constexpr):
    pass


def test_launches_are_remembered_by_all_that_triton_specializes_for(monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compiled(self, key, signature, device, constants, options, attributes, warmup):
        made = Compiled(signature, constants, attributes)
        self.device_caches[device][0][key] = made
        return made

    monkeypatch.setattr(driver, "_active", stand_in_driver._Driver(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    own, ours = triton.jit(_any_kernel), remembering(triton.jit(_any_kernel))
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    sizes, starts = (1, 2, 16, 17, 2**31 - 1, 2**31, 2**31 + 16, -16, -(2**31) - 1), (0, 1, 16)
    variants = itertools.product(memory.values(), starts, starts, sizes, (0.5, 1.0), (8, 16), (True, False))
    seen = set()
    for values, start, other, size, factor, block, flag in [*variants] * 2:
        given = values[start:], size, factor, values[other:]
        wanted = own[(5,)](*given, block=block, flag=flag)
        found = ours[(5,)](*given, block=block, flag=flag)
        seen.add(found.compiled_for)
        assert found.compiled_for == wanted.compiled_for
        assert found.launched[-1][0] == wanted.launched[-1][0] == (5, 1, 1)
        for passed, other_passed in zip(found.launched[-1][1], wanted.launched[-1][1], strict=True):
            assert passed is other_passed
    # integers are 1, divisible by 16 or neither, and need 32 or 64 bits; addresses are divisible or not
    assert len(seen) == 2 * 2 * 2 * 5 * 2 * 2
