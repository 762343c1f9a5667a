"""Linear with quantized tensors: outputs, gradients, weights, inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import opaq
from compiling import fresh_compiler  # noqa: F401
from conftest import need
from linear_reference import CASES, Case, Linear, new_delayed, values
from linear_training import QUANTIZED, WRAPS, layer_of, quantized_layer, same, step, under
from torch_cases import DTYPES, FORMATS, same_buffers, same_bytes

torch = need("torch")


# -------------------------------------------------------------------------------- quantized outputs, gradients


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_output(name: str, device: str) -> None:
    """The output is quantized by the recipe; its gradient may be plain."""
    case, text = CASES[name], CASES[name].make().linear_quantizers().output
    module, plain = layer_of(device), layer_of(device)
    x, y, dy = step(plain, case, device)
    again, quantized, _ = step(module, case, device, fp8_output=True)
    scale = {"scale": torch.ones(1, device=device)} if case.is_delayed else {}
    want = opaq.quantize_tensor(y.detach(), text, **scale)
    assert str(quantized.quantizer) == text and quantized.shape == y.shape and quantized.dtype == y.dtype
    assert same_buffers(quantized.buffers(), want.buffers())
    assert same_bytes(again.grad, x.grad) and same_bytes(module.weight.grad, plain.weight.grad)
    if case.is_delayed:
        assert module.amax_history_fwd[:, 2].max() == y.abs().max()


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_input_gradient(name: str, device: str) -> None:
    case, text = CASES[name], CASES[name].make().linear_quantizers().grad_input
    module, plain = layer_of(device), layer_of(device)
    x, _, _ = step(plain, case, device)
    again, _, _ = step(module, case, device, fp8_grad=True)
    scale = {"scale": torch.ones(1, device=device)} if case.is_delayed else {}
    want = opaq.quantize_tensor(x.grad, text, **scale)
    assert str(again.grad.quantizer) == text
    assert same_buffers(again.grad.buffers(), want.buffers())
    assert same_bytes(module.weight.grad, plain.weight.grad)
    if case.is_delayed:
        assert module.amax_history_bwd[:, 1].max() == x.grad.abs().max()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_gradient_is_used_unchanged(name: str, device: str) -> None:
    case = CASES[name]
    module, first = layer_of(device), layer_of(device, 72, 48)
    z = values((24, 48), 1, device).requires_grad_()
    dy = values((24, 40), 2, device)
    with under(case):
        x = first(z)
        y = module(x, fp8_grad=True)
    given = []
    x.register_hook(given.append)
    y.backward(dy)
    (gradient,) = given
    assert isinstance(gradient, opaq.QuantizedTensor)
    delayed = new_delayed(1) if case.is_delayed else None
    layer = Linear(replace(case, dy=""), z, first.weight.detach(), first.bias, gradient.dequantize(), delayed)
    assert layer.dx().error(z.grad) <= 1 and layer.dw().error(first.weight.grad) <= 1
    assert layer.dbias().error(first.bias.grad) <= 1


@pytest.mark.parametrize("name", QUANTIZED)
def test_layers_pass_quantized_tensors(name: str, device: str) -> None:
    """The second layer uses the first one's quantized output without quantizing again."""
    case = CASES[name]
    first, second = layer_of(device, 72, 48), layer_of(device)
    z, dy = values((24, 48), 1, device).requires_grad_(), values((24, 40), 2, device)
    with under(case):
        h = first(z, fp8_output=True)
        y = second(h)
    random = tuple(y.grad_fn.saved_tensors[-1].tolist()) if case.is_stochastic else (0, 0)
    y.backward(dy)
    delayed = new_delayed(1) if case.is_delayed else None
    layer = Linear(
        replace(case, x=""), h.dequantize(), second.weight.detach(), second.bias, dy, delayed, random
    )
    assert layer.y().error(y) <= 1 and layer.dw().error(second.weight.grad) <= 1
    assert z.grad is not None and z.grad.abs().sum() > 0


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_outputs_in_a_graph_without_gradients(name: str, device: str) -> None:
    first, second = layer_of(device, 72, 48), layer_of(device)

    def run(x: Any) -> tuple[Any, Any]:
        h = first(x, fp8_output=True)
        return h, second(h)

    x, results = values((24, 48), 1, device), []
    for wrap in WRAPS.values():
        with torch.no_grad(), under(CASES[name]):
            h, y = wrap(run)(x)
        results.append([[*h.buffers(), y]])
    assert same(*results)


@pytest.mark.parametrize("option", ["fp8_output", "fp8_grad"])
def test_quantized_with_gradients_in_a_graph_is_refused(option: str, device: str) -> None:
    module = layer_of(device)
    function = torch.compile(lambda x: module(x, **{option: True}), backend="aot_eager", fullgraph=True)
    x = values((24, 72), 1, device).requires_grad_()
    with (
        under(CASES["mxfp8"]),
        pytest.raises(Exception, match=f"{option}=True with gradients does not go with"),
    ):
        function(x)
    with under(CASES["mxfp8"]), torch.no_grad():
        assert same_bytes(plain_of(function(x)), plain_of(module(x, **{option: True})))


def plain_of(tensor: Any) -> Any:
    return tensor.dequantize() if isinstance(tensor, opaq.QuantizedTensor) else tensor


# ------------------------------------------------------------------------------------------- quantized weights


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_parameters(name: str, device: str) -> None:
    """Only the bytes are stored, and results equal those of a plain weight, quantized in the call."""
    torch.manual_seed(2)
    module = quantized_layer(name, device, preserve=True)
    assert isinstance(module.weight, opaq.QuantizedTensor) and isinstance(module.weight, torch.nn.Parameter)
    before = module.weight.get_high_precision_init_val()
    torch.manual_seed(2)
    assert torch.equal(before, opaq.Linear(72, 40, device=device).weight.detach().cpu())
    case = replace(CASES[name], w=CASES[name].w.replace("+delayed", ""))
    results = []
    for wrap in WRAPS.values():
        for key in ("scale_fwd", "scale_bwd"):
            getattr(module, key).fill_(1.0)
        module.zero_grad()
        x, y, dy = step(module, CASES[name], device, wrap(module))
        results.append([[y.detach(), x.grad, module.weight.grad, module.bias.grad]])
    assert same(*results)
    torch.manual_seed(8)
    random = (
        tuple(torch.empty(2, dtype=torch.int64, device=device).random_(0, 2**62).tolist())
        if case.is_stochastic
        else (0, 0)
    )
    delayed = new_delayed(1) if case.is_delayed else None
    layer = Linear(case, x, before.to(device), module.bias, dy, delayed, random)
    assert layer.y().error(y) <= 1 and layer.dx().error(x.grad) <= 1
    assert layer.dw().error(module.weight.grad) <= 1
    assert not isinstance(module.weight.grad, opaq.QuantizedTensor)


def test_high_precision_values_are_kept_until_cleared(device: str) -> None:
    module = quantized_layer("mxfp8", device, preserve=True)
    value = module.weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and torch.equal(
        opaq.quantize_tensor(value, module.weight.quantizer).dequantize(), module.weight.dequantize().cpu()
    )
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    assert not hasattr(quantized_layer("mxfp8", device).weight, "get_high_precision_init_val")


@pytest.mark.parametrize("wrap", WRAPS)
def test_training_quantized_parameters(wrap: str, device: str) -> None:
    """The optimizer updates a master weight, and copying it back quantizes it."""
    module = quantized_layer("mxfp8", device, preserve=True)
    function, master = WRAPS[wrap](module), module.weight.get_high_precision_init_val().to(device)
    x, target = values((24, 72), 1, device), values((24, 40), 2, device)
    losses = []
    for _ in range(6):
        with under(CASES["mxfp8"]):
            loss = (function(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            master.sub_(module.weight.grad, alpha=0.05)
            module.weight.copy_(master)
            module.weight.grad = None
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.99 * losses[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [*FORMATS, "nvfp4+columnwise", "mxfp8+both", "mxfp8+2d", "nvfp4+2d+swizzle"])
def test_weight_only(text: str, dtype: str, device: str) -> None:
    """A quantized weight without a recipe: x is not quantized."""
    w = values((40, 72), 3, device)
    x = values((2, 12, 72), 1, device, DTYPES[dtype])
    y = opaq.functional.linear(x, opaq.quantize_tensor(w, text))
    if "columnwise" in text:  # the only copy
        layer = Linear(Case(lambda: None), x, opaq.quantize_tensor(w, text).dequantize(), None, None)
    else:
        layer = Linear(Case(lambda: None, w=text.replace("+both", "")), x, w, None, None)
    assert y.dtype == x.dtype and layer.y().error(y) <= 1


@pytest.mark.parametrize("wrap", WRAPS)
def test_weight_only_gradients(wrap: str, device: str) -> None:
    """Gradients of x, through either copy, as LoRA needs them."""
    weight = opaq.quantize_tensor(values((40, 72), 3, device), "nvfp4")
    x, dy = values((24, 72), 1, device).requires_grad_(), values((24, 40), 2, device)
    WRAPS[wrap](lambda x: opaq.functional.linear(x, weight))(x).backward(dy)
    assert Linear(Case(lambda: None), x, weight.dequantize(), None, dy).dx().error(x.grad) <= 1


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4 no sr"])
@pytest.mark.parametrize("text", ["mxfp8+both", "fp8", "nvfp4+both+rht"])
def test_a_quantized_input(text: str, name: str, wrap: str, device: str) -> None:
    """It is used without quantizing again, with any recipe; its gradient passes to its source."""
    case, module = CASES[name], layer_of(device)
    x, dy = values((24, 72), 1, device).requires_grad_(), values((24, 40), 2, device)

    def run(x: Any) -> Any:
        return module(opaq.quantize_tensor(x, text))

    with under(case):
        y = WRAPS[wrap](run)(x)
    y.backward(dy)
    columns = "+both" in text
    quantized = opaq.quantize_tensor(x.detach(), text)
    layer = Linear(replace(case, x=text.replace("+both", "")), x, module.weight.detach(), module.bias, dy)
    if not columns:  # only the rowwise copy exists
        layer = Linear(replace(case, x=""), quantized.dequantize(), module.weight.detach(), module.bias, dy)
    errors = layer.y().error(y), layer.dx().error(x.grad), layer.dw().error(module.weight.grad)
    assert max(errors) <= 1, errors
