#!/usr/bin/env python3
"""Checks that no file of the repository has a path of a developer's machine, a reference to a file outside the
repository, a TODO without an owner, which is written TODO(name), or a phrase of UNCLEAR.
Also prints the largest files.

A source file of more than LONG_LINES lines must say why in its opening, with the word "long". The package in
Python, which holds no arithmetic and no layout, has at most a fifth of the lines of the library in C and CUDA.
"""

import re
import sys

from repository import ROOT, tracked

# This file contains them all, so it is exempt (EXEMPT).
FORBIDDEN = [
    (re.compile(r"(?<![\w.$}/-])/(?:home|root|work|Users)/\w"), "a path of one machine"),
    (re.compile(r"\.\./shared\b|(?<![\w.])/?shared/\w+\.md"), "a reference outside the repository"),
    (re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(\w)"), "a TODO without an owner: write TODO(name)"),
    (re.compile(r"^\s*#\s*if\s+0\s*$", re.MULTILINE), "dead code"),
    (re.compile(r"[ \t]+$", re.MULTILINE), "spaces at the end of a line"),
    (re.compile(r"\r"), "a carriage return"),
]
EXEMPT = {"tools/check_text.py"}


def phrase(pattern: str) -> re.Pattern[str]:
    """The pattern, in which a space also matches a line break of a comment."""
    return re.compile(pattern.replace(" ", r"\s+(?:[*#] )?"))


# Phrases that were replaced by plain terms, and the terms.
UNCLEAR = [
    (phrase(r"\bso many\b"), "name the count: `rows` rows"),
    (phrase(r"\basked for\b"), "prefetched, allocated, requested or given"),
    (phrase(r"\b(?:nobody|somebody)\b"), "unsupported, unused, no expert, another thread or library"),
    (phrase(r"\bare_usual\b|\b(?:is|are) (?:not )?as usual\b"), "finite, in range"),
    (phrase(r"\bleft out, and\b"), "skipped"),
    (phrase(r"\b(?:at|through) the door\b|\bthe door (?:between|to)\b|---- the door ----"), "entry point"),
    (phrase(r"\bg(?:ive|ives|iven|ave) back\b"), "returned, released or freed"),
    (phrase(r"\bwhoever\b"), "the caller, the process, the loader"),
    (phrase(r"\bmade-up\b"), "random or artificial"),
    (phrase(r"\b(?:in|by) turns\b"), "alternately, in turn"),
    (phrase(r"\bthings of\b"), "elements, members"),
    (phrase(r"\basking for memory\b"), "prefetching, allocating"),
    (phrase(r"\btold to\b"), "set to, requested to"),
    (phrase(r"\bunasked\b"), "by default"),
    (phrase(r"\bwhat is said\b"), "output, messages"),
    (phrase(r"\bwhat (?:it|they) must (?:have|be|reach)\b"), "required value"),
    (phrase(r"\bis not asked\b|\b(?:is|are) told\b"), "is not checked; is passed"),
    (phrase(r"\brows (?:that )?lie (?:further )?apart\b"), "padded rows"),
    (phrase(r"\bthere and back\b"), "converting back, a round trip"),
    (phrase(r"\bat hand\b"), "given, available"),
    (phrase(r"\bnearly normal\b"), "approximately normal"),
]
VERBATIM = {"LICENSE"}
VERBATIM_FOLDER = "third_party/"
BYTES = ("fuzz/seeds/",)  # binary inputs, although some are valid text
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
                found.append(f"{name}: {lines} lines, and its opening does not say why the file is long")
        if name in VERBATIM:
            continue
        if text and not text.endswith("\n"):
            found.append(f"{name}: no newline at the end")
        for pattern, what in [*FORBIDDEN, *((pattern, f"unclear, write {term}") for pattern, term in UNCLEAR)]:
            if name in EXEMPT and "spaces" not in what:
                continue
            for match in pattern.finditer(text):
                number = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{number}: {what}: {match.group(0).strip()!r}")
    python = sum(lines for lines, name in sizes if name.startswith("python/"))
    library = sum(lines for lines, name in sizes if name.startswith(("src/", "include/")))
    if 5 * python > library:
        found.append(f"python/ has {python} lines, more than a fifth of the {library} of src/ and include/")
    for line in found:
        print(line)
    print("largest files: " + ", ".join(f"{n} ({c})" for c, n in sorted(sizes, reverse=True)[:SHOWN]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
