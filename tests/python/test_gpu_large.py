"""Tensors with more elements than a 32-bit integer counts, on a GPU. On the CPU the same tests run with small
tensors; what would be too slow there is skipped."""

from __future__ import annotations

import pytest

from conftest import need
from test_gpu import BF16, near, need_gpu, numbers, ops
from torch_cases import quantized, same_bytes

torch = need("torch")


def test_more_elements_than_a_32_bit_integer_counts(device: str) -> None:
    rows, columns = 96, 256
    if device == "cuda":
        need_gpu(device, 40 << 30)
        rows, columns = 2**16 + 96, 2**15
    x = torch.empty(rows, columns, dtype=BF16, device=device)
    for begin in range(0, rows, 4096):
        x[begin : begin + 4096] = numbers((1, columns), begin, device, BF16)
    last = slice(rows - 32, rows)
    x[last] = numbers((32, columns), 40, device, BF16)
    x[rows - 1, columns - 1] = 1000.0  # the largest of the tensor
    for text in ("fp8", "fp8row", "mxfp8", "nvfp4+rowscaled", "mxfp8+columnwise", "mxfp4+columnwise"):
        q = ops.quantize(x, text)
        y = ops.dequantize(q, text, [rows, columns], BF16)
        if text == "fp8":
            assert near(q[1], torch.tensor([1000.0 / 448.0]), 1e-6)
            assert near(y[last], x[last], 0.06) and near(y[:32], x[:32], 0.06)
        else:
            part = ops.dequantize(ops.quantize(x[last].clone(), text), text, [32, columns], BF16)
            assert same_bytes(y[last], part), text
            rows_of = ops.slice_rows(q, text, [rows, columns], [32, columns], BF16, rows - 32)
            assert same_bytes(ops.dequantize(rows_of, text, [32, columns], BF16), part), text
        del q, y


@pytest.mark.parametrize("plan", ["", "x=mxfp8 w=mxfp8", "w_given=nvfp4"])
def test_a_product_with_more_elements_than_a_32_bit_integer_counts(plan: str, device: str) -> None:
    rows, columns, terms = 130, 72, 32
    if device == "cuda":
        need_gpu(device, 12 << 30)
        rows, columns = 2**16 + 72, 2**15 + 8
    x, w = numbers((rows, terms), 41, device, BF16), numbers((columns, terms), 42, device, BF16)
    weight = quantized("nvfp4", w.shape, device, BF16).buffers() if "given" in plan else [w]
    y = ops.linear(x, weight, None, w.shape, plan)
    assert y.shape == (rows, columns) and (device == "cpu" or y.numel() > 2**31)
    for part in (slice(0, 40), slice(rows - 40, rows)):
        assert same_bytes(y[part], ops.linear(x[part].clone(), weight, None, w.shape, plan))
    if not plan:
        assert near(y[-40:], x[-40:].double() @ w.double().T, 4e-3)


def test_rows_longer_than_a_32_bit_integer_counts(device: str) -> None:
    """The same values as one row and as many rows have the same codes: the kernels for parts count the columns
    of a row in 32 bits and leave longer rows to others."""
    need_gpu(device, 24 << 30)
    count = 2**32 + 2**16
    x = torch.randn(count, dtype=BF16, device=device)
    rows = ops.quantize(x.view(-1, 65536), "fp8")
    alone = ops.quantize(x.view(1, count), "fp8")
    assert torch.equal(alone[0].view(-1), rows[0].view(-1)) and same_bytes(alone[1], rows[1])
    del rows, alone
    half = x[: 2**31 + 2**16]
    rows, alone = ops.quantize(half.view(-1, 65536), "fp8"), ops.quantize(half.view(1, -1), "fp8row")
    assert torch.equal(alone[0].view(-1), rows[0].view(-1)) and same_bytes(alone[1].view(-1), rows[1].view(-1))
