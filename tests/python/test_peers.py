"""Quantized bytes against those of other packages, on finite data, in float32 (torchao also in bfloat16).

torchao, `to_mx`: FLOOR is rule=ocp and RCEIL is rule=rceil, for every element, with two differences. A nonzero
block whose scale byte is 0 is not divided by 2^-127: FLOOR divides it by 2^-126, RCEIL by 1. And without a
Blackwell GPU, RCEIL computes a rounded logarithm, so an amax a few units above a power of two times the
element's largest value is rounded down to that power; opaq rounds up, like the GPU instruction.

torchao, NVFP4: opaq has no such rule. torchao's block scales are at least 2^-6, and it divides in another
order.

compressed-tensors: rule=compressed-tensors, with its own observer arithmetic (calculate_qparams,
generate_gparam) and its own compressors, for every format. MX blocks whose scale byte is 255 in opaq are
skipped: in compressed-tensors that byte is the result of an integer overflow."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import opaq
import peer_values
from conftest import need
from opaq import Quantizer
from peer_compressor import compressed_state, compressed_tensors

torch = need("torch")

MATRICES = {
    "ordinary": lambda seed: peer_values.matrix(160, 384, seed),
    "wide range": lambda seed: peer_values.matrix(64, 512, seed, -100, 100),
    "subnormal": lambda seed: peer_values.subnormal(96, 256, seed),
    "huge": lambda seed: peer_values.huge(48, 256, seed),
    "zero": lambda seed: np.zeros((16, 128), np.float32) * (1 - 2 * (seed % 2)),
}
SEEDS = range(12)


def inputs(kind: str) -> list[NDArray]:
    return [MATRICES[kind](seed).astype(np.float32) for seed in SEEDS]


def tensor(x: NDArray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def codes(t: torch.Tensor) -> NDArray[np.uint8]:
    return t.contiguous().view(torch.uint8).numpy()


def same(got: NDArray, want: NDArray, what: str) -> None:
    """Compares bytes, which distinguishes signs of zeros and NaNs."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    wrong = np.argwhere(got.view(np.uint8) != want.view(np.uint8))
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, the first at {wrong[0]}"


# ------------------------------------------------------------------------------------------- torchao

ELEMENTS = {
    "e4m3": ("mxfp8", "float8_e4m3fn", 448),
    "e5m2": ("mxfp8.e5m2", "float8_e5m2", 57344),
    "e2m1": ("mxfp4", "float4_e2m1fn_x2", 6),
}


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    need("torchao")
    mx = need("torchao.prototype.mx_formats.mx_tensor")
    utils = need("torchao.prototype.mx_formats.utils")
    return SimpleNamespace(to_mx=mx.to_mx, mode=mx.ScaleCalculationMode, to_blocked=utils.to_blocked)


def mx_blocks(x: NDArray, text: str) -> tuple[NDArray, NDArray]:
    """opaq's codes in (row, block, bytes) and its scale bytes in (row, block)."""
    q = opaq.quantize(x, Quantizer(text))
    rows, blocks = x.shape[0], x.shape[1] // 32
    data = q.buffers["_rowwise_data"].reshape(rows, blocks, -1)
    return data, q.buffers["_rowwise_scale_inv"][:rows, :blocks]


def log2_may_round_down(amax: NDArray, largest: int) -> NDArray[np.bool_]:
    """Where amax / largest is above a power of two by less than one part in a million."""
    mantissa, _ = np.frexp(amax.astype(np.float64) / largest)
    return (mantissa > 0.5) & (mantissa < 0.5 * (1 + 1e-6))


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["ocp", "rceil"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_torchao_mx(torchao: SimpleNamespace, element: str, rule: str, dtype: type, kind: str) -> None:
    text, name, largest = ELEMENTS[element]
    mode = torchao.mode.FLOOR if rule == "ocp" else torchao.mode.RCEIL
    compared = 0
    for x in inputs(kind):
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        x = np.where(np.isfinite(x.astype(np.float32)), x, dtype(1))  # rounding to bfloat16 may give infinity
        data, scale = mx_blocks(x, f"{text}+rule={rule}")
        want_scale, want_data = torchao.to_mx(tensor(x), getattr(torch, name), 32, mode)
        want_scale, want_data = codes(want_scale), codes(want_data).reshape(data.shape)
        amax = np.abs(x.astype(np.float32)).reshape(*scale.shape, 32).max(axis=-1)
        logarithm = log2_may_round_down(amax, largest) & (rule == "rceil")
        undivided = (scale == 0) & (amax != 0)
        same(scale[~logarithm], want_scale[~logarithm], f"{text} {rule} scales")
        assert np.isin(scale[logarithm].astype(int) - want_scale[logarithm], (0, 1)).all()
        comparable = ~undivided & (scale == want_scale)
        same(data[comparable], want_data[comparable], f"{text} {rule} codes")
        compared += comparable.sum()
    assert compared > 0.2 * len(SEEDS) * scale.size


@pytest.mark.parametrize("element", ELEMENTS)
def test_rceil_where_torchao_rounds_a_logarithm(torchao: SimpleNamespace, element: str) -> None:
    """Every amax from 40 units below to 40 above largest * 2^k: opaq's scale is the smallest without
    overflow."""
    text, name, largest = ELEMENTS[element]
    power = np.exp2(np.arange(-60, 60)).astype(np.float32) * np.float32(largest)
    amax = (power.view(np.int32)[:, None] + np.arange(-40, 41)).astype(np.int32).view(np.float32)
    x = np.zeros((*amax.shape, 32), np.float32)
    x[..., 5] = -amax
    x = x.reshape(len(power), -1)
    _, scale = mx_blocks(x, f"{text}+rule=rceil")
    want, _ = torchao.to_mx(tensor(x), getattr(torch, name), 32, torchao.mode.RCEIL)
    lower = scale.astype(int) - codes(want)
    assert (scale[:, 41:] == scale[:, :1] + 1).all() and (scale[:, :41] == scale[:, :1]).all()
    assert (lower[:, :41] == 0).all() and set(lower[:, 41:].ravel()) <= {0, 1}
    assert (lower == 1).any(), "torchao now rounds up exactly: remove the exception from the comparison"


@pytest.mark.parametrize("rule", ["ocp", "rceil"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_torchao_mx_columnwise(torchao: SimpleNamespace, element: str, rule: str) -> None:
    """The columnwise copy equals torchao's copy of the transposed matrix, transposed."""
    text, name, _ = ELEMENTS[element]
    mode = torchao.mode.FLOOR if rule == "ocp" else torchao.mode.RCEIL
    x = np.random.default_rng(6).standard_normal((64, 96)).astype(np.float32)
    q = opaq.quantize(x, Quantizer(f"{text}+columnwise+rule={rule}"))
    want_scale, want_data = torchao.to_mx(tensor(x.T), getattr(torch, name), 32, mode)
    same(q.buffers["_columnwise_scale_inv"][:2, :96].T, codes(want_scale), "scales")
    data = q.buffers["_columnwise_data"]
    if element == "e2m1":  # torchao's pairs run along the rows of x, opaq's along its columns
        want = np.stack([codes(want_data) & 15, codes(want_data) >> 4], axis=-1).reshape(96, 64).T
        same(np.stack([data & 15, data >> 4], axis=-1).reshape(64, 96), want, "codes")
    else:
        same(data, codes(want_data).T, "codes")


# -------------------------------------------------------------------------------------------- swizzle


def swizzle_by_views(plain: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """128 x 4 tiles by PyTorch's views."""
    rows, columns = plain.shape
    tiles = torch.from_numpy(plain.copy()).view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().numpy()


@pytest.mark.parametrize("shape", [(128, 128), (200, 320), (1, 16), (300, 64)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzle(torchao: SimpleNamespace, name: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(8)
    power = rng.uniform(-20, 0, (shape[0], 1)) + rng.uniform(-20, 0, shape[1])
    x = (rng.standard_normal(shape) * np.exp2(power)).astype(np.float32)
    plain = opaq.quantize(x, Quantizer(f"{name}+both")).buffers
    swizzled = opaq.quantize(x, Quantizer(f"{name}+both+swizzle")).buffers
    for buffer, scales in plain.items():
        if not buffer.endswith("_scale_inv"):
            same(swizzled[buffer], scales, buffer)
            continue
        assert len(np.unique(scales)) > (8 if shape[0] > 1 else 1)
        matrix = scales.T if name != "nvfp4" and "columnwise" in buffer else scales
        matrix = np.ascontiguousarray(matrix)
        assert swizzled[buffer].shape == scales.shape
        same(swizzled[buffer].ravel(), swizzle_by_views(matrix), buffer)
        same(swizzled[buffer].ravel(), torchao.to_blocked(torch.from_numpy(matrix)).numpy(), buffer)


# --------------------------------------------------------------------------------- compressed-tensors


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    return compressed_tensors()


def compress(peer: SimpleNamespace, name: str, x: NDArray) -> tuple[NDArray, NDArray, NDArray | None]:
    """The codes, scales and global scale that compressed-tensors writes."""
    state = compressed_state(peer, name, tensor(x))
    weight = codes(state["weight_packed"] if peer.args[name].num_bits == 4 else state["weight"])
    scale = state["weight_scale"]
    scale = scale.numpy() if scale.dtype == torch.float32 else codes(scale)
    scales = state.get("weight_global_scale")
    return weight, scale, None if scales is None else scales.numpy()


def opaq_parts(name: str, x: NDArray) -> tuple[NDArray, NDArray, NDArray | None]:
    """opaq's codes, and its scales in compressed-tensors' order, one per block."""
    b = opaq.quantize(x, Quantizer(f"{name}+rule=compressed-tensors")).buffers
    rows, columns = x.shape
    if name == "fp8":
        return b["_data"], b["_scale_inv"], None
    scale = b["_rowwise_scale_inv"]
    per = {"fp8blk1": 128, "fp8blk2": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(name, columns)
    scale = scale.T if name == "fp8blk1" else scale
    scale = scale[: -(-rows // 128) if name == "fp8blk2" else rows, : -(-columns // per)]
    return b["_rowwise_data"], scale, b.get("_amax_rowwise")


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", [row.name for row in opaq.formats()])
def test_compressed_tensors(peer: SimpleNamespace, name: str, kind: str) -> None:
    compared = 0
    for x in inputs(kind):
        data, scale, amax = opaq_parts(name, x)
        want_data, want_scale, global_scale = compress(peer, name, x)
        if name.startswith("mx"):
            kept = scale != 255
            data, want_data = (d.reshape(*scale.shape, -1)[kept] for d in (data, want_data))
            scale, want_scale = scale[kept], want_scale[kept]
        same(scale, want_scale, f"{name} scales")
        same(data, want_data, f"{name} codes")
        compared += scale.size
        if amax is not None:  # opaq stores the amax, compressed-tensors the global scale
            assert amax[0] == np.abs(x).max()
            with np.errstate(over="ignore"):
                follows = np.float32(1) / np.maximum(amax, np.finfo(np.float32).tiny) * np.float32(2688)
            same(np.where(np.isfinite(follows), follows, np.float32(1)), global_scale, "global scale")
    assert compared > 0


@pytest.mark.parametrize("shape", [(130, 260), (1, 1), (128, 129), (300, 5)], ids=str)
def test_compressed_tensors_square_blocks_at_the_edge(peer: SimpleNamespace, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    data, scale, _ = opaq_parts("fp8blk2", x)
    want_data, want_scale, _ = compress(peer, "fp8blk2", x)
    same(scale, want_scale, "scales")
    same(data, want_data, "codes")


@pytest.mark.parametrize("kind", MATRICES)
def test_compressed_tensors_global_scale(peer: SimpleNamespace, kind: str) -> None:
    """`global` stores compressed-tensors' weight_global_scale, and dequantizes to the same values."""
    for x in inputs(kind):
        q = opaq.quantize(x, Quantizer("nvfp4+global+rule=compressed-tensors"))
        without = opaq.quantize(x, Quantizer("nvfp4+rule=compressed-tensors")).buffers
        want_data, want_scale, global_scale = compress(peer, "nvfp4", x)
        same(q.buffers["_global_rowwise"], global_scale, "global scale")
        for name in ("_rowwise_data", "_rowwise_scale_inv"):
            same(q.buffers[name], without[name], name)
        values = peer.unpack(torch.from_numpy(want_data), *x.shape, torch.float32)
        scale = torch.from_numpy(want_scale).view(torch.float8_e4m3fn).float()
        theirs = peer.dequantize(
            values, scale, args=peer.args["nvfp4"], global_scale=torch.from_numpy(global_scale)
        )
        assert theirs.dtype == torch.float32
        same(opaq.dequantize(q), theirs.numpy(), "values")


@pytest.mark.parametrize("kind", MATRICES)
def test_modelopt_global_scale(kind: str) -> None:
    """weight_scale_2 and dequantization as in ModelOpt, computed with PyTorch."""
    for x in inputs(kind):
        q = opaq.quantize(x, Quantizer("nvfp4+global+rule=modelopt"))
        multiplier = tensor(x).abs().amax() / (6.0 * 448.0)
        same(q.buffers["_global_rowwise"], multiplier.reshape(1).numpy(), "weight_scale_2")
        data, rows, columns = torch.from_numpy(q.buffers["_rowwise_data"]), *x.shape
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat([grid, -grid])[torch.stack([data & 15, data >> 4], -1).flatten(1).long()]
        scale = torch.from_numpy(q.buffers["_rowwise_scale_inv"])[:rows, : columns // 16].contiguous()
        factor = (scale.view(torch.float8_e4m3fn).float() * multiplier).repeat_interleave(16, 1)
        same(opaq.dequantize(q), (values * factor).numpy(), "values")


@pytest.mark.parametrize("rule", ["compressed-tensors", "modelopt"])
def test_global_scales_of_stacked_tensors(rule: str) -> None:
    """With one scale per row, rows decode like in their own tensors."""
    parts = [MATRICES["ordinary"](seed).astype(np.float32) * 4.0**seed for seed in range(3)]
    alone = [opaq.quantize(x, Quantizer(f"nvfp4+global+rule={rule}")) for x in parts]
    given = np.concatenate(
        [np.repeat(q.buffers["_global_rowwise"], len(x)) for q, x in zip(alone, parts, strict=True)]
    )
    quantizer = Quantizer(f"nvfp4+rowscaled+global+rule={rule}")
    stacked = opaq.quantize(np.concatenate(parts), quantizer, amax_rowwise=given)
    same(stacked.buffers["_global_rowwise"], given, "global scales")
    same(opaq.dequantize(stacked), np.concatenate([opaq.dequantize(q) for q in alone]), "values")


@pytest.mark.parametrize("rule", ["compressed-tensors", "modelopt"])
def test_a_given_scale_is_the_divisor(rule: str) -> None:
    """Static activation scales: clamp(x / s) to float8_e4m3fn, times s."""
    x = MATRICES["ordinary"](5).astype(np.float32)
    for scale in (0.0123, 3.0, 2.0**-20):
        q = opaq.quantize(x, Quantizer(f"fp8+delayed+rule={rule}"), scale=scale)
        s = torch.tensor([scale])
        codes_of = (tensor(x) / s).clamp(-448, 448).to(torch.float8_e4m3fn)
        same(q.buffers["_scale_inv"], s.numpy(), "scale")
        assert np.array_equal(opaq.dequantize(q), (codes_of.float() * s).numpy())
