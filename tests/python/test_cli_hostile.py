"""Files and folders that must be rejected with one message and exit 3, and unusual ones that must be accepted.

tests/cli/make_hostile.py writes them to a temporary folder; tests/cli/hostile_expected.json has the messages,
and OPAQ_REWRITE=1 rewrites it. The safetensors package must reject the same invalid files, except those in
ACCEPTED_BY_SAFETENSORS, which gives reasons."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import make_hostile
from cli_run import command, run
from conftest import ROOT, need

safetensors = need("safetensors")
command()

EXPECTED = ROOT / "tests" / "cli" / "hostile_expected.json"
REWRITE = os.environ.get("OPAQ_REWRITE") == "1"
MEMORY = 400_000_000  # limit of the address space: sizes in a small file's header are not allocated
FILES = dict(make_hostile.files())
CASES = [f"{name}.safetensors" for name in FILES] + [name for name, _ in make_hostile.folders()]

# Rejected by opaq and accepted by safetensors 0.8.
ACCEPTED_BY_SAFETENSORS = {
    "name_twice": "the last one wins",
    "name_twice_escaped": "the last one wins",
    "name_empty": "any name is allowed",
    "name_with_zero": "any name is allowed",
    "name_with_escape": "any name is allowed",
    "name_with_c1": "any name is allowed",
    "name_with_newline": "any name is allowed",
    "name_of_1001_bytes": "any name is allowed",
    "member_unknown": "skipped",
    "member_with_zero": "skipped",
    "metadata_with_zero": "any text is allowed",
    "size_huge_and_empty": "the leading zero avoids the overflow",
    "rank_17": "any rank is allowed",
    "space_in_front": "its own description forbids it",
}
TOGETHER = ("scale_", "global_", "packed_", "blocks_")  # valid files with invalid weights


def wrong_as_file(name: str) -> bool:
    return not name.startswith(("right_", *TOGETHER))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all of them."""
    folder = tmp_path_factory.mktemp("hostile")
    make_hostile.write(folder, make_hostile.made())
    return folder


@pytest.fixture(scope="session")
def expected(hostile: Path) -> dict[str, str]:
    """The message of each case."""
    if REWRITE:
        sentences = {}
        for case in CASES:
            done = run("inspect", case, folder=hostile, memory=MEMORY)
            sentences[case] = done.stderr.removeprefix("opaq inspect: ").removesuffix("\n")
        EXPECTED.write_text(json.dumps(sentences, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    found: dict[str, str] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found


def test_every_case_has_a_message(expected: dict[str, str]) -> None:
    assert list(expected) == CASES


@pytest.mark.parametrize("case", CASES)
def test_inspect(case: str, hostile: Path, expected: dict[str, str]) -> None:
    done = run("inspect", case, folder=hostile, memory=MEMORY)
    if case.startswith("right_"):
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr == f"opaq inspect: {expected[case]}\n"
        assert expected[case].startswith((case, f"cannot open {case}")), "the message names the file"
        assert done.stderr[:-1].isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_commands_that_write(case: str, hostile: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """The same message, and nothing is written."""
    for words in (["quantize"], ["convert", "--layout", "plain"]):
        done = run(*words, "--quiet", hostile / case, tmp_path / "to", memory=MEMORY)
        if case.startswith("right_"):
            assert done.returncode in (0, 3) and done.stdout == ""
            assert (done.stderr == "") == (done.returncode == 0) and "\n" not in done.stderr[:-1]
        else:
            assert (done.returncode, done.stdout) == (3, "")
            where = f"{hostile}/{case}"
            assert done.stderr == f"opaq {words[0]}: {expected[case].replace(case, where, 1)}\n"
            assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", FILES)
def test_safetensors_says_the_same(name: str, hostile: Path) -> None:
    """opaq and safetensors reject the same files, except for those in ACCEPTED_BY_SAFETENSORS."""
    try:
        with safetensors.safe_open(hostile / f"{name}.safetensors", "np") as file:
            file.keys()
        taken = True
    except safetensors.SafetensorError:
        taken = False
    assert taken == (not wrong_as_file(name) or name in ACCEPTED_BY_SAFETENSORS)


# ---- cases written here ----

GOOD = make_hostile.PLAIN


def refused(path: Path, sentence: str, *options: str, memory: int = MEMORY) -> None:
    """`opaq inspect` fails with this message, in which {} is the path."""
    done = run("inspect", *options, path, memory=memory)
    assert (done.returncode, done.stderr) == (3, f"opaq inspect: {sentence.format(path)}\n")


def as_link(target: Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def as_socket(path: Path) -> None:
    here = Path.cwd()
    try:  # the path of a socket is limited to 107 bytes
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket", "dangling link", "link to itself"])
def test_no_regular_file(name: str, kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(GOOD if name == "model.safetensors" else b"{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(GOOD)
    path = folder / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[Path], None]] = {
        "link": as_link(outside),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "socket": as_socket,
        "dangling link": as_link(tmp_path / "nothing"),
        "link to itself": as_link(path),
    }
    make[kind](path)
    sentences = {
        "pipe": f"{path} is not a regular file",
        "folder": f"{path} is not a regular file",
        "socket": f"cannot open {path}: No such device or address",
    }
    link = f"{path} is a link, which may lead out of the folder; --follow-links allows it"
    refused(folder, sentences.get(kind, link))


def test_links_are_followed_with_follow_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(GOOD)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert run("inspect", "--follow-links", folder).returncode == 0
    (folder / "config.json").symlink_to(tmp_path / "nothing")
    refused(folder, f"{folder}/config.json is a link to a file that does not exist", "--follow-links")


@pytest.mark.parametrize("kind", ["link", "pipe", "name"])
def test_other_files_are_checked_before_the_work(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(make_hostile.tensors({"x.weight": ("BF16", [4, 32], 256)}))
    make: dict[str, Callable[[], None]] = {
        "link": lambda: (folder / "README.md").symlink_to("/etc/hostname"),
        "pipe": lambda: os.mkfifo(folder / "README.md"),
        "name": (folder / "a\nb").touch,
    }
    make[kind]()
    done = run("quantize", "--quiet", folder, tmp_path / "to", seconds=20)
    assert done.returncode == 3 and str(folder) in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "to").iterdir()] in ([], [".opaq-job"])


def test_a_pipe_by_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "{} is not a regular file")
    refused(Path("/dev/null"), "{} is not a regular file")
    refused(tmp_path / "nothing", "cannot open {}: No such file or directory")


def test_a_name_with_escape_sequences(tmp_path: Path) -> None:
    (tmp_path / "\x1b[2J\n.safetensors").write_bytes(GOOD)
    refused(tmp_path, '{}: "?[2J?.safetensors" is not the name of a file in this folder')


@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_a_hundred_million_brackets(bracket: bytes, tmp_path: Path) -> None:
    """Rejected before parsing, so that memory is that of the text."""
    count = 100_000_000 - 5
    text = b'{"a":' + bracket * (count // len(bracket))
    path = tmp_path / "model.safetensors"
    path.write_bytes(make_hostile.file_of(text))
    where = 5 + 63 * len(bracket)
    sentence = f"JSON is nested deeper than 64 levels at byte {where} of {len(text)}"
    refused(path, f"{{}}: {sentence}")
    path.write_bytes(GOOD)
    (tmp_path / "config.json").write_bytes(text)
    refused(tmp_path, f"{{}}/config.json: {sentence}")


def test_a_configuration_of_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)
    refused(tmp_path, "{}/config.json has 17179869184 bytes, at most 268435456 are read")


def test_a_header_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(make_hostile.file_of(b"", length=100_000_000))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    refused(path, "{}: its header does not begin with '{{': not a safetensors file")


def test_ten_thousand_tensors_of_nothing(tmp_path: Path) -> None:
    """Memory of a header is proportional to its bytes, and empty stacks need none."""
    shape = [1 << 50, 0, 64]
    entries: dict[str, make_hostile.Entry] = {
        f"model.layers.{i}.mlp.experts.gate_up_proj": ("BF16", shape, 0) for i in range(10_000)
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(make_hostile.tensors(entries))
    assert run("inspect", path, memory=MEMORY).returncode == 0
    done = run("quantize", "--quiet", path, tmp_path / "to.safetensors", memory=2 * MEMORY)
    assert done.returncode == 3 and "has no weight to quantize" in done.stderr


ESCAPE = "\x1b[2J\x1b]0;title\x07\u009b31m\n\u202e\u2066\u200f\u2028"


def loud(folder: Path, mark: str) -> Path:
    """A valid checkpoint with terminal escape sequences in every text that may contain them."""
    folder.mkdir()
    entries: dict[str, make_hostile.Entry] = {
        "x.weight": ("F8_E4M3", [128, 128], 16384),
        "x.weight_scale": ("F32", [1], 4),
        "y.weight": ("BF16", [4, 64], 512),
        f"\u202e\u2069{mark}.weight": ("BF16", [4, 64], 512),  # not control characters in JSON
    }
    metadata = {ESCAPE + mark: ESCAPE, "format": ESCAPE + mark}
    (folder / "model.safetensors").write_bytes(make_hostile.tensors(entries, metadata))
    quantization = {
        "quant_method": "compressed-tensors",
        "format": ESCAPE + mark,
        "ignore": [ESCAPE, "y"],
        "config_groups": {ESCAPE: {"targets": [ESCAPE]}},
    }
    config = {
        "model_type": ESCAPE,
        ESCAPE + mark: 1,
        "architectures": [ESCAPE],
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_escape_sequences_are_not_printed(tmp_path: Path) -> None:
    loud(tmp_path / "a", "1")
    loud(tmp_path / "b", "2")
    for words in (
        "inspect a",
        "inspect --tensors a",
        "inspect --json a",
        "diff a b",
        "diff --json a b",
        "diff --values a b",
        "verify a b",
        "verify --json --html page.html a b",
        "convert --layout plain --dry-run a c",
        "convert --layout plain a c",
        "quantize --dry-run --format fp8row a d",
        "quantize --format fp8row a d",
    ):
        done = run(*words.split(), folder=tmp_path)
        assert done.returncode in (0, 1), (words, done.stderr)
        printed = (done.stdout + done.stderr).replace("\n", "")
        assert printed.isprintable(), (words, printed)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.replace("\n", "").isprintable()
    for words in ("inspect", "diff a", "verify a", "quantize a"):
        done = run(*words.split(), f"{ESCAPE}/to", folder=tmp_path)
        assert done.returncode == 3, words
        assert done.stderr.replace("\n", "").isprintable(), words


# Valid but rare: stacks with separate scales, entries in other shapes, empty tensors.
RARE: dict[str, tuple[str, dict[str, make_hostile.Entry]]] = {
    "stack": (
        "compressed-tensors",
        {
            "x.weight_packed": ("U8", [2, 4, 16], 128),
            "x.weight_scale": ("F8_E4M3", [2, 4, 2], 16),
            "x.weight_global_scale": ("F32", [2], 8),
            "x.input_global_scale": ("F32", [2], 8),
        },
    ),
    "stack of nothing": (
        "compressed-tensors",
        {
            "x.weight_packed": ("U8", [0, 4, 16], 0),
            "x.weight_scale": ("F8_E4M3", [0, 4, 2], 0),
            "x.weight_global_scale": ("F32", [0], 0),
            "x.input_global_scale": ("F32", [0], 0),
        },
    ),
    "two inputs in bf16": (
        "modelopt",
        {
            "x.weight": ("F8_E4M3", [2, 4, 64], 512),
            "x.weight_scale": ("F32", [2], 8),
            "x.input_scale": ("BF16", [2], 4),
        },
    ),
    "exponents": (
        "deepseek",
        {"x.weight": ("F8_E4M3", [2, 130, 64], 16640), "x.weight_scale_inv": ("F8_E8M0", [2, 2, 1], 4)},
    ),
}


@pytest.mark.parametrize("case", RARE)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "deepseek"])
def test_converting_back(case: str, layout: str, tmp_path: Path) -> None:
    """The converted file can be read by safetensors, and converting back gives the same tensors."""
    home, entries = RARE[case]
    names = [tmp_path / f"{name}.safetensors" for name in ("from", "there", "back")]
    names[0].write_bytes(make_hostile.tensors(entries))
    done = run("convert", "--quiet", "--layout", layout, names[0], names[1])
    if done.returncode != 0:
        assert done.returncode == 3 and f"cannot become {layout}" in done.stderr
        return
    assert run("convert", "--quiet", "--layout", home, names[1], names[2]).returncode == 0
    parts = []
    for path in names:
        assert run("inspect", path).returncode == 0
        with path.open("rb") as file:
            parts.append(dict(safetensors.deserialize(file.read())))
    assert parts[0] == parts[2] and len(parts[1]) == len(parts[0])
