"""Shared by all Python tests: paths, and skipping of tests that cannot run.

A module that needs a package calls `need("torch")`; if it is missing, the module is skipped, and the end of the
run lists it with the reason. With CI=true that is an error instead."""

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
    """Parameters of a test; all but `fast` are marked slow, so `make test-python` does not run them."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def skip_test(reason: str) -> NoReturn:
    """Skips the current test or module; an error with CI=true."""
    if os.environ.get("CI") == "true":
        raise RuntimeError(f"CI=true and {reason}")
    pytest.skip(reason, allow_module_level=True)


def need(name: str) -> ModuleType:
    """Imports a module, or skips the test module that needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        skip_test(f"{name} cannot be imported: {error}")


def need_cxx() -> str:
    """The C++ compiler, which Inductor and LibTorch's package loader need; skips the test if there is none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if (
        not compiler
        or subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode != 0
    ):
        skip_test(f"there is no C++ compiler: {os.environ.get('CXX', 'g++')}")
    return compiler


def devices() -> list[str]:
    """The devices that both this machine and this build support."""
    import opaq

    backends = opaq.library_info()["backends"]
    return ["cpu", "cuda"] if "cuda" in backends and need("torch").cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run whose modules were all skipped passes; its end says why."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        and reporter is not None
        and reporter.stats.get("skipped")
    ):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"skipped: {report.nodeid or report.fspath}: {reason.removeprefix('Skipped: ')}")
