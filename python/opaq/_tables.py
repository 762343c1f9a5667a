"""The format table and prototypes, read from the library. No layout is defined here: extents are rows of the
table, and Python only evaluates them, on integers or symbolic sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any

from opaq import _library
from opaq._library import DIMS, ELEMENT_OF_SPEC, ROLES, call, library

if TYPE_CHECKING:
    from opaq.quantizer import Quantizer

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Extent:
    """round_up(ceil_div(D, per), to), where D is the rows, the columns or 1."""

    dim: str
    per: int
    to: int

    def evaluate(self, rows: Any, columns: Any) -> Any:
        """The extent for a tensor of these sizes, which may be symbolic."""
        size = {"one": 1, "rows": rows, "columns": columns}[self.dim]
        entries = size if self.per == 1 else (size + (self.per - 1)) // self.per
        return entries if self.to == 1 else (entries + (self.to - 1)) // self.to * self.to


@dataclass(frozen=True)
class BufferRow:
    """One buffer of a format, and which quantizers have it."""

    name: str
    role: str  # "data", "scale" or "amax"
    usage: int  # enum opaq_usage
    options_needed: frozenset[str]
    options_excluded: frozenset[str]
    element: str | None  # None: the quantizer's element
    extents: tuple[Extent, ...]

    def is_present(self, usage: int, options: Collection[str]) -> bool:
        """Whether a quantizer of this usage (enum opaq_usage) with these options has the buffer."""
        wanted = self.options_needed.issubset(options) and self.options_excluded.isdisjoint(options)
        return wanted and self.usage & usage != 0

    def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The buffer's shape in stored entries, for a tensor of `shape`. Data keeps the leading dimensions."""
        *leading, columns = shape
        entries: list[Any] = []
        for extent in self.extents:
            is_leading = self.role == "data" and extent == Extent("rows", 1, 1)
            entries += leading if is_leading else [extent.evaluate(prod(leading), columns)]
        return tuple(entries)


@dataclass(frozen=True)
class FormatRow:
    """A format: its elements, options and rules, and its buffers in flatten order."""

    name: str
    elements: tuple[str, ...]
    element_default: str
    options: tuple[str, ...]
    rules: tuple[str, ...]
    block_rows: int
    block_columns: int
    buffers: tuple[BufferRow, ...]


@dataclass(frozen=True)
class LayoutRow:
    """How a layout of checkpoints names a weight's tensors in a format; dtypes as safetensors names them."""

    layout: str
    format: str
    method: str
    data: str
    scale: str
    global_: str
    input: str
    data_dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    global_dtypes: tuple[str, ...]
    input_dtypes: tuple[str, ...]
    scale_shape: str  # a letter for each dimension: opaq/layout.h
    rule: str


@dataclass(frozen=True)
class Buffer:
    """One buffer of a tensor, evaluated by the library; shape and strides are in stored entries."""

    name: str
    role: str
    usage: int
    element: str
    packing: int  # elements per entry
    entry_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int


def _names(function: Any, numbers: Iterable[int]) -> tuple[str, ...]:
    """The library's names of the numbers, up to the first unknown one."""
    names = []
    for number in numbers:
        name = function(number)
        if not name:
            break
        names.append((name if isinstance(name, bytes) else name.contents.name).decode())
    return tuple(names)


ELEMENTS = _names(library.opaq_element_info, count())  # in the order of enum opaq_element
OPTIONS = _names(library.opaq_option_name, (1 << i for i in range(31)))  # bit by bit
RULES = _names(library.opaq_rule_name, count())
ACTIVATIONS = _names(library.opaq_activation_name, count())
ELEMENT_BITS = {name: library.opaq_element_info(i).contents.bits for i, name in enumerate(ELEMENTS)}


def names_of(bits: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(names) if bits >> i & 1)


def _buffer_row(row: _library.BufferRow) -> BufferRow:
    return BufferRow(
        name=row.name.decode(),
        role=ROLES[row.role],
        usage=row.usage,
        options_needed=frozenset(names_of(row.options_needed, OPTIONS)),
        options_excluded=frozenset(names_of(row.options_excluded, OPTIONS)),
        element=None if row.element == ELEMENT_OF_SPEC else ELEMENTS[row.element],
        extents=tuple(Extent(DIMS[e.dim], e.per, e.to) for e in row.extent[: row.rank]),
    )


def _format_row(row: _library.FormatRow) -> FormatRow:
    return FormatRow(
        name=row.name.decode(),
        elements=names_of(row.elements, ELEMENTS),
        element_default=ELEMENTS[row.element_default],
        options=names_of(row.options, OPTIONS),
        rules=names_of(row.rules, RULES),
        block_rows=row.block_rows,
        block_columns=row.block_columns,
        buffers=tuple(_buffer_row(row.buffers[i]) for i in range(row.buffer_count)),
    )


@cache
def formats() -> tuple[FormatRow, ...]:
    """The format table, in the order of enum opaq_format."""
    rows: list[FormatRow] = []
    while pointer := library.opaq_format_row(len(rows)):
        rows.append(_format_row(pointer.contents))
    return tuple(rows)


def layout_row(row: _library.LayoutRow) -> LayoutRow:
    return LayoutRow(
        layout=library.opaq_layout_name(row.layout).decode(),
        format=formats()[row.format].name,
        method=row.method.decode(),
        data=row.data.decode(),
        scale=row.scale.decode(),
        global_=getattr(row, "global").decode(),
        input=row.input.decode(),
        data_dtypes=tuple(row.data_dtypes.decode().split()),
        scale_dtypes=tuple(row.scale_dtypes.decode().split()),
        global_dtypes=tuple(row.global_dtypes.decode().split()),
        input_dtypes=tuple(row.input_dtypes.decode().split()),
        scale_shape=row.scale_shape.decode(),
        rule=RULES[row.rule],
    )


@cache
def layouts() -> tuple[LayoutRow, ...]:
    """The layouts of checkpoints; the rows of a layout are adjacent."""
    rows: list[LayoutRow] = []
    while pointer := library.opaq_layout_row(len(rows)):
        rows.append(layout_row(pointer.contents))
    return tuple(rows)


def element_of(dtype: Any) -> int:
    """The library's number for float32, float16 or bfloat16: a text, or a dtype of NumPy or PyTorch."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", None))
    name = str(dtype).removeprefix("torch.") if name is None else name
    if name not in _DTYPES:
        raise ValueError(f"opaq: the dtype is {name or dtype!r}, expected one of {', '.join(_DTYPES)}")
    return ELEMENTS.index(_DTYPES[name])


def make_proto(shape: Sequence[int], dtype: Any, quantizer: Quantizer) -> _library.Proto:
    made = _library.Proto()
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    device = _library.Device(0, 0)
    call("opaq_proto_make", sizes, len(shape), element_of(dtype), quantizer.spec, device, made)
    return made


def buffers_of(made: _library.Proto) -> list[Buffer]:
    buffers = []
    for i in range(library.opaq_proto_buffer_count(made)):
        b = _library.Buffer()
        call("opaq_proto_buffer", made, i, b)
        shape, strides = tuple(b.shape[: b.rank]), tuple(b.strides[: b.rank])
        name, role, element = b.name.decode(), ROLES[b.role], ELEMENTS[b.element]
        buffers.append(Buffer(name, role, b.usage, element, b.packing, b.entry_bytes, shape, strides, b.bytes))
    return buffers


def proto(shape: Sequence[int], dtype: Any, quantizer: Quantizer | str) -> list[Buffer]:
    """The buffers of a tensor of this shape, dtype and quantizer, in flatten order, without any data."""
    from opaq.quantizer import as_quantizer  # avoids a circular import

    if not hasattr(shape, "__len__"):
        raise TypeError(f"opaq.proto: shape is {shape!r}, expected a sequence of sizes")
    return buffers_of(make_proto(shape, dtype, as_quantizer("opaq.proto", quantizer)))
