"""Numbers that are critical for encoders, and the library's encoders as functions on NumPy arrays."""

from __future__ import annotations

import ctypes
from fractions import Fraction

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from opaq import _library, _tables

SATURATE, IEEE = 0, 1  # enum opaq_overflow

TYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
NARROW = tuple(TYPES)
CODE_COUNT = {"e2m1": 16, "e4m3": 256, "e5m2": 256, "e8m0": 256, "f16": 65536, "bf16": 65536}
CODE_TYPE = {name: np.uint16 if count > 256 else np.uint8 for name, count in CODE_COUNT.items()}
LARGEST = {
    "e2m1": 6,
    "e4m3": 448,
    "e5m2": 57344,
    "e8m0": 2.0**127,
    "f16": 65504,
    "bf16": (2 - 2.0**-7) * 2.0**127,
}

Floats = NDArray[np.float32]


def floats_at(array: NDArray) -> ctypes._Pointer:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def decode(element: str, codes: NDArray) -> Floats:
    codes = np.ascontiguousarray(codes, CODE_TYPE.get(element, np.uint32))
    values = np.empty(codes.shape, np.float32)
    number = _tables.ELEMENTS.index(element)
    _library.library.opaq_element_decode_array(number, codes.ctypes.data, codes.size, floats_at(values))
    return values


def encode(element: str, values: Floats, overflow: int) -> NDArray:
    values = np.ascontiguousarray(values, np.float32)
    codes = np.empty(values.shape, CODE_TYPE.get(element, np.uint32))
    number = _tables.ELEMENTS.index(element)
    call = _library.library.opaq_element_encode_array
    call(number, floats_at(values), values.size, overflow, codes.ctypes.data)
    return codes


def encode_stochastic(element: str, values: Floats, random: NDArray[np.uint32]) -> NDArray:
    values, random = (np.ascontiguousarray(a) for a in np.broadcast_arrays(values, random))
    codes = np.empty(values.shape, CODE_TYPE.get(element, np.uint32))
    bits = random.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
    call = _library.library.opaq_element_encode_stochastic_array
    call(_tables.ELEMENTS.index(element), floats_at(values), bits, values.size, codes.ctypes.data)
    return codes


def all_codes(element: str) -> NDArray:
    return np.arange(CODE_COUNT[element], dtype=CODE_TYPE[element])


def bits_of(values: Floats) -> NDArray[np.uint32]:
    return values.view(np.uint32)


def grid(element: str) -> Floats:
    """The finite nonnegative values, ascending, by ml_dtypes."""
    values = all_codes(element).view(TYPES[element]).astype(np.float32)
    return np.unique(np.abs(values[np.isfinite(values)]))


def around(values: Floats, ulps: int = 3) -> Floats:
    """Every value and its float32 neighbours, with both signs. The values must not be negative."""
    steps = np.arange(-ulps, ulps + 1)
    raw = (bits_of(values).astype(np.int64)[:, None] + steps).ravel()
    raw = np.unique(raw[(raw >= 0) & (raw < 1 << 31)]).astype(np.uint32)
    return np.concatenate([raw, raw | np.uint32(1 << 31)]).view(np.float32)


def hard_values(element: str) -> Floats:
    """Around every value of the element and every midpoint, beyond both ends, and float32's own limits."""
    g = grid(element).astype(np.float64)
    beyond = np.array([g[-1] * 2 - g[-2], g[-1] + (g[-1] - g[-2]) / 2, g[-1] * 2, g[0] / 2])
    points = np.concatenate([g, (g[1:] + g[:-1]) / 2, (g[1:] + g[:-1]) / 4, beyond])
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    edges = np.array(
        [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000], np.uint32
    )
    nans = np.array([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF], np.uint32)
    nans = np.concatenate([nans, nans | np.uint32(1 << 31)]).view(np.float32)
    return np.concatenate([around(points), around(edges.view(np.float32)), nans])


def random_values(count: int, seed: int) -> Floats:
    """Float32 numbers with random bits."""
    return np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32).view(np.float32)


def widened(element: str) -> Floats:
    """Every bf16 or every f16, NaNs included."""
    return all_codes(element).view(TYPES[element]).astype(np.float32)


def round_to_float32(x: Fraction) -> Fraction:
    """Nearest, ties to even, for x >= 0 below the overflow."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= x < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / unit) * unit  # Python's round() rounds ties to even
