"""Runs the ranks of a process group on this machine, one process each, with their output in files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import ROOT


def need_gpus(device: str, ranks: int) -> None:
    """Skips a test on CUDA if there are fewer GPUs than ranks."""
    if device != "cpu" and (found := torch.cuda.device_count()) < ranks:
        pytest.skip(f"needs {ranks} GPUs, one for each rank; there is {found}")


class RankProcesses:
    """Starts `script <before>... <rank> <world> <folder>` for each rank and waits until all have ended, until
    10 s after one has failed, or until the time limit. Remaining processes are killed."""

    def __init__(self, script: Path, world: int, folder: Path, seconds: float, *before: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        self.logs = [folder / f"rank{rank}.log" for rank in range(world)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            command = [sys.executable, str(script), *before, str(rank), str(world), str(folder)]
            with log.open("wb") as output:
                self.ranks.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        try:
            self._wait(seconds)
        finally:
            for process in self.ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in self.ranks) and time.monotonic() < end:
            if any(process.poll() for process in self.ranks):
                end = min(end, time.monotonic() + 10)
            time.sleep(0.1)

    @property
    def ended(self) -> list[int | None]:
        """The exit statuses; nonzero for killed processes."""
        return [process.returncode for process in self.ranks]

    @property
    def output(self) -> str:
        return "\n".join(f"---- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in self.logs)
