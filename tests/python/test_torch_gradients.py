"""Features of PyTorch that the operators do not support are errors: gradients, except those of runners, and
torch.func."""

from __future__ import annotations

from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need
from test_torch_ops import NAMES, cases
from torch_cases import make_tensor

torch = need("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

ops = torch.ops.opaq
K, N = 64, 40
CHANGED = (
    "main_grad",
    "scale_fwd",
    "amax_history_fwd",
    "scale_bwd",
    "amax_history_bwd",
    "scale",
    "amax_history",
)


RUNNERS = ["linear_gemm", "mlp_gemm", "moe_gemm"]
WITHOUT = [name for name in NAMES if name not in ("random_state", "delayed_update", *RUNNERS)]


def watched(value: Any) -> Any:
    """The same value, with floating-point tensors that require gradients."""
    return tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), value
    )


def floats(value: Any) -> list[Any]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


@pytest.mark.parametrize("name", WITHOUT)
def test_backward_through_an_operator_raises(name: str) -> None:
    tried = 0
    for of_name, arguments, named in cases("cpu"):
        if of_name != name:
            continue
        operator, changed = getattr(ops, name), {k: v for k, v in named.items() if k in CHANGED}
        arguments, named = watched(arguments), {**watched(named), **changed}
        made = floats(operator(*arguments, **named))
        with torch.no_grad():
            assert not any(t.requires_grad for t in floats(operator(*arguments, **named)))
        if not floats((arguments, [v for k, v in named.items() if k not in CHANGED])):
            continue
        for result in made:
            assert result.requires_grad
            with pytest.raises(RuntimeError, match=f"opaq: {name} has no gradient. .*opaq"):
                result.float().sum().backward()
            tried += 1
    assert tried or name in ("convert", "slice_rows", "gather_rows")


def gemm() -> tuple[Any, Any, Any]:
    one = opaq.runner.create_linear(make_tensor((N, K), "cpu"))
    return one, (lambda x: ops.linear_gemm(x, one.id, N)), (lambda x: torch.ops.nvfp4.linear_gemm(x, one.id, N))


def without_gradient() -> Any:
    weight = make_tensor((N, K), "cpu")
    return lambda x: ops.linear(x, [weight], None, weight.shape, "")


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_backward_raises(dynamic: bool) -> None:
    function = without_gradient()
    x = make_tensor((4, K), "cpu").requires_grad_()
    with pytest.raises(Exception, match="opaq: linear has no gradient"):
        compiled(lambda x: function(x).sum() + x.sum(), dynamic=dynamic)(x).backward()
    with torch.no_grad():
        assert torch.equal(compiled(function, dynamic=dynamic)(x), function(x))
    assert torch.equal(compiled(function, dynamic=dynamic)(x.detach()), function(x).detach())


def test_a_forward_alone_does_not_raise() -> None:
    function = without_gradient()
    x = make_tensor((4, K), "cpu").requires_grad_()
    assert torch.equal(function(x), function(x.detach()))
    (function(x).detach().sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return function(*arguments, **(named or {}))


def test_backward_raises_under_dispatch_modes_and_of_quantized_tensors() -> None:
    function, x = without_gradient(), make_tensor((4, K), "cpu").requires_grad_()
    results = [function(opaq.quantize_tensor(x, "mxfp8"))]
    with FakeTensorMode(allow_non_fake_inputs=True):
        results += [function(torch.empty(4, K, requires_grad=True))]
    for mode in (Mode(), FlopCounterMode(display=False)):
        with mode, Mode():
            results += [function(x), function(opaq.quantize_tensor(x, "mxfp8"))]
    with Mode(), torch.no_grad():
        assert not function(x).requires_grad
    for result in results:
        with pytest.raises(RuntimeError, match="opaq: linear has no gradient"):
            result.sum().backward()
    with Mode():
        opaq.functional.linear(x, make_tensor((N, K), "cpu")).sum().backward()
    assert x.grad is not None


def test_runners_have_gradients_under_dispatch_modes_and_of_quantized_tensors() -> None:
    def gradient(call: Any) -> Any:
        x = make_tensor((4, K), "cpu").requires_grad_()
        call(x).square().sum().backward()
        return x.grad

    one, *functions = gemm()
    with one:
        for function in functions:
            for read in (lambda x: x, lambda x: opaq.quantize_tensor(x, "mxfp8")):
                want = gradient(lambda x, f=function, read=read: f(read(x)))
                assert want.abs().sum() > 0
                for mode in (Mode(), FlopCounterMode(display=False)):
                    with mode, Mode():
                        assert torch.equal(gradient(lambda x, f=function, read=read: f(read(x))), want)
            with Mode(), torch.no_grad():
                assert not function(make_tensor((4, K), "cpu").requires_grad_()).requires_grad


@pytest.mark.parametrize("wants_x", [False, True])
@pytest.mark.parametrize("weight", ["nvfp4", "mxfp8", "mxfp4"])
def test_quantized_linear_gives_the_bias_its_gradient(weight: str, wants_x: bool) -> None:
    packed = opaq.quantize_tensor(make_tensor((N, K), "cpu"), weight)
    for dtype, bias_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        x = make_tensor((2, 4, K), "cpu").to(dtype).requires_grad_(wants_x)
        bias = make_tensor((N,), "cpu").to(bias_dtype).requires_grad_()
        dy = make_tensor((2, 4, N), "cpu").to(dtype)
        opaq.functional.quantized_linear(x, packed, bias).backward(dy)
        want = dy.float().sum((0, 1))
        assert bias.grad is not None and bias.grad.dtype == bias_dtype
        torch.testing.assert_close(bias.grad.float(), want, rtol=2**-8, atol=1e-5)
        assert (x.grad is not None) == wants_x
        if wants_x:
            again = x.detach().clone().requires_grad_()
            opaq.functional.quantized_linear(again, packed).backward(dy)
            assert torch.equal(x.grad, again.grad)


def test_opcheck_with_gradients() -> None:
    """The fourth test of opcheck calls backward()."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    one, *_ = gemm()
    with one:
        x = make_tensor((4, K), "cpu").requires_grad_()
        torch.library.opcheck(ops.linear_gemm.default, (x, one.id, N), test_utils=tests)
        torch.library.opcheck(torch.ops.nvfp4.linear_gemm.default, (x, one.id, N), test_utils=tests)
        torch.library.opcheck(ops.quantize.default, (x, "fp8+both"), test_utils=tests)


class Unwrapping(torch.Tensor):  # type: ignore[misc, name-defined]
    """A wrapper subclass as in other libraries: the operators that it calls see tensors without gradients."""

    @staticmethod
    def __new__(cls, inner: Any, requires_grad: bool = False) -> Any:
        like = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, requires_grad=requires_grad, **like)

    def __init__(self, inner: Any, requires_grad: bool = False) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        arguments, named = tree_map_only(cls, lambda t: t.inner, (arguments, named or {}))
        return tree_map_only(torch.Tensor, cls, function(*arguments, **named))


def on_meta(t: Any) -> Any:
    return torch.empty_like(t, device="meta", requires_grad=t.is_floating_point())


def wrapped(t: Any) -> Any:
    return Unwrapping(t.detach().clone(), t.is_floating_point())


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("made_by", [on_meta, wrapped])
def test_backward_raises_on_meta_and_of_wrapper_subclasses(made_by: Any, name: str) -> None:
    operator, tried = getattr(ops, name), 0
    for of_name, arguments, named in cases("cpu"):
        if of_name != name:
            continue
        changed = {k: made_by(v).detach() for k, v in named.items() if k in CHANGED}
        arguments, named = tree_map_only(torch.Tensor, made_by, (arguments, named))
        named |= changed
        made = floats(operator(*arguments, **named))
        with torch.no_grad():
            assert not any(t.requires_grad for t in floats(operator(*arguments, **named)))
        if not floats((arguments, [v for k, v in named.items() if k not in CHANGED])):
            continue
        for result in made:
            assert result.requires_grad and type(result) in (torch.Tensor, Unwrapping)
            with pytest.raises(RuntimeError, match=f"opaq: {name} has no gradient. .*opaq"):
                result.sum().backward()
            tried += 1
    assert tried or name in ("convert", "slice_rows", "gather_rows")


@pytest.mark.parametrize("name", RUNNERS)
def test_runners_have_gradients_on_meta_and_of_wrapper_subclasses(name: str) -> None:
    (given,) = (arguments for of_name, arguments, _ in cases("cpu") if of_name == name)
    operator, found = getattr(ops, name), []
    for made_by in (lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), wrapped, on_meta):
        arguments = tree_map_only(torch.Tensor, made_by, given)
        operator(*arguments).sum().backward()
        found.append([leaf.grad for leaf in floats(arguments)])
    for plain, wrapper, meta in zip(*found, strict=True):
        assert plain.abs().sum() > 0 and type(wrapper) is Unwrapping and torch.equal(wrapper.inner, plain)
        assert meta.is_meta and (meta.shape, meta.dtype) == (plain.shape, plain.dtype)


def test_wrapper_subclasses_and_modes_compute_as_before() -> None:
    one, *functions = gemm()
    x = make_tensor((4, K), "cpu")
    with one:
        for function in functions:
            want = function(x)
            for requires_grad in (False, True):
                made = function(Unwrapping(x, requires_grad))
                assert torch.equal(made.detach().inner, want) and made.requires_grad == requires_grad
            with torch.inference_mode():
                assert torch.equal(function(Unwrapping(x)).inner, want)
        with pytest.raises(RuntimeError, match="opaq: linear_gemm"):  # also after an error
            ops.linear_gemm(Unwrapping(x[:, :3], True), one.id, N)
        assert torch.equal((Unwrapping(x) + 1).inner, x + 1)


def functions_with_gradients() -> dict[str, Any]:
    weight, stack = make_tensor((K, K), "cpu"), make_tensor((2, K, K), "cpu")
    up, packed = make_tensor((2 * K, K), "cpu"), opaq.quantize_tensor(weight, "nvfp4")
    splits, ids = torch.tensor([1, 3]), torch.tensor([[0], [1], [1], [0]])
    return {
        "functional.linear": lambda x: opaq.functional.linear(x, weight),
        "functional.quantized_linear": lambda x: opaq.functional.quantized_linear(x, packed),
        "functional.mlp": lambda x: opaq.functional.mlp(x, up, weight),
        "functional.moe": lambda x: opaq.functional.moe(
            x, torch.ones(4, 1), ids, torch.stack([up, up]), torch.stack([weight, weight])
        ),
        "functional.grouped_linear": lambda x: opaq.functional.grouped_linear(x, splits, stack),
        "quantize_tensor": lambda x: opaq.quantize_tensor(x, "mxfp8").dequantize(),
    }


TRANSFORMS = {
    "grad": lambda f: lambda x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[0],
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f: lambda x: torch.func.jacrev(f)(x),
    "hessian": lambda f: lambda x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f: lambda x: torch.vmap(f, in_dims=1)(x[:, None].expand(4, 2, K)),
}


@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_torch_func_is_refused(transform: str) -> None:
    one, function, _ = gemm()
    x, transformed = make_tensor((4, K), "cpu"), TRANSFORMS[transform]
    sentence = "does not support the transforms of torch.func .*torch.autograd.grad .*instead of vmap"
    with one, pytest.raises(NotImplementedError, match=f"^opaq: linear_gemm {sentence}"):
        transformed(function)(x)
    for name, function in functions_with_gradients().items():
        with pytest.raises(NotImplementedError, match=f"^opaq.{name} {sentence}"):
            transformed(function)(x)
    linear = functions_with_gradients()["functional.linear"]
    with pytest.raises(NotImplementedError, match=f"^opaq.functional.linear {sentence}"):
        torch.compile(transformed(linear), backend="aot_eager")(x)
    assert torch.equal(linear(x), linear(x))  # later calls work


def test_forward_mode_is_refused() -> None:
    one, *functions = gemm()
    weight = make_tensor((N, K), "cpu")
    packed, x = opaq.quantize_tensor(weight, "nvfp4"), make_tensor((4, K), "cpu")
    with one, forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (
            *functions,
            lambda x: opaq.functional.linear(x, weight),
            lambda x: opaq.functional.quantized_linear(x, packed),
            lambda x: ops.quantize(x.t().contiguous().t()[1:], "mxfp8"),
        ):
            for grad in (False, True):
                with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="x.* is a dual tensor"):
                    call(dual)
            call(forward_ad.unpack_dual(dual).primal)


DOUBLE = "does not support double backward: .*create_graph.*torch.nn.functional"


def test_double_backward_is_refused() -> None:
    for name, function in functions_with_gradients().items():
        if name == "quantize_tensor":  # straight-through gradients are differentiable
            continue
        x = make_tensor((4, K), "cpu").requires_grad_()
        (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        for call in (
            lambda g=gradient: g.sum().backward(),
            lambda g=gradient, x=x: torch.autograd.grad(g.sum(), x, retain_graph=True),
        ):
            with pytest.raises(RuntimeError, match=f"^opaq.{name} {DOUBLE}"):
                call()
        (again,) = torch.autograd.grad(function(x).square().sum(), x)
        assert torch.equal(again, gradient) and not again.requires_grad


def test_double_backward_is_refused_where_only_an_input_requires_gradients() -> None:
    """The gradient of a sum depends on x and w, which PyTorch's once_differentiable would not detect."""
    x, w, b = (make_tensor(s, "cpu").requires_grad_() for s in ((4, K), (N, K), (N,)))
    for recipe in (None, opaq.recipe.MXFP8BlockScaling()):
        y = opaq.functional.linear(x, w, b, recipe=recipe)
        dx, dw, db = torch.autograd.grad(y.sum(), (x, w, b), create_graph=True)
        assert not db.requires_grad
        for gradient, other in ((dx, w), (dw, x)):
            for inputs in ({}, {"inputs": [other]}):
                with pytest.raises(RuntimeError, match=f"opaq.functional.linear {DOUBLE}"):
                    gradient.sum().backward(retain_graph=True, **inputs)
        y = opaq.functional.linear(x, w.detach(), b, recipe=recipe)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert not dx.requires_grad
    y = opaq.functional.linear(x.square(), w)  # not a leaf
    (dw,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match=f"opaq.functional.linear {DOUBLE}"):
        dw.sum().backward()


def test_double_backward_compiled() -> None:
    """AOTAutograd raises the error before opaq is called."""
    x = make_tensor((4, K), "cpu").requires_grad_()
    y = torch.compile(functions_with_gradients()["functional.linear"], backend="aot_eager")(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


# ------------------------------------------------------------------------------------ tensors of all strides


def views(t: Any) -> list[Any]:
    """The same values with other strides, except for rank 0."""
    if t.dim() == 0:
        return []
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    wide[..., ::2] = t
    found = [wide[..., ::2], torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape)]
    if t.dim() >= 2:
        found.append(t.transpose(0, -1).contiguous().transpose(0, -1))
        padded = torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype)
        padded[..., : t.shape[-1]] = t
        found.append(padded[..., : t.shape[-1]])
    if t.dim() == 3:
        found.append(t.transpose(0, 1).contiguous().transpose(0, 1))
    for view in found:
        assert torch.equal(view.nan_to_num(), t.nan_to_num())
    return found


def same(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(a.stride() == b.stride() and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("random_state", "delayed_update")])
def test_any_strides(name: str) -> None:
    """Every tensor argument of every operator, one at a time, except mutated ones."""
    operator, tried = getattr(ops, name), 0
    for of_name, arguments, named in [case for case in cases("cpu") if case[0] == name][:4]:
        if "random" in of_name:
            torch.manual_seed(1)
        given = dict(zip((a.name for a in operator.default._schema.arguments), arguments, strict=False))
        given |= named
        fixed = {k: (v.clone() if k in CHANGED and "changing" in name else v) for k, v in given.items()}
        want = operator(**fixed)
        for key, value in given.items():
            if key in CHANGED and "changing" in name:
                continue
            for at, tensor in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(tensor, torch.Tensor):
                    continue
                for view in views(tensor):
                    other = [*value[:at], view, *value[at + 1 :]] if isinstance(value, list) else view
                    again = {
                        k: (v.clone() if k in CHANGED and "changing" in name else v) for k, v in given.items()
                    }
                    if "random" in of_name:
                        torch.manual_seed(1)
                    assert same(operator(**{**again, key: other}), want), (key, view.stride())
                    tried += 1
    assert tried


def test_expanded_and_channels_last() -> None:
    row = make_tensor((1, K), "cpu")
    image = make_tensor((2, 3, 4, 32), "cpu")
    last = image.contiguous(memory_format=torch.channels_last)
    for x in (
        row.expand(5, K),
        row[:, :1].expand(5, K),
        last,
        torch.empty(0, 3).t(),
        image.permute(3, 2, 1, 0),
    ):
        for text in ("mxfp8+both", "nvfp4", "fp8"):
            assert same(ops.quantize(x, text), ops.quantize(x.contiguous(), text))
            got, want = opaq.quantize_tensor(x, text), opaq.quantize_tensor(x.contiguous(), text)
            assert same(got.buffers(), want.buffers())
    torch.library.opcheck(ops.quantize.default, (row.expand(5, K).t(), "mxfp8"))


def test_any_strides_compiled() -> None:
    one, function, _ = gemm()
    with one:
        step = compiled(lambda x: (function(x.t()), opaq.quantize_tensor(x.t(), "mxfp8").dequantize()))
        for rows in (3, 8):
            x = make_tensor((K, rows), "cpu")
            want = function(x.t().contiguous()), opaq.quantize_tensor(x.t().contiguous(), "mxfp8").dequantize()
            assert same(step(x), want)
