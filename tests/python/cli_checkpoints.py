"""Small checkpoints for the tests of the command, written with other packages: safetensors writes the files,
compressed-tensors quantizes the weights. Also runs the command and compares its output with a file.

OPAQ_COMMAND names the program; OPAQ_REWRITE=1 rewrites the expectations in tests/cli instead of comparing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from conftest import ROOT, need, skip_test

torch = need("torch")
safetensors = need("safetensors.torch")
peers = need("peer_compressor")

EXPECTED = ROOT / "tests" / "cli"
CT_METHODS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "fp8": "float-quantized",
    "fp8row": "float-quantized",
    "fp8blk2": "float-quantized",
}


def program() -> str:
    """The built command; skips the test if there is none."""
    found = os.environ.get("OPAQ_COMMAND", str(ROOT / "build" / "opaq"))
    if not Path(found).is_file():
        skip_test(f"there is no command: {found}")
    return found


def run(*arguments: str | Path, code: int | None = 0, folder: Path | None = None) -> str:
    """Runs the command and returns its output; `code` is the expected exit status."""
    done = subprocess.run(
        [program(), *map(str, arguments)], capture_output=True, text=True, check=False, cwd=folder, timeout=300
    )
    assert code is None or done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout if done.returncode < 2 else done.stderr


def run_json(*arguments: str | Path, code: int | None = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def check_text(name: str, text: str) -> None:
    """Compares with tests/cli/`name`."""
    path = EXPECTED / name
    if os.environ.get("OPAQ_REWRITE") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"the output differs from {path}; OPAQ_REWRITE=1 rewrites it"
    )


# ---- tensors ----

LAYER = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (384, 256),
    "mlp.up_proj": (384, 256),
    "mlp.down_proj": (256, 384),
}


def plain_tensors(layers: int = 2, seed: int = 1) -> dict[str, Any]:
    """The tensors of a small model: linear layers, and others that are not quantized."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return (torch.randn(*shape, generator=random) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(300, 256)}
    for layer in range(layers):
        for name, shape in LAYER.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = 1 + normal(256)
    tensors["model.norm.weight"] = 1 + normal(256)
    return tensors


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantized_tensors(plain: dict[str, Any], format_name: str) -> dict[str, Any]:
    """The same tensors with every linear layer quantized by compressed-tensors."""
    peer = peers.compressed_tensors()
    made = {}
    for name, tensor in plain.items():
        if not is_linear(name):
            made[name] = tensor
            continue
        state = peers.compressed_state(peer, format_name, tensor.float())
        state.pop("weight_zero_point", None)
        if format_name == "nvfp4":
            state["weight_global_scale"] = state["weight_global_scale"].reshape(1)
        made.update({name.removesuffix("weight") + key: value.contiguous() for key, value in state.items()})
    return made


def ct_config(format_name: str, ignore: list[str] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": CT_METHODS[format_name],
        "ignore": ["lm_head"] if ignore is None else ignore,
    }


# ---- folders ----


def write_model(
    folder: Path, tensors: dict[str, Any], quantization: dict[str, Any] | None = None, files: int = 1
) -> Path:
    """A folder with config.json and the tensors in `files` files, with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}  # safetensors rejects shared memory
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 256}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    metadata = {"format": "pt"}
    if files == 1:
        safetensors.save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return folder
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    place = {key: names[i * files // len(tensors)] for i, key in enumerate(tensors)}
    for name in names:
        own = {key: tensor for key, tensor in tensors.items() if place[key] == name}
        safetensors.save_file(own, folder / name, metadata=metadata)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# ---- decoding ----

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def unpack_e2m1(packed: Any) -> Any:
    values = torch.tensor(E2M1 + [-value for value in E2M1])
    return values[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def dequantized(tensors: dict[str, Any], name: str, format_name: str) -> Any:
    """Decodes the weight `name` of the result of quantized_tensors to float32."""
    scale = tensors[name + "_scale"]
    if format_name == "nvfp4":
        factors = scale.float() / tensors[name + "_global_scale"]
        return unpack_e2m1(tensors[name + "_packed"]) * factors.repeat_interleave(16, -1)
    if format_name.startswith("mx"):
        factors = torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
        codes = unpack_e2m1(tensors[name + "_packed"]) if format_name == "mxfp4" else tensors[name].float()
        return codes * factors
    codes = tensors[name].float()
    if format_name == "fp8blk2":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return codes * scale.float()
