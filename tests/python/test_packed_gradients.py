"""Gradients through packed weights, against autograd in float64 on the dequantized weights, for every packed
layer, in rows and in tiles, eager and compiled to one operator forward and one backward. Gradients pass
straight through the quantization of inputs. Gradients of the packed weights themselves are an error. On a GPU
weights are in rows; the bound there is that of docs/cuda.md, and references are computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import opaq
from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need
from opaq import functional
from torch_cases import same_bytes

torch = need("torch")
ops = torch.ops.opaq

TILED = ["nvfp4", "nvfp4+2d", "nvfp4+rowscaled", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"]
QUANTIZERS = [(text, tiles) for text in TILED for tiles in (False, True)] + [("fp8blk1", False)]
HIDDEN, INNER, EXPERTS = 128, 128, 3
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6}
ON_GPU = 10  # the bound's factor for float32 on a GPU
DTYPES = list(ALLOWED)


def near(got: Any, want: Any, allowed: float) -> bool:
    factor = ON_GPU if got.is_cuda and allowed < 1e-4 else 1
    got, want = got.cpu().double(), want.cpu().double()
    return bool((got - want).norm() <= factor * allowed * want.norm())


def straight(x: Any, text: str, scale: Any = None) -> Any:
    """Quantizes and dequantizes x, with a straight-through gradient."""
    if not text:
        return x
    buffers = ops.quantize(x.detach().float().contiguous(), text, *(() if scale is None else (scale,)))
    seen = ops.dequantize(buffers, text, x.shape, torch.float32)
    return x + (seen.double() - x).detach()


# ---- layers and their references in float64 ----


class Layer:
    """A packed module, its inputs that require gradients, and a reference that takes these in float64."""

    def __init__(self, module: Any, inputs: dict[str, Any], more: tuple[Any, ...], reference: Any) -> None:
        self.module, self.inputs, self.more, self.reference = module, inputs, more, reference

    def on(self, device: str) -> Layer:
        """The layer, with its inputs, on a device."""
        self.module = self.module.to(device)
        self.inputs = {name: value.to(device) for name, value in self.inputs.items()}
        self.more = tuple(value.to(device) for value in self.more)
        return self

    def run(self, module: Any = None) -> tuple[Any, dict[str, Any]]:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in self.inputs.items()}
        y = (self.module if module is None else module)(*leaves.values(), *self.more)
        y.backward(self.dy(y))
        return y.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    def dy(self, y: Any) -> Any:
        made = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        return made.to(self.module_dtype).to(y.device, y.dtype)

    @property
    def module_dtype(self) -> Any:
        return next(iter(self.inputs.values())).dtype

    def expected(self) -> dict[str, Any]:
        leaves = {name: value.detach().cpu().double().requires_grad_() for name, value in self.inputs.items()}
        y = self.reference(*leaves.values())
        y.backward(self.dy(y).double())
        return {name: leaf.grad for name, leaf in leaves.items()}


def filled(module: Any, tiles: bool) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape) * (0.1 if "bias" in name else parameter.shape[-1] ** -0.5)
            parameter.copy_(values.to(parameter.dtype))
    if tiles:
        opaq.tile_(module)
    return module


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def doubles(module: Any, *names: str) -> list[Any]:
    found = [getattr(module, name) for name in names]
    return [
        (w.dequantize(torch.float32) if isinstance(w, opaq.QuantizedTensor) else w).detach().double()
        for w in found
    ]


def linear(text: str, tiles: bool, dtype: Any, inputs: str = "", rows: int = 7) -> Layer:
    made = opaq.QuantizedLinear(HIDDEN, 192, quantizer=text, input_quantizer=inputs, dtype=dtype)
    module = filled(made, tiles)
    weight, bias = doubles(module, "weight", "bias")
    return Layer(
        module, {"x": numbers(rows, HIDDEN, dtype=dtype)}, (), lambda x: straight(x, inputs) @ weight.T + bias
    )


def activated(h: Any) -> Any:
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def mlp(text: str, tiles: bool, dtype: Any, inputs: str = "", scale: Any = None, rows: int = 7) -> Layer:
    made = opaq.MLP(HIDDEN, INNER, quantizer=text, input_quantizer=inputs, bias=True, dtype=dtype)
    module = filled(made, tiles)
    if scale is not None:
        module.input_scale = module.hidden_scale = scale
    up, down, *biases = doubles(module, "gate_up", "down", "gate_up_bias", "down_bias")

    def reference(x: Any) -> Any:
        a = activated(straight(x, inputs, scale) @ up.T + biases[0])
        return straight(a, inputs, scale) @ down.T + biases[1]

    return Layer(module, {"x": numbers(rows, HIDDEN, dtype=dtype)}, (), reference)


def moe(text: str, tiles: bool, dtype: Any, on_input: bool = False, rows: int = 7) -> Layer:
    made = opaq.MoE(HIDDEN, INNER, EXPERTS, quantizer=text, bias=True, dtype=dtype, weights_on_input=on_input)
    module = filled(made, tiles)
    up, down, up_bias, down_bias = doubles(module, "gate_up", "down", "gate_up_bias", "down_bias")
    ids = torch.stack([torch.arange(rows) % EXPERTS, (torch.arange(rows) + 1) % EXPERTS], -1)

    def reference(x: Any, weights: Any) -> Any:
        y = 0
        for choice in range(2):
            for e in range(EXPERTS):
                factor = torch.where(ids[:, choice] == e, weights[:, choice], 0.0)[:, None]
                chosen = (ids[:, choice] == e)[:, None].double()
                seen = x * factor if on_input else x
                one = activated(seen @ up[e].T + up_bias[e]) @ down[e].T + down_bias[e]
                y = y + one * (chosen if on_input else factor)
        return y

    router = torch.rand(rows, 2, generator=torch.Generator().manual_seed(3)) + 0.1
    return Layer(module, {"x": numbers(rows, HIDDEN, dtype=dtype), "router": router}, (ids,), reference)


def grouped(text: str, tiles: bool, dtype: Any, rows: int = 7) -> Layer:
    module = filled(opaq.GroupedLinear(EXPERTS, HIDDEN, 256, quantizer=text, dtype=dtype), tiles)
    weight, bias = doubles(module, "weight", "bias")
    splits = [rows - 3, 0, 3]

    def reference(x: Any) -> Any:
        parts = zip(x.split(splits), weight, bias, strict=True)
        return torch.cat([part @ w.T + b for part, w, b in parts])

    return Layer(module, {"x": numbers(rows, HIDDEN, dtype=dtype)}, (torch.tensor(splits),), reference)


MAKERS: dict[str, Callable[..., Layer]] = {"linear": linear, "mlp": mlp, "moe": moe, "grouped": grouped}


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("text", "tiles"), QUANTIZERS, ids=[f"{t}{'+tiled' * tiles}" for t, tiles in QUANTIZERS]
)
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_those_of_the_dequantized_weights(
    name: str, text: str, tiles: bool, dtype: Any, device: str
) -> None:
    layer = MAKERS[name](text, tiles, dtype).on(device)
    _, got = layer.run()
    want = layer.expected()
    assert got.keys() == want.keys()
    for key in want:
        assert near(got[key], want[key], ALLOWED[dtype]), key
    assert all(parameter.grad is None for parameter in layer.module.parameters())


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_incoming_gradients_with_any_strides(name: str, tiles: bool, device: str) -> None:
    """As from a sum, which is expanded, and from a transpose."""
    layer = MAKERS[name]("nvfp4", tiles, torch.float32).on(device)
    for dy in (torch.tensor(0.5), numbers(192 if name == "linear" else 256 if name == "grouped" else 128, 7).T):
        found = []
        for is_copied in (False, True):
            leaves = [value.detach().clone().requires_grad_() for value in layer.inputs.values()]
            y = layer.module(*leaves, *layer.more)
            given = dy.to(device).expand_as(y)
            assert not given.is_contiguous()
            y.backward(given.contiguous() if is_copied else given)
            found.append([leaf.grad for leaf in leaves])
        assert all(same_bytes(a, b) for a, b in zip(*found, strict=True))


def test_router_weights_on_the_input(device: str) -> None:
    layer = moe("nvfp4", True, torch.float32, on_input=True).on(device)
    _, got = layer.run()
    for key, want in layer.expected().items():
        assert near(got[key], want, 4e-6), key


@pytest.mark.parametrize("name", ["linear", "mlp", "moe", "grouped"])
def test_biases_have_gradients_if_required(name: str, device: str) -> None:
    layer = MAKERS[name]("mxfp8", True, torch.float32).on(device)
    biases = {n: p.requires_grad_() for n, p in layer.module.named_parameters() if "bias" in n}
    layer.run()
    assert biases and all(bias.grad is not None and bias.grad.abs().sum() > 0 for bias in biases.values())
    if name in ("linear", "grouped"):
        dy = layer.dy(layer.module(*layer.inputs.values(), *layer.more)).double()
        want = dy.sum(0) if name == "linear" else torch.stack([part.sum(0) for part in dy.split([4, 0, 3])])
        assert near(layer.module.bias.grad, want, 1e-6)


# ---- quantized inputs ----


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("inputs", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row"])
def test_quantized_inputs_are_passed_straight_through(inputs: str, tiles: bool, device: str) -> None:
    text = inputs if inputs != "fp8row" else "fp8blk2"
    for layer in (linear(text, tiles, torch.float32, inputs), mlp(text, tiles, torch.float32, inputs)):
        _, got = layer.on(device).run()
        # it is rare that h gets another code because it differs in its last bits
        assert near(got["x"], layer.expected()["x"], 2e-3)
        plain = type(layer)(layer.module, layer.inputs, (), layer.reference)
        layer.module.input_quantizer = layer.module.hidden_quantizer = ""
        if isinstance(layer.module, opaq.MLP):
            assert not same_bytes(plain.run()[1]["x"], got["x"])  # h depends on the quantized x
        else:
            assert same_bytes(plain.run()[1]["x"], got["x"])


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("inputs", ["nvfp4", "mxfp8", "fp8"])
def test_each_experts_rows_are_quantized_and_passed_straight_through(
    inputs: str, tiles: bool, device: str
) -> None:
    layer = grouped("mxfp8", tiles, torch.float32).on(device)
    module, x, splits = (
        layer.module,
        layer.inputs["x"] * torch.arange(1, 8, device=device)[:, None],
        layer.more[0],
    )
    weight, bias, dy = module.weight, module.bias, numbers(7, 256).to(device)
    seen = [opaq.quantize_tensor(part, inputs).dequantize() for part in x.split([4, 3])]
    assert not same_bytes(torch.cat(seen), opaq.quantize_tensor(x, inputs).dequantize()) or inputs == "mxfp8"
    found = []
    for given, by in ((x, inputs), (torch.cat(seen), "")):
        leaf = given.clone().requires_grad_()
        y = functional.grouped_linear(leaf, splits, weight, bias, input_quantizer=by)
        y.backward(dy)
        found.append((y.detach(), leaf.grad))
        with torch.no_grad():
            again = functional.grouped_linear(leaf, splits, weight, bias, input_quantizer=by)
        assert same_bytes(again, y.detach())
    for got, want in zip(*found, strict=True):
        assert same_bytes(got, want) if device == "cpu" else near(got, want, ALLOWED[torch.float32])


def test_a_checkpoints_scales_of_inputs(device: str) -> None:
    """W8A8 with calibrated scales, as in checkpoints."""
    scale = torch.tensor([40.0])
    layer = mlp("fp8", True, torch.float32, "fp8+delayed", scale).on(device)
    y, got = layer.run()
    assert near(got["x"], layer.expected()["x"], 2e-3)
    with torch.no_grad():
        assert same_bytes(layer.module(layer.inputs["x"]), y)
    other = mlp("fp8", True, torch.float32, "fp8+delayed", scale * 1.4).on(device)
    assert not same_bytes(other.run()[0], y)
    mixture = moe("fp8row", True, torch.float32)
    mixture.module.input_quantizer = mixture.module.hidden_quantizer = "fp8+delayed"
    mixture.module.input_scale, mixture.module.hidden_scale = torch.full((EXPERTS,), 60.0), scale
    mixture.on(device)
    y, got = mixture.run()
    with torch.no_grad():
        assert same_bytes(mixture.module(*mixture.inputs.values(), *mixture.more), y)
    for key, want in mixture.expected().items():
        assert near(got[key], want, 0.1), key


# ---- compiled ----


def targets(graphs: list[Any]) -> list[str]:
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if "opaq" in str(node.target)]


@pytest.mark.parametrize("inputs", ["", "mxfp8"])
@pytest.mark.parametrize("name", MAKERS)
def test_compiled_is_one_operator_each_way(name: str, inputs: str, device: str) -> None:
    more = {"inputs": inputs} if inputs and name in ("linear", "mlp") else {}
    layer = MAKERS[name]("nvfp4", True, torch.bfloat16, **more).on(device)
    graphs: tuple[list[Any], list[Any]] = [], []

    def keep(which: int) -> Callable[..., Any]:
        return lambda graph, example: graphs[which].append(graph) or graph.forward

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=keep(0), bw_compiler=keep(1))
    module = compiled(layer.module, backend=backend, dynamic=True)
    y, got = layer.run(module)
    expected, want = layer.run()
    assert same_bytes(y, expected) and all(same_bytes(got[key], want[key]) for key in want)
    assert [len(targets(each)) for each in graphs] == [1, 1], graphs
    for rows in (5, 40):
        other = MAKERS[name]("nvfp4", True, torch.bfloat16, rows=rows, **more).on(device)
        with fail_on_recompile():
            y, got = Layer(layer.module, other.inputs, other.more, None).run(module)
        expected, want = other.run()
        assert same_bytes(y, expected) and all(same_bytes(got[key], want[key]) for key in want)


# ---- errors ----


def test_a_packed_weights_gradient_is_refused() -> None:
    for name, key in (("linear", "weight"), ("mlp", "gate_up"), ("moe", "down"), ("grouped", "weight")):
        layer = MAKERS[name]("mxfp8", False, torch.float32)
        getattr(layer.module, key).requires_grad_()
        message = rf"opaq\.\w+: {key} is packed and requires a gradient, .* call {key}.requires_grad_\(False\)"
        with pytest.raises(NotImplementedError, match=message):
            layer.run()
        with torch.no_grad():  # no gradient is needed
            layer.module(*layer.inputs.values(), *layer.more)


def test_scales_with_gradients_of_plain_weights_are_refused() -> None:
    up, down = torch.randn(64, 32), torch.randn(32, 32)
    x, scale = torch.randn(3, 32).requires_grad_(), torch.ones(1)
    with pytest.raises(
        NotImplementedError, match="opaq.functional.mlp: a checkpoint's scales go with gradients"
    ):
        functional.mlp(x, up, down, input_quantizer="nvfp4", input_scale=scale)


# ---- whole models ----


def embeddings_gradient(model: Any, ids: Any) -> Any:
    weight = model.get_input_embeddings().weight.requires_grad_()
    weight.grad = None
    model(ids, labels=ids).loss.backward()
    return weight.grad.clone()


def loaded(tmp_path: Path, name: str, layout: str, dtype: Any) -> tuple[Any, Any]:
    transformers, models = need("transformers"), need("checkpoint_models")
    transformers.logging.disable_progress_bar()
    models.write_checkpoint(tmp_path, models.make_model(name, dtype), models.LAYOUTS[layout])
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(tmp_path, quantization_config=opaq.Config()), torch.randint(
        3, 256, (2, 9), generator=torch.Generator().manual_seed(5)
    )


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_embeddings_of_a_loaded_model(name: str, tmp_path: Path) -> None:
    model, ids = loaded(tmp_path, name, "ct-nvfp4a16", torch.float32)
    found = embeddings_gradient(model, ids)
    assert any(isinstance(p, opaq.QuantizedTensor) for p in model.parameters())
    whole = compiled(lambda ids: model(ids, labels=ids).loss)
    weight = model.get_input_embeddings().weight
    weight.grad = None
    whole(ids).backward()
    assert near(weight.grad, found, 1e-6)
    plain = model.dequantize()
    assert not any(isinstance(p, opaq.QuantizedTensor) for p in plain.parameters())
    assert near(found, embeddings_gradient(plain, ids), 2e-5)


@pytest.mark.parametrize(("name", "layout"), [("llama", "modelopt-fp8"), ("qwen3_moe", "modelopt-nvfp4"),
                                              ("mixtral", "modelopt-fp8")])  # fmt: skip
def test_embeddings_where_inputs_have_scales(name: str, layout: str, tmp_path: Path) -> None:
    model, ids = loaded(tmp_path, name, layout, torch.float32)
    found = embeddings_gradient(model, ids)
    want = embeddings_gradient(model.dequantize(), ids)  # its inputs are not quantized
    least = 0.8 if "nvfp4" in layout else 0.97
    assert float(torch.nn.functional.cosine_similarity(found.flatten(), want.flatten(), dim=0)) > least


def test_experts_of_a_quantized_model() -> None:
    """With quantize_ on transformers' modules, in place."""
    need("transformers")
    models = need("checkpoint_models")
    model = models.make_model("mixtral", torch.float32)
    opaq.quantize_(model, "mxfp4", progress=False)
    ids = torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(5))
    found = embeddings_gradient(model, ids)
    opaq.dequantize_(model)
    assert near(found, embeddings_gradient(model, ids), 2e-5)
