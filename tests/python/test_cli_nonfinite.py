"""`opaq quantize` with weights that have NaNs or infinities, the same for all formats. The first one is an
error with the tensor, row and column, and no complete result is left; --allow-nonfinite quantizes and counts
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import need

torch = need("torch")
safetensors = need("safetensors.torch")
need("cli_checkpoints")

from cli_checkpoints import run, run_json, write_model  # noqa: E402  # after what may be missing

FORMATS = ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"]
KINDS = {"NaN": float("nan"), "+infinity": float("inf"), "-infinity": float("-inf")}
ROWS, COLUMNS = 160, 256
PLACES = [(0, 0), (77, 129), (ROWS - 1, COLUMNS - 1)]
NAME = "model.layers.0.mlp.up_proj.weight"
SHARE = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8": 0, "fp8row": COLUMNS, "fp8blk2": 128 * 128}


def weight(dtype: str = "bfloat16") -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_has_row_and_column(tmp_path: Path, name: str) -> None:
    source, to = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    for kind, value in KINDS.items():
        for row, column in PLACES:
            w = weight()
            w[row, column] = value
            safetensors.save_file({NAME: w}, source)
            output = run("quantize", source, to, "--format", name, "--threads", "1", code=3)
            assert f"{NAME} has {kind} at row {row}, column {column}:" in output, (kind, row, column)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(tmp_path: Path, dtype: str) -> None:
    w = weight(dtype)
    w[5, 7] = float("nan")
    safetensors.save_file({NAME: w}, tmp_path / "in.safetensors")
    output = run("quantize", tmp_path / "in.safetensors", tmp_path / "to", "--format", "mxfp8", code=3)
    assert f"{NAME} has NaN at row 5, column 7:" in output


def test_places_in_stacks(tmp_path: Path) -> None:
    """Row and column are those of the source's tensor, also if its matrices are stored transposed."""
    for is_turned in (False, True):
        stack = torch.ones(3, 64, 256, dtype=torch.bfloat16)
        stack = stack.transpose(1, 2).contiguous() if is_turned else stack
        stack[2, 33, 40] = float("inf")
        source = write_model(tmp_path / f"{is_turned}", {"a.experts.gate_up_proj": stack})
        output = run("quantize", source, tmp_path / "to", "--format", "mxfp8", code=3)
        assert "a.experts.gate_up_proj has +infinity at matrix 2, row 33, column 40:" in output
        assert [path.name for path in (tmp_path / "to").iterdir()] == [".opaq-job"]
        (tmp_path / "to" / ".opaq-job").unlink()


def test_a_quantized_source(tmp_path: Path) -> None:
    codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[float("nan")]])
    source = write_model(tmp_path / "in", {NAME: codes, NAME + "_scale_inv": scale}, {"quant_method": "fp8"})
    output = run("quantize", source, tmp_path / "to", "--format", "mxfp4", code=3)
    assert f"{NAME} has NaN at row 0, column 0:" in output


@pytest.mark.parametrize("name", FORMATS)
def test_allowed(tmp_path: Path, name: str) -> None:
    """Only weights that share a scale with a non-finite one change; all non-finite ones are counted."""
    w = weight()
    clean = write_model(tmp_path / "clean", {NAME: w})
    w = w.clone()
    w[3, 5], w[3, 6] = float("nan"), float("-inf")
    dirty = write_model(tmp_path / "dirty", {NAME: w})
    run("quantize", dirty, tmp_path / "to", "--format", name, code=3)
    found = run_json("quantize", dirty, tmp_path / "to", "--format", name, "--allow-nonfinite")
    assert found["nonfinite"] == {"values": 2, "weights": [{"name": NAME, "values": 2}]}
    output = run("quantize", dirty, tmp_path / "to", "--format", name, "--allow-nonfinite", "--overwrite")
    assert f"quantized 2 values that are NaN or infinite, in {NAME}\n" in output
    assert run_json("quantize", clean, tmp_path / "ok", "--format", name)["nonfinite"] == {
        "values": 0,
        "weights": [],
    }
    run("convert", tmp_path / "to", tmp_path / "plain", "--layout", "plain")
    run("convert", tmp_path / "ok", tmp_path / "wanted", "--layout", "plain")
    a, b = (safetensors.load_file(tmp_path / n / "model.safetensors")[NAME] for n in ("plain", "wanted"))
    different = a.isnan() | (a != b)
    assert int(different.sum()) <= max(2, SHARE[name])
    assert bool(a.isfinite().flatten()[w.numel() // 2 :].any())


def test_a_tensor_that_stays_plain_is_not_checked(tmp_path: Path) -> None:
    head = weight()
    head[0, 0] = float("nan")
    source = write_model(tmp_path / "in", {NAME: weight(), "lm_head.weight": head})
    found = json.loads(run("quantize", source, tmp_path / "to", "--format", "mxfp8", "--json"))
    assert found["nonfinite"]["values"] == 0
