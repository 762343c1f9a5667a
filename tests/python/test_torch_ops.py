"""The operators in PyTorch: opcheck, schemas, and their bytes against the C core's."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import opaq
from conftest import need, slow_but
from opaq import Quantizer, _library
from spec_texts import valid_texts
from torch_cases import (
    DTYPES,
    EMPTY,
    FORMATS,
    QUANTIZERS,
    SHAPES,
    given_for,
    make_tensor,
    numpy_of,
    quantized,
    same_buffers,
    same_bytes,
    some_texts,
)

torch = need("torch")

from opaq._operators import result_places  # noqa: E402

ops = torch.ops.opaq
NAMES = [_library.library.opaq_op_at(i).contents.name.decode() for i in range(_library.library.opaq_op_count())]


# ------------------------------------------------------------------------------------ the table


def schema_of(index: int) -> str:
    function = _library.library.opaq_op_schema
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    text = ctypes.create_string_buffer(768)
    row = ctypes.cast(_library.library.opaq_op_at(index), ctypes.c_void_p)
    assert function(row, text, len(text), None) == 0
    return text.value.decode()


def test_schemas_are_those_of_the_table() -> None:
    assert {"quantize", "dequantize", "convert", "slice_rows", "gather_rows"} <= set(NAMES)
    for index, name in enumerate(NAMES):
        assert str(getattr(ops, name).default._schema) == "opaq::" + schema_of(index)


# ---------------------------------------------------------------------------------------- opcheck


def cases(device: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Arguments for every operator."""
    for text in QUANTIZERS:
        yield "quantize", (make_tensor((5, 37), device), text), given_for(text, device)
    yield "quantize", (make_tensor((2, 3, 32), device, torch.bfloat16, gap=5), "mxfp8+both"), {}
    yield "quantize", (make_tensor((0, 32), device), "nvfp4+both"), {}
    amax = torch.tensor([900.0], device=device)
    yield (
        "quantize",
        (make_tensor((5, 37), device), "nvfp4+both"),
        {"amax_rowwise": amax, "amax_columnwise": amax},
    )
    for text, dtype in (
        ("nvfp4", torch.float32),
        ("mxfp8+columnwise", torch.bfloat16),
        ("fp8+both", torch.float16),
    ):
        buffers = quantized(text, (5, 37), device).buffers()
        yield "dequantize", (buffers, text, [5, 37], dtype), {}
        yield "dequantize", (buffers, text, [5, 37], dtype, 2 if "col" in text else 1), {}
    for text, to in (("fp8", "fp8+both"), ("mxfp8+both+2d", "mxfp8+columnwise+2d+swizzle")):
        yield "convert", (quantized(text, (5, 37), device).buffers(), text, to, [5, 37], torch.float32), {}
    for text in ("fp8+both", "nvfp4", "mxfp4+both"):
        buffers = quantized(text, (64, 37), device).buffers()
        yield "slice_rows", (buffers, text, [64, 37], [32, 37], torch.float32, 32), {}
    for text in ("fp8row", "mxfp8+both"):
        gathered = [torch.cat([buffer] * 2) for buffer in quantized(text, (32, 37), device).buffers()]
        yield "gather_rows", (gathered, text, [32, 37], [64, 37], torch.bfloat16), {}
    for text in ("fp8", "nvfp4+rht"):
        yield "amax", (make_tensor((5, 37), device), text), {}
    yield from linear_cases(device)
    yield from expert_cases(device)
    yield from runner_cases(device)


def runner_cases(device: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Runners that are not destroyed, since a case is used after its iterator has advanced."""
    bf16 = torch.bfloat16
    x, w = make_tensor((2, 5, 32), device, bf16), quantized("nvfp4", (19, 32), device, bf16)
    up, down = make_tensor((3, 24, 32), device, bf16), make_tensor((3, 32, 12), device, bf16)
    routing = torch.rand(10, 2, device=device), torch.randint(0, 3, (10, 2), dtype=torch.int32, device=device)
    linear = opaq.runner.create_linear(w, input_quantizer="mxfp8").id
    mlp = opaq.runner.create_mlp(up[0], down[0], quantizer="mxfp4").id
    moe = opaq.runner.create_moe(up, down, quantizer="nvfp4").id
    yield "linear_gemm", (x, linear, 19), {}
    yield "mlp_gemm", (x, mlp, 32), {}
    yield "moe_gemm", (x, *routing, moe, 32), {}
    yield "linear_gemm_backward", (make_tensor((2, 5, 19), device, bf16), linear, 32), {}
    yield "mlp_gemm_backward", (x, x, mlp, 32), {}
    yield "moe_gemm_backward", (x, x, *routing, moe, 32), {}


def linear_cases(device: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The forward with several plans, and the backward with its saved outputs."""
    bf16 = torch.bfloat16
    x, w = make_tensor((2, 5, 37), device, bf16), make_tensor((19, 37), device, bf16)
    dy, bias = make_tensor((2, 5, 19), device, bf16), make_tensor((19,), device, bf16)
    shapes = [2, 5, 37], [19, 37]
    scales = {"scale": torch.tensor([2.0, 3.0, 4.0], device=device)}
    for plan in (
        "grad=xwb",
        "x=mxfp8 w=mxfp8 dy=mxfp8.e5m2 grad=xwb cache",
        "x=nvfp4+rht w=nvfp4+2d dy=nvfp4+rht y=nvfp4 dx=nvfp4 grad=xw",
        "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=xw history=max margin=0",
    ):
        delayed = "delayed" in plan
        forward = ([x], [w], bias, *shapes, bf16, plan)
        yield "linear_forward", forward, scales if delayed else {}
        yield "linear_forward_random", forward, {**(scales if delayed else {}), "like": x}
        out = ops.linear_forward(*forward, **(scales if delayed else {}))
        _, kept_x, kept_w, amax, _ = (out[begin:end] for begin, end in result_places("linear_forward", plan))
        backward = ([dy], kept_x or [x], kept_w or [w], *shapes, bf16, bf16, plan)
        if not delayed:
            yield "linear_backward", backward, {}
            added = ([dy], kept_x or [x], kept_w or [w], *shapes, bf16, bf16, plan + " main_grad=add")
            yield "linear_backward_changing", added, {"main_grad": torch.ones(19, 37, device=device)}
            continue
        state = {"scale_fwd": torch.ones(3, device=device), "amax_history_fwd": torch.ones(8, 3, device=device)}
        yield "delayed_update", (plan, *state.values()), {}
        more = torch.ones(2, device=device), torch.ones(8, 2, device=device)
        state |= {"scale_bwd": more[0], "amax_history_bwd": more[1]}
        yield "linear_backward_changing", backward, {"amax": amax[0], **state}


def expert_cases(device: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The inference operators without a handle, and the training operators of experts."""
    bf16 = torch.bfloat16
    x, w = make_tensor((5, 32), device, bf16), make_tensor((24, 32), device, bf16)
    q = quantized("nvfp4", (24, 32), device, bf16)
    yield "linear", (x, [w], None, w.shape, ""), {}
    scale = {"input_scale": torch.tensor([3.0], device=device)}
    yield "linear", (x, q.buffers(), w[:, 0].contiguous(), q.shape, "x=nvfp4 w_given=nvfp4"), scale
    yield "random_state", (x,), {}
    up, down = make_tensor((3, 32, 32), device, bf16), make_tensor((3, 32, 16), device, bf16)
    ids = torch.tensor([[0, 2], [1, 1], [-1, 3], [2, 0], [0, 1]], device=device)
    weights = torch.rand(5, 2, device=device)
    for plan in ("act=silu", "act=swiglu_oai x=mxfp8 h=mxfp8 w=mxfp8"):
        yield "mlp", (x, [up[0]], [down[0]], None, None, up[0].shape, down[0].shape, plan), {}
        yield "moe", (x, weights, ids, [up], [down], None, None, up.shape, down.shape, plan), {}
        one = (x, [up[0]], [down[0]], None, None, up[0].shape, down[0].shape, f"{plan} grad=xgdbc")
        yield "mlp_forward", one, {}
        y, h = ops.mlp_forward(*one)
        gradients = (y, x, h, [up[0]], [down[0]], up[0].shape, down[0].shape, bf16, f"{plan} grad=xgdbc")
        yield "mlp_backward", gradients, {}
        many = (x, weights, ids, [up], [down], None, None, up.shape, down.shape, f"{plan} grad=xrgdbc")
        yield "moe_forward", many, {}
        y, h = ops.moe_forward(*many)
        stacks = ([up], [down], None, up.shape, down.shape, bf16, f"{plan} grad=xrgdbc")
        yield "moe_backward", (y, x, weights, ids, h, *stacks), {}
    splits = torch.tensor([2, 0, 3], device=device)
    for plan in ("grad=xwb", "x=nvfp4 w=nvfp4+2d dy=nvfp4 grad=xwb"):
        yield "grouped_linear", (x, splits, [up], None, up.shape, plan), {}
        y = ops.grouped_linear(x, splits, [up], None, up.shape, plan)
        yield "grouped_linear_backward", (y, x, splits, [up], up.shape, bf16, plan), {}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: str) -> None:
    of_name = [case for case in cases(device) if case[0] == name]
    assert of_name, f"{name} has no case: add one"
    for _, arguments, named in of_name:
        torch.library.opcheck(getattr(ops, name).default, arguments, named)


# ------------------------------------------------------------------------------------ the bytes


def check_bytes(text: str, x: Any) -> None:
    """Compares quantize and dequantize through PyTorch with those on NumPy arrays."""
    options = Quantizer(text).options
    given: dict[str, Any] = {"scale": 12.5} if "delayed" in options else {}
    given |= {"seed": 1234567890123, "offset": 77} if "sr" in options else {}
    want = opaq.quantize(numpy_of(x), Quantizer(text), **given)
    got = ops.quantize(x, text, **given_for(text, x.device.type))
    what = f"{text} {x.dtype} {tuple(x.shape)}"
    for (name, array), buffer in zip(want.buffers.items(), got, strict=True):
        assert buffer.device == x.device and buffer.is_contiguous()
        assert tuple(buffer.shape) == array.shape, f"{what} {name}"
        assert numpy_of(buffer).tobytes() == array.tobytes(), f"{what} {name}"
    values = ops.dequantize(got, text, x.shape, x.dtype)
    name = {torch.float32: "float32", torch.float16: "float16"}.get(x.dtype, "bfloat16")
    assert numpy_of(values).tobytes() == opaq.dequantize(want, name).tobytes(), what


@pytest.mark.parametrize("dtype", slow_but(DTYPES, "bf16"))
@pytest.mark.parametrize("row", FORMATS)
def test_bytes_of_every_spec(row: str, dtype: str, device: str) -> None:
    texts = [text for text in valid_texts() if Quantizer(text).format == row]
    assert len(texts) > 30
    for turn, shape in enumerate((*SHAPES, *EMPTY)):
        x = make_tensor(shape, device, DTYPES[dtype], gap=turn % 3)
        for text in texts:
            check_bytes(text, x)


@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY], ids=str)
def test_bytes_of_every_shape(shape: tuple[int, ...], device: str) -> None:
    for text in QUANTIZERS:
        for dtype in DTYPES.values():
            check_bytes(text, make_tensor(shape, device, dtype))
            check_bytes(text, make_tensor(shape, device, dtype, gap=7))


def test_views_that_the_library_reads_without_a_copy(device: str) -> None:
    x = make_tensor((40, 130), device)
    for view in (x[3:17, 5:42], x[::3], x[:, :1], x.t()[:, :1], torch._neg_view(x), x[1:1], x[7]):
        got, want = ops.quantize(view, "mxfp8+both"), ops.quantize(view.clone().contiguous(), "mxfp8+both")
        assert same_buffers(got, want)


def test_given_amax(device: str) -> None:
    x = make_tensor((16, 48), device)
    amax = torch.tensor([70000.0], device=device)
    want = opaq.quantize(numpy_of(x), Quantizer("nvfp4+both"), amax_rowwise=70000.0, amax_columnwise=70000.0)
    got = ops.quantize(x, "nvfp4+both", amax_rowwise=amax, amax_columnwise=amax)
    for array, buffer in zip(want.buffers.values(), got, strict=True):
        assert numpy_of(buffer).tobytes() == array.tobytes()


def test_columnwise_copy_dequantizes_on_request(device: str) -> None:
    q = quantized("mxfp8+both", (40, 130), device)
    alone = q.update_usage(rowwise=False)
    rows, columns = (ops.dequantize(q.buffers(), "mxfp8+both", q.shape, q.dtype, usage) for usage in (1, 2))
    assert same_bytes(columns, alone.dequantize()) and not same_bytes(rows, columns)
    assert same_bytes(rows, q.dequantize())


# ----------------------------------------------------------------- settings that must not change a byte


def test_threads_do_not_change_a_byte() -> None:
    before = torch.get_num_threads()
    x = make_tensor((600, 272), "cpu")
    try:
        for text in (*(name + "+both+sr" for name in FORMATS), "nvfp4+both+rht", "fp8blk2+both"):
            found = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert torch.get_num_threads() == threads
                buffers = ops.quantize(x, text, **given_for(text))
                found.append([*buffers, ops.dequantize(buffers, text, x.shape, x.dtype)])
            assert same_buffers(found[0], found[1]) and same_buffers(found[0], found[2]), text
    finally:
        torch.set_num_threads(before)


def test_flushing_denormals_does_not_change_a_byte() -> None:
    x = make_tensor((33, 160), "cpu") * 1e-38
    assert ((x != 0) & (x.abs() < 1.17e-38)).sum() > 1000
    texts = some_texts(60)
    want = [ops.quantize(x, text, **given_for(text)) for text in texts]
    back = [ops.dequantize(q, text, x.shape, x.dtype) for q, text in zip(want, texts, strict=True)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        assert (torch.full((1,), 1e-39) * 1.0).item() == 0
        got = [ops.quantize(x, text, **given_for(text)) for text in texts]
        again = [ops.dequantize(q, text, x.shape, x.dtype) for q, text in zip(want, texts, strict=True)]
        assert (torch.full((1,), 1e-39) * 1.0).item() == 0  # the caller's setting is restored
    finally:
        torch.set_flush_denormal(False)
    assert all(same_buffers(a, b) for a, b in zip(got, want, strict=True))
    assert same_buffers(again, back)


# ------------------------------------------------------------------------------- PyTorch's own casts

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def spread(scales: Any, rows: int, columns: int, per_row: int, per_column: int) -> Any:
    """Repeats the scales of blocks for each element."""
    wide = scales.repeat_interleave(per_row, 0)[:rows]
    return wide.repeat_interleave(per_column, 1)[:, :columns]


def scales_of(text: str, buffers: Any, rows: int, columns: int) -> Any:
    scale = buffers[1]
    match Quantizer(text).format:
        case "fp8":
            return scale.expand(rows, columns)
        case "fp8row":
            return spread(scale, rows, columns, 1, columns)
        case "fp8blk1":
            return spread(scale.t(), rows, columns, 1, 128)
        case "fp8blk2":
            return spread(scale, rows, columns, 128, 128)
    return spread(scale.view(torch.float8_e8m0fnu).float(), rows, columns, 1, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("element", FLOAT8)
@pytest.mark.parametrize("name", ["fp8", "fp8row", "fp8blk1", "fp8blk2", "mxfp8"])
def test_codes_are_those_of_a_cast(name: str, element: str, dtype: str, device: str) -> None:
    """With scales that are powers of two, dividing is exact and only the cast rounds."""
    text = f"{name}.{element}" + ("" if name == "mxfp8" else "+pow2")
    for shape in ((40, 130), (130, 300)):
        x = make_tensor(shape, device, DTYPES[dtype])
        buffers = ops.quantize(x, text)
        scaled = x.float() / scales_of(text, buffers, *shape)
        assert torch.equal(buffers[0], scaled.to(FLOAT8[element]).view(torch.uint8))


@pytest.mark.parametrize("element", FLOAT8)
def test_power_of_two_scales_are_those_of_a_cast(element: str, device: str) -> None:
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[element]
    powers = torch.exp2(torch.arange(-100, 100, dtype=torch.float32, device=device))
    x = torch.randn(len(powers), 32, device=device).clamp(-1, 1) * powers[:, None]
    x[:, 7] = powers * largest
    scales = ops.quantize(x, f"mxfp8.{element}")[1]
    assert torch.equal(scales[: len(powers), 0], powers.to(torch.float8_e8m0fnu).view(torch.uint8))


def test_nvfp4_scales_are_those_of_a_cast(device: str) -> None:
    x = torch.randn(64, 16, device=device) * 100
    x[0, 0] = 2688.0  # then the tensor's scale is 1
    scales = ops.quantize(x, "nvfp4")[1]
    want = (x.abs().amax(1) * torch.tensor(1 / 6, dtype=torch.float32)).to(torch.float8_e4m3fn)
    assert torch.equal(scales[:64, 0], want.view(torch.uint8))


# ------------------------------------------------------------------------------------ caches


def test_caches_of_texts_are_bounded() -> None:
    """Like the library's own. Functions without arguments cache one value."""
    modules = [module for name, module in sys.modules.items() if name.startswith("opaq.")]
    caches = {value for module in modules for value in vars(module).values() if hasattr(value, "cache_info")}
    taking = {c.__name__: c.cache_parameters()["maxsize"] for c in caches if inspect.signature(c).parameters}
    assert {"_parse", "forms", "buffer_rows"} <= set(taking) and None not in taking.values()
    for i in range(max(taking.values()) + 10):
        Quantizer(f"fp8blk1+eps=1e-{i % 30}{'+pow2' if i % 2 else ''}" if i < 60 else f"fp8blk1+eps={i}e-9")
    parse = next(c for c in caches if c.__name__ == "_parse")
    assert parse.cache_info().currsize <= taking["_parse"]
