"""Files that the command reads and replaces: it writes only to regular files or new names and never to an
input; only one process writes at a time; a source that changes or is unfinished is an error; links in a
download cache are read."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import make_hostile
from cli_run import command, run

PROGRAM = command()
WEIGHTS: dict[str, make_hostile.Entry] = {
    "a.weight": ("BF16", [8, 64], 1024),
    "b.weight": ("BF16", [8, 64], 1024),
}


def checkpoint(folder: Path, files: int = 1) -> Path:
    """A small model with an index."""
    folder.mkdir(parents=True)
    names = [f"model-{i}.safetensors" for i in range(files)]
    places = {}
    for i, name in enumerate(names):
        own = {f"m{i}.{key}": entry for key, entry in WEIGHTS.items()}
        (folder / name).write_bytes(make_hostile.tensors(own))
        places |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("tokens")
    return folder


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file's type, inode number and contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        what = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(what.st_mode) else b""
        found[str(path.relative_to(folder))] = (what.st_mode, what.st_ino, data)
    return found


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        where = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is limited to 107 bytes
        try:
            end.bind(path.name)
        finally:
            os.chdir(where)


# What may exist under the name of an output, and its name in messages. `source` is an input file.
KINDS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "pipe": (lambda path, _: os.mkfifo(path), "a pipe"),
    "link": (lambda path, source: path.symlink_to(source), "a symbolic link"),
    "dangling link": (lambda path, _: path.symlink_to("nowhere"), "a symbolic link"),
    "link to a device": (lambda path, _: path.symlink_to("/dev/null"), "a symbolic link"),
    "folder": (lambda path, _: path.mkdir(), "a folder"),
    "socket": (lambda path, _: put_socket(path), "a socket"),
    "device": (lambda path, _: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3)), "a device"),
    "source": (lambda path, source: os.link(source, path), "one of the files that are read"),
}


def put(kind: str, path: Path, source: Path) -> str:
    make, name = KINDS[kind]
    try:
        make(path, source)
    except PermissionError:
        pytest.skip(f"a {kind} cannot be made here")
    return name


def refused(name: str, *words: str | Path) -> None:
    done = run(*words)
    assert done.returncode == 3 and name in done.stderr, (words, done.returncode, done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_only_files_are_replaced(kind: str, tmp_path: Path) -> None:
    """For every name that a command writes to; the existing file is not changed."""
    source = checkpoint(tmp_path / "source")
    weights = source / "model-0.safetensors"
    for number, name in enumerate(
        ("model-0.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json", ".opaq-job")
        + (".model-0.safetensors.opaq-partial",)
    ):
        target = tmp_path / str(number)
        target.mkdir()
        (target / "model-9.safetensors").write_text("an older model")
        what = put(kind, target / name, weights)
        before = state(tmp_path)
        refused(what, "quantize", "--overwrite", source, target)
        assert state(tmp_path) == before
    page = tmp_path / "page.html"
    what = put(kind, page, weights)
    before = state(tmp_path)
    refused(what, "verify", "--html", page, source, source)
    assert state(tmp_path) == before
    single = tmp_path / "single.safetensors"
    what = put(kind, single, weights)
    before = state(tmp_path)
    refused("is the source itself" if kind == "source" else what, "quantize", "--overwrite", weights, single)
    assert state(tmp_path) == before
    if kind not in ("folder", "source"):
        what = put(kind, tmp_path / "target", source)
        before = state(tmp_path)
        refused(what, "quantize", "--overwrite", source, tmp_path / "target")
        assert state(tmp_path) == before


@pytest.mark.parametrize("name", ["model-0.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_report_does_not_replace_a_source(name: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    before = state(source)
    refused("one of the files that are read", "verify", "--html", source / name, source, source)
    assert state(source) == before
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "page.html").chmod(0o600)
    assert run("verify", "--html", tmp_path / "page.html", source, source).returncode == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600


def test_a_partial_file_is_not_a_source(tmp_path: Path) -> None:
    """It would be removed by a run that writes to its final name."""
    partial = tmp_path / ".x.safetensors.opaq-partial"
    partial.write_bytes(make_hostile.tensors(WEIGHTS))
    refused("is an unfinished output file of opaq", "quantize", partial, tmp_path / "x.safetensors")
    assert partial.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-Q4_0.gguf", "consolidated.00.pth"])
def test_weights_in_another_format(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_bytes(b"x")
    for words in (["inspect", tmp_path / "other"], ["quantize", tmp_path / "other", tmp_path / "out"]):
        refused(f"has no safetensors file; {name} is of another format", *words)


def test_an_unfinished_folder_is_not_a_source(tmp_path: Path) -> None:
    good, bad = checkpoint(tmp_path / "good"), checkpoint(tmp_path / "bad")
    (bad / ".opaq-job").write_text("opaq 0.1\nquantize\n")
    for words in (
        ["inspect", bad],
        ["diff", bad, good],
        ["diff", good, bad],
        ["verify", bad, good],
        ["verify", good, bad],
        ["quantize", bad, tmp_path / "to"],
        ["convert", bad, tmp_path / "to"],
    ):
        refused(f"{bad} is not finished", *words)
    assert not (tmp_path / "to").exists()


# ---- while it is read


def slow_source(folder: Path) -> Path:
    """A folder that takes a while to read."""
    folder.mkdir()
    entries: dict[str, make_hostile.Entry] = {
        f"m{i}.weight": ("BF16", [2048, 2048], 2 * 2048 * 2048) for i in range(8)
    }
    (folder / "model.safetensors").write_bytes(make_hostile.tensors(entries))
    (folder / "config.json").write_text("{}")
    return folder


def wait_for(process: subprocess.Popen[str], folder: Path, name: str) -> None:
    while process.poll() is None and not list(folder.glob(name)):
        time.sleep(0.001)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01\x02")


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copyfile(path, other)
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, replace, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_source_that_changes(change: Callable[[Path], None], is_folder: bool, tmp_path: Path) -> None:
    """The command is stopped while it writes, the source is changed, and the command continued: exit 3, and no
    result is left."""
    source = slow_source(tmp_path / "source")
    weights = source / "model.safetensors"
    target = tmp_path / "to" if is_folder else tmp_path / "to.safetensors"
    process = subprocess.Popen(
        [PROGRAM, "quantize", "--threads", "1", str(source if is_folder else weights), str(target)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(process, target if is_folder else tmp_path, ".*.safetensors.opaq-partial")
    process.send_signal(signal.SIGSTOP)
    change(weights)
    process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3 and f"{weights} " in error and "while it was read" in error, error
    assert not list(tmp_path.rglob("to*/config.json")) and not list(tmp_path.rglob("*.opaq-partial"))
    assert not (target / "model.safetensors").exists() if is_folder else not target.exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    source, target = slow_source(tmp_path / "source"), tmp_path / "to"
    words = ["quantize", "--quiet", "--threads", "1", str(source), str(target)]
    process = subprocess.Popen([PROGRAM, *words], text=True)
    wait_for(process, target, ".*.safetensors.opaq-partial")
    process.send_signal(signal.SIGSTOP)
    try:
        for more in ([], ["--overwrite"]):
            refused(f"another opaq is writing to {target}", *words, *more)
    finally:
        process.send_signal(signal.SIGCONT)
    process.kill()  # this releases the lock
    process.wait(timeout=60)
    assert run(*words).returncode == 0
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


def test_a_lock_of_another_program_is_respected(tmp_path: Path) -> None:
    source, target = checkpoint(tmp_path / "source"), tmp_path / "to"
    target.mkdir()
    handle = os.open(target, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused("another opaq is writing", "quantize", source, target)
    os.close(handle)
    assert run("quantize", source, target).returncode == 0


# ---- copied files


def test_permissions_are_not_widened(tmp_path: Path) -> None:
    source, target = checkpoint(tmp_path / "source"), tmp_path / "to"
    (source / "more").mkdir(mode=0o700)
    (source / "more" / "x").write_text("x")
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (source / "tokenizer.json").chmod(0o640)
    source.chmod(0o700)
    before = os.umask(0o022)
    try:
        assert run("quantize", "--layout", "modelopt", source, target).returncode == 0
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [target, *target.rglob("*")]}
    assert modes.pop("tokenizer.json") == 0o640
    assert modes.pop("to") == 0o700 and modes.pop("more") == 0o700
    assert "hf_quant_config.json" in modes and set(modes.values()) == {0o600}


def test_weights_outside_the_index_are_not_copied(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (source / "consolidated.safetensors").write_bytes(make_hostile.tensors(WEIGHTS))
    done = run("quantize", source, tmp_path / "to")
    assert done.returncode == 0 and not (tmp_path / "to" / "consolidated.safetensors").exists()
    assert "consolidated.safetensors is not in model.safetensors.index.json" in done.stdout
    assert "note: consolidated.safetensors is not in" in run("inspect", source).stdout


def test_long_names(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    name = "n" * 255
    (source / name).write_text("long")
    assert run("quantize", source, tmp_path / "to").returncode == 0
    assert (tmp_path / "to" / name).read_text() == "long"


def test_a_dangling_link(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (source / "notes").symlink_to("nowhere")
    refused("notes is a link", "quantize", source, tmp_path / "a")
    refused(
        "notes is a link to a file that does not exist", "quantize", "--follow-links", source, tmp_path / "b"
    )


def test_a_new_folder_is_durable(tmp_path: Path) -> None:
    """strace shows that its parent folder is flushed."""
    if not shutil.which("strace"):
        pytest.skip("no strace")
    source = checkpoint(tmp_path / "source")
    trace = tmp_path / "trace"
    words = ["strace", "-f", "-y", "-e", "trace=fsync", "-o", trace]
    done = subprocess.run(
        [*words, PROGRAM, "quantize", source, tmp_path / "to"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"strace cannot trace here: {done.stderr}")
    assert f"<{tmp_path}>)" in trace.read_text()


# ---- a download cache


def cached(folder: Path) -> tuple[Path, Path]:
    """A snapshot of links, and the folder of blobs that they point to."""
    root = folder / "models--x--y"
    snapshot, blobs = root / "snapshots" / "abc", root / "blobs"
    checkpoint(snapshot, files=2)
    (snapshot / "more").mkdir()
    (snapshot / "more" / "x").write_text("x")
    blobs.mkdir()
    for number, path in enumerate([p for p in snapshot.rglob("*") if p.is_file()]):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    return snapshot, blobs


def test_links_of_a_cache_are_read(tmp_path: Path) -> None:
    snapshot, _ = cached(tmp_path)
    plain, made = tmp_path / "plain", tmp_path / "made"
    assert run("quantize", snapshot, made).returncode == 0
    assert run("convert", made, plain).returncode == 0
    for words in (["inspect", snapshot], ["diff", snapshot, snapshot], ["verify", snapshot, snapshot]):
        assert run(*words).returncode == 0, words
    assert run("inspect", ".", folder=snapshot).returncode == 0
    assert (made / "more" / "x").read_text() == "x" and not any(p.is_symlink() for p in made.rglob("*"))
    (tmp_path / "link").symlink_to(snapshot)
    assert run("inspect", tmp_path / "link").returncode == 0


def test_links_out_of_a_cache_are_refused(tmp_path: Path) -> None:
    snapshot, blobs = cached(tmp_path)
    config = snapshot / "config.json"
    config.unlink()
    (tmp_path / "outside").write_text("{}")
    (blobs / "on").symlink_to(tmp_path / "outside")
    beside = tmp_path / "models--x--y2"
    beside.mkdir()
    (beside / "config.json").write_text("{}")
    for place in (tmp_path / "outside", blobs / "on", beside / "config.json", Path("/dev/null")):
        config.symlink_to(place)
        refused("is a link that leads out of", "inspect", snapshot)
        config.unlink()
    config.symlink_to("../../blobs/missing")
    refused("config.json is a link to a file that does not exist", "inspect", snapshot)
    config.unlink()
    other = tmp_path / "models--x" / "other"  # not a snapshot
    other.parent.mkdir()
    shutil.copytree(snapshot, other, symlinks=True)
    refused("is a link, which may lead out of the folder", "inspect", other)
