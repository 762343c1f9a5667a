"""Quantizes NumPy arrays and dequantizes them. The library works on the arrays' memory; this file passes it
shapes, strides and pointers. bfloat16 arrays are those of ml_dtypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opaq import _library
from opaq._library import USAGES, call, library
from opaq._library import threads as _threads
from opaq._tables import buffers_of, element_of, make_proto
from opaq.quantizer import Quantizer, as_quantizer, query

_CPU = _library.Device(0, 0)
_FLOATS = ctypes.POINTER(ctypes.c_float)


@dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A quantized array: its buffers by name, in flatten order, and the array's shape, dtype and quantizer."""

    buffers: dict[str, NDArray[Any]]  # float32, or uint8 for codes of up to 8 bits
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the array that was quantized
    quantizer: Quantizer
    amax: float | None = None  # format fp8 returns it; nvfp4 keeps its own in a buffer

    def dequantize(self, dtype: Any = "float32", usage: str | None = None, *, threads: int = 1) -> NDArray[Any]:
        """The same as `opaq.dequantize` of this array."""
        return dequantize(self, dtype, usage, threads=threads)


def _dtype(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    made: np.dtype[Any] = np.dtype(dtype)
    return made


def _plain_view(array: NDArray[Any]) -> _library.View:
    """A view of the array's memory; rows may have gaps between them."""
    size = array.itemsize
    if not array.dtype.isnative or any(stride % size for stride in array.strides):
        raise ValueError(
            f"opaq: the array has dtype {array.dtype.str} and strides {array.strides}, expected elements in "
            f"native byte order at multiples of {size} bytes; such a copy is "
            "numpy.ascontiguousarray(array, array.dtype.newbyteorder('='))"
        )
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(stride // size for stride in array.strides))
    reach = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True) if stride > 0)
    view = _library.View()
    span = array.ctypes.data, reach + size if array.size else 0
    call("opaq_view_plain", shape, strides, array.ndim, element_of(array.dtype), _CPU, *span, view)
    return view


def _readable(array: NDArray[Any]) -> tuple[NDArray[Any], _library.View]:
    """The array with its view; a contiguous, aligned copy where the library does not read it as it is."""
    try:
        return array, _plain_view(array)
    except ValueError:
        copied = np.require(array, requirements=["C", "A"])
        if copied is array:
            raise
        return copied, _plain_view(copied)


def _quantized_view(made: _library.Proto, arrays: Sequence[NDArray[Any]]) -> _library.View:
    spans = (_library.Span * len(arrays))(*(_library.Span(a.ctypes.data, a.nbytes) for a in arrays))
    view = _library.View()
    call("opaq_view_quantized", made, spans, len(arrays), view)
    return view


def _given_amax(value: Any, made: _library.Proto, usage: str) -> Any:
    if value is None:
        return None
    floats = np.ascontiguousarray(value, np.float32).reshape(-1)
    expected = library.opaq_amax_count(made, USAGES[usage])
    if expected and floats.size != expected:
        raise ValueError(f"opaq: amax_{usage} has {floats.size} values, this tensor takes {expected}")
    return floats.ctypes.data_as(_FLOATS)  # which keeps the array alive


def quantize(
    array: NDArray[Any],
    quantizer: Quantizer | str,
    *,
    scale: float | None = None,
    amax_rowwise: Any = None,
    amax_columnwise: Any = None,
    seed: int = 0,
    offset: int = 0,
    threads: int = 1,
) -> QuantizedArray:
    """Quantizes an array of float32, float16 or ml_dtypes.bfloat16, of rank 1 to 8. Gaps between rows are
    allowed; other arrays that are not contiguous, or not aligned, are copied first. `scale` is for `delayed`,
    `seed` and `offset` are for `sr`; an amax may be given instead of computed."""
    if not isinstance(array, np.ndarray):
        name = type(array).__name__
        hint = "; opaq.quantize_tensor takes a torch.Tensor" if name in ("Tensor", "Parameter") else ""
        raise TypeError(f"quantize: expected a NumPy array, got a {name}{hint}")
    quantizer = as_quantizer("quantize", quantizer)
    if not (0 <= seed < 2**64 and 0 <= offset < 2**64):
        raise ValueError(f"quantize: seed {seed} and offset {offset} must be at least 0 and less than 2^64")
    array, x = _readable(array)
    made = make_proto(array.shape, array.dtype, quantizer)
    buffers = {
        b.name: np.empty(b.shape, np.float32 if b.element == "f32" else np.uint8) for b in buffers_of(made)
    }
    out = _quantized_view(made, list(buffers.values()))
    amax = ctypes.c_float() if query(str(quantizer), "gives_amax") else None
    args = _library.QuantizeArgs(
        scale=None if scale is None else ctypes.pointer(ctypes.c_float(scale)),
        amax_rowwise=_given_amax(amax_rowwise, made, "rowwise"),
        amax_columnwise=_given_amax(amax_columnwise, made, "columnwise"),
        amax=None if amax is None else ctypes.pointer(amax),
        random=_library.Random(seed, offset),
    )
    with _threads(threads) as execution:
        call("opaq_quantize", x, args, execution, out)
    return QuantizedArray(buffers, array.shape, array.dtype, quantizer, None if amax is None else amax.value)


def dequantize(
    quantized: QuantizedArray, dtype: Any = "float32", usage: str | None = None, *, threads: int = 1
) -> NDArray[Any]:
    """The values of the rowwise or columnwise copy; without `usage`, of the rowwise one if there is one."""
    if not isinstance(quantized, QuantizedArray):
        name = type(quantized).__name__
        is_tensor = name in ("QuantizedTensor", "Parameter")
        hint = "; a QuantizedTensor has the method dequantize()" if is_tensor else ""
        raise TypeError(f"dequantize: expected an opaq.QuantizedArray, got a {name}{hint}")
    if usage not in (None, *USAGES):
        raise ValueError(f"dequantize: usage is {usage!r}, expected None, 'rowwise' or 'columnwise'")
    made = make_proto(quantized.shape, quantized.dtype, quantized.quantizer)
    arrays = []
    for b in buffers_of(made):
        array = quantized.buffers[b.name]
        kind = np.dtype(np.float32 if b.element == "f32" else np.uint8)
        if array.dtype != kind or array.shape != b.shape or not array.flags.c_contiguous:
            raise ValueError(
                f"dequantize: buffer {b.name!r} is {array.dtype} of shape {array.shape}, "
                f"expected contiguous {kind} of shape {b.shape} (numpy.ascontiguousarray copies)"
            )
        arrays.append(array)
    values = np.empty(quantized.shape, _dtype(dtype))
    copy = 0 if usage is None else USAGES[usage]
    with _threads(threads) as execution:
        call("opaq_dequantize", _quantized_view(made, arrays), copy, execution, _plain_view(values))
    return values
