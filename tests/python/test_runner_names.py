"""Runners with the names of other code: register_runner and similar functions, nvfp4::linear_gemm if another
library defines it too, and graphs shared by equal layers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import opaq
from compiling import fresh_compiler  # noqa: F401
from conftest import ROOT, need
from opaq import _library
from test_runner import BF16, ROWS, E, H, N, arguments, inputs, made, none_left  # noqa: F401
from torch_cases import make_tensor, same_bytes

torch = need("torch")
runner = need("opaq.runner")

nvfp4 = torch.ops.nvfp4


class Served:
    """A runner in the style of another code base."""

    def __init__(self, **sizes: Any) -> None:
        vars(self).update(sizes)

    def run(self, *_: Any) -> Any:
        raise AssertionError("this calls the operator")

    def _run_impl(self, x: Any, *_: Any) -> Any:
        return x[..., : getattr(self, "out_features", H)] * 2


def test_names_of_other_registries() -> None:
    for obj, want in (
        (Served(in_features=H, out_features=N), ("linear", H, N, 0)),
        (Served(weight=torch.zeros(N, H), out_features=N), ("linear", H, N, 0)),
        (Served(hidden_size=H), ("mlp", H, H, 0)),
        (Served(hidden_size=H, num_experts=E), ("moe", H, H, E)),
    ):
        handle = runner.register_runner(obj)
        assert isinstance(handle, int) and runner.get_runner(handle) is obj
        info = runner.Runner(handle).info()
        assert (info.kind, info.in_features, info.out_features, info.experts) == want
        given = arguments(info.kind, handle)
        assert same_bytes(ROWS[info.kind](*given), given[0][:, : info.out_features] * 2)
        runner.unregister_runner(handle)
        for function in (runner.get_runner, runner.unregister_runner):
            with pytest.raises(opaq.OpaqError, match="is gone"):
                function(handle)
    handle = runner.register_runner(Served(), "linear", H, N)
    runner.unregister_runner(handle)
    with made("linear") as one:
        assert runner.get_runner(one.id).info() == one.info()
    with pytest.raises(ValueError, match=r"Served has no in_features: .* pass in_features="):
        runner.register_runner(Served(out_features=N))
    with pytest.raises(TypeError, match="int has no run method, nor _run_impl"):
        runner.register_runner(3, "linear", H, N)


class Layer:
    def __init__(self, handle: int, size: int) -> None:
        self.handle, self.size = handle, size

    def __call__(self, x: Any) -> Any:
        return nvfp4.linear_gemm(x, self.handle, self.size)


def test_equal_layers_share_a_graph() -> None:
    """Of twelve handles the first is a constant; with the second the integer becomes a symbol."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda layer, x: layer(x), backend=counter, fullgraph=True)
    x, made = inputs(3), [runner.create_linear(make_tensor((N, H), "cpu", BF16) * i) for i in range(12)]
    for one in made:
        assert same_bytes(step(Layer(one.id, N), x), one(x))
        one.destroy()
    assert counter.frame_count == 2


def test_equal_modules_share_a_graph() -> None:
    """A module's integers are constants without this setting."""
    from torch._dynamo.testing import CompileCounterWithBackend

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, handle: int) -> None:
            super().__init__()
            self.handle = handle

        def forward(self, x: Any) -> Any:
            return nvfp4.linear_gemm(x, self.handle, N)

    counter, x = CompileCounterWithBackend("aot_eager"), inputs(3)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for _ in range(12):
            with made("linear") as one:
                module = Module(one.id)
                module.compile(backend=counter, fullgraph=True)
                assert same_bytes(module(x), one(x))
    assert counter.frame_count == 2


def test_another_library_keeps_its_nvfp4() -> None:
    """The first definition of the name stays; opaq's own namespace is complete anyway."""
    code = (
        "import torch\n"
        "library = torch.library.Library('nvfp4', 'FRAGMENT')\n"
        "library.define('linear_gemm(Tensor x, int runner_id, int out_features) -> Tensor')\n"
        "library.impl('linear_gemm', lambda x, i, n: x + i, 'CPU')\n"
        "import opaq\n"
        "print(torch.ops.nvfp4.linear_gemm(torch.zeros(2), 5, 7).tolist())\n"
        "with opaq.runner.create_linear(torch.ones(3, 4)) as one:\n"
        "    print(torch.ops.opaq.linear_gemm(torch.ones(1, 4), one.id, 3).tolist())\n"
        "print(torch.ops.nvfp4.moe_gemm.default._schema.name)\n"
    )
    assert output_of(code) == "[5.0, 5.0]\n[[4.0, 4.0, 4.0]]\nnvfp4::moe_gemm\n"


def output_of(code: str) -> str:
    """The output of a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OPAQ_LIBRARY": str(_library.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CUSTOM_OP = """
@torch.library.custom_op("nvfp4::linear_gemm", mutates_args=())
def linear_gemm(x: torch.Tensor, runner_id: int, out_features: int) -> torch.Tensor:
    return x + runner_id
linear_gemm.register_fake(lambda x, runner_id, out_features: torch.empty_like(x))
"""
DEFINED = """
library = torch.library.Library("nvfp4", "FRAGMENT")
library.define("moe_gemm(Tensor x) -> Tensor")
library.impl("moe_gemm", lambda x: x + 9, "CPU")
print(torch.ops.nvfp4.moe_gemm(torch.zeros(1)).tolist())
"""
USED = """
with opaq.runner.create_linear(torch.ones(3, 4)) as one:
    print(torch.ops.nvfp4.linear_gemm(torch.ones(1, 4), one.id, 3).tolist())
"""


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((CUSTOM_OP, "import opaq"), marks=pytest.mark.slow),
        ("import opaq", DEFINED, USED, CUSTOM_OP),
    ],
    ids=["custom_op first", "opaq first"],
)
def test_another_library_defines_the_name(parts: tuple[str, ...]) -> None:
    """Before and after opaq; opaq's own namespace and the other alias are not affected."""
    code = (
        "\n".join(("import torch", *parts))
        + """
print(torch.ops.nvfp4.linear_gemm(torch.zeros(2), 5, 7).tolist())
f = torch.compile(lambda x: torch.ops.nvfp4.linear_gemm(x, 5, 7), backend="aot_eager", fullgraph=True)
print(f(torch.zeros(2)).tolist())
print(torch.ops.nvfp4.moe_gemm.default._schema.name, torch.ops.opaq.linear_gemm.default._schema.name)
"""
    )
    used = "[9.0]\n[[4.0, 4.0, 4.0]]\n" if USED in parts else ""
    assert output_of(code) == f"{used}[5.0, 5.0]\n[5.0, 5.0]\nnvfp4::moe_gemm opaq::linear_gemm\n"
