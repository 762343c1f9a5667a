"""What PEFT refuses over packed layers, by errors that name what works; its methods that change no layer."""

from __future__ import annotations

import copy

import pytest

from conftest import need
from test_peft import NAMES, llama, logits, lora, pair, relative, train_once

torch = need("torch")
peft = need("peft")
opaq = need("opaq")

from torch import nn  # noqa: E402


@pytest.mark.parametrize("initialization", ["pissa", "olora", "loftq", "eva", "corda", "lora_ga"])
def test_initializations_that_change_the_weight_are_refused(initialization: str) -> None:
    model = llama()
    opaq.quantize_(model, "nvfp4", progress=False)
    config = lora(
        init_lora_weights=initialization,
        **({"loftq_config": {"loftq_bits": 4}} if initialization == "loftq" else {}),
    )
    with pytest.raises(NotImplementedError, match=f"opaq: init_lora_weights='{initialization}' .* packed"):
        peft.get_peft_model(model, config)


def test_they_are_refused_for_a_second_adapter_too() -> None:
    packed, _ = pair(lora())
    before = logits(packed)
    for options in ({"init_lora_weights": "pissa"}, {"arrow_config": peft.ArrowConfig()}):
        with pytest.raises((NotImplementedError, ValueError), match="opaq|Arrow|arrow|variant"):
            packed.add_adapter(f"second {next(iter(options))}", lora(**options))
    packed.set_adapter("default")
    assert torch.equal(logits(packed), before)


def test_variants_other_than_dora_are_refused() -> None:
    """By an error of PEFT, which names the variant."""
    for options, said in (
        ({"arrow_config": peft.ArrowConfig()}, "arrow"),
        ({"alora_invocation_tokens": [1, 2]}, "alora"),
    ):
        model = llama()
        opaq.quantize_(model, "nvfp4", progress=False)
        with pytest.raises((NotImplementedError, ValueError), match=f"(?i){said}"):
            peft.get_peft_model(model, lora(**options))


def test_adapters_of_packed_experts_are_refused() -> None:
    model = nn.Sequential()
    model.add_module("experts", opaq.MLP(32, 64, quantizer="nvfp4"))
    with pytest.raises(NotImplementedError, match="opaq: LoRA adapters of an opaq.MLP are not supported"):
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["experts"]))


@pytest.mark.parametrize(("kind", "quantizer"), [("MoE", "nvfp4"), ("MoE", ""), ("GroupedLinear", "")])
def test_target_parameters_of_opaqs_own_experts_are_refused(kind: str, quantizer: str) -> None:
    """Of a packed GroupedLinear they are not: test_peft_grouped.py."""
    made = opaq.MoE(32, 64, 2) if kind == "MoE" else opaq.GroupedLinear(2, 32, 64)
    model = nn.Sequential()
    model.add_module("experts", made)
    name = "gate_up" if kind == "MoE" else "weight"
    if quantizer:
        opaq.quantize_(model, quantizer, progress=False)
    said = (
        f"target_parameters names {name} of an opaq.{kind}.*nvfp4"
        if quantizer
        else f"of an opaq.{kind} are not"
    )
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[f"experts.{name}"])
    with pytest.raises(NotImplementedError, match=said):
        peft.get_peft_model(model, config)


def test_target_parameters_of_packed_linear_layers_are_refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.weight"])
    model = llama()
    opaq.quantize_(model, "nvfp4", progress=False)
    said = (
        r"target_parameters names weight of an opaq.QuantizedLinear, which is packed \(nvfp4.*by target_modules"
    )
    with pytest.raises(NotImplementedError, match=said):
        peft.get_peft_model(model, config)
    plain = llama()
    opaq.quantize_(plain, "nvfp4", ignore=["lm_head", "q_proj"], progress=False)
    made = peft.get_peft_model(plain, config)
    assert any("lora_A" in key for key, parameter in made.named_parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", ["IA3", "Vera", "OFT", "AdaLora", "LoHa", "LoKr", "BOFT"])
def test_other_adapters_of_peft_raise_their_own_error(name: str) -> None:
    more = {"AdaLora": {"total_step": 10}, "IA3": {"feedforward_modules": []}, "OFT": {"oft_block_size": 8}}
    config = getattr(peft, f"{name}Config")(target_modules=["q_proj"], **more.get(name, {}))
    model = llama()
    opaq.quantize_(model, "nvfp4", progress=False)
    with pytest.raises((ValueError, TypeError), match="QuantizedLinear|No layers types compatible with VeRA"):
        peft.get_peft_model(model, config)


def test_models_with_adapters_are_not_quantized() -> None:
    model = peft.get_peft_model(llama(), lora())
    before = list(model.named_parameters())
    with pytest.raises(
        ValueError, match=r"q_proj has adapters of PEFT, .* call quantize_ before get_peft_model"
    ):
        opaq.quantize_(model, "nvfp4", progress=False)
    assert all(a is b for (_, a), (_, b) in zip(before, model.named_parameters(), strict=True))
    opaq.quantize_(model.merge_and_unload(), "nvfp4", progress=False)


@pytest.mark.parametrize("name", ["PrefixTuning", "PromptTuning", "PromptEncoder"])
def test_tuned_prompts_have_the_gradients_of_plain_layers(name: str) -> None:
    """They change no layer; their gradients come through the packed weights."""
    config = getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", num_virtual_tokens=4)
    packed = llama()
    opaq.quantize_(packed, "nvfp4", progress=False)
    plain = copy.deepcopy(packed)
    opaq.dequantize_(plain)
    found = []
    for model in (packed, plain):
        torch.manual_seed(2)
        found.append(train_once(peft.get_peft_model(model, copy.deepcopy(config))))
    assert found[0].keys() == found[1].keys() != set()
    for key, gradient in found[0].items():
        assert relative(gradient, found[1][key]) < 1e-4, key


def test_custom_modules_of_the_configuration_take_precedence() -> None:
    class Own(peft.tuners.lora.layer.Linear):
        pass

    model = llama()
    opaq.quantize_(model, "nvfp4", progress=False)
    config = lora()
    config._register_custom_module({opaq.QuantizedLinear: Own})
    with pytest.warns(UserWarning, match="Unsupported layer type"):
        made = peft.get_peft_model(model, config)
    assert type(made.base_model.model.model.layers[0].mlp.up_proj) is Own


def test_modules_to_save_of_packed_layers_are_refused() -> None:
    packed = llama()
    opaq.quantize_(packed, "nvfp4", ignore=(), progress=False)
    config = peft.LoraConfig(target_modules=NAMES, modules_to_save=["lm_head"])
    with pytest.raises(
        NotImplementedError, match=r"modules_to_save .* 1 packed weights.*weight \(96, 64\) \(nvfp4"
    ):
        peft.get_peft_model(packed, config)
    plain_head = llama()
    opaq.quantize_(plain_head, "nvfp4", progress=False)
    model = peft.get_peft_model(plain_head, config)
    assert model.lm_head.modules_to_save["default"].weight.requires_grad
