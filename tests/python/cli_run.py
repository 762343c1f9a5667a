"""Runs the command opaq as a process."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from conftest import skip_test


def command() -> str:
    """The program that OPAQ_COMMAND names; skips the test if there is none."""
    program = os.environ.get("OPAQ_COMMAND") or shutil.which("opaq")
    if not program or not os.access(program, os.X_OK):
        skip_test("there is no command opaq: OPAQ_COMMAND does not name a program")
    return program


def run(
    *arguments: str | Path, folder: Path | None = None, memory: int | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder, optionally with an address space limited to `memory` bytes."""

    def limit() -> None:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    return subprocess.run(
        [command(), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=seconds,
        check=False,
        preexec_fn=limit,
    )


def run_well(*arguments: str | Path, folder: Path | None = None) -> str:
    """Runs the command, checks that it succeeds, and returns its output."""
    done = run(*arguments, folder=folder)
    assert done.returncode == 0, f"opaq {' '.join(map(str, arguments))}: {done.returncode}: {done.stderr}"
    return done.stdout
