"""Imports and exports rows of a QuantizedTensor as checkpoints store them. The library checks and copies; this
file passes it pointers to CPU memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any

import torch

from opaq import _library
from opaq._library import call
from opaq._operators import DTYPES, NUMBERS
from opaq._tables import make_proto
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import query

_CPU = _library.Device(0, 0)
STORED_DTYPES = {  # by their names in safetensors
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
}


def _on_cpu(what: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"opaq: {what} is on {tensor.device}, stored rows are read and written on the cpu")
    return tensor


def _number(dtype: torch.dtype) -> int:
    """The library's number of a dtype; any one-byte dtype counts as bytes, and it refuses -1."""
    return NUMBERS.get(torch.uint8 if dtype.itemsize == 1 else dtype, -1)


def _tensor(what: str, tensor: torch.Tensor | None) -> _library.Tensor:
    if tensor is None:
        return _library.Tensor(None, 0, -1, _CPU)
    _on_cpu(what, tensor)
    sizes, steps = (tuple(list(numbers)[:8]) for numbers in (tensor.shape, tensor.stride()))
    return _library.Tensor(tensor.data_ptr(), _number(tensor.dtype), tensor.dim(), _CPU, sizes, steps)


def _proto(tensor: QuantizedTensor) -> _library.Proto:
    return make_proto(tensor.shape, str(tensor.dtype).removeprefix("torch."), tensor.quantizer)


def quantized_view(tensor: QuantizedTensor) -> _library.View:
    """A tensor on the CPU, borrowed."""
    buffers: Sequence[torch.Tensor] = [_on_cpu("the tensor", buffer) for buffer in tensor.buffers()]
    if not all(buffer.is_contiguous() for buffer in buffers):
        raise ValueError("opaq: the tensor's buffers are not contiguous; call .clone() first")
    spans = (_library.Span * len(buffers))(*(_library.Span(b.data_ptr(), b.nbytes) for b in buffers))
    view = _library.View()
    call("opaq_view_quantized", _proto(tensor), spans, len(buffers), view)
    return view


def import_rows(
    tensor: QuantizedTensor,
    first_row: int,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_: torch.Tensor | None = None,
) -> None:
    """Writes stored rows over those from `first_row` on. Codes and scales of one byte may have any dtype of one
    byte. Padding is zero afterwards if the buffers were before."""
    stored = _library.Stored(_tensor("data", data), _tensor("scale", scale), _tensor("global_", global_))
    call("opaq_stored_import", quantized_view(tensor), first_row, stored)


def import_roles(tensor: QuantizedTensor, first_row: int, given: Mapping[str, torch.Tensor]) -> None:
    """import_rows for a weight's tensors by role ("data", "scale", "global"), on any device."""
    stored = (given[role].cpu() if role in given else None for role in ("data", "scale", "global"))
    import_rows(tensor, first_row, *stored)


def check_factor(name: str, value: float) -> None:
    """Checks the scale of a whole weight or input."""
    if not isfinite(value) or value <= 0:
        raise ValueError(f"opaq: {name} is {value:g}, expected a finite number above 0")


def _empty(like: _library.Tensor) -> torch.Tensor | None:
    return None if like.rank < 0 else torch.empty(like.shape[: like.rank], dtype=DTYPES[like.dtype])


def _header(dtype: torch.dtype, shape: Sequence[int]) -> _library.Tensor:
    """Describes a contiguous tensor without memory."""
    steps = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return _library.Tensor(None, _number(dtype), len(shape), _CPU, tuple(shape[:8]), tuple(steps[:8]))


def check_rows(
    tensor: QuantizedTensor, first_row: int, headers: Sequence[tuple[torch.dtype, Sequence[int]] | None]
) -> None:
    """Raises if import_rows would refuse (data, scale, global) of these dtypes and shapes. Needs no data."""
    none = _library.Tensor(None, 0, -1, _CPU)
    stored = _library.Stored(*(none if header is None else _header(*header) for header in headers))
    call("opaq_stored_check", _proto(tensor), first_row, stored)


def describe_rows(tensor: QuantizedTensor, rows: int) -> list[torch.Size | None]:
    """The shapes of (data, scale, global) for `rows` rows of it."""
    described = _library.Stored()
    call("opaq_stored_describe", _proto(tensor), rows, described)
    parts = [getattr(described, name) for name in ("data", "scale", "global")]
    return [None if part.rank < 0 else torch.Size(part.shape[: part.rank]) for part in parts]


def export_rows(
    tensor: QuantizedTensor, first_row: int, rows: int, *, one_for_all: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows from `first_row` on as (data, scale, global), bytes as uint8. With `one_for_all` values that each
    row has (the scale of fp8row, the global of rowscaled) become one entry; different values are an error."""
    described = _library.Stored()
    call("opaq_stored_describe", _proto(tensor), rows, described)
    parts: list[Any] = [_empty(getattr(described, name)) for name in ("data", "scale", "global")]
    if one_for_all and query(tensor._quantizer_text, "has_row_scales"):
        parts[1] = torch.empty(1)
    if one_for_all and parts[2] is not None:
        parts[2] = torch.empty(1)
    names = ("data", "scale", "global_")
    stored = _library.Stored(*(_tensor(name, made) for name, made in zip(names, parts, strict=True)))
    call("opaq_stored_export", quantized_view(tensor), first_row, rows, stored)
    return parts[0], parts[1], parts[2]
