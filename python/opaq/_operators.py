"""The operators inside PyTorch: loads libopaq_torch.so, which registers them from C, and gives each its fake.
Both the operators and the fakes' shapes are the library's operator table; nothing about an operator is written
here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from opaq import _library
from opaq._tables import ELEMENT_BITS, BufferRow, formats
from opaq.quantizer import Quantizer

OLDEST = (2, 11)
NAMESPACE = "opaq"


@dataclass(frozen=True)
class Operator:
    """A row of the operator table."""

    name: str
    arguments: tuple[str, ...]
    shape_argument: int
    shape_is_sizes: bool
    dtype_argument: int
    device_argument: int
    quantizer_argument: int  # -1: one plain tensor; else the buffers of that quantizer


@cache
def operators() -> tuple[Operator, ...]:
    rows = []
    for i in range(_library.library.opaq_op_count()):
        row = _library.library.opaq_op_at(i).contents
        out = row.output
        names = tuple(a.name.decode() for a in row.argument[: row.argument_count])
        source = out.shape_argument, out.shape_source == 1, out.dtype_argument, out.device_argument
        rows.append(Operator(row.name.decode(), names, *source, out.quantizer_argument))
    return tuple(rows)


@cache
def buffer_rows(text: str) -> tuple[BufferRow, ...]:
    """The rows of the buffers that a quantizer's tensors have, in flatten order."""
    quantizer = Quantizer(text)
    row = next(row for row in formats() if row.name == quantizer.format)
    usage = _library.USAGES[quantizer.usage]
    return tuple(buffer for buffer in row.buffers if buffer.is_present(usage, quantizer.options))


def storage_dtype(row: BufferRow) -> torch.dtype:
    """Codes of up to 8 bits lie in bytes."""
    return torch.uint8 if row.element is None or ELEMENT_BITS[row.element] <= 8 else torch.float32


def empty_buffers(text: str, shape: Any, device: torch.device | None) -> list[torch.Tensor]:
    """The buffers of a tensor, uninitialised; on real, fake and symbolic sizes alike."""
    return [torch.empty(row.shape(shape), dtype=storage_dtype(row), device=device) for row in buffer_rows(text)]


def buffer_names(text: str) -> tuple[str, ...]:
    return tuple(row.name for row in buffer_rows(text))


buffer_names._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch._dynamo.allow_in_graph
def create_buffers(text: str, shape: Any, device: torch.device | None) -> list[torch.Tensor]:
    """empty_buffers, for compiled code too: the compiler looks inside later, when sizes are symbols."""
    return empty_buffers(text, shape, device)


def _make_fake(op: Operator) -> Callable[..., Any]:
    def fake(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(op.arguments, arguments, strict=False), **named)
        values: list[Any] = [given.get(name) for name in op.arguments]
        shape = values[op.shape_argument]
        dtype = values[op.dtype_argument]
        device = values[op.device_argument]
        shape = shape if op.shape_is_sizes else shape.shape
        dtype = dtype.dtype if isinstance(dtype, torch.Tensor) else dtype
        where = (device if isinstance(device, torch.Tensor) else device[0]).device
        if where.type != "meta" and any(t.is_meta for t in tree_leaves(values) if isinstance(t, torch.Tensor)):
            raise RuntimeError(f"opaq: {op.name}: some tensors are on meta, others on {where}")
        if op.quantizer_argument < 0:
            return torch.empty(shape, dtype=dtype, device=where)
        return empty_buffers(values[op.quantizer_argument], shape, where)

    return fake


def _load() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"opaq: PyTorch {torch.__version__} is installed, opaq needs 2.11 or later.")
    file = _library.path.with_name("libopaq_torch.so")
    if not file.exists():
        raise ImportError(f"opaq: there is no {file.name} beside {_library.path}.")
    torch.ops.load_library(str(file))
    status = ctypes.CDLL(str(file)).opaq_torch_status
    status.restype = ctypes.c_char_p
    if (reason := status()) is not None:
        raise ImportError(f"opaq: {reason.decode()}.")
    for op in operators():
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", _make_fake(op))


_load()
ops = getattr(torch.ops, NAMESPACE)
