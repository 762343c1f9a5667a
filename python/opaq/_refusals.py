"""What the operators do not support in PyTorch: gradients and torch.func raise, each with a sentence, where
PyTorch's defaults would leave them out of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_WITH_GRADIENTS = {  # by the beginning of an operator's name
    "linear": "opaq.functional.linear, opaq.functional.quantized_linear, opaq.Linear and opaq.QuantizedLinear",
    "grouped_linear": "opaq.functional.grouped_linear and opaq.GroupedLinear",
    "mlp": "opaq.functional.mlp and opaq.MLP",
    "moe": "opaq.functional.moe and opaq.MoE",
    "": "opaq.quantize_tensor, QuantizedTensor.dequantize and the functions of opaq.functional",
}
_tracing = torch._C.DispatchKey.PythonDispatcher


class _Refuse(torch.autograd.Function):
    """Passes a result on; its gradient is an error."""

    @staticmethod
    def forward(ctx: Any, operator: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.operator = operator
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        functions = next(text for name, text in _WITH_GRADIENTS.items() if ctx.operator.startswith(name))
        raise RuntimeError(
            f"opaq: {ctx.operator} has no gradient. {functions} have one; call the operator under "
            "torch.no_grad(), or detach its result, if none is wanted."
        )


def _refuse(results: Any, inputs: list[torch.Tensor], operator: str) -> Any:
    def one(result: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Refuse.apply(operator, result, *inputs) if result.is_floating_point() else result
        return made

    return tree_map_only(torch.Tensor, one, results)


def _refuse_below(results: Any, inputs: list[torch.Tensor], operator: str) -> Any:
    """Without autograd's keys: inside a __torch_dispatch__, which PyTorch calls without the keys above its own,
    as this one is; or below autograd, where there are no gradients."""
    is_dispatched = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PythonTLSSnapshot)
    return _refuse(results, inputs, operator) if is_dispatched else results


def _requiring_gradients(*arguments: Any) -> list[torch.Tensor]:
    given = tree_leaves(arguments) if torch.is_grad_enabled() else []
    return [leaf for leaf in given if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def fake_result(results: Any, inputs: Any, operator: str) -> Any:
    """What a fake returns, with the gradients of the operator itself."""
    found = _requiring_gradients(inputs)
    return _refuse_below(results, found, operator) if found else results


def _traced(overload: Any) -> Callable[..., Any]:
    """The operator while a compiler traces it, which does not reach the kernels in C."""

    def call(*arguments: Any, **named: Any) -> Any:
        if torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0:  # torch.export, above autograd
            return overload._get_dispatch(torch._C.DispatchKey.PreDispatch)(*arguments, **named)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_tracing)):
            results = overload(*arguments, **named)
        inputs = _requiring_gradients(arguments, named)
        return _refuse(results, inputs, overload._opname) if inputs else results

    return call


def _transformed(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"opaq: {name} does not support the transforms of torch.func (vmap, grad, jvp, jacrev and the "
            "others); torch.autograd and a loop over the batch do"
        )

    return call


def register(overload: Any, library: torch.library.Library) -> None:
    """Gives an operator its refusals. Eager calls meet no Python here: the key Autograd falls through, and the
    kernels in C call opaq::refuse_gradient where an input requires a gradient."""
    name = overload._opname
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, _traced(overload), "PythonDispatcher")
    library.impl(name, _transformed(name), "FuncTorchDynamicLayerFrontMode")


_library = torch.library.Library("opaq", "FRAGMENT")
_library.define("refuse_gradient(Tensor[] results, Tensor[] inputs, str operator) -> Tensor[]")
_library.impl("refuse_gradient", _refuse, "Autograd")
_library.impl("refuse_gradient", _refuse_below, "CompositeExplicitAutograd")
