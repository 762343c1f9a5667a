"""`python -m opaq`: runs opaq._doctor for `doctor`, and the program `opaq` for every other command."""

from __future__ import annotations

import subprocess
import sys

from opaq import _doctor


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["doctor"]:
        return _doctor.main(arguments[1:])
    if (program := _doctor.command()) is None:
        print("opaq: the program opaq is not on PATH; only 'python -m opaq doctor' works", file=sys.stderr)
        return 3
    return subprocess.run([program, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
