"""Plans, which are texts that the library edits (opaq/plan_text.h), and the tensors and results of operators
that take one. Results of functions of texts are cached, so a repeated call parses nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from opaq._library import PLAN_TEXT_BYTES, OpaqError, call
from opaq._operators import result_places
from opaq.quantized_tensor import QuantizedTensor
from opaq.quantizer import Quantizer, kept, query


@kept
def plan_set(plan: str = "", /, **words: str | bool) -> str:
    """The plan with these words set: `x="fp8"` sets x=fp8, `cache=True` sets cache; an empty value removes the
    word."""
    text = ctypes.create_string_buffer(plan.encode(), PLAN_TEXT_BYTES)
    for key, value in words.items():
        given = (b"" if value is True else str(value).encode()) if value else None
        call("opaq_plan_set", text, key.encode(), given, text, PLAN_TEXT_BYTES)
    return text.value.decode()


@kept
def plan_for(caller: str, /, **words: str | bool) -> str:
    """A new plan with these words; errors begin with `caller`, which got some of them from the user."""
    for key, value in words.items():
        if not isinstance(value, (str, bool)):
            raise TypeError(f"{caller}: {value!r} is a {type(value).__name__}, expected a str as {key}")
    try:
        for key in ("x", "h", "w", "dy"):
            if text := words.get(key):
                Quantizer(str(text))  # its error suggests a word
        return plan_set(**words)
    except OpaqError as error:
        raise OpaqError(f"{caller}: {error}", error.status) from None


@kept
def plan_get(plan: str, key: str) -> str:
    """The value of a word, its key if it takes none; "" if the plan has no such word."""
    value = ctypes.create_string_buffer(PLAN_TEXT_BYTES)
    call("opaq_plan_get", plan.encode(), key.encode(), value, PLAN_TEXT_BYTES)
    return value.value.decode()


def texts_of(*quantizers: Any) -> tuple[Any, ...]:
    """Quantizers as texts. Other values pass unchanged, and the plan refuses them."""
    return tuple(q._text if isinstance(q, Quantizer) else q for q in quantizers)


@kept
def any_quantizer(plan: str, name: str, *keys: str) -> bool:
    """Whether one of these words' quantizers has a property ("is_delayed"). False for
    invalid texts, which the operator refuses."""
    with suppress(OpaqError):
        return any(query(plan_get(plan, key), name) for key in keys)
    return False


@kept
def _experts_plan(caller: str, *words: str) -> str:
    names = (
        "x h w gate_up_given down_given act limit alpha beta precision order experts first weights "
        "grad dy backward"
    )
    return plan_for(caller, **dict(zip(names.split(), words, strict=True)))


def experts_plan(
    caller: str,
    quantizers: tuple[str, str, str],
    given: tuple[str, str],
    activation: str,
    numbers: tuple[float | None, float | None, float | None],
    precision: str | None,
    slices: tuple[int | None, int, bool] = (None, 0, False),
    order: str = "fixed",
    *,
    gradients: tuple[str, str, str] = ("", "", ""),
) -> str:
    """The plan of an MLP or a mixture of experts.

    quantizers: of x, h and w. given: the quantizers of gate_up and down if these are packed. numbers: the
    activation's limit, alpha and beta. slices: number of experts, first expert, and whether router weights are
    applied to the input. gradients: which are wanted, the quantizer of dy, and the recipe's
    backward_override."""
    factors = ["" if number is None else str(float(number)) for number in numbers]
    experts, first = "" if slices[0] is None else str(slices[0]), str(slices[1]) if slices[1] else ""
    weights = "input" if slices[2] else ""
    words = *quantizers, *given, activation, *factors, precision or "", order, experts, first, weights
    return _experts_plan(caller, *words, *(gradients if gradients[0] else ("", "", "")))


def wanted_gradients(**tensors: torch.Tensor | None) -> str:
    """The names of the tensors that require a gradient, concatenated."""
    if not torch.is_grad_enabled():
        return ""
    return "".join(name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad)


def refuse_packed_gradients(caller: str, **weights: torch.Tensor | None) -> None:
    """Raises if a packed weight requires a gradient. Gradients pass through packed weights to the input."""
    for name, weight in weights.items() if torch.is_grad_enabled() else ():
        if isinstance(weight, QuantizedTensor) and weight.requires_grad:
            raise NotImplementedError(
                f"{caller}: {name} is packed and requires a gradient, which packed weights of this layer do "
                f"not have: call {name}.requires_grad_(False); the input's gradient is computed nevertheless"
            )


def results_of(name: str, plan: str, out: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """An operator's results by output; an empty list for one that is absent."""
    return [list(out[begin:end]) for begin, end in result_places(name, plan)]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that represent one tensor in an operator's arguments."""
    return tensor.buffers() if isinstance(tensor, QuantizedTensor) else [tensor.contiguous()]


def given_by(tensor: torch.Tensor | None) -> str:
    """The quantizer of a tensor; "" for a plain one."""
    return tensor._quantizer_text if isinstance(tensor, QuantizedTensor) else ""
