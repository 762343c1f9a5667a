"""Whole models and packed layers on a GPU: transformers' models that are quantized while they load, their
tokens beside the CPU's, compiled with CUDA graphs; gradients through packed weights; training. The tests run on
the CPU too, where they compare it with itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import opaq
from conftest import need, slow_but
from test_gpu import near

torch = need("torch")
transformers = need("transformers")

import small_models as models  # noqa: E402

HIDDEN, INNER, EXPERTS = 256, 128, 4
NAMES = ["llama", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


def prompt(device: str) -> Any:
    return torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


def load(folder: Path, device: str, text: str = "nvfp4", **more: Any) -> Any:
    """In rows on every device, so that the CPU has no special kernels."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=opaq.Config(text, precision=None, **more), device_map=device
    ).eval()


@torch.no_grad()
def logits(model: Any, ids: Any) -> Any:
    return model(input_ids=ids).logits.float()


# ---- transformers' models ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", slow_but(["nvfp4", "mxfp4", "mxfp8", "fp8blk2"], "nvfp4"))
def test_a_packed_model_has_the_logits_and_tokens_of_the_cpu(
    text: str, name: str, device: str, tmp_path: Path
) -> None:
    models.make_model(name).save_pretrained(tmp_path)
    here, there = load(tmp_path, "cpu", text), load(tmp_path, device, text)
    packed = [p for p in there.parameters() if isinstance(p, opaq.QuantizedTensor)]
    assert packed and all(p.device.type == device for p in packed)
    for parameter, other in zip(
        packed, (p for p in here.parameters() if isinstance(p, opaq.QuantizedTensor)), strict=True
    ):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(parameter.buffers(), other.buffers(), strict=True))
    want, got = logits(here, prompt("cpu")), logits(there, prompt(device)).cpu()
    assert near(got, want, 0.02)
    # PyTorch's own bf16 layers round differently, so a token may differ where two logits are nearly equal
    best = want.topk(2, -1)
    is_clear = best.values[..., 0] - best.values[..., 1] > 0.02 * want.abs().amax(-1)
    assert torch.equal(got.argmax(-1)[is_clear], best.indices[..., 0][is_clear])
    assert is_clear.float().mean() > 0.5


@pytest.mark.parametrize("name", slow_but(NAMES, "llama"))
def test_a_packed_model_compiles_whole(name: str, device: str, tmp_path: Path) -> None:
    models.make_model(name).save_pretrained(tmp_path)
    model = load(tmp_path, device)
    want = logits(model, prompt(device))
    torch._dynamo.reset()
    mode = "reduce-overhead" if device == "cuda" else "default"
    backend: Any = {"mode": mode} if device == "cuda" else {"backend": "aot_eager"}
    counters = torch._dynamo.utils.counters
    counters.clear()
    whole = torch.compile(model, fullgraph=True, dynamic=False, **backend)
    with torch._inductor.config.patch(emulate_precision_casts=True):  # fused operations round like eager mode
        for _ in range(3):
            got = logits(whole, prompt(device))
    assert not counters["graph_break"]
    assert counters["inductor"].get("cudagraph_skips", 0) == 0
    off = float((got - want).norm() / want.norm())
    assert off < 0.05


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_model_moves_between_devices(name: str, device: str, tmp_path: Path) -> None:
    models.make_model(name).save_pretrained(tmp_path)
    moved = load(tmp_path, "cpu").to(device)
    assert torch.equal(logits(moved, prompt(device)), logits(load(tmp_path, device), prompt(device)))
    back = moved.to("cpu")
    assert torch.equal(logits(back, prompt("cpu")), logits(load(tmp_path, "cpu"), prompt("cpu")))


# ---- packed layers ----


def layer(kind: str, text: str, dtype: Any) -> Any:
    torch.manual_seed(0)
    made: Any
    if kind == "linear":
        made = opaq.QuantizedLinear(HIDDEN, 192, quantizer=text, dtype=dtype)
    elif kind == "mlp":
        made = opaq.MLP(HIDDEN, INNER, quantizer=text, bias=True, dtype=dtype)
    elif kind == "moe":
        made = opaq.MoE(HIDDEN, INNER, EXPERTS, quantizer=text, bias=True, dtype=dtype)
    else:
        made = opaq.GroupedLinear(EXPERTS, HIDDEN, 256, quantizer=text, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5).to(parameter.dtype))
    return made


def step(kind: str, module: Any, rows: int, dtype: Any, device: str) -> list[Any]:
    """The result, and the gradients of the inputs."""
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=draw).to(device, dtype).requires_grad_()
    inputs: list[Any] = [x]
    if kind == "moe":
        router = (torch.rand(rows, 2, generator=draw) + 0.1).to(device).requires_grad_()
        ids = torch.stack([torch.arange(rows) % EXPERTS, (torch.arange(rows) + 1) % EXPERTS], -1)
        inputs += [router, ids.to(device)]
    elif kind == "grouped":
        inputs += [[rows - 2, 0, 1, 1]]
    y = module(*inputs)
    y.backward(torch.randn(y.shape, generator=draw).to(device, y.dtype))
    return [y, *(one.grad for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad)]


@pytest.mark.parametrize("kind", ["linear", "mlp", "moe", "grouped"])
@pytest.mark.parametrize(
    "text", slow_but(["nvfp4", "nvfp4+2d", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"], "nvfp4")
)
def test_gradients_through_packed_weights(text: str, kind: str, device: str) -> None:
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)):
        module = layer(kind, text, dtype)
        there = copy.deepcopy(module).to(device)
        for rows in (4, 37, 200):
            want, got = step(kind, module, rows, dtype, "cpu"), step(kind, there, rows, dtype, device)
            for i, (one, other) in enumerate(zip(got, want, strict=True)):
                assert near(one, other, limit), (rows, i)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8block", "mxfp8", "nvfp4"])
def test_training_has_the_losses_of_the_cpu(recipe: str, device: str) -> None:
    recipes: dict[str, Any] = {
        "bf16": None,
        "fp8": opaq.recipe.Float8CurrentScaling(),
        "fp8block": opaq.recipe.Float8BlockScaling(),
        "mxfp8": opaq.recipe.MXFP8BlockScaling(),
        "nvfp4": opaq.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    }

    def losses(on: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).to(on)
        if recipes[recipe] is not None:
            opaq.convert_training(model, recipes[recipe])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(1)
        found = []
        for _ in range(8):
            x, target = torch.randn(96, 128, generator=draw).to(on), torch.randn(96, 64, generator=draw).to(on)
            loss = torch.nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.testing.assert_close(losses(device), losses("cpu"), rtol=2e-3, atol=0)
