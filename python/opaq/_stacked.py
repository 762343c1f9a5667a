"""Modules that keep their class when their weights are packed: opaq's own (opaq.moe), and transformers'
experts, whose parameters of three dimensions become QuantizedTensors (experts, out features, in features) under
the same names.

Packed experts run through transformers' experts interface, as the implementation "opaq" of
opaq.integrations.transformers. It reads from the module: the packed parameters `gate_up_proj` (or
`up_proj`, without a gate) and `down_proj`, never transposed; the unchanged biases; `is_transposed`, False; and
the quantizers of the two products' inputs, `input_quantizer` and `hidden_quantizer`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opaq.packed import PackedModule, QuantizedLinear
from opaq.quantized_tensor import QuantizedTensor

_SEAM = (
    "config",
    "has_gate",
    "has_bias",
    "is_transposed",
)  # attributes that transformers' decorator adds to a module
_RECORD = "_opaq_before"  # attribute with the plain module's state, for dequantize_
IMPLEMENTATION = "opaq"


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights of such a module; () for any other."""
    if isinstance(module, PackedModule):
        return () if isinstance(module, QuantizedLinear) else module.weight_names
    names = ("gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj", "down_proj")
    found = [module._parameters.get(name) for name in names]
    return names if all(weight is not None and weight.dim() == 3 for weight in found) else ()


def is_packed(module: nn.Module) -> bool:
    names = weight_names(module)
    return bool(names) and all(isinstance(module._parameters[name], QuantizedTensor) for name in names)


def was_transposed(module: nn.Module) -> bool:
    """Whether a packed module's weights were (in features, out features) when they were plain."""
    return is_packed(module) and bool(getattr(module, _RECORD)[0])


def why_not(module: nn.Module, activations: str = "") -> str:
    """Why a module's weights cannot be packed; "" if they can."""
    if isinstance(module, PackedModule):
        return "a recipe quantizes its inputs" if activations and not _has_inputs(module) else ""
    if not all(hasattr(module, name) for name in _SEAM):
        return f"{type(module).__name__} does not go through transformers' experts interface"
    try:
        reason = importlib.import_module("opaq.integrations.transformers").why_not(module)
    except ImportError as error:
        reason = str(error)
    return str(reason)


def _has_inputs(module: nn.Module) -> bool:
    return hasattr(module, "hidden_quantizer")


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))


def rowwise_shape(module: nn.Module, weight: torch.Tensor) -> tuple[int, ...]:
    """Experts, out features, in features."""
    *leading, first, second = weight.shape
    return (*leading, second, first) if _is_transposed(module) else (*leading, first, second)


def rowwise(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().mT if _is_transposed(module) else weight.detach()


def _put(module: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Sets parameters and attributes; None deletes an attribute."""
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    for name, value in attributes.items():
        if value is None:
            vars(module).pop(name, None)
        else:
            setattr(module, name, value)


def _exchange(module: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Callable[[], None]:
    """Sets parameters and attributes; returns a function that restores the previous ones."""
    old = {name: module._parameters[name] for name in parameters}
    around = {name: vars(module).get(name) for name in attributes}
    _put(module, parameters, attributes)
    return lambda: _put(module, old, around)


def put(
    module: Any, packed: dict[str, QuantizedTensor], activations: str, precision: str, order: str
) -> Callable[[], None]:
    """Replaces plain weights by packed ones; returns a function that undoes it."""
    for weight in packed.values():
        if weight.dim() == 3 and weight.shape[0] > 1:
            weight[:1]  # raises if experts share a scale
    made = {name: nn.Parameter(weight, requires_grad=False) for name, weight in packed.items()}
    inputs = {"input_quantizer": activations, "hidden_quantizer": activations}
    how = {"precision": precision, "order": order}
    if isinstance(module, PackedModule):
        return _exchange(module, made, {**how, **inputs} if activations else how)
    config = copy.copy(module.config)  # a copy: experts that stay plain keep their implementation
    config._experts_implementation_internal = IMPLEMENTATION
    record = {_RECORD: (module.is_transposed, module.config)}
    return _exchange(module, made, {**record, **how, **inputs, "config": config, "is_transposed": False})


def take_back(module: Any) -> Callable[[], None]:
    """Replaces packed weights by plain ones; returns a function that undoes it."""
    is_transposed, config = getattr(module, _RECORD, (False, None))
    made = {}
    for name in weight_names(module):
        plain = getattr(module, name).dequantize()
        made[name] = nn.Parameter(plain.mT.contiguous() if is_transposed else plain)
    if isinstance(module, PackedModule):
        inputs = dict.fromkeys(("input_quantizer", "hidden_quantizer"), "")
        return _exchange(module, made, inputs if _has_inputs(module) else {})
    gone = dict.fromkeys((_RECORD, "precision", "order", "input_quantizer", "hidden_quantizer"))
    return _exchange(module, made, {**gone, "config": config, "is_transposed": is_transposed})
