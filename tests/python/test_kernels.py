"""Kernels by name: forcing one changes the kernel that runs and explain(); the environment variable does the
same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import opaq


def test_force() -> None:
    x = torch.randn(3, 64)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32))
    opaq.quantize_(layer, "nvfp4", precision="fast")
    usual = layer(x)
    assert not opaq.explain(layer)[0].kernel.endswith("_ref") or not opaq.kernels()["gemm_avx2"]
    with opaq.forced_kernels("packed_nvfp4_fast_ref"):
        assert opaq.explain(layer)[0][-2:] == ("packed_nvfp4_fast_ref", "it is forced")
        torch.testing.assert_close(layer(x), usual, rtol=1e-5, atol=1e-5)
    assert opaq.explain(layer)[0].kernel != "packed_nvfp4_fast_ref" or not opaq.kernels()["gemm_avx2"]
    with pytest.raises(opaq.OpaqError, match='there is no kernel "packed"'):
        opaq.force_kernels("packed")


def test_environment() -> None:
    """With an unknown name in OPAQ_KERNEL every operation fails."""
    code = (
        "import torch, opaq; print(opaq.quantize_tensor(torch.ones(16, 16), 'fp8').dequantize().sum().item())"
    )
    env = {**os.environ, "OPAQ_KERNEL": "quantize_fp8_rev"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert 'there is no kernel "quantize_fp8_rev"' in run.stderr
    assert run.returncode != 0
