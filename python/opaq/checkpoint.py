"""How quantized checkpoints are laid out, read from their `quantization_config`: which quantizer each weight
has, which tensors hold it, how its layer's input is quantized. Uses no framework and opens no file. The library
parses the configuration (opaq/checkpoint_config.h) and has the tensors' names and dtypes (opaq/layout.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count, takewhile
from typing import Any, NamedTuple

from opaq import _library
from opaq._library import OpaqError, call, library
from opaq._names import Names
from opaq._tables import layout_row, layouts
from opaq.quantizer import Quantizer, query, text_of

_PLAIN = ("F32", "BF16", "F16", "F64")


class Header(NamedTuple):
    """A tensor's entry in a file's header: the dtype's name in safetensors, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StoredShape(NamedTuple):
    """The shape of a weight's scales, without the dimensions of a stack."""

    sizes: tuple[int, ...]
    rows_dim: int | None  # the dimension of the rows or their blocks; None: one entry covers all rows
    columns_dim: int | None  # the dimension of the blocks of columns


@dataclass(frozen=True)
class Scheme:
    """How one kind of weight is stored and run."""

    weight: str  # the quantizer of a weight of its own
    stacked: str  # of several weights stacked in one tensor, each with its own scales
    data: str  # suffix added to the plain weight's name
    scale: str
    global_: str
    input: str  # how the input is quantized; "" if it is not
    input_given: str  # the same if the checkpoint has a scale for the input
    input_scale: str  # name of that scale's tensor, in the weight's module
    data_dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    global_dtypes: tuple[str, ...]
    input_dtypes: tuple[str, ...]
    scale_shape: str  # a letter for each dimension: opaq/layout.h

    def names(self, weight: str) -> dict[str, str]:
        """The names of a weight's tensors by role, from the name it would have if it were plain."""
        found = {"data": weight + self.data, "scale": weight + self.scale}
        if self.global_:
            found["global"] = weight + self.global_
        if self.input_scale:
            module, dot, _ = weight.rpartition(".")
            found["input"] = module + dot + self.input_scale
        return found

    @property
    def rows_per_scale(self) -> int:
        """How many rows share a scale; 1 if one covers all of them."""
        return query(self.weight, "rows_per_scale")

    def scales(self, rows: int, columns: int) -> StoredShape:
        """The shape in which the layout's own software writes the scales of a weight."""
        made = _library.LayoutShape()
        letters, number = self.scale_shape.encode(), Quantizer(self.weight).spec.format
        if not library.opaq_layout_shape(letters, number, rows, columns, made):
            raise ValueError(
                f"opaq: a weight of {rows} x {columns} has no scales of shape {self.scale_shape!r}"
            )
        dims = (None if dim < 0 else int(dim) for dim in (made.rows_dim, made.columns_dim))
        return StoredShape(tuple(made.size[: made.rank]), *dims)

    def check(self, weight: str, headers: Mapping[str, Header]) -> None:
        """Checks that all tensors exist with valid dtypes. The input's scale is optional."""
        dtypes = {
            "data": self.data_dtypes,
            "scale": self.scale_dtypes,
            "global": self.global_dtypes,
            "input": self.input_dtypes,
        }
        names = self.names(weight)
        for role, name in names.items():
            if name not in headers and role != "input":
                needed = ", ".join(n for r, n in names.items() if r != "input")
                raise ValueError(
                    f"opaq: the checkpoint has no {name}; a weight stored as {self.weight} needs {needed}"
                )
            if name in headers and headers[name].dtype not in dtypes[role]:
                raise ValueError(
                    f"opaq: {name} is {headers[name]}, expected {' or '.join(dtypes[role])} for a weight that "
                    f"is stored as {self.weight}"
                )


@dataclass(frozen=True)
class Layout:
    """A parsed `quantization_config`."""

    schemes: tuple[tuple[Names, Scheme], ...]  # the first whose target matches a module applies to it
    ignore: Names
    weights: tuple[str, ...] = ("weight",)  # names of plain weights in their modules

    def scheme(self, module: str) -> Scheme | None:
        """How this module's weight is stored; None if it is plain."""
        if module in self.ignore:
            return None
        return next((scheme for names, scheme in self.schemes if module in names), None)

    def packed(self, headers: Mapping[str, Header]) -> dict[str, Scheme]:
        """The weights that are stored quantized, by the names they would have if they were plain. Raises if one
        lacks a tensor, has one of a wrong dtype, or is plain according to the configuration."""
        found: dict[str, Scheme] = {}
        endings = {e for _, s in self.schemes for e in (s.data, s.scale, s.global_)} - {""}
        for name, header in headers.items():
            weights = [name.removesuffix(e) for e in endings if name.endswith(e)]
            weights += [name] if header.dtype not in _PLAIN else []
            for weight in weights:
                module, _, leaf = weight.rpartition(".")
                if leaf not in self.weights:
                    continue
                if (scheme := self.scheme(module)) is None:
                    raise ValueError(
                        f"opaq: the checkpoint has {name} ({header}), but its quantization_config says that "
                        f"{module} is not quantized"
                    )
                found[weight] = scheme
        for weight, scheme in found.items():
            scheme.check(weight, headers)
        return found


# ---- reading a configuration with the library ----

_JSON_KINDS: dict[str, tuple[type, ...]] = {  # enum opaq_json_kind, from OPAQ_JSON_BOOLEAN on
    "a boolean": (bool,),
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "a list": (list, tuple, set, frozenset),
    "an object": (Mapping,),
}
_DEEPEST = 60


def json_kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    return next((kind for kind, types in _JSON_KINDS.items() if isinstance(value, types)), type(value).__name__)


def _text(value: Any) -> bytes:
    return str(value).replace("\0", "\ufffd").encode(errors="replace")


def _values(value: Any, depth: int = 0, key: str | None = None) -> Iterator[_library.ConfigValue]:
    """A configuration flattened for the library."""
    value = value.value if isinstance(value, Enum) else value
    kind = json_kind(value)
    number = ["null", *_JSON_KINDS].index(kind) if kind in ("null", *_JSON_KINDS) else len(_JSON_KINDS) + 1
    if kind == "an integer" and not -(2**63) <= value < 2**63:
        number = 3  # OPAQ_JSON_NUMBER
    integer = int(value) if number in (1, 2) else 0
    text = None if number in (0, 1, 2, 5, 6) else _text(value)
    yield _library.ConfigValue(depth, number, None if key is None else _text(key), text, integer)
    if depth < _DEEPEST and isinstance(value, Mapping):
        for name, child in value.items():
            yield from _values(child, depth + 1, name)
    elif depth < _DEEPEST and kind == "a list":
        for child in value:
            yield from _values(child, depth + 1)


def _names(function: Callable[..., bytes | None], *arguments: Any) -> list[str]:
    """The results of a function for 0, 1, ... as its last argument, up to the first None."""
    found = takewhile(lambda name: name is not None, (function(*arguments, i) for i in count()))
    return [str(name, errors="replace") for name in found if name is not None]


def _scheme(row: _library.ConfigScheme) -> Scheme:
    layout = layout_row(row.row.contents)
    return Scheme(
        text_of(row.weight),
        text_of(row.stacked),
        layout.data,
        layout.scale,
        layout.global_,
        text_of(row.input) if row.has_input else "",
        text_of(row.input_given) if row.has_input_given else "",
        row.input_scale.decode(),
        layout.data_dtypes,
        layout.scale_dtypes,
        layout.global_dtypes,
        layout.input_dtypes,
        layout.scale_shape,
    )


def layout_names() -> list[str]:
    """The names of all layouts."""
    return list(dict.fromkeys(row.layout for row in layouts()))


def layout_schemes(layout: str) -> list[Scheme]:
    """How weights can be stored in a layout."""
    row = _library.ConfigScheme()
    found: list[Scheme] = []
    while library.opaq_layout_scheme(layout_names().index(layout), len(found), row):
        found.append(_scheme(row))
    return found


def read_layout(config: Mapping[str, Any]) -> Layout:
    """The layout that a checkpoint's `quantization_config` describes."""
    values = list(_values(config))
    read = ctypes.c_void_p()
    try:
        call("opaq_config_read", (_library.ConfigValue * len(values))(*values), len(values), read)
    except OpaqError as error:
        raise type(error)(f"opaq: {error}", error.status) from None
    try:
        schemes: list[tuple[Names, Scheme]] = []
        while pointer := library.opaq_config_scheme(read, len(schemes)):
            names = _names(library.opaq_config_target, read, len(schemes))
            schemes.append((Names(names), _scheme(pointer.contents)))
        ignore, weights = (
            _names(f, read) for f in (library.opaq_config_ignored, library.opaq_config_weight_name)
        )
        return Layout(tuple(schemes), Names(ignore), tuple(weights))
    finally:
        library.opaq_config_destroy(read)
