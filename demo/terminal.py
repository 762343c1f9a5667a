"""Terminal output, progress bars, child processes and Ctrl-C of the demonstration.

Ctrl-C ends the demonstration immediately with one sentence and status 130. Child processes have their own
sessions, so the terminal sends its signal to this process only, which then kills them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LINE_SECONDS = 3.0
INTERRUPTED = "Interrupted; run `make demo` again to start from the beginning."
_children: list[subprocess.Popen[str]] = []


def stop_on_interrupt() -> None:
    signal.signal(signal.SIGINT, _stop)


def _stop(*_: Any) -> None:
    """Ends the process without an exception, which would make PyTorch's compiler and its workers print
    tracebacks."""
    for child in _children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    os.write(2, f"{clear}{INTERRUPTED}\n".encode())
    os._exit(130)


class Bar:
    """A progress bar: tqdm's, which is hidden if the output is no terminal. Without tqdm, a line of text every
    LINE_SECONDS."""

    def __init__(self, title: str, total: int, unit: str = "step") -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done, self._shown = 0, time.monotonic()
        self._bar: Any = None
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=f"    {title}", unit=unit, leave=False, disable=None)

    def advance(self, count: int = 1, **values: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(count)
            return
        self._done += count
        if time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            shown = "".join(f", {name} {value}" for name, value in values.items())
            print(
                f"    {self._title}: {self._done} of {self._total} {self._unit}s{shown}",
                file=sys.stderr,
                flush=True,
            )

    def rename(self, title: str) -> None:
        self._title = title
        if self._bar is not None:
            self._bar.set_description(f"    {title}")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()


def quiet_imports() -> None:
    """Silences torchao, which transformers imports: it logs warnings about extensions for other machines."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def child(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a process and kills it at the end of the block if it still runs."""
    process: subprocess.Popen[str] = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        **options,
    )
    _children.append(process)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        _children.remove(process)


def output_of(command: Sequence[str | Path]) -> tuple[int, str, str]:
    """Runs a command to its end; returns its status, output and errors."""
    with child(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        output, errors = process.communicate()
        return process.returncode, output, errors
