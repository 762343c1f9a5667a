#!/usr/bin/env python3
"""What must not stand in a file of this repository: a path of somebody's machine, a reference to something
outside it, a note to do something that nobody owns. Also prints the largest files.

An open end has an owner in the text: TODO(name). A source file of more than LONG_LINES lines says why in its
opening, with the word "long".
"""

import re
import sys

from repository import ROOT, tracked

# This file names them all, so it is not held to them (MAY_NAME).
FORBIDDEN = [
    (re.compile(r"(?<![\w.$}/-])/(?:home|root|work|Users)/\w"), "a path of one machine"),
    (re.compile(r"\.\./shared\b|(?<![\w.])/?shared/\w+\.md"), "a reference outside the repository"),
    (re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(\w)"), "an open end without an owner: write TODO(name)"),
    (re.compile(r"^\s*#\s*if\s+0\s*$", re.MULTILINE), "dead code"),
    (re.compile(r"[ \t]+$", re.MULTILINE), "spaces at the end of a line"),
    (re.compile(r"\r"), "a carriage return"),
]
MAY_NAME = {"tools/check_text.py"}
VERBATIM = {"LICENSE"}
VERBATIM_FOLDER = "third_party/"
BYTES = ("fuzz/seeds/",)  # inputs, some of which happen to be text
SOURCES = {".c", ".h", ".py", ".sh", ".cu", ".cuh"}
LONG_LINES = 600
SHOWN = 8


def main() -> int:
    found = []
    sizes = []
    for path in tracked():
        name = str(path.relative_to(ROOT))
        if name.startswith((VERBATIM_FOLDER, *BYTES)) and path.suffix != ".md":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # binary: seeds, golden files
        lines = text.count("\n")
        if path.suffix in SOURCES:
            sizes.append((lines, name))
            if lines > LONG_LINES and "long" not in text[:1500]:
                found.append(f"{name}: {lines} lines, and its opening does not say why it is long")
        if name in VERBATIM:
            continue
        if text and not text.endswith("\n"):
            found.append(f"{name}: no newline at the end")
        for pattern, what in FORBIDDEN:
            if name in MAY_NAME and "spaces" not in what:
                continue
            for match in pattern.finditer(text):
                number = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{number}: {what}: {match.group(0).strip()!r}")
    for line in found:
        print(line)
    print("largest files: " + ", ".join(f"{n} ({c})" for c, n in sorted(sizes, reverse=True)[:SHOWN]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
