"""The completion of zsh and fish: the shells parse the output of `opaq completion SHELL` and complete lines.
bash's completion is tested in test_cli_help.py."""

import os
import pty
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import skip_test
from test_cli_help import COMMANDS, compare, opaq, printed

FORMATS = ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2"]

# A line, and the expected completions of its last word.
COMPLETIONS = [
    ("opaq qu", ["quantize"]),
    ("opaq ", [*COMMANDS, "help"]),
    ("opaq --v", ["--version"]),
    ("opaq zebra", []),
    ("opaq quantize --fo", ["--format", "--follow-links"]),
    ("opaq quantize --format ", FORMATS),
    ("opaq quantize --format nv", ["nvfp4"]),
    ("opaq quantize --layout modelopt --experts s", ["split"]),
    ("opaq quantize --ignore x --ig", ["--ignore"]),
    ("opaq quantize --ignore a", []),
    ("opaq quantize --quiet a", ["a.safetensors"]),
    ("opaq quantize a.safetensors --q", ["--quiet"]),
    ("opaq quantize -- --q", []),
    ("opaq convert --layout p", ["plain"]),
    ("opaq verify --html r", ["report.html"]),
    ("opaq inspect r", ["report.html"]),
    ("opaq bench r", []),
    ("opaq bench --", ["--json", "--seconds", "--threads", "--help"]),
    ("opaq help v", ["verify", "version"]),
    ("opaq help --m", ["--man"]),
    ("opaq completion ", ["bash", "zsh", "fish"]),
]
IDS = [line for line, _ in COMPLETIONS]


def need_program(name: str) -> str:
    found = shutil.which(name)
    if not found:
        skip_test(f"there is no {name}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for name in ["a.safetensors", "report.html"]:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_parses(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(opaq("completion", shell).stdout, encoding="utf-8")
    done = subprocess.run([need_program(shell), "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_text(shell: str) -> None:
    compare(f"completion_{shell}.txt", printed("completion", shell))


def fish(folder: Path, line: str) -> dict[str, str]:
    """What fish completes the line with: words and their descriptions."""
    (folder / "opaq.fish").write_text(opaq("completion", "fish").stdout, encoding="utf-8")
    done = subprocess.run(
        [need_program("fish"), "--no-config", "-c", "source opaq.fish; complete -C $argv[1]", line],
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return dict((text + "\t").split("\t")[:2] for text in done.stdout.splitlines())


@pytest.mark.parametrize(("line", "expected"), COMPLETIONS, ids=IDS)
def test_fish(line: str, expected: list[str], folder: Path) -> None:
    assert sorted(fish(folder, line)) == sorted(expected)


def test_fish_value_after_an_equals_sign(folder: Path) -> None:
    assert sorted(fish(folder, "opaq quantize --format=mx")) == ["--format=mxfp4", "--format=mxfp8"]


def test_fish_describes(folder: Path) -> None:
    found = fish(folder, "opaq quantize --")
    assert "json" in found["--layout"] and found["--format"] == "Format of the quantized weights"
    assert fish(folder, "opaq ver")["verify"] == "measure the error of a quantized checkpoint"


# Matches go to a file instead of the screen: a function replaces compadd, which every completion calls in the
# end, and gets the matches from the builtin. The widget creates the file `done` afterwards.
ZSHRC = r"""
unsetopt beep
setopt extended_glob
fpath=($HOME/functions $fpath)
autoload -Uz compinit
compinit -u -D
compadd() {
    if [[ " $* " == *\ -[a-zA-Z]#[OAD]\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a matches
    builtin compadd -O matches "$@"
    (( $#matches )) && print -rl -- $matches >>$HOME/matches
    builtin compadd "$@"
}
record() {
    zle complete-word
    : >$HOME/done
    zle send-break
}
zle -N record
bindkey '^I' record
: >$HOME/done
"""


class Zsh:
    """An interactive zsh in a pseudo-terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "functions").mkdir()
        (folder / "functions" / "_opaq").write_text(opaq("completion", "zsh").stdout, encoding="utf-8")
        (folder / ".zshrc").write_text(ZSHRC, encoding="utf-8")
        self.terminal, other = pty.openpty()
        environment = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "dumb"}
        self.process = subprocess.Popen(
            ["zsh", "-i"],
            cwd=folder,
            env=environment,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        os.set_blocking(self.terminal, False)
        self.wait()

    def wait(self) -> None:
        """Reads zsh's output, so that it does not block, until the file `done` exists."""
        printed = b""
        end = time.monotonic() + 60
        while not (self.folder / "done").exists():
            try:
                printed += os.read(self.terminal, 65536)
            except BlockingIOError:
                time.sleep(0.01)
            assert time.monotonic() < end, f"zsh did not complete within 60 s; it printed {printed!r}"
        (self.folder / "done").unlink()

    def complete(self, line: str) -> list[str]:
        matches = self.folder / "matches"
        matches.unlink(missing_ok=True)
        os.write(self.terminal, line.encode() + b"\t")
        self.wait()
        return matches.read_text(encoding="utf-8").splitlines() if matches.exists() else []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.fixture(scope="module")
def zsh(folder: Path) -> Iterator[Zsh]:
    need_program("zsh")
    shell = Zsh(folder)
    yield shell
    shell.close()


@pytest.mark.parametrize(("line", "expected"), COMPLETIONS, ids=IDS)
def test_zsh(line: str, expected: list[str], zsh: Zsh) -> None:
    assert set(zsh.complete(line)) == set(expected)


def test_zsh_value_after_an_equals_sign(zsh: Zsh) -> None:
    assert sorted(zsh.complete("opaq quantize --format=mx")) == ["mxfp4", "mxfp8"]


def test_zsh_script_can_be_sourced(zsh: Zsh) -> None:
    line = "autoload -Uz compinit; compinit -u -D; source functions/_opaq; print $_comps[opaq]"
    done = subprocess.run(
        ["zsh", "-f", "-c", line], cwd=zsh.folder, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("_opaq\n", "")
