"""Exceptions: an error has the same type whether Python or the library detects it, and its message names the
function. See docs/pytorch.md, "Errors"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import opaq
from conftest import need
from linear_reference import values

torch = need("torch")

from opaq import functional  # noqa: E402

F64 = torch.float64


def tensor(*shape: int, dtype: Any = torch.float32) -> Any:
    return values(shape, 1, "cpu", dtype)


def linear(**changed: Any) -> Any:
    return functional.linear(**{"x": tensor(4, 32), "weight": tensor(16, 32), **changed})


def linear_module(x: Any, **options: Any) -> Any:
    return opaq.Linear(32, 16, **options)(x)


def mlp(**changed: Any) -> Any:
    return functional.mlp(
        **{
            "x": tensor(4, 32),
            "gate_up": tensor(32, 32),
            "down": tensor(32, 16),
            "input_quantizer": "",
            **changed,
        }
    )


def moe(**changed: Any) -> Any:
    right = {
        "hidden_states": tensor(4, 32),
        "topk_weights": torch.full((4, 1), 1.0),
        "topk_ids": torch.zeros(4, 1, dtype=torch.int64),
        "gate_up": tensor(2, 32, 32),
        "down": tensor(2, 32, 16),
    }
    return functional.moe(**{**right, **changed})


def moe_module(**changed: Any) -> Any:
    right = (tensor(4, 32), torch.full((4, 1), 1.0), torch.zeros(4, 1, dtype=torch.int64))
    names = ("hidden_states", "topk_weights", "topk_ids")
    return opaq.MoE(32, 16, 2)(**{**dict(zip(names, right, strict=True)), **changed})


def quantize(x: Any, quantizer: Any = "mxfp8", **more: Any) -> Any:
    return opaq.quantize_tensor(x, quantizer, **more)


LINEAR, MLP, MOE = "opaq.functional.linear: ", "opaq.functional.mlp: ", "opaq.functional.moe: "
CURRENT = opaq.recipe.Float8CurrentScaling()
half = opaq.quantize_tensor(tensor(32, 32), "mxfp8")
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # values: shapes, dtypes, devices, texts
    "linear, shape": (lambda: linear(x=tensor(4, 31)), ValueError, LINEAR),
    "linear, dtype": (lambda: linear(x=tensor(4, 32, dtype=F64)), ValueError, LINEAR),
    "linear, bias dtype": (lambda: linear(bias=tensor(16).half()), ValueError, LINEAR),
    "linear, device": (lambda: linear(x=tensor(4, 32).to("meta")), ValueError, LINEAR),
    "linear, option": (lambda: linear(fp8_output=True), ValueError, LINEAR),
    "Linear, shape": (lambda: linear_module(tensor(4, 31)), ValueError, "opaq.Linear: "),
    "Linear, dtype": (lambda: linear_module(tensor(4, 32), dtype=torch.float16), ValueError, "opaq.Linear: "),
    "mlp, shape": (lambda: mlp(x=tensor(4, 31)), ValueError, MLP),
    "mlp, dtype": (lambda: mlp(x=tensor(4, 32, dtype=F64)), ValueError, MLP),
    "mlp, activation": (lambda: mlp(activation="none such"), ValueError, MLP),
    "mlp, quantizer": (lambda: mlp(input_quantizer="nvfp5"), ValueError, MLP),
    "mlp, number": (lambda: mlp(limit=-1.0), ValueError, MLP),
    "moe, shape": (lambda: moe(down=tensor(2, 32, 15)), ValueError, MOE),
    "moe, dtype": (lambda: moe(topk_ids=torch.zeros(4, 1)), ValueError, MOE),
    "moe, id": (lambda: moe(topk_ids=torch.full((4, 1), 7)), ValueError, MOE),
    "moe, gradient": (
        lambda: moe(gate_up=tensor(2, 32, 32).requires_grad_(), activation="no"), ValueError, MOE,
    ),
    "MoE, shape": (lambda: moe_module(hidden_states=tensor(4, 31)), ValueError, "opaq.MoE: "),
    "MLP, shape": (lambda: opaq.MLP(32, 16)(tensor(4, 31)), ValueError, "opaq.MLP: "),
    "GroupedLinear, splits": (
        lambda: opaq.GroupedLinear(2, 32, 16)(tensor(4, 32), [1, 1]), ValueError, "opaq.GroupedLinear: ",
    ),
    "QuantizedLinear, shape": (
        lambda: opaq.QuantizedLinear(32, 16, quantizer="mxfp8")(tensor(4, 31)), ValueError,
        "opaq.QuantizedLinear: ",
    ),
    "quantize, dtype": (lambda: quantize(tensor(4, 32, dtype=F64)), ValueError, "opaq.quantize_tensor: "),
    "quantize, scale": (lambda: quantize(tensor(4, 32), "fp8+delayed"), ValueError, "opaq.quantize_tensor: "),
    "quantize, text": (lambda: quantize(tensor(4, 32), "nvfp5"), ValueError, "spec "),
    "array, dtype": (lambda: opaq.proto((4, 32), "float64", opaq.Quantizer("mxfp8")), ValueError, "opaq: "),
    # wrong types
    "linear, type": (lambda: linear(x=[[1.0] * 32]), TypeError, LINEAR),
    "linear, type of a bias": (lambda: linear(bias=1.0), TypeError, LINEAR),
    "mlp, type": (lambda: mlp(down=None, x="x"), TypeError, MLP),
    "moe, type": (lambda: moe(topk_ids=[0, 0, 0, 0]), TypeError, MOE),
    "quantize, type": (lambda: quantize([1.0]), TypeError, "opaq.quantize_tensor: "),
    "quantize, type of a quantizer": (lambda: quantize(tensor(4, 32), 7), TypeError, "opaq.quantize_tensor: "),
    "quantized_linear, type": (
        lambda: functional.quantized_linear(tensor(4, 32), tensor(16, 32)), TypeError,
        "opaq.functional.quantized_linear: ",
    ),
    "mlp, type of an activation": (lambda: mlp(activation=7), TypeError, MLP),
    # valid, and not supported; by Python, and by the library
    "moe, one quantized": (
        lambda: mlp(gate_up=half, recipe=CURRENT), NotImplementedError, MLP,
    ),
    "moe, stacks": (
        lambda: moe(gate_up=opaq.quantize_tensor(tensor(2, 32, 32), "mxfp8"), recipe=CURRENT),
        NotImplementedError, MOE,
    ),
    "mlp, delayed gradients": (
        lambda: mlp(x=tensor(4, 32).requires_grad_(), input_quantizer="fp8+delayed"), NotImplementedError, MLP,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_type_and_name(what: str) -> None:
    function, kind, name = CASES[what]
    with pytest.raises(kind) as caught:
        function()
    others = {ValueError, TypeError, NotImplementedError} - {kind}
    if kind is NotImplementedError:
        others -= {ValueError}  # OpaqError is a ValueError too
    assert not isinstance(caught.value, tuple(others))
    assert str(caught.value).startswith(name), str(caught.value)


def test_operators_and_graphs_raise_what_pytorch_gives() -> None:
    with pytest.raises(RuntimeError, match="^opaq: quantize: "):
        torch.ops.opaq.quantize(tensor(4, 32, dtype=F64), "mxfp8")
    torch.compiler.reset()
    function = torch.compile(lambda x: quantize(x).dequantize(), backend="aot_eager")
    with pytest.raises(Exception, match="float64|f64|dtype"):
        function(tensor(4, 32, dtype=F64))


def test_errors_in_gradients_have_the_same_types() -> None:
    layer = opaq.Linear(32, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 31)
    with pytest.raises(ValueError, match="^opaq.Linear: main_grad"):
        layer(tensor(4, 32)).sum().backward()


def moe_of(module: Any) -> Callable[[Any], Any]:
    return lambda x: module(x, torch.full((4, 1), 1.0), torch.zeros(4, 1, dtype=torch.int64))


def called() -> dict[str, Callable[[Any], Any]]:
    """Calls with one input of rows, by what the user called."""
    weight, up, down = tensor(16, 32), tensor(32, 32), tensor(32, 16)
    splits, stack = torch.tensor([3, 1]), tensor(2, 16, 32)
    grouped = opaq.GroupedLinear(2, 32, 16)
    return {
        "opaq.functional.linear": lambda x: functional.linear(x, weight),
        "opaq.functional.quantized_linear": lambda x: functional.quantized_linear(x, half),
        "opaq.functional.mlp": lambda x: functional.mlp(x, up, down),
        "opaq.functional.moe": moe_of(lambda x, *routing: functional.moe(x, *routing, up[None], down[None])),
        "opaq.functional.grouped_linear": lambda x: functional.grouped_linear(x, splits, stack),
        "opaq.Linear": opaq.Linear(32, 16),
        "opaq.QuantizedLinear": opaq.QuantizedLinear.from_linear(torch.nn.Linear(32, 16), "mxfp8", ""),
        "opaq.MLP": opaq.MLP(32, 16),
        "opaq.MoE": moe_of(opaq.MoE(32, 16, 1)),
        "opaq.GroupedLinear": lambda x: grouped(x, splits),
    }


def test_unsupported_uses_name_what_the_user_called() -> None:
    for name, function in called().items():
        x = tensor(4, 32)
        for transform in (torch.func.grad, lambda f: torch.vmap(f, in_dims=1)):
            given = x if transform is torch.func.grad else x[:, None].expand(4, 2, 32)
            with pytest.raises(NotImplementedError, match=f"^{name} does not support the transforms"):
                transform(lambda x, f=function: f(x).sum())(given)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"^{name} does not support double backward"):
            gradient.sum().backward()


@pytest.mark.parametrize("name", ["opaq.functional.linear", "opaq.Linear"])
def test_no_memory_is_what_pytorch_raises(name: str) -> None:
    """A result of 2^44 values, which no machine has room for; the next call works."""
    x, weight = tensor(1, 1).expand(2**22, 1), tensor(1, 1).expand(2**22, 1)
    layer = opaq.Linear(1, 2**22, bias=False)
    with pytest.raises(torch.OutOfMemoryError, match=rf"^{name}: .*allocate a tensor of {2**44} elements$"):
        functional.linear(x, weight) if name == "opaq.functional.linear" else layer(x)
    assert functional.linear(x[:2], weight[:3]).shape == (2, 3)
