"""PEFT's LoRA over packed stacks of experts (target_parameters), against PEFT over plain experts with the
dequantized weights: outputs, gradients, merging, switching, saving, compiling; and over experts whose inputs
are quantized, against the packed model itself."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from conftest import need
from test_peft import device_of, fill, relative

torch = need("torch")
need("transformers")
peft = need("peft")
opaq = need("opaq")
models = need("checkpoint_models")

from opaq import _stacked  # noqa: E402

NAMES = ["experts.gate_up_proj", "experts.down_proj"]


def lora(names: list[str] = NAMES, **more: Any) -> Any:
    more = {"r": 4, "lora_alpha": 8, "target_modules": [], **more}
    return peft.LoraConfig(target_parameters=names, **more)


def packed_model(name: str = "qwen3_moe", quantizer: str = "nvfp4", activations: str = "") -> Any:
    model = models.make_model(name, torch.float32)
    opaq.quantize_(model, quantizer, activations=activations, progress=False)
    return model


def adapted(model: Any, names: list[str] = NAMES, **more: Any) -> Any:
    torch.manual_seed(2)
    made = peft.get_peft_model(model, lora(names, **more))
    fill(made)
    return made


def pair(name: str = "qwen3_moe", quantizer: str = "nvfp4", device: str = "cpu") -> tuple[Any, Any]:
    """The packed model with adapters, and the plain model with the same values and adapters."""
    packed = packed_model(name, quantizer)
    plain = copy.deepcopy(packed)
    opaq.dequantize_(plain)
    return adapted(packed).to(device), adapted(plain).to(device)


def tokens(device: Any = "cpu") -> Any:
    return torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(5)).to(device)


@torch.no_grad()
def logits(model: Any) -> Any:
    return model(input_ids=tokens(device_of(model)), use_cache=False).logits


def gradients(model: Any) -> dict[str, Any]:
    model.zero_grad()
    ids = tokens(device_of(model))
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def wrappers(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]


# ---- the same numbers as PEFT over plain experts ----


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("quantizer", ["nvfp4", "mxfp4", "mxfp8"])
def test_outputs_and_gradients_are_those_of_plain_experts(name: str, quantizer: str, device: str) -> None:
    """gpt-oss: biases, gate and up that alternate, and plain weights that are stored transposed."""
    packed, plain = pair(name, quantizer, device)
    experts = [m for m in packed.modules() if _stacked.is_packed(m)]
    assert experts and len(wrappers(packed)) == 2 * len(experts)
    assert relative(logits(packed), logits(plain)) < (1e-5 if device == "cpu" else 1e-4)
    got, expected = gradients(packed), gradients(plain)
    assert got.keys() == expected.keys()
    assert sum("experts" in key for key in got) == 4 * len(experts)
    for key, gradient in got.items():
        assert relative(gradient, expected[key]) < (1e-4 if device == "cpu" else 1e-3), key


def test_one_of_the_weights() -> None:
    for names in (NAMES[:1], NAMES[1:]):
        packed = packed_model()
        plain = copy.deepcopy(packed)
        opaq.dequantize_(plain)
        packed, plain = (adapted(model, names, target_modules=["q_proj"]) for model in (packed, plain))
        assert relative(logits(packed), logits(plain)) < 1e-5
        assert gradients(packed).keys() == gradients(plain).keys()


@pytest.mark.parametrize("activations", ["mxfp8", "nvfp4", "fp8", "fp8row"])
def test_inputs_are_quantized_as_without_adapters(activations: str, device: str) -> None:
    """Adapters of zeros change no bit, so each expert's rows are quantized as in one operator; gradients pass
    straight through."""
    quantizer = "fp8row" if "fp8" in activations and "mx" not in activations else activations
    model = packed_model("qwen3_moe", quantizer, activations).to(device)
    base = logits(model)
    made = peft.get_peft_model(model, lora()).to(device)
    zero = logits(made)
    assert torch.equal(zero, base) if device == "cpu" else relative(zero, base) < 0.1
    fill(made)
    assert relative(logits(made), base) > 0.02
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients(made).values())
    with made.disable_adapter():
        assert torch.equal(logits(made), base)


def test_ids_without_an_expert() -> None:
    """-1 and the number of experts, as under expert parallelism."""
    need("opaq.integrations.transformers")
    from opaq.integrations.transformers_experts import experts_forward

    module = next(m for m in packed_model().modules() if _stacked.is_packed(m))
    count, rank, hidden = len(module.down_proj), 4, module.gate_up_proj.shape[-1]
    x, weights = torch.randn(5, hidden), torch.rand(5, 2)
    ids = torch.tensor([[0, -1], [count, 1], [-1, count], [count - 1, 0], [1, 2]])
    zeros = torch.zeros(count, rank, hidden), torch.zeros(count, module.gate_up_proj.shape[1], rank), 1.0
    got = experts_forward(module, x, ids, weights, {"gate_up_proj": [zeros]})
    expected = experts_forward(module, x, ids, weights)
    assert relative(got, expected) < 1e-5
    assert not got[2].any() and got[[0, 1, 3, 4]].any(-1).all()


# ---- switching, merging, saving ----


def test_adapters_are_switched_disabled_deleted_and_unloaded() -> None:
    packed, plain = pair()
    for model in (packed, plain):
        torch.manual_seed(5)
        model.add_adapter("other", lora())
        fill(model, "other", 6)
    with packed.disable_adapter():
        base = logits(packed)
    seen = [base]
    for name in ("default", "other", "default"):
        packed.set_adapter(name)
        plain.set_adapter(name)
        assert relative(logits(packed), logits(plain)) < 1e-5
        seen.append(logits(packed))
    assert torch.equal(seen[1], seen[3])
    assert min(relative(a, b) for a, b in zip(seen, seen[1:], strict=False)) > 0.01
    for model in (packed, plain):
        model.base_model.set_adapter(["default", "other"])
    assert relative(logits(packed), logits(plain)) < 1e-5
    packed.delete_adapter("default")
    packed.set_adapter("other")
    assert torch.equal(logits(packed), seen[2])
    assert torch.equal(logits(packed.unload()), base)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_packs_the_sum_and_unmerging_is_exact(
    safe: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    packed, plain = pair(device=device)
    before = logits(packed)
    layer, other = wrappers(packed)[0], wrappers(plain)[0]
    with caplog.at_level(logging.INFO, logger="opaq.peft"):
        packed.merge_adapter(safe_merge=safe)
    plain.merge_adapter(safe_merge=safe)
    weight, values = layer.get_param(), other.get_param().detach()
    expected = opaq.quantize_tensor(values, "nvfp4")
    assert weight.quantizer.is_tiled == (device == "cpu")
    assert relative(weight.dequantize(), expected.dequantize()) < 1e-3
    assert layer.merge_sqnr == pytest.approx(opaq.sqnr(values, expected), abs=0.01)
    assert f"SQNR {layer.merge_sqnr:.2f} dB" in caplog.text
    assert 0 < relative(logits(packed), before) < 0.2
    packed.unmerge_adapter()
    assert torch.equal(logits(packed), before)
    merged = copy.deepcopy(packed).merge_and_unload()
    assert sum(_stacked.is_packed(m) for m in merged.modules()) == len(wrappers(packed)) // 2
    assert not any("lora" in name for name, _ in merged.named_parameters())
    packed.merge_adapter()
    assert torch.equal(logits(merged), logits(packed))


def test_adapters_merged_one_after_another_are_rounded_once(device: str) -> None:
    packed, _ = pair()
    packed.add_adapter("other", lora())
    fill(packed, "other", 6)
    again = copy.deepcopy(packed).to(device)
    packed.merge_adapter(adapter_names=["default"])
    packed.to(device)  # with the weight from before the first merge
    packed.merge_adapter(adapter_names=["other"])
    again.merge_adapter(adapter_names=["default", "other"])
    assert relative(logits(packed), logits(again)) < 1e-3
    with packed.disable_adapter(), again.disable_adapter():  # PEFT unmerges for it
        assert torch.equal(logits(packed), logits(again))


def test_a_merge_that_fails_leaves_the_stack_as_it_was() -> None:
    packed, _ = pair()
    layer = wrappers(packed)[0]
    weight = layer.get_param()
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert layer.get_param() is weight
    assert layer.merged_adapters == []


def test_adapters_of_plain_experts_load_over_packed_ones(tmp_path: Path) -> None:
    """And the other way round; gpt-oss, whose plain weights are transposed."""
    packed, plain = pair("gpt_oss", "mxfp4")
    for source, target in ((plain, packed), (packed, plain)):
        folder = str(tmp_path / str(target is packed))
        source.save_pretrained(folder)
        base = packed_model("gpt_oss", "mxfp4")
        if target is plain:
            opaq.dequantize_(base)
        loaded = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
        assert torch.equal(logits(loaded), logits(target))
        assert gradients(loaded).keys() == gradients(target).keys()


def test_a_model_from_a_checkpoint(tmp_path: Path) -> None:
    """Merged and saved in the checkpoint's layout, which has one global scale for each expert's gate and up."""
    models.write_checkpoint(tmp_path, models.make_model("qwen3_moe"), models.LAYOUTS["ct-nvfp4a16"])
    load = need("transformers").AutoModelForCausalLM.from_pretrained
    made = adapted(load(tmp_path, quantization_config=opaq.Config()))
    with made.disable_adapter():
        base = logits(made)
    assert relative(logits(made), base) > 0.02
    merged = made.merge_and_unload()
    stacks = [m for m in merged.modules() if _stacked.is_packed(m)]
    assert stacks and all(len(m.gate_up_proj.buffers()[2].unique()) == 2 * len(m.down_proj) for m in stacks)
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged", quantization_config=opaq.Config())
    assert torch.equal(logits(again), logits(merged))


# ---- ways to train ----


def test_a_whole_model_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    packed, _ = pair()
    expected = gradients(packed)
    packed.zero_grad()
    compiled = torch.compile(packed.base_model.model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for name, gradient in expected.items():
        assert relative(packed.get_parameter(name).grad, gradient) < 1e-5, name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    packed, _ = pair()
    expected = gradients(packed)
    packed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    packed.enable_input_require_grads()
    packed.train()
    got = gradients(packed)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_a_recipe_quantizes_the_inputs_of_packed_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = pair()
    original, seen = opaq.functional.grouped_linear, set()

    def observed(x: Any, splits: Any, weight: Any, *more: Any, **named: Any) -> Any:
        y = original(x, splits, weight, *more, **named)
        with opaq.autocast(enabled=False):
            plain = original(x, splits, weight, *more, **named)
        seen.add((isinstance(weight, opaq.QuantizedTensor), torch.equal(y, plain)))
        return y

    monkeypatch.setattr(opaq.functional, "grouped_linear", observed)
    with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
        found = gradients(packed)
    assert seen == {(True, False), (False, True)}
    assert all(gradient.isfinite().all() for gradient in found.values())


# ---- errors ----


def test_experts_whose_inputs_have_scales_are_refused(tmp_path: Path) -> None:
    models.write_checkpoint(tmp_path, models.make_model("qwen3_moe"), models.LAYOUTS["modelopt-nvfp4"])
    model = need("transformers").AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=opaq.Config()
    )
    said = "target_parameters names gate_up_proj of a Qwen3MoeExperts, .*nvfp4.* whose inputs have a checkpoint"
    with pytest.raises(NotImplementedError, match=said.replace("gate_up_proj", "(gate_up|down)_proj")):
        peft.get_peft_model(model, lora())


def test_initializations_and_rows_with_their_own_adapter_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="opaq: init_lora_weights='pissa' .* packed"):
        peft.get_peft_model(packed_model(), lora(init_lora_weights="pissa"))
    packed, _ = pair()
    with pytest.raises(ValueError, match="mixed"):
        wrappers(packed)[0](torch.randn(2, 256), adapter_names=["default", "default"])
