#!/usr/bin/env python3
"""Checks that includes follow the order of the layers:

    base -> format -> backend -> definition -> {cpu, cuda}
                             \\-> op -> runner -> {torch, cli}
                                  \\-> checkpoint

definition is arithmetic that is compiled for every back end; cpu and cuda may not include each other. op and
runner may include backend but not cpu or cuda: only back ends access tensors' contents. checkpoint works on
host memory and may include cpu. A file in src/<layer> may include its own layer, those before it and public
headers; a public header only public headers; programs (demo, bench, examples, fuzz, the cli layer) only public
headers and files of their folder; benchmarks and tests also their shared case lists (tests/cases), and
fuzz/fuzz_cli_* the command's files. File names must be unique in the repository, so that an include line names
one file.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from repository import ROOT, tracked

# The layers that a layer may include beside itself.
BELOW = {
    "base": set(),
    "format": {"base"},
    "backend": {"base", "format"},
    "definition": {"base", "format", "backend"},
    "cpu": {"base", "format", "backend", "definition"},
    "cuda": {"base", "format", "backend", "definition"},
    "op": {"base", "format", "backend"},
    "runner": {"base", "format", "backend", "op"},
    "checkpoint": {"base", "format", "backend", "definition", "cpu", "op"},
    "torch": {"base"},
    "cli": set(),  # public headers only
}
PROGRAMS = ["demo", "bench", "examples", "fuzz"]
MAY_REPEAT = {
    "__init__.py",
    "CMakeLists.txt",
    "README.md",
    "conftest.py",
    ".gitignore",
    ".clang-tidy",
    "LICENSE",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def layers_below(layer: str) -> set[str]:
    """The layers that `layer` may include, including itself."""
    return BELOW[layer] | {layer}


def files(folder: str, *suffixes: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def problem(path: Path, target: str, allowed: set[str]) -> str | None:
    """The problem of one quoted include, or None. `allowed` are layers of src."""
    parts = target.split("/")
    if parts[:3] == ["..", "tests", "cases"] or parts[:2] == ["..", "cases"]:
        return None if (path.parent / target).is_file() else "does not exist"
    if ".." in parts:
        return "contains '..'"
    if parts[0] == "opaq":
        return None if (ROOT / "include" / target).is_file() else "is not a public header"
    if len(parts) == 1:
        if path.is_relative_to(ROOT / "src"):  # there a private header is named with its layer
            return "does not begin with a layer"
        return None if (path.parent / target).is_file() else "is not in the file's folder"
    if parts[0] not in allowed:
        return "is in a layer that this file may not include" if parts[0] in BELOW else "is not in a layer"
    return None if (ROOT / "src" / target).is_file() else "does not exist"


def check(path: Path, allowed: set[str]) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in INCLUDE.finditer(text):
        quote, target = match.groups()
        line = text.count("\n", 0, match.start(1)) + 1
        if quote == "<":
            wrong = "must be included with quotes" if target.startswith("opaq/") else None
        else:
            wrong = problem(path, target, allowed)
        if wrong:
            found.append(f"{path.relative_to(ROOT)}:{line}: {target} {wrong}")
    return found


def repeated_names() -> list[str]:
    places = defaultdict(list)
    for path in tracked():
        if path.name in MAY_REPEAT or "seeds" in path.parts:
            continue
        places[path.name].append(str(path.relative_to(ROOT)))
    return [f"several files have the same name: {', '.join(sorted(p))}" for p in places.values() if len(p) > 1]


def main() -> int:
    found = []
    count = 0
    for path in files("include", ".h"):
        found += check(path, set())
        count += 1
    for path in files("src", ".c", ".h", ".cu", ".cuh"):
        layer = path.relative_to(ROOT / "src").parts[0]
        count += 1
        if layer not in BELOW:
            found.append(f"{path.relative_to(ROOT)}: {layer} is not a layer")
            continue
        found += check(path, layers_below(layer))
    for folder in PROGRAMS:
        for path in files(folder, ".c", ".h"):
            reads_files = folder == "fuzz" and path.name.startswith("fuzz_cli_")  # the command's own parsers
            found += check(path, {"cli"} if reads_files else set())
            count += 1
    found += repeated_names()
    for line in found:
        print(line)
    if not found:
        print(f"{count} files: includes follow the layers, file names are unique")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
