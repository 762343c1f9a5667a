"""An AOTInductor package with opaq's operators, run by examples/aoti_host.cpp: without Python in that process,
with the operators from libopaq_torch.so, and with the same bytes as in eager mode."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT, need, need_cxx

torch = need("torch")
opaq = need("opaq")
operators = need("opaq._operators")
cpp_extension = need("torch.utils.cpp_extension")

COMPILER = need_cxx()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
COLUMNS = 96
QUANTIZERS = ("nvfp4+both", "mxfp8+2d+swizzle", "fp8blk1")
DTYPES = {"Float": np.float32, "Byte": np.uint8}


class Model(torch.nn.Module):
    """Quantizes its input in several ways, and multiplies the dequantized input with a quantized weight."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.linspace(-3, 3, COLUMNS).reshape(1, COLUMNS)
        for i, buffer in enumerate(torch.ops.opaq.quantize(weight, "mxfp4")):
            self.register_buffer(f"weight{i}", buffer)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops, made = torch.ops.opaq, []
        weight = ops.dequantize([self.weight0, self.weight1], "mxfp4", [1, COLUMNS], torch.float32)
        for text in QUANTIZERS:
            buffers = ops.quantize(x, text)
            made += [*buffers, ops.dequantize(buffers, text, x.shape, torch.float32) * weight]
        return tuple(made)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(Model(), (torch.ones(8, COLUMNS),), dynamic_shapes=({0: batch},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled against the PyTorch that runs these tests."""
    program = tmp_path_factory.mktemp("host") / "aoti_host"
    libraries = cpp_extension.library_paths()
    command = [
        *(
            COMPILER,
            "-std=c++20",
            "-O0",
            "-w",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        *(f"-I{path}" for path in cpp_extension.include_paths()),
        *(str(ROOT / "examples" / "aoti_host.cpp"), "-o", str(program)),
        *(flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def run(host: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Runs the host without Python in its environment."""
    command = [str(host), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={}, check=False)


@pytest.mark.parametrize("rows", [3, 130])
def test_host_gives_eager_bytes(rows: int, package: Path, host: Path, tmp_path: Path) -> None:
    x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))
    x.numpy().tofile(tmp_path / "input")
    library = operators._library.path.with_name("libopaq_torch.so")
    done = run(host, library, package, tmp_path / "input", COLUMNS, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    *results, last = done.stdout.splitlines()
    assert last == "Python is not in this process"
    expected = [tensor.numpy() for tensor in Model()(x)]
    assert len(results) == len(expected)
    for i, (line, array) in enumerate(zip(results, expected, strict=True)):
        dtype, *shape = line.split()
        got = np.fromfile(tmp_path / f"result{i}", DTYPES[dtype]).reshape([int(size) for size in shape])
        assert (got.dtype, got.shape) == (array.dtype, array.shape), i
        assert got.tobytes() == array.tobytes(), i


def test_host_without_operators(package: Path, host: Path, tmp_path: Path) -> None:
    """A missing or wrong library is an error message, not a crash."""
    np.zeros((1, COLUMNS), np.float32).tofile(tmp_path / "input")
    rest = package, tmp_path / "input", COLUMNS, tmp_path
    for library in (tmp_path / "libopaq_torch.so", operators._library.path):
        done = run(host, library, *rest)
        assert done.returncode == 1
        assert library.name in done.stderr
