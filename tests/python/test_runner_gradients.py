"""Gradients through runners: bit for bit those of the packed module with the same weights, and within its bound
of autograd in float64; eager, and compiled to one operator forward and one backward. Errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import opaq
from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need
from test_packed_gradients import ALLOWED, DTYPES, MAKERS, QUANTIZERS, Layer, linear, mlp, moe, near
from torch_cases import same_bytes

torch = need("torch")
ops = torch.ops.opaq
KINDS = ["linear", "mlp", "moe"]
NAMES = [("opaq", "linear"), ("opaq", "mlp"), ("opaq", "moe"), ("nvfp4", "linear"), ("nvfp4", "moe")]


def runner_of(layer: Layer) -> Any:
    """A runner of a packed module's weights."""
    module = layer.module
    names = ("order", "input_quantizer", "input_scale", "hidden_quantizer", "hidden_scale", "weights_on_input")
    words = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if isinstance(module, opaq.QuantizedLinear):
        return opaq.runner.create_linear(module.weight, module.bias, **words)
    weights = module.gate_up, module.down, module.gate_up_bias, module.down_bias
    create = opaq.runner.create_moe if isinstance(module, opaq.MoE) else opaq.runner.create_mlp
    return create(*weights, **words)


def calling(space: str, kind: str, one: Any) -> Callable[..., Any]:
    return lambda *inputs: getattr(getattr(torch.ops, space), f"{kind}_gemm")(*inputs, one.id, one.out_features)


def targets(graphs: list[Any]) -> list[str]:
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if "_gemm" in str(node.target)]


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(same_bytes(first[key], second[key]) for key in first)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("text", "tiles"), QUANTIZERS, ids=[f"{t}{'+tiled' * tiles}" for t, tiles in QUANTIZERS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_module(kind: str, text: str, tiles: bool, dtype: Any, device: str) -> None:
    layer = MAKERS[kind](text, tiles, dtype).on(device)
    y, want = layer.run()
    with runner_of(layer) as one:
        got_y, got = layer.run(one)
    assert same_bytes(got_y, y) and same(got, want)
    for key, expected in layer.expected().items():
        assert near(got[key], expected, ALLOWED[dtype]), key


@pytest.mark.parametrize("inputs", ["nvfp4", "mxfp8", "fp8"])
def test_quantized_inputs_are_passed_straight_through(inputs: str, device: str) -> None:
    layers = [
        linear("mxfp8", True, torch.bfloat16, inputs),
        mlp("mxfp8", True, torch.bfloat16, inputs),
        mlp("fp8", True, torch.float32, "fp8+delayed", torch.tensor([40.0])),
    ]
    for layer in layers:
        y, want = layer.on(device).run()
        with runner_of(layer) as one:
            got_y, got = layer.run(one)
        assert same_bytes(got_y, y) and same(got, want)


def test_router_weights_on_the_input(device: str) -> None:
    layer = moe("nvfp4", True, torch.float32, on_input=True).on(device)
    _, want = layer.run()
    with runner_of(layer) as one:
        assert same(layer.run(one)[1], want)


def test_plain_weights(device: str) -> None:
    """Those that a runner quantizes, and those that it keeps plain."""
    w, x = torch.randn(48, 128, device=device), torch.randn(5, 128, device=device).requires_grad_()
    packed = opaq.quantize_tensor(w, "mxfp4")
    for quantizer, reference in (("mxfp4", packed.dequantize()), ("", w)):
        with opaq.runner.create_linear(w, quantizer=quantizer) as one:
            (got,) = torch.autograd.grad(one(x).sum(), x)
        want = torch.ones(5, 48, dtype=torch.float64) @ reference.cpu().double()
        assert near(got, want, ALLOWED[torch.float32])


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_one_input_requires_a_gradient(wanted: tuple[bool, bool], device: str) -> None:
    layer = moe("nvfp4", False, torch.float32).on(device)
    _, want = layer.run()
    with runner_of(layer) as one:
        leaves = [
            value.clone().requires_grad_(yes) for value, yes in zip(layer.inputs.values(), wanted, strict=True)
        ]
        y = one(*leaves, *layer.more)
        y.backward(layer.dy(y))
    for leaf, yes, key in zip(leaves, wanted, want, strict=True):
        assert same_bytes(leaf.grad, want[key]) if yes else leaf.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(kind: str, device: str) -> None:
    """Inputs that the operator copies get the gradient themselves; dy from a sum is expanded."""
    layer = MAKERS[kind]("mxfp8", False, torch.float32).on(device)
    with runner_of(layer) as one:
        found = []
        for is_transposed in (False, True):
            leaves = [value.clone() for value in layer.inputs.values()]
            if is_transposed:
                leaves = [leaf.t().contiguous().t() for leaf in leaves]
                assert not any(leaf.is_contiguous() for leaf in leaves)
            one(*(leaf.requires_grad_() for leaf in leaves), *layer.more).sum().backward()
            found.append([leaf.grad.contiguous() for leaf in leaves])
    assert all(same_bytes(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("space", "kind"), NAMES)
def test_compiled_is_one_operator_each_way(space: str, kind: str, device: str) -> None:
    layer = MAKERS[kind]("nvfp4", True, torch.bfloat16).on(device)
    graphs: tuple[list[Any], list[Any]] = [], []

    def keep(which: int) -> Callable[..., Any]:
        return lambda graph, example: graphs[which].append(graph) or graph.forward

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=keep(0), bw_compiler=keep(1))
    with runner_of(layer) as one:
        eager = calling(space, kind, one)
        step = compiled(eager, backend=backend, dynamic=True)
        want_y, want = layer.run(eager)
        y, got = layer.run(step)
        assert same_bytes(y, want_y) and same(got, want)
        assert [targets(each) for each in graphs] == [
            [f"{space}.{kind}_gemm.default"],
            [f"opaq.{kind}_gemm_backward.default"],
        ]
        for rows in (5, 40):
            other = MAKERS[kind]("nvfp4", True, torch.bfloat16, rows=rows).on(device)
            with fail_on_recompile():
                y, got = Layer(layer.module, other.inputs, other.more, None).run(step)
            want_y, want = other.run(eager)
            assert same_bytes(y, want_y) and same(got, want)


def test_equal_layers_share_a_graph(device: str) -> None:
    """The integer is a symbol, also in the backward."""
    layers = [linear("nvfp4", True, torch.float32).on(device), linear("mxfp4", False, torch.float32).on(device)]
    with runner_of(layers[0]) as first, runner_of(layers[1]) as second:
        step = compiled(lambda x, runner_id: ops.linear_gemm(x, runner_id, 192), dynamic=True)
        _, got = layers[0].run(lambda x: step(x, first.id))
        with fail_on_recompile():
            _, other = layers[1].run(lambda x: step(x, second.id))
        assert same(got, layers[0].run(first)[1]) and same(other, layers[1].run(second)[1])
        assert not same(got, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = mlp("nvfp4", True, torch.bfloat16).on(device)
    with runner_of(layer) as one:
        _, got = layer.run(lambda x: checkpoint(lambda x: one(x * 2), x, use_reentrant=reentrant))
        assert same(got, layer.run(lambda x: one(x * 2))[1])


def test_no_gradient_is_recorded_unless_it_is_required(device: str) -> None:
    layer = linear("nvfp4", True, torch.float32).on(device)
    x = layer.inputs["x"].clone().requires_grad_()
    with runner_of(layer) as one:
        with torch.no_grad():
            assert not one(x).requires_grad
        with torch.inference_mode():
            assert not one(x).requires_grad
        assert one(x).requires_grad and not one(x.detach()).requires_grad


def test_fakes_never_touch_the_runner() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            x = torch.empty(3, 5, 128, requires_grad=True)
            y = ops.linear_gemm(x, 4711, 77)
            y.sum().backward()
            assert y.shape == (3, 5, 77) and x.grad.shape == x.shape and x.grad.dtype == x.dtype
            weights = torch.empty(15, 2, requires_grad=True)
            ops.moe_gemm(x, weights, torch.empty(15, 2, dtype=torch.int32), -1, 128).sum().backward()
            assert weights.grad.shape == weights.shape


# ---- errors ----


def test_the_runner_has_to_exist_in_the_backward() -> None:
    layer = linear("nvfp4", False, torch.float32)
    one = runner_of(layer)
    y = one(layer.inputs["x"].requires_grad_())
    one.destroy()
    with pytest.raises(RuntimeError, match=f"linear_gemm_backward: runner {one.id} is gone: it was destroyed"):
        y.sum().backward()


def test_a_python_object_has_no_gradient() -> None:
    class Twice:
        def run(self, x: Any) -> Any:
            return x * 2

    with opaq.runner.register(Twice(), "mlp", 8, 8) as one:
        y = one(torch.ones(2, 8).requires_grad_())
        text = f"mlp_gemm_backward: runner {one.id}: has no gradient: it was registered with functions"
        with pytest.raises(RuntimeError, match=text):
            y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_double_backward_is_refused(kind: str) -> None:
    layer = MAKERS[kind]("nvfp4", False, torch.float32)
    x = layer.inputs["x"].clone().requires_grad_()
    with runner_of(layer) as one:
        y = one(x, *list(layer.inputs.values())[1:], *layer.more)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"^opaq: {kind}_gemm does not support double backward"):
            gradient.sum().backward()


def test_sizes_that_do_not_fit() -> None:
    with runner_of(linear("nvfp4", False, torch.float32)) as one:
        with pytest.raises(
            RuntimeError, match=f"linear_gemm_backward: in_features is 7, but runner {one.id} takes 128"
        ):
            ops.linear_gemm_backward(torch.ones(2, 192), one.id, 7)
