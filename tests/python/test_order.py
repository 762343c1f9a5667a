"""order="any": products may add up sums in any order. Every entry point passes it on to the plan, where another
value is refused, and on the CPU it changes no byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import opaq
from conftest import need

torch = need("torch")
nn = torch.nn
from opaq import functional  # noqa: E402
from opaq._plan import plan_get, plan_set  # noqa: E402


def tensor(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def packed(*shape: int) -> Any:
    return opaq.quantize_tensor(tensor(*shape), "nvfp4")


def run(runner: Any, *inputs: Any) -> Any:
    with runner:
        return runner(*inputs)


def module_of(order: str) -> Any:
    made = opaq.QuantizedLinear.from_linear(nn.Linear(64, 32), "nvfp4")
    made.order = order
    return made


def trained(order: str) -> Any:
    """The gradients of a layer under a recipe."""
    torch.manual_seed(0)
    layer, x = opaq.Linear(64, 32, order=order), tensor(5, 64).requires_grad_()
    with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
        layer(x).sum().backward()
    return torch.cat([x.grad, layer.weight.grad])


def inferred(order: str) -> Any:
    torch.manual_seed(0)
    layer = opaq.Linear(64, 32, order=order)
    with torch.no_grad(), opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
        layer(tensor(5, 64))
        return layer(tensor(5, 64))  # the fast path


def experts_module(order: str) -> Any:
    torch.manual_seed(0)
    made = opaq.MLP(64, 32, quantizer="nvfp4")
    made.order = order
    return made(tensor(5, 64))


X, WEIGHTS, IDS = tensor(5, 64), torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 5)
CALLS: dict[str, Callable[[str], Any]] = {
    "quantized_linear": lambda order: functional.quantized_linear(X, packed(32, 64), order=order),
    "linear": lambda order: functional.linear(X, tensor(32, 64), order=order),
    "mlp": lambda order: functional.mlp(X, packed(64, 64), packed(64, 32), order=order),
    "moe": lambda order: functional.moe(X, WEIGHTS, IDS, packed(2, 64, 64), packed(2, 64, 32), order=order),
    "create_linear": lambda order: run(opaq.runner.create_linear(packed(32, 64), order=order), X),
    "create_mlp": lambda order: run(opaq.runner.create_mlp(packed(64, 64), packed(64, 32), order=order), X),
    "create_moe": lambda order: run(
        opaq.runner.create_moe(packed(2, 64, 64), packed(2, 64, 32), order=order), X, WEIGHTS, IDS
    ),
    "QuantizedLinear": lambda order: module_of(order)(X),
    "MLP": experts_module,
    "Linear": trained,
    "Linear without gradients": inferred,
}


@pytest.mark.parametrize("name", CALLS)
def test_any_order_changes_no_byte_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    want = CALLS[name]("fixed")
    torch.manual_seed(0)
    assert torch.equal(CALLS[name]("any"), want)


@pytest.mark.parametrize("name", CALLS)
def test_other_orders_are_refused(name: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match="order=random.*expected fixed or any"):
        CALLS[name]("random")


def test_words_of_plans() -> None:
    assert plan_set("x=mxfp8 order=any", grad="x") == "x=mxfp8 grad=x order=any"
    assert plan_set("x=mxfp8 order=any", order="fixed") == "x=mxfp8"
    assert plan_get("x=mxfp8 order=any", "order") == "any"


def test_models() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    opaq.quantize_(net, "nvfp4", order="any", progress=False)
    assert [layer.order for layer in net] == ["any", "any"] and "order='any'" in repr(net[0])
    with pytest.raises(ValueError, match="order is 'random', expected one of fixed, any"):
        opaq.quantize_(net, "nvfp4", order="random")


def test_configurations() -> None:
    need("transformers")
    assert "order" not in opaq.Config("nvfp4").to_dict()
    saved = opaq.Config("nvfp4", order="any").to_dict()
    assert saved["order"] == "any" and opaq.Config.from_dict(saved).order == "any"
    with pytest.raises(ValueError, match=r"opaq\.Config: order is 'random', expected one of fixed, any"):
        opaq.Config("nvfp4", order="random")


# ---------------------------------------------------------------------------------------------------- on a GPU

RECIPES = {
    "bf16": None,
    "fp8": opaq.recipe.Float8CurrentScaling(),
    "blocks": opaq.recipe.Float8BlockScaling(),
}


def step(layer: Any, x: Any, recipe: Any) -> list[Any]:
    """The result and the gradients of a layer, whose sums cuBLASLt may have added up."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with opaq.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.float().pow(2).sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_near_the_fixed_order(name: str, device: str) -> None:
    torch.manual_seed(0)
    fixed = opaq.Linear(512, 256, dtype=torch.bfloat16, device=device)
    layer = opaq.Linear(512, 256, dtype=torch.bfloat16, device=device, order="any")
    layer.load_state_dict(fixed.state_dict())
    x = torch.randn(4, 64, 512, device=device).bfloat16()
    want = step(fixed, x, RECIPES[name])
    for a, b in zip(step(layer, x, RECIPES[name]), want, strict=True):
        assert torch.equal(a, b) if device == "cpu" else (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_inference_in_a_graph(name: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU")
    layer = opaq.Linear(512, 256, dtype=torch.bfloat16, device=device, order="any")
    x = torch.randn(192, 512, device=device).bfloat16()
    recipe, graph = RECIPES[name], torch.cuda.CUDAGraph()
    with torch.no_grad(), opaq.autocast(enabled=recipe is not None, recipe=recipe):
        want = layer(x)
        with torch.cuda.graph(graph):
            made = layer(x)
        made.zero_()
        graph.replay()
        assert torch.equal(made, want)
