"""Errors for unsupported uses of the operators. Gradients, except those of runners, and torch.func transforms
raise; PyTorch's defaults would silently ignore them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
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
# By the name of an operator of runners: attaches its gradient to the result, from all of the operator's tensors
# and the runner's integer (opaq/_runner_gradients.py).
formulas: dict[str, Callable[[str, torch.Tensor, list[torch.Tensor], Any], torch.Tensor]] = {}
_tracing = torch._C.DispatchKey.PythonDispatcher
_snapshot = torch._C.DispatchKey.PythonTLSSnapshot
_below_snapshot = torch._C._dispatch_keyset_full_after(_snapshot)
_GUARD_BYTES = 16  # size of PyTorch's guard, which is one bool


class _Refuse(torch.autograd.Function):
    """Returns the result; its backward raises."""

    @staticmethod
    def forward(ctx: Any, message: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.message = message
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.message)


def _with_gradient(results: Any, attach: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Calls `attach` for results that have no gradient yet and may have one."""

    def one(result: torch.Tensor) -> torch.Tensor:
        return result if result.requires_grad or not result.is_floating_point() else attach(result)

    return tree_map_only(torch.Tensor, one, results)


def _refuse_as(message: str, results: Any, inputs: list[torch.Tensor]) -> Any:
    return _with_gradient(results, lambda result: _Refuse.apply(message, result, *inputs))


def _attach(results: Any, inputs: list[torch.Tensor], operator: str, runner_id: Any) -> Any:
    """The results with the operator's gradient, or one that raises."""
    if operator in formulas:
        return _with_gradient(results, lambda result: formulas[operator](operator, result, inputs, runner_id))
    functions = next(text for name, text in _WITH_GRADIENTS.items() if operator.startswith(name))
    message = (
        f"opaq: {operator} has no gradient. {functions} have one; call the operator under torch.no_grad(), or "
        "detach its result, if none is wanted."
    )
    return _refuse_as(message, results, inputs)


def _attach_below(results: Any, inputs: list[torch.Tensor], operator: str, runner_id: Any) -> Any:
    """Called from a kernel, in one of three cases: on the meta device, where no autograd key is excluded;
    inside a __torch_dispatch__, where PyTorch excludes the keys above its own, such as _snapshot; or below
    autograd, where there is nothing to do."""
    is_dispatched = torch._C._dispatch_tls_is_dispatch_key_excluded(_snapshot)
    is_here = is_dispatched or not _is_below_autograd()
    return _attach(results, inputs, operator, runner_id) if is_here else results


def _is_below_autograd() -> bool:
    is_below: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return is_below


def _requiring_gradients(*arguments: Any) -> list[torch.Tensor]:
    given = tree_leaves(arguments) if torch.is_grad_enabled() else []
    return [leaf for leaf in given if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _inputs_of(operator: str, values: list[Any]) -> tuple[list[torch.Tensor], Any]:
    """For `_attach`: a call's tensors and the runner's integer; no tensors if none requires a gradient."""
    inputs = _requiring_gradients(values)
    if not inputs or operator not in formulas:
        return inputs, 0
    return [value for value in values if isinstance(value, torch.Tensor)], values[-2]


def _values_of(overload: Any, arguments: Any, named: Any) -> list[Any]:
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, arguments, strict=False), **named)
    return [given.get(name) for name in names]


def fake_result(results: Any, values: list[Any], operator: str) -> Any:
    """The results of a fake implementation, with their gradients."""
    inputs, runner_id = _inputs_of(operator, values)
    return _attach_below(results, inputs, operator, runner_id) if inputs else results


def _traced(overload: Any) -> Callable[..., Any]:
    """The operator under tracing, which does not reach the C kernels."""

    def call(*arguments: Any, **named: Any) -> Any:
        if torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0:  # torch.export, above autograd
            return overload._get_dispatch(torch._C.DispatchKey.PreDispatch)(*arguments, **named)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_tracing)):
            results = overload(*arguments, **named)
        inputs, runner_id = _inputs_of(overload._opname, _values_of(overload, arguments, named))
        return _attach(results, inputs, overload._opname, runner_id) if inputs else results

    return call


def _dispatched(overload: Any, bridge: ctypes.CDLL) -> Callable[..., Any]:
    """The operator on wrapper subclasses and under modes: PyTorch's own work at this key, then the check for
    gradients. A __torch_dispatch__ that unwraps its tensors would lose the gradient without an error."""

    def call(keys: Any, *arguments: Any, **named: Any) -> Any:
        guard = ctypes.create_string_buffer(_GUARD_BYTES)
        bridge.opaq_torch_snapshot_begin(guard)
        try:
            results = overload.redispatch(keys & _below_snapshot, *arguments, **named)
        finally:
            bridge.opaq_torch_snapshot_end(guard)
        if _is_below_autograd():
            return results
        inputs, runner_id = _inputs_of(overload._opname, _values_of(overload, arguments, named))
        return _attach(results, inputs, overload._opname, runner_id) if inputs else results

    return call


def _transforms_error(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} does not support the transforms of torch.func (vmap, grad, vjp, jvp, jacrev and the others). "
        "Use torch.autograd.grad for gradients; instead of vmap, pass all rows in one call or loop over them."
    )


def _transformed(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise _transforms_error(f"opaq: {name}")

    return call


def refuse_transforms(caller: str) -> None:
    """Raises inside a transform of torch.func. For functions around an autograd.Function: PyTorch's own message
    addresses the author of that class."""
    if torch._C._are_functorch_transforms_active():
        raise _transforms_error(caller)


def _leaves(ctx: Any) -> list[torch.Tensor]:
    """The inputs of an autograd.Function that are leaves and require gradients."""
    return [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]


def differentiable_once(*factors: int) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function: its results raise when they are differentiated again. The
    errors name `ctx.caller`, the function or module that the user called.

    PyTorch's once_differentiable raises only if the incoming gradient requires a gradient; this decorator also
    raises if an input requires one on which the result depends. For a product, `factors` are the indices of its
    factors among the inputs: the gradient of a factor depends on the other factors, the gradients of other
    inputs on no input. Without `factors`, every result depends on all inputs."""

    def depends(needed: tuple[bool, ...], place: int) -> bool:
        if not factors:
            return True
        return place in factors and any(needed[factor] for factor in factors if factor != place)

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def call(ctx: Any, *gradients: Any) -> Any:
            # Dynamo runs the backward without gradients, and AOTAutograd refuses a second backward
            if torch.compiler.is_compiling():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return results
            incoming = _requiring_gradients(gradients)
            inputs = [*incoming, *_requiring_gradients(ctx.saved_tensors), *_leaves(ctx)]
            inputs = inputs or [torch.empty(0, requires_grad=True)]
            message = (
                f"{ctx.caller} does not support double backward: its gradients cannot be differentiated again. "
                "Leave out create_graph=True, detach the gradients, or use torch.nn.functional if you need "
                "second derivatives."
            )
            return tuple(
                _refuse_as(message, result, inputs) if incoming or depends(ctx.needs_input_grad, i) else result
                for i, result in enumerate(results)
            )

        return call

    return decorate


def register(overload: Any, library: torch.library.Library, bridge: ctypes.CDLL) -> None:
    """Registers the errors of an operator. Eager calls run no Python here: the key Autograd falls through, and
    the C kernels call opaq::attach_gradient if an input requires a gradient."""
    name = overload._opname
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, _traced(overload), "PythonDispatcher")
    if bridge.opaq_torch_has_snapshot():
        library.impl(name, _dispatched(overload, bridge), "PythonTLSSnapshot", with_keyset=True)
    library.impl(name, _transformed(name), "FuncTorchDynamicLayerFrontMode")


_library = torch.library.Library("opaq", "FRAGMENT")
_library.define("attach_gradient(Tensor[] results, Tensor[] inputs, str operator, int runner_id) -> Tensor[]")
_library.impl("attach_gradient", _attach, "Autograd")
_library.impl("attach_gradient", _attach_below, "CompositeExplicitAutograd")
