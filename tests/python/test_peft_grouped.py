"""PEFT's LoRA over a packed opaq.GroupedLinear (target_parameters), against PEFT over a plain module with the
dequantized weight: outputs, gradients, merging, switching, compiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need
from test_peft import fill, relative

torch = need("torch")
peft = need("peft")
opaq = need("opaq")

from torch import nn  # noqa: E402

SPLITS = [4, 0, 3]


class Plain(nn.Module):
    """What opaq.GroupedLinear computes, by PyTorch."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Any, splits: Any) -> Any:
        parts = zip(x.split(splits.tolist()), self.weight, self.bias, strict=True)
        return torch.cat([part @ w.mT + b for part, w, b in parts])


class Model(nn.Module):
    """Two products, so that gradients pass through one."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Any, splits: Any) -> Any:
        return self.second(torch.tanh(self.first(x, splits)), splits)


def config(**more: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[], target_parameters=["first.weight", "second.weight"], **more
    )


def filled(quantizer: str, dtype: Any, *sizes: int) -> Any:
    made = opaq.GroupedLinear(3, *sizes, quantizer=quantizer, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape).to(dtype) * sizes[0] ** -0.5)
        made.bias.copy_(torch.randn(made.bias.shape).to(dtype))
    return made


def packed_model(quantizer: str = "nvfp4", dtype: Any = torch.float32, tiles: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model(filled(quantizer, dtype, 64, 128), filled(quantizer, dtype, 128, 256))
    if tiles:
        opaq.tile_(model)
    return model


def plain_of(model: Any) -> Any:
    parts = [Plain(part.weight.dequantize().float(), part.bias.float()) for part in (model.first, model.second)]
    return Model(*parts)


def adapted(model: Any) -> Any:
    torch.manual_seed(2)
    made = peft.get_peft_model(model, config())
    fill(made)
    return made


def inputs(device: str = "cpu", dtype: Any = torch.float32) -> tuple[Any, Any]:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    return x.requires_grad_(), torch.tensor(SPLITS, device=device)


def run(model: Any, function: Any = None, device: str = "cpu", dtype: Any = torch.float32) -> dict[str, Any]:
    model.zero_grad()
    x, splits = inputs(device, dtype)
    y = (model if function is None else function)(x, splits)
    y.float().square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("quantizer", ["nvfp4", "mxfp4", "mxfp8", "fp8row"])
def test_outputs_and_gradients_are_those_of_a_plain_module(quantizer: str, tiles: bool, device: str) -> None:
    model = packed_model(quantizer, tiles=tiles)
    plain = adapted(plain_of(model)).to(device)
    packed = adapted(model).to(device)
    got, expected = run(packed, device=device), run(plain, device=device)
    assert got.keys() == expected.keys() and len(got) == 2 + 4
    for key, value in got.items():
        assert relative(value, expected[key]) < (1e-5 if device == "cpu" else 1e-3), key


def test_adapters_of_zeros_change_no_bit() -> None:
    model = packed_model(dtype=torch.bfloat16)
    base = run(model, dtype=torch.bfloat16)
    zero = run(peft.get_peft_model(model, config()), dtype=torch.bfloat16)
    assert torch.equal(zero["y"], base["y"]) and torch.equal(zero["x"], base["x"])


def test_adapters_are_switched_disabled_and_unloaded() -> None:
    model = packed_model()
    base = run(model)["y"]
    packed = adapted(model)
    one = run(packed)["y"]
    packed.add_adapter("other", config())
    fill(packed, "other", 6)
    packed.set_adapter("other")
    other = run(packed)["y"]
    packed.set_adapter("default")
    assert torch.equal(run(packed)["y"], one) and relative(one, other) > 0.01
    with packed.disable_adapter():
        assert torch.equal(run(packed)["y"], base)
    assert torch.equal(run(packed.unload())["y"], base)


def test_merging_packs_the_sum_and_unmerging_is_exact() -> None:
    model = packed_model()
    plain, packed = adapted(plain_of(model)), adapted(model)
    before = run(packed)["y"]
    packed.merge_adapter(safe_merge=True)
    plain.merge_adapter(safe_merge=True)
    layer = packed.base_model.model.first
    values = plain.base_model.model.first.get_param().detach()
    assert relative(layer.get_param().dequantize(), opaq.quantize_tensor(values, "nvfp4").dequantize()) < 1e-3
    assert 0 < relative(run(packed)["y"], before) < 0.2
    packed.unmerge_adapter()
    assert torch.equal(run(packed)["y"], before)
    merged = packed.merge_and_unload()
    assert type(merged.first) is opaq.GroupedLinear and not any(
        "lora" in n for n, _ in merged.named_parameters()
    )


def test_saved_adapters_load(tmp_path: Path) -> None:
    packed = adapted(packed_model())
    packed.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(packed_model(), tmp_path, is_trainable=True)
    got, expected = run(loaded), run(packed)
    assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)


def test_it_compiles_as_one_graph() -> None:
    packed = adapted(packed_model(tiles=True))
    expected = run(packed)
    got = run(packed, compiled(packed.base_model.model))
    assert got.keys() == expected.keys()
    assert all(relative(got[key], expected[key]) < 1e-6 for key in got)


def test_a_recipe_quantizes_the_packed_products_only() -> None:
    packed = adapted(packed_model())
    without = run(packed)
    with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
        found = run(packed)
    assert 0 < relative(found["y"], without["y"]) < 0.1


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="opaq: init_lora_weights='pissa' .* packed"):
        peft.get_peft_model(packed_model(), config(init_lora_weights="pissa"))
    by_module = peft.LoraConfig(r=2, target_modules=["first"])
    with pytest.raises(NotImplementedError, match="of an opaq.GroupedLinear are not .* by target_parameters"):
        peft.get_peft_model(packed_model(), by_module)
