"""Every bit pattern against its definition: exact rationals written from the standards, ml_dtypes, torch, numpy."""

import math
from decimal import Decimal, getcontext
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from commands import eff, told_by

from shared_core.cli.reference import formats_markdown
from shared_core.errors import ConfigError
from shared_core.numerics import FORMATS, decode, encode, lookup, round_to

ROOT = Path(__file__).resolve().parents[3]
SMALL = [name for name, row in FORMATS.items() if row.bits <= 16]

# name: exponent bits, mantissa bits, bias, specials; written out again, so that a slip in the table shows.
FLOATS = {
    "fp64": (11, 52, 1023, "ieee"),
    "fp32": (8, 23, 127, "ieee"),
    "tf32": (8, 10, 127, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
    "fp16": (5, 10, 15, "ieee"),
    "fp24": (8, 15, 127, "ieee"),
    "fp9": (5, 3, 15, "ieee"),
    "fp8_e4m3": (4, 3, 7, "one NaN"),
    "fp8_e4m3_ieee": (4, 3, 7, "ieee"),
    "fp8_e5m2": (5, 2, 15, "ieee"),
    "fp8_ibm": (4, 3, 11, "ieee"),
    "fp6_e2m3": (2, 3, 1, "none"),
    "fp4_e2m1": (2, 1, 1, "none"),
}
INTEGERS = {"int4": (4, True), "int8": (8, True), "int16": (16, True), "uint4": (4, False), "uint8": (8, False)}
ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3_ieee": ml_dtypes.float8_e4m3,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int8": np.int8,
    "int16": np.int16,
    "uint8": np.uint8,
}


def float_value(code, exponent_bits, mantissa_bits, bias, specials):
    """IEEE 754-2019, 3.4: (-1)^S 2^(E - bias) (1 + T/2^m), and with E = 0 (-1)^S 2^(1 - bias) T/2^m."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    fraction = Fraction(code % 2**mantissa_bits, 2**mantissa_bits)
    if exponent == 2**exponent_bits - 1:
        if specials == "ieee":
            return math.copysign(math.inf, sign) if fraction == 0 else math.nan
        if specials == "one NaN" and fraction == 1 - Fraction(1, 2**mantissa_bits):
            return math.nan
    if exponent == 0:
        magnitude = Fraction(2) ** (1 - bias) * fraction
    else:
        magnitude = Fraction(2) ** (exponent - bias) * (1 + fraction)
    return sign * float(magnitude)


def posit_value(code, n, es):
    """Posit standard 2022, 3.4: p = ((1 - 3s) + f) 2^((1 - 2s)(2^es r + e + s)); no two's complement is taken."""
    if code == 0:
        return Fraction(0)
    if code == 1 << (n - 1):
        return math.nan
    bits = [code >> i & 1 for i in reversed(range(n))]
    s, body = bits[0], bits[1:]
    k = next((i for i, bit in enumerate(body) if bit != body[0]), len(body))
    r = -k if body[0] == 0 else k - 1
    rest = body[k + 1 :] + [0] * (n + es)
    e = sum(bit << (es - 1 - i) for i, bit in enumerate(rest[:es]))
    f = sum(Fraction(bit, 2 ** (i + 1)) for i, bit in enumerate(rest[es:]))
    return ((1 - 3 * s) + f) * Fraction(2) ** ((1 - 2 * s) * (2**es * r + e + s))


def log_value(code):
    """Sign, and log2 in offset binary with three fractional bits: field 1 is -7.875, 64 is 0, 127 is 7.875."""
    field = code & 127
    if field == 0:
        return math.nan if code >> 7 else 0.0
    getcontext().prec = 50
    return (-1) ** (code >> 7) * float(Decimal(2) ** (Decimal(field - 64) / 8))


def definition(name):
    bits = FORMATS[name].bits
    if name in FLOATS:
        return [float_value(code, *FLOATS[name]) for code in range(2**bits)]
    if name in INTEGERS:
        width, signed = INTEGERS[name]
        return [code - 2**width if signed and code >= 2 ** (width - 1) else code for code in range(2**width)]
    if name.startswith("posit8"):
        return [float(posit_value(code, 8, 0 if name.endswith("es0") else 2)) for code in range(256)]
    if name == "log8":
        return [log_value(code) for code in range(256)]
    return {
        "e8m0": [2.0 ** (code - 127) for code in range(255)] + [math.nan],
        "ternary": [0.0, 1.0, math.nan, -1.0],
        "binary": [1.0, -1.0],
    }[name]


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_decodes_to_its_definition_and_encodes_back(name):
    codes = torch.arange(2 ** FORMATS[name].bits)
    values = decode(codes, name, dtype=torch.float64)
    want = torch.tensor(definition(name), dtype=torch.float64)
    assert torch.equal(values.isnan(), want.isnan())
    assert torch.equal(values.nan_to_num(0.0, math.inf, -math.inf), want.nan_to_num(0.0, math.inf, -math.inf))
    assert torch.equal(values.signbit() & ~values.isnan(), want.signbit() & ~want.isnan())  # -0 is not +0
    known = ~want.isnan()
    for dtype in (torch.float32, torch.float64):
        back = encode(decode(codes, name, dtype=dtype), name, saturate=False).long()
        assert torch.equal(back[known], codes[known])
        assert bool((back[~known] == (FORMATS[name].nan_code or 0)).all())


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_pattern_decodes_as_in_ml_dtypes(name):
    bits = FORMATS[name].bits
    patterns = np.arange(2**bits).astype(np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        want = patterns.view(ML_DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(decode(torch.arange(2**bits), name).double().numpy(), want)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("e8m0", torch.float8_e8m0fnu)],
)
def test_codes_are_torch_s_bytes(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(codes.view(dtype).float(), decode(codes, name), rtol=0, atol=0, equal_nan=True)
    values = decode(codes, name)
    assert torch.equal(encode(values, name)[~values.isnan()], codes[~values.isnan()])


def test_int4_is_ml_dtypes_int4():
    for name, dtype in (("int4", ml_dtypes.int4), ("uint4", ml_dtypes.uint4)):
        values = np.arange(*((-8, 8) if name == "int4" else (0, 16)))
        codes = values.astype(dtype).view(np.uint8) & 15
        np.testing.assert_array_equal(decode(torch.from_numpy(codes), name).numpy(), values)


@pytest.mark.parametrize(("name", "es"), [("posit8", 2), ("posit8_es0", 0)])
def test_posits_round_as_their_standard_says(name, es):
    # Between neighbors u and w the boundary is the posit of one bit more, u's bits and a 1; a tie gives the even code.
    for u in range(1, 127):
        v = float(posit_value(2 * u + 1, 9, es))
        assert posit_value(u, 8, es) < v < posit_value(u + 1, 8, es)
        x = torch.tensor([math.nextafter(v, 0), v, math.nextafter(v, math.inf)], dtype=torch.float64)
        want = torch.tensor([u, u + u % 2, u + 1])
        assert torch.equal(encode(x, name).long(), want)
        assert torch.equal(encode(-x, name).long(), 256 - want)
    largest, smallest = FORMATS[name].largest, FORMATS[name].smallest
    x = torch.tensor([1e-300, smallest / 3, 1e300, -1e300, 0.0, -0.0], dtype=torch.float64)
    assert round_to(x, name).tolist() == [smallest, smallest, largest, -largest, 0.0, 0.0]
    assert encode(torch.tensor([math.inf, -math.inf, math.nan]), name).tolist() == [128] * 3


@pytest.mark.parametrize("name", ["tf32", "fp24", "fp32", "fp64", "int32"])
def test_wide_formats_on_random_patterns(name):
    rng = np.random.default_rng(0)
    bits = FORMATS[name].bits
    codes = [int(code) for code in rng.integers(0, 2**63, 2000, dtype=np.uint64) * 2 + rng.integers(0, 2, 2000)]
    codes = [code % 2**bits for code in codes] + [0, 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2**bits - 1]
    tensor = torch.tensor([code - 2**64 if code >= 2**63 else code for code in codes])
    if name == "int32":
        want = [float(code - 2**32 if code >= 2**31 else code) for code in codes]
    else:
        want = [float_value(code, *FLOATS[name]) for code in codes]
    values = decode(tensor, name)
    np.testing.assert_array_equal(values.double().numpy(), np.array(want))
    known = ~values.isnan()
    assert torch.equal(encode(values, name).long()[known], tensor[known])


def test_fp32_and_fp64_codes_are_their_bits():
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-300
    x[:6] = torch.tensor([0.0, -0.0, 5e-324, math.inf, -math.inf, 1.7e308])
    assert torch.equal(encode(x, "fp64"), x.view(torch.int64))
    y = (x * 1e262).float()
    assert torch.equal(encode(y, "fp32"), y.view(torch.int32).long() & 0xFFFFFFFF)


@pytest.mark.parametrize(
    ("name", "bias", "normal", "subnormal", "largest", "error", "share"),
    [
        ("fp32", 127, 2.0**-126, 2.0**-149, torch.finfo(torch.float32).max, 2.0**-24, 1 / 256),
        ("bf16", 127, 2.0**-126, 2.0**-133, torch.finfo(torch.bfloat16).max, 2.0**-8, 1 / 256),
        ("fp16", 15, 2.0**-14, 2.0**-24, 65504.0, 2.0**-11, 1 / 32),
        ("fp8_e4m3", 7, 2.0**-6, 2.0**-9, 448.0, 2.0**-4, 2 / 256),
        ("fp8_e4m3_ieee", 7, 2.0**-6, 2.0**-9, 240.0, 2.0**-4, 16 / 256),
        ("fp8_e5m2", 15, 2.0**-14, 2.0**-16, 57344.0, 2.0**-3, 8 / 256),
        ("fp8_ibm", 11, 2.0**-10, 2.0**-13, 15.0, 2.0**-4, 16 / 256),
        ("fp6_e2m3", 1, 1.0, 0.125, 7.5, 2.0**-4, 0.0),
        ("fp4_e2m1", 1, 1.0, 0.5, 6.0, 0.25, 0.0),
        ("posit8", None, 2.0**-24, None, 2.0**24, 2.0**-4, 1 / 256),
        ("posit8_es0", None, 2.0**-6, None, 64.0, 2.0**-6, 1 / 256),
        ("log8", 8, 2.0**-7.875, None, 2.0**7.875, 2 ** (1 / 16) - 1, 1 / 256),
        ("int8", None, 1.0, None, 127.0, 0.5 / 128, 0.0),
        ("uint8", None, 1.0, None, 255.0, 0.5 / 255, 0.0),
        ("ternary", None, 1.0, None, 1.0, 0.5, 0.25),
    ],
)
def test_figures_of_the_table(name, bias, normal, subnormal, largest, error, share):
    row = FORMATS[name]
    assert (row.bias, row.smallest_normal, row.smallest_subnormal) == (
        bias,
        pytest.approx(normal, rel=1e-12),
        subnormal,
    )
    assert row.largest == pytest.approx(largest, rel=1e-12)
    assert row.relative_error == pytest.approx(error, rel=1e-12)
    assert row.special_share == share
    assert row.decades == pytest.approx(math.log10(largest / (subnormal or normal)))


@pytest.mark.parametrize("name", SMALL)
def test_figures_of_the_table_are_those_of_the_codes(name):
    values = np.array(definition(name), dtype=np.float64)
    row, finite = FORMATS[name], values[np.isfinite(values)]
    assert row.largest == finite.max()
    assert row.smallest == finite[finite > 0].min()
    assert row.special_share == np.mean(~np.isfinite(values))


def test_the_table_names_every_format_once():
    names = "fp64 fp32 tf32 bf16 fp16 fp24 fp9 fp8_e4m3 fp8_e4m3_ieee fp8_e5m2 fp8_ibm fp6_e2m3 fp4_e2m1 e8m0"
    assert list(FORMATS) == f"{names} int4 int8 int16 int32 uint4 uint8 ternary binary posit8 posit8_es0 log8".split()
    assert all(row.name == name and row.use and row.source for name, row in FORMATS.items())
    with pytest.raises(TypeError):
        FORMATS["mine"] = FORMATS["fp16"]


def test_refusals_name_the_nearest():
    with pytest.raises(ConfigError, match=r"'fp8_e4m'; did you mean 'fp8_e4m3'\?"):
        lookup("fp8_e4m")
    with pytest.raises(ConfigError, match=r"format must be"):
        encode(torch.zeros(1), "float8")
    with pytest.raises(ConfigError, match="codes must be integers"):
        decode(torch.zeros(1), "fp16")


def test_command_prints_the_table():
    table = eff("formats")
    assert table.exit_code == 0
    assert all(name in table.output for name in FORMATS)
    rows = told_by("formats")
    assert [row["format"] for row in rows] == list(FORMATS)
    assert rows[7] == {
        "format": "fp8_e4m3", "bits": 8, "exponent bits": 4, "mantissa bits": 3, "bias": 7,
        "smallest normal": 2.0**-6, "smallest subnormal": 2.0**-9, "largest": 448.0, "relative error": 0.0625,
        "decades": pytest.approx(math.log10(448 * 512)), "NaN/Inf share": 2 / 256,
    }  # fmt: skip
    assert eff("formats", "--markdown").output == formats_markdown()


def test_the_document_holds_the_printed_table_and_every_source():
    document = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert formats_markdown() in document, "paste the output of `eff formats --markdown`"
    assert all(f"`{name}`" in document for name in FORMATS)
