"""Experts in transformers: the modules keep their class, get packed weights (opaq/_stacked.py), and run as one
operator through the experts interface, under the name "opaq"."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from opaq import functional
from opaq._adapters import Adapters, adapted_product
from opaq._stacked import IMPLEMENTATION
from opaq.packed import PackedModule

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}

# Models with custom gates: the activation, and the attributes with its limit and alpha.
_GATES = {
    "GptOssExperts": ("swiglu_oai", "limit", "alpha"),
    "OpenAIPrivacyFilterExperts": ("swiglu_oai_packed", "limit", "alpha"),
    "MiniMaxM3VLExperts": ("swiglu_oai_packed", "swiglu_limit", "swiglu_alpha"),
    "DeepseekV4Experts": ("silu_clamp", "limit", ""),
    "HYV4Experts": ("silu_clamp", "swiglu_limit", ""),
    "Glm5NextTextExperts": ("silu_clamp", "swiglu_limit", ""),
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
    """The activation between the two products, as the operator names it."""
    if reason := why_not(module):
        raise NotImplementedError(f"opaq: {reason}, which is not supported")
    kind = type(module).__name__
    if module.has_gate and kind in _GATES:
        name, limit, alpha = _GATES[kind]
        found = {"limit": getattr(module, limit)} | ({"alpha": getattr(module, alpha)} if alpha else {})
        return {"activation": name, **found}
    name = _ACTIVATIONS[type(module.act_fn).__name__]
    return {"activation": name if module.has_gate else f"{name}_no_mul"}


class InputScales(PackedModule):
    """A checkpoint's scales of the experts' inputs, one number for each expert, or None."""

    input_scale: torch.Tensor | None
    hidden_scale: torch.Tensor | None
    scale_names = ("input_scale", "hidden_scale")

    def __init__(self) -> None:
        super().__init__()
        for name in self.scale_names:
            self.register_buffer(name, None)


def _weight(module: Any, name: str) -> torch.Tensor:
    """(experts, out features, in features). A packed weight is never transposed, a plain one may be."""
    found: torch.Tensor = getattr(module, name)
    return found.mT.contiguous() if module.is_transposed else found


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: Adapters | None = None,
) -> torch.Tensor:
    """The forward of an experts module, with packed or plain weights."""
    if adapters:
        return _adapted(module, hidden_states, top_k_index, top_k_weights, adapters)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    scales = getattr(module, "input_scales", None)
    made: torch.Tensor = functional.moe(
        hidden_states,
        top_k_weights,
        top_k_index,
        _weight(module, first),
        _weight(module, "down_proj"),
        getattr(module, f"{first}_bias") if module.has_bias else None,
        module.down_proj_bias if module.has_bias else None,
        input_quantizer=getattr(module, "input_quantizer", ""),
        hidden_quantizer=getattr(module, "hidden_quantizer", ""),
        input_scale=None if scales is None else scales.input_scale,
        hidden_scale=None if scales is None else scales.hidden_scale,
        precision=getattr(module, "precision", "exact"),
        order=getattr(module, "order", "fixed"),
        **_activation(module),
    )
    return made


# ---- with adapters ----


def _adapted_product(
    module: Any, name: str, x: torch.Tensor, splits: torch.Tensor, by: str, adapters: Adapters
) -> torch.Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return adapted_product(x, splits, getattr(module, name), bias, adapters.get(name, ()), input_quantizer=by)


def _adapted(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: Adapters,
) -> torch.Tensor:
    """The forward with adapters beside the packed weights: rows are sorted by expert, and each product is a
    separate operator, because adapters are added before the activation."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    experts, choices = len(getattr(module, first)), top_k_index.shape[-1]
    ids, weights = top_k_index.reshape(-1), top_k_weights.reshape(-1, 1)
    is_here = (ids >= 0) & (ids < experts)  # others mean no expert; their rows go through the last one
    ids, weights = ids.where(is_here, experts - 1), weights.where(is_here[:, None], 0)
    order = ids.argsort(stable=True)
    splits = (ids[:, None] == torch.arange(experts, device=ids.device)).sum(0)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])[order // choices]
    inputs = getattr(module, "input_quantizer", ""), getattr(module, "hidden_quantizer", "")
    h = _adapted_product(module, first, x, splits, inputs[0], adapters)
    a = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _adapted_product(module, "down_proj", a, splits, inputs[1], adapters)[order.argsort()]
    return (y * weights).view(*hidden_states.shape[:-1], choices, -1).sum(-2).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
