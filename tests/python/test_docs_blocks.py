"""Every fenced code block of README.md and docs/ runs unmodified, in a scratch folder that has a small
checkpoint called Llama-3.1-8B. Python blocks run as programs, C blocks are compiled against the library and
run, shell blocks run with the command opaq on the path. A block that cannot run here has the comment `<!-- not
run: REASON -->` before it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cli_llama import Jobs
from cli_run import command
from conftest import ROOT, need, skip_test

need("transformers")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<kind>[a-z]*)\n(?P<text>.*?)^```$", re.M | re.S)
RUN = ("python", "c", "sh")
SHOWN = ("", "text")  # output and drawings
SECONDS = 300
NOT_RUN = 12  # limit of blocks with the comment


class Block(NamedTuple):
    page: Path
    line: int
    kind: str
    text: str
    note: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        content = page.read_text()
        for match in FENCE.finditer(content):
            line = content[: match.start("kind")].count("\n") + 1
            found.append(Block(page, line, match["kind"], match["text"], match["note"] or ""))
    return found


def is_not_run(block: Block) -> bool:
    return block.note.startswith("not run: ")


RUNNABLE = [block for block in blocks() if block.kind in RUN and not is_not_run(block)]


def environment(scratch: Path) -> dict[str, str]:
    programs = scratch.parent / "bin"
    programs.mkdir(exist_ok=True)
    for name, target in (("opaq", command()), ("python", sys.executable), ("python3", sys.executable)):
        program = programs / name  # not a link: a virtual environment's interpreter depends on its own path
        program.write_text(f'#!/bin/sh\nexec "{Path(target).absolute()}" "$@"\n')
        program.chmod(0o755)
    found = dict(os.environ, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1")
    return found | {"PYTHONPATH": str(ROOT / "python")}


def c_program(source: Path) -> list[str]:
    """Compiles a C block; returns the program."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        skip_test("there is no C compiler")
    library = Path(os.environ["OPAQ_LIBRARY"]).parent
    program = source.with_suffix("")
    flags = [
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT / 'include'}",
        str(source),
        "-o",
        str(program),
    ]
    flags += [f"-L{library}", "-lopaq", "-lm", f"-Wl,-rpath,{library}"]
    subprocess.run([compiler, *flags], check=True)
    return [str(program)]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    Jobs(tmp_path).source("llama", "bf16").rename(folder / "Llama-3.1-8B")
    return folder


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: f"{block.page.relative_to(ROOT)}:{block.line}")
def test_block_runs(block: Block, scratch: Path) -> None:
    source = scratch.parent / f"block.{block.kind}"
    source.write_text(block.text)
    if block.kind == "python":
        program = [sys.executable, str(source)]
    elif block.kind == "c":
        program = c_program(source)
    else:
        program = ["bash", "-euo", "pipefail", str(source)]
    done = subprocess.run(
        program,
        cwd=scratch,
        env=environment(scratch),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{block.page.name}:{block.line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_blocks_have_a_known_language() -> None:
    wrong = [
        f"{block.page.name}:{block.line}: {block.kind!r}"
        for block in blocks()
        if block.kind not in (*RUN, *SHOWN)
    ]
    assert not wrong, f"expected one of {RUN}, or text for what is only shown: {wrong}"
    assert RUNNABLE
    assert sum(map(is_not_run, blocks())) <= NOT_RUN


def test_commands_are_fenced() -> None:
    """Commands and Python statements must be in fenced blocks, because indented blocks are not run."""
    command = r"opaq [a-z]|build/opaq |make |python |pip |vllm "
    statement = r"import |from [\w.]+ import |(\w+ = )?opaq\.\w+[.(]"
    wrong = []
    for page in PAGES:
        inside = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            inside ^= line.startswith("```")
            if not inside and re.match(rf"    ({command}|{statement})", line):
                wrong.append(f"{page.name}:{number}: {line.strip()}")
    assert not wrong
