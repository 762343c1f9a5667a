"""quantize_ on models of transformers: packed experts run through its experts interface."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import opaq
from conftest import need
from torch_cases import same_buffers, same_bytes

torch = need("torch")
transformers = need("transformers")
need("opaq.integrations.transformers")
BF16 = torch.bfloat16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
CONFIGS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}
IDS = torch.arange(24).view(2, 12)


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **CONFIGS[name], **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(BF16).eval()
    with torch.no_grad():
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.1)
                elif parameter is not None and key.endswith("bias"):
                    parameter.normal_(0.0, 0.5)
    return model


def experts_of(model: Any) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Experts")}


def run(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def relative(y: Any, want: Any) -> float:
    return float((y.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_packed(name: str) -> None:
    model = model_of(name)
    plain = copy.deepcopy(model)
    summary = opaq.quantize_(model, "mxfp8", ignore=("lm_head",), progress=False)
    found, before = experts_of(model), experts_of(plain)
    assert found and not any("experts" in left for left in summary.left)
    for path, module in found.items():
        for key in ("gate_up_proj", "down_proj"):
            weight, old = getattr(module, key), getattr(before[path], key)
            old = old.mT.contiguous() if before[path].is_transposed else old
            rows = weight.tiled(False)
            assert same_buffers(rows.buffers(), opaq.quantize_tensor(old.detach(), "mxfp8").buffers())
    assert relative(run(model), run(plain)) < 0.5  # some tokens are routed to other experts
    # equal to the plain model with the dequantized weights
    logits = run(model)
    state = list(plain.state_dict())
    assert opaq.dequantize_(model) > 0
    assert relative(run(model), logits) < 0.02
    assert list(model.state_dict()) == state
    for path, module in experts_of(model).items():
        assert module.is_transposed == before[path].is_transposed
        assert module.config is model.config and not hasattr(module, "input_quantizer")
        assert module.gate_up_proj.shape == before[path].gate_up_proj.shape


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_ignored_experts_are_unchanged(name: str) -> None:
    model = model_of(name)
    plain = copy.deepcopy(model)
    summary = opaq.quantize_(model, "mxfp8", ignore=("lm_head", "model.layers.0.*"), progress=False)
    assert summary.left["model.layers.0.mlp.experts"] == "ignored"
    first, second = experts_of(model).values()
    assert not isinstance(first.down_proj, opaq.QuantizedTensor) and first.config is model.config
    assert isinstance(second.down_proj, opaq.QuantizedTensor)
    assert relative(run(model), run(plain)) < 0.1


def test_quantized_activations() -> None:
    model = model_of("Qwen3Moe")
    plain = copy.deepcopy(model)
    opaq.quantize_(model, "nvfp4", activations="nvfp4", progress=False)
    (module, *_) = experts_of(model).values()
    assert module.input_quantizer == module.hidden_quantizer == "nvfp4"
    assert 0.02 < relative(run(model), run(plain)) < 0.7


def test_a_failure_restores_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("GptOss")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = run(model)
    module = need("opaq.model")
    calls, quantize = [], module.quantize_tensor

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 8:
            raise MemoryError
        return quantize(*arguments)

    monkeypatch.setattr(module, "quantize_tensor", failing)
    with pytest.raises(MemoryError):
        opaq.quantize_(model, progress=False)
    now = model.state_dict()
    assert list(now) == list(state) and all(same_bytes(now[name], state[name]) for name in state)
    assert all(m.is_transposed and m.config is model.config for m in experts_of(model).values())
    assert same_bytes(run(model), want)


def test_experts_that_would_share_a_scale_are_an_error() -> None:
    model = model_of("Mixtral")
    with pytest.raises(ValueError, match="opaq.QuantizedTensor: rows .* cut a block"):
        opaq.quantize_(model, "fp8blk2", progress=False)
    assert not any(isinstance(parameter, opaq.QuantizedTensor) for parameter in model.parameters())


def test_tied_embeddings_stay() -> None:
    model = model_of("Qwen3Moe", tie_word_embeddings=True)
    summary = opaq.quantize_(model, "nvfp4", ignore=(), progress=False)
    assert "embed_tokens.weight" in summary.left["lm_head"]
