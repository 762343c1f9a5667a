"""`opaq convert`: converting back gives the same files, byte for byte, and --layout plain decodes correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
checkpoints = need("cli_checkpoints")
safetensors = need("safetensors.torch")

from cli_checkpoints import plain_tensors, quantized_tensors, run, write_model  # noqa: E402  # may be missing

LAYOUTS = {
    "compressed-tensors": ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"),
    "modelopt": ("nvfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"),
    "deepseek": ("mxfp8", "fp8blk2"),
}
WAYS = [
    (name, there, back)
    for back, names in LAYOUTS.items()
    for name in names
    for there, others in LAYOUTS.items()
    if there != back and name in others
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def metadata(folder: Path) -> dict[str, str]:
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize(("name", "there", "back"), WAYS)
def test_converting_back(tmp_path: Path, name: str, there: str, back: str) -> None:
    source = write_model(tmp_path / "source", plain_tensors(3), files=2)
    run("quantize", source, tmp_path / "one", "--format", name, "--layout", back)
    run("convert", tmp_path / "one", tmp_path / "two", "--layout", there)
    run("convert", tmp_path / "two", tmp_path / "three", "--layout", back)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    run("quantize", source, tmp_path / "straight", "--format", name, "--layout", there)
    run("verify", tmp_path / "two", source)
    converted = json.loads((tmp_path / "two" / "config.json").read_text())
    assert converted == json.loads((tmp_path / "straight" / "config.json").read_text())
    run("diff", tmp_path / "one", tmp_path / "two", "--values")


def test_scales_whose_inverse_is_rounded(tmp_path: Path) -> None:
    """1 / (1 / x) is often not x; the metadata keeps the original, and drops it when converting back."""
    numbers = torch.arange(1, 2.0, 1 / 64).to(torch.float32) * 1000.3
    assert not torch.equal(1 / (1 / numbers), numbers)
    tensors = {}
    for i, number in enumerate(numbers):
        made = quantized_tensors(
            {f"m{i}_proj.weight": plain_tensors(1)["model.layers.0.mlp.up_proj.weight"]}, "nvfp4"
        )
        made[f"m{i}_proj.weight_global_scale"] = number.reshape(1)
        tensors |= made
    quantization = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    source = write_model(tmp_path / "source", tensors, quantization)
    run("convert", source, tmp_path / "there", "--layout", "modelopt")
    kept = {key for key in metadata(tmp_path / "there") if key != "format"}
    assert 0 < len(kept) < len(numbers) and all(key.startswith("opaq.was:") for key in kept)
    run("convert", tmp_path / "there", tmp_path / "back", "--layout", "compressed-tensors")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_scale_that_was_changed_meanwhile(tmp_path: Path) -> None:
    """The kept original is used only if the scale is unchanged."""
    made = quantized_tensors({"m_proj.weight": plain_tensors(1)["model.layers.0.mlp.up_proj.weight"]}, "nvfp4")
    made["m_proj.weight_global_scale"] = torch.tensor([1797.4141], dtype=torch.float32)
    quantization = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    source = write_model(tmp_path / "source", made, quantization)
    run("convert", source, tmp_path / "there", "--layout", "modelopt")
    path = tmp_path / "there" / "model.safetensors"
    tensors, kept = safetensors.load_file(path), metadata(tmp_path / "there")
    tensors["m_proj.weight_scale_2"] = torch.tensor(0.25)
    safetensors.save_file(tensors, path, metadata=kept)
    run("convert", tmp_path / "there", tmp_path / "back", "--layout", "compressed-tensors")
    assert safetensors.load_file(tmp_path / "back" / "model.safetensors")["m_proj.weight_global_scale"] == 4


def test_exponents(tmp_path: Path) -> None:
    """DeepSeek's newer scales are exponents of one byte; other layouts store floats."""
    source = write_model(tmp_path / "source", plain_tensors(1))
    run("quantize", source, tmp_path / "made", "--format", "fp8blk2", "--layout", "deepseek")
    path = tmp_path / "made" / "model.safetensors"
    tensors = safetensors.load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            exponents = torch.full(tensor.shape, 117, dtype=torch.uint8)
            exponents[0, 0] = 120
            tensors[name] = exponents.view(torch.float8_e8m0fnu)
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    run("convert", tmp_path / "made", tmp_path / "there", "--layout", "compressed-tensors")
    there = safetensors.load_file(tmp_path / "there" / "model.safetensors")
    scale = there["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale.dtype == torch.float32 and scale[0, 0] == 2.0**-7 and scale[0, 1] == 2.0**-10
    run("convert", tmp_path / "there", tmp_path / "back", "--layout", "deepseek")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == path.read_bytes()


def test_scales_of_inputs(tmp_path: Path) -> None:
    """They are converted with the weights, and the configuration declares that inputs are quantized."""
    made = quantized_tensors(plain_tensors(1), "nvfp4")
    for name in [name for name in made if name.endswith("_packed")]:
        made[name.removesuffix("weight_packed") + "input_global_scale"] = torch.tensor([512.0])
    quantization = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    source = write_model(tmp_path / "source", made, quantization)
    run("convert", source, tmp_path / "there", "--layout", "modelopt")
    there = safetensors.load_file(tmp_path / "there" / "model.safetensors")
    assert there["model.layers.0.mlp.up_proj.input_scale"] == 1 / 512
    assert there["model.layers.0.mlp.up_proj.input_scale"].shape == ()
    config = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"
    run("convert", tmp_path / "there", tmp_path / "back", "--layout", "compressed-tensors")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", LAYOUTS["compressed-tensors"])
def test_floats(tmp_path: Path, name: str, dtype: str) -> None:
    """The values equal those that NumPy decodes from compressed-tensors' tensors, rounded once."""
    plain = plain_tensors(1)
    made = quantized_tensors(plain, name)
    quantization: dict[str, Any] = checkpoints.ct_config(name)
    source = write_model(tmp_path / "source", made, quantization)
    run("convert", source, tmp_path / "to", "--layout", "plain", "--dtype", dtype)
    found = safetensors.load_file(tmp_path / "to" / "model.safetensors")
    assert found.keys() == plain.keys()
    assert "quantization_config" not in json.loads((tmp_path / "to" / "config.json").read_text())
    wanted = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    run("convert", source, tmp_path / "floats", "--layout", "plain", "--dtype", "f32")
    floats = safetensors.load_file(tmp_path / "floats" / "model.safetensors")
    for key, tensor in plain.items():
        if checkpoints.is_linear(key):
            assert torch.equal(found[key], floats[key].to(wanted)), key
            assert (floats[key] - tensor.float()).abs().max() < 0.02, key
        else:
            assert torch.equal(found[key], tensor), key


def test_errors(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", plain_tensors(1))
    assert "has no quantized weight" in run("convert", source, tmp_path / "to", "--layout", "modelopt", code=3)
    run("quantize", source, tmp_path / "fp4")
    output = run("convert", tmp_path / "fp4", tmp_path / "to", "--layout", "deepseek", code=3)
    assert "is nvfp4 in the layout compressed-tensors, which cannot become deepseek" in output
    mixed = quantized_tensors({"a_proj.weight": plain_tensors(1)["model.layers.0.mlp.up_proj.weight"]}, "nvfp4")
    mixed |= quantized_tensors(
        {"b_proj.weight": plain_tensors(1)["model.layers.0.mlp.up_proj.weight"]}, "fp8row"
    )
    folder = write_model(tmp_path / "mixed", mixed)
    output = run("convert", folder, tmp_path / "to", "--layout", "modelopt", code=3)
    assert "mixes formats" in output and not (tmp_path / "to").exists()
    run("convert", folder, tmp_path / "to", "--layout", "plain")
