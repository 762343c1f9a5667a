"""Runners in PyTorch: their operators in both namespaces, results against the operators without a handle,
errors, and Python objects as runners."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import opaq
from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need, need_cxx
from torch_cases import make_tensor, same_bytes

torch = need("torch")
runner = need("opaq.runner")
functional = need("opaq.functional")

ops, nvfp4 = torch.ops.opaq, torch.ops.nvfp4
BF16 = torch.bfloat16
H, I, E, N, K = 64, 48, 4, 40, 2  # noqa: E741
FORMATS = ("fp8", "fp8row", "fp8blk1", "mxfp8", "mxfp4", "nvfp4", "nvfp4+2d", "nvfp4+rowscaled")


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    before = runner.runner_count()
    yield
    assert runner.runner_count() == before


def refused(match: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(RuntimeError, match=match) as caught:
        function(*arguments, **named)
    assert str(caught.value).startswith("opaq: "), str(caught.value)


def inputs(*leading: int, device: str = "cpu") -> Any:
    return make_tensor((*leading, H), device, BF16)


def routing(rows: int, device: str = "cpu") -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, E, (rows, K), generator=generator, dtype=torch.int32)
    return torch.rand(rows, K, generator=generator).to(device), ids.to(device)


def stacks(device: str = "cpu") -> tuple[Any, Any]:
    return make_tensor((E, 2 * I, H), device, BF16) / 256, make_tensor((E, H, I), device, BF16) / 256


def made(kind: str, device: str = "cpu", **named: Any) -> Any:
    """A runner of a kind, with plain weights."""
    up, down = stacks(device)
    if kind == "linear":
        return runner.create_linear(make_tensor((N, H), device, BF16), **named)
    if kind == "mlp":
        return runner.create_mlp(up[0], down[0], **named)
    return runner.create_moe(up, down, **named)


def arguments(kind: str, handle: int, rows: int = 6, device: str = "cpu") -> tuple[Any, ...]:
    x = inputs(rows, device=device)
    return (
        (x, *routing(rows, device), handle, H) if kind == "moe" else (x, handle, N if kind == "linear" else H)
    )


ROWS = {"linear": ops.linear_gemm, "mlp": ops.mlp_gemm, "moe": ops.moe_gemm}


# ------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("text", FORMATS)
def test_linear_is_that_of_the_operator(text: str, device: str) -> None:
    weight = opaq.quantize_tensor(make_tensor((N, H), device, BF16), text)
    bias, x = make_tensor((N,), device, BF16), inputs(2, 5, device=device)
    for quantizer in ("", "mxfp8", "nvfp4"):
        with runner.create_linear(weight, bias, input_quantizer=quantizer) as made:
            want = functional.quantized_linear(x, weight, bias, input_quantizer=quantizer)
            for got in (ops.linear_gemm(x, made.id, N), nvfp4.linear_gemm(x, made.id, N), made(x)):
                assert same_bytes(got, want)


@pytest.mark.parametrize("text", FORMATS)
def test_experts_are_those_of_the_operators(text: str, device: str) -> None:
    up, down = (opaq.quantize_tensor(w, text) for w in stacks(device))
    x, (weights, ids) = inputs(10, device=device), routing(10, device)
    options: dict[str, Any] = {"activation": "silu_clamp", "limit": 7.0, "input_quantizer": "mxfp8"}
    with runner.create_moe(up, down, **options) as made:
        want = functional.moe(x, weights, ids, up, down, **options)
        for got in (ops.moe_gemm(x, weights, ids, made.id, H), nvfp4.moe_gemm(x, weights, ids, made.id, H)):
            assert same_bytes(got, want)
        assert same_bytes(made(x, weights, ids.long()), want)
    plain = stacks(device)
    up, down = (opaq.quantize_tensor(w[0], text) for w in plain)
    with runner.create_mlp(up, down, **options) as made:
        assert same_bytes(made(x), functional.mlp(x, up, down, **options))


def test_plain_weights_are_quantized_once(device: str) -> None:
    up, down = stacks(device)
    x, (weights, ids) = inputs(10, device=device), routing(10, device)
    for text in ("fp8", "mxfp4", "nvfp4", "nvfp4+4over6"):
        with runner.create_moe(up, down, quantizer=text) as made:
            plan = f"act=silu w={text}"
            want = ops.moe(x, weights, ids, [up], [down], None, None, up.shape, down.shape, plan)
            assert same_bytes(made(x, weights, ids), want)
            assert made.info().bytes < (up.nbytes + down.nbytes) * 0.75
    with runner.create_linear(up[0], quantizer="nvfp4", input_quantizer="nvfp4", input_scale=3.5) as made:
        want = ops.linear(x, [up[0]], None, up[0].shape, "x=nvfp4 w=nvfp4", torch.tensor([3.5], device=device))
        assert same_bytes(made(x), want) and made.info().format == "nvfp4"


def test_part_of_the_experts(device: str) -> None:
    up, down = stacks(device)
    x, (weights, ids) = inputs(10, device=device), routing(10, device)
    options: dict[str, Any] = {"num_experts": E, "first_expert": 2, "weights_on_input": True}
    with runner.create_moe(up[2:], down[2:], **options) as made:
        assert made.info().experts == 2
        want = functional.moe(x, weights, ids, up[2:], down[2:], **options)
        assert same_bytes(made(x, weights, ids), want)


def test_weights_are_the_runners_own(device: str) -> None:
    weight, bias, x = (
        make_tensor((N, H), device, BF16),
        make_tensor((N,), device, BF16),
        inputs(3, device=device),
    )
    with runner.create_linear(weight.t().contiguous().t(), bias) as made:
        want = made(x)
        weight.fill_(7)
        bias.fill_(7)
        assert same_bytes(made(x), want)


def test_info(device: str) -> None:
    with (
        made("linear", device, quantizer="nvfp4+both+2d") as linear,
        made("mlp", device) as mlp,
        made("moe", device, quantizer="fp8") as moe,
    ):
        info = linear.info()
        assert (info.kind, info.in_features, info.out_features, info.experts) == ("linear", H, N, 0)
        assert (
            info.format == "nvfp4+2d"
            and info.kernel.startswith("gemm_" if device == "cpu" else "product_")
            and info.bytes > N * H // 2
        )
        assert (mlp.info().kind, mlp.info().format, mlp.info().out_features) == ("mlp", "bf16", H)
        assert (moe.info().format, moe.info().experts) == ("fp8row", E)
        assert len({linear.id, mlp.id, moe.id}) == 3 and min(linear.id, mlp.id, moe.id) > 0
        assert repr(linear) == f"Runner({linear.id}, 'linear')"


# ------------------------------------------------------------------------------------ graphs


@pytest.mark.parametrize("space", ["opaq", "nvfp4"])
def test_opcheck(space: str, device: str) -> None:
    for kind in ("linear", "moe", "mlp"):
        if (space, kind) != ("nvfp4", "mlp"):
            with made(kind, device, quantizer="mxfp8") as one:
                operator = getattr(getattr(torch.ops, space), f"{kind}_gemm")
                torch.library.opcheck(operator.default, arguments(kind, one.id, device=device))


def test_schemas() -> None:
    for space in (ops, nvfp4):
        schemas = [
            str(getattr(space, name).default._schema).split("::")[1] for name in ("linear_gemm", "moe_gemm")
        ]
        assert schemas == [
            "linear_gemm(Tensor x, SymInt runner_id, SymInt out_features) -> Tensor",
            "moe_gemm(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, SymInt runner_id, "
            "SymInt hidden_size) -> Tensor",
        ]
    assert not hasattr(nvfp4, "mlp_gemm") and not hasattr(nvfp4, "quantize")


def test_the_fake_needs_no_runner() -> None:
    """Shapes and traces do not need it, and another runner may replace it between calls."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for space in (ops, nvfp4):
            assert space.linear_gemm(torch.empty(3, 5, H), -1, 77).shape == (3, 5, 77)
            choices = torch.empty(15, K), torch.empty(15, K, dtype=torch.int32)
            out = space.moe_gemm(torch.empty(3, 5, H, dtype=BF16), *choices, 2**40, 99)
            assert out.shape == (3, 5, 99) and out.dtype == BF16
    assert ops.mlp_gemm(torch.empty(2, H, device="meta"), 5, 77).is_meta

    def f(x: Any) -> Any:
        return nvfp4.linear_gemm(x, 4711, N)

    graph = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(inputs(2))
    assert "torch.ops.nvfp4.linear_gemm.default" in graph.code
    refused("linear_gemm: runner 4711 does not exist", graph, inputs(2))


@pytest.mark.parametrize("kind", ["linear", "mlp", "moe"])
def test_compiled_as_one_graph(kind: str, device: str) -> None:
    with made(kind, device, quantizer="nvfp4", input_quantizer="nvfp4") as one:

        def f(x: Any, *choices: Any) -> Any:
            return ROWS[kind](x + 1, *choices, one.id, one.out_features) * 2

        step, called = compiled(f, dynamic=True), compiled(lambda *given: one(*given))
        for rows in (2, 7, 31):
            given = arguments(kind, one.id, rows, device)[:-2]
            assert same_bytes(step(*given), f(*given))
            assert same_bytes(called(*given), one(*given))
            with fail_on_recompile():
                assert same_bytes(step(*given), f(*given))


def test_compiled_by_inductor(device: str) -> None:
    need_cxx()
    with made("linear", device, quantizer="nvfp4") as one:

        def f(x: Any) -> Any:
            return nvfp4.linear_gemm(torch.relu(x), one.id, N) + 1

        x = inputs(4, device=device)
        assert same_bytes(torch.compile(f, fullgraph=True)(x), f(x))


def test_exported_and_saved(device: str) -> None:
    with made("linear", device, quantizer="mxfp4") as one:

        class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
            def forward(self, x: Any) -> Any:
                return nvfp4.linear_gemm(x, one.id, N)

        file = io.BytesIO()
        batch = torch.export.Dim("batch", min=1, max=100)
        torch.export.save(
            torch.export.export(Model(), (inputs(8, device=device),), dynamic_shapes=({0: batch},)), file
        )
        file.seek(0)
        loaded = torch.export.load(file).module()
        for rows in (3, 50):
            assert same_bytes(loaded(inputs(rows, device=device)), one(inputs(rows, device=device)))


# ------------------------------------------------------------------------------------ errors


def test_unknown_stale_and_of_another_kind(device: str) -> None:
    with made("linear", device) as linear, made("moe", device) as moe:
        old = made("linear", device)
        old.destroy()
        for space in (ops, nvfp4):
            call = space.linear_gemm
            refused("linear_gemm: runner 12 does not exist", call, *arguments("linear", 12, device=device))
            refused(
                f"runner {old.id} is gone: it was destroyed", call, *arguments("linear", old.id, device=device)
            )
            text = f"linear_gemm: runner {moe.id} is a moe runner, expected a linear runner"
            refused(text, call, *arguments("linear", moe.id, device=device))
            refused(
                "is a linear runner, expected a moe runner",
                space.moe_gemm,
                *arguments("moe", linear.id, device=device),
            )
        refused(
            "mlp_gemm: .*is a linear runner, expected a mlp",
            ops.mlp_gemm,
            *arguments("mlp", linear.id, device=device),
        )
        for function in (old.info, old.destroy):
            with pytest.raises(opaq.OpaqError, match=f"runner {old.id} is gone") as caught:
                function()
            assert caught.value.status == "ARGUMENT"


def test_a_hint_that_contradicts_the_runner(device: str) -> None:
    for kind, size in (("linear", N), ("mlp", H), ("moe", H)):
        with made(kind, device) as one:
            name = "out_features" if kind == "linear" else "hidden_size"
            *given, _ = arguments(kind, one.id, device=device)
            for wrong in (size + 1, 0, 1):
                refused(
                    f"{kind}_gemm: {name} is {wrong}, but runner {one.id} gives {size}",
                    ROWS[kind],
                    *given,
                    wrong,
                )
            refused(f"takes {H} features", ROWS[kind], given[0][:, 1:].contiguous(), *given[1:], size)


def test_wrong_routing() -> None:
    with made("moe") as one:
        x, (weights, ids) = inputs(6), routing(6)
        for bad, text in (
            ((weights[:5], ids[:5]), "expected the same with 6 rows"),
            ((weights, ids[:, :1]), r"\[6,2\] and topk_ids \[6,1\]"),
            ((weights, ids.to(torch.int16)), "topk_ids another dtype"),
            ((ids, ids), "topk_weights holds int32"),
            ((weights, torch.full_like(ids, E + 1)), f"topk_ids has {E + 1} at token 0, choice 0"),
        ):
            refused(text, nvfp4.moe_gemm, x, *bad, one.id, H)


def test_errors_of_creation() -> None:
    weight = make_tensor((N, H), "cpu", BF16)
    packed = opaq.quantize_tensor(weight, "nvfp4")
    up, down = stacks()
    for text, function, given, named in (
        ("unknown format", runner.create_linear, (weight,), {"quantizer": "nvfp5"}),
        ("w=.*does not go with", runner.create_linear, (packed,), {"quantizer": "nvfp4"}),
        (r"bias has the shape \[64\]", runner.create_linear, (packed, make_tensor((H,), "cpu", BF16)), {}),
        ("rounds stochastically", runner.create_linear, (packed,), {"input_quantizer": "nvfp4+sr"}),
        ("float64", runner.create_linear, (weight.double(),), {}),
        ("w_shape has 3 sizes", runner.create_linear, (up,), {}),
        ("gate_up", runner.create_moe, (up[:, :-1], down), {}),
        ("gate_up_shape has 2 sizes", runner.create_moe, (up[0], down[0]), {}),
        ("no_such", runner.create_mlp, (up[0], down[0]), {"activation": "no_such"}),
        ("quantize it first", runner.create_moe, (up, down), {"quantizer": "nvfp4+2d"}),
    ):
        with pytest.raises(opaq.OpaqError, match=text) as caught:
            function(*given, **named)
        assert str(caught.value).startswith(("runner_create: ", f"opaq.runner.{function.__name__}: "))


# ------------------------------------------------------------------------------------ Python objects


class Scale:
    """y is the first out features of x, times a number."""

    def __init__(self, number: float = 2.0, features: int = N) -> None:
        self.number, self.features = number, features
        self.seen: list[tuple[Any, ...]] = []

    def run(self, x: Any, *choices: Any) -> Any:
        self.seen.append((x.shape, x.dtype, *(c.dtype for c in choices)))
        return x[..., : self.features] * self.number


def test_a_python_object_runs(device: str) -> None:
    for kind, features in (("linear", N), ("mlp", H), ("moe", H)):
        obj = Scale(3.0, features)
        with runner.register(obj, kind, H, features, E if kind == "moe" else 0) as one:
            x, *rest = arguments(kind, one.id, device=device)
            for dtype in (torch.float32, BF16, torch.float16):
                got = ROWS[kind](x.to(dtype), *rest)
                assert same_bytes(got, x.to(dtype)[:, :features] * 3.0)
            assert obj.seen[-1][0] == x.shape and len(obj.seen) == 3
            info = one.info()
            assert (info.kernel, info.bytes, info.format, info.kind) == ("Scale", 0, "", kind)
    assert obj.seen[-1][2:] == (torch.float32, torch.int32)


def test_a_python_object_in_a_compiled_graph(device: str) -> None:
    with runner.register(Scale(), "linear", H, N) as one:
        step = compiled(lambda x: nvfp4.linear_gemm(x * 2, one.id, N) + 1)
        assert same_bytes(step(inputs(3, device=device)), inputs(3, device=device)[:, :N] * 4 + 1)
        with torch.inference_mode():
            assert same_bytes(one(inputs(3, device=device)), inputs(3, device=device)[:, :N] * 2)


def test_its_input_is_not_copied() -> None:
    class Keep:
        def run(self, x: Any) -> Any:
            self.at = x.data_ptr(), x.stride()
            return x[..., :N]

    obj, x = Keep(), make_tensor((5, H), "cpu", BF16, gap=3)
    with runner.register(obj, "linear", H, N) as one:
        assert same_bytes(ops.linear_gemm(x, one.id, N), x[:, :N].contiguous())
        assert obj.at == (x.data_ptr(), x.stride())
        assert ops.linear_gemm(inputs(0), one.id, N).shape == (0, N)


def test_its_exceptions_are_the_operators_errors() -> None:
    class Wrong:
        result: Any = None

        def run(self, x: Any) -> Any:
            if isinstance(self.result, BaseException):
                raise self.result
            return self.result

    obj, x = Wrong(), inputs(3)
    with runner.register(obj, "linear", H, N) as one:
        for result, text in (
            (KeyError("no such expert"), "KeyError: 'no such expert'"),
            (ValueError("é\0" + "x" * 2000), r"ValueError: \\xe9 xxx"),
            (None, "TypeError: run returned NoneType, expected a tensor"),
            (
                torch.zeros(3, N),
                r"torch.float32 of shape \(3, 40\), expected torch.bfloat16 of shape \(3, 40\)",
            ),
            (torch.zeros(3, H, dtype=BF16), r"of shape \(3, 64\), expected torch.bfloat16 of shape \(3, 40\)"),
        ):
            obj.result = result
            refused(f"linear_gemm: runner {one.id}: .*{text}", ops.linear_gemm, x, one.id, N)
        obj.result = torch.ones(3, N, dtype=BF16)
        assert same_bytes(one(x), obj.result)


def test_exceptions_around_its_run_are_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail(*_: Any) -> Any:
        raise Mute

    obj, x = Scale(), inputs(3)
    with runner.register(obj, "linear", H, N) as one:
        monkeypatch.setattr(obj, "run", fail, raising=False)
        refused(f"linear_gemm: runner {one.id}: Mute$", ops.linear_gemm, x, one.id, N)
        monkeypatch.setattr(runner, "_borrowed", fail)
        refused(f"linear_gemm: runner {one.id}: Mute$", ops.linear_gemm, x, one.id, N)


@pytest.mark.parametrize("reason", [KeyboardInterrupt("now"), SystemExit(3)])
def test_exceptions_that_end_a_program_are_not_converted(reason: BaseException) -> None:
    class Ends:
        def run(self, x: Any) -> Any:
            raise reason

    with runner.register(Ends(), "linear", H, N) as one:
        step = compiled(lambda x: nvfp4.linear_gemm(x * 2, one.id, N) + 1)
        for call in (
            lambda: ops.linear_gemm(inputs(3), one.id, N),
            lambda: one(inputs(3)),
            lambda: step(inputs(3)),
        ):
            with pytest.raises(type(reason)) as caught:
                call()
            assert caught.value is reason


def test_errors_of_registering() -> None:
    with pytest.raises(TypeError, match="int has no run method"):
        runner.register(3, "linear", H, N)
    with pytest.raises(ValueError, match="kind is 'conv', expected linear, mlp, moe"):
        runner.register(Scale(), "conv", H, N)
    obj = Scale()
    with pytest.raises(opaq.OpaqError, match="0 experts in a moe runner"):
        runner.register(obj, "moe", H, H)
    alive = weakref.ref(obj)
    del obj
    gc.collect()
    assert alive() is None  # no reference is left


def test_an_object_lives_as_long_as_its_runner() -> None:
    obj = Scale()
    one, alive = runner.register(obj, "linear", H, N), weakref.ref(obj)
    del obj
    gc.collect()
    assert alive() is not None and same_bytes(one(inputs(2)), inputs(2)[:, :N] * 2)
    one.destroy()
    gc.collect()
    assert alive() is None


def test_a_runner_that_destroys_itself_ends_its_run() -> None:
    class Last:
        def run(self, x: Any) -> Any:
            self.runner.destroy()
            with pytest.raises(opaq.OpaqError, match="is gone"):
                self.runner.info()
            return x[:, :N]

    obj = Last()
    obj.runner = one = runner.register(obj, "linear", H, N)
    assert same_bytes(ops.linear_gemm(inputs(2), one.id, N), inputs(2)[:, :N])
    refused("is gone", ops.linear_gemm, inputs(2), one.id, N)


# ------------------------------------------------------------------------------------ lifetime, threads


def test_with_destroys_once() -> None:
    with made("linear") as one:
        one.destroy()
    refused("is gone", ops.linear_gemm, inputs(2), one.id, N)
    with pytest.raises(ZeroDivisionError), made("linear") as one:
        raise ZeroDivisionError
    refused("is gone", ops.linear_gemm, inputs(2), one.id, N)


def test_many_threads() -> None:
    """Each creates, runs and destroys runners, including Python objects."""
    weight, x = make_tensor((N, H), "cpu", BF16), inputs(5)
    packed = opaq.quantize_tensor(weight, "nvfp4")
    want = functional.quantized_linear(x, packed)

    def work(number: int) -> int:
        for turn in range(20):
            with runner.create_linear(packed) as one:
                assert same_bytes(nvfp4.linear_gemm(x, one.id, N), want)
            with runner.register(Scale(number), "linear", H, N) as one:
                assert same_bytes(nvfp4.linear_gemm(x, one.id, N), x[:, :N] * number)
            refused("is gone", ops.linear_gemm, x, one.id, N)
            assert turn >= 0
        return number

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == list(range(6))
