"""QuantizedLinear: a weight that stays packed through computing, saving, copying, moving and casting."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need
from torch_cases import FORMATS, same_buffers, same_bytes

torch = need("torch")
nn = torch.nn
BF16 = torch.bfloat16


def linear_of(features: tuple[int, int] = (72, 40), bias: bool = True, device: str = "cpu") -> Any:
    torch.manual_seed(features[0])
    made = nn.Linear(*features, bias=bias, dtype=BF16, device=device)
    return made.requires_grad_(False)


def input_of(device: str = "cpu", features: int = 72) -> Any:
    return torch.randn(3, 5, features, generator=torch.Generator().manual_seed(7)).to(device, BF16)


def close(y: Any, want: Any) -> bool:
    return torch.allclose(y.float(), want.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("text", FORMATS)
def test_computes_with_the_dequantized_weight(text: str, device: str) -> None:
    plain = linear_of(device=device)
    layer = opaq.QuantizedLinear.from_linear(plain, text)
    x = input_of(device)
    assert layer.quantizer == text and layer.weight.dtype == BF16 and not layer.weight.requires_grad
    assert same_buffers(layer.weight.buffers(), opaq.quantize_tensor(plain.weight, text).buffers())
    want = nn.functional.linear(x, layer.weight.dequantize(), plain.bias)
    y = layer(x)
    assert y.shape == (3, 5, 40) and y.dtype == BF16 and close(y, want)
    assert layer.bias.data_ptr() == plain.bias.data_ptr()


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4"])
def test_quantizes_the_input(text: str, device: str) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(device=device), "nvfp4+2d", text)
    x = input_of(device)
    seen = opaq.quantize_tensor(x, text).dequantize()
    y = layer(x)
    assert close(y, nn.functional.linear(seen, layer.weight.dequantize(), layer.bias))
    assert not torch.equal(y, opaq.QuantizedLinear.from_weight(layer.weight.detach(), layer.bias)(x))


def test_gradients_go_to_the_input(device: str) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(device=device).requires_grad_(), "mxfp8")
    x = input_of(device).requires_grad_()
    dy = torch.ones(3, 5, 40, device=device, dtype=BF16)
    layer(x).backward(dy)
    assert close(x.grad, dy @ layer.weight.dequantize())
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("text", FORMATS)
def test_state_dict_round_trip(text: str) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(), text)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {"weight", "bias"}
    for assign in (False, True):
        other = opaq.QuantizedLinear(72, 40, quantizer=text, dtype=BF16, device="meta" if assign else None)
        other.load_state_dict(state, assign=assign)
        assert not other.weight.requires_grad and type(other.weight) is opaq.QuantizedTensor
        assert same_buffers(other.weight.buffers(), layer.weight.buffers())
        assert same_bytes(other(input_of()), layer(input_of()))


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_weight_is_quantized_when_loaded(assign: bool) -> None:
    plain = linear_of()
    layer = opaq.QuantizedLinear(72, 40, quantizer="nvfp4+2d", dtype=BF16)
    layer.load_state_dict(plain.state_dict(), assign=assign)
    assert torch.equal(layer.weight, opaq.quantize_tensor(plain.weight, "nvfp4+2d"))


def test_loading_other_shapes_is_an_error() -> None:
    layer = opaq.QuantizedLinear(72, 40, quantizer="nvfp4", dtype=BF16)
    with pytest.raises(RuntimeError, match="cannot be copied into"):
        layer.load_state_dict(opaq.QuantizedLinear.from_linear(linear_of(), "mxfp8").state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(linear_of((48, 40)).state_dict())
    with pytest.raises(opaq.OpaqError, match="unknown format"):
        opaq.QuantizedLinear(72, 40, quantizer="nvfp5")


def test_an_input_scale_is_state() -> None:
    layer = opaq.QuantizedLinear(72, 40, quantizer="fp8", input_quantizer="nvfp4", dtype=BF16)
    assert layer.input_scale is None and "input_scale" not in layer.state_dict()
    layer.input_scale = torch.full((1,), 3.5)
    state = layer.state_dict()
    other = opaq.QuantizedLinear(72, 40, quantizer="fp8", input_quantizer="nvfp4", dtype=BF16)
    other.load_state_dict(state)
    assert other.input_scale.dtype == torch.float32 and other.input_scale == 3.5
    assert other.half().input_scale.dtype == torch.float32 and other.bias.dtype == torch.float16
    assert opaq.QuantizedLinear(8, 8, quantizer="fp8", input_quantizer="fp8+delayed").input_scale == 1


@pytest.mark.parametrize("text", ["fp8+delayed", "nvfp4"])
def test_a_calibrated_scale_is_used(text: str) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(), "mxfp8", text)
    layer.input_scale = torch.full((1,), 20.0)
    given = {"scale": layer.input_scale} if "delayed" in text else {"amax_rowwise": layer.input_scale}
    seen = opaq.quantize_tensor(input_of(), text, **given).dequantize()
    y = layer(input_of())
    assert close(y, nn.functional.linear(seen, layer.weight.dequantize(), layer.bias))


def test_copies(device: str) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(device=device), "nvfp4")
    other = copy.deepcopy(layer)
    assert type(other.weight) is opaq.QuantizedTensor and isinstance(other.weight, nn.Parameter)
    assert same_buffers(other.weight.buffers(), layer.weight.buffers())
    assert other.weight._rowwise_data.data_ptr() != layer.weight._rowwise_data.data_ptr()
    assert same_bytes(other(input_of(device)), layer(input_of(device)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cast_keeps_the_bytes(dtype: Any) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(), "nvfp4")
    before = [buffer.clone() for buffer in layer.weight.buffers()]
    layer.to(dtype)
    assert layer.weight.dtype == layer.bias.dtype == dtype and isinstance(layer.weight, nn.Parameter)
    assert same_buffers(layer.weight.buffers(), before)
    assert layer(input_of().to(dtype)).dtype == dtype


def test_on_the_meta_device() -> None:
    layer = opaq.QuantizedLinear(72, 40, quantizer="nvfp4", dtype=BF16, device="meta")
    assert layer.weight.is_meta and all(buffer.is_meta for buffer in layer.weight.buffers())
    assert layer(torch.empty(3, 72, device="meta", dtype=BF16)).shape == (3, 40)
    with torch.device("meta"):
        assert opaq.QuantizedLinear(72, 40, quantizer="nvfp4").weight.is_meta
    made = layer.to_empty(device="cpu")
    assert made.weight.device.type == "cpu" and made.weight._rowwise_data.device.type == "cpu"
    assert opaq.QuantizedLinear.from_linear(linear_of(device="meta"), "nvfp4").weight.is_meta


@pytest.mark.parametrize("input_quantizer", ["", "nvfp4"])
def test_compiles_to_one_graph(input_quantizer: str, device: str) -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(device=device), "nvfp4", input_quantizer)
    x = input_of(device)
    run = compiled(layer)
    assert same_bytes(run(x), layer(x))
    x.requires_grad_()
    gradients = []
    for function in (layer, run):
        function(x).sum().backward()
        gradients.append(x.grad)
        x.grad = None
    assert same_bytes(*gradients)


def test_under_torch_autocast() -> None:
    layer = opaq.QuantizedLinear.from_linear(linear_of(), "mxfp8")
    with torch.autocast("cpu", dtype=BF16):
        assert layer(input_of().float()).dtype == BF16


def test_back_to_a_plain_layer() -> None:
    plain = linear_of()
    layer = opaq.QuantizedLinear.from_linear(plain, "nvfp4").eval()
    again = layer.to_linear()
    assert type(again) is nn.Linear and torch.equal(again.bias, plain.bias) and not again.training
    assert torch.equal(again.weight, layer.weight.dequantize())


def test_extra_repr() -> None:
    layer = opaq.QuantizedLinear(72, 40, quantizer="nvfp4+swizzle", input_quantizer="mxfp8", bias=False)
    want = "in_features=72, out_features=40, bias=False, quantizer='nvfp4+swizzle', input_quantizer='mxfp8'"
    assert layer.extra_repr() == want
