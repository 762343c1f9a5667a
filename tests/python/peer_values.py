"""Finite matrices for which two quantizers are likely to differ: blocks whose largest value is within a few
units in the last place of a power of two, or of one times an element's largest value; zeros; subnormals; huge
numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
GROUP = 16  # divides the blocks of every format


def nudged(values: Matrix, rng: np.random.Generator, ulps: int = 4) -> Matrix:
    """Adds a few units in the last place, up or down."""
    raw = values.astype(np.float32).view(np.int32)
    return (raw + rng.integers(-ulps, ulps + 1, raw.shape, np.int32)).view(np.float32)


def matrix(rows: int, columns: int, seed: int, low: int = -20, high: int = 20) -> Matrix:
    """Groups of 16 of different kinds, around powers of two from 2^low to 2^high."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // GROUP, GROUP)
    power = np.exp2(rng.integers(low, high + 1, (*shape[:2], 1))).astype(np.float32)
    x = rng.standard_normal(shape).astype(np.float32) * power
    kind = rng.integers(0, 10, (*shape[:2], 1))
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7], np.float32)
    sign = np.where(rng.random(shape) < 0.5, np.float32(-1), np.float32(1))
    x = np.where(kind == 0, np.float32(0) * sign, x)  # zeros of both signs
    x = np.where(kind == 1, rng.choice(grid, shape) * sign * power, x)  # values and ties of E2M1
    x = np.where(kind == 2, rng.integers(-480, 481, shape).astype(np.float32) * power, x)
    x = np.where(kind == 3, nudged(sign * power, rng), x)
    peak = rng.choice(np.array([1, 1.75, 6, 7, 448, 57344, 480], np.float32), (*shape[:2], 1)) * power
    peak = np.where(rng.random(peak.shape) < 0.5, nudged(peak, rng), peak)
    at = rng.integers(0, GROUP, (*shape[:2], 1)) == np.arange(GROUP)
    x = np.where((kind >= 4) & (kind <= 6), np.where(at, peak * sign, x * np.float32(0.25)), x)
    x = np.where(rng.random(shape) < 0.05, np.float32(0) * sign, x)
    return x.reshape(rows, columns)


def subnormal(rows: int, columns: int, seed: int) -> Matrix:
    """Blocks of subnormals and numbers slightly larger, blocks of zeros, and blocks of ordinary numbers."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // GROUP, GROUP)
    raw = np.exp2(rng.uniform(0, 26, shape)).astype(np.uint32) | (rng.integers(0, 2, shape, np.uint32) << 31)
    x = raw.astype(np.uint32).view(np.float32)
    kind = rng.integers(0, 4, (*shape[:2], 1))
    x = np.where(kind == 1, rng.standard_normal(shape).astype(np.float32), x)
    x = np.where(kind == 2, np.float32(0) * x, x)
    return x.reshape(rows, columns).astype(np.float32)


def huge(rows: int, columns: int, seed: int) -> Matrix:
    """Up to the largest float32."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0x7E000000, 0x7F800000, (rows, columns), np.uint32)
    return (raw | (rng.integers(0, 2, raw.shape, np.uint32) << 31)).view(np.float32)
