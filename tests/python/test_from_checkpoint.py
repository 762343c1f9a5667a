"""QuantizedTensor.from_checkpoint: tensors written by other software have the values that that software
decodes, and invalid ones are rejected with a message."""

from __future__ import annotations

from typing import Any

import pytest

import opaq
from conftest import need
from peer_compressor import compressed_state, compressed_tensors

torch = need("torch")
need("opaq.quantized_tensor")

from_checkpoint = opaq.QuantizedTensor.from_checkpoint


def weight(rows: int, columns: int, seed: int = 0) -> Any:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=made)


def e2m1(packed: Any) -> Any:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()]


def spread(scale: Any, rows: int, columns: int, shape: Any) -> Any:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors that are in a checkpoint: without zero points, which are not stored for symmetric formats."""
    return {name: tensor for name, tensor in state.items() if not name.endswith("zero_point")}


# ---- tensors of other software ----


@pytest.mark.parametrize("shape", [(160, 384), (100, 96)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"])
def test_compressed_tensors(name: str, shape: tuple[int, int]) -> None:
    peer = compressed_tensors()
    state = stored(compressed_state(peer, name, weight(*shape)))
    prefixed = {f"model.layers.0.mlp.up_proj.{key}": tensor for key, tensor in state.items()}
    theirs = peer.compressor(name).decompress(dict(state), peer.scheme(peer.args[name]))["weight"]
    for given in (state, prefixed):
        q = from_checkpoint(given, "compressed-tensors", dtype=theirs.dtype)
        assert q.quantizer.format == name
        assert q.dtype == theirs.dtype and torch.equal(q.dequantize(), theirs)
    assert torch.equal(q, from_checkpoint(state, "compressed-tensors", format=name, dtype=theirs.dtype))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"])
def test_modelopt(name: str) -> None:
    peer = need("peer_modelopt")
    w = weight(128, 256).bfloat16()
    (state,) = peer.modelopt_states(name, [w], [])
    q = from_checkpoint(
        {**state, **({"input_scale": torch.tensor(0.5)} if name in ("nvfp4", "fp8") else {})}, "modelopt"
    )
    assert q.quantizer.format == name
    data, scale = state["weight"], state["weight_scale"]
    factor = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if name == "nvfp4":
        want = e2m1(data) * spread(factor * state["weight_scale_2"], 1, 16, w.shape)
    elif name in ("fp8", "fp8row"):
        want = data.float() * factor.reshape(-1, 1)
    else:
        rows, columns = (1, 32) if name == "mxfp8" else (128, 128)
        want = data.float() * spread(factor.reshape(-1, w.shape[1] // columns), rows, columns, w.shape)
    assert torch.equal(q.dequantize(), want)
    assert (want - w.float()).abs().max() < 0.7  # close to the weight


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_deepseek_blocks(kind: str) -> None:
    shape = (300, 200)
    data = weight(*shape).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.arange(6.0).reshape(3, 2) - 3).to(getattr(torch, kind))
    q = from_checkpoint({"q.weight": data, "q.weight_scale_inv": scale}, "deepseek")
    assert q.quantizer.format == "fp8blk2"
    assert torch.equal(q.dequantize(), data.float() * spread(scale.float(), 128, 128, shape))


def test_deepseek_others() -> None:
    """Layouts that transformers writes with DeepSeek's names: MXFP8, and FP8 with one scale."""
    data = weight(64, 96).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (64, 3), dtype=torch.uint8)
    q = from_checkpoint({"weight": data, "weight_scale_inv": exponents}, "deepseek")
    assert q.quantizer.format == "mxfp8"
    assert torch.equal(q.dequantize(), data.float() * spread(torch.exp2(exponents - 127.0), 1, 32, data.shape))
    q = from_checkpoint({"weight": data, "weight_scale_inv": torch.tensor(0.25)}, "deepseek")
    assert q.quantizer.format == "fp8" and torch.equal(q.dequantize(), data.float() * 0.25)


@pytest.mark.parametrize("experts", [(), (3,)], ids=["one", "stacked"])
def test_gpt_oss(experts: tuple[int, ...]) -> None:
    blocks = torch.randint(0, 256, (*experts, 64, 5, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (*experts, 64, 5), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    q = from_checkpoint({f"{name}_blocks": blocks, f"{name}_scales": scales}, "gpt-oss", dtype=torch.bfloat16)
    assert q.shape == (*experts, 64, 160) and q.quantizer.format == "mxfp4"
    want = e2m1(blocks.flatten(-2)) * torch.exp2(scales - 127.0).repeat_interleave(32, -1)
    assert torch.equal(q.dequantize(torch.float32), want)


def test_from_a_file_to_a_runner(tmp_path: Any) -> None:
    safetensors = need("safetensors.torch")
    peer = compressed_tensors()
    state = stored(compressed_state(peer, "nvfp4", weight(64, 96)))
    safetensors.save_file(state, tmp_path / "w.safetensors")
    q = from_checkpoint(
        safetensors.load_file(tmp_path / "w.safetensors"), "compressed-tensors", dtype=torch.bfloat16
    )
    x = weight(3, 96, 1).bfloat16()
    with opaq.runner.create_linear(q) as runner:
        assert torch.equal(runner(x), opaq.functional.quantized_linear(x, q))


def test_global_scale_may_have_any_rank() -> None:
    """[1] as compressed-tensors writes it, or a number without dimensions."""
    state = nvfp4()
    want = from_checkpoint(state, "compressed-tensors")
    state["weight_global_scale"] = state["weight_global_scale"].reshape(())
    assert torch.equal(from_checkpoint(state, "compressed-tensors"), want)


def test_one_block_and_one_scale_per_tensor() -> None:
    data = weight(64, 96).to(torch.float8_e4m3fn)
    for layout, shape, form in (
        ("compressed-tensors", (1,), "fp8"),
        ("compressed-tensors", (1, 1), "fp8blk2"),
        ("compressed-tensors", (64, 1), "fp8row"),
        ("modelopt", (), "fp8"),
        ("modelopt", (64,), "fp8row"),
        ("modelopt", (1, 1, 1, 1), "fp8blk2"),
        ("deepseek", (1, 1), "fp8blk2"),
    ):
        name = "weight_scale_inv" if layout == "deepseek" else "weight_scale"
        q = from_checkpoint({"weight": data, name: torch.full(shape, 0.5)}, layout)
        assert q.quantizer.format == form and torch.equal(q.dequantize(), data.float() * 0.5)


# ---- errors ----


def nvfp4() -> dict[str, Any]:
    return {
        "weight_packed": torch.zeros(32, 24, dtype=torch.uint8),
        "weight_scale": torch.zeros(32, 3, dtype=torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }


NVFP4 = "nvfp4: weight_packed, weight_scale, weight_global_scale (and input_global_scale)"
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no global": (
        {"weight_global_scale": None},
        [
            "nvfp4: opaq: the checkpoint has no weight_global_scale",
            "mxfp4: opaq: weight_scale is F8_E4M3 [32, 3], expected U8 or F8_E8M0",
        ],
    ),
    "no scale": ({"weight_scale": None}, ["no weight_scale in a weight of layout compressed-tensors", NVFP4]),
    "no data": ({"weight_packed": None}, ["no weight_packed in", NVFP4]),
    "unknown": ({"weight_zero_point": torch.zeros(1)}, ["unknown weight_zero_point in", NVFP4]),
    "two weights": ({"k.weight_packed": torch.zeros(1)}, ["unknown k.weight_packed", NVFP4]),
    "data's dtype": (
        {"weight_packed": torch.zeros(32, 24)},
        ["weight_packed is F32 [32, 24], expected U8"],
    ),
    "scale's dtype": (
        {"weight_scale": torch.zeros(32, 3, dtype=torch.float16)},
        ["weight_scale is torch.float16 [32, 3], expected F8_E4M3"],
    ),
    "scale's rows": (
        {"weight_scale": torch.zeros(31, 3, dtype=torch.float8_e4m3fn)},
        ["scale has the shape [31,3], expected"],
    ),
    "scale's columns": (
        {"weight_scale": torch.zeros(32, 4, dtype=torch.float8_e4m3fn)},
        ["scale has the shape [32,4], expected rows of 3 entries"],
    ),
    "several globals": ({"weight_global_scale": torch.ones(2)}, ["global has the shape [2]"]),
    "global of zero": (
        {"weight_global_scale": torch.zeros(1)},
        ["weight_global_scale is 0, expected a finite"],
    ),
    "global of NaN": ({"weight_global_scale": torch.tensor(torch.nan)}, ["weight_global_scale is nan"]),
    "one dimension": (
        {"weight_packed": torch.zeros(24, dtype=torch.uint8)},
        ["U8 [24], expected rows and columns"],
    ),
    "no tensor": ({"weight_scale": [1.0]}, ["'weight_scale' is a list, expected names and torch.Tensors"]),
    "no memory": ({"weight_scale": torch.zeros(32, 3, device="meta")}, ["weight_scale is on the meta device"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors(name: str) -> None:
    change, says = WRONG[name]
    given = {key: tensor for key, tensor in {**nvfp4(), **change}.items() if tensor is not None}
    with pytest.raises(ValueError) as error:
        from_checkpoint(given, "compressed-tensors")
    for text in says:
        assert text in str(error.value), error.value


def test_wrong_arguments() -> None:
    with pytest.raises(
        ValueError, match="layout is 'gguf', expected one of compressed-tensors, modelopt, deeps"
    ):
        from_checkpoint(nvfp4(), "gguf")
    with pytest.raises(
        ValueError, match="format is 'mxfp4', expected one that deepseek has: fp8blk2, mxfp8, fp8"
    ):
        from_checkpoint(nvfp4(), "deepseek", format="mxfp4")
    with pytest.raises(ValueError, match="tensors is a list, expected a dict"):
        from_checkpoint([torch.zeros(1)], "modelopt")
    with pytest.raises(ValueError, match="no gate_up_proj_blocks, no gate_up_proj_scales in"):
        from_checkpoint({}, "gpt-oss")
    with pytest.raises(ValueError, match="no weight_packed.* expected mxfp4: weight_packed, weight_scale$"):
        from_checkpoint({"weight_scale": torch.zeros(1)}, "compressed-tensors", format="mxfp4")
