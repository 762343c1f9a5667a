"""Quantizers in compiled and exported graphs: constants without graph breaks that are never stale, and symbolic
sizes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

import opaq
from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need, need_cxx, slow_but
from torch_cases import (
    FEW_QUANTIZERS,
    FORMATS,
    QUANTIZERS,
    given_for,
    make_tensor,
    quantized,
    same_buffers,
    same_bytes,
)

torch = need("torch")

from opaq import Quantizer  # noqa: E402
from opaq._operators import buffer_rows  # noqa: E402

ROWS = (1, 2, 3, 16, 17, 31, 63, 64, 100, 127, 128, 129, 200, 257)


def has_row_blocks(text: str) -> bool:
    """Whether a buffer has a size of one per block of rows, as in fp8blk2. PyTorch distinguishes every size of
    1 from others by itself (a plain torch.empty((n + 127) // 128, 4) does the same), so up to one block of rows
    is one graph and more rows are another."""
    extents = [extent for row in buffer_rows(text) for extent in row.extents]
    return any(extent.dim == "rows" and extent.per > 1 and extent.to == 1 for extent in extents)


def rows_of(text: str) -> list[int]:
    """Row counts that one graph serves; a size of 1 always has a separate graph."""
    return [rows for rows in ROWS if rows > (128 if has_row_blocks(text) else 1)]


def round_trip(x: Any, quantizer: Quantizer | str) -> Any:
    return opaq.quantize_tensor(x, quantizer).dequantize()


class RoundTrip(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, x: Any) -> Any:
        return round_trip(x, self.quantizer)


# --------------------------------------------------------------------------- where a quantizer comes from

NVFP4 = Quantizer("nvfp4+2d")
SOURCES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "argument": (round_trip, (NVFP4,)),
    "closure": (lambda x, nvfp4=NVFP4: round_trip(x, nvfp4), ()),
    "global": (lambda x: round_trip(x, NVFP4), ()),
    "constructed": (lambda x: round_trip(x, Quantizer("nvfp4+2d")), ()),
    "other usage": (lambda x: round_trip(x, Quantizer("nvfp4+columnwise+2d").with_usage(True, False)), ()),
    "attribute": (RoundTrip(NVFP4), ()),
    "text": (lambda x: round_trip(x, "nvfp4+2d"), ()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_quantizer_from_anywhere(source: str, device: str) -> None:
    function, arguments = SOURCES[source]
    made = compiled(function)
    x = make_tensor((24, 96), device)
    want = round_trip(x, NVFP4)
    assert same_bytes(made(x, *arguments), want)
    with fail_on_recompile():
        assert same_bytes(made(x, *arguments), want)


def test_an_equal_quantizer_is_the_same_and_another_is_not(device: str) -> None:
    x = make_tensor((24, 96), device)
    function = compiled(round_trip)
    function(x, Quantizer("nvfp4+both+2d"))
    with fail_on_recompile():
        function(x, Quantizer("nvfp4+2d+both"))
        with pytest.raises(RuntimeError, match="recompile"):
            function(x, Quantizer("nvfp4+both"))
    assert same_bytes(function(x, Quantizer("mxfp4")), round_trip(x, Quantizer("mxfp4")))
    with fail_on_recompile():  # now both are compiled
        assert same_bytes(function(x, Quantizer("mxfp4")), round_trip(x, Quantizer("mxfp4")))
        assert same_bytes(function(x, Quantizer("nvfp4+both+2d")), round_trip(x, Quantizer("nvfp4+2d")))


def test_an_attribute_that_changes_recompiles(device: str) -> None:
    x, module = make_tensor((24, 96), device), RoundTrip(Quantizer("fp8"))
    function = compiled(module)
    function(x)
    module.quantizer = Quantizer("fp8")  # another object, the same value
    with fail_on_recompile():
        function(x)
    module.quantizer = Quantizer("fp8.e5m2")
    with fail_on_recompile(), pytest.raises(RuntimeError, match="recompile"):
        function(x)
    assert same_bytes(function(x), round_trip(x, Quantizer("fp8.e5m2")))


def test_quantizers_in_containers_and_comparisons(device: str) -> None:
    def best(x: Any, table: dict[str, Quantizer], name: str) -> Any:
        chosen = table[name]
        return round_trip(x, chosen) * (2 if chosen == Quantizer("mxfp8") else 1)

    x, table = make_tensor((24, 96), device), {"w": Quantizer("mxfp8"), "x": Quantizer("fp8row")}
    function = compiled(best)
    for name in table:
        assert same_bytes(function(x, table, name), best(x, table, name))


def process_group() -> Any:
    return torch.distributed.ProcessGroup(0, 1) if torch.distributed.is_available() else object()


WRONG: list[Any] = [3, None, 2.5, b"nvfp4", ["nvfp4"], torch.ones(2), process_group()]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_only_a_text_makes_a_quantizer(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"Quantizer: expected a str such as 'nvfp4\\+2d', got {kind}"):
        Quantizer(wrong)
    with pytest.raises(TypeError, match=f"quantizer is a {kind}, expected an opaq.Quantizer or its text"):
        opaq.quantize_tensor(torch.ones(2, 32), wrong)
    if kind in ("int", "float"):  # in a graph the compiler's exception has the message
        with pytest.raises(Exception, match=f"expected a str .*, got {kind}"):
            compiled(lambda x: round_trip(x, Quantizer(wrong)))(torch.ones(2, 32))
    if wrong is not None:
        with pytest.raises(TypeError, match=f"TensorProto: quantizer is a {kind}, expected an opaq.Quantizer"):
            opaq.TensorProto((2, 32), torch.float32, wrong)


def test_a_quantizer_takes_no_attributes() -> None:
    quantizer = Quantizer("fp8")
    for name in ("group", "_text", "usage"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(quantizer, name, process_group())
    assert str(quantizer) == "fp8"


# ------------------------------------------------------------------------------- compiled equals eager


@pytest.mark.parametrize("text", slow_but(QUANTIZERS, *FEW_QUANTIZERS))
def test_compiled_equals_eager(text: str, device: str) -> None:
    x, given = make_tensor((5, 48), device), given_for(text, device)

    def both(x: Any, given: dict[str, Any]) -> tuple[Any, Any]:
        q = opaq.quantize_tensor(x, text, **given)
        return q, q.dequantize()

    want, got = both(x, given), compiled(both)(x, given)
    assert same_buffers(got[0].buffers(), want[0].buffers()) and same_bytes(got[1], want[1])
    assert str(got[0].quantizer) == text


@pytest.mark.parametrize("text", ["fp8+both", "mxfp8", "nvfp4+both+rht"])
def test_inductor_equals_eager(text: str, device: str) -> None:
    need_cxx()

    def around(x: Any, quantizer: Quantizer) -> tuple[Any, Any]:
        q = opaq.quantize_tensor(x * 2, quantizer)
        return q, q.dequantize()

    function = compiled(around, backend="inductor", dynamic=True)
    for number, rows in enumerate((7, 33, 64)):
        x = make_tensor((rows, 48), device)
        want = around(x, Quantizer(text))
        if number:
            with fail_on_recompile():
                got = function(x, Quantizer(text))
        else:
            got = function(x, Quantizer(text))
        assert same_buffers(got[0].buffers(), want[0].buffers()) and same_bytes(got[1], want[1])


def test_quantized_weights_in_a_compiled_step(device: str) -> None:
    need_cxx()

    def loss(x: Any, w: Any) -> Any:
        return (opaq.quantize_tensor(x, "mxfp8").dequantize() @ w.dequantize().t()).square().mean()

    results = []
    for function in (loss, compiled(loss), compiled(loss, backend="inductor")):
        x = make_tensor((8, 64), device).requires_grad_()
        w = torch.nn.Parameter(quantized("nvfp4", (16, 64), device))
        value = function(x, w)
        value.backward()
        results.append((value.detach(), x.grad, w.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_operations_of_quantized_tensors_compiled(device: str) -> None:
    def does(q: Any) -> tuple[Any, ...]:
        more = q.update_usage(columnwise=True)
        return (
            more,
            q[32:64],
            q.view(2, 32, 48),
            q.detach(),
            q.clone(),
            q.to(torch.bfloat16),
            q.dequantize() + 1,
        )

    q = quantized("mxfp8+2d", (64, 48), device)
    for got, want in zip(compiled(does)(q), does(q), strict=True):
        assert (got.shape, got.dtype, type(got)) == (want.shape, want.dtype, type(want))
        if isinstance(want, opaq.QuantizedTensor):
            assert torch.equal(got, want)
        else:
            assert same_bytes(got, want)


# ---------------------------------------------------------------------------------------- symbolic sizes


@pytest.mark.parametrize("text", slow_but(QUANTIZERS, *FEW_QUANTIZERS))
def test_dynamic_rows_never_recompile(text: str, device: str) -> None:
    given = given_for(text, device)

    def both(x: Any) -> tuple[Any, Any]:
        q = opaq.quantize_tensor(x, text, **given)
        return q, q.dequantize()

    function = compiled(both, dynamic=True)
    function(make_tensor((140, 56), device))
    with fail_on_recompile():
        for rows in rows_of(text):
            x = make_tensor((rows, 56), device)
            (q, values), (want, plain) = function(x), both(x)
            assert same_buffers(q.buffers(), want.buffers()) and same_bytes(values, plain)
            assert q.shape == want.shape


@pytest.mark.parametrize("name", FORMATS)
def test_marked_dimension_is_not_specialised(name: str, device: str) -> None:
    """mark_dynamic raises if anything specializes on the size."""
    quantizer = Quantizer(name + "+both")
    function = compiled(round_trip)
    x = make_tensor((140, 56), device)
    least = {"min": 129, "max": 4096} if has_row_blocks(str(quantizer)) else {}
    torch._dynamo.mark_dynamic(x, 0, **least)
    function(x, quantizer)
    with fail_on_recompile():
        for rows in rows_of(str(quantizer)):
            x = make_tensor((rows, 56), device)
            assert same_bytes(function(x, quantizer), round_trip(x, quantizer))


@pytest.mark.parametrize("text", ["fp8blk1+columnwise", "fp8blk2", "fp8blk2+columnwise", "mxfp8+both"])
def test_row_blocks_make_two_graphs_at_most(text: str, device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = compiled(round_trip, backend=counter, dynamic=True)
    for rows in (*ROWS[1:], *ROWS[1:]):
        x = make_tensor((rows, 56), device)
        assert same_bytes(function(x, Quantizer(text)), round_trip(x, Quantizer(text)))
    assert counter.frame_count == (2 if has_row_blocks(text) else 1)


def test_dynamic_columns_and_ranks(device: str) -> None:
    function, quantizer = compiled(round_trip, dynamic=True), Quantizer("nvfp4+both")
    function(make_tensor((3, 7, 56), device), quantizer)
    with fail_on_recompile():
        for shape in ((2, 9, 33), (5, 3, 130), (4, 2, 16)):
            x = make_tensor(shape, device)
            assert same_bytes(function(x, quantizer), round_trip(x, quantizer))


# ------------------------------------------------------------------------------------------------ export


EXPORTED = ("fp8+both", "fp8blk1", "fp8blk2+both", "mxfp8+both+swizzle", "mxfp4", "nvfp4+both+2d")


@pytest.mark.parametrize("text", EXPORTED)
def test_export_with_a_dynamic_batch(text: str, device: str) -> None:
    least = 129 if has_row_blocks(text) else 1
    batch = torch.export.Dim("batch", min=least, max=4096)
    x = make_tensor((140, 48), device)
    program = torch.export.export(RoundTrip(Quantizer(text)), (x,), dynamic_shapes={"x": {0: batch}})
    nodes = {node.target: node for node in program.graph.nodes if node.op == "call_function"}
    assert nodes[torch.ops.opaq.quantize.default].args[1] == text
    assert nodes[torch.ops.opaq.dequantize.default].args[1] == text
    assert text in str(program.graph)
    (symbol,) = program.range_constraints
    bounds = program.range_constraints[symbol]
    assert (int(bounds.lower), int(bounds.upper)) == (least, 4096)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    for rows in (1, *rows_of(text)) if least == 1 else rows_of(text):
        x = make_tensor((rows, 48), device)
        assert same_bytes(module(x), round_trip(x, Quantizer(text)))


def test_export_of_a_module_with_quantized_weights(device: str) -> None:
    class Linear(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(quantized("mxfp8", (16, 64), device), requires_grad=False)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(x, self.weight.dequantize())

    module, batch = Linear(), torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (make_tensor((4, 64), device),), dynamic_shapes={"x": {0: batch}})
    for rows in (1, 5, 64):
        x = make_tensor((rows, 64), device)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("text", ["mxfp8+both", "nvfp4+2d", "fp8"])
def test_graph_modes_replay_equal_bytes(text: str, device: str) -> None:
    """With CUDA graphs: none is skipped, and replays give the same bytes."""
    need_cxx()
    counters = torch._dynamo.utils.counters
    for mode in ("default", "reduce-overhead") if device == "cuda" else ("default",):
        torch._dynamo.reset()
        counters.clear()
        function = torch.compile(lambda x: torch.ops.opaq.quantize(x * 2, text), fullgraph=True, mode=mode)
        for seed in range(4):  # warm up, record, replay, replay
            x = make_tensor((48, 96), device) * (seed + 1)
            made = [buffer.clone() for buffer in function(x)]
            assert same_buffers(made, torch.ops.opaq.quantize(x * 2, text))
        assert counters["inductor"]["cudagraph_skips"] == 0
