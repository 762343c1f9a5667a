"""What all Python tests share: the paths, and how a test that cannot run says so.

Nothing is skipped in silence. A module that needs a package calls `need("torch")`; where it is missing the
module is left out, and the end of the run lists it with the reason. With CI=true that is a failure instead."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
sys.path[:0] = [str(ROOT / "python"), *(str(ROOT / "tests" / name) for name in ("cases", "cli")), str(GOLDEN)]


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters, of which only these are run by `make test-python`."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def leave_out(reason: str) -> NoReturn:
    """The end of the test or module that cannot run."""
    if os.environ.get("CI") == "true":
        raise RuntimeError(f"CI=true and {reason}")
    pytest.skip(reason, allow_module_level=True)


def need(name: str) -> ModuleType:
    """The module, or the end of the module that asks for it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        leave_out(f"{name} cannot be imported: {error}")


def need_cxx() -> str:
    """The C++ compiler, which Inductor and LibTorch's package loader need, or the end of who asks for it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if (
        not compiler
        or subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode != 0
    ):
        leave_out(f"there is no C++ compiler: {os.environ.get('CXX', 'g++')}")
    return compiler


def devices() -> list[str]:
    """The devices that this machine and this build both have."""
    import opaq

    backends = opaq.library_info()["backends"]
    return ["cpu", "cuda"] if "cuda" in backends and need("torch").cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"left out: {report.nodeid or report.fspath}: {reason.removeprefix('Skipped: ')}")
