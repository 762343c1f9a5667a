"""LoRA adapters beside packed stacks of weights: the packed product stays one operator, and each adapter is two
small grouped products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from opaq import functional
from opaq._autocast import autocast

# a [experts, rank, in features], b [experts, out features, rank], and their product's factor
Adapter = tuple[torch.Tensor, torch.Tensor, float]
# By the weight's name.
Adapters = dict[str, list[Adapter]]


def adapted_product(
    x: torch.Tensor,
    splits: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapters: Iterable[Adapter],
    **options: Any,
) -> torch.Tensor:
    """x w^T + bias plus each adapter's factor * x a^T b^T, for rows sorted by expert; `options` are those of
    functional.grouped_linear."""
    y = functional.grouped_linear(x, splits, weight, bias, **options)
    with autocast(enabled=False):  # a recipe does not quantize adapters
        for a, b, factor in adapters:
            low = functional.grouped_linear(x.to(a.dtype), splits, a)
            y = y + (functional.grouped_linear(low, splits, b) * factor).to(y.dtype)
    return y
