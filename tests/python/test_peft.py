"""PEFT's LoRA and DoRA over packed models, against PEFT over plain layers with the dequantized weights:
outputs, gradients, merging, switching, saving, gradient checkpointing, autocast, compiling. What is refused:
test_peft_refused.py; experts: test_peft_experts.py."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import need

torch = need("torch")
transformers = need("transformers")
peft = need("peft")
opaq = need("opaq")

from torch import nn  # noqa: E402

VOCABULARY, NAMES = 96, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(dtype: Any = torch.float32, bias: bool = False) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    if bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return model


def pair(
    config: Any, quantizer: str = "nvfp4", dtype: Any = torch.float32, bias: bool = False, device: str = "cpu"
) -> tuple[Any, Any]:
    """The packed model with adapters, and the plain model with the same values and adapters. Packed on the CPU,
    in tiles, which become rows on the way to a GPU."""
    packed = llama(dtype, bias)
    opaq.quantize_(packed, quantizer, progress=False)
    plain = copy.deepcopy(packed)
    opaq.dequantize_(plain)
    models = []
    for model in (packed, plain):
        torch.manual_seed(2)
        models.append(peft.get_peft_model(model, copy.deepcopy(config)))
        fill(models[-1])
        models[-1].to(device)
    return models[0], models[1]


def fill(model: Any, adapter: str = "default", seed: int = 3) -> None:
    """Fills adapters with random numbers: PEFT initializes B with 0, which has no effect."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"lora_B.{adapter}" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=made))
            if f"lora_magnitude_vector.{adapter}" in name:
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=made))


def tokens() -> Any:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))


def device_of(model: Any) -> Any:
    return next(model.parameters()).device


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(tokens().to(device_of(model))).logits


def relative(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def train_once(model: Any) -> dict[str, Any]:
    model.zero_grad()
    ids = tokens().to(device_of(model))
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def lora(**more: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=NAMES, task_type="CAUSAL_LM", **more)


# ---- the same numbers as PEFT over plain layers ----


@pytest.mark.parametrize("quantizer", ["nvfp4", "mxfp8", "mxfp4", "fp8row", "fp8blk2"])
def test_outputs_and_gradients_are_those_of_plain_layers(quantizer: str, device: str) -> None:
    packed, plain = pair(lora(), quantizer, device=device)
    layer = packed.base_model.model.model.layers[0].mlp.down_proj
    assert type(layer.base_layer) is opaq.QuantizedLinear
    assert isinstance(layer.base_layer.weight, opaq.QuantizedTensor)
    assert layer.base_layer.weight.device.type == device
    assert relative(logits(packed), logits(plain)) < (1e-5 if device == "cpu" else 1e-4)
    got, expected = train_once(packed), train_once(plain)
    assert got.keys() == expected.keys()
    assert len(got) == 2 * 7 * 2
    for name, gradient in got.items():
        assert relative(gradient, expected[name]) < (1e-4 if device == "cpu" else 1e-3), name


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
    ],
    ids=lambda options: "-".join(f"{key}-{value}" for key, value in options.items()),
)
@pytest.mark.filterwarnings("ignore:.*no bias. This means")
def test_options(options: dict[str, Any]) -> None:
    packed, plain = pair(lora(**options), bias=True)
    assert relative(logits(packed), logits(plain)) < 1e-5
    got, expected = train_once(packed), train_once(plain)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert relative(gradient, expected[name]) < 1e-4, name
    biases = [name for name in got if name.endswith("base_layer.bias")]
    assert bool(biases) == ("bias" in options)
    assert any("lm_head" in name for name in got) == ("modules_to_save" in options)
    if options.get("use_dora"):
        assert sum("lora_magnitude_vector" in name for name in got) == 14


def test_dropout_acts_on_the_adapter_only() -> None:
    packed, _ = pair(lora(lora_dropout=0.5))
    packed.train()
    assert not torch.equal(logits(packed), logits(packed))
    with packed.disable_adapter():
        assert torch.equal(logits(packed), logits(packed))


def test_all_linear_means_packed_layers_too() -> None:
    for ignore in (("lm_head",), ()):
        model = llama()
        opaq.quantize_(model, "nvfp4", progress=False, ignore=(*ignore, "o_proj"))
        made = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        layers = [m for m in made.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        assert len(layers) == 14
        assert sum(type(layer).__name__ == "LoraQuantizedLinear" for layer in layers) == 12
    made.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert all(set(layer.lora_A) == {"default", "second"} for layer in layers)
    assert not any("base_layer" in name for name in made.peft_config["second"].target_modules)


# ---- several adapters ----


def test_adapters_are_added_switched_disabled_and_deleted() -> None:
    packed, plain = pair(lora())
    base = None
    for model in (packed, plain):
        torch.manual_seed(5)
        model.add_adapter("other", lora(use_dora=True))
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
    assert not torch.equal(seen[1], seen[2])
    assert relative(seen[1], base) > 0.01
    packed.delete_adapter("default")
    packed.set_adapter("other")
    assert torch.equal(logits(packed), seen[2])
    assert torch.equal(logits(packed.unload()), base)


def test_each_row_of_a_batch_with_its_own_adapter() -> None:
    packed, plain = pair(lora())
    for model in (packed, plain):
        torch.manual_seed(5)
        model.add_adapter("other", lora())
        fill(model, "other", 6)
        model.eval()
    names = ["other", "__base__"]
    with torch.no_grad():
        got, expected = (model(tokens(), adapter_names=names).logits for model in (packed, plain))
    assert relative(got, expected) < 1e-5


# ---- merging ----


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["lora", "dora", "bias"])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.filterwarnings("ignore:.*no bias. This means")
def test_merging_packs_the_sum_and_unmerging_is_exact(
    options: dict[str, Any], safe: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = lora(**options)
    config.target_modules = {"q_proj", "v_proj"}
    packed, plain = pair(config, bias=True, device=device)
    before, layer = logits(packed), packed.base_model.model.model.layers[0].self_attn.q_proj
    bytes_before = [buffer.clone() for buffer in layer.base_layer.weight.buffers()]
    with caplog.at_level(logging.INFO, logger="opaq.peft"):
        packed.merge_adapter(safe_merge=safe)
    plain.merge_adapter(safe_merge=safe)
    # the new weight is the quantized sum, and the logged SQNR is that of the sum
    values = plain.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    expected = opaq.quantize_tensor(values.weight.detach(), "nvfp4")
    assert layer.base_layer.quantizer == ("nvfp4+tiled" if device == "cpu" else "nvfp4")
    assert relative(layer.base_layer.weight.dequantize(), expected.dequantize()) < 1e-3
    assert torch.allclose(layer.base_layer.bias, values.bias, atol=1e-6)
    assert layer.merge_sqnr == pytest.approx(opaq.sqnr(values.weight.detach(), expected), abs=0.01)
    assert f"SQNR {layer.merge_sqnr:.2f} dB" in caplog.text
    assert 0 < relative(logits(packed), before) < 0.2
    assert packed.base_model.model.model.layers[0].self_attn.q_proj.merged
    packed.unmerge_adapter()
    assert torch.equal(logits(packed), before)
    after = layer.base_layer.weight.buffers()
    assert all(torch.equal(a, b) for a, b in zip(after, bytes_before, strict=True))


def test_adapters_merged_one_after_another_are_rounded_once() -> None:
    packed, _ = pair(lora())
    torch.manual_seed(5)
    packed.add_adapter("other", lora(use_dora=True))
    fill(packed, "other", 6)
    again = copy.deepcopy(packed)
    packed.merge_adapter(adapter_names=["default"])
    packed.merge_adapter(adapter_names=["other"])
    again.merge_adapter(adapter_names=["default", "other"])
    assert torch.equal(logits(packed), logits(again))
    with packed.disable_adapter():  # PEFT unmerges for it
        unmerged = logits(packed)
    with again.disable_adapter():
        assert torch.equal(logits(again), unmerged)


def test_a_merged_model_moves(device: str) -> None:
    """The weight from before the first merge moves along, for a second merge and for unmerging."""
    packed, _ = pair(lora(), bias=True)
    packed.add_adapter("other", lora(use_dora=True))
    fill(packed, "other", 6)
    there = copy.deepcopy(packed).to(device)
    packed.merge_adapter(adapter_names=["default"])
    packed.to(device)
    packed.merge_adapter(adapter_names=["other"])
    there.merge_adapter(adapter_names=["default", "other"])
    assert device_of(packed).type == device
    assert relative(logits(packed), logits(there)) < 1e-3
    for model in (packed, there):
        model.unmerge_adapter()
    assert torch.equal(logits(packed), logits(there))
    layer = packed.base_model.model.model.layers[0].self_attn.q_proj
    layer.merge(adapter_names=["other"])
    layer.to("meta")
    assert all(kept.device.type == "meta" for kept in layer._before_merge)


def test_merge_and_unload_gives_a_packed_model(device: str) -> None:
    packed, _ = pair(lora(), device=device)
    merged = copy.deepcopy(packed).merge_and_unload()
    kinds = [m for m in merged.modules() if isinstance(m, opaq.QuantizedLinear)]
    assert len(kinds) == 14
    assert not any("lora" in name for name, _ in merged.named_parameters())
    packed.merge_adapter()
    assert torch.equal(logits(merged), logits(packed))


def test_transposed_weights_are_not_assumed() -> None:
    """fan_in_fan_out would merge a square layer's adapter transposed. PEFT ignores it for nn.Linear too."""
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        packed, plain = pair(lora(fan_in_fan_out=True))
    packed.merge_adapter()
    plain.merge_adapter()
    layers = [m.base_model.model.model.layers[0].self_attn.q_proj.base_layer for m in (packed, plain)]
    expected = opaq.quantize_tensor(layers[1].weight.detach(), "nvfp4")
    assert relative(layers[0].weight.dequantize(), expected.dequantize()) < 1e-3


def test_a_merge_keeps_the_dtype() -> None:
    packed, plain = pair(lora(), dtype=torch.bfloat16)
    packed.merge_adapter()
    layer = packed.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert layer.weight.dtype == torch.bfloat16 and layer.weight.dequantize().dtype == torch.bfloat16
    plain.merge_adapter()
    assert relative(logits(packed).float(), logits(plain).float()) < 0.3


def test_a_merge_that_fails_leaves_the_layer_as_it_was() -> None:
    packed, _ = pair(lora())
    packed.add_adapter("broken", lora())
    layer = packed.base_model.model.model.layers[1].mlp.up_proj
    before = logits(packed)
    with torch.no_grad():
        layer.lora_B["broken"].weight[0, 0] = float("nan")
    for merged in ([], ["default"]):
        if merged:
            layer.merge(adapter_names=merged)
        weight = layer.base_layer.weight
        with pytest.raises(ValueError, match="NaNs detected"):
            layer.merge(safe_merge=True, adapter_names=[*({"default"} - {*merged}), "broken"])
        assert layer.base_layer.weight is weight
        assert layer.merged_adapters == merged
    layer.unmerge()
    assert torch.equal(logits(packed), before)


# ---- saving ----


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    packed, _ = pair(lora(modules_to_save=["lm_head"], use_dora=True))
    packed.save_pretrained(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in names
    assert not any(name.startswith("model") for name in names)
    model = llama()
    opaq.quantize_(model, "nvfp4", progress=False)
    loaded = peft.PeftModel.from_pretrained(model, str(tmp_path), is_trainable=True)
    assert torch.equal(logits(loaded), logits(packed))
    got, expected = train_once(loaded), train_once(packed)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    llama(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def test_a_model_from_a_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    """With quantization_config, an adapter from a folder, and transformers' own add_adapter."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    made = peft.get_peft_model(load(checkpoint, quantization_config=opaq.Config("nvfp4")), lora())
    fill(made)
    assert len(train_once(made)) == 28
    made.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(
        load(checkpoint, quantization_config=opaq.Config("nvfp4")), str(tmp_path)
    )
    assert torch.equal(logits(loaded), logits(made))
    native = load(checkpoint, quantization_config=opaq.Config("nvfp4"))
    native.load_adapter(str(tmp_path))
    assert relative(logits(native), logits(made)) < 0.02  # transformers keeps adapters in bf16
    merged = made.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = load(str(tmp_path / "merged"))
    assert isinstance(again.model.layers[0].mlp.up_proj, opaq.QuantizedLinear)
    assert torch.equal(logits(again), logits(merged))


# ---- ways to train ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    packed, _ = pair(lora(), dtype=torch.bfloat16)
    expected = train_once(packed)
    packed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    packed.enable_input_require_grads()
    packed.train()
    got = train_once(packed)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_prepare_model_for_kbit_training(checkpoint: str) -> None:
    """PEFT's preparation freezes parameters and casts plain ones to float32; of packed weights it changes only
    the nominal dtype. It does not recognize the quantization method, so it does not enable checkpointing."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(checkpoint, quantization_config=opaq.Config("nvfp4"), dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    before = [buffer.clone() for buffer in layer.weight.buffers()]
    model = peft.prepare_model_for_kbit_training(model)
    assert isinstance(layer.weight, opaq.QuantizedTensor)
    assert all(torch.equal(a, b) for a, b in zip(layer.weight.buffers(), before, strict=True))
    assert model.model.norm.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()
    made = peft.get_peft_model(model, lora())
    made.train()
    assert len(train_once(made)) == 28


def test_autocast(device: str) -> None:
    packed, plain = pair(lora(), device=device)
    with torch.autocast(device, torch.bfloat16):
        got, expected = logits(packed), logits(plain)
        gradients = train_once(packed)
    assert got.dtype == expected.dtype
    assert relative(got, expected) < 0.02
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_layer_compiles_as_one_graph(options: dict[str, Any], device: str) -> None:
    torch._dynamo.reset()
    packed, _ = pair(lora(**options), dtype=torch.bfloat16, device=device)
    layer = packed.base_model.model.model.layers[0].mlp.up_proj
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 64).to(device, torch.bfloat16)
    results = []
    for function in (layer, compiled):
        given = x.clone().requires_grad_()
        packed.zero_grad()
        y = function(given)
        y.float().square().sum().backward()
        results.append(
            [y.detach(), given.grad, *(p.grad.clone() for p in layer.parameters() if p.requires_grad)]
        )
    assert len(results[0]) == 4 + len(options)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_whole_model_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    packed, _ = pair(lora())
    expected = train_once(packed)
    packed.zero_grad()
    compiled = torch.compile(packed.base_model.model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            assert relative(parameter.grad, expected[name]) < 1e-5, name


class Lines(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.arange(index, index + 12) % VOCABULARY
        return {"input_ids": row, "labels": row}


def test_trainer(checkpoint: str, tmp_path: Path) -> None:
    need("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = peft.get_peft_model(load(checkpoint, quantization_config=opaq.Config("nvfp4")), lora())
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    before = [buffer.clone() for buffer in layer.weight.buffers()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=12,
        learning_rate=2e-2,
        gradient_checkpointing=True,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Lines())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(layer.weight.buffers(), before, strict=True))
    assert (tmp_path / "checkpoint-12" / "adapter_model.safetensors").exists()


# ---- imports ----

ORDERS = {
    "opaq first": "import opaq\nassert 'peft' not in sys.modules\nimport peft\n",
    "peft first": "import peft\nimport opaq\n",
    "a part of peft first": "import opaq\nfrom peft.tuners.lora.model import LoraModel\nimport peft\n",
}


@pytest.mark.parametrize("order", ORDERS)
def test_either_order_of_imports(order: str) -> None:
    program = f"""import sys, torch
{ORDERS[order]}
model = torch.nn.Sequential(torch.nn.Linear(32, 64))
opaq.quantize_(model, "mxfp8", progress=False)
made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
print(type(made.base_model.model[0]).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "LoraQuantizedLinear"
