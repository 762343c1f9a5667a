"""The operator linear: the same bits as linear_forward, with a quantized weight or one that it quantizes."""

from __future__ import annotations

from typing import Any

import pytest

from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need
from linear_reference import values
from torch_cases import DTYPES, FORMATS, same_bytes

torch = need("torch")

from opaq._operators import ops  # noqa: E402

ROWS, COLUMNS, OUT = 9, 72, 40
WEIGHTS = ("", *FORMATS, "nvfp4+rowscaled", "nvfp4+2d", "mxfp8+swizzle", "mxfp4+rule=modelopt", "fp8.e5m2")
INPUTS = ("", *FORMATS, "nvfp4+rowscaled", "fp8+pow2")


def operands(dtype: Any = torch.bfloat16, device: str = "cpu") -> tuple[Any, Any, Any]:
    x, w = values((ROWS, COLUMNS), 1, device, dtype), values((OUT, COLUMNS), 2, device, dtype)
    return x, w, values((OUT,), 3, device, dtype)


def through_forward(x: Any, w: Any, bias: Any, x_text: str, w_text: str, **more: Any) -> Any:
    plan = f"{f'x={x_text}' if x_text else ''} {f'w={w_text}' if w_text else ''}".strip()
    return ops.linear_forward([x], [w], bias, x.shape, w.shape, x.dtype, plan, **more)[0]


@pytest.mark.parametrize("x_text", INPUTS)
@pytest.mark.parametrize("w_text", WEIGHTS)
def test_the_bits_of_the_layer(w_text: str, x_text: str, device: str) -> None:
    for dtype in DTYPES.values():
        x, w, bias = operands(dtype, device)
        want = through_forward(x, w, bias, x_text, w_text)
        start = f"x={x_text} " if x_text else ""
        given = ops.quantize(w, w_text) if w_text else [w]
        plan = start + (f"w_given={w_text}" if w_text else "")
        assert same_bytes(ops.linear(x, given, bias, w.shape, plan.strip()), want)
        if w_text:
            assert same_bytes(ops.linear(x, [w], bias, w.shape, f"{start}w={w_text}"), want)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0,), (2, 1, 4)], ids=str)
def test_leading_sizes(leading: tuple[int, ...], device: str) -> None:
    _, w, bias = operands(device=device)
    x = values((*leading, COLUMNS), 5, device, torch.bfloat16)
    got = ops.linear(x, ops.quantize(w, "nvfp4"), bias, w.shape, "x=mxfp8 w_given=nvfp4")
    assert got.shape == (*leading, OUT)
    assert same_bytes(got, through_forward(x, w, bias, "mxfp8", "nvfp4"))


def test_given_scales(device: str) -> None:
    """The scale of fp8+delayed, the amax of nvfp4."""
    x, w, bias = operands(device=device)
    given, scale = ops.quantize(w, "mxfp8"), torch.tensor([40.0], device=device)
    for text, key in (("fp8+delayed", "scale"), ("nvfp4", "amax_rowwise")):
        kept = ops.dequantize(ops.quantize(x, text, **{key: scale}), text, x.shape, torch.float32)
        back = ops.dequantize(given, "mxfp8", w.shape, torch.float32)
        want = ops.linear(kept, [back], bias.float(), w.shape, "").bfloat16()
        got = ops.linear(x, given, bias, w.shape, f"x={text} w_given=mxfp8", scale)
        if device == "cpu":
            assert same_bytes(got, want)
        else:  # float32 operands are not multiplied on tensor cores, so their sums have another order
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-12)


def test_opcheck(device: str) -> None:
    x, w, bias = operands(device=device)
    scale = torch.tensor([2.0], device=device)
    for arguments in (
        (x, [w], None, w.shape, ""),
        (x[None], ops.quantize(w, "nvfp4"), bias, w.shape, "x=nvfp4 w_given=nvfp4"),
        (x, [w], bias, w.shape, "x=fp8+delayed w=fp8row", scale),
    ):
        torch.library.opcheck(ops.linear.default, arguments)


def test_compiled_with_any_number_of_rows(device: str) -> None:
    _, w, bias = operands(device=device)
    given = ops.quantize(w, "nvfp4")

    def run(x: Any) -> Any:
        return ops.linear(x, given, bias, w.shape, "x=mxfp8 w_given=nvfp4")

    function = compiled(run, dynamic=True)
    for turn, rows in enumerate((5, 2, 64, 129, 300)):
        x = values((rows, COLUMNS), rows, device, torch.bfloat16)
        with torch.compiler.set_stance("default") if turn == 0 else fail_on_recompile():
            assert same_bytes(function(x), run(x))


def wrong_calls() -> dict[str, tuple[tuple[Any, ...], str]]:
    x, w, bias = operands()
    nvfp4 = ops.quantize(w, "nvfp4")
    return {
        "features": ((x[:, 1:], [w], bias, w.shape, ""), "71.*72|72.*71"),
        "bias": ((x, [w], bias[1:], w.shape, ""), "bias.*39"),
        "bias dtype": ((x, [w], bias.double(), w.shape, ""), "bias"),
        "dtype": ((x, [w.half()], bias, w.shape, ""), "f16"),
        "integers": ((x.long(), [w], bias, w.shape, ""), "int64"),
        "shape": ((x, [w], bias, [39, 72], ""), "39"),
        "rank": ((x, [w], bias, [40 * 72], ""), "w"),
        "buffers": ((x, nvfp4[:2], bias, w.shape, "w_given=nvfp4"), "2.*3|3.*2"),
        "no buffers": ((x, [], bias, w.shape, "w_given=nvfp4"), "0"),
        "too many": ((x, [w, w], bias, w.shape, ""), "2"),
        "other format": ((x, nvfp4, bias, w.shape, "w_given=mxfp8"), ""),
        "a word of linear_forward": ((x, [w], bias, w.shape, "y=mxfp8"), "words beside x="),
        "unknown": ((x, [w], bias, w.shape, "quick"), "quick"),
        "spec": ((x, [w], bias, w.shape, "x=nvfp5"), "nvfp5"),
        "twice": ((x, [w], bias, w.shape, "x=mxfp8 x=mxfp8"), "x"),
        "both": ((x, nvfp4, bias, w.shape, "w=nvfp4 w_given=nvfp4"), "w"),
        "no scale": ((x, [w], bias, w.shape, "x=fp8+delayed"), "scale"),
        "scale of two": ((x, [w], bias, w.shape, "x=fp8+delayed", torch.ones(2)), "2"),
        "scale dtype": ((x, [w], bias, w.shape, "x=fp8+delayed", torch.ones(1).double()), "scale"),
        "a scale for none": ((x, [w], bias, w.shape, "", torch.ones(1)), "scale"),
    }


@pytest.mark.parametrize("what", wrong_calls())
def test_refused(what: str) -> None:
    arguments, text = wrong_calls()[what]
    with pytest.raises(RuntimeError, match=f"^opaq: .*linear: .*({text})"):
        ops.linear(*arguments)
