"""quantize_ and dequantize_: which modules are quantized, the summary, tied weights, failures."""

from __future__ import annotations

import builtins
import copy
import ctypes
import io
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need
from torch_cases import same_buffers, same_bytes

torch = need("torch")
nn = torch.nn
model_module = need("opaq.model")
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.o_proj(self.q_proj(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def model_of(**keywords: Any) -> Any:
    torch.manual_seed(0)
    return Model(**keywords).to(BF16)


def state_of(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_as_before(model: Any, modules: list[Any], state: dict[str, Any]) -> bool:
    now = model.state_dict()
    same = [type(m) for m in model.modules()] == [type(m) for m in modules] and list(now) == list(state)
    return same and all(same_bytes(now[name], state[name]) for name in state)


LINEARS = [f"layers.{i}.{n}" for i in range(2) for n in ("q_proj", "o_proj", "mlp.0", "mlp.2")]
IDS = torch.arange(24).view(2, 12)


# -------------------------------------------------------------------------------- results


@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "fp8blk2"])
def test_packs_every_linear_layer(text: str) -> None:
    model, plain = model_of(), model_of()
    summary = opaq.quantize_(model, text, progress=False)
    for name, module in plain.named_modules():
        if name in LINEARS:
            made = model.get_submodule(name)
            assert type(made) is opaq.QuantizedLinear and made.quantizer == text + "+tiled"
            rows = made.weight.tiled(False)
            assert same_buffers(rows.buffers(), opaq.quantize_tensor(module.weight, text).buffers())
            module.weight = nn.Parameter(made.weight.dequantize())
    assert type(model.lm_head) is nn.Linear and type(model.embed) is nn.Embedding
    assert torch.allclose(model(IDS).float(), plain(IDS).float(), rtol=2**-5, atol=2**-5)
    assert [row.name for row in summary.modules] == LINEARS and summary.left == {"lm_head": "ignored"}
    assert summary.quantizer == text and summary.activations == ""


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4+both", "nvfp4+swizzle", "fp8blk1"])
def test_weights_that_are_not_tiled(text: str) -> None:
    """Without a precision, with a quantizer that has other options, and with the one format without tiles."""
    model = model_of()
    opaq.quantize_(model, text, precision=None if text == "nvfp4" else "near", progress=False)
    made = model.get_submodule(LINEARS[0])
    assert made.quantizer == text and made.precision == ("exact" if text == "nvfp4" else "near")


@pytest.mark.parametrize("precision", [None, "exact"])
def test_summary(precision: str | None) -> None:
    model, plain = model_of(), model_of()
    summary = opaq.quantize_(model, precision=precision, progress=False)
    assert summary.bytes_before == sum(plain.get_submodule(name).weight.nbytes for name in LINEARS)
    packed = [buffer for name in LINEARS for buffer in model.get_submodule(name).weight.buffers()]
    assert summary.bytes_after == sum(buffer.nbytes for buffer in packed) < 0.35 * summary.bytes_before
    for row in summary.modules:
        x = plain.get_submodule(row.name).weight.detach().double()
        noise = model.get_submodule(row.name).weight.dequantize(torch.float32).double() - x
        want = 10 * math.log10(x.square().sum() / noise.square().sum())
        assert row.sqnr == pytest.approx(want, abs=1e-9) and 15 < row.sqnr < 25
    assert summary.worst.sqnr == min(row.sqnr for row in summary.modules)
    text = str(summary)
    assert "layers.*.mlp.*" in text and "128x64" in text and "left as it is: lm_head (ignored)" in text
    assert f"{summary.worst.sqnr:.2f} dB: {summary.worst.name}" in text
    assert len(text.splitlines()) == 1 + 4 + 1 + 1 + 1


def test_activations(device: str) -> None:
    model = model_of().to(device)
    summary = opaq.quantize_(model, activations="nvfp4", progress=False)
    assert model.layers[0].q_proj.input_quantizer == summary.activations == "nvfp4"
    assert model(IDS.to(device)).isfinite().all()


def test_stays_one_graph() -> None:
    model = model_of()
    opaq.quantize_(model, "mxfp8", progress=False)
    assert same_bytes(compiled(model)(IDS), model(IDS))


def test_packed_layers_are_skipped() -> None:
    """Two calls mix two quantizers."""
    model = model_of()
    opaq.quantize_(model, "mxfp8", ignore=("lm_head", "*.mlp"), progress=False)
    summary = opaq.quantize_(model, "nvfp4", progress=False)
    assert [row.name for row in summary.modules] == [name for name in LINEARS if "mlp" in name]
    assert model.layers[1].q_proj.quantizer == "mxfp8+tiled"
    assert model.layers[1].mlp[0].quantizer == "nvfp4+tiled"


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ((), []),
        ("lm_head", ["lm_head"]),
        (("layers.0.q_proj",), ["layers.0.q_proj"]),
        (("q_proj",), ["layers.0.q_proj", "layers.1.q_proj"]),
        (("layers.0.mlp.*",), ["layers.0.mlp.0", "layers.0.mlp.2"]),
        (("layers.0.mlp",), ["layers.0.mlp.0", "layers.0.mlp.2"]),
        ((r"re:.*\.(q|o)_proj$",), [name for name in LINEARS if "proj" in name]),
        (("re:q_proj", "proj", "layers.?.mlp.2"), ["layers.0.mlp.2", "layers.1.mlp.2"]),
    ],
)
def test_ignore(ignore: Any, left: list[str]) -> None:
    summary = opaq.quantize_(model_of(), ignore=ignore, progress=False)
    assert sorted(summary.left) == sorted(left)


def test_ignore_matches_like_compressed_tensors() -> None:
    utils = need("compressed_tensors.utils")
    model = model_of()
    for pattern in ("lm_head", "layers.0.q_proj", r"re:.*mlp\.0$", "re:layers.1", "re:.*", "re:lm", "nothing"):
        theirs = {name for name, module in model.named_modules() if utils.is_match(name, module, pattern)}
        ours = set(opaq.quantize_(copy.deepcopy(model), ignore=[pattern], progress=False).left)
        assert theirs & {"lm_head", *LINEARS} == ours, pattern


# -------------------------------------------------------------------------------- skipped modules


def test_a_weight_tied_to_an_embedding_stays() -> None:
    model = model_of()
    model.lm_head.weight = model.embed.weight
    summary = opaq.quantize_(model, ignore=(), progress=False)
    assert summary.left == {"lm_head": "tied to embed.weight"}
    assert model.lm_head.weight is model.embed.weight


def test_shared_weights_stay_shared() -> None:
    model = model_of()
    first, second = model.layers[0].q_proj, model.layers[1].q_proj
    second.weight = first.weight
    model.layers[1].o_proj = model.layers[0].o_proj  # a whole module
    summary = opaq.quantize_(model, progress=False)
    first, second = model.layers[0].q_proj, model.layers[1].q_proj
    assert type(first) is opaq.QuantizedLinear and first.weight is second.weight and first is not second
    assert model.layers[1].o_proj is model.layers[0].o_proj
    assert len(summary.modules) == len(LINEARS) - 2
    opaq.dequantize_(model)
    first, second = model.layers[0].q_proj, model.layers[1].q_proj
    assert type(first) is nn.Linear and first.weight is second.weight
    assert model.layers[1].o_proj is model.layers[0].o_proj


def test_layers_with_other_computations_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "doubled": Doubled(32, 32),
            "named": Named(32, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "returning": opaq.Linear(32, 32, return_bias=True),
            "ours": opaq.Linear(32, 32),
        }
    )
    with opaq.quantized_model_init(recipe=opaq.recipe.MXFP8BlockScaling()):
        model["made"] = opaq.Linear(32, 32)
    summary = opaq.quantize_(model, progress=False)
    assert [row.name for row in summary.modules] == ["named", "ours"]
    assert summary.left["doubled"] == "Doubled has a forward of its own"
    assert set(summary.left) == {"doubled", "attention.out_proj", "normed", "returning", "made"}


def test_hooks_and_mode_stay() -> None:
    model = model_of().eval()
    seen = []
    handle = model.layers[0].q_proj.register_forward_hook(lambda *_: seen.append(1))
    opaq.quantize_(model, progress=False)
    assert not model.layers[0].q_proj.training
    model(IDS)
    handle.remove()
    model(IDS)
    assert seen == [1]


# -------------------------------------------------------------------------------- failures


def test_an_error_changes_nothing() -> None:
    model = model_of()
    model.layers[1].mlp[0].double()
    modules, state = list(model.modules()), state_of(model)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.0: opaq: the dtype is 'float64'"):
        opaq.quantize_(model, progress=False)
    for keywords, text in (
        ({"quantizer": "nvfp5"}, "unknown format"),
        ({"activations": "nvfp4+3d"}, "unknown option"),
        ({"activations": "fp8+delayed"}, "calibrated scales"),
    ):
        with pytest.raises(ValueError, match=text):
            opaq.quantize_(model, progress=False, **keywords)
    with pytest.raises(ValueError, match="from_linear"):
        opaq.quantize_(nn.Linear(8, 8))
    assert is_as_before(model, modules, state)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_midway_changes_nothing(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    modules, state = list(model.modules()), state_of(model)
    fail_after(monkeypatch, 5, error)
    with pytest.raises(error):
        opaq.quantize_(model, progress=False)
    assert is_as_before(model, modules, state) and list(model.modules()) == modules


def fail_after(monkeypatch: pytest.MonkeyPatch, calls: int, error: Any) -> None:
    quantize = model_module.quantize_tensor

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise error
        return quantize(*arguments)

    monkeypatch.setattr(model_module, "quantize_tensor", failing)


def test_with_little_memory_weights_are_released_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    weights = [weakref.ref(model.get_submodule(name).weight) for name in LINEARS]
    alive = []
    quantize = model_module.quantize_tensor

    def counting(*arguments: Any) -> Any:
        alive.append(sum(weight() is not None for weight in weights))
        return quantize(*arguments)

    monkeypatch.setattr(model_module, "quantize_tensor", counting)
    monkeypatch.setattr(model_module, "_free_bytes", lambda _: 0)
    opaq.quantize_(model, progress=False)
    assert alive == list(range(len(LINEARS), 0, -1))


def test_with_little_memory_an_error_says_what_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_free_bytes", lambda _: 0)
    fail_after(monkeypatch, 3, MemoryError("no more"))
    with pytest.raises(RuntimeError, match="stopped after 3 of 8 modules, which stay quantized.*no more"):
        opaq.quantize_(model_of(), progress=False)


# -------------------------------------------------------------------------------- dequantize_


OWN_MEMORY = """
import ctypes, opaq, torch

def own():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False).bfloat16() for _ in range(160)))
opaq.quantize_(model, "nvfp4", progress=False)
kept = own()
ctypes.CDLL(None).malloc_trim(0)
print(kept - own(), sum(parameter.nbytes for parameter in model.parameters()))
"""


def test_freed_memory_is_returned() -> None:
    """In a separate process: the C library would keep most of the plain weights' memory."""
    status = Path("/proc/self/status")
    if not (status.exists() and "RssAnon" in status.read_text() and hasattr(ctypes.CDLL(None), "malloc_trim")):
        pytest.skip("needs Linux and glibc")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, "-c", OWN_MEMORY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept, packed = (int(word) for word in done.stdout.split())
    assert kept < packed / 4, (kept, packed)


def test_dequantize_restores_layers() -> None:
    model = model_of()
    opaq.quantize_(model, "mxfp8", progress=False)
    packed = model_of()
    opaq.quantize_(packed, "mxfp8", progress=False)
    assert opaq.dequantize_(model) == len(LINEARS)
    for name in LINEARS:
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.weight.requires_grad
        assert same_bytes(layer.weight.detach(), packed.get_submodule(name).weight.dequantize())
    assert list(model.state_dict()) == list(model_of().state_dict())
    assert opaq.dequantize_(model) == 0


def test_a_failure_of_dequantize_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    opaq.quantize_(model, progress=False)
    modules = list(model.modules())
    to_linear, calls = opaq.QuantizedLinear.to_linear, []

    def failing(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise MemoryError
        return to_linear(self, *arguments)

    monkeypatch.setattr(opaq.QuantizedLinear, "to_linear", failing)
    with pytest.raises(MemoryError):
        opaq.dequantize_(model)
    assert list(model.modules()) == modules


def test_state_goes_to_a_model_that_is_packed_too() -> None:
    model = model_of()
    opaq.quantize_(model, progress=False)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        other = Model().to(BF16)
    summary = opaq.quantize_(other, progress=False)
    assert summary.worst is None and summary.modules[0].sqnr is None and "8" in str(summary)
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert same_bytes(other(IDS), model(IDS))


# -------------------------------------------------------------------------------- progress and SQNR


def test_shows_progress_if_tqdm_is_installed(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    need("tqdm")
    opaq.quantize_(model_of())
    assert "8/8" in capsys.readouterr().err
    monkeypatch.setattr(model_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtins, "print", None)
    opaq.quantize_(model_of())
    captured = capsys.readouterr()
    assert not captured.err and not captured.out


def test_sqnr_takes_any_tensor() -> None:
    x = torch.randn(3, 40, 72).transpose(0, 1)
    for text in ("nvfp4", "fp8+columnwise", "mxfp4+both+swizzle"):
        q = opaq.quantize_tensor(x.contiguous(), text)
        noise = q.dequantize().double() - x.double()
        want = 10 * math.log10(x.double().square().sum() / noise.square().sum())
        assert opaq.sqnr(x, q) == pytest.approx(want, abs=1e-9)
    assert opaq.sqnr(q.dequantize(), q) == math.inf
    with pytest.raises(TypeError, match=r"expected an opaq\.QuantizedTensor"):
        opaq.sqnr(x, x)
    with pytest.raises(opaq.OpaqError, match="the shapes differ"):
        opaq.sqnr(x[0], q)
