"""Invalid checkpoints: loading fails with a message that names the tensor and the problem, before a model is
created."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import opaq
from conftest import need

torch = need("torch")
transformers = need("transformers")
models = need("checkpoint_models")

from opaq.checkpoint import Header, read_layout  # noqa: E402  # after what may be missing

Q = "model.layers.1.self_attn.q_proj."
UP = "model.layers.0.mlp.experts.2.up_proj."
_kept: dict[tuple[str, str], Any] = {}


def tensors(name: str, layout: str) -> tuple[Any, dict[str, Any]]:
    """A model, and the tensors of a checkpoint of it, to be modified."""
    if (name, layout) not in _kept:
        plain = models.make_model(name)
        stored, _ = models.quantize_tensors(models.plain_tensors(plain), models.LAYOUTS[layout])
        _kept[name, layout] = plain, stored
    plain, stored = _kept[name, layout]
    return plain, dict(stored)


def write(folder: Path, name: str, layout: str, stored: dict[str, Any], config: Any = None) -> None:
    models.write_config(folder, tensors(name, layout)[0], config or models.LAYOUTS[layout].config)
    models.write_tensors(folder, stored)


def load(folder: Path, **more: Any) -> Any:
    transformers.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, quantization_config=opaq.Config(), **more)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored.pop(key)


def changed(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def modify(stored: dict[str, Any]) -> None:
        stored[key] = change(stored[key]).contiguous()

    return modify


def both(*changes: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def modify(stored: dict[str, Any]) -> None:
        for one in changes:
            one(stored)

    return modify


def all_but(keep: Callable[[str], bool]) -> Callable[[dict[str, Any]], None]:
    def modify(stored: dict[str, Any]) -> None:
        for key in [key for key in stored if not keep(key)]:
            del stored[key]

    return modify


INVALID = {
    "no scale": ("llama", "ct-nvfp4", without(Q + "weight_scale"), f"no {Q}weight_scale"),
    "no global": ("llama", "ct-nvfp4", without(Q + "weight_global_scale"), f"no {Q}weight_global_scale"),
    "no data": ("llama", "ct-nvfp4", without(Q + "weight_packed"), f"no {Q}weight_packed"),
    "fp8 without scale": ("llama", "ct-fp8-dynamic", without(Q + "weight_scale"), f"no {Q}weight_scale"),
    "nothing at all": ("llama", "ct-mxfp4", all_but(lambda key: Q not in key), f"nothing for {Q}weight"),
    "scale of float32": (
        "llama", "ct-nvfp4", changed(Q + "weight_scale", lambda t: t.float()),
        "weight_scale is F32 [256, 16], expected F8_E4M3",
    ),
    "scale of e4m3 for exponents": (
        "llama", "ct-mxfp8", changed(Q + "weight_scale", lambda t: t.view(torch.float8_e4m3fn)),
        "weight_scale is F8_E4M3 [256, 8], expected U8 or F8_E8M0",
    ),
    "scale of float16": (
        "llama", "ct-fp8-block", changed(Q + "weight_scale", lambda t: t.half()),
        "weight_scale is F16 [2, 2], expected F32 or BF16",
    ),
    "data of int8": (
        "llama", "ct-nvfp4", changed(Q + "weight_packed", lambda t: t.view(torch.int8)),
        "weight_packed is I8 [256, 128], expected U8",
    ),
    "global of bf16": (
        "llama", "ct-nvfp4", changed(Q + "weight_global_scale", lambda t: t.bfloat16()),
        "weight_global_scale is BF16 [1], expected F32",
    ),
    "fewer rows": (
        "llama", "ct-nvfp4", changed(Q + "weight_packed", lambda t: t[:-1]),
        f"for {Q}weight there are 1 quantized weights with 255 rows, expected 256",
    ),
    "fewer columns": (
        "llama", "ct-nvfp4", changed(Q + "weight_packed", lambda t: t[:, :-1]),
        "data has the shape [256,127], expected rows of 128 entries",
    ),
    "scale of fewer blocks": (
        "llama", "ct-nvfp4", changed(Q + "weight_scale", lambda t: t[:, :-1]),
        "scale has the shape [256,15], expected rows of 16 entries",
    ),
    "scale of fewer rows": (
        "llama", "deepseek-fp8", changed(Q + "weight_scale_inv", lambda t: t[:1]),
        "scale has the shape [1,2], expected [2,2]",
    ),
    "several globals": (
        "llama", "ct-nvfp4", changed(Q + "weight_global_scale", lambda t: t.repeat(2)),
        "global has the shape [2], expected [1,1]",
    ),
    "global of zero": (
        "llama", "modelopt-nvfp4", changed(Q + "weight_scale_2", lambda t: t * 0),
        f"{Q}weight_scale_2 is 0, expected a finite number above 0",
    ),
    "input scale not a number": (
        "llama", "modelopt-fp8", changed(Q + "input_scale", lambda t: t * float("nan")),
        f"{Q}input_scale is nan, expected a finite number above 0",
    ),
    "an expert missing": (
        "qwen3_moe", "ct-nvfp4", all_but(lambda key: "layers.0.mlp.experts.2." not in key),
        "3 quantized weights of the experts [0, 1, 3], expected 1 of each expert",
    ),
    "an expert's projection missing": (
        "qwen3_moe", "ct-fp8-dynamic", all_but(lambda key: UP not in key),
        "7 quantized weights of the experts [0, 1, 2, 3], expected 2 of each expert",
    ),
    "an expert's scale missing": (
        "qwen3_moe", "ct-nvfp4", without(UP + "weight_scale"), f"no {UP}weight_scale",
    ),
    "an expert with fewer rows": (
        "qwen3_moe", "ct-nvfp4",
        both(*(changed(UP + end, lambda t: t[:64]) for end in ("weight_packed", "weight_scale"))),
        "8 quantized weights with 960 rows, expected 1024",
    ),
    "an expert of another width": (
        "qwen3_moe", "ct-nvfp4", changed(UP + "weight_packed", lambda t: t[:, :-8]),
        f"{UP}weight cannot be loaded",
    ),
    "two scales of one input": (
        "qwen3_moe", "ct-nvfp4", changed(UP + "input_global_scale", lambda t: t * 2),
        "weights with one input have two scales of it, 896 and 1792",
    ),
    "an input's scale missing": (
        "qwen3_moe", "ct-nvfp4", without(UP + "input_global_scale"), "only some have a scale of their input",
    ),
    "blocks of fewer experts": (
        "gpt_oss", "gpt-oss-mxfp4", changed("model.layers.0.mlp.experts.gate_up_proj_blocks", lambda t: t[:3]),
        "1 quantized weights with 768 rows, expected 1024",
    ),
    "one projection plain": (
        "gpt_oss", "gpt-oss-mxfp4",
        both(
            *(without(f"model.layers.0.mlp.experts.down_proj_{end}") for end in ("blocks", "scales")),
            lambda stored: stored.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 128, 256)}),
        ),
        "of model.layers.0.mlp.experts only gate_up_proj is quantized",
    ),
    "a norm of another size": (
        "llama", "ct-nvfp4", changed("model.norm.weight", lambda t: t[:-1]),
        "model.norm.weight is (255,) in the checkpoint, expected (256,)",
    ),
    "an embedding": (
        "llama", "ct-fp8-dynamic",
        lambda stored: stored.update(
            {"model.embed_tokens.weight": torch.zeros(256, 256, dtype=torch.float8_e4m3fn),
             "model.embed_tokens.weight_scale": torch.ones(256, 1)}
        ),
        "model.embed_tokens (Embedding) is no linear layer and no experts",
    ),
    "a head that should be plain": (
        "llama", "ct-fp8-dynamic",
        lambda stored: stored.update({"lm_head.weight": torch.zeros(256, 256, dtype=torch.float8_e4m3fn)}),
        "lm_head is not quantized",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_checkpoint_is_rejected(case: str, tmp_path: Path) -> None:
    name, layout, modify, says = INVALID[case]
    _, stored = tensors(name, layout)
    modify(stored)
    write(tmp_path, name, layout, stored)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        load(tmp_path)
    assert str(caught.value).startswith("opaq: ") and says in str(caught.value)


@pytest.mark.parametrize("part", ["tail", "header", "everything"])
def test_a_truncated_file_is_refused(part: str, tmp_path: Path) -> None:
    _, stored = tensors("llama", "ct-nvfp4")
    write(tmp_path, "llama", "ct-nvfp4", stored)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: {"tail": -100, "header": 200, "everything": 0}[part]])
    with pytest.raises(ValueError, match="opaq: .*model.safetensors cannot be read"):
        load(tmp_path)


def test_rows_of_two_experts_share_no_scale(tmp_path: Path) -> None:
    """Projections of 64 rows do not have whole blocks of 128 rows."""
    plain = models.make_model("qwen3_moe", moe_intermediate_size=64)
    models.write_checkpoint(tmp_path, plain, models.LAYOUTS["deepseek-fp8"])
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj.*rows 0 to 64 cut a block in two"):
        load(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    plain, stored = tensors("llama", "ct-nvfp4")
    models.write_config(tmp_path, plain, models.LAYOUTS["ct-nvfp4"].config)
    torch.save(stored, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load(tmp_path)


def test_saved_buffers_are_checked(tmp_path: Path) -> None:
    models.make_model("llama").save_pretrained(tmp_path / "plain")
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=opaq.Config("nvfp4"))
    model.save_pretrained(tmp_path)
    stored = models.safetensors.load_file(tmp_path / "model.safetensors")
    for modify, says in (
        (without(Q + "weight._amax_rowwise"), "weight._amax_rowwise is None"),
        (changed(Q + "weight._rowwise_data", lambda t: t[1:]), "_rowwise_data is U8 [255, 128] in the"),
        (changed(Q + "weight._amax_rowwise", lambda t: t.bfloat16()), "_amax_rowwise is BF16 [1] in the"),
    ):
        modified = dict(stored)
        modify(modified)
        models.write_tensors(tmp_path, modified)
        with pytest.raises(ValueError) as caught:
            auto.from_pretrained(tmp_path)
        assert says in str(caught.value)


# ---- configurations ----


def ct(layout: str, where: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(models.LAYOUTS[layout].config)
    group = config["config_groups"]["group_0"]
    (group[where] if where else config).update(changes)
    return config


CONFIGS = {
    "no method": ({}, "quant_method is null, expected one of compressed-tensors, modelopt, fp8"),
    "another method": ({"quant_method": "gptq"}, 'quant_method is "gptq"'),
    "integers": (ct("ct-nvfp4", "weights", type="int"), "weights are symmetric int numbers"),
    "asymmetric": (ct("ct-nvfp4", "weights", symmetric=False), "asymmetric float"),
    "six bits": (ct("ct-mxfp4", "weights", num_bits=6), "weights are floats of 6 bits"),
    "groups of 64": (ct("ct-mxfp4", "weights", group_size=64), "group 64"),
    "blocks of 64": (ct("ct-fp8-block", "weights", block_structure=[64, 64]), "block [64, 64]"),
    "static groups": (ct("ct-mxfp8", "input_activations", dynamic=False), "static mxfp8, expected dynamic"),
    "inputs of 6 bits": (ct("ct-mxfp8", "input_activations", num_bits=6), "activations are floats of 6 bits"),
    "outputs": (ct("ct-nvfp4", "", config_groups={"g": {
        **models.LAYOUTS["ct-nvfp4"].config["config_groups"]["group_0"], "output_activations": {"num_bits": 8},
    }}), "output activations"),
    "sparse": (ct("ct-nvfp4", "", sparsity_config={"format": "sparse-24-bitmask"}), "is sparse"),
    "transformed": (ct("ct-nvfp4", "", transform_config={"config_groups": {"u": {}}}), "transforms its inputs"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, 'quant_algo is "W4A8_AWQ"'),
    "deepseek blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "size is [64, 64]"),
    "deepseek static": ({"quant_method": "fp8", "activation_scheme": "static"}, "static, expected dynamic"),
    "deepseek v4": ({"quant_method": "fp8", "expert_dtype": "fp4"}, 'expert_dtype is "fp4"'),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_is_refused(case: str) -> None:
    config, says = CONFIGS[case]
    with pytest.raises(ValueError) as caught:
        read_layout(config)
    assert str(caught.value).startswith("opaq: ") and says in str(caught.value)


def test_schemes_of_a_configuration() -> None:
    """Names take precedence over classes; ignored modules are plain; variants with the same quant_method."""
    config = ct("ct-nvfp4", "")
    groups = config["config_groups"]
    groups["group_1"] = {**models.LAYOUTS["ct-fp8-dynamic"].config["config_groups"]["group_0"]}
    groups["group_1"]["targets"] = ["re:.*self_attn.*"]
    layout = read_layout(config)
    found = {
        name: layout.scheme(name) for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    }
    assert [scheme.weight for scheme in found.values()] == [
        "fp8row+rule=compressed-tensors",
        "nvfp4+global+rule=compressed-tensors",
    ]
    assert layout.scheme("lm_head") is None and layout.scheme("model.layers.3.mlp.gate") is None
    wide = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    assert read_layout(wide).scheme("a.b").input == "fp8blk1+pow2"
    inner = {
        "quant_algo": "NVFP4",
        "exclude_modules": ["lm_head"],
    }  # of hf_quant_config.json, which has no method
    for same in (inner, {"quant_method": "modelopt_fp4", "quantization": inner}):
        assert read_layout(same).scheme("a").weight == "nvfp4+global+rule=modelopt"
        assert read_layout(same).scheme("lm_head") is None
    one = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    assert read_layout(one).scheme("a.b").names("a.b.weight") == {
        "data": "a.b.weight",
        "scale": "a.b.weight_scale_inv",
        "input": "a.b.activation_scale",
    }
    headers = {"x.weight": Header("F8_E4M3", (32, 64)), "x.weight_scale_inv": Header("U8", (32, 2))}
    mx = read_layout({"quant_method": "mxfp8", "weight_block_size": [1, 32]})
    assert {name: scheme.weight for name, scheme in mx.packed(headers).items()} == {"x.weight": "mxfp8"}
