"""Tiled tensors and the precisions of their products."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest

import opaq
from conftest import need, slow_but

torch = need("torch")
nn = torch.nn
from opaq import functional  # noqa: E402
from tiled_cases import ERRORS, QUANTIZERS  # noqa: E402

SHAPES = ((48, 96), (37, 70), (3, 32, 64), (130, 257), (1, 1), (0, 32), (5, 0))


def tensor(shape: tuple[int, ...], seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def relative_error(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_tiles_hold_the_same_codes(quantizer: str) -> None:
    for shape in SHAPES:
        x = tensor(shape).bfloat16()
        plain = opaq.quantize_tensor(x, quantizer)
        tiled = plain.tiled()
        again = opaq.quantize_tensor(x, tiled.quantizer)
        assert "tiled" in tiled.quantizer.options and tiled.tiled() is tiled
        assert torch.equal(tiled.dequantize(), plain.dequantize())
        for a, b in zip(tiled.buffers(), again.buffers(), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(tiled.tiled(False).buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_products_with_tiles(quantizer: str, precision: str) -> None:
    for rows, columns in ((48, 96), (37, 70), (130, 257), (64, 512), (16, 64)):
        plain = opaq.quantize_tensor(tensor((rows, columns), 1), quantizer)
        bias = tensor((rows,), 2)
        for tokens in (1, 2, 7, 33):
            x = tensor((tokens, columns), 3)
            want = x.double() @ plain.dequantize(torch.float32).double().T + bias
            got = functional.quantized_linear(x, plain.tiled(), bias, precision=precision)
            assert relative_error(got, want) < ERRORS[precision], (rows, columns, tokens)
            half = functional.quantized_linear(x.bfloat16(), plain.tiled(), precision=precision)
            assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("quantizer", ["nvfp4", "mxfp4"])
def test_codes_times_codes_are_exact(quantizer: str) -> None:
    """4-bit times 4-bit in integers: only adding the blocks' products is rounded."""
    weight = opaq.quantize_tensor(tensor((80, 320), 1), quantizer)
    x = tensor((9, 320), 2)
    seen = opaq.quantize_tensor(x, quantizer).dequantize(torch.float32).double()
    want = seen @ weight.dequantize(torch.float32).double().T
    got = functional.quantized_linear(x, weight.tiled(), input_quantizer=quantizer, precision="fast")
    assert relative_error(got, want) < 1e-6


def test_rows_that_cannot_be_scaled_become_nan() -> None:
    weight = opaq.quantize_tensor(tensor((32, 64)), "nvfp4").tiled()
    x = tensor((4, 64))
    x[1, 3], x[2, 5], x[3] = float("inf"), float("nan"), 0.0
    for precision in ("near", "fast", "fast32"):
        y = functional.quantized_linear(x, weight, precision=precision)
        assert y[1:3].isnan().all() and y[0].isfinite().all() and (y[3] == 0).all()


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("quantizer", ["nvfp4", "nvfp4+rowscaled", "mxfp4", "mxfp8", "fp8row"])
def test_mixtures_of_tiles(quantizer: str, precision: str) -> None:
    up, down = tensor((4, 64, 96), 1), tensor((4, 96, 32), 2)
    x, ids, weights = tensor((9, 96), 3), torch.arange(18).reshape(9, 2) % 4, torch.rand(9, 2)
    packed = [opaq.quantize_tensor(w, quantizer) for w in (up, down)]
    want = functional.moe(x, weights, ids, *packed)
    got = functional.moe(x, weights, ids, *(w.tiled() for w in packed), precision=precision)
    assert relative_error(got, want) < 2 * ERRORS[precision]
    want = functional.mlp(x, *(opaq.quantize_tensor(w[0], quantizer) for w in (up, down)))
    tiles = (opaq.quantize_tensor(w[0], quantizer).tiled() for w in (up, down))
    assert relative_error(functional.mlp(x, *tiles, precision=precision), want) < 2 * ERRORS[precision]


def test_experts_that_share_a_tile_are_refused() -> None:
    up, down = (opaq.quantize_tensor(tensor(s), "nvfp4").tiled() for s in ((2, 24, 64), (2, 64, 12)))
    with pytest.raises(
        ValueError, match="opaq.functional.moe: gate_up has 24 rows for each expert, expected a multiple of 16"
    ):
        functional.moe(tensor((3, 64)), torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64), up, down)


def test_threads_and_rows_do_not_matter() -> None:
    weight = opaq.quantize_tensor(tensor((200, 576)), "nvfp4").tiled()
    x, threads = tensor((40, 576)), torch.get_num_threads()
    try:
        for precision in ERRORS:
            found = []
            for count in (1, 2):
                torch.set_num_threads(count)
                found.append(functional.quantized_linear(x, weight, precision=precision))
            assert torch.equal(*found)
    finally:
        torch.set_num_threads(threads)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 33))


def test_a_model_is_tiled_in_place_and_back() -> None:
    x, net = tensor((5, 96)), model()
    opaq.quantize_(net, "nvfp4", progress=False)
    before, plain = net(x), copy.deepcopy(net)
    assert opaq.tile_(net, "near") == 2
    assert net[0].quantizer == "nvfp4+tiled" and "precision='near'" in repr(net[0])
    assert relative_error(net(x), before) < 1e-4
    plain.load_state_dict(net.state_dict())  # with and without tiles the codes are the same
    assert torch.equal(plain(x), before)
    opaq.dequantize_(net)
    assert type(net[0]) is nn.Linear


def test_quantize_with_a_precision() -> None:
    x, net = tensor((5, 96)), model()
    want = net(x).detach()
    opaq.quantize_(net, "mxfp8", precision="exact", progress=False)
    assert net[0].quantizer == "mxfp8+tiled" and relative_error(net(x), want) < 0.05
    step = torch.compile(net, fullgraph=True)
    with torch.no_grad():
        assert relative_error(step(x), net(x)) < 1e-6


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="precision is 'quick', expected one of exact, near, fast, fast32"):
        opaq.tile_(model(), "quick")
    with pytest.raises(ValueError, match="precision is 'quick', expected one of exact, near, fast, fast32"):
        opaq.quantize_(model(), precision="quick")
    weight = opaq.quantize_tensor(tensor((16, 64)), "nvfp4")
    with pytest.raises(
        ValueError, match="opaq.functional.quantized_linear: .*expected exact, near, fast or fast32"
    ):
        functional.quantized_linear(tensor((1, 64)), weight, precision="quick")


@pytest.mark.parametrize("quantizer", ("nvfp4", "mxfp4", "mxfp8", "fp8.e5m2", "fp8row", "fp8blk2"))
def test_exact_products_of_bfloat16(quantizer: str) -> None:
    """Products are exact with every kernel for bfloat16, and with any strides of the input."""
    weight = opaq.quantize_tensor(tensor((70, 192), 1), quantizer).tiled()
    for tokens in (1, 3, 8, 40):
        x = tensor((tokens, 2 * 192), 3).bfloat16()
        for given in (x[:, :192], x[:, ::2], x[:, 192:]):
            want = given.double() @ weight.dequantize(torch.float32).double().T
            got = functional.quantized_linear(given, weight)
            wide = functional.quantized_linear(given.float(), weight)
            assert relative_error(wide, want) < 1e-6
            assert (
                relative_error(got, wide.bfloat16()) < 1e-3 and float((got.double() - want).abs().max()) < 0.5
            )


KERNELS = """
import torch
from opaq._explain import kernel_of
for dtype in (torch.float32, torch.bfloat16):
    print(kernel_of("nvfp4+tiled", "", dtype, "exact"), kernel_of("mxfp8+tiled", "", dtype, "exact"),
          kernel_of("nvfp4+tiled", "", dtype, "fast"))
"""


@pytest.mark.parametrize("limit", slow_but(("ref", "avx2", ""), ""))
def test_kernels_by_processor(limit: str) -> None:
    """Without kernels for tiles an exact product uses the general kernel; kernels for bfloat16 are used if the
    processor has them."""
    needed = {"ref": set(), "avx2": {"avx2"}, "": {"avx512vbmi", "avx512vnni", "avx512bf16"}}[limit]
    if not needed <= set(opaq.library_info()["cpu"]):
        pytest.skip(f"this processor does not have {needed}")
    env = {**os.environ, "OPAQ_CPU": limit}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=env, capture_output=True, text=True, check=True)
    isa = limit or "avx512"
    names = [f"packed_nvfp4_exact_{isa} packed_mxfp8_exact_{isa} packed_nvfp4_fast_{isa}"] * 2
    if limit == "ref":
        names = ["gemm_ref gemm_ref packed_nvfp4_fast_ref"] * 2
    elif not limit:
        names[1] = names[1].replace("exact", "bf16")
    assert done.stdout.splitlines() == names


def test_explain_names_the_kernels() -> None:
    net = model()
    opaq.quantize_(net, "nvfp4", precision=None, progress=False)
    assert all("not tiled" in row.why and row.kernel.startswith("gemm_") for row in opaq.explain(net))
    opaq.tile_(net, "near")
    assert [row.name for row in opaq.explain(net)] == ["0.weight", "2.weight"]
    assert all(row.kernel.startswith("packed_nvfp4_near_") for row in opaq.explain(net))
    with opaq.runner.create_linear(net[0].weight, precision="fast") as runner:
        assert opaq.explain(runner)[0].kernel.startswith("packed_nvfp4_fast_")
        x = tensor((3, 96))
        want = functional.quantized_linear(x, net[0].weight, precision="fast")
        assert torch.equal(torch.ops.opaq.linear_gemm(x, runner.id, 64), want)
    assert "packed_nvfp4_near_" in str(opaq.explain(net))
