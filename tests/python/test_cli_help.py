"""Texts of the command `opaq`: help, usage errors, the manual page, bash completion.

Outputs are compared with the files in tests/cli; OPAQ_REWRITE=1 writes them again."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT, skip_test

EXPECTED = ROOT / "tests" / "cli"
COMMAND = os.environ.get("OPAQ_COMMAND", str(ROOT / "build" / "opaq"))
if not Path(COMMAND).is_file():
    skip_test(f"there is no command {COMMAND}; OPAQ_COMMAND names another")

COMMANDS = "quantize convert inspect verify diff formats bench reproduce doctor version".split()
HIDDEN = ["help", "completion"]


def opaq(*words: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "COLUMNS": str(columns)}
    return subprocess.run([COMMAND, *words], env=environment, capture_output=True, text=True, check=False)


def printed(*words: str, columns: int = 80) -> str:
    """The output of a successful command, with the version replaced by VERSION."""
    result = opaq(*words, columns=columns)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.replace(version(), "VERSION")


def version() -> str:
    return opaq("--version").stdout.removeprefix("opaq ").strip()


def compare(name: str, actual: str) -> None:
    path = EXPECTED / name
    if os.environ.get("OPAQ_REWRITE") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual, encoding="utf-8")
    assert actual == path.read_text(encoding="utf-8"), f"{name} differs; OPAQ_REWRITE=1 writes it again"


def test_version() -> None:
    header = (ROOT / "include" / "opaq" / "version.h").read_text(encoding="utf-8")
    numbers = re.findall(r"#define OPAQ_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert opaq("--version").stdout == f"opaq {'.'.join(numbers)}\n"
    assert opaq("version").stdout.splitlines()[0] == opaq("--version").stdout.strip()
    assert json.loads(opaq("version", "--json").stdout)["version"] == ".".join(numbers)


def test_overview() -> None:
    compare("help_overview.txt", printed("--help"))
    assert printed("help") == printed("-h") == printed("--help")


@pytest.mark.parametrize("command", COMMANDS + HIDDEN)
def test_help(command: str) -> None:
    compare(f"help_{command}.txt", printed(command, "--help"))
    assert printed("help", command) == printed(command, "-h") == printed(command, "--help")


def test_formats() -> None:
    compare("formats.txt", printed("formats"))
    rows = json.loads(printed("formats", "--json"))["formats"]
    assert [row["name"] for row in rows] == [
        line.split()[0] for line in printed("formats").splitlines()[1 : len(rows) + 1]
    ]


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_help_is_wrapped(columns: int) -> None:
    for command in COMMANDS:
        text = printed(command, "--help", columns=columns)
        paragraphs = [line for line in text.splitlines() if re.match(r"\S", line)][1:]
        options = [line for line in text.partition("\noptions:\n")[2].splitlines() if line.startswith(" " * 24)]
        assert all(len(line) < columns for line in paragraphs + options if " " in line.strip())


def test_help_is_at_most_100_wide() -> None:
    assert printed("quantize", "--help", columns=400) == printed("quantize", "--help", columns=100)
    assert printed("quantize", "--help", columns=1) == printed("quantize", "--help", columns=40)


WRONG_LINES = [
    "",
    "quantise",
    "zebra",
    "help quantise",
    "--json",
    "quantize",
    "quantize SRC",
    "quantize SRC DST more",
    "quantize SRC DST --fromat nvfp4",
    "quantize SRC DST --format nvfp5",
    "quantize SRC DST --format",
    "quantize SRC DST --layout=zebra",
    "quantize SRC DST --quiet=1",
    "quantize SRC DST --format nvfp4 --format=fp8",
    "convert SRC DST --dtype bf61",
    "bench --threads none",
    "bench --seconds -1",
    "completion tcsh",
]


def test_wrong_lines() -> None:
    output = []
    for line in WRONG_LINES:
        result = opaq(*shlex.split(line))
        assert (result.returncode, result.stdout) == (2, "")
        output.append(f"$ opaq {line}".rstrip() + f"\n{result.stderr}")
    compare("wrong_lines.txt", "\n".join(output))


def example_lines() -> list[str]:
    lines = [line for command in COMMANDS for line in printed(command, "--help").splitlines()]
    return [line.strip() for line in lines if line.startswith("  opaq ")]


@pytest.mark.parametrize("line", example_lines())
def test_examples_are_command_lines(line: str) -> None:
    """--help is appended, so that the options are parsed but the command does nothing."""
    words = shlex.split(line.partition(" > ")[0])[1:]
    result = opaq(*words, "--help")
    assert (result.returncode, result.stderr) == (0, "")


def test_output_that_cannot_be_written() -> None:
    if not Path("/dev/full").exists():
        skip_test("there is no /dev/full")
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 3
    assert result.stderr == "opaq: cannot write to the standard output: No space left on device\n"


def test_a_closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        result = subprocess.run(
            [COMMAND, "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (result.returncode, result.stderr) == (3, "")


def test_manual() -> None:
    compare("manual.txt", printed("help", "--man"))


def test_manual_in_groff() -> None:
    if not shutil.which("groff"):
        skip_test("there is no groff")
    page = opaq("help", "--man").stdout
    result = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-c", "-ww"], input=page, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    text = re.sub(".\b", "", result.stdout)  # bold is a letter printed twice
    for words in [*(f"opaq {command}" for command in COMMANDS), "--no-default-ignore", r"re:.*layers\.[0-3]\."]:
        assert words in text


# Words of a command line, of which the last is completed, and the expected completions.
COMPLETIONS = [
    (["opaq", "qu"], ["quantize"]),
    (["opaq", ""], [*COMMANDS, "help", "--help", "--version"]),
    (["opaq", "--v"], ["--version"]),
    (["opaq", "zebra"], []),
    (["opaq", "quantize", "--fo"], ["--format", "--follow-links"]),
    (["opaq", "quantize", "--format", ""], ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"]),
    (["opaq", "quantize", "--format", "nv"], ["nvfp4"]),
    (["opaq", "quantize", "--format", "="], ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"]),
    (["opaq", "quantize", "--format", "=", "mx"], ["mxfp4", "mxfp8"]),
    (["opaq", "quantize", "--layout", "modelopt", "--experts", "s"], ["split"]),
    (["opaq", "quantize", "--ignore", "a"], []),
    (["opaq", "quantize", "--quiet", "a"], ["a folder", "a.safetensors"]),
    (["opaq", "quantize", "a"], ["a folder", "a.safetensors"]),
    (["opaq", "quantize", "--", "-"], ["--odd"]),
    (["opaq", "convert", "--layout", "p"], ["plain"]),
    (["opaq", "verify", "--html", "r"], ["report.html"]),
    (["opaq", "verify", "--html", "=", "r"], ["report.html"]),
    (["opaq", "inspect", "b"], ["b*c"]),
    (["opaq", "bench", "b"], []),
    (["opaq", "bench", "-"], ["--json", "--seconds", "--threads", "--help"]),
    (["opaq", "help", "v"], ["verify", "version"]),
    (["opaq", "help", "--"], ["--man", "--help"]),
    (["opaq", "completion", ""], ["bash", "zsh", "fish"]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a folder").mkdir()
    for name in ["a.safetensors", "report.html", "b*c", "--odd"]:
        (tmp_path / name).touch()
    return tmp_path


def bash(script: str, folder: Path) -> list[str]:
    if not shutil.which("bash"):
        skip_test("there is no bash")
    lines = f'set -u\nsource <("{COMMAND}" completion bash)\n{script}\n'
    result = subprocess.run(
        ["bash", "--norc", "-c", lines], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize(("words", "expected"), COMPLETIONS, ids=[" ".join(words) for words, _ in COMPLETIONS])
def test_completion(words: list[str], expected: list[str], folder: Path) -> None:
    script = f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}\n_opaq\n"
    actual = bash(script + 'for reply in ${COMPREPLY[@]+"${COMPREPLY[@]}"}; do echo "$reply"; done', folder)
    assert sorted(actual) == sorted(expected)


def test_completion_is_registered(folder: Path) -> None:
    assert bash("complete -p opaq", folder) == ["complete -F _opaq opaq"]


def test_completion_text() -> None:
    compare("completion_bash.txt", printed("completion", "bash"))
