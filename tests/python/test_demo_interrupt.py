"""`make demo` and the script that installs Python packages end with one sentence after Ctrl-C, in each of their
steps. The scripts run in a copy, with programs that stand in for cmake, python3 and pip."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, skip_test

DEMO = "Interrupted; run `make demo` again to start from the beginning.\n"
ENVIRONMENT = "Interrupted; run the command again to continue.\n"

# Configures and builds at once; builds demo_formats.
CMAKE = """
case $1 in
--version) echo cmake version 3.30.0; exit;;
--build) {wait}
    mkdir -p build/demo; printf '#!/bin/sh\\n' >build/demo/demo_formats; chmod +x build/demo/demo_formats;;
esac
"""
# `python3 -m venv --clear .venv` makes a .venv whose python is this program, too.
PYTHON = """
case "$*" in
*"-m venv"*) mkdir -p .venv/bin .venv/lib/python3.9/site-packages; cp "$0" .venv/bin/python;;
*"-m pip"*) {wait};;
esac
"""
WAIT = "touch started; sleep 60"
NINJA = "trap 'echo ninja: build stopped: interrupted by user. >&2; exit 130' INT; touch started; sleep 60"


def interrupted(tmp_path: Path, script: list[str], **steps: str) -> tuple[int, str, str]:
    """Runs a script of tools/ until a step has created the file `started`, and sends SIGINT to its process
    group, as a terminal does. `steps` are commands of the stand-ins."""
    if shutil.which("bash") is None or sys.platform == "win32":
        skip_test("there is no bash")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("cmake", CMAKE), ("python3", PYTHON)):
        (programs / name).write_text("#!/bin/bash\n" + text.replace("{wait}", steps.get(name, ":")))
        (programs / name).chmod(0o755)
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHON", "CI", "OPAQ_INTERRUPT_SILENT")
    }
    process = subprocess.Popen(
        ["bash", *script],
        cwd=tmp_path,
        env=kept | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CC": "cc"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    end = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.5)  # until the stand-in waits
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors


@pytest.mark.parametrize("build", [WAIT, NINJA], ids=["silent", "ninja"])
def test_during_the_build(tmp_path: Path, build: str) -> None:
    status, _, errors = interrupted(tmp_path, ["tools/demo.sh", "build"], cmake=build)
    assert (status, errors) == (130, DEMO)


def test_during_pip(tmp_path: Path) -> None:
    status, output, errors = interrupted(tmp_path, ["tools/demo.sh", "build"], python3=WAIT)
    assert (status, errors) == (130, f"installing requirements/torch.txt into .venv (part 1 of 4)\n{DEMO}")
    assert "every format on one weight" in output
    assert not list((tmp_path / ".venv").glob("stamp-*"))


def test_during_pip_alone(tmp_path: Path) -> None:
    status, _, errors = interrupted(tmp_path, ["tools/python_env.sh", "core", "demo"], python3=WAIT)
    assert (status, errors) == (
        130,
        f"installing requirements/core.txt into .venv (part 1 of 2)\n{ENVIRONMENT}",
    )
