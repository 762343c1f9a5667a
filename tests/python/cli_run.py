"""The command opaq as a process."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from conftest import leave_out


def command() -> str:
    """The program that OPAQ_COMMAND names, or the end of the module that asks for it."""
    program = os.environ.get("OPAQ_COMMAND") or shutil.which("opaq")
    if not program or not os.access(program, os.X_OK):
        leave_out("there is no command opaq: OPAQ_COMMAND does not name a program")
    return program


def run(
    *arguments: str | Path, folder: Path | None = None, memory: int | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end in a folder, perhaps with so many bytes of address space at most."""

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
    """Runs it, expects that it works, and gives what it prints."""
    done = run(*arguments, folder=folder)
    assert done.returncode == 0, f"opaq {' '.join(map(str, arguments))}: {done.returncode}: {done.stderr}"
    return done.stdout
