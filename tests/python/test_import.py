"""`import opaq`: the modules that it imports, its public names, and the hints for unknown names."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import opaq
from conftest import need


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_arrays_do_not_import_torch() -> None:
    need("numpy")
    run(
        "import sys, opaq, numpy\n"
        "opaq.quantize(numpy.ones((4, 32), numpy.float32), opaq.Quantizer('nvfp4'))\n"
        "assert 'torch' not in sys.modules"
    )


@pytest.mark.parametrize("order", ["import torch, opaq", "import opaq, torch"])
def test_operators_are_registered_in_either_order(order: str) -> None:
    need("torch")
    out = run(f"{order}\nprint(torch.ops.opaq.quantize(torch.ones(2, 32), 'mxfp8')[0].dtype)")
    assert out.strip() == "torch.uint8"


def test_compiler_is_not_imported() -> None:
    """Importing torch._dynamo takes as long as importing PyTorch; only compiling needs it."""
    need("torch")
    run(
        "import sys, torch, opaq\n"
        "opaq.quantize_tensor(torch.ones(2, 32), 'mxfp8')\n"
        "found = {'torch._dynamo', 'torch._inductor', 'sympy', 'transformers'} & set(sys.modules)\n"
        "assert not found, found"
    )


def test_old_torch_warns_when_it_is_imported_later(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.1.0'\nclass library:\n    Library = object\n")
    out = run(
        f"import sys, warnings; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import opaq\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "print(torch.__version__, *[w.category.__name__ for w in caught])"
    )
    assert out.split() == ["2.1.0", "RuntimeWarning"]


def test_all_names_are_listed_and_found() -> None:
    need("torch")
    need("transformers")
    assert set(opaq.__all__) <= set(dir(opaq))
    for name in opaq.__all__:
        assert getattr(opaq, name) is not None


@pytest.mark.parametrize("hidden", [(), ("torch", "transformers"), ("numpy", "torch", "transformers")])
def test_help_and_tab_show_all_names(hidden: tuple[str, ...]) -> None:
    for name in ("torch", "transformers"):
        need(name)
    out = run(
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "import opaq, pydoc, rlcompleter\n"
        "text = pydoc.plain(pydoc.render_doc(opaq))\n"
        "completer = rlcompleter.Completer({'opaq': opaq})\n"
        "found = {match.partition('(')[0] for match in completer.attr_matches('opaq.')}\n"
        "assert found >= {f'opaq.{name}' for name in opaq.__all__}, found\n"
        "print(*[name for name in opaq.__all__ if hasattr(opaq, name) and name not in text])"
    )
    assert not out.split(), f"not in help(opaq): {out}"


def test_import_takes_little_beyond_torch() -> None:
    """At most 0.3 s of processor time, the best of three runs, because other processes share caches and
    frequency."""
    need("torch")
    code = "import torch, time; t = time.process_time(); import opaq; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fp8_autocast", "opaq.autocast(recipe=...)"),
        ("DelayedScaling", "opaq.recipe.DelayedScaling"),
        ("quantise_", "did you mean 'quantize_'?"),
        ("Linaer", "did you mean 'Linear'?"),
    ],
)
def test_names_of_other_libraries_have_hints(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(opaq, name)
    assert hint in str(caught.value) and name in str(caught.value)
    with pytest.raises(ImportError, match=re.escape(str(caught.value))):
        exec(f"from opaq import {name}")


def test_modules_are_found_although_other_libraries_have_the_name() -> None:
    run(
        "import opaq\nassert not hasattr(opaq, 'checkpoint')\n"
        "from opaq import checkpoint\ncheckpoint.layout_names()"
    )


def test_hints_name_what_exists() -> None:
    need("torch")
    for hint in opaq._FOREIGN_NAMES.values():
        for word in hint.split():
            if word.startswith("opaq."):
                value = opaq
                for part in word.split("(")[0].split(".")[1:]:
                    value = getattr(value, part)
