"""What machine code needs: registers, spills, instructions an element, width of loads; and the share of copy bandwidth.

Run as a program it rewrites ``cubins.csv``, the table that no kernel may fall behind. Instructions are counted in the
machine code, a loop's as often as its loads cover the elements. The share is an estimate by these and by bytes: it
knows no latency, and no unit but the one that issues.
"""

from __future__ import annotations

import collections
import concurrent.futures
import csv
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("cubins.csv")
# of a card: its architecture, multiprocessors, thread instructions a second of one, bytes a second that a copy reaches
CARDS = {
    "A100": ("sm_80", 108, 128 * 1.41e9, 1.75e12),
    "H100": ("sm_90", 132, 128 * 1.755e9, 3.0e12),
    "H200": ("sm_90", 132, 128 * 1.755e9, 4.3e12),
    "B200": ("sm_100", 148, 128 * 1.85e9, 7.0e12),
}
_ISSUED = 0.75  # of what can be issued, what a kernel without stalls reaches
_FIGURES = "registers", "instructions", "load"
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\S*?)[ ;](.*)")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}

Key = tuple[str, str, str, str]
"""Family, kernel, case and type."""


class Sample(NamedTuple):
    """Machine code, and what a thread of it does."""

    cubin: bytes
    elements: float
    loaded: float
    """Bytes that a sweep reads an element."""
    apart: bool
    """Whether a program runs one side of a branch, and other programs, with other elements, the other."""


class Code(NamedTuple):
    registers: int
    instructions: float
    """Executed an element."""
    load_bits: int
    """Of the loads, the width by which most bytes come."""
    spilled: bool = False


class Row(NamedTuple):
    moved: float
    wide: bool
    programs: int
    codes: dict[str, Code]
    """By architecture."""


class _Line(NamedTuple):
    always: bool
    opcode: str
    target: int


def read(architecture: str, samples: Sequence[Sample]) -> list[Code]:
    """Return what the code of each needs."""
    from triton import knobs

    texts = [_text(sample.cubin) for sample in samples]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(text for text, _ in texts))
        file.flush()
        # one process for all: its start takes longer than a kernel
        variant = architecture.replace("sm_", "SM") + ("" if architecture == "sm_80" else "a")
        command = [knobs.nvidia.nvdisasm.path, "-ndf", "--binary", variant, file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [_line(*found.groups()) for found in map(_LINE.match, listing.splitlines()) if found]
    codes, start = [], 0
    for sample, (text, own) in zip(samples, texts, strict=True):
        # what a division calls that meets subnormal numbers is left out
        codes.append(_code(sample, lines[start : start + own], start))
        start += len(text) // 16
    if start != len(lines):
        raise AssertionError(f"{len(lines)} instructions were disassembled, {start} were there")
    return codes


def _sections(cubin: bytes) -> dict[str, bytes]:
    """Return the sections of an ELF file by name."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    return {_name(cubin, headers[names][4] + name): cubin[at : at + length] for name, *_, at, length in headers}


def _text(cubin: bytes) -> tuple[bytes, int]:
    """Return the instructions in an ELF file, and how many lie before those of subroutines."""
    sections = _sections(cubin)
    (text,) = (section for name, section in sections.items() if name.startswith(".text."))
    ends = [len(text)]
    for name, _, _, _, offset, _ in struct.iter_unpack("<IBBHQQ", sections[".symtab"]):
        if _name(sections[".strtab"], name).startswith("$"):
            ends.append(offset)
    return text, min(ends) // 16


def _name(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()


def _line(address: str, predicate: str | None, opcode: str, rest: str) -> _Line:
    """Return an instruction with the number of the one that it goes to, or its own."""
    target = re.search(r"0x([0-9a-f]+)", rest) if opcode.startswith("BRA") else None
    return _Line(predicate is None and opcode != "BRA.U", opcode, int(target[1] if target else address, 16) // 16)


def _code(sample: Sample, lines: list[_Line], start: int) -> Code:
    info = _sections(sample.cubin)[".nv.info"]
    registers = re.findall(rb"\x04\x2f\x08\x00....(....)", info, re.DOTALL)  # EIATTR_REGCOUNT
    times = [1.0] * len(lines)
    loops = [(line.target - start, at) for at, line in enumerate(lines) if line.opcode.startswith("BRA")]
    for first, last in sorted(loops, key=lambda loop: loop[0] - loop[1]):  # inner ones last
        bits = sum(_bits(line.opcode) for line in lines[first : last + 1])
        if bits:
            times[first : last + 1] = [max(1.0, 8 * sample.elements * sample.loaded / bits)] * (last + 1 - first)
    if sample.apart:
        for side in _shorter_sides(lines, start, times):
            times[side] = [0.0] * len(times[side])
    widths: collections.Counter[int] = collections.Counter()
    for line in lines:
        widths[_bits(line.opcode)] += _bits(line.opcode)
    executed = sum(time for time, line in zip(times, lines, strict=True) if line.opcode != "NOP")
    return Code(
        registers=max(struct.unpack("<I", found)[0] for found in registers),
        instructions=round(executed / sample.elements, 1),
        load_bits=widths.most_common(1)[0][0],
        spilled=any(line.opcode.startswith(("LDL", "STL")) for line in lines),
    )


def _shorter_sides(lines: list[_Line], start: int, times: list[float]) -> Iterator[slice]:
    """Yield of each if and else, whose first side ends by an exit or behind the second, the one that takes less."""
    for at, line in enumerate(lines):
        other = line.target - start
        if line.always or not line.opcode.startswith("BRA") or not at + 1 < other < len(lines):
            continue
        end = lines[other - 1]
        behind = len(lines) if end.opcode == "EXIT" else end.target - start
        if end.always and behind > other:
            yield min(slice(at + 1, other), slice(other, behind), key=lambda side: sum(times[side]))


def _bits(opcode: str) -> int:
    if not opcode.startswith(("LDG", "LDGSTS")):
        return 0
    return next((_WIDTHS[part] for part in opcode.split(".") if part in _WIDTHS), 32)


def measure(family: str, architecture: str) -> dict[Key, Row]:
    """Return what the code of a family's kernels needs on an architecture."""
    import launches
    import stand_in_driver

    found: list[tuple[Key, Row, Sample]] = []
    with stand_in_driver.recording(architecture) as record:
        for dtype in launches.DTYPES[: 3 if architecture == "sm_90" else 2]:
            for case in launches.measured(family, dtype):
                for launch, moved in zip(record(case.call), case.moved, strict=True):
                    key = family, launch.kernel.fn.__name__, case.name, str(dtype).removeprefix("torch.")
                    sample = Sample(launch.compile(), case.elements / launch.threads, case.loaded, case.apart)
                    found.append((key, Row(moved, case.wide, launch.programs, {}), sample))
    rows: dict[Key, Row] = {}
    for (key, row, _), code in zip(found, read(architecture, [sample for _, _, sample in found]), strict=True):
        row.codes[architecture] = code
        # launches of one code are one row
        while key in rows and rows[key] != row:
            key = (*key[:2], f"{key[2]} again", key[3])
        rows[key] = row
    return rows


def share(card: str, row: Row) -> float:
    """Return the estimated share of a copy's bandwidth; the instructions and the bytes take their time side by side."""
    architecture, processors, issue, copy = CARDS[card]
    busy = row.codes[architecture].instructions / (_ISSUED * issue * min(processors, row.programs))
    return round(min(1.0, row.moved / copy / busy), 2)


def read_table() -> dict[Key, dict[str, Code]]:
    """Return the ceilings in the table, by architecture."""
    ceilings: dict[Key, dict[str, Code]] = {}
    with TABLE.open(newline="") as file:
        for line in csv.DictReader(file):
            codes = ceilings[line["family"], line["kernel"], line["case"], line["dtype"]] = {}
            for name in ("sm_80", "sm_90", "sm_100"):
                registers, instructions, load = (line[f"{name} {figure}"] for figure in _FIGURES)
                if registers:
                    codes[name] = Code(int(registers), float(instructions), int(load))
    return ceilings


def worse(code: Code, ceiling: Code | None) -> list[str]:
    """Return in what code falls behind its ceiling."""
    if ceiling is None:
        return ["is not in the table"]
    found = [f"{name} {mine}, {theirs} in the table" for name, mine, theirs in zip(
        ("registers", "instructions an element"), code, ceiling, strict=False) if mine > theirs]  # fmt: skip
    if code.load_bits < ceiling.load_bits:
        found.append(f"loads of {code.load_bits} bits, {ceiling.load_bits} in the table")
    return found


def write_table() -> None:
    """Compile all that is measured, and write the table anew."""
    import launches
    import stand_in_driver

    names = list(stand_in_driver.ARCHITECTURES)
    rows: dict[Key, Row] = {}
    with concurrent.futures.ProcessPoolExecutor() as pool:
        jobs = [(family, name) for family in launches.FAMILIES for name in names]
        for found in pool.map(measure, *zip(*jobs, strict=True)):
            for key, row in found.items():
                rows.setdefault(key, row).codes.update(row.codes)
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        figures = [f"{name} {figure}" for name in names for figure in _FIGURES]
        table.writerow(["family", "kernel", "case", "dtype", *figures, *CARDS])
        for key, row in rows.items():
            codes = [row.codes[name][:3] if name in row.codes else ("", "", "") for name in names]
            cards = [share(card, row) if CARDS[card][0] in row.codes else "" for card in CARDS]
            table.writerow([*key, *(figure for code in codes for figure in code), *cards])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    write_table()
