"""`opaq quantize --activations`: how config.json describes the inputs of layers, as read by compressed-tensors
and by opaq; and ModelOpt's names of algorithms, which may be in upper or lower case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cli_llama
from cli_llama import PAIRS, tensors
from cli_run import run_well
from conftest import need

torch = need("torch")
opaq = need("opaq")
compressed_tensors = need("compressed_tensors.quantization")
safetensors = need("safetensors.torch")
need("cli_checkpoints")

from cli_checkpoints import plain_tensors, run, run_json, write_model  # noqa: E402  # after what may be missing
from opaq.checkpoint import read_layout  # noqa: E402

CT = "compressed-tensors"
FORMS = {  # the supported activations of every format of a layout, the default first
    **{(CT, name): ("dynamic", "none") for name in ("mxfp8", "fp8", "fp8row", "fp8blk2")},
    (CT, "nvfp4"): ("none",),
    (CT, "mxfp4"): ("none", "dynamic"),
    **{("modelopt", name): ("dynamic",) for name in ("mxfp8", "fp8", "fp8row")},
    **{("modelopt", name): ("none",) for name in ("nvfp4", "fp8blk2")},
    **{("deepseek", name): ("dynamic",) for name in ("mxfp8", "fp8blk2")},
}
PRESETS = {  # compressed-tensors' own names
    ("nvfp4", "none"): "NVFP4A16",
    ("mxfp4", "none"): "MXFP4A16",
    ("mxfp4", "dynamic"): "MXFP4",
    ("mxfp8", "none"): "MXFP8A16",
    ("mxfp8", "dynamic"): "MXFP8",
    ("fp8row", "dynamic"): "FP8_DYNAMIC",
    ("fp8blk2", "dynamic"): "FP8_BLOCK",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("activations") / "source", plain_tensors(1))


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def check_preset(config: Any, name: str, how: str) -> None:
    """compressed-tensors reads the configuration, and it equals the preset of that name."""
    read = compressed_tensors.QuantizationConfig.model_validate(config)
    (scheme,) = read.config_groups.values()
    assert (scheme.input_activations is None) == (how == "none")
    if (name, how) in PRESETS:
        wanted = compressed_tensors.preset_name_to_scheme(PRESETS[name, how], ["Linear"])
        for side in ("weights", "input_activations"):
            found, preset = getattr(scheme, side), getattr(wanted, side)
            keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "block_structure")
            assert [getattr(found, key, None) for key in keys] == [getattr(preset, key, None) for key in keys]


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_forms(source: Path, tmp_path: Path, layout: str, name: str) -> None:
    command = ["quantize", source, "--format", name, "--layout", layout]
    forms = FORMS[layout, name]
    assert run_json(*command, tmp_path / "default")["activations"] == forms[0]
    for how in ("none", "dynamic"):
        if how not in forms:
            output = run(*command, tmp_path / "no", "--activations", how, code=2)
            assert f"the layout {layout} has no form of {name} with activations {how}" in output
            assert f"; it has {forms[0]}" in output and not (tmp_path / "no").exists()
            continue
        run(*command, tmp_path / how, "--activations", how)
        config = quantization(tmp_path / how)
        assert (config == quantization(tmp_path / "default")) == (how == forms[0])
        scheme = read_layout(config).scheme("model.layers.0.mlp.up_proj")
        assert scheme is not None and bool(scheme.input) == (how == "dynamic")
        if layout == CT:
            check_preset(config, name, how)
        weights = [(tmp_path / which / "model.safetensors").read_bytes() for which in (how, "default")]
        assert weights[0] == weights[1]


def test_converting_keeps_them(source: Path, tmp_path: Path) -> None:
    """If the other layout supports them; otherwise a note says what they become."""
    run("quantize", source, tmp_path / "a16", "--format", "mxfp8", "--activations", "none")
    found = run_json("convert", tmp_path / "a16", tmp_path / "same", "--layout", CT)
    assert found["activations"] == "none" and found["notes"] == []
    assert quantization(tmp_path / "same") == quantization(tmp_path / "a16")
    output = run("convert", tmp_path / "a16", tmp_path / "modelopt", "--layout", "modelopt")
    assert (
        "note: the source's activations are none, for which the layout modelopt has no form of mxfp8: "
        in output
    )
    assert output.endswith("they become dynamic\n")


def test_no_config(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    for path in (folder, folder / "model.safetensors"):
        found = run_json("quantize", path, tmp_path / f"to{path.name}")
        assert (
            len(found["notes"]) == 1
            and f"{path} has no config.json, so the result has none" in found["notes"][0]
        )
    assert "note: " in run("quantize", folder, tmp_path / "output")
    assert run_json("quantize", source, tmp_path / "whole")["notes"] == []
    stacks = {f"a.{i}.experts.down_proj": torch.ones(2, 64, 128) for i in range(2)}
    safetensors.save_file(stacks, folder / "model.safetensors")
    notes = run_json("quantize", folder, tmp_path / "stacks", "--dry-run")["notes"]
    assert len(notes) == 2 and "stacked experts are assumed to be [experts, out, in]" in notes[0]


# ---- ModelOpt's names ----


def test_modelopt_names(source: Path, tmp_path: Path) -> None:
    """The names are ModelOpt's own, and are read in upper and lower case."""
    constants = need("modelopt.torch.export.model_config")
    run("quantize", source, tmp_path / "to", "--format", "fp8blk2", "--layout", "modelopt")
    own = json.loads((tmp_path / "to" / "hf_quant_config.json").read_text())["quantization"]
    assert quantization(tmp_path / "to")["quant_algo"] == own["quant_algo"] == constants.QUANTIZATION_FP8_PB_WO
    for name in ("NVFP4", "W4A16_NVFP4", "FP8", "MXFP8", "FP8_PB_WO", "MXFP4", "W4A8_MXFP4_FP8"):
        schemes = [
            read_layout({"quant_method": method, "quant_algo": spelled}).scheme("m")
            for method, spelled in (("modelopt", name), ("ModelOpt", name.lower()))
        ]
        assert schemes[0] is not None and schemes[0] == schemes[1], name
    mixed = {"quant_method": "modelopt", "quant_algo": "mixed_precision"}
    layers = {"a": {"quant_algo": "nvfp4"}, "b": {"quant_algo": "fp8_pb_wo"}}
    layout = read_layout({**mixed, "quantized_layers": layers})
    assert [layout.scheme(name).weight.partition("+")[0] for name in "ab"] == ["nvfp4", "fp8blk2"]  # type: ignore[union-attr]


@pytest.mark.parametrize("algorithm", ["mxfp4", "W4A8_MXFP4_FP8"])
def test_modelopt_mxfp4(tmp_path: Path, algorithm: str) -> None:
    """Weights of ModelOpt's own tensor class are read as mxfp4, decoded to its values, and loaded."""
    own = need("modelopt.torch.quantization.qtensor").MXFP4QTensor
    stored, wanted = {}, {}
    for key, w in cli_llama.llama("bf16").items():
        stored[key] = w
        if key.endswith("_proj.weight"):
            codes, scale = own.quantize(w.float(), 32)
            stored[key] = codes._quantized_data
            stored[key + "_scale"] = scale.reshape(w.shape[0], -1)
            wanted[key] = codes.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
            if algorithm != "mxfp4":
                stored[key.removesuffix("weight") + "input_scale"] = torch.tensor(0.05)
    folder = tmp_path / "in"
    folder.mkdir()
    safetensors.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**cli_llama.CONFIG, "quantization_config": config}))
    found = run_json("inspect", folder)
    assert (found["layout"], found["formats"], found["notes"]) == ("modelopt", ["mxfp4"], [])
    run_well("convert", "--quiet", "--layout", "plain", "--dtype", "f32", folder, tmp_path / "plain")
    plain = tensors(tmp_path / "plain")
    for key, value in wanted.items():
        assert torch.equal(plain[key], value), key
    output = run(
        "quantize", tmp_path / "plain", tmp_path / "no", "--format", "mxfp4", "--layout", "modelopt", code=2
    )
    assert (
        "the layout modelopt does not have the format mxfp4; it has nvfp4, mxfp8, fp8, fp8row, fp8blk2"
        in output
    )
    transformers = need("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=opaq.Config()
    )
    for key, value in wanted.items():
        assert torch.equal(model.get_parameter(key).dequantize(torch.float32), value), key
    with torch.no_grad():
        assert bool(model(torch.arange(2, 18).reshape(1, 16)).logits.isfinite().all())
