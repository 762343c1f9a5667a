"""Memory: loading a model from a packed checkpoint never holds more than one layer in high precision. A
separate process loads and runs the model and reports its peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, need, skip_test

torch = need("torch")
transformers = need("transformers")
models = need("checkpoint_models")
pytestmark = pytest.mark.slow

MIB = 1 << 20
SLACK = 48 * MIB  # for PyTorch, the allocator and transformers
SIZES = {
    "llama": {
        "num_hidden_layers": 16,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
    },
    "qwen3_moe": {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_attention_heads": 8,
    },
}


def shapes(name: str) -> tuple[Any, dict[str, Any]]:
    """A model on the meta device, and the tensors of its plain checkpoint."""
    with torch.device("meta"):
        model = models.make_empty(name, **SIZES[name])
    return model, models.revert(model, model.state_dict())


def random_bits(shape: Any, dtype: Any = torch.uint8) -> Any:
    """Random bytes, or finite numbers around 1."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, tuple(shape), dtype=torch.uint8)
    return (torch.rand(tuple(shape)) * 0.02 + 0.01).to(dtype)


def write_packed(folder: Path, name: str) -> tuple[int, int, int]:
    """Writes a checkpoint of random bits. Returns its bytes, those of the weights in bf16, and those of one
    layer."""
    layout = models.LAYOUTS["ct-nvfp4a16"]
    model, plain = shapes(name)
    stored, layers = {}, {}
    for key, tensor in plain.items():
        if not models.is_quantized(key, layout):
            stored[key] = random_bits(tensor.shape, torch.bfloat16)
            continue
        rows, columns = tensor.shape
        stored[f"{key}_packed"] = random_bits((rows, columns // 2))
        stored[f"{key}_scale"] = random_bits((rows, columns // 16), torch.float8_e4m3fn)
        stored[f"{key}_global_scale"] = torch.ones(1)
        layer = key.split(".")[2]
        layers[layer] = layers.get(layer, 0) + 2 * tensor.numel()
    models.write_config(folder, model, layout.config)
    models.write_tensors(folder, stored, 100 * MIB)
    return sum(t.nbytes for t in stored.values()), sum(layers.values()), max(layers.values())


def write_plain(folder: Path, name: str) -> tuple[int, int, int]:
    """Writes the checkpoint in bf16. Returns a quarter of its bytes, those of the weights, and those of one
    layer."""
    model, plain = shapes(name)
    stored = {key: random_bits(tensor.shape, torch.bfloat16) for key, tensor in plain.items()}
    models.write_config(folder, model)
    models.write_tensors(folder, stored, 100 * MIB)
    weights = sum(t.nbytes for t in stored.values())
    return weights * 9 // 32, weights, weights // SIZES[name]["num_hidden_layers"]


def run(folder: Path, quantizer: str = "") -> dict[str, Any]:
    if not Path("/proc/self/smaps").exists():
        skip_test("there is no /proc/self/smaps, so memory cannot be measured")
    program = Path(__file__).with_name("checkpoint_process.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # so that glibc returns freed memory to the system
    command = [sys.executable, str(program), str(folder), quantizer]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("memory:"))
    found = json.loads(line.removeprefix("memory:"))
    print({key: value // MIB if value > MIB else value for key, value in found.items()})
    assert found["packed"] and found["tokens"] == 10
    return found


@pytest.mark.parametrize("name", SIZES)
def test_a_packed_checkpoint_stays_packed(name: str, tmp_path: Path) -> None:
    """Peak anonymous memory is the packed weights and at most one layer; peak resident memory also includes the
    pages of the files. Both are less than the model in bf16."""
    stored, plain, layer = write_packed(tmp_path, name)
    found = run(tmp_path)
    assert stored < found["own"] + SLACK
    assert found["own"] < stored + layer + SLACK
    assert found["peak"] < 2 * stored + layer + SLACK < plain


def test_quantizing_while_loading_keeps_one_layer(tmp_path: Path) -> None:
    """transformers stacks a layer's experts twice before they are quantized."""
    stored, plain, layer = write_plain(tmp_path, "qwen3_moe")
    found = run(tmp_path, "nvfp4")
    assert found["own"] < stored + 3 * layer + SLACK < plain
