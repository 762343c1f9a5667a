"""QuantizedTensor: its contents, supported operations, and errors."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import opaq
from conftest import need, slow_but
from torch_cases import (
    DTYPES,
    EMPTY,
    FORMATS,
    QUANTIZERS,
    SHAPES,
    make_tensor,
    quantized,
    same_buffers,
    same_bytes,
)

torch = need("torch")

from opaq import QuantizedTensor, Quantizer, quantize_tensor  # noqa: E402


def same(first: Any, second: Any) -> bool:
    """Equal in all attributes and bytes; may share memory."""
    alike = (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
    alike &= type(first) is type(second) is QuantizedTensor and first.quantizer == second.quantizer
    return bool(alike and same_buffers(first.buffers(), second.buffers()))


def shares_memory(first: Any, second: Any) -> bool:
    pairs = zip(first.buffers(), second.buffers(), strict=True)
    return all(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in pairs)


class Holder(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, q: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(q)
        self.bias = torch.nn.Parameter(torch.zeros(q.shape[0], device=q.device))


# ---------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("text", QUANTIZERS)
def test_flatten_round_trip(text: str, device: str) -> None:
    for shape in (*SHAPES, *EMPTY):
        for dtype in DTYPES.values():
            q = quantized(text, shape, device, dtype)
            names, context = q.__tensor_flatten__()
            inner = {name: getattr(q, name) for name in names}
            again = QuantizedTensor.__tensor_unflatten__(inner, context, q.size(), q.stride())
            assert same(q, again) and shares_memory(q, again)
            assert names == [b.name for b in opaq.proto(shape, "float32", Quantizer(text))]
            hash(context)


def test_it_looks_like_a_tensor(device: str) -> None:
    q = quantized("nvfp4+both", (2, 3, 48), device, torch.bfloat16)
    assert (q.shape, q.dtype, q.dim(), q.numel(), q.stride()) == (
        (2, 3, 48),
        torch.bfloat16,
        3,
        288,
        (144, 48, 1),
    )
    assert q.device.type == device and q.is_contiguous() and not q.requires_grad
    assert q.quantizer == Quantizer("nvfp4+both")
    want = f"QuantizedTensor((2, 3, 48), torch.bfloat16, Quantizer('nvfp4+both'), device='{q.device}')"
    assert repr(q) == str(q) == f"{q}" == want
    assert "Quantizer('nvfp4+both')" in repr(torch.nn.Parameter(q))
    assert "Quantizer('mxfp8')" in repr({"w": quantized("mxfp8", (4, 32), device)})


def test_any_text_of_a_quantizer_makes_the_same_tensor(device: str) -> None:
    x = make_tensor((16, 48), device)
    for text in ("nvfp4+2d+both", "nvfp4+both+2d", Quantizer("nvfp4+both+2d")):
        q = quantize_tensor(x, text)
        assert str(q.quantizer) == "nvfp4+both+2d" and q.__tensor_flatten__()[1][0] == "nvfp4+both+2d"
        assert same(q, quantize_tensor(x, "nvfp4+both+2d"))


# ---------------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_to_every_dtype(name: str, device: str) -> None:
    for source in DTYPES.values():
        q = quantized(name, (24, 96), device, source)
        exact = q.dequantize(torch.float32)
        assert type(exact) is torch.Tensor and q.dequantize().dtype == source
        for target in DTYPES.values():
            assert same_bytes(q.dequantize(target), exact.to(target))
        with pytest.raises(ValueError, match="opaq.QuantizedTensor.dequantize: .*dtype"):
            q.dequantize(torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_pass_straight_through(dtype: str, device: str) -> None:
    x = make_tensor((24, 96), device, DTYPES[dtype]).clone().requires_grad_()
    weights = torch.randn(24, 96, device=device)
    q = quantize_tensor(x, "nvfp4")
    assert q.requires_grad and q.grad_fn is not None
    (q.dequantize(torch.float32) * weights).sum().backward()
    assert same_bytes(x.grad, weights.to(DTYPES[dtype]))


def test_gradients_pass_through_views(device: str) -> None:
    weights = torch.randn(64, 96, device=device)
    rearranges: list[Callable[[Any], Any]] = [
        lambda q: q.update_usage(columnwise=True),
        lambda q: q.clone(),
        lambda q: q.view(2, 32, 96).view(64, 96),
        lambda q: q.to(torch.bfloat16),
    ]
    for does in rearranges:
        x = make_tensor((64, 96), device).clone().requires_grad_()
        made = does(quantize_tensor(x, "fp8"))
        assert isinstance(made, QuantizedTensor)
        (made.dequantize(torch.float32) * weights).sum().backward()
        torch.testing.assert_close(x.grad, weights, rtol=1e-2, atol=1e-2)
    x = make_tensor((64, 96), device).clone().requires_grad_()
    (quantize_tensor(x, "fp8")[32:].dequantize() * weights[32:]).sum().backward()
    assert torch.equal(x.grad[32:], weights[32:]) and not x.grad[:32].any()


# --------------------------------------------------------------------- detach, clone, to, copy, save


@pytest.mark.parametrize("text", QUANTIZERS)
def test_copies(text: str, device: str) -> None:
    q = quantized(text, (40, 130), device)
    for made in (q.detach(), q[:], q.view(q.shape), q.contiguous(), q.to(q.dtype)):
        assert same(q, made) and shares_memory(q, made)
    for made in (q.clone(), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.to(q.dtype, copy=True)):
        assert same(q, made) and not shares_memory(q, made)
    file = io.BytesIO()
    torch.save({"q": q, "quantizer": q.quantizer}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(q, loaded["q"]) and loaded["quantizer"] == Quantizer(text)


def test_another_dtype_changes_only_the_nominal_dtype(device: str) -> None:
    q = quantized("mxfp8+both", (24, 96), device)
    for dtype in DTYPES.values():
        made = q.to(dtype)
        assert type(made) is QuantizedTensor and made.dtype == dtype
        assert same_buffers(made.buffers(), q.buffers()) and made.dequantize().dtype == dtype
    assert same(q.bfloat16().float(), q)
    for dtype in (torch.float64, torch.int32):  # not valid as nominal dtypes
        made = q.to(dtype)
        assert type(made) is torch.Tensor and torch.equal(made, q.dequantize().to(dtype))


def test_to_a_device(device: str) -> None:
    q = quantized("nvfp4+both", (24, 96), device)
    made = q.to("meta")
    assert made.is_meta and all(buffer.is_meta for buffer in made.buffers())
    assert (made.shape, made.dtype, made.quantizer) == (q.shape, q.dtype, q.quantizer)
    assert made.dequantize().is_meta and made.dequantize().shape == q.shape
    assert same(q.cpu().to(device), q) and same(q.to(device), q)
    both = q.to("meta", torch.bfloat16)
    assert both.is_meta and both.dtype == torch.bfloat16


def test_copy(device: str) -> None:
    x, y = make_tensor((40, 130), device), make_tensor((40, 130), device) * 3
    for text in ("fp8+both", "mxfp8", "nvfp4+both"):
        q, other = quantize_tensor(x, text), quantize_tensor(y, text)
        assert q.copy_(other) is q and same(q, other) and not shares_memory(q, other)
        assert same(q.copy_(x), quantize_tensor(x, text))  # copying a plain tensor quantizes it
        assert same(q.copy_(y.to(torch.bfloat16)), quantize_tensor(y.to(torch.bfloat16).float(), text))
        plain = torch.empty(40, 130, device=device, dtype=torch.bfloat16)
        assert same_bytes(plain.copy_(other), other.dequantize().to(torch.bfloat16))
        assert type(plain) is torch.Tensor
    for wrong in (quantize_tensor(y, "mxfp4"), quantize_tensor(y[:32], "nvfp4+both")):
        with pytest.raises(NotImplementedError, match="opaq: .* cannot be copied into"):
            q.copy_(wrong)


# ----------------------------------------------------------------------------------- views and slices


@pytest.mark.parametrize("text", QUANTIZERS)
def test_views_keep_the_last_dimension(text: str, device: str) -> None:
    q = quantized(text, (2, 3, 32), device)
    for size in ((6, 32), (-1, 32), (3, 2, 32), (1, 6, 1, 32), (2, 3, 32)):
        made = q.view(size)
        assert type(made) is QuantizedTensor and made.shape == torch.empty(2, 3, 32).view(size).shape
        assert shares_memory(made, q)
        assert same_bytes(made.dequantize(), q.dequantize().view(size))
        assert [tuple(b.shape) for b in made.buffers()] == [
            b.shape for b in opaq.proto(tuple(made.shape), "float32", Quantizer(text))
        ]
    assert same(q.reshape(6, 32), q.view(6, 32)) and same(q.flatten(0, 1), q.view(6, 32))
    for size in ((3, 64), (2, 96), (6, 4, 8)):
        with pytest.raises(
            NotImplementedError, match=r"opaq: \(2, 3, 32\) cannot be viewed as .* last dimension"
        ):
            q.view(size)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        q.view(5, 32)


def rows_of_a_block(text: str) -> int:
    """The number of rows that share a scale in the tensor's copies. A scale of the whole tensor does not
    count."""
    quantizer = Quantizer(text)
    mx = quantizer.format.startswith("mx")
    square = "2d" in quantizer.options or quantizer.format == "fp8blk2"
    size = {"fp8": 1, "fp8row": 1, "fp8blk1": 128, "fp8blk2": 128}.get(quantizer.format, 32 if mx else 16)
    return size if square or quantizer.usage != "rowwise" else 1


@pytest.mark.parametrize("text", QUANTIZERS)
def test_rows_can_be_cut_between_blocks(text: str, device: str) -> None:
    q, block = quantized(text, (300, 48), device), rows_of_a_block(text)
    whole = q.dequantize()
    for first, last in (
        (0, 128),
        (128, 256),
        (256, 300),
        (128, 300),
        (32, 64),
        (16, 48),
        (5, 17),
        (0, 300),
        (7, 7),
    ):
        if first % block or (last % block and last != 300):
            with pytest.raises(
                ValueError, match=f"opaq.QuantizedTensor: .* can be cut at multiples of {block} rows"
            ):
                q[first:last]
            continue
        part = q[first:last]
        assert type(part) is QuantizedTensor and part.shape == (last - first, 48)
        assert same_bytes(part.dequantize(), whole[first:last]), (first, last)


def test_slices_of_higher_ranks_and_pieces(device: str) -> None:
    q = quantized("mxfp8+both", (4, 32, 48), device)
    whole = q.dequantize()
    assert same_bytes(q[1:3].dequantize(), whole[1:3])
    assert same_bytes(q.narrow(0, 2, 2).dequantize(), whole[2:])
    for pieces, plain in ((q.chunk(2), whole.chunk(2)), (q.split(3), whole.split(3))):
        assert len(pieces) == len(plain)
        for piece, values in zip(pieces, plain, strict=True):
            assert type(piece) is QuantizedTensor and same_bytes(piece.dequantize(), values)
    assert same_bytes(q[-1:].dequantize(), whole[-1:]) and q[4:].shape == (0, 32, 48)


def test_unsupported_slices(device: str) -> None:
    q = quantized("mxfp8", (64, 48), device)
    for index in ((slice(None), slice(0, 32)), slice(0, 64, 2), (Ellipsis, slice(1, 2))):
        with pytest.raises(
            NotImplementedError, match="opaq: .* sliced along its first dimension, without a step"
        ):
            q[index]
    with pytest.raises(
        ValueError, match="opaq.QuantizedTensor: .* cut a block in two; .* multiples of 32 rows"
    ):
        quantized("mxfp8+both", (64, 48), device)[16:]


def test_writing_to_a_slice_is_an_error(device: str) -> None:
    q, other = quantized("mxfp8", (64, 48), device), quantized("mxfp8", (32, 48), device)
    for part in (q[:32], q.narrow(0, 32, 32), q.split(32)[1], q[:32].detach()):
        with pytest.raises(NotImplementedError, match="opaq: .* is a slice of another tensor"):
            part.copy_(other)
    assert same(q[:32].clone().copy_(other), other)
    assert same(q[:].copy_(quantized("mxfp8", (64, 48), device)), q)  # the full slice is the tensor itself


def test_the_flat_view_that_fsdp_keeps_has_no_values(device: str) -> None:
    for text in QUANTIZERS:
        flat = quantized(text, (4, 32), device).view(-1)
        assert flat.shape == (128,)
        with pytest.raises(NotImplementedError, match="opaq: .* flattened"):
            flat.dequantize()
    row = quantized("mxfp8", (1, 64), device)
    assert torch.equal(row.view(64).dequantize(), row.dequantize()[0])


def test_reading_operations_are_allowed(device: str) -> None:
    q = quantized("mxfp8", (4, 32), device)
    assert torch.equal(torch.zeros(4, 32, device=device).add_(q), q.dequantize().float())
    out = torch.empty(4, 32, device=device)
    torch.add(q, q, out=out)
    assert torch.equal(out, q.dequantize().float() * 2)


def test_equality_is_of_bytes(device: str) -> None:
    x = make_tensor((4, 32), device)
    x[0, 0] = torch.nan
    q = quantize_tensor(x, "fp8row+rule=modelopt")  # a NaN scale
    assert torch.equal(q, q) and torch.equal(q, q.clone())


@pytest.mark.parametrize("imports", slow_but(("torch, opaq", "opaq, torch"), "torch, opaq"))
def test_saved_tensors_load_in_a_new_process(imports: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "q.pt"
    torch.save(quantized("nvfp4", (4, 32), device), path)
    code = f"import {imports}; print(torch.load({str(path)!r}, weights_only=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("QuantizedTensor((4, 32)"), done.stderr


def test_slices_do_not_recompile(device: str) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def rows(x: torch.Tensor) -> torch.Tensor:
        return quantize_tensor(x, "mxfp8")[8:40].dequantize()

    x = make_tensor((64, 160), device).clone()  # different sizes: equal ones would become one symbol
    torch._dynamo.mark_dynamic(x, 0)
    rows(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (96, 128, 70):
            x = make_tensor((count, 160), device).clone()
            assert torch.equal(rows(x), quantize_tensor(x, "mxfp8").dequantize()[8:40])


# ---------------------------------------------------------------------------------------- update_usage

DERIVABLE = ("fp8", "fp8.e5m2+pow2", "fp8blk2", "mxfp8+2d", "mxfp4+2d", "nvfp4+2d", "mxfp8+2d+swizzle")
NOT_DERIVABLE = ("fp8row", "fp8blk1", "mxfp8", "mxfp4", "nvfp4", "nvfp4+rht", "nvfp4+rowscaled")


@pytest.mark.parametrize("text", DERIVABLE)
def test_the_other_copy_can_be_computed_with_square_blocks(text: str, device: str) -> None:
    x = make_tensor((40, 130), device)
    rowwise, columnwise, both = (
        quantize_tensor(x, Quantizer(text).with_usage(*usage))
        for usage in ((True, False), (False, True), (True, True))
    )
    assert same(rowwise.update_usage(columnwise=True), both)
    assert same(columnwise.update_usage(rowwise=True), both)
    assert same(rowwise.update_usage(rowwise=False, columnwise=True), columnwise)
    assert same(columnwise.update_usage(rowwise=True, columnwise=False), rowwise)


@pytest.mark.parametrize("text", NOT_DERIVABLE)
def test_the_other_copy_cannot_be_computed_otherwise(text: str, device: str) -> None:
    x = make_tensor((40, 130), device)
    rowwise, columnwise, both = (
        quantize_tensor(x, Quantizer(text).with_usage(*usage))
        for usage in ((True, False), (False, True), (True, True))
    )
    for q, usage, missing in (
        (rowwise, {"columnwise": True}, "columnwise"),
        (columnwise, {"rowwise": True}, "rowwise"),
    ):
        with pytest.raises(
            ValueError,
            match=f"opaq.QuantizedTensor.update_usage: .* has no {missing} copy, and one cannot be made",
        ):
            q.update_usage(**usage)
    assert same(both.update_usage(columnwise=False), rowwise)
    assert same(both.update_usage(rowwise=False), columnwise)


def test_update_usage_without_a_change_and_to_nothing(device: str) -> None:
    q = quantized("nvfp4+both", (40, 130), device)
    assert q.update_usage() is q and q.update_usage(True, True) is q
    with pytest.raises(opaq.OpaqError, match="usage is 0"):
        q.update_usage(False, False)


# ---------------------------------------------------------------------------------------- in a module


def test_parameters(device: str) -> None:
    p = torch.nn.Parameter(quantized("mxfp8+both", (32, 64), device))
    assert (
        isinstance(p, torch.nn.Parameter) and isinstance(p, QuantizedTensor) and p.requires_grad and p.is_leaf
    )
    torch.nn.functional.linear(torch.ones(3, 64, device=device), p).sum().backward()
    assert torch.equal(p.grad, torch.full((32, 64), 3.0, device=device))
    again = copy.deepcopy(p)
    assert isinstance(again, torch.nn.Parameter) and again.requires_grad and same(again.detach(), p.detach())
    frozen = torch.nn.Parameter(p.detach(), requires_grad=False)
    assert not frozen.requires_grad


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("text", ["fp8+both", "fp8blk1", "mxfp8+both+swizzle", "mxfp4", "nvfp4+both"])
def test_state_dict(text: str, assign: bool, device: str) -> None:
    source = Holder(quantized(text, (32, 64), device))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    target = Holder(opaq.TensorProto((32, 64), torch.float32, Quantizer(text), device=device).create_tensor())
    target.weight.detach().copy_(torch.zeros(32, 64, device=device))
    result = target.load_state_dict(state, strict=True, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert isinstance(target.weight, torch.nn.Parameter) and target.weight.requires_grad
    assert same(target.weight.detach(), source.weight.detach())
    assert not shares_memory(target.weight, source.weight)


def test_state_dict_into_meta_and_from_plain(device: str) -> None:
    source = Holder(quantized("nvfp4", (32, 64), device))
    target = Holder(source.weight.detach().to("meta"))
    target.load_state_dict(source.state_dict(), assign=True)
    assert same(target.weight.detach(), source.weight.detach())
    x = make_tensor((32, 64), device)
    target.load_state_dict({"weight": x, "bias": torch.zeros(32)})  # loading a plain checkpoint quantizes it
    assert same(target.weight.detach(), quantize_tensor(x, "nvfp4"))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        target.load_state_dict({"weight": x[:16], "bias": torch.zeros(32)})


def test_a_module_moves_and_changes_dtype(device: str) -> None:
    module = Holder(quantized("nvfp4", (32, 64), device))
    want = [buffer.clone() for buffer in module.weight.buffers()]
    module.to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16 and same_buffers(module.weight.buffers(), want)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.to("meta").weight.is_meta
    assert module.to_empty(device=device).weight.device.type == device


# ---------------------------------------------------------------------------------------- other operators


def test_equal(device: str) -> None:
    x = make_tensor((24, 96), device)
    q = quantize_tensor(x, "mxfp8")
    assert torch.equal(q, quantize_tensor(x, "mxfp8")) and torch.equal(q, q.clone())
    assert not torch.equal(q, quantize_tensor(x * 2, "mxfp8"))
    assert not torch.equal(q, quantize_tensor(x, "mxfp8+both"))
    assert not torch.equal(q, quantize_tensor(x[:16], "mxfp8"))
    assert torch.equal(q, q.dequantize()) and torch.equal(q.dequantize(), q)


def test_other_operators_see_the_values(device: str) -> None:
    q = quantized("nvfp4", (24, 96), device)
    values, other = q.dequantize(), torch.randn(24, 96, device=device)
    functions: list[Callable[[Any], Any]] = [
        lambda t: t + 1,
        lambda t: other * t,
        lambda t: t @ other.t(),
        lambda t: torch.nn.functional.linear(other, t),
        lambda t: t.t(),
        lambda t: t[3],
        lambda t: t[torch.tensor([1, 2], device=device)],
        lambda t: t.sum(),
        lambda t: t.double(),
        lambda t: torch.cat([t, other]),
        lambda t: torch.ones_like(t),
        lambda t: t.unsqueeze(0),
        lambda t: t.new_zeros(()),
        lambda t: torch.zeros_like(t, dtype=torch.int64),
        lambda t: torch.isfinite(t),
    ]
    for does in functions:
        got, want = does(q), does(values)
        assert type(got) is torch.Tensor and got.dtype == want.dtype and torch.equal(got, want)


def test_zeros_of_the_same_kind(device: str) -> None:
    for text in QUANTIZERS:
        q = quantized(text, (40, 48), device)
        for made in (torch.zeros_like(q), q.new_zeros((64, 32)), torch.empty_like(q, dtype=torch.bfloat16)):
            assert type(made) is QuantizedTensor and made.quantizer == q.quantizer
        assert not q.new_zeros((64, 32)).dequantize().any() and torch.zeros_like(q).shape == q.shape


def test_in_place_operations_are_an_error(device: str) -> None:
    q = quantized("fp8", (24, 96), device)
    before = q.clone()
    other = torch.ones(24, 96, device=device)
    changes: list[Callable[[], Any]] = [
        lambda: q.add_(1),
        lambda: q.mul_(other),
        lambda: q.zero_(),
        lambda: q.fill_(2.0),
        lambda: torch.add(other, other, out=q),
        lambda: q.__setitem__(0, 1.0),
        lambda: q.__setitem__(slice(0, 2), other[:2]),
        lambda: torch.nn.init.normal_(q),
        lambda: q.clamp_(0, 1),
    ]
    for does in changes:
        with pytest.raises(NotImplementedError, match="opaq: .*values cannot be changed; dequantize it first"):
            does()
    assert same(q, before)
