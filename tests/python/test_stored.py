"""Stored rows: exported from a QuantizedTensor and imported again; and the output of compressed-tensors'
compressors, which dequantizes to the same values as with its decompressors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import opaq
from conftest import need
from opaq import OpaqError, Quantizer
from peer_compressor import compressed_state, compressed_tensors

torch = need("torch")
need("opaq.quantized_tensor")

from opaq._stored import export_rows, import_rows  # noqa: E402  (needs PyTorch)

TEXTS = (
    *(row.name for row in opaq.formats()),
    *("mxfp8.e5m2+swizzle", "mxfp4+2d", "nvfp4+rowscaled", "fp8+delayed+rule=modelopt"),
    *("nvfp4+global+rule=compressed-tensors", "nvfp4+rowscaled+swizzle+global+rule=modelopt"),
)


def weight(rows: int, columns: int, seed: int = 0) -> Any:
    made = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=made)
    return w * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=made).float())


def quantized(w: Any, text: str) -> Any:
    scale = torch.tensor([0.25]) if "delayed" in text else None
    return opaq.quantize_tensor(w, text, scale=scale)


def zeros(shape: tuple[int, ...], text: str) -> Any:
    """A tensor of zero bytes."""
    return torch.zeros_like(quantized(torch.zeros(shape), text))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [(300, 77), (1, 1), (128, 256), (5, 0), (0, 16)], ids=str)
def test_export_and_import(text: str, shape: tuple[int, int]) -> None:
    q = quantized(weight(*shape), text)
    again = zeros(shape, text)
    for first in range(0, max(shape[0], 1), 128):
        rows = min(128, shape[0] - first)
        import_rows(again, first, *export_rows(q, first, rows))
    assert torch.equal(again, q)


def test_exported_rows_are_those_of_checkpoints() -> None:
    w = weight(300, 200)
    for text, sizes in {
        "fp8": ((300, 200), (1,), None),
        "fp8row": ((300, 200), (300, 1), None),
        "fp8blk1": ((300, 200), (300, 2), None),
        "fp8blk2": ((300, 200), (3, 2), None),
        "mxfp8": ((300, 200), (300, 7), None),
        "mxfp4": ((300, 100), (300, 7), None),
        "nvfp4": ((300, 100), (300, 13), (1,)),
        "nvfp4+rowscaled": ((300, 100), (300, 13), (300,)),
    }.items():
        parts = export_rows(quantized(w, text), 0, 300)
        assert tuple(None if part is None else tuple(part.shape) for part in parts) == sizes, text
        assert parts[0].dtype == torch.uint8
        assert parts[1].dtype == (torch.float32 if text.startswith("fp8") else torch.uint8)


def test_one_scale_for_all_rows() -> None:
    """Shards with one scale each are imported into a tensor with one per row, and exported unchanged."""
    for alone, whole in (("fp8", "fp8row"), ("nvfp4", "nvfp4+rowscaled")):
        rule = "+global+rule=modelopt" if alone == "nvfp4" else ""
        shards = [quantized(weight(32, 64, seed) * (seed + 1), alone + rule) for seed in range(3)]
        stacked = zeros((96, 64), whole + rule)
        parts = [export_rows(shard, 0, 32) for shard in shards]
        for i, part in enumerate(parts):
            import_rows(stacked, 32 * i, *part)
        assert torch.equal(stacked.dequantize(), torch.cat([shard.dequantize() for shard in shards]))
        for i, part in enumerate(parts):
            back = export_rows(stacked, 32 * i, 32, one_for_all=True)
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(back, part, strict=True))
        with pytest.raises(OpaqError, match="one entry for all rows"):
            export_rows(stacked, 0, 96, one_for_all=True)


def test_stacked_experts() -> None:
    """Into a tensor of rank 3: the rows of one expert, or all of them in gpt-oss's blocks."""
    w = torch.stack([weight(64, 96, seed) for seed in range(3)])
    q = quantized(w, "mxfp4")
    data, scale, _ = export_rows(q, 0, 3 * 64)
    again = zeros((3, 64, 96), "mxfp4")
    for e in range(3):
        import_rows(again, 64 * e, data[64 * e : 64 * (e + 1)], scale[64 * e : 64 * (e + 1)])
    assert torch.equal(again, q)
    again = zeros((3, 64, 96), "mxfp4")
    import_rows(again, 0, data.view(3, 64, 3, 16), scale.view(3, 64, 3))
    assert torch.equal(again, q)


# --------------------------------------------------------------------------------- compressed-tensors


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    return compressed_tensors()


@pytest.mark.parametrize("shape", [(160, 384), (128, 256)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk1", "fp8blk2"])
def test_compressed_tensors_weights(peer: SimpleNamespace, name: str, shape: tuple[int, int]) -> None:
    w = weight(*shape)
    state = compressed_state(peer, name, w)
    text = f"{name}{'+global' if name == 'nvfp4' else ''}+rule=compressed-tensors"
    data = state["weight_packed"] if "weight_packed" in state else state["weight"]
    global_scale = state.get("weight_global_scale")
    q = zeros(shape, text)
    import_rows(q, 0, data, state["weight_scale"], global_scale)
    theirs = peer.compressor(name).decompress(dict(state), peer.scheme(peer.args[name]))["weight"]
    assert theirs.dtype == (torch.float32 if name.startswith("fp8") else torch.bfloat16)
    assert torch.equal(q.dequantize(theirs.dtype), theirs)
    assert torch.equal(q, opaq.quantize_tensor(w, text))  # opaq quantizes to the same bytes
    if name == "nvfp4":  # before the rounding to bfloat16
        values = peer.unpack(data, *shape, torch.float32)
        exact = peer.dequantize(
            values, state["weight_scale"].float(), args=peer.args[name], global_scale=global_scale
        )
        assert torch.equal(q.dequantize(), exact)


def test_fused_projections_keep_their_global_scales(peer: SimpleNamespace) -> None:
    weights = [weight(rows, 256, seed) * 4.0**seed for seed, rows in enumerate((64, 32, 48))]
    states = [compressed_state(peer, "nvfp4", w) for w in weights]
    q = zeros((144, 256), "nvfp4+rowscaled+global+rule=compressed-tensors")
    first = 0
    for state in states:
        import_rows(q, first, state["weight_packed"], state["weight_scale"], state["weight_global_scale"])
        first += len(state["weight_packed"])
    scheme = peer.scheme(peer.args["nvfp4"])
    theirs = torch.cat([peer.compressor("nvfp4").decompress(dict(s), scheme)["weight"] for s in states])
    assert torch.equal(q.dequantize(torch.bfloat16), theirs)


def test_square_blocks_in_other_types() -> None:
    """DeepSeek's scale in bfloat16 or as exponents, ModelOpt's in four dimensions."""
    codes = torch.randint(0, 120, (256, 384), dtype=torch.uint8)
    exponents = torch.randint(110, 140, (2, 3), dtype=torch.uint8)
    factor = torch.exp2(exponents.float() - 127)
    want = codes.view(torch.float8_e4m3fn).float() * factor.repeat_interleave(128, 0).repeat_interleave(128, 1)
    e8m0 = exponents.view(torch.float8_e8m0fnu)
    for scale in (factor, factor.bfloat16(), exponents, e8m0, factor.reshape(2, 1, 3, 1)):
        q = zeros((256, 384), "fp8blk2")
        import_rows(q, 0, codes.view(torch.float8_e4m3fn), scale)
        assert torch.equal(q.dequantize(), want)


@pytest.mark.parametrize("rule", ["compressed-tensors", "modelopt"])
def test_static_activation_scales(rule: str) -> None:
    """x is quantized with a checkpoint's input_scale or input_global_scale."""
    x, w = weight(5, 64, 1), weight(16, 64, 2)
    for text, name in ((f"fp8+delayed+rule={rule}", "scale"), (f"nvfp4+global+rule={rule}", "amax_rowwise")):
        packed = opaq.quantize_tensor(w, text.replace("+delayed", ""))
        given = torch.tensor([0.03 if rule == "modelopt" or name == "scale" else 33.0])
        y = opaq.functional.quantized_linear(x, packed, input_quantizer=text, input_scale=given)
        q = opaq.quantize_tensor(x, text, **{name: given})
        assert torch.equal(y, opaq.functional.quantized_linear(q.dequantize(), packed))
        assert not torch.equal(y, opaq.functional.quantized_linear(x, packed))


# -------------------------------------------------------------------------------------------- errors


def test_errors_write_nothing() -> None:
    q = quantized(weight(256, 64), "nvfp4")
    before = q.clone()
    data, scale, amax = export_rows(q, 0, 256)
    for change, says in (
        ({"data": data.float()}, "data holds f32, expected uint8"),
        ({"data": data.double()}, "data holds float64"),
        ({"data": data[:, :31]}, r"data has the shape \[256,31\], expected rows of 32"),
        ({"scale": scale[:, :3]}, r"scale has the shape \[256,3\]"),
        ({"scale": scale.float()}, "scale holds f32, expected uint8"),
        ({"global_": None}, "global is missing"),
        ({"global_": amax.half()}, "global holds f16, expected f32"),
        ({"first_row": 1}, "256 rows from row 1 on"),
        ({"data": data.reshape(2, 2, 2, 2, 2, 2, 2, 2, 32)}, "data has rank 9"),
    ):
        given = {"first_row": 0, "data": data, "scale": scale, "global_": amax, **change}
        with pytest.raises(OpaqError, match=says):
            import_rows(q, **given)
    with pytest.raises(OpaqError, match="one for all rows"):
        import_rows(q, 0, data[:128], scale[:128], amax * 2)
    with pytest.raises(OpaqError, match="cut a block"):
        export_rows(quantized(weight(256, 64), "fp8blk2"), 0, 100)
    with pytest.raises(OpaqError, match="rows is 257, expected 0 to 256"):
        export_rows(q, 0, 257)
    with pytest.raises(OpaqError, match="is both"):
        import_rows(quantized(weight(256, 64), "nvfp4+both"), 0, data, scale, amax)
    with pytest.raises(ValueError, match="data is on meta"):
        import_rows(q, 0, data.to("meta"), scale, amax)
    assert torch.equal(q, before)
    assert Quantizer("nvfp4") == q.quantizer
