"""Thirty-two counts in registers: four bits a count, eight counts a word, widened as they grow.

Shared memory has one address for all that share a bin, and a ballot a bit costs tens of instructions a number. Here a
number adds one bit to one of four words, two instructions each, and no thread waits for another until the end.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

FULL = 15
"""How often a word can be added to before a count of four bits overflows."""


def _tally(
    bin: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Count bins of 0 to 31, uint32, in four words; what lies beyond counts nowhere."""
    # a sum under a predicate, and a shift by the low five bits of a number, are one instruction each
    code: tl.constexpr = """
    {
        .reg .pred p, q, r, s;
        .reg .b32 one, word;
        shl.b32 one, $4, 2;
        shf.l.wrap.b32 one, 0, 1, one;
        shr.u32 word, $4, 3;
        setp.lt.u32 p, $4, 8;
        setp.eq.u32 q, word, 1;
        setp.eq.u32 r, word, 2;
        setp.eq.u32 s, word, 3;
        mov.b32 $0, $5;
        mov.b32 $1, $6;
        mov.b32 $2, $7;
        mov.b32 $3, $8;
        @p add.u32 $0, $0, one;
        @q add.u32 $1, $1, one;
        @r add.u32 $2, $2, one;
        @s add.u32 $3, $3, one;
    }
    """
    return tl.inline_asm_elementwise(  # type: ignore[no-any-return]
        code,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [bin, a, b, c, d],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


def _tally_in_interpreter(
    bin: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    # it runs no machine code
    one = tl.full(bin.shape, 1, tl.int32) << ((bin & 7) << 2).to(tl.int32)
    word = bin >> 3
    return (
        a + tl.where(word == 0, one, 0),
        b + tl.where(word == 1, one, 0),
        c + tl.where(word == 2, one, 0),
        d + tl.where(word == 3, one, 0),
    )


def _as_bytes(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, lanes: tl.constexpr) -> tl.tensor:
    """Return the counts in bytes, ``[block / lanes, 8]``, those of `lanes` neighbors added up."""
    words = tl.join(tl.join(a, c), tl.join(b, d))
    halves = tl.join(words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F)
    return tl.sum(tl.reshape(halves, (a.shape[0] // lanes, lanes, 8)), 1)


def _totals(bytes: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the counts of all threads, each below 2^16, and the bin of each: int32, ``[32]``."""
    pairs = tl.sum(tl.join(bytes & 0x00FF00FF, (bytes >> 8) & 0x00FF00FF), 0)
    found = tl.reshape(tl.join(pairs & 0xFFFF, (pairs >> 16) & 0xFFFF), (32,))
    at = tl.arange(0, 32)
    return found, (at & 26) | ((at & 1) << 2) | ((at >> 2) & 1)


if importlib.util.find_spec("triton") is not None:
    tally = triton.jit(_tally_in_interpreter if triton.knobs.runtime.interpret else _tally)
    as_bytes = triton.jit(_as_bytes)
    totals = triton.jit(_totals)
