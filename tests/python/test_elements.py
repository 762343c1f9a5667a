"""Element conversions against ml_dtypes, exhaustively where possible, and stochastic rounding against exact
rational arithmetic. Intended differences (docs/formats.md, "Elements") are in `expected_ieee` and
`expected_saturating` only."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import opaq
from element_values import (
    CODE_TYPE,
    IEEE,
    LARGEST,
    NARROW,
    SATURATE,
    TYPES,
    Floats,
    all_codes,
    bits_of,
    decode,
    encode,
    encode_stochastic,
    grid,
    hard_values,
    random_values,
    round_to_float32,
    widened,
)
from opaq import _library, _tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # casts overflow on purpose

RANDOM_COUNT = 3_000_000
NAN_SATURATING = {"e2m1": 0x7, "e4m3": 0x7F, "e5m2": 0x7F, "e8m0": 0xFF, "f16": 0x7E00, "bf16": 0x7FC0}


def ml_cast(element: str, values: Floats) -> NDArray:
    """ml_dtypes' code of every value (NumPy's for f16)."""
    return values.astype(TYPES[element]).view(CODE_TYPE[element])


def expected_ieee(element: str, values: Floats) -> NDArray:
    codes = ml_cast(element, values)
    nan = np.isnan(values)
    if element == "e2m1":  # it has no NaN: opaq stores +6, ml_dtypes a zero
        codes = np.where(nan, 0x7, codes)
    elif element == "f16":  # opaq drops the payload that NumPy keeps
        codes = np.where(nan, np.where(np.signbit(values), 0xFE00, 0x7E00), codes)
    return codes


def expected_saturating(element: str, values: Floats) -> NDArray:
    largest = np.float32(LARGEST[element])
    codes = ml_cast(element, np.clip(values, -largest, largest))
    return np.where(np.isnan(values), NAN_SATURATING[element], codes)


def check(element: str, values: Floats) -> None:
    for overflow, expected in ((IEEE, expected_ieee), (SATURATE, expected_saturating)):
        got, want = encode(element, values, overflow), expected(element, values)
        wrong = np.flatnonzero(got != want)
        first = [(hex(bits_of(values)[i]), hex(got[i]), hex(want[i])) for i in wrong[:5]]
        assert not wrong.size, f"{element}, overflow {overflow}: {wrong.size} (value, code, expected): {first}"


# ---------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("element", NARROW)
def test_info(element: str) -> None:
    info = _library.library.opaq_element_info(_tables.ELEMENTS.index(element)).contents
    finfo = ml_dtypes.finfo(TYPES[element])
    assert info.name.decode() == element
    assert (info.bits, info.exponent_bits, info.mantissa_bits) == (finfo.bits, finfo.nexp, finfo.nmant)
    assert info.largest == float(finfo.max) == LARGEST[element]
    one = np.ones(1, np.float32)
    assert info.bias == int(encode(element, one, IEEE)[0]) >> info.mantissa_bits
    decoded = all_codes(element).view(TYPES[element]).astype(np.float32)
    assert bool(info.has_infinity) == np.isinf(decoded).any()
    assert bool(info.has_nan) == np.isnan(decoded).any()


@pytest.mark.parametrize("element", NARROW)
def test_every_code_decodes(element: str) -> None:
    codes = all_codes(element)
    got, want = decode(element, codes), codes.view(TYPES[element]).astype(np.float32)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(bits_of(got)[number], bits_of(want)[number])


@pytest.mark.parametrize("element", NARROW)
def test_every_code_comes_back(element: str) -> None:
    codes = all_codes(element)
    values = decode(element, codes)
    for overflow in (IEEE, SATURATE):
        back = encode(element, values, overflow)
        kept = np.isfinite(values) if overflow == SATURATE else ~np.isnan(values)
        np.testing.assert_array_equal(back[kept], codes[kept])


# ----------------------------------------------------------------------------- nearest, ties to even


@pytest.mark.parametrize("source", ["bf16", "f16"])
@pytest.mark.parametrize("element", NARROW)
def test_every_16_bit_value_encodes(element: str, source: str) -> None:
    check(element, widened(source))


@pytest.mark.parametrize("element", NARROW)
def test_neighbours_of_values_and_midpoints_encode(element: str) -> None:
    check(element, hard_values(element))


@pytest.mark.parametrize("element", NARROW)
def test_random_bits_encode(element: str) -> None:
    check(element, random_values(RANDOM_COUNT, NARROW.index(element)))


def test_float32_is_unchanged() -> None:
    values = np.concatenate([random_values(RANDOM_COUNT, 77), hard_values("bf16")])
    raw, nan = bits_of(values), np.isnan(values)
    sign = raw & np.uint32(1 << 31)
    np.testing.assert_array_equal(encode("f32", values, IEEE), np.where(nan, sign | np.uint32(0x7FC00000), raw))
    saturated = np.where(np.isinf(values), sign | np.uint32(0x7F7FFFFF), raw)
    want = np.where(nan, np.uint32(0x7FC00000), saturated)
    np.testing.assert_array_equal(encode("f32", values, SATURATE), want)
    np.testing.assert_array_equal(encode_stochastic("f32", values, np.uint32(0xFFFFFFFF)), want)
    np.testing.assert_array_equal(bits_of(decode("f32", raw))[~nan], raw[~nan])


# -------------------------------------------------------------------------------- stochastic rounding

RANDOM_BITS = {"e2m1": 8, "e4m3": 8, "e5m2": 8, "e8m0": 8, "f16": 13, "bf16": 16}


def stochastic_code(steps: list[Fraction], value: float, u: Fraction) -> int:
    """The largest code whose value is at most |value| + u * step, for an element with these values."""
    a = Fraction(abs(value))
    below = min(max(bisect_right(steps, a) - 1, 0), len(steps) - 2)
    t = round_to_float32(a + u * (steps[below + 1] - steps[below]))
    return max(bisect_right(steps, t) - 1, 0)


def samples(element: str, count: int) -> Floats:
    """Positive numbers within the element's range, critical and random ones."""
    rng = np.random.default_rng(NARROW.index(element))
    values = np.abs(hard_values(element))
    values = values[np.isfinite(values) & (values > 0) & (values <= LARGEST[element])]
    spread = np.exp2(rng.uniform(np.log2(grid(element)[1]) - 3, np.log2(LARGEST[element]), count))
    return np.concatenate([rng.choice(values, count), spread.astype(np.float32)])


@pytest.mark.parametrize("element", NARROW)
def test_stochastic_rounding_is_the_exact_formula(element: str) -> None:
    steps = [Fraction(float(v)) for v in grid(element)]
    bits = RANDOM_BITS[element]
    random = np.arange(256, dtype=np.uint32)
    if bits > 8:
        top = (1 << bits) - 1
        some = np.concatenate([random[::4], random[::4] * (top // 255), top - random[::4]])
        random = np.unique(some).astype(np.uint32)
    values = samples(element, 40)
    got = encode_stochastic(element, values[:, None], random[None, :] | np.uint32(0xABCD0000))
    want = [[stochastic_code(steps, float(v), Fraction(int(r), 1 << bits)) for r in random] for v in values]
    np.testing.assert_array_equal(got, want)


def stochastic_float32(element: str, values: Floats, random: NDArray[np.uint32]) -> NDArray:
    """The formula of docs/formats.md in float32, with signs and NaNs."""
    g = grid(element)
    a = np.abs(values)
    below = np.clip(np.searchsorted(g, a, side="right") - 1, 0, len(g) - 2)
    scale = np.float32(2.0 ** RANDOM_BITS[element])
    t = a + random.astype(np.float32) / scale * (g[below + 1] - g[below])
    code = np.maximum(np.searchsorted(g, t, side="right") - 1, 0)
    if element == "e8m0":
        return np.where(np.isnan(values) | (values <= 0), 0xFF, code)
    sign = CODE_TYPE[element](0x8 if element == "e2m1" else 0x8000 if element in ("f16", "bf16") else 0x80)
    return np.where(np.isnan(values), NAN_SATURATING[element], code | np.where(np.signbit(values), sign, 0))


@pytest.mark.parametrize("element", NARROW)
def test_stochastic_rounding_of_hard_values(element: str) -> None:
    values = np.concatenate([hard_values(element), random_values(20_000, 5)])
    if RANDOM_BITS[element] == 8:  # every value with every byte
        random = np.arange(256, dtype=np.uint32)
        values = values[:, None]
    else:
        random = np.random.default_rng(3).integers(0, 1 << RANDOM_BITS[element], len(values), np.uint32)
    with np.errstate(all="ignore"):
        want = stochastic_float32(element, values, random)
    np.testing.assert_array_equal(encode_stochastic(element, values, random), want)


@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2", "e8m0"])
def test_stochastic_rounding_is_unbiased(element: str) -> None:
    """Over all 256 random bytes the mean is the value, truncated to 1/256 of a step."""
    g = grid(element).astype(np.float64)
    index = np.random.default_rng(11).integers(0, len(g) - 1, 400).repeat(100)
    part = np.tile(np.arange(0, 4096, 41) / 4096, 400)
    values = g[index] + part * (g[index + 1] - g[index])
    exact = (values > 0) & (values.astype(np.float32) == values)
    index, part, values = index[exact], part[exact], values[exact, None].astype(np.float32)
    assert len(values) > 30_000
    up = decode(element, encode_stochastic(element, values, np.arange(256, dtype=np.uint32))) > g[index, None]
    np.testing.assert_array_equal(up.sum(axis=1), np.floor(part * 256))


@pytest.mark.parametrize("text", ["fp8+delayed+sr", "fp8.e5m2+delayed+sr"])
def test_quantized_mean_is_unbiased(text: str) -> None:
    """250,000 times the same number: the mean is within five standard deviations."""
    count, value = 1 << 18, np.float32(3.3125)
    x = np.full((512, count // 512), value)
    q = opaq.quantize(x, opaq.Quantizer(text), scale=1.0, seed=1234)
    mean = opaq.dequantize(q).astype(np.float64).mean()
    step = 0.25 if ".e5m2" not in text else 0.5
    assert abs(mean - value) < 5 * step / 2 / np.sqrt(count) + step / 256
    assert len(np.unique(q.buffers["_data"])) == 2
    again = opaq.quantize(x, opaq.Quantizer(text), scale=1.0, seed=1234, threads=2)
    other = opaq.quantize(x, opaq.Quantizer(text), scale=1.0, seed=1235)
    later = opaq.quantize(x, opaq.Quantizer(text), scale=1.0, seed=1234, offset=1)
    np.testing.assert_array_equal(again.buffers["_data"], q.buffers["_data"])
    assert (other.buffers["_data"] != q.buffers["_data"]).mean() > 0.1
    assert (later.buffers["_data"] != q.buffers["_data"]).mean() > 0.1
