"""The same bits: `opaq reproduce` with every instruction set, from numbers that Python computes too; and a
model that is trained, exported and loaded packed has the same logits as in the trainer, alone and in a
batch, on every device."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, need, skip_test

COMMAND = os.environ.get("OPAQ_COMMAND", str(ROOT / "build" / "opaq"))
if not Path(COMMAND).is_file():
    skip_test(f"there is no command {COMMAND}; OPAQ_COMMAND names another")
torch = need("torch")
opaq = need("opaq")

EXPECTED = ROOT / "tests" / "cli" / "reproduce.txt"
LEVELS = ["", "ref", "avx2", "avx512"]


def reproduce(level: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPAQ_CPU": level}
    return subprocess.run(
        [COMMAND, "reproduce", *options], env=environment, capture_output=True, text=True, check=False
    )


# ---- opaq reproduce ----


@pytest.mark.parametrize("level", LEVELS)
def test_hashes_of_the_portable_part(level: str) -> None:
    """OPAQ_REWRITE=1 rewrites the expectation: only if a format, rule, option or plan was added or the
    arithmetic was changed on purpose."""
    done = reproduce(level)
    assert (done.returncode, done.stderr) == (0, "")
    promised = done.stdout.split("\n\n")[0] + "\n"
    if os.environ.get("OPAQ_REWRITE") == "1":
        EXPECTED.write_text(promised, encoding="utf-8")
    assert promised == EXPECTED.read_text(encoding="utf-8")


def test_json_and_the_comparison() -> None:
    done = reproduce("", "--json", "--threads", "2")
    found = json.loads(done.stdout)
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    assert found["same_everywhere"]["hash"] == lines[-1].split()[0]
    assert len(found["same_everywhere"]["results"]) == len(lines) - 1
    assert {result["operation"] for result in found["may_differ"]["results"]} == {"linear"}
    assert all("+tiled" in result["what"] for result in found["may_differ"]["results"])
    right = found["same_everywhere"]["hash"]
    assert reproduce("", "--expect", right).returncode == 0
    wrong = reproduce("", "--expect", "0123456789abcdef")
    assert wrong.returncode == 1
    assert wrong.stderr == (
        f"opaq reproduce: the hash of the part that is the same on every processor is {right}, "
        "expected 0123456789abcdef\n"
    )


# ---- the same numbers, computed here ----

ROWS, COLUMNS, SEED, WORD = 19, 288, 20260101, (1 << 32) - 1


def philox(index: int, stream: int) -> tuple[int, int, int, int]:
    """Philox 4x32 with 10 rounds."""
    a, b, c, d, key0, key1 = index, 0, 0, 0, SEED, stream
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ key0, right & WORD, (left >> 32) ^ d ^ key1, left & WORD
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return a, b, c, d


def number(index: int, stream: int) -> float:
    a, b, c, d = philox(index, stream)
    bell = sum(a >> 8 * i & 0x3F for i in range(4)) - 126
    octave = b % 8 + (5 if c % 64 == 0 else 0)
    return 0.0 if d % 50 == 0 else bell * 2.0 ** (octave - 12)


def fnv(state: int, data: bytes) -> int:
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return state


@pytest.mark.parametrize("quantizer", ["nvfp4.e2m1+both", "mxfp8+both+rule=ocp", "fp8blk2+both+pow2"])
def test_pytorch_quantizes_to_the_same_bytes(quantizer: str, device: str) -> None:
    x = torch.tensor([number(i, 1) for i in range(ROWS * COLUMNS)]).view(ROWS, COLUMNS)
    assert torch.equal(x.bfloat16().float(), x)
    quantized = dequantized = 0xCBF29CE484222325
    for dtype in (torch.bfloat16, torch.float32):
        q = opaq.quantize_tensor(x.to(device, dtype), quantizer)
        for buffer in q.buffers():
            quantized = fnv(quantized, buffer.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        dequantized = fnv(dequantized, q.dequantize().cpu().view(torch.uint8).numpy().tobytes())
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    expected = {line.split()[1]: line.split()[0] for line in lines if line.split()[-1] == quantizer}
    assert expected == {"quantize": f"{quantized:016x}", "dequantize": f"{dequantized:016x}"}


# ---- from training to serving ----

# How a model is exported, the format, and the quantizers of its packed layers.
SERVED = {
    "save_pretrained nvfp4": ("nvfp4", "nvfp4", ""),
    "save_pretrained mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "save_pretrained fp8row": ("fp8row", "fp8row", "fp8row"),
    "quantize nvfp4": ("nvfp4", "nvfp4+global+rule=compressed-tensors", ""),
    "quantize mxfp8": ("mxfp8", "mxfp8+rule=compressed-tensors", "mxfp8+rule=compressed-tensors"),
}


def untrained() -> Any:
    """In bf16, except for the rotary embedding's frequencies: transformers keeps them in float32 when it loads
    a model, unlike `.to(torch.bfloat16)`."""
    transformers = need("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokens() -> Any:
    return torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))


def trained(weight: str, activations: str, device: str = "cpu") -> Any:
    """A few steps with the same forward as in serving; the backward is in high precision."""
    quantizers = {"weight": weight, "input": activations or None}
    recipe = opaq.recipe.CustomRecipe(
        lambda role: quantizers.get(role.tensor_type), backward_override="high_precision"
    )
    model, ids = untrained().to(device), tokens().to(device)
    opaq.convert_training(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def served(model: Any, way: str, folder: Path, device: str = "cpu") -> Any:
    load = need("transformers").AutoModelForCausalLM.from_pretrained
    name, _, activations = SERVED[way]
    plain, packed = folder / "plain", folder / "packed"
    model.save_pretrained(plain)
    if way.startswith("save"):
        config = opaq.Config(name, activations=activations, precision=None)
        load(plain, quantization_config=config).save_pretrained(packed)
        return load(packed, device_map=device)
    words = [COMMAND, "quantize", "--quiet", "--format", name, str(plain), str(packed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return load(packed, quantization_config=opaq.Config(precision=None), device_map=device)


def adopt(model: Any, engine: Any) -> set[str]:
    """Copies the checkpoint's weights into the trainer's layers; returns those that differed. Engines fuse q, k
    and v, and gate and up, so they share a global scale in an NVFP4 checkpoint, but not in the trainer."""
    differ = set()
    for name, layer in engine.named_modules():
        if isinstance(layer, opaq.QuantizedLinear):
            mine = model.get_submodule(name)
            own = opaq.quantize_tensor(mine.weight.detach(), layer.quantizer)
            pairs = zip(own.buffers(), layer.weight.buffers(), strict=True)
            differ |= set() if all(torch.equal(a, b) for a, b in pairs) else {name.rpartition(".")[2]}
            mine.weight = torch.nn.Parameter(layer.weight.detach(), requires_grad=False)
    return differ


@torch.no_grad()
def logits(model: Any, ids: Any) -> Any:
    return model.eval()(ids.to(next(model.parameters()).device), use_cache=False).logits


@pytest.mark.parametrize("way", SERVED)
def test_a_packed_model_has_the_trainers_logits(way: str, device: str, tmp_path: Path) -> None:
    """On a GPU too: its products have the fixed order by default. PyTorch's own operations, such as attention,
    may depend there on the size of the batch, so rows alone are compared within rounding."""
    _, weight, activations = SERVED[way]
    model = trained(weight, activations, device)
    engine = served(model, way, tmp_path, device)
    layers = [m for m in engine.modules() if isinstance(m, opaq.QuantizedLinear)]
    assert len(layers) == 14
    assert {(layer.quantizer, layer.input_quantizer) for layer in layers} == {(weight, activations)}
    plain = copy.deepcopy(model)
    opaq.revert_training(plain)
    if way == "quantize nvfp4":
        assert not torch.equal(logits(model, tokens()), logits(engine, tokens()))
        assert adopt(model, engine) <= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    expected, got = logits(model, tokens()), logits(engine, tokens())
    assert torch.equal(got, expected)
    assert not torch.equal(got, logits(plain, tokens()))  # quantizing has an effect
    for row in range(4):
        alone = logits(engine, tokens()[row : row + 1])
        if device == "cpu":
            assert torch.equal(alone, got[row : row + 1]), row
        else:
            assert float((alone - got[row : row + 1]).float().norm() / got.float().norm()) < 0.02, row


def test_tiles_differ_by_no_more_than_the_order_of_sums(tmp_path: Path) -> None:
    """Products with weights in tiles have the same bits alone and in a batch, and differ from those with the
    same weights in rows by rounding only."""
    model = trained("nvfp4", "")
    engine = served(model, "save_pretrained nvfp4", tmp_path)
    rows = logits(engine, tokens())
    assert opaq.tile_(engine) == 14
    tiles = logits(engine, tokens())
    assert float((tiles - rows).float().norm() / rows.float().norm()) < 0.01
    for row in range(4):
        assert torch.equal(logits(engine, tokens()[row : row + 1]), tiles[row : row + 1]), row
