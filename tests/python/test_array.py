"""Quantizing NumPy arrays, against the reference implementation in tests/golden; and the format table evaluated
in Python, against the prototypes that C computes."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import opaq
import reference_quantizer as reference
from conftest import ROOT
from element_values import around
from opaq import OpaqError, Quantizer, _library
from opaq._library import USAGES
from spec_texts import valid_texts
from write_golden import CLASSES, DTYPES, make_values

BF16 = np.dtype(ml_dtypes.bfloat16)
ROUNDS = int(os.environ.get("OPAQ_TEST_ROUNDS", "1"))  # multiplies the number of random cases
SHAPES = [(1, 1), (3, 7), (16, 16), (21, 37), (33, 48), (40, 130), (130, 33)]
SHAPES += [(5,), (37,), (2, 3, 32), (3, 2, 5, 17)]
EMPTY = [(0, 32), (5, 0), (0,), (2, 0, 16), (0, 3, 33), (0, 0)]


def rng_of(*words: object) -> np.random.Generator:
    return np.random.default_rng(crc32(repr(words).encode()))


def make_array(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> NDArray:
    """An array of a random class of values and dtype, contiguous or with gaps between its rows."""
    name, values = str(rng.choice(list(DTYPES))), str(rng.choice(CLASSES))
    rows, columns = math.prod(shape[:-1]), shape[-1]
    gap = int(rng.integers(0, 9)) * int(rng.integers(0, 2))
    memory = np.full((rows, columns + gap), np.nan, DTYPES[name])
    memory[:, :columns] = make_values(values, element, name, (rows, columns), rng)
    strides = tuple(memory.strides[0] * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1))
    return np.lib.stride_tricks.as_strided(memory, shape, (*strides, memory.itemsize))


def equal_bytes(got: NDArray, want: NDArray, what: str) -> None:
    """Compares bytes; `want` has bytes in a last axis unless it is uint8."""
    raw = np.frombuffer(got.tobytes(), np.uint8)
    assert raw.size == want.size, f"{what}: {raw.size} bytes, expected {want.size}"
    wrong = np.flatnonzero(raw != want.ravel())
    assert not wrong.size, f"{what}: {wrong.size} of {raw.size} bytes differ, the first at {wrong[0]}"


def check(text: str, x: NDArray, seed: int = 0, offset: int = 0, threads: int = 1) -> None:
    """Quantizes and dequantizes with the library and the reference and compares everything."""
    spec = reference.parse(text)
    scale = 12.5 if spec.delayed else None
    want = reference.quantize(text, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), scale, seed, offset)
    got = opaq.quantize(x, Quantizer(text), scale=scale, seed=seed, offset=offset, threads=threads)
    what = f"{text} {x.dtype}{list(x.shape)} seed {seed}"
    assert list(got.buffers) == [name for name, _ in want.buffers]
    assert (got.shape, got.dtype, str(got.quantizer)) == (x.shape, x.dtype, text)
    for (name, raw), buffer in zip(want.buffers, opaq.proto(x.shape, x.dtype, Quantizer(text)), strict=True):
        array = got.buffers[name]
        assert (buffer.name, buffer.shape, buffer.bytes) == (name, array.shape, array.nbytes)
        assert buffer.strides == tuple(stride // array.itemsize for stride in array.strides) or not array.size
        equal_bytes(array, raw, f"{what} {name}")
    if want.amax is None:
        assert got.amax is None
    else:
        equal_bytes(np.array([got.amax], np.float32), want.amax.reshape(1).view(np.uint8), f"{what} amax")
    for usage in want.copies:
        values = want.dequantize(usage).reshape(x.shape)
        name = {1: "rowwise", 2: "columnwise"}[usage]
        for dtype in ("float32", "bfloat16", "float16"):
            y = opaq.dequantize(got, dtype, name, threads=threads)
            assert y.shape == x.shape and y.dtype == dtype
            with np.errstate(all="ignore"):
                rounded = np.where(np.isnan(values), np.float32(np.nan), values).astype(y.dtype)
            equal_bytes(y, np.frombuffer(rounded.tobytes(), np.uint8), f"{what} dequantized {name} {dtype}")
    first = opaq.dequantize(got, usage="rowwise" if spec.usage & 1 else "columnwise")
    equal_bytes(opaq.dequantize(got), np.frombuffer(first.tobytes(), np.uint8), f"{what} default usage")


# ----------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("row", opaq.formats(), ids=lambda row: row.name)
def test_random_arrays_of_every_spec(row: opaq.FormatRow) -> None:
    texts = [text for text in valid_texts() if reference.parse(text).format == row.name]
    assert len(texts) > 30
    for turn in range(6 * ROUNDS):
        for text in texts:
            rng = rng_of(text, turn)
            shape = SHAPES[rng.integers(len(SHAPES))]
            seed, offset = int(rng.integers(0, 1 << 64, dtype=np.uint64)), int(rng.integers(0, 1 << 63))
            threads = int(rng.choice([1, 1, 1, 2, 3]))
            check(text, make_array(rng, shape, reference.parse(text).element), seed, offset, threads)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    for row in opaq.formats():
        for text in (row.name, row.name + "+both", row.name + "+columnwise"):
            for dtype in DTYPES.values():
                check(text, np.empty(shape, dtype))
    check("nvfp4+both+rht+rowscaled", np.empty(shape, np.float32))


@pytest.mark.parametrize("rank", range(1, 9))
def test_every_rank(rank: int) -> None:
    shape = (2, 1, 3, 1, 1, 2, 1, 35)[8 - rank :]
    for row in opaq.formats():
        check(row.name + "+both", rng_of(rank).standard_normal(shape).astype(np.float32))


def test_threads_do_not_change_a_byte() -> None:
    x = rng_of("threads").standard_normal((150, 272)).astype(np.float32)
    for row in opaq.formats():
        quantizer = Quantizer(row.name + "+both+sr")
        one = opaq.quantize(x, quantizer, seed=5)
        for threads in (0, 2, 5):
            many = opaq.quantize(x, quantizer, seed=5, threads=threads)
            for name, buffer in one.buffers.items():
                np.testing.assert_array_equal(many.buffers[name], buffer)


MX = [text for text in valid_texts() if re.fullmatch(r"mxfp[48](\.e5m2)?(\+rule=[a-z-]+)?", text)]


@pytest.mark.parametrize("text", MX)
def test_powers_of_two_in_every_unit(text: str) -> None:
    """Blocks whose amax is within 90 units in the last place of 2^k times 1, 1.75 or the element's largest
    value."""
    factors = {1.0, 1.75, float(reference.LARGEST[reference.parse(text).element])}
    points = np.outer(list(factors), np.exp2(np.arange(-149, 128, dtype=np.float64))).ravel()
    amax = around(points[points < 3e38].astype(np.float32), 90)
    x = np.zeros((len(amax), 32), np.float32)
    x[np.arange(len(amax)), np.arange(len(amax)) % 32] = amax
    want = reference.quantize(text, x)
    got = opaq.quantize(x, Quantizer(text))
    for name, raw in want.buffers:
        equal_bytes(got.buffers[name], raw, f"{text} {name}")


# ---------------------------------------------------------------------------------------- a given amax


GIVEN = ["fp8", "fp8+both+pow2", "nvfp4", "nvfp4+both", "nvfp4+both+2d", "nvfp4+4over6"]


@pytest.mark.parametrize("text", GIVEN)
def test_a_given_amax_is_that_of_a_larger_tensor(text: str) -> None:
    """As if the tensor were the first rows of one whose largest value is in other rows."""
    x = rng_of(text).standard_normal((32, 64)).astype(np.float32)
    larger = np.concatenate([x, np.full((32, 64), -77, np.float32)])
    whole = opaq.quantize(larger, Quantizer(text))
    columnwise = 77.0 if "both" in text else None
    part = opaq.quantize(x, Quantizer(text), amax_rowwise=77.0, amax_columnwise=columnwise)
    name = "_data" if text.startswith("fp8") else "_rowwise_data"
    np.testing.assert_array_equal(part.buffers[name], whole.buffers[name][:32])
    alone = opaq.quantize(x, Quantizer(text))
    assert (alone.buffers[name] != part.buffers[name]).any()
    if text.startswith("fp8"):
        assert part.amax == 77.0
        np.testing.assert_array_equal(part.buffers["_scale_inv"], whole.buffers["_scale_inv"])
    else:
        assert part.buffers["_amax_rowwise"] == 77.0
        np.testing.assert_array_equal(
            part.buffers["_rowwise_scale_inv"][:32], whole.buffers["_rowwise_scale_inv"][:32]
        )


def test_a_given_amax_per_row() -> None:
    x = rng_of("rows").standard_normal((24, 64)).astype(np.float32)
    quantizer = Quantizer("nvfp4+both+rowscaled")
    own = opaq.quantize(x, quantizer)
    rows, columns = np.abs(x).max(axis=1), np.abs(x).max(axis=0)
    given = opaq.quantize(x, quantizer, amax_rowwise=rows, amax_columnwise=columns.tolist())
    for name, buffer in own.buffers.items():
        np.testing.assert_array_equal(given.buffers[name], buffer)
    doubled = opaq.quantize(x, quantizer, amax_rowwise=rows * 2, amax_columnwise=columns)
    np.testing.assert_array_equal(doubled.buffers["_amax_rowwise"], rows * 2)
    assert (doubled.buffers["_rowwise_scale_inv"] != own.buffers["_rowwise_scale_inv"]).any()
    with pytest.raises(ValueError, match="amax_rowwise has 23 values, this tensor takes 24"):
        opaq.quantize(x, quantizer, amax_rowwise=rows[:23])


# ---------------------------------------------------------------------------------------------- errors


def test_errors_of_quantize() -> None:
    x, nvfp4 = np.ones((4, 32), np.float32), Quantizer("nvfp4")
    for wrong in ([[1.0]], 1.0, None):
        with pytest.raises(TypeError, match="expected a NumPy array"):
            opaq.quantize(wrong, nvfp4)
    with pytest.raises(TypeError, match="quantize: quantizer is a int, expected an opaq.Quantizer or its text"):
        opaq.quantize(x, 4)
    for dtype in (np.float64, np.int32, np.uint16, ml_dtypes.float8_e4m3fn):
        with pytest.raises(ValueError, match="expected one of float32, float16, bfloat16"):
            opaq.quantize(x.astype(dtype), nvfp4)
    with pytest.raises(ValueError, match="native byte order"):
        opaq.quantize(x.astype(x.dtype.newbyteorder()), nvfp4)
    with pytest.raises(OpaqError) as caught:
        opaq.quantize(np.ones((), np.float32), nvfp4)
    assert caught.value.status == "SHAPE"
    with pytest.raises(OpaqError):
        opaq.quantize(np.ones((1,) * 9, np.float32), nvfp4)


def test_arrays_that_are_copied_or_refused() -> None:
    x = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32)
    cube = x.reshape(4, 8, 32)
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    for array in (x.T, x[:, ::2], x[:, ::-1], x[::-1], cube[:, :2], np.broadcast_to(x[:1], (4, 32)), unaligned):
        made, expected = (opaq.quantize(a, "nvfp4").buffers for a in (array, array.copy()))
        for name, buffer in expected.items():
            np.testing.assert_array_equal(made[name], buffer)


def test_arguments_that_the_quantizer_does_not_support() -> None:
    x = np.ones((4, 32), np.float32)
    for text, arguments in (
        ("fp8+delayed", {}),
        ("fp8", {"scale": 1.0}),
        ("fp8+delayed", {"scale": 1.0, "amax_rowwise": 1.0}),
        ("mxfp8", {"amax_rowwise": 1.0}),
        ("fp8row", {"amax_columnwise": [1.0] * 32}),
        ("fp8+sr", {"offset": 1 << 63}),
        ("fp8", {"threads": 1025}),
        ("fp8", {"threads": -1}),
    ):
        with pytest.raises(OpaqError) as caught:
            opaq.quantize(x, Quantizer(text), **arguments)
        assert caught.value.status == "ARGUMENT", str(caught.value)
    for arguments in ({"seed": -1}, {"seed": 1 << 64}, {"offset": -1}):
        with pytest.raises(ValueError, match="at least 0 and less than 2"):
            opaq.quantize(x, Quantizer("fp8+sr"), **arguments)


def test_errors_of_dequantize() -> None:
    q = opaq.quantize(np.ones((4, 32), np.float32), Quantizer("mxfp8"))
    with pytest.raises(OpaqError, match="usage is 2, expected 0 or one that the tensor has"):
        opaq.dequantize(q, usage="columnwise")
    with pytest.raises(OpaqError):
        opaq.dequantize(q, usage="both")
    with pytest.raises(ValueError, match="expected None, 'rowwise' or 'columnwise'"):
        opaq.dequantize(q, usage="diagonal")
    with pytest.raises(ValueError, match="expected one of float32"):
        opaq.dequantize(q, "float64")
    scales = q.buffers["_rowwise_scale_inv"]
    for wrong in (scales[:64], scales.astype(np.uint16), np.asfortranarray(scales)):
        q.buffers["_rowwise_scale_inv"] = wrong
        with pytest.raises(ValueError, match=r"_scale_inv' .* expected contiguous uint8 of shape \(128, 4\)"):
            opaq.dequantize(q)
    q.buffers["_rowwise_scale_inv"] = scales
    np.testing.assert_array_equal(opaq.dequantize(q), np.ones((4, 32), np.float32))


# ------------------------------------------------------------------------------------ the format table


class Symbol:
    """A symbolic size: can be added, multiplied and floor-divided with integers. It has no value, so evaluating
    a row cannot branch on it."""

    def __init__(self, text: str, value: int) -> None:
        self.text, self.hidden = text, value

    def __repr__(self) -> str:
        return self.text

    def _with(self, other: object, sign: str, result: int) -> Symbol:
        return Symbol(f"({self} {sign} {other})", result)

    def __add__(self, other: int) -> Symbol:
        return self._with(other, "+", self.hidden + other)

    def __mul__(self, other: int | Symbol) -> Symbol:
        return self._with(other, "*", self.hidden * (other.hidden if isinstance(other, Symbol) else other))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Symbol:
        return self._with(other, "//", self.hidden // other)

    def __bool__(self) -> bool:
        raise AssertionError(f"{self} has no truth value")

    def __index__(self) -> int:
        raise AssertionError(f"{self} is not a number")


def value_of(size: object) -> object:
    return size.hidden if isinstance(size, Symbol) else size


def rows_of(text: str) -> Iterator[opaq.BufferRow]:
    """The buffers of a quantizer by the format table."""
    quantizer = Quantizer(text)
    format_row = next(row for row in opaq.formats() if row.name == quantizer.format)
    for row in format_row.buffers:
        if row.is_present(USAGES[quantizer.usage], quantizer.options):
            yield row


def test_rows_evaluated_in_python_are_the_prototypes() -> None:
    for text in valid_texts():
        rng = rng_of("shapes", text)
        for _ in range(6):
            shape = tuple(int(n) for n in rng.integers(0, 700, rng.integers(1, 6)))
            symbols = [Symbol(f"s{i}", n) for i, n in enumerate(shape)]
            rows, buffers = list(rows_of(text)), opaq.proto(shape, "bfloat16", Quantizer(text))
            assert [row.name for row in rows] == [buffer.name for buffer in buffers]
            for row, buffer in zip(rows, buffers, strict=True):
                assert row.shape(shape) == buffer.shape, (text, shape, row)
                assert tuple(value_of(n) for n in row.shape(symbols)) == buffer.shape, (text, shape, row)
                assert (row.element or Quantizer(text).element) == buffer.element
                assert (row.role, row.usage) == (buffer.role, buffer.usage)


def test_extent_is_round_up_of_ceil_div() -> None:
    for per in (1, 2, 16, 128):
        for to in (1, 4, 16, 128):
            for rows in range(300):
                want = math.ceil(math.ceil(rows / per) / to) * to
                assert opaq.Extent("rows", per, to).evaluate(rows, -1) == want
                assert opaq.Extent("columns", per, to).evaluate(-1, rows) == want
    assert opaq.Extent("one", 1, 4).evaluate(-1, -1) == 4


def test_prototypes_and_their_errors() -> None:
    nvfp4 = Quantizer("nvfp4+both")
    buffers = opaq.proto((1 << 20, 1 << 20), "bfloat16", nvfp4)
    assert [b.name for b in buffers][:2] == ["_rowwise_data", "_rowwise_scale_inv"]
    assert buffers[0].bytes == 1 << 39 and buffers[0].packing == 2 and buffers[0].entry_bytes == 1
    for dtype in ("float32", np.float32, np.dtype("float32"), BF16, ml_dtypes.bfloat16, np.float16):
        assert opaq.proto((4, 32), dtype, nvfp4) == opaq.proto((4, 32), "float16", nvfp4)
    with pytest.raises(ValueError, match="expected one of float32"):
        opaq.proto((4, 32), "float64", nvfp4)
    for shape, status in (((-1, 4), "SHAPE"), ((), "SHAPE"), ((1 << 40, 1 << 40), "OVERFLOW")):
        with pytest.raises(OpaqError) as caught:
            opaq.proto(shape, "float32", nvfp4)
        assert caught.value.status == status


def test_the_example_runs() -> None:
    example = [sys.executable, "-B", str(ROOT / "examples" / "python_quantize.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OPAQ_LIBRARY": str(_library.path)}
    out = subprocess.run(example, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.startswith("_rowwise_data        uint8    (256, 512)\n_rowwise_scale_inv   uint8    (256, 64)\n")
    assert "147460 bytes instead of 1048576" in out
