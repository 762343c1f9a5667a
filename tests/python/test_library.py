"""The declarations in opaq/_library.py against the headers, and how the library is found."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opaq
from conftest import ROOT, need
from opaq import _library

HEADERS = sorted((ROOT / "include" / "opaq").glob("*.h"))
ALL = "\n".join(path.read_text() for path in HEADERS)
CODE = re.sub(r"/\*.*?\*/", " ", ALL, flags=re.DOTALL)
STRUCTS = [c for c in vars(_library).values() if isinstance(c, type) and issubclass(c, ctypes.Structure)]


def constant(name: str) -> int:
    return int(re.search(rf"#define {name} (\S+)", CODE).group(1).strip("()"))


def c_name(struct: type) -> str:
    return "opaq_" + re.sub(r"(?<!^)(?=[A-Z])", "_", struct.__name__).lower()


def python_type(declared: str) -> object:
    """The ctypes type for a C type as the headers write it."""
    words = declared.replace("const ", "").replace("OPAQ_API ", "").replace(" *", "*").strip()
    words = re.sub(r"^enum \w+$", "enum", words)
    words = re.sub(r"struct opaq_(pool|patterns|config)\b", "void", words)
    words = re.sub(r"struct opaq_(\w+)", lambda m: m.group(1).title().replace("_", ""), words)
    return _library._type("text" if words == "char*" else words)


def fields_of(name: str) -> list[tuple[str, object]]:
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", CODE, re.DOTALL).group(1)
    body = re.sub(r"[\w ]+\(\*(\w+)\)\([^)]*\)", r"void *\1", body)  # a function pointer is a pointer
    fields = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, stars, field, length = re.fullmatch(r"(.*?)( ?\**)(\w+)(?:\[(\w+)\])?", declaration).groups()
        made = python_type(kind.strip() + stars.strip())
        if length:
            made = made * (int(length) if length.isdigit() else constant(length))
        fields.append((field, made))
    return fields


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_struct_mirrors_the_header(struct: type) -> None:
    assert struct._fields_ == fields_of(c_name(struct))


def test_every_function_mirrors_the_header() -> None:
    declared = {}
    for result, name, arguments in re.findall(r"OPAQ_API ([^;()]*?)(\w+)\(([^)]*)\);", CODE):
        kinds = [re.sub(r"\w+$", "", a.strip()).strip() for a in arguments.split(",") if a.strip() != "void"]
        declared[name] = result.strip(), kinds
    names = re.findall(r" (\w+)\(", _library.FUNCTIONS)
    assert len(names) == len(_library.FUNCTIONS.split("\n")) - 2 >= 26
    for name in names:
        function = getattr(_library.library, "opaq_" + name)
        result, kinds = declared["opaq_" + name]
        assert function.restype == python_type(result), name
        assert list(function.argtypes) == [python_type(kind) for kind in kinds], name


def test_constants_mirror_the_header() -> None:
    assert constant("OPAQ_SPEC_TEXT_BYTES") == _library.SPEC_TEXT_BYTES
    assert constant("OPAQ_ELEMENT_OF_SPEC") == _library.ELEMENT_OF_SPEC
    assert (constant("OPAQ_VERSION_MAJOR"), constant("OPAQ_VERSION_MINOR")) == (_library.MAJOR, _library.MINOR)
    for prefix, names in (("ROLE", _library.ROLES), ("DIM", _library.DIMS)):
        found = dict(re.findall(rf"OPAQ_{prefix}_(\w+) = (\d)", CODE))
        assert {name.lower(): int(number) for name, number in found.items()} == {
            n: i for i, n in enumerate(names)
        }
    usages = re.search(r"enum opaq_usage \{(.*?)\}", CODE).group(1)
    found = dict(re.findall(r"OPAQ_(\w+) = (\d)", usages))
    assert {name.lower(): int(number) for name, number in found.items()} == _library.USAGES


def test_tables_have_everything_the_headers_count() -> None:
    from opaq import _tables

    assert len(opaq.formats()) == constant("OPAQ_FORMAT_COUNT")
    assert len(_tables.ELEMENTS) == constant("OPAQ_ELEMENT_COUNT")
    assert len(_tables.OPTIONS) == constant("OPAQ_OPTION_COUNT")
    assert len(_tables.RULES) == constant("OPAQ_RULE_COUNT")


def test_version_and_info() -> None:
    numbers = [constant(f"OPAQ_VERSION_{part}") for part in ("MAJOR", "MINOR", "PATCH")]
    info = opaq.library_info()
    assert opaq.__version__ == info["version"] == ".".join(map(str, numbers))
    assert Path(info["path"]).is_file()
    assert all(isinstance(feature, str) for feature in info["cpu"])
    for row in opaq.formats():
        quantize, dequantize = info["kernels"][row.name]
        assert quantize.startswith(f"quantize_{row.name}_")
        assert dequantize.startswith(f"dequantize_{row.name}_")


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a separate process, with the package in `folder` and OPAQ_LIBRARY only if given."""
    inherited = {name: value for name, value in os.environ.items() if name != "OPAQ_LIBRARY"}
    env = {**inherited, "PYTHONPATH": str(folder), **environment}
    return subprocess.run(
        [sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with the package's Python files alone."""
    (tmp_path / "opaq").mkdir()
    for path in Path(_library.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path / "opaq")
    return tmp_path


def test_import_without_a_library_has_a_hint(bare: Path) -> None:
    missing = run("import opaq", bare)
    assert missing.returncode == 1 and "set OPAQ_LIBRARY to the libopaq.so of a build" in missing.stderr
    wrong = run("import opaq", bare, OPAQ_LIBRARY=str(bare / "nowhere.so"))
    assert wrong.returncode == 1 and "nowhere.so', which is not a file" in wrong.stderr
    text = bare / "text.so"
    text.write_text("not a library")
    broken = run("import opaq", bare, OPAQ_LIBRARY=str(text))
    assert broken.returncode == 1 and "is not a libopaq that can be opened here" in broken.stderr


def test_the_library_that_make_builds_is_found(bare: Path, tmp_path: Path) -> None:
    """The package in python/ of a repository whose build/ has a library."""
    tree = tmp_path / "tree"
    shutil.copytree(bare / "opaq", tree / "python" / "opaq")
    (tree / "build").mkdir()
    shutil.copy(_library.path, tree / "build" / "libopaq.so")
    code = "from opaq import _library; print(_library.path)"
    assert run(code, tree / "python").stdout.strip() == str(tree / "build" / "libopaq.so")


def test_the_library_that_is_named_comes_first(bare: Path) -> None:
    shutil.copy(_library.path, bare / "opaq" / "libopaq.so")
    code = "from opaq import _library; print(_library.path)"
    assert run(code, bare).stdout.strip() == str(bare / "opaq" / "libopaq.so")
    named = run(code, bare, OPAQ_LIBRARY=str(_library.path))
    assert named.stdout.strip() == str(_library.path)


def test_info_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    info = opaq.library_info()
    printed = capsys.readouterr().out
    assert f"version   {info['version']}\n" in printed and "backends  cpu\n" in printed


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "MINOR", _library.MINOR + 1)
    with pytest.raises(
        ImportError, match=rf"has version {opaq.__version__}, this package needs 0\.{_library.MINOR}"
    ):
        _library._load(_library.path)


def test_import_and_quantizers_need_no_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; sys.modules['ml_dtypes'] = None\n"
        "import opaq; print(opaq.proto((4, 32), 'bfloat16', opaq.Quantizer('nvfp4'))[0].shape)\n"
        "assert not hasattr(opaq, 'quantize')\n"
        "from opaq import dequantize\n"
    )
    done = run(code, ROOT / "python", OPAQ_LIBRARY=str(_library.path))
    assert done.stdout == "(4, 16)\n", done.stderr
    text = "opaq.dequantize needs NumPy, which is not installed: pip install 'opaq[numpy]'"
    assert done.stderr.splitlines()[-1] == f"ImportError: {text}"


def test_an_older_torch_is_an_error() -> None:
    need("torch")
    code = "import torch; torch.__version__ = '2.10.1'; import opaq"
    done = run(code, ROOT / "python", OPAQ_LIBRARY=str(_library.path))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("opaq: PyTorch 2.10.1 is installed, opaq needs 2.11 or later.")
