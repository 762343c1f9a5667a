"""`python -m opaq`: `doctor` is opaq._doctor; everything else is the program `opaq`, the same as in a shell."""

from __future__ import annotations

import subprocess
import sys

from opaq import _doctor


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["doctor"]:
        return _doctor.main(arguments[1:])
    if (program := _doctor.command()) is None:
        print("opaq: there is no program opaq on PATH; only 'python -m opaq doctor' works", file=sys.stderr)
        return 3
    return subprocess.run([program, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
