"""Methods with Transformer Engine's names, and copies of values with changed fields."""

import copy
import sys

import pytest

torch = pytest.importorskip("torch")

import opaq  # noqa: E402
from opaq import Quantizer, TensorProto  # noqa: E402


def test_set_usage_gives_a_new_quantizer() -> None:
    before = Quantizer("mxfp8")
    after = before.set_usage(rowwise=False, columnwise=True)
    assert str(before) == "mxfp8" and after == before.with_usage(False, True) and after.usage == "columnwise"
    assert before.set_usage(columnwise=True).usage == "both"
    with pytest.raises(TypeError):
        before.set_usage(True, True)


@pytest.mark.parametrize("text", ["fp8", "mxfp8+both", "nvfp4"])
def test_make_empty(text: str) -> None:
    made = Quantizer(text).make_empty((4, 64), dtype=torch.bfloat16, device="cpu")
    assert isinstance(made, opaq.QuantizedTensor)
    assert made.shape == (4, 64) and made.dtype == torch.bfloat16 and made.quantizer == Quantizer(text)
    assert Quantizer(text).make_empty([2, 32]).dtype == torch.float32
    assert Quantizer(text).make_empty([2, 32], requires_grad=True).requires_grad


def test_replace() -> None:
    proto = TensorProto((4, 64), torch.float32, Quantizer("nvfp4"))
    other = proto.replace(dtype=torch.bfloat16, requires_grad=True)
    assert other == TensorProto((4, 64), torch.bfloat16, Quantizer("nvfp4"), requires_grad=True)
    assert proto == TensorProto((4, 64), torch.float32, Quantizer("nvfp4")) and proto.replace() == proto
    assert proto.replace(quantizer=None).quantizer is None
    with pytest.raises(TypeError):
        proto.replace(nothing=1)
    with pytest.raises(ValueError):
        proto.replace(shape=(-1, 4))
    if sys.version_info >= (3, 13):
        assert copy.replace(proto, shape=(2, 32)).shape == (2, 32)
