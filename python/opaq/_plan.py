"""Plans: words that the library reads; a dict here, so that a word can be exchanged. And what goes with a plan:
an operator's tensors and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opaq._operators import result_places
from opaq.quantized_tensor import QuantizedTensor


def plan_text(words: dict[str, Any]) -> str:
    """`x="fp8"` is the word x=fp8, `cache=True` the word cache; what is empty is left out."""
    return " ".join(name if value is True else f"{name}={value}" for name, value in words.items() if value)


def plan_words(text: str) -> dict[str, Any]:
    pairs = [word.split("=", 1) for word in text.split(" ") if word]
    return {pair[0]: pair[1] if len(pair) == 2 else True for pair in pairs}


def is_delayed(words: dict[str, Any], *names: str) -> bool:
    return any("+delayed" in words.get(name, "") for name in names)


def wanted_gradients(**tensors: torch.Tensor | None) -> str:
    """The letters of those that want one."""
    if not torch.is_grad_enabled():
        return ""
    return "".join(name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad)


def results_of(name: str, plan: str, out: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """An operator's results by output; an empty list for one that is absent."""
    return [list(out[begin:end]) for begin, end in result_places(name, plan)]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that stand for one in an operator's list."""
    return tensor.buffers() if isinstance(tensor, QuantizedTensor) else [tensor.contiguous()]


def given_by(tensor: torch.Tensor | None) -> str:
    """How a tensor comes quantized; "" for a plain one."""
    return tensor._quantizer_text if isinstance(tensor, QuantizedTensor) else ""


def precision_word(precision: str) -> str:
    """The plan's word; none for what is the default."""
    return "" if precision == "exact" else precision
