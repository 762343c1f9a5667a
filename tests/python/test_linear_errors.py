"""Errors of Linear: a message with names and numbers, before anything is computed or changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import opaq
from conftest import need
from linear_reference import CASES, values
from linear_training import STATE, under
from torch_cases import same_buffers

torch = need("torch")

from opaq.functional import linear  # noqa: E402
from opaq.recipe import CustomRecipe  # noqa: E402

BF16, F64 = torch.bfloat16, torch.float64


def tensor(*shape: int, dtype: Any = torch.float32, device: str = "cpu") -> Any:
    return values(shape, 1, "cpu", dtype).to(device)


def layer(**options: Any) -> Any:
    return opaq.Linear(64, 32, **options)


def message(function: Callable[[], Any], kind: type[BaseException]) -> str:
    """The whole message."""
    with pytest.raises(kind) as caught:
        function()
    assert type(caught.value) is {ValueError: opaq.OpaqError}.get(kind, kind) or type(caught.value) is kind
    return str(caught.value)


# --------------------------------------------------------------------------------------------------- operands

OPERANDS: dict[str, tuple[Callable[[], Any], type[BaseException], str]] = {
    "features": (
        lambda: layer()(tensor(5, 63)),
        ValueError,
        "opaq.Linear: x has the shape (5, 63), expected 64 as its last size: the weight is (32, 64)",
    ),
    "a number": (
        lambda: layer()(torch.tensor(1.0)),
        ValueError,
        "opaq.Linear: x has the shape (), expected 64 as its last size: the weight is (32, 64)",
    ),
    "bias": (
        lambda: linear(tensor(5, 64), tensor(32, 64), tensor(31)),
        ValueError,
        "opaq.functional.linear: bias has the shape (31,), expected (32,)",
    ),
    "bias of two dimensions": (
        lambda: linear(tensor(5, 64), tensor(32, 64), tensor(1, 32)),
        ValueError,
        "opaq.functional.linear: bias has the shape (1, 32), expected (32,)",
    ),
    "weight of one dimension": (
        lambda: linear(tensor(5, 64), tensor(64)),
        ValueError,
        "opaq.functional.linear: weight has the shape (64,), expected two sizes, out features and in features",
    ),
    "weight of three dimensions": (
        lambda: linear(tensor(5, 64), tensor(2, 32, 64)),
        ValueError,
        "opaq.functional.linear: weight has the shape (2, 32, 64), expected two sizes, out features and in "
        "features",
    ),
    "a cached weight of another shape": (
        lambda: linear(
            tensor(5, 64), tensor(32, 64), cached_weight=opaq.quantize_tensor(tensor(16, 64), "mxfp8")
        ),
        ValueError,
        "opaq.functional.linear: cached_weight has the shape (16, 64), expected (32, 64)",
    ),
    "weight on meta": (
        lambda: layer(device="meta")(tensor(5, 64)),
        ValueError,
        "opaq.Linear: x is on cpu, weight on meta: expected one device",
    ),
    "x on meta": (
        lambda: layer()(tensor(5, 64, device="meta")),
        ValueError,
        "opaq.Linear: x is on meta, weight on cpu: expected one device",
    ),
    "bias on meta": (
        lambda: linear(tensor(5, 64), tensor(32, 64), tensor(32, device="meta")),
        ValueError,
        "opaq.functional.linear: x is on cpu, bias on meta: expected one device",
    ),
    "dtypes": (
        lambda: layer(dtype=BF16)(tensor(5, 64)),
        ValueError,
        "opaq.Linear: x holds f32, but w holds bf16; expected x in bf16, or w in f32",
    ),
    "other dtypes": (
        lambda: layer(dtype=torch.float16)(tensor(5, 64, dtype=BF16)),
        ValueError,
        "opaq.Linear: x holds bf16, but w holds f16; expected x in f16, or w in bf16 or f32",
    ),
    "bias dtype": (
        lambda: linear(tensor(5, 64, dtype=BF16), tensor(32, 64, dtype=BF16), tensor(32, dtype=torch.float16)),
        ValueError,
        "opaq.functional.linear: x holds bf16, but bias holds f16; expected x in f16, or bias in bf16 or f32",
    ),
    "integers": (
        lambda: layer()(torch.ones(5, 64, dtype=torch.int64)),
        ValueError,
        "opaq.Linear: x is int64, expected f32, bf16 or f16",
    ),
}


@pytest.mark.parametrize("name", ["none", "mxfp8"])
@pytest.mark.parametrize("what", OPERANDS)
def test_operands(what: str, name: str) -> None:
    function, kind, text = OPERANDS[what]
    with under(CASES[name]):
        assert message(function, kind) == text


IN_A_GRAPH = {
    "features": (((5, 63), (32, 64), (32,)), "x has the shape (5, 63), expected 64 as its last size"),
    "bias": (((5, 64), (32, 64), (31,)), "bias has the shape (31,), expected (32,)"),
    "weight": (((5, 64), (2, 32, 64), (32,)), "weight has the shape (2, 32, 64), expected two sizes"),
}


@pytest.mark.parametrize("what", IN_A_GRAPH)
def test_operands_in_a_graph(what: str) -> None:
    """The same message, within the compiler's error."""
    shapes, text = IN_A_GRAPH[what]
    torch.compiler.reset()
    function = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=re.escape(f"opaq.functional.linear: {text}")):
        function(*(tensor(*shape) for shape in shapes))


def test_float64() -> None:
    with pytest.raises(ValueError, match="opaq.Linear: .* expected f32, bf16 or f16"):
        layer(dtype=torch.float64)(tensor(5, 64, dtype=torch.float64))


def test_a_failed_forward_changes_nothing(device: str) -> None:
    module = opaq.Linear(64, 32, device=device)
    with under(CASES["delayed"]):
        module(values((5, 64), 1, device)).sum().backward()
    before = [getattr(module, key).clone() for key in STATE]
    with under(CASES["delayed"]), pytest.raises(ValueError, match="expected 64 as its last size"):
        module(values((5, 63), 1, device))
    assert same_buffers([getattr(module, key) for key in STATE], before)


# ---------------------------------------------------------------------------------------------------- options


def factory(role: Any) -> str | None:
    return {"input": "mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}.get(role.tensor_type)


OPTIONS: dict[str, tuple[Callable[[], Any], type[BaseException], str]] = {
    "output without a recipe": (
        lambda: layer()(tensor(5, 64), fp8_output=True),
        ValueError,
        "opaq.Linear: fp8_output=True needs a recipe that quantizes outputs",
    ),
    "gradient without a recipe": (
        lambda: layer()(tensor(5, 64), fp8_grad=True),
        ValueError,
        "opaq.Linear: fp8_grad=True needs a recipe that quantizes gradients",
    ),
    "output that a recipe leaves": (
        lambda: opaq.autocast(recipe=CustomRecipe(factory))(layer())(tensor(5, 64), fp8_output=True),
        ValueError,
        "opaq.Linear: fp8_output=True needs a recipe that quantizes outputs",
    ),
    "delayed scaling without a state": (
        lambda: linear(tensor(5, 64), tensor(32, 64), recipe=CASES["delayed"].make()),
        ValueError,
        "opaq.functional.linear: DelayedScaling needs a delayed_state; opaq.Linear has one",
    ),
    "no main_grad": (
        lambda: layer(fuse_wgrad_accumulation=True)(tensor(5, 64)),
        ValueError,
        "opaq.Linear: fuse_wgrad_accumulation=True needs a tensor weight.main_grad",
    ),
    "parts and main_grad": (
        lambda: layer(fuse_wgrad_accumulation=True, parameters_split=("q", "k")),
        NotImplementedError,
        "opaq.Linear: fuse_wgrad_accumulation is not supported with parameters_split",
    ),
    "uneven parts": (
        lambda: opaq.Linear(64, 50, parameters_split=("q", "k", "v")),
        ValueError,
        "opaq.Linear: 50 out features cannot be divided among 3 parameters",
    ),
    "parts that are too few": (
        lambda: opaq.Linear(64, 50, parameters_split={"q": 32, "k": 8}),
        ValueError,
        "opaq.Linear: parameters_split is {'q': 32, 'k': 8}, expected multiples of 1 that make 50",
    ),
    "parallel_mode": (
        lambda: layer(parallel_mode="diagonal"),
        ValueError,
        "opaq.Linear: parallel_mode is 'diagonal', expected 'column', 'row' or None",
    ),
    "tp_size without a group": (
        lambda: layer(parallel_mode="column", tp_size=4),
        ValueError,
        "opaq.Linear: tp_size is 4, but there is no tp_group",
    ),
    "tp_group": (
        lambda: layer(parallel_mode="column", tp_group="all", tp_size=4),
        TypeError,
        "opaq: tp_group is a str, expected a ProcessGroup or a DeviceMesh",
    ),
    "overlap": (
        lambda: layer(ub_overlap_ag=True),
        NotImplementedError,
        "opaq.Linear: ub_overlap_ag=True is not supported",
    ),
    "delayed wgrad": (
        lambda: layer(delay_wgrad_compute=True),
        NotImplementedError,
        "opaq.Linear: delay_wgrad_compute=True is not supported",
    ),
    "unknown": (lambda: layer(colour="red"), TypeError, "opaq.Linear: unknown argument 'colour'"),
    "unknown and false": (lambda: layer(colour=None), TypeError, "opaq.Linear: unknown argument 'colour'"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options(what: str) -> None:
    function, kind, text = OPTIONS[what]
    assert message(function, kind) == text


def test_arguments_without_effect_are_accepted() -> None:
    """Transformer Engine's arguments with their default values, and names."""
    layer(ub_overlap_ag=False, delay_wgrad_compute=False, symmetric_ar_type=None, ub_name="qkv", name="first")
    layer(parallel_mode="column", sequence_parallel=True)  # one rank: nothing to do


@pytest.mark.parametrize("option", ["save_original_input", "save_original_weight"])
def test_originals_exclude_delayed_scaling(option: str, device: str) -> None:
    module = opaq.Linear(64, 32, device=device, **{option: True})
    text = 'plan: "save=[xw]" does not go with delayed scaling, whose scale may have changed when [xw] is'
    with under(CASES["delayed"]), pytest.raises(ValueError, match=text):
        module(values((5, 64), 1, device).requires_grad_())


def test_parts_exclude_quantized_parameters(device: str) -> None:
    with opaq.quantized_model_init():
        module = opaq.Linear(64, 64, parameters_split=("q", "k"), device=device)
    text = "opaq.Linear: parameters_split is not supported with quantized parameters"
    assert message(lambda: module(values((5, 64), 1, device)), NotImplementedError) == text


MAIN_GRADS = {
    "shape": (lambda: torch.zeros(32, 63), "main_grad has the shape [32,63], expected [32,64]"),
    "dtype": (
        lambda: torch.zeros(32, 64, dtype=torch.int64),
        "main_grad holds int64, expected f32, bf16 or f16",
    ),
    "strides": (lambda: torch.zeros(64, 32).t(), "main_grad: view_plain: the last stride is 32, expected 1"),
}


@pytest.mark.parametrize("what", MAIN_GRADS)
def test_main_grad(what: str) -> None:
    module = layer(fuse_wgrad_accumulation=True)
    make, text = MAIN_GRADS[what]
    module.weight.main_grad = make()
    with under(CASES["mxfp8"]):
        y = module(tensor(5, 64))
    with pytest.raises(ValueError, match=re.escape(f"opaq.Linear: {text}")):
        y.sum().backward()


def test_a_weight_changed_before_the_backward(device: str) -> None:
    """autograd detects it if the weight itself was saved; saved quantized bytes are not affected."""
    for name, options, refuses in (
        ("none", {}, True),
        ("mxfp8", {"save_original_weight": True}, True),
        ("mxfp8", {}, False),
    ):
        module = opaq.Linear(64, 32, device=device, **options)
        x = values((5, 64), 1, device).requires_grad_()
        with under(CASES[name]):
            y = module(x)
        with torch.no_grad():
            module.weight.mul_(2)
        if refuses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()


def test_a_second_backward(device: str) -> None:
    module, x = opaq.Linear(64, 32, device=device), values((5, 64), 1, device).requires_grad_()
    with under(CASES["mxfp8"]):
        y = module(x)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


# ----------------------------------------------------------------------------------------------- the operators


def test_an_operator_raises_the_librarys_text() -> None:
    """The other texts: tests/c/test_linear_errors.c and test_linear_backward_errors.c."""
    x, w = tensor(5, 64), tensor(32, 64)
    with pytest.raises(
        RuntimeError, match=r"^opaq: linear_forward: x has the shape \[5,64\], expected \[6,64\]"
    ):
        torch.ops.opaq.linear_forward([x], [w], None, (6, 64), (32, 64), torch.float32, "")
