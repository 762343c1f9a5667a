"""Prototypes against real tensors: names, dtypes, shapes and strides of TensorProto's results equal those of
quantized tensors and of C's prototypes, in every mode."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

import opaq
from compiling import fresh_compiler  # noqa: F401
from conftest import need
from torch_cases import DTYPES, EMPTY, FEW_QUANTIZERS, QUANTIZERS, SHAPES, given_for, make_tensor, quantized

torch = need("torch")

from opaq import Quantizer, TensorProto, to_tensor_proto  # noqa: E402

fake_tensor = need("torch._subclasses.fake_tensor")
symbolic_shapes = need("torch.fx.experimental.symbolic_shapes")
ConstantSource = need("torch._dynamo.source").ConstantSource

MODES = ("eager", "fake", "compiled", "dynamic")
Layout = list[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]


def layout_of(tensor: Any) -> Layout:
    """The layout of a quantized tensor, or of buffers by name. Strides of empty tensors are ignored."""
    if isinstance(tensor, dict):
        named = list(tensor.items())
    else:
        named = list(zip(tensor.buffer_names(), tensor.buffers(), strict=True))
    return [(n, b.dtype, tuple(b.shape), tuple(b.stride()) if b.numel() else ()) for n, b in named]


def layout_in_c(shape: tuple[int, ...], text: str) -> Layout:
    found: Layout = []
    for b in opaq.proto(shape, "bfloat16", Quantizer(text)):
        dtype = torch.uint8 if b.entry_bytes == 1 else torch.float32
        found.append((b.name, dtype, b.shape, b.strides if b.bytes else ()))
    return found


def create(x: Any, quantizer: Quantizer) -> tuple[Any, dict[str, Any]]:
    proto = TensorProto(x.shape, x.dtype, quantizer, device=x.device)
    return proto.create_tensor(), proto.create_inner_tensors()


def quantize(x: Any, quantizer: Quantizer, given: dict[str, Any]) -> Any:
    return opaq.quantize_tensor(x, quantizer, **given)


def check(made: Any, inner: dict[str, Any], real: Any, x: Any, text: str, what: str) -> None:
    want = layout_in_c(tuple(x.shape), text)
    assert layout_of(made) == layout_of(inner) == layout_of(real) == want, what
    for tensor in (made, real):
        assert type(tensor) is opaq.QuantizedTensor and str(tensor.quantizer) == text
        assert (tensor.shape, tensor.dtype, tensor.device) == (x.shape, x.dtype, x.device), what
        assert tensor.stride() == x.stride() or not x.numel()
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert all(buffer.device == x.device for buffer in tensor.buffers())


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        pytest.param(mode, text, marks=pytest.mark.slow)
        if mode in ("compiled", "dynamic") and text not in FEW_QUANTIZERS
        else (mode, text)
        for mode in MODES
        for text in QUANTIZERS
    ],
)
def test_prototypes_equal_quantized_tensors(mode: str, text: str, device: str) -> None:
    given, quantizer = given_for(text, device), Quantizer(text)
    shapes = SHAPES + EMPTY
    if mode == "compiled":
        shapes = [(5, 37), (2, 3, 32)]
    if mode == "dynamic":
        shapes = [
            (140, 33),
            (200, 34),
            (129, 260),
            (257, 130),
        ]  # all above one block of rows: see test_torch_compile
    functions = create, quantize
    if mode in ("compiled", "dynamic"):
        options = {"backend": "aot_eager", "fullgraph": True, "dynamic": mode == "dynamic"}
        functions = tuple(torch.compile(function, **options) for function in functions)
    for number, shape in enumerate(shapes):
        x = make_tensor(shape, device, list(DTYPES.values())[number % 3 if mode != "dynamic" else 0])
        if mode == "fake":
            with fake_tensor.FakeTensorMode() as fakes:
                x = fakes.from_tensor(x)
                given = {name: fakes.from_tensor(tensor) for name, tensor in given_for(text, device).items()}
                made, inner = functions[0](x, quantizer)
                real = functions[1](x, quantizer, given)
                assert all(isinstance(b, fake_tensor.FakeTensor) for b in made.buffers())
        else:
            made, inner = functions[0](x, quantizer)
            real = functions[1](x, quantizer, given)
        check(made, inner, real, x, text, f"{mode} {text} {shape}")


def hint_of(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


@pytest.mark.parametrize("text", QUANTIZERS)
def test_symbolic_sizes_stay_symbols(text: str) -> None:
    """In a FakeTensorMode with symbols: sizes are expressions, and their values equal C's."""
    dynamic = symbolic_shapes.DimDynamic.DYNAMIC
    context = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=[dynamic, dynamic])
    fakes = fake_tensor.FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv())
    x = fakes.from_tensor(torch.empty(140, 259), symbolic_context=context, source=ConstantSource("x"))
    given = {name: fakes.from_tensor(tensor) for name, tensor in given_for(text).items()}
    with fakes:
        made, real = create(x, Quantizer(text))[0], quantize(x, Quantizer(text), given)
        for tensor in (made, real):
            assert isinstance(tensor.shape[0], torch.SymInt)
            data = tensor.buffers()[0]
            assert all(isinstance(size, torch.SymInt) for size in data.shape)
            assert str(made.buffers()[0].shape) == str(data.shape)
            hinted = [tuple(hint_of(size) for size in buffer.shape) for buffer in tensor.buffers()]
            assert hinted == [row[2] for row in layout_in_c((140, 259), text)]


def test_plain_prototypes(device: str) -> None:
    for shape in (*SHAPES, *EMPTY, ()):
        for dtype in (*DTYPES.values(), torch.int32):
            proto = TensorProto(shape, dtype, device=device)
            assert not proto.is_quantized and proto.inner_names() == [] and proto.create_inner_tensors() == {}
            made = proto.create_tensor()
            assert type(made) is torch.Tensor
            assert (made.shape, made.dtype, made.device.type) == (shape, dtype, device)
            assert to_tensor_proto(made) == TensorProto(shape, dtype, device=made.device)
    assert TensorProto((2, 3), torch.float32).create_metadata() == {"dtype": torch.float32, "quantizer": None}
    with pytest.raises(ValueError, match="a plain tensor has no usages"):
        TensorProto((2, 3), torch.float32).update_usage(rowwise=True)


@pytest.mark.parametrize("text", QUANTIZERS)
def test_prototype_of_a_tensor_makes_it_again(text: str, device: str) -> None:
    for dtype in DTYPES.values():
        q = quantized(text, (5, 37), device, dtype)
        proto = to_tensor_proto(q)
        assert proto == TensorProto((5, 37), dtype, Quantizer(text), device=q.device)
        assert proto.is_quantized and proto.inner_names() == q.buffer_names()
        assert proto.create_metadata() == {"dtype": dtype, "quantizer": text}
        assert layout_of(proto.create_tensor()) == layout_of(q)
        names, context = q.__tensor_flatten__()
        assert (names, context) == (proto.inner_names(), (text, dtype))


def test_another_usage_is_another_prototype(device: str) -> None:
    quantizer = Quantizer("nvfp4")
    first = TensorProto((5, 37), torch.float32, quantizer, True, device)
    second = first.update_usage(columnwise=True)
    assert (str(quantizer), str(first.quantizer), str(second.quantizer)) == ("nvfp4", "nvfp4", "nvfp4+both")
    assert second == TensorProto((5, 37), torch.float32, Quantizer("nvfp4+both"), True, device) != first
    assert layout_of(second.create_tensor()) == layout_in_c((5, 37), "nvfp4+both")
    third = second.update_usage(rowwise=False)
    assert layout_of(third.create_tensor()) == layout_in_c((5, 37), "nvfp4+columnwise")
    assert third.update_usage() == third
    with pytest.raises(opaq.OpaqError, match="usage is 0"):
        third.update_usage(columnwise=False)


def test_another_usage_in_a_compiled_function(device: str) -> None:
    def both(q: Any) -> tuple[Any, int]:
        proto = to_tensor_proto(q).update_usage(columnwise=True)
        return proto.create_tensor(), len(proto.inner_names())

    made, count = torch.compile(both, backend="aot_eager", fullgraph=True)(quantized("nvfp4", (5, 37), device))
    assert layout_of(made) == layout_in_c((5, 37), "nvfp4+both") and count == len(made.buffer_names())


def test_requires_grad(device: str) -> None:
    for quantizer in (None, Quantizer("mxfp8"), Quantizer("fp8+both")):
        for wanted in (True, False):
            proto = TensorProto((32, 64), torch.float32, quantizer, requires_grad=wanted, device=device)
            made = proto.create_tensor()
            assert made.requires_grad is wanted and made.is_leaf
            assert to_tensor_proto(made).requires_grad is wanted
            assert ("requires_grad" in repr(proto)) is wanted
    made = TensorProto((32, 64), torch.float32, Quantizer("mxfp8"), True, device).create_tensor()
    made.dequantize().sum().backward()
    assert torch.equal(made.grad, torch.ones(32, 64, device=device))


def test_prototypes_are_values_that_can_be_printed(device: str) -> None:
    assert opaq.TensorSpec is TensorProto
    proto = TensorProto([5, 37], torch.bfloat16, Quantizer("fp8"), device="cpu")
    assert repr(proto) == "TensorProto((5, 37), torch.bfloat16, Quantizer('fp8'), device='cpu')"
    others = [
        TensorProto((5, 38), torch.bfloat16, Quantizer("fp8")),
        TensorProto((5, 37), torch.float16, Quantizer("fp8")),
        TensorProto((5, 37), torch.bfloat16, Quantizer("fp8row")),
        TensorProto((5, 37), torch.bfloat16),
        TensorProto((5, 37), torch.bfloat16, Quantizer("fp8"), requires_grad=True),
        TensorProto((5, 37), torch.bfloat16, Quantizer("fp8"), device="meta"),
    ]
    assert proto == TensorProto((5, 37), torch.bfloat16, Quantizer("fp8")) and proto not in others
    assert len({proto, *others, proto.replace(), pickle.loads(pickle.dumps(proto)), copy.deepcopy(proto)}) == 7
    assert hash(proto) == hash(TensorProto([5, 37], torch.bfloat16, Quantizer("fp8"), False, "cpu"))
    for name, value in (("shape", (5, 37)), ("quantizer", None), ("other", 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(proto, name, value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del proto.dtype


def test_replace_gives_a_checked_copy() -> None:
    proto = TensorProto((5, 37), torch.bfloat16, Quantizer("fp8"), device="meta")
    for other in (proto.replace(shape=(6, 37)), dataclasses.replace(proto, shape=(6, 37))):
        assert other == TensorProto((6, 37), torch.bfloat16, Quantizer("fp8"), device="meta")
        assert type(other.shape) is torch.Size
    assert proto.shape == (5, 37)
    with pytest.raises(TypeError, match="expected an opaq.Quantizer"):
        dataclasses.replace(proto, quantizer=8)
    with pytest.raises(TypeError, match="strides"):
        dataclasses.replace(proto, strides=(1, 5))


def test_prototypes_on_meta() -> None:
    for text in QUANTIZERS:
        made = TensorProto((5, 37), torch.float32, Quantizer(text), device="meta").create_tensor()
        assert made.is_meta and all(buffer.is_meta for buffer in made.buffers())
        assert layout_of(made) == layout_in_c((5, 37), text)
