"""Experts in transformers: its modules stay as they are, with packed weights, and run through its experts interface
under the name "opaq", as one operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from opaq import functional
from opaq.packed import zeros
from opaq.quantized_tensor import QuantizedTensor

IMPLEMENTATION = "opaq"

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}

# Gates of their own: what each is, and the attributes that have its limit and alpha.
_GATES = {
    "GptOssExperts": ("swiglu_oai", "limit", "alpha"),
    "OpenAIPrivacyFilterExperts": ("swiglu_oai_packed", "limit", "alpha"),
    "MiniMaxM3VLExperts": ("swiglu_oai_packed", "swiglu_limit", "swiglu_alpha"),
    "DeepseekV4Experts": ("silu_clamp", "limit", ""),
    "HYV4Experts": ("silu_clamp", "swiglu_limit", ""),
    "Glm5NextTextExperts": ("silu_clamp", "swiglu_limit", ""),
    "Step3p7Experts": ("silu_step", "limit", ""),
}


def projections(module: nn.Module) -> tuple[str, str] | None:
    """The names of the first and the second product's weights; None if this is no experts module."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return names if all(getattr(getattr(module, n, None), "ndim", 0) == 3 for n in names) else None


def _activation(module: Any) -> dict[str, Any]:
    """What the module does between the products, in the operator's words."""
    kind = type(module)
    if module.has_gate and kind._apply_gate is not _default_apply_gate:
        if kind.__name__ not in _GATES:
            raise NotImplementedError(f"opaq: {kind.__name__} has a gate of its own that opaq does not know")
        name, limit, alpha = _GATES[kind.__name__]
        return {"activation": name, "limit": getattr(module, limit)} | (
            {"alpha": getattr(module, alpha)} if alpha else {}
        )
    act = type(module.act_fn).__name__
    if act not in _ACTIVATIONS:
        raise NotImplementedError(f"opaq: {kind.__name__} has the activation {act}, which opaq does not know")
    return {"activation": _ACTIVATIONS[act] if module.has_gate else f"{_ACTIVATIONS[act]}_no_mul"}


class Packing(NamedTuple):
    """How a projection is packed: its weight's quantizer, its input's, and whether a checkpoint's scale of the input
    will come, one number for each expert."""

    quantizer: str
    input_quantizer: str = ""
    has_scale: bool = False


def pack_experts(module: Any, packings: Mapping[str, Packing]) -> None:
    """Gives both projections packed weights of shape (experts, out features, in features), zeros until they are
    loaded."""
    if getattr(module, "has_post_expert_norm", False):
        raise NotImplementedError(f"opaq: {type(module).__name__} normalizes what each expert returns")
    module.opaq_words = _activation(module)
    module.opaq_is_turned = module.is_transposed  # as checkpoints in high precision have the weights
    for name, packing in packings.items():
        plain = getattr(module, name)
        made = zeros(packed_shape(module, plain), packing.quantizer, plain.dtype, plain.device)
        setattr(module, name, nn.Parameter(made, requires_grad=False))
        role = "hidden" if name == "down_proj" else "input"
        scale = torch.empty(made.shape[0], device=plain.device) if packing.has_scale else None
        module.register_buffer(f"{role}_scale", scale)
        module.opaq_words[f"{role}_quantizer"] = packing.input_quantizer
    module.is_transposed = False


def packed_shape(module: Any, weight: torch.Tensor) -> tuple[int, ...]:
    """(experts, out features, in features) of a plain projection, whichever way round the module has it."""
    experts, rows, columns = weight.shape
    return (experts, columns, rows) if module.is_transposed else (experts, rows, columns)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What `experts_implementation="opaq"` calls."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    if not isinstance(first, QuantizedTensor):
        made: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return made
    biases = (None, None)
    if module.has_bias:
        biases = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias, module.down_proj_bias)
    return functional.moe(
        hidden_states,
        top_k_weights,
        top_k_index,
        first,
        module.down_proj,
        *biases,
        input_scale=module.input_scale,
        hidden_scale=module.hidden_scale,
        **module.opaq_words,
    )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
