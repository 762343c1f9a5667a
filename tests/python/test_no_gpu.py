"""A machine without a GPU that can be used: the library works, and CUDA is refused in one sentence, whether
libopaq_cuda.so was built or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

import opaq
from conftest import ROOT
from opaq import _library

CUDA = _library.Device(1, 0)
REASONS = "found no NVIDIA driver|found no GPU|driver supports CUDA|compute capability|has no CUDA back end"


@pytest.fixture(autouse=True)
def without_a_gpu() -> None:
    if "cuda" in opaq.library_info()["backends"]:
        pytest.skip("this machine has a GPU that opaq can use")


def test_the_library_describes_itself() -> None:
    """In a process of its own, because the back end stays loaded."""
    code = "import opaq; print(opaq.library_info()['backends']); opaq.proto((4, 32), 'bfloat16', 'nvfp4')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT / "python",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['cpu']" and done.stderr == ""


def test_a_device_is_refused_in_one_sentence() -> None:
    for _ in range(2):  # the reason is kept
        with pytest.raises(opaq.OpaqError, match=REASONS) as caught:
            _library.call("opaq_device_check", CUDA)
        assert str(caught.value).startswith("the tensors are on cuda:0: ")
        assert "\n" not in str(caught.value) and ". " not in str(caught.value)
        with pytest.raises(opaq.OpaqError, match=REASONS) as caught:
            _library.call("opaq_device_check", _library.Device(1, -1))
        assert "tensors are on" not in str(caught.value)


def test_there_is_no_kernel_for_the_device() -> None:
    spec = opaq.Quantizer("nvfp4").spec
    of_cpu, of_cuda = (
        _library.library.opaq_device_linear_kernel(device, spec, None, 4, 0)
        for device in (_library.Device(0, 0), CUDA)
    )
    assert of_cpu and of_cuda is None
