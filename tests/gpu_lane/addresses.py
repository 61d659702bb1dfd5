"""Whether a kernel computes addresses in 64 bits where a launch needs them: ranges of integers, followed through TTIR.

A product or sum of 32 bits that goes into an address must not exceed what 32 bits hold for any program of the launch.
What comes from memory or from a loop's iteration is not known and is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_DEFINES = re.compile(r"\s*%([\w.]+)(?::\d+)? = ([\w.]+)(.*)")
_LOOP = re.compile(r".*scf\.for %([\w.]+) = %([\w.#]+) to %([\w.#]+) step")
_USED = re.compile(r"%([\w.#]+)")
_NUMBER = re.compile(r"(?:dense<)?(-?\d+)>? : ")
_LOCATION = re.compile(r" loc\(.*")
_SAME = (
    *("arith.extsi", "arith.extui", "arith.trunci", "arith.bitcast", "tt.splat", "tt.broadcast", "tt.expand_dims"),
    *("tt.reshape", "tt.trans"),
)


class _Range(NamedTuple):
    low: int
    high: int
    wrong: tuple[str, ...] = ()
    """What before it exceeds 32 bits."""


def _product(a: _Range, b: _Range) -> tuple[int, int]:
    ends = [x * y for x in a[:2] for y in b[:2]]
    return min(ends), max(ends)


def _quotient(a: _Range, b: _Range) -> tuple[int, int]:
    ends = [int(x / y) if abs(x) < 2**52 else x // y for x in a[:2] for y in b[:2]]
    return min(ends), max(ends)


_FUNCTIONS: dict[str, Callable[[_Range, _Range], tuple[int, int]]] = {
    "arith.addi": lambda a, b: (a.low + b.low, a.high + b.high),
    "arith.subi": lambda a, b: (a.low - b.high, a.high - b.low),
    "arith.muli": _product,
    "arith.minsi": lambda a, b: (min(a.low, b.low), min(a.high, b.high)),
    "arith.maxsi": lambda a, b: (max(a.low, b.low), max(a.high, b.high)),
    "arith.select": lambda a, b: (min(a.low, b.low), max(a.high, b.high)),
}


def _result(operation: str, operands: list[_Range]) -> tuple[int, int] | None:
    *_, a, b = operands
    if operation in ("arith.divsi", "arith.remsi") and (b.low <= 0 or a.low < 0):
        return None
    if operation == "arith.divsi":
        return _quotient(a, b)
    if operation == "arith.remsi":
        return 0, min(a.high, b.high - 1)
    return _FUNCTIONS[operation](a, b) if operation in _FUNCTIONS else None


def exceeded(text: str, grid: tuple[int, ...], values: dict[str, int]) -> list[str]:
    """Return the operations of 32 bits whose results exceed them on the way to an address.

    Args:
        text: TTIR without calls.
        grid: Of the launch.
        values: Of the integers that it passes, by name.
    """
    ranges: dict[str, _Range | None] = {name: _Range(value, value) for name, value in values.items()}
    found: list[str] = []
    for line in text.splitlines():
        line = _LOCATION.sub("", line)
        if loop := _LOOP.match(line):
            first, last = ranges.get(loop[2]), ranges.get(loop[3])
            known = first is not None and last is not None
            ranges[loop[1]] = _Range(first.low, last.high, first.wrong + last.wrong) if known else None  # type: ignore[union-attr]
        if not (defined := _DEFINES.match(line)):
            continue
        name, operation, rest = defined.groups()
        operands = [ranges.get(used) for used in _USED.findall(rest)]
        ranges[name] = _range_of(operation, rest, operands, grid)
        if operation == "tt.addptr" and operands[-1] is not None:
            found += operands[-1].wrong
    return sorted(set(found))


def _range_of(operation: str, rest: str, operands: list[_Range | None], grid: tuple[int, ...]) -> _Range | None:
    if operation == "arith.constant":
        number = _NUMBER.search(rest)
        return _Range(int(number[1]), int(number[1])) if number and "f" not in rest.rpartition(":")[2] else None
    if operation in ("tt.get_program_id", "tt.get_num_programs"):
        size = (*grid, 1, 1)["xyz".index(rest.split()[0])]
        return _Range(size, size) if operation.endswith("programs") else _Range(0, size - 1)
    if operation == "tt.make_range":
        ends = dict(re.findall(r"(start|end) = (\d+)", rest))
        return _Range(int(ends["start"]), int(ends["end"]) - 1)
    if operation in _SAME:
        return operands[0]
    known = [operand for operand in operands if operand is not None]
    if len(known) < 2 or len(known) < len(operands) - (operation == "arith.select"):
        return None
    if (result := _result(operation, known)) is None:
        return None
    wrong = tuple(sorted({each for operand in known for each in operand.wrong}))
    is_short = re.search(r"\bi32>?$|xi32>$", rest.strip()) is not None
    if is_short and not -(2**31) <= result[0] <= result[1] < 2**31:
        wrong += (f"{operation} of up to {result[1]} in{rest.rpartition(':')[2]}",)
    return _Range(*result, wrong)
