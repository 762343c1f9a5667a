"""PyTorch's and transformers' functions for the memory of tensors and models count the bytes of packed
buffers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

import opaq
from conftest import need

torch = need("torch")
need("opaq.quantized_tensor")


def held(tensor: Any) -> int:
    """Bytes of its storages."""
    buffers = tensor.buffers() if isinstance(tensor, opaq.QuantizedTensor) else [tensor]
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers)


@pytest.mark.parametrize("text", [*(row.name for row in opaq.formats()), "nvfp4+both", "mxfp4+tiled"])
@pytest.mark.parametrize("shape", [(300, 77), (1, 1), (3, 64, 96)], ids=str)
def test_a_tensor(text: str, shape: tuple[int, ...]) -> None:
    q = opaq.quantize_tensor(torch.randn(shape), text)
    for tensor in (
        q,
        torch.nn.Parameter(q, requires_grad=False),
        copy.deepcopy(q),
        q.to(torch.bfloat16),
        q.view(-1),
    ):
        products = tensor.nelement() * tensor.element_size(), tensor.element_size() * tensor.numel()
        assert {tensor.nbytes, *products} == {held(q)}
        assert {type(size) for size in (tensor.nbytes, *products)} == {int}
        assert isinstance(tensor.element_size(), int)
    assert q.numel() == torch.Size(shape).numel() and q.itemsize == 4  # of the nominal dtype


def test_no_elements() -> None:
    q = opaq.quantize_tensor(torch.randn(0, 16), "mxfp8")
    assert q.nbytes == 0 == q.numel() * q.element_size()


def test_saved_shared_and_compiled() -> None:
    q = opaq.quantize_tensor(torch.randn(64, 96), "nvfp4")
    file = io.BytesIO()
    torch.save(q, file)
    assert file.tell() < q.nbytes + 8192  # headers
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, q) and loaded.nbytes == q.nbytes
    assert torch.equal(q.clone().share_memory_(), q)
    assert type(copy.deepcopy(q.element_size())) is int
    run = torch.compile(lambda t: t.dequantize() * t.nbytes, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(q), q.dequantize() * q.nbytes)
    # PyTorch traces element_size() as a constant of the dtype, without calling the subclass
    run = torch.compile(lambda t: t.dequantize() * t.element_size(), backend="aot_eager", fullgraph=True)
    assert torch.equal(run(q), q.dequantize() * q.itemsize)


def test_a_model() -> None:
    need("transformers")
    model = need("checkpoint_models").make_empty("llama")
    plain = model.get_memory_footprint()
    opaq.quantize_(model, "nvfp4")
    everything = [*model.parameters(), *model.buffers()]
    assert model.get_memory_footprint() == sum(map(held, everything)) == sum(t.nbytes for t in everything)
    assert model.get_memory_footprint() < plain / 2
    assert type(model.get_memory_footprint()) is int
