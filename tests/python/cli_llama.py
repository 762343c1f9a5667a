"""Checkpoints of a small Llama and of unusual matrices, in any dtype, for the command to quantize; and its
results, each computed once."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from cli_run import run_well
from conftest import need

torch = need("torch")
safetensors = need("safetensors.torch")
need("numpy")
values = need("peer_values")

Tensors = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
FORMATS = {
    "compressed-tensors": ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"],
    "modelopt": ["nvfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"],
    "deepseek": ["fp8blk2", "mxfp8"],
}
PAIRS = [(layout, name) for layout, names in FORMATS.items() for name in names]
BLOCK = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # columns; engines need whole blocks
HIDDEN, MIDDLE, HEADS, WORDS, LAYERS = 256, 384, 4, 160, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
JOINED = [("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))]


def with_special_values(w: Any, seed: int) -> Any:
    """Adds zeros of both signs, a block of zeros, and outliers."""
    random = torch.Generator().manual_seed(seed)
    chance = torch.rand(w.shape, generator=random)
    w = torch.where(chance < 0.02, w * 0, w)  # keeps the sign
    w = torch.where(chance > 0.999, w * 50, w)
    w[0, :128] = 0
    return w


def llama(dtype: str) -> Tensors:
    """Weights like those of a model, each matrix with numbers of another magnitude."""
    random = torch.Generator().manual_seed(3)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MIDDLE, HIDDEN),
        "mlp.up_proj": (MIDDLE, HIDDEN),
        "mlp.down_proj": (HIDDEN, MIDDLE),
    }
    made: Tensors = {}
    for layer in range(LAYERS):
        for i, (name, shape) in enumerate(shapes.items()):
            w = torch.randn(shape, generator=random) * 0.03 * (1 + i)
            made[f"model.layers.{layer}.{name}.weight"] = with_special_values(w, 10 * layer + i)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=random)
    made["model.embed_tokens.weight"] = torch.randn(WORDS, HIDDEN, generator=random)
    made["lm_head.weight"] = torch.randn(WORDS, HIDDEN, generator=random) * 0.1
    made["model.norm.weight"] = torch.ones(HIDDEN)
    return {name: tensor.to(DTYPES[dtype]) for name, tensor in made.items()}


OTHERS = """bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64
    float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz float4_e2m1fn_x2""".split()
ODD = {"a": (5, 48), "b": (7, 32), "c": (130, 144), "d": (3, 16), "e": (129, 256), "f": (64, 40), "g": (1, 128)}


def odd(dtype: str) -> Tensors:
    """Matrices of many sizes, with numbers for which quantizers are likely to differ."""
    made: Tensors = {}
    for seed, (name, (rows, columns)) in enumerate(ODD.items()):
        padded = -(-columns // 16) * 16
        w = values.matrix(rows, padded, seed, low=-12, high=-6)[:, :columns]
        made[f"model.layers.0.{name}.weight"] = torch.from_numpy(w.copy()).to(DTYPES[dtype])
    made["model.layers.0.bias"] = torch.ones(7, dtype=DTYPES[dtype])
    for name in OTHERS:
        other = getattr(torch, name)
        made[f"model.as_{name}"] = torch.arange(8 * other.itemsize, dtype=torch.uint8).view(other).reshape(2, 4)
    made['model.scalar \\ "重'] = torch.tensor(1.5)
    made["model.empty"] = torch.zeros(3, 0, 5)
    return made


KINDS = {"llama": llama, "odd": odd}


def is_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith(".weight") and "norm" not in name


def is_quantized(name: str, tensor: Any, format_name: str) -> bool:
    return is_linear(name) and tensor.shape[1] % BLOCK.get(format_name, 1) == 0


class Jobs:
    """Sources and results by their parameters, created on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = functools.cache(self._source)
        self.quantized = functools.cache(self._quantized)
        self.plain = functools.cache(self._plain)

    def _source(self, kind: str, dtype: str) -> Path:
        path = self.folder / f"{kind}-{dtype}"
        path.mkdir()
        names = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}
        (path / "config.json").write_text(json.dumps(CONFIG | {"dtype": names[dtype]}, indent=2))
        safetensors.save_file(KINDS[kind](dtype), path / "model.safetensors", metadata={"format": "pt"})
        return path

    def _quantized(self, kind: str, dtype: str, layout: str, name: str, *options: str) -> Path:
        path = self.folder / "-".join((kind, dtype, layout, name, *options))
        words = ["--quiet", "--threads", "2", "--layout", layout, "--format", name]
        run_well("quantize", *words, *options, self.source(kind, dtype), path)
        return path

    def _plain(self, kind: str, dtype: str, layout: str, name: str) -> Path:
        quantized = self.quantized(kind, dtype, layout, name)
        path = quantized.with_name(quantized.name + "-plain")
        run_well("convert", "--quiet", "--layout", "plain", "--dtype", "f32", quantized, path)
        return path


def tensors(folder: Path) -> Tensors:
    """All tensors of a folder with one file."""
    found: Tensors = safetensors.load_file(folder / "model.safetensors")
    return found


def same(found: Any, wanted: Any, what: str) -> None:
    """The same dtype, shape and bytes."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), what
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted))
    assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} bytes differ"
