"""Where packed models lie: weights on a GPU stay in rows, tiled ones become rows on the way to it, explain
names the GPU's kernels. What needs a GPU is skipped without one."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

import opaq
from conftest import need

torch = need("torch")
nn = torch.nn
from opaq.quantized_tensor import for_device  # noqa: E402

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8")


def need_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU")


def make_model(device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 48)).to(device, torch.bfloat16)


def inputs(device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 128, generator=generator).to(device, torch.bfloat16)


def weights(model: Any) -> list[Any]:
    return [p for p in model.parameters() if isinstance(p, opaq.QuantizedTensor)]


def near(got: Any, want: Any) -> bool:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return bool((got - want).norm() <= 2**-6 * want.norm())


# ------------------------------------------------------------------------------------------------ tiles


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_become_rows_on_the_way_to_a_gpu(name: str) -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    rows = opaq.quantize_tensor(x, name)
    tiles = rows.tiled()
    assert for_device(rows, "cuda") is rows and torch.equal(for_device(tiles, "cuda"), rows)
    for device in (None, "cpu", "meta"):
        assert for_device(tiles, device) is tiles


@pytest.mark.parametrize("name", FORMATS)
def test_models_that_are_quantized_on_a_gpu_stay_in_rows(name: str, device: str) -> None:
    need_gpu(device)
    model = make_model(device)
    opaq.quantize_(model, name, progress=False)
    assert len(weights(model)) == 2 and not any(w.quantizer.is_tiled for w in weights(model))
    other = make_model()
    opaq.quantize_(other, name, progress=False)
    assert near(model(inputs(device)), other(inputs()))
    for mine, theirs in zip(weights(model), weights(other), strict=True):
        assert torch.equal(mine.cpu(), theirs.tiled(False))


def test_tile_leaves_a_gpu_alone(device: str) -> None:
    need_gpu(device)
    model = make_model(device)
    opaq.quantize_(model, "nvfp4", progress=False)
    with pytest.warns(UserWarning, match="2 weights on a GPU stay in rows"):
        opaq.tile_(model, "near")
    assert not any(w.quantizer.is_tiled for w in weights(model))


@pytest.mark.parametrize("precision", ["exact", None])
@pytest.mark.parametrize("name", FORMATS)
def test_models_move(name: str, precision: str | None, device: str) -> None:
    model = make_model()
    opaq.quantize_(model, name, precision=precision, progress=False)
    assert [w.quantizer.is_tiled for w in weights(model)] == [precision is not None] * 2
    want, kept = model(inputs()), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.to(device)
    assert all(w.device.type == device for w in model.parameters())
    assert near(model(inputs(device)), want)
    if device == "cuda":
        assert not any(w.quantizer.is_tiled for w in weights(model))
        model.to("cpu")
        assert near(model(inputs()), want)
        opaq.tile_(model)
        assert near(model(inputs()), want)
    kept.load_state_dict(model.state_dict())
    assert near(kept(inputs()), want)


def test_runners_on_a_gpu_keep_rows(device: str) -> None:
    need_gpu(device)
    weight = make_model(device)[0].weight.detach()
    with opaq.runner.create_linear(weight, quantizer="nvfp4", precision="near") as runner:
        packed = opaq.quantize_tensor(weight, "nvfp4")
        assert torch.equal(runner(inputs(device)), opaq.functional.quantized_linear(inputs(device), packed))
        assert runner.info().kernel == "product_nvfp4_mma" and "tiled" not in runner.info().format
        assert opaq.explain(runner)[0].kernel == "product_nvfp4_mma"


# ---------------------------------------------------------------------------------------------- explain


def test_explain_names_the_kernels_of_the_device(device: str) -> None:
    model = make_model(device)
    opaq.quantize_(model, "nvfp4", progress=False)
    rows = opaq.explain(model)
    if device == "cpu":
        assert all(not row.kernel.startswith("product_") for row in rows)
        return
    assert [row.kernel for row in rows] == ["product_nvfp4_mma"] * 2
    assert all("tensor cores" in row.why for row in rows)
    opaq.dequantize_(model)
    opaq.quantize_(model.float(), "mxfp8", progress=False)
    assert [row.kernel for row in opaq.explain(model)] == ["product_fma"] * 2


# ----------------------------------------------------------------------------------------- transformers


LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture
def llama(tmp_path: Path, device: str) -> Path:
    need_gpu(device)
    transformers = need("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **more: Any) -> Any:
    auto = need("transformers").AutoModelForCausalLM
    config = opaq.Config(quantizer="nvfp4")
    return auto.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16, **more).eval()


@torch.no_grad()
def test_transformers_loads_onto_a_gpu(llama: Path, device: str) -> None:
    ids = torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(5))
    want = load(llama)(ids).logits
    placed, moved = load(llama, device_map="cuda"), load(llama).to("cuda")
    for model in (placed, moved):
        assert len(weights(model)) == 14 and not any(w.quantizer.is_tiled for w in weights(model))
        assert all(p.device.type == "cuda" for p in model.parameters())
        assert near(model(ids.cuda()).logits, want)
    for mine, theirs in zip(weights(placed), weights(moved), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(placed(ids.cuda()).logits, moved(ids.cuda()).logits)
