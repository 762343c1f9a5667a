"""Sources that are ids of the Hugging Face Hub: found in its local cache, or refused with the command that
downloads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import need

torch = need("torch")
cli = need("cli_checkpoints")
cli.program()
from cli_run import run, run_well  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as huggingface_hub fills it, with one model."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "hub" / "models--org--tiny"
    made = cli.write_model(tmp_path / "made", cli.plain_tensors())
    snapshot = folder / "snapshots" / COMMIT
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for number, file in enumerate(made.iterdir()):
        file.rename(folder / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return folder


def path_of(source: str | Path, folder: Path) -> str:
    return str(json.loads(run_well("inspect", "--json", source, folder=folder))["path"])


def test_found(cache: Path, tmp_path: Path) -> None:
    snapshot = str(cache / "snapshots" / COMMIT)
    for source in ("org/tiny", f"org/tiny@{COMMIT}", "org/tiny@main", cache, snapshot):
        assert path_of(source, tmp_path) == snapshot, source
    run_well("quantize", "--quiet", "org/tiny", "made-q", folder=tmp_path)
    assert run("verify", "--quiet", "made-q", "org/tiny", folder=tmp_path).returncode == 0


def test_other_places(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").rename(tmp_path / "huggingface")
    for name, value in (("XDG_CACHE_HOME", tmp_path), ("HF_HUB_CACHE", tmp_path / "huggingface" / "hub")):
        monkeypatch.delenv("HF_HOME", raising=False)
        monkeypatch.setenv(name, str(value))
        assert run("inspect", "org/tiny", folder=tmp_path).returncode == 0
        monkeypatch.delenv(name)


def test_a_folder_is_first(cache: Path, tmp_path: Path) -> None:
    cli.write_model(tmp_path / "org" / "tiny", cli.plain_tensors())
    assert path_of("org/tiny", tmp_path) == "org/tiny"


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("org/other", "'hf download org/other' downloads it"),
        ("org/tiny@v2", "'hf download org/tiny --revision v2' downloads it"),
        ("gpt2", "'hf download gpt2' downloads it"),
        ("./org", None),
        ("a/b/c", None),
        ("/org/tiny", None),
        ("model.safetensors", None),
        ("org/tiny@../../x", None),
        ("../org", None),
    ],
)
def test_refused(cache: Path, tmp_path: Path, source: str, advice: str | None) -> None:
    done = run("inspect", source, folder=tmp_path)
    assert done.returncode == 3 and done.stderr.startswith(f"opaq inspect: cannot open {source}: ")
    if advice is None:
        assert "download" not in done.stderr
    else:
        assert advice in done.stderr and str(cache.parent) in done.stderr


def test_a_hostile_reference(cache: Path, tmp_path: Path) -> None:
    (cache / "refs" / "main").write_text("../../../..", encoding="utf-8")
    assert run("inspect", "org/tiny", folder=tmp_path).returncode == 3
