"""An unknown name in OPAQ_CPU is an error at `import opaq` that lists the names. See also
tests/c/test_cpu_limit.c."""

import os
import subprocess
import sys


def test_an_unknown_value_is_refused() -> None:
    value = "avx3"
    done = subprocess.run(
        [sys.executable, "-c", "import opaq"],
        env={**os.environ, "OPAQ_CPU": value},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f'OPAQ_CPU is "{value}", expected one of: ref avx2 avx512' in done.stderr
