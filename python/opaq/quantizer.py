"""Quantizer: a value around the canonical text of an opaq_spec. Grammar: docs/spec.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from opaq import _library
from opaq._library import DERIVATIONS, PROPERTIES, USAGES, OpaqError, call, library
from opaq._tables import ELEMENTS, OPTIONS, RULES, formats, names_of

if TYPE_CHECKING:
    import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
TEXT_LIMIT = 4096  # largest number of entries of a cache


def text_of(spec: _library.Spec) -> str:
    printed = ctypes.create_string_buffer(_library.SPEC_TEXT_BYTES)
    call("opaq_spec_print", spec, printed, len(printed))
    return printed.value.decode()


def kept(function: _Function) -> _Function:
    """Decorates a pure function of texts and other constants: its results are cached, and torch.compile treats
    them as constants."""
    cached = lru_cache(TEXT_LIMIT)(function)

    @wraps(function)
    def call_cached(*arguments: Any, **named: Any) -> Any:
        return cached(*arguments, **named)

    made: Any = call_cached
    made._dynamo_marked_constant = True
    made.cache_info, made.cache_parameters = cached.cache_info, cached.cache_parameters
    return made  # type: ignore[no-any-return]


# Names of formats in other libraries.
_SYNONYMS = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8": "fp8", "e4m3": "fp8", "e5m2": "fp8"}


def _suggestion(text: str) -> str:
    """ "; did you mean ...?" for the first unknown word of a text; "" if no known word is similar."""
    first, *options = text.lower().split("+")
    known = [*USAGES, *OPTIONS, "rule=", "eps=", "e4m3max="]
    words = [(first.split(".")[0], [row.name for row in formats()])]
    words += [(word.partition("=")[0], known) for word in options]
    for word, choices in words:
        if word in ELEMENTS and choices is known:
            return f"; did you mean '{words[0][0]}.{word}'?"
        if word not in choices and f"{word}=" not in choices:
            begun = [choice for choice in choices if word.startswith(choice)]  # "nvfp4_default_cfg"
            nearest = sorted(begun, key=len)[-1:] or get_close_matches(_SYNONYMS.get(word, word), choices, 1)
            return f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ""


@lru_cache(TEXT_LIMIT)
def _parse(text: str) -> _library.Spec:
    spec = _library.Spec()
    raw = text.encode(errors="surrogatepass")
    try:
        call("opaq_spec_parse", raw, len(raw), spec)
    except OpaqError as error:
        raise OpaqError(f"{error}{_suggestion(text)}", error.status) from None
    return spec


@kept
def _canonical(text: str) -> str:
    return text_of(_parse(text))


@kept
def with_usage(text: str, rowwise: bool | None, columnwise: bool | None) -> str:
    spec = Quantizer(text).spec
    for given, name in ((rowwise, "rowwise"), (columnwise, "columnwise")):
        if given is not None:
            spec.usage = spec.usage | USAGES[name] if given else spec.usage & ~USAGES[name]
    return text_of(spec)


@kept
def derive(text: str, how: str) -> str:
    """A quantizer derived from another: "tiled", "untiled", "current" (its scale is not given), "handed_on"
    (of a tensor that leaves a layer), "row_amaxes" (no row's values depend on other rows)."""
    made = _library.Spec()
    call("opaq_spec_derive", _parse(text), DERIVATIONS.index(how), made)
    return text_of(made)


@kept
def query(text: str, name: str) -> int:
    """A property of a quantizer, one of PROPERTIES (opaq/spec.h). 0 for "", a plain tensor."""
    return int(library.opaq_spec_query(_parse(text), PROPERTIES.index(name))) if text else 0


def with_tiles(text: str, tiled: bool) -> str:
    """The same quantizer with its rowwise copy in tiles, or without tiles."""
    return derive(text, "tiled" if tiled else "untiled")


def as_quantizer(caller: str, given: Any) -> Quantizer:
    """The quantizer that an argument names: a Quantizer or its text."""
    if isinstance(given, Quantizer):
        return given
    if not isinstance(given, str):
        kind = given if isinstance(given, type) else type(given)
        is_recipe = any(base.__name__ == "Recipe" for base in kind.__mro__)
        hint = "; recipes are for opaq.autocast and opaq.convert_training" if is_recipe else ""
        raise TypeError(
            f"{caller}: quantizer is {'the class' if kind is given else 'a'} {kind.__name__}, expected an "
            f"opaq.Quantizer or its text, such as 'nvfp4'{hint}"
        )
    return Quantizer(given)


class Quantizer:
    """How a tensor is quantized, as an immutable value: `Quantizer("nvfp4+2d")`.

    The text may have its options in any order and in any case. Only the canonical text is kept,
    `str(quantizer)`; quantizers with equal texts are equal."""

    __slots__ = ("_text",)
    _text: str

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"Quantizer: expected a str such as 'nvfp4+2d', got {type(text).__name__}")
        object.__setattr__(self, "_text", _canonical(text))

    @property
    def spec(self) -> _library.Spec:
        """A copy of the C value."""
        return _library.Spec.from_buffer_copy(_parse(self._text))

    @property
    def format(self) -> str:
        """The name of the format, such as "nvfp4"."""
        return str(formats()[self.spec.format].name)

    @property
    def element(self) -> str:
        """The name of the codes' element type, such as "e2m1"."""
        return str(ELEMENTS[self.spec.element])

    @property
    def usage(self) -> str:
        """Which copies a tensor has: "rowwise", "columnwise" or "both"."""
        return next(name for name, number in USAGES.items() if number == self.spec.usage)

    @property
    def options(self) -> tuple[str, ...]:
        """The options that are set, by the names they have in the text."""
        return names_of(self.spec.options, OPTIONS)

    @property
    def rule(self) -> str:
        """The rule by which scales are computed, such as "te"."""
        return str(RULES[self.spec.rule])

    @property
    def is_delayed(self) -> bool:
        """Whether its scale is given instead of computed from the data."""
        return bool(query(self._text, "is_delayed"))

    @property
    def is_stochastic(self) -> bool:
        """Whether it rounds stochastically."""
        return bool(query(self._text, "is_stochastic"))

    @property
    def is_tiled(self) -> bool:
        """Whether codes and scales are in the tiles that CPU kernels read."""
        return bool(query(self._text, "is_tiled"))

    @property
    def rows_per_scale(self) -> int:
        """How many rows share a scale: a tensor can be sliced at multiples of it."""
        return query(self._text, "rows_per_scale")

    def with_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """The same quantizer with other copies; None leaves a copy as it is."""
        return Quantizer(with_usage(self._text, rowwise, columnwise))

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """Transformer Engine's name for with_usage. A quantizer is immutable: use the result,
        `quantizer = quantizer.set_usage(columnwise=True)`."""
        return self.with_usage(rowwise, columnwise)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """A quantized tensor of this shape with uninitialised buffers; dtype (default float32) is the dtype it
        represents."""
        import torch

        from opaq.tensor_proto import TensorProto

        dtype = torch.float32 if dtype is None else dtype
        return TensorProto(shape, dtype, self, requires_grad, device).create_tensor()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Quantizer is immutable: make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Quantizer is immutable: {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Quantizer) else NotImplemented

    def __hash__(self) -> int:
        return hash((Quantizer, self._text))

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Quantizer({self._text!r})"

    def __reduce__(self) -> tuple[type[Quantizer], tuple[str]]:
        return Quantizer, (self._text,)
