"""Small random models for the tests with vLLM: checkpoints in bfloat16 whose likeliest tokens are clear."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 256
_COMMON = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def _config(family: str) -> Any:
    if family == "llama":
        return transformers.LlamaConfig(**_COMMON, intermediate_size=512, num_key_value_heads=2, head_dim=64)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **_COMMON,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_experts=8,
            num_experts_per_tok=2,
            num_key_value_heads=2,
            head_dim=64,
            norm_topk_prob=True,
        )
    if family == "gpt_oss":
        return transformers.GptOssConfig(
            **_COMMON,
            intermediate_size=128,
            num_local_experts=8,
            num_experts_per_tok=2,
            num_key_value_heads=2,
            head_dim=64,
            sliding_window=64,
        )
    return transformers.DeepseekV3Config(
        **_COMMON,
        intermediate_size=512,
        moe_intermediate_size=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        topk_method="noaux_tc",
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def write_model(family: str, folder: Path) -> Path:
    """A checkpoint in bfloat16. Embeddings and the output layer have larger weights than the rest, so that
    rounding cannot change which token is the likeliest."""
    torch.manual_seed(len(family))
    config = _config(family)
    config.initializer_range = 0.05
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
        model.get_output_embeddings().weight.normal_(0.0, 0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("router.weight", "mlp.gate.weight")):
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def write_adapter(model: Path, folder: Path, rank: int = 8) -> Path:
    """LoRA adapters of all linear layers of a Llama, as PEFT saves them."""
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8 * rank, "bias": "none"}
    draw, tensors, names = torch.Generator().manual_seed(3), {}, set()
    for name, weight in load_file(model / "model.safetensors").items():
        if "_proj.weight" in name:
            module = name.removesuffix(".weight")
            names.add(module.rpartition(".")[2])
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                made = torch.randn(shape, generator=draw) * 0.05
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = made
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": sorted(names)}))
    return folder


def run_command(command: str, verb: str, source: Path, target: Path, *options: str) -> Path:
    """Runs `opaq quantize` or `opaq convert`."""
    if not target.exists():
        subprocess.run([command, verb, source, target, *options], check=True, capture_output=True)
    return target


def calibrate(source: Path, target: Path) -> Path:
    """A checkpoint of NVFP4 weights (compressed-tensors) like after a calibration: with a scale for every
    layer's input, and with different global scales for the projections that engines fuse."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [n for n in tensors if n.endswith(".weight_global_scale")]:
        module = name.removesuffix(".weight_global_scale")
        tensors[f"{module}.input_global_scale"] = torch.tensor([448.0 * 6 / 8])
        if module.endswith(("k_proj", "up_proj")):
            tensors[name] = tensors[name] * 1.25
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric")
    given = {key: group["weights"][key] for key in keys}
    group["input_activations"] = {**given, "dynamic": "local", "observer": "static_minmax"}
    (target / "config.json").write_text(json.dumps(config))
    return target
