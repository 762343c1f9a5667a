"""`opaq quantize` is killed at random times, the disk is full, or the source shrinks: a file with its final
name is always complete, and the next run gives the same result as an undisturbed one.

OPAQ_KILLS is the number of kills; the default is a few."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_run import command, run
from conftest import need

torch = need("torch")
safetensors = need("safetensors")
save_file = need("safetensors.torch").save_file
PROGRAM = command()
KILLS = int(os.environ.get("OPAQ_KILLS", "12"))
FILES, WEIGHTS, ROWS, COLUMNS = 3, 3, 1024, 2048
Folder = dict[str, bytes]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several files, large enough that a signal interrupts the work."""
    folder = tmp_path_factory.mktemp("source")
    places = {}
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        bits = torch.Generator().manual_seed(number)
        tensors = {
            f"model.layers.{number}.mlp.w{i}.weight": torch.randn(ROWS, COLUMNS, generator=bits).bfloat16()
            for i in range(WEIGHTS)
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 2048}\n')
    (folder / "tokenizer.json").write_text("{}\n" * 1000)
    index = {"metadata": {"total_size": FILES * WEIGHTS * ROWS * COLUMNS * 2}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(need("json").dumps(index))
    return folder


def contents(folder: Path) -> Folder:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def words(source: Path, target: Path) -> list[str]:
    return [PROGRAM, "quantize", "--quiet", "--threads", "2", str(source), str(target)]


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, float]:
    """The result of an undisturbed run, and its time."""
    target = tmp_path_factory.mktemp("finished") / "to"
    begin = time.monotonic()
    subprocess.run(words(source, target), check=True)
    seconds = time.monotonic() - begin
    made = contents(target)
    assert set(made) == {path.name for path in source.iterdir()}
    assert not any(name.startswith(".") for name in made)
    return made, seconds


def check_partial(target: Path, finished: Folder) -> int:
    """Checks that every file with a final name is complete; returns the number of the model's files."""
    names = [path for path in target.glob("*") if not path.name.startswith(".")] if target.exists() else []
    for path in names:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as file:
                assert len(list(file.keys())) == 3 * WEIGHTS
        assert path.read_bytes() == finished[path.name], path.name
    if (target / "config.json").exists():  # written last: a folder that can be loaded is complete
        assert {path.name for path in names} == set(finished)
    return sum(path.suffix == ".safetensors" for path in names)


def wait_for_work(process: subprocess.Popen[str] | subprocess.Popen[bytes], target: Path) -> None:
    """Waits until a file is being written or the process has ended."""
    while process.poll() is None and not list(target.glob(".*.safetensors.opaq-partial")):
        time.sleep(0.001)


def disturb(source: Path, target: Path, number: int, after: float, at_work: bool = False) -> int:
    """Starts a run and sends it a signal `after` seconds from its start, or from its first write if `at_work`.
    Returns the exit status."""
    process = subprocess.Popen(words(source, target))
    if at_work:
        wait_for_work(process, target)
    time.sleep(after)
    process.send_signal(number)
    return process.wait(timeout=60)


def test_killed(source: Path, finished: tuple[Folder, float], tmp_path: Path) -> None:
    """Killed repeatedly with the same folder, sometimes with a new one; then it runs to the end."""
    whole, seconds = finished
    moments = random.Random(7)
    target = tmp_path / "to"
    killed = 0
    for i in range(KILLS):
        after = 0 if i == 0 else moments.uniform(0, 1.1 * seconds)
        code = disturb(source, target, signal.SIGKILL, after, at_work=i == 0)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        check_partial(target, whole)
        is_done = target.exists() and contents(target) == whole  # it may be killed after the last file
        assert is_done or code != 0
        if i % 3 == 2 and not is_done:
            done = run(*words(source, target)[1:])
            assert done.returncode == 0, done.stderr
            assert contents(target) == whole
        if i % 3 == 2 or is_done:
            target = tmp_path / f"to-{i}"
    assert killed > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_stop_signals(source: Path, finished: tuple[Folder, float], tmp_path: Path, number: int) -> None:
    """Exit 130 and no partial file at any time; the next run continues."""
    whole, seconds = finished
    codes = []
    for i, share in enumerate((0, 0.1, 0.3, 0.5)):
        target = tmp_path / str(i)
        codes.append(disturb(source, target, number, share * seconds, at_work=share < 0.3))
        assert codes[-1] in (0, 130, -number)  # -number: before the handler is installed
        check_partial(target, whole)
        if codes[-1] == 130:
            assert [path.name for path in target.glob(".*") if path.name != ".opaq-job"] == []
            assert run(*words(source, target)[1:]).returncode == 0
            assert contents(target) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_stop_signals_in_long_work(tmp_path: Path, number: int) -> None:
    """So much work, at the lowest priority, that it is not finished before the signal even on a busy
    machine."""
    weights = {f"m{i}.weight": torch.ones(4096, 4096, dtype=torch.bfloat16) for i in range(16)}
    save_file(weights, tmp_path / "source.safetensors")
    target = tmp_path / "made.safetensors"
    process = subprocess.Popen(
        [
            "nice",
            "-n",
            "19",
            PROGRAM,
            "quantize",
            "--threads",
            "1",
            str(tmp_path / "source.safetensors"),
            str(target),
        ],
        stderr=subprocess.PIPE,
        text=True,
        # a background job of a shell without job control, or of nohup, inherits signals that are ignored
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    wait_for_work(process, tmp_path)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped" in error
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def with_limit(limit: Callable[[], None], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120, preexec_fn=limit)


def test_no_room_for_a_file(source: Path, finished: tuple[Folder, float], tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    target = tmp_path / "to"
    done = with_limit(limit, *words(source, target))
    assert done.returncode == 3
    assert str(target) in done.stderr and "File too large" in done.stderr and done.stderr.count("\n") == 1
    assert check_partial(target, finished[0]) == 0
    assert [path.name for path in target.glob(".*") if path.name != ".opaq-job"] == []
    assert run(*words(source, target)[1:]).returncode == 0
    assert contents(target) == finished[0]


def test_a_full_disk(source: Path, tmp_path: Path) -> None:
    """A file system of four megabytes, if one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    tools = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=4m none '{disk}'"
    if (
        not shutil.which("unshare")
        or subprocess.run([*tools, mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system can be mounted here; only test_no_room_for_a_file ran")
    script = f"{mount} && {{ \"$@\"; code=$?; ls -A '{disk}/to'; exit $code; }}"
    done = with_limit(lambda: None, *tools, script, "sh", *words(source, disk / "to"))
    assert done.returncode == 3, done.stderr
    assert str(disk / "to") in done.stderr and done.stderr.count("\n") == 1
    assert "safetensors" not in done.stdout and "partial" not in done.stdout


def test_a_source_that_shrinks(source: Path, finished: tuple[Folder, float], tmp_path: Path) -> None:
    """Truncated while it is read: an error message, not a signal and not a file of zeros."""
    shrinking = tmp_path / "source"
    shutil.copytree(source, shrinking)
    target = tmp_path / "to"
    process = subprocess.Popen(words(shrinking, target), stderr=subprocess.PIPE, text=True)
    wait_for_work(process, target)
    process.send_signal(signal.SIGSTOP)
    last = max(shrinking.glob("*.safetensors"))
    os.truncate(last, last.stat().st_size // 8)
    process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3, error
    assert error.startswith(f"opaq quantize: {last} was truncated while it was read"), error
    assert check_partial(target, finished[0]) < FILES
    assert not (target / last.name).exists() and list(target.glob(".*.opaq-partial")) == []


def test_a_source_that_changes_between_runs(
    source: Path, finished: tuple[Folder, float], tmp_path: Path
) -> None:
    """A job of another source is not continued."""
    changing = tmp_path / "source"
    shutil.copytree(source, changing)
    target = tmp_path / "to"
    assert disturb(changing, target, signal.SIGKILL, 0, at_work=True) == -signal.SIGKILL
    first = min(changing.glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-2:] = b"\x00\x3f"
    first.write_bytes(data)
    done = run(*words(changing, target)[1:])
    assert done.returncode == 3 and str(target) in done.stderr, done.stderr
    check_partial(target, finished[0])
