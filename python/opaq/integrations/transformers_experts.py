"""Experts in transformers: its modules stay as they are, with packed weights (opaq/_stacked.py), and run
through its experts interface under the name "opaq", as one operator."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from opaq import functional
from opaq._stacked import IMPLEMENTATION

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}

# Gates of their own: what each is, and the attributes that have its limit and its alpha.
_GATES = {
    "GptOssExperts": ("swiglu_oai", "limit", "alpha"),
    "OpenAIPrivacyFilterExperts": ("swiglu_oai_packed", "limit", "alpha"),
    "MiniMaxM3VLExperts": ("swiglu_oai_packed", "swiglu_limit", "swiglu_alpha"),
    "DeepseekV4Experts": ("silu_clamp", "limit", ""),
    "HYV4Experts": ("silu_clamp", "swiglu_limit", ""),
    "Glm5NextTextExperts": ("silu_clamp", "swiglu_limit", ""),
    "Step3p7Experts": ("silu_step", "limit", ""),
}


def why_not(module: Any) -> str:
    """Why an experts module cannot run packed; "" if it can."""
    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        return f"{kind} normalizes what each expert returns"
    if module.has_gate and type(module)._apply_gate is not _default_apply_gate:
        return "" if kind in _GATES else f"{kind} has a gate of its own"
    act = type(module.act_fn).__name__
    return "" if act in _ACTIVATIONS else f"{kind} has the activation {act}"


def _activation(module: Any) -> dict[str, Any]:
    """What a module does between the two products, in the operator's words."""
    kind = type(module).__name__
    if module.has_gate and kind in _GATES:
        name, limit, alpha = _GATES[kind]
        found = {"limit": getattr(module, limit)} | ({"alpha": getattr(module, alpha)} if alpha else {})
        return {"activation": name, **found}
    name = _ACTIVATIONS[type(module.act_fn).__name__]
    return {"activation": name if module.has_gate else f"{name}_no_mul"}


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What an experts module with packed weights does."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    made: torch.Tensor = functional.moe(
        hidden_states,
        top_k_weights,
        top_k_index,
        getattr(module, first),
        module.down_proj,
        getattr(module, f"{first}_bias") if module.has_bias else None,
        module.down_proj_bias if module.has_bias else None,
        input_quantizer=module.input_quantizer,
        hidden_quantizer=module.hidden_quantizer,
        input_scale=getattr(module, "input_scale", None),
        hidden_scale=getattr(module, "hidden_scale", None),
        **_activation(module),
    )
    return made


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
