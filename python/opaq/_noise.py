"""sqnr: the quantization error of a tensor, measured by the library on the CPU."""

from __future__ import annotations

import ctypes

import torch

from opaq import _library
from opaq._library import call, library
from opaq._operators import expect_tensors
from opaq._stored import quantized_view
from opaq._tables import element_of
from opaq.quantized_tensor import QuantizedTensor

_CPU = _library.Device(0, 0)
_THREADED_ELEMENTS = 1 << 20  # smallest number of elements for which threads are started


def _plain_view(x: torch.Tensor) -> _library.View:
    shape, strides = ((ctypes.c_int64 * x.dim())(*numbers) for numbers in (x.shape, x.stride()))
    dtype = element_of(str(x.dtype).removeprefix("torch."))
    view = _library.View()
    call("opaq_view_plain", shape, strides, x.dim(), dtype, _CPU, x.data_ptr(), x.nbytes, view)
    return view


def sqnr(x: torch.Tensor, quantized: QuantizedTensor) -> float:
    """The signal-to-quantization-noise ratio in decibels: the power of x divided by that of the difference,
    both summed in double precision. Infinite if the values are equal."""
    expect_tensors("sqnr", x=x)
    if not isinstance(quantized, QuantizedTensor):
        raise TypeError(f"sqnr: quantized is a {type(quantized).__name__}, expected an opaq.QuantizedTensor")
    plain, packed = x.detach().to("cpu").contiguous(), quantized.detach().to("cpu")
    views = _plain_view(plain), quantized_view(packed)
    noise = _library.Noise()
    with _library.threads(torch.get_num_threads() if x.numel() >= _THREADED_ELEMENTS else 1) as execution:
        call("opaq_noise_measure", *views, 0, execution, noise)
    return float(library.opaq_noise_sqnr(noise))
