"""Small models of transformers with random weights."""

from __future__ import annotations

from typing import Any

from conftest import need

torch = need("torch")
transformers = need("transformers")

COMMON = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "mixtral": ("Mixtral", {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "moe_intermediate_size": 128,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 64,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    family, more = MODELS[name]
    return getattr(transformers, f"{family}Config")(**{**COMMON, **more, **changes})


def make_empty(name: str, **changes: Any) -> Any:
    """The model as transformers initializes it."""
    return getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config_of(name, **changes))


def make_model(name: str, dtype: Any = torch.bfloat16, seed: int = 0, **changes: Any) -> Any:
    """A model whose weights differ enough in magnitude that all global scales differ, and whose logits differ
    enough that rounding does not change a token."""
    torch.manual_seed(seed)
    model = make_empty(name, **changes).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.05 * (0.5 + torch.rand(()).item()))
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.02)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # transformers keeps it in float32
                buffer.data = torch.randn(buffer.shape) * 0.1
        model.lm_head.weight.mul_(8)
    return model
