"""The PyTorch operators: loads libopaq_torch.so, which registers them from C, and adds a fake implementation to
each. Operators and output shapes come from the library's operator table; no operator is described here."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import torch
from torch._library import custom_ops
from torch.utils._pytree import tree_leaves

from opaq import _library, _refusals, _runner_gradients
from opaq._import_hook import allow_in_graph, when_imported
from opaq._library import call
from opaq._tables import ELEMENT_BITS, BufferRow, formats
from opaq.quantizer import TEXT_LIMIT, Quantizer, kept, text_of

OLDEST = (2, 11)
NAMESPACE = "opaq"
ALIASES = "nvfp4"  # namespace of second names, unless another library has defined them


SHAPES = (  # enum opaq_shape_source
    "of_tensor",
    "of_sizes",
    "leading_and_first",
    "first",
    "constant",
    "leading_and_int",
    "leading",
    "leading_and_outer",
    "tensor_and_outer",
    "of_sizes_flat",
)
# enum opaq_dtype
DTYPES = {
    4: torch.float16,
    5: torch.bfloat16,
    6: torch.float32,
    16: torch.uint8,
    17: torch.int64,
    18: torch.int32,
}
# The library's number of each dtype. No operator takes float64; the library only names it in errors.
NUMBERS = {**{dtype: number for number, dtype in DTYPES.items()}, torch.float64: -2}
TEXT, CHANGED = 3, 8  # enum opaq_argument_kind
ARGUMENT, MEMORY = 1, 7  # enum opaq_status
ABSENT, PLAIN, QUANTIZED = range(3)  # enum opaq_form_kind


@dataclass(frozen=True)
class Output:
    """An output row of an operator."""

    shape_source: str
    shape_argument: int
    first_argument: int
    dtype_argument: int
    dtype: torch.dtype | None
    device_argument: int
    slots: int

    def shape(self, values: Sequence[Any]) -> Any:
        """The output's shape; sizes may be symbolic."""
        if self.shape_source == "constant":
            return (self.shape_argument,)
        given = values[self.shape_argument]
        given = given.shape if isinstance(given, torch.Tensor) else given
        last = values[self.first_argument]
        match self.shape_source:
            case "first":
                return given[:1]
            case "leading":
                return given[:-1]
            case "leading_and_first":
                return (*given[:-1], last[0])
            case "leading_and_int":
                return (*given[:-1], last)
            case "leading_and_outer":
                return (*given[:-1], last[-2])
            case "tensor_and_outer":
                return (*given, last[-2])
        return given


@dataclass(frozen=True)
class Operator:
    """A row of the operator table."""

    index: int
    name: str
    arguments: tuple[str, ...]
    texts: tuple[int, ...]  # indices of the arguments that are texts
    outputs: tuple[Output, ...]
    returns_one: bool
    has_slots: bool

    @property
    def returns_list(self) -> bool:
        return not self.has_slots and not self.returns_one


@cache
def operators() -> dict[str, Operator]:
    rows = {}
    for i in range(_library.library.opaq_op_count()):
        row = _library.library.opaq_op_at(i)
        arguments = row.contents.argument[: row.contents.argument_count]
        outputs = tuple(
            Output(
                SHAPES[out.shape_source],
                out.shape_argument,
                out.first_argument,
                out.dtype_argument,
                DTYPES.get(out.dtype),
                out.device_argument,
                out.slots,
            )
            for out in row.contents.output[: row.contents.output_count]
        )
        name = row.contents.name.decode()
        texts = tuple(i for i, argument in enumerate(arguments) if argument.kind == TEXT)
        changes = bool(_library.library.opaq_op_changes(row))
        names = tuple(argument.name.decode() for argument in arguments)
        rows[name] = Operator(i, name, names, texts, outputs, bool(row.contents.returns_one), changes)
    return rows


@kept
def forms(name: str, *texts: str) -> tuple[str | None, ...]:
    """The form of each output, which the text arguments determine: None if it is absent, "" for a plain tensor,
    otherwise its quantizer."""
    op = operators()[name]
    values = (_library.Value * len(op.arguments))()
    for index, text in zip(op.texts, texts, strict=True):
        raw = text.encode(errors="surrogatepass")
        values[index].text, values[index].count = raw, len(raw)
    found: list[str | None] = []
    for i in range(len(op.outputs)):
        form = _library.Form()
        call("opaq_op_form", _library.library.opaq_op_at(op.index), values, i, form)
        found.append({ABSENT: None, PLAIN: ""}.get(form.kind) if form.kind != QUANTIZED else text_of(form.spec))
    return tuple(found)


@kept
def result_places(name: str, *texts: str) -> tuple[tuple[int, int], ...]:
    """Where each output's tensors begin and end among an operator's results."""
    places, at = [], 0
    for form, row in zip(forms(name, *texts), operators()[name].outputs, strict=True):
        count = 0 if form is None else len(buffer_rows(form)) if form else 1
        places.append((at, at + count))
        at += row.slots or count
    return tuple(places)


@lru_cache(TEXT_LIMIT)
def buffer_rows(text: str) -> tuple[BufferRow, ...]:
    """The rows of the buffers that a quantizer's tensors have, in flatten order."""
    quantizer = Quantizer(text)
    row = next(row for row in formats() if row.name == quantizer.format)
    usage = _library.USAGES[quantizer.usage]
    return tuple(buffer for buffer in row.buffers if buffer.is_present(usage, quantizer.options))


def storage_dtype(row: BufferRow) -> torch.dtype:
    """Codes of up to 8 bits are stored in bytes."""
    return torch.uint8 if row.element is None or ELEMENT_BITS[row.element] <= 8 else torch.float32


def empty_buffers(
    text: str, shape: Any, device: torch.device | None, is_flat: bool = False
) -> list[torch.Tensor]:
    """The uninitialised buffers of a tensor; sizes may be symbolic."""
    rows = [(row, row.shape(shape)) for row in buffer_rows(text)]
    return [
        torch.empty((prod(sizes),) if is_flat else sizes, dtype=storage_dtype(row), device=device)
        for row, sizes in rows
    ]


@kept
def buffer_names(text: str) -> tuple[str, ...]:
    return tuple(row.name for row in buffer_rows(text))


@allow_in_graph
def create_buffers(text: str, shape: Any, device: torch.device | None) -> list[torch.Tensor]:
    """empty_buffers as an opaque call for Dynamo: it is traced later, with symbolic sizes."""
    return empty_buffers(text, shape, device)


traced = False  # whether a fake has run, so that compiled code may contain operators


def _make_fake(op: Operator) -> Callable[..., Any]:
    def one(output: Output, form: str | None, values: list[Any]) -> list[torch.Tensor]:
        device = values[output.device_argument]
        where = (device if isinstance(device, torch.Tensor) else device[0]).device
        if where.type != "meta" and any(t.is_meta for t in tree_leaves(values) if isinstance(t, torch.Tensor)):
            raise RuntimeError(f"opaq: {op.name}: some tensors are on meta, others on {where}")
        made = []
        if form:
            made = empty_buffers(form, output.shape(values), where, output.shape_source == "of_sizes_flat")
        elif form is not None:
            dtype = values[output.dtype_argument] if output.dtype_argument >= 0 else output.dtype
            dtype = dtype.dtype if isinstance(dtype, torch.Tensor) else dtype
            made = [torch.empty(output.shape(values), dtype=dtype, device=where)]
        spare = output.slots - len(made) if op.has_slots else 0
        return made + [torch.empty(0, dtype=torch.uint8, device=where) for _ in range(spare)]

    def fake(*arguments: Any, **named: Any) -> Any:
        global traced
        traced = True
        given = dict(zip(op.arguments, arguments, strict=False), **named)
        values: list[Any] = [given.get(name) for name in op.arguments]
        kinds = forms(op.name, *(values[i] for i in op.texts))
        made = [t for out, form in zip(op.outputs, kinds, strict=True) for t in one(out, form, values)]
        made = _refusals.fake_result(made, values, op.name)
        if op.returns_list:
            return made
        return tuple(made) if op.has_slots and made else made[0] if made else None

    return fake


def _complete(op: Operator, library: torch.library.Library, bridge: ctypes.CDLL) -> None:
    """Registers the Python parts of an operator: the fake and the errors of unsupported uses."""
    torch.library.register_fake(f"{library.ns}::{op.name}", _make_fake(op), lib=library)
    _refusals.register(getattr(getattr(torch.ops, library.ns), op.name).default, library, bridge)


_withdrawn: set[str] = set()  # aliases that another library has since defined


class _AliasLibrary(torch.library.Library):
    """Owns the alias nvfp4::name. A `torch.library.custom_op` of that name destroys it."""

    def __init__(self, name: str) -> None:
        super().__init__(ALIASES, "FRAGMENT")
        self.name = name
        self._op_defs.add(f"{ALIASES}::{name}")  # so that PyTorch forgets torch.ops.nvfp4.name
        _complete(operators()[name], self, _bridge)

    def _destroy(self) -> None:
        super()._destroy()
        _bridge.opaq_torch_alias_withdraw(self.name.encode())
        _withdrawn.add(self.name)


class _AliasNamespace(torch._ops._OpNamespace):
    """torch.ops.nvfp4. The aliases are defined when they are first looked up, so other libraries may define
    these names before or after `import opaq`."""

    __module__ = "torch._ops"  # where generated code of graphs finds its operators

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Library.define looks up the name before it defines an operator
            is_definition = sys._getframe(1).f_code is torch.library.Library.define.__code__
            if is_definition or name in _withdrawn or name not in operators():
                raise
            if _bridge.opaq_torch_alias_define(name.encode()) != 0:
                raise
        custom_ops.OPDEF_TO_LIB[f"{ALIASES}::{name}"] = _AliasLibrary(name)
        return super().__getattr__(name)


def _add_random(packet: Any, compile_utils: Any) -> None:
    getattr(compile_utils, "rand_ops", []).append(packet)


def _load() -> ctypes.CDLL:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"opaq: PyTorch {torch.__version__} is installed, opaq needs 2.11 or later.")
    file = _library.path.with_name("libopaq_torch.so")
    if not file.exists():
        raise ImportError(f"opaq: there is no {file.name} beside {_library.path}.")
    torch.ops.load_library(str(file))
    bridge = ctypes.CDLL(str(file))
    bridge.opaq_torch_status.restype = ctypes.c_char_p
    if (reason := bridge.opaq_torch_status()) is not None:
        raise ImportError(f"opaq: {reason.decode()}.")
    for op in operators().values():
        _complete(op, _fragment, bridge)
        bridge.opaq_torch_alias_withdraw(op.name.encode())
    getattr(torch.ops, ALIASES).__class__ = _AliasNamespace
    _runner_gradients.register()
    bridge.opaq_torch_watch_gradients()
    # These two draw random numbers. Common-subexpression elimination reads PyTorch's list instead of the tag,
    # and before PyTorch 2.12 only Python can set the tag.
    for name in ("linear_forward_random", "random_state"):
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        when_imported("torch._functorch.compile_utils", partial(_add_random, packet))
        if torch.Tag.nondeterministic_seeded not in packet.default.tags:
            packet.default.tags.append(torch.Tag.nondeterministic_seeded)
    return bridge


def call_operator(caller: str, operator: Any, *arguments: Any) -> Any:
    """Calls an operator and raises its errors with the name of `caller` (docs/pytorch.md, "Errors"). In a
    compiled graph they remain PyTorch's."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        said = str(error)
        if type(error) is not RuntimeError or not said.startswith("opaq: "):
            raise
        text = said.removeprefix("opaq: ").removeprefix(f"{operator.__name__}: ")
        text = f"{caller}: " + text.partition("\nException raised from ")[0]  # PyTorch may add a stack
        status = _bridge.opaq_torch_last_status() or ARGUMENT
        if status == MEMORY:
            raise torch.OutOfMemoryError(text) from None
        raise _library.error_of(status, text) from None


def expect_tensors(caller: str, **arguments: Any) -> None:
    """Raises a TypeError for an argument that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            hint = f"; torch.from_numpy({name}) is one" if kind == "ndarray" else ""
            raise TypeError(f"{caller}: {name} is a {kind}, expected a torch.Tensor{hint}")


_fragment = torch.library.Library(NAMESPACE, "FRAGMENT")
_bridge = _load()
ops = getattr(torch.ops, NAMESPACE)
