"""sqnr: what quantizing did to a tensor, measured by the library on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from opaq import _library
from opaq._library import call, library
from opaq._tables import element_of, make_proto
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer

_CPU = _library.Device(0, 0)
_WORTH = 1 << 20  # elements from which on threads are started


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_view(x: torch.Tensor) -> _library.View:
    shape = (ctypes.c_int64 * x.dim())(*x.shape)
    strides = (ctypes.c_int64 * x.dim())(*x.stride())
    view = _library.View()
    span = x.data_ptr(), x.numel() * x.element_size()
    call("opaq_view_plain", shape, strides, x.dim(), element_of(_name(x.dtype)), _CPU, *span, view)
    return view


def _quantized_view(q: QuantizedTensor, buffers: list[torch.Tensor]) -> _library.View:
    spans = (_library.Span * len(buffers))(*(_library.Span(b.data_ptr(), b.nbytes) for b in buffers))
    made = make_proto(tuple(q.shape), _name(q.dtype), Quantizer(q._quantizer_text))
    view = _library.View()
    call("opaq_view_quantized", made, spans, len(buffers), view)
    return view


def sqnr(x: torch.Tensor, quantized: QuantizedTensor) -> float:
    """The signal-to-noise ratio of a quantized tensor in decibels: the power of x over that of the difference,
    both summed in double. Infinite where they are equal."""
    if not isinstance(quantized, QuantizedTensor):
        raise TypeError(f"sqnr: quantized is a {type(quantized).__name__}, expected an opaq.QuantizedTensor")
    plain = x.detach().to("cpu").contiguous()
    buffers = [buffer.to("cpu").contiguous() for buffer in quantized.buffers()]
    views = _plain_view(plain), _quantized_view(quantized, buffers)
    noise, pool = _library.Noise(), ctypes.c_void_p()
    parallel: Any = None
    try:
        if x.numel() >= _WORTH and torch.get_num_threads() > 1:
            call("opaq_pool_create", torch.get_num_threads(), pool)
            parallel = ctypes.pointer(library.opaq_pool_parallel(pool))
        call("opaq_noise_measure", *views, 0, parallel, noise)
    finally:
        library.opaq_pool_destroy(pool)
    return float(library.opaq_noise_sqnr(noise))
