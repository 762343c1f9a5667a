"""An OPAQ_CPU that is no name is an error at `import opaq` that lists the names; the empty text is no limit."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("value", ["avx3", "AVX2", "ref ", "none"])
def test_unknown_values_are_refused(value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import opaq"],
        env={**os.environ, "OPAQ_CPU": value},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f'OPAQ_CPU is "{value}", expected one of: ref avx2 avx512' in done.stderr


@pytest.mark.parametrize("value", ["", "ref", "avx2"])
def test_known_values_are_taken(value: str) -> None:
    subprocess.run([sys.executable, "-c", "import opaq"], env={**os.environ, "OPAQ_CPU": value}, check=True)
