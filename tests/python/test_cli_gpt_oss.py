"""gpt-oss in the command: its experts are stacked, interleave gate and up, and are transposed if plain.
`quantize --layout gpt-oss` writes the blocks that transformers and vLLM load, `convert --layout plain` gives
the same values as transformers' own dequantization, and with other layouts a note says that experts are not
quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
transformers = need("transformers")
safetensors = need("safetensors.torch")
opaq = need("opaq")
models = need("checkpoint_models")
need("cli_checkpoints")

from cli_checkpoints import plain_tensors, run, run_json, write_model  # noqa: E402  # after what may be missing

EXPERTS = ("gate_up_proj", "down_proj")


def load(folder: Path, **more: Any) -> Any:
    """Loads with transformers; no tensor is missing or unexpected."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **more
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    return model


def dequantized(folder: Path) -> Any:
    return load(folder, quantization_config=transformers.Mxfp4Config(dequantize=True))


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(2, 34).reshape(2, 16)).logits


def assert_same(a: Any, b: Any) -> None:
    wanted = dict(b.named_parameters())
    for key, parameter in a.named_parameters():
        assert torch.equal(parameter, wanted[key]), key
    assert torch.equal(logits(a), logits(b))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small gpt-oss as transformers saves it, its quantized form, and that decoded."""
    top = tmp_path_factory.mktemp("gpt_oss")
    found = {name: top / name for name in ("plain", "blocks", "decoded")}
    models.make_model("gpt_oss", intermediate_size=160).save_pretrained(found["plain"])
    run("quantize", "--layout", "gpt-oss", "--format", "mxfp4", found["plain"], found["blocks"])
    run("convert", "--layout", "plain", found["blocks"], found["decoded"])
    return found


def test_plain_is_what_transformers_decodes(folders: dict[str, Path]) -> None:
    shapes = {key: parameter.shape for key, parameter in load(folders["plain"]).named_parameters()}
    tensors = safetensors.load_file(folders["decoded"] / "model.safetensors")
    assert {key: tensors[key].shape for key in shapes} == shapes
    assert "quantization_config" not in json.loads((folders["decoded"] / "config.json").read_text())
    assert_same(load(folders["decoded"]), dequantized(folders["blocks"]))


def test_blocks(folders: dict[str, Path]) -> None:
    """They are the library's mxfp4 of the transposed matrices, with gpt-oss's shapes and configuration."""
    plain = safetensors.load_file(folders["plain"] / "model.safetensors")
    found = safetensors.load_file(folders["blocks"] / "model.safetensors")
    for leaf in EXPERTS:
        key = f"model.layers.0.mlp.experts.{leaf}"
        experts, inputs, outputs = plain[key].shape
        assert found[key + "_blocks"].shape == (experts, outputs, inputs // 32, 16)
        assert found[key + "_scales"].shape == (experts, outputs, inputs // 32)
        assert torch.equal(found[key + "_bias"], plain[key + "_bias"]) and key not in found
        for e in range(experts):
            q = opaq.quantize(plain[key][e].mT.float().contiguous().numpy(), opaq.Quantizer("mxfp4+rule=ocp"))
            codes, scales = found[key + "_blocks"][e].flatten(1), found[key + "_scales"][e]
            value = models.spread(models.codes(codes), models.powers(scales), 1, 32)
            assert torch.equal(value, torch.from_numpy(opaq.dequantize(q)))
    config = json.loads((folders["blocks"] / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4" and "lm_head" in config["modules_to_not_convert"]
    run("verify", folders["blocks"], folders["plain"], "--min-sqnr", "14")
    run("diff", "--values", folders["blocks"], folders["decoded"], code=0)
    run("diff", "--values", folders["decoded"], folders["blocks"], code=0)


def test_opaq_loads_the_blocks(folders: dict[str, Path]) -> None:
    model = load(folders["blocks"], quantization_config=opaq.Config())
    parameter = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert isinstance(parameter, opaq.QuantizedTensor)
    wanted = load(folders["decoded"]).get_parameter("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(parameter.dequantize(torch.bfloat16), wanted.mT)


def test_blocks_are_not_quantized_again(folders: dict[str, Path], tmp_path: Path) -> None:
    for more in (["--format", "nvfp4"], ["--format", "mxfp4", "--layout", "gpt-oss"]):
        output = run("quantize", folders["blocks"], tmp_path / "to", *more, code=3)
        assert "has its experts quantized already, as mxfp4 in gpt-oss's layout" in output
        assert "'opaq convert --layout plain' decodes them" in output and not (tmp_path / "to").exists()


def test_other_layouts_note_unquantized_experts(folders: dict[str, Path], tmp_path: Path) -> None:
    """Attention is quantized, the experts are unchanged, and the summary has their share."""
    output = run("quantize", folders["plain"], tmp_path / "to")
    assert "%  gpt-oss's experts, which only --layout gpt-oss stores: 4 tensors, the first model" in output
    found = run_json("quantize", folders["plain"], tmp_path / "to", "--dry-run")
    plain = safetensors.load_file(folders["plain"] / "model.safetensors")
    own = sum(tensor.numel() for key, tensor in plain.items() if key.endswith(EXPERTS))
    reason = next(entry for entry in found["not_quantized"] if entry["reason"] == "interleaved")
    assert (reason["weights"], reason["parameters"]) == (4, own)
    everything = sum(tensor.numel() for tensor in plain.values())
    assert found["parameters"] == everything
    assert found["quantized"]["parameters"] + sum(e["parameters"] for e in found["not_quantized"]) == everything
    assert reason["share"] == pytest.approx(own / everything)
    made = safetensors.load_file(tmp_path / "to" / "model.safetensors")
    assert all(torch.equal(made[key], plain[key]) for key in plain if key.endswith(EXPERTS))
    model = load(tmp_path / "to")
    assert bool(logits(model).isfinite().all())


def test_experts_of_a_layer_go_together(folders: dict[str, Path], tmp_path: Path) -> None:
    more = ["--layout", "gpt-oss", "--format", "mxfp4", "--ignore", "model.layers.1.mlp.experts"]
    run("quantize", folders["plain"], tmp_path / "to", *more)
    config = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"].count("model.layers.1.mlp.experts") == 1
    made = safetensors.load_file(tmp_path / "to" / "model.safetensors")
    assert "model.layers.1.mlp.experts.down_proj" in made and "model.layers.0.mlp.experts.down_proj" not in made
    plain = load(folders["plain"])
    for model in (dequantized(tmp_path / "to"), load(tmp_path / "to", quantization_config=opaq.Config())):
        experts = model.model.layers[1].mlp.experts
        assert torch.equal(experts.down_proj, plain.model.layers[1].mlp.experts.down_proj)


def test_errors(folders: dict[str, Path], tmp_path: Path) -> None:
    source = write_model(tmp_path / "llama", plain_tensors(1))
    output = run("quantize", "--layout", "gpt-oss", "--format", "mxfp4", source, tmp_path / "to", code=3)
    assert "for models whose config.json has the model_type gpt_oss" in output
    output = run("quantize", "--layout", "gpt-oss", folders["plain"], tmp_path / "to", code=2)
    assert "the layout gpt-oss does not have the format nvfp4; it has mxfp4" in output
    stack = {"model.layers.0.mlp.experts.down_proj": torch.ones(2, 40, 64)}
    ragged = write_model(tmp_path / "ragged", stack)
    (ragged / "config.json").write_text('{"model_type": "gpt_oss"}')
    output = run("quantize", "--layout", "gpt-oss", "--format", "mxfp4", ragged, tmp_path / "to", code=3)
    assert "has inputs of size 40, expected a multiple of 32 for the layout gpt-oss" in output
    assert not (tmp_path / "to").exists()
