"""mlp and moe in graphs: opcheck, compiled, exported, with symbolic sizes."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need, need_cxx
from experts_calls import BF16, Call, alone, call
from experts_reference import ACTS, Options, numbers, ops, routing
from torch_cases import same_bytes

torch = need("torch")

HIDDEN, EXPERTS = 48, 5
PLANS = {
    "plain": ("", Options()),
    "nvfp4": ("nvfp4", Options(x="nvfp4", h="nvfp4")),
    "weight-only": ("mxfp4", Options(ACTS["swiglu_oai"])),
    "slice": ("nvfp4+rowscaled", Options(ACTS["gelu_no_mul"], total=9, first=2, on_input=True)),
    "fp8blk1": ("fp8row", Options(x="fp8blk1", h="fp8blk1")),
}


def made_by(name: str, k: int = 2) -> Call:
    text, options = PLANS[name]
    return call(13, EXPERTS, k, HIDDEN, 32, text=text, bias=True, options=options)


class Experts(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model that calls the operator; its weights are buffers."""

    def __init__(self, made: Call) -> None:
        super().__init__()
        s = made.stored
        for number, tensor in enumerate((*s.gate_up, *s.down, *s.biases)):
            self.register_buffer(f"part{number}", tensor)
        self.counts = len(s.gate_up), len(s.down)
        self.constants = s.gate_up_shape, s.down_shape, made.plan

    def weights(self) -> tuple[Any, ...]:
        parts = [getattr(self, f"part{i}") for i in range(sum(self.counts) + 2)]
        first = self.counts[0]
        return parts[:first], parts[first:-2], *parts[-2:], *self.constants

    def forward(self, x: Any, weights: Any, ids: Any) -> Any:
        return ops.moe(x * 2, weights, ids, *self.weights()) + x


class Dense(Experts):
    def forward(self, x: Any) -> Any:
        return ops.mlp(x * 2, *self.weights()) + x


def inputs(tokens: int, leading: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
    weights, ids = routing(tokens, 2, EXPERTS, tokens)
    return numbers((*leading, tokens, HIDDEN), tokens, BF16), weights, ids


# -------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("name", PLANS)
def test_opcheck_moe(name: str) -> None:
    made = made_by(name)
    for one in (made, replace(made, ids=made.ids.int()), replace(made, x=made.x[None])):
        torch.library.opcheck(ops.moe.default, (one.x, one.weights, one.ids, *one.arguments()))


def test_opcheck_of_odd_calls() -> None:
    none, single = call(0), call(1, k=1)
    scales = torch.tensor([3.0]), torch.tensor([5.0])
    scaled = replace(call(options=Options(x="fp8+delayed", h="nvfp4")), input_scale=scales[0])
    for one in (none, single, replace(scaled, hidden_scale=scales[1])):
        torch.library.opcheck(ops.moe.default, (one.x, one.weights, one.ids, *one.arguments()))


@pytest.mark.parametrize("text", ["", "nvfp4"])
def test_opcheck_mlp(text: str) -> None:
    made = alone(40, 24, 6, text, BF16, Options(x=text, h=text), True)
    for x in (made.x, made.x.reshape(2, 3, 40), made.x[0]):
        torch.library.opcheck(ops.mlp.default, (x, *made.arguments()))


def test_fakes_have_the_shapes() -> None:
    made = made_by("nvfp4")
    on_meta = [t.to("meta") for t in (made.x, made.weights, made.ids)]
    s = made.stored
    weights = [[t.to("meta") for t in parts] for parts in (s.gate_up, s.down)]
    got = ops.moe(*on_meta, *weights, None, None, s.gate_up_shape, s.down_shape, made.plan)
    assert got.is_meta and got.shape == made.x.shape and got.dtype == BF16


# ------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("name", PLANS)
def test_compiled_with_any_number_of_tokens(name: str) -> None:
    """One graph for all, and the same bits as eager mode."""
    net = Experts(made_by(name))
    function = compiled(net, dynamic=True)
    function(*inputs(13))
    for tokens in (2, 64, 129, 300, 7):
        with fail_on_recompile():
            assert same_bytes(function(*inputs(tokens)), net(*inputs(tokens)))


@pytest.mark.parametrize("name", ["plain", "nvfp4"])
def test_marked_sizes_are_not_specialised(name: str) -> None:
    net = Experts(made_by(name))
    function, given = compiled(net), inputs(13)
    for tensor in given:
        torch._dynamo.mark_dynamic(tensor, 0)  # raises if anything specializes on the size
    function(*given)
    with fail_on_recompile():
        assert same_bytes(function(*inputs(50)), net(*inputs(50)))


def test_a_static_batch_becomes_dynamic_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    net = Experts(made_by("nvfp4"))
    function = compiled(net, backend=counter)
    for tokens in (20, 20, 33, 64, 7, 128):
        function(*inputs(tokens))
    assert counter.frame_count == 2


@pytest.mark.parametrize("text", ["", "mxfp8"])
def test_mlp_compiled(text: str) -> None:
    net = Dense(alone(HIDDEN, 32, 1, text, BF16, Options(x=text, h=text), True))
    function = compiled(net, dynamic=True)
    function(inputs(13)[0])
    for tokens in (2, 129, 40):
        with fail_on_recompile():
            assert same_bytes(function(inputs(tokens)[0]), net(inputs(tokens)[0]))
    deep = inputs(6, (2, 3))[0]
    assert same_bytes(function(deep), net(deep))


def test_moe_of_rank_three_compiled() -> None:
    """[batch, tokens, hidden] with routing per row; both leading sizes are symbols."""
    net = Experts(made_by("nvfp4"))

    def given(batch: int, tokens: int) -> tuple[Any, Any, Any]:
        weights, ids = routing(batch * tokens, 2, EXPERTS, tokens)
        shape = batch, tokens, 2
        return numbers((batch, tokens, HIDDEN), tokens, BF16), weights.reshape(shape), ids.reshape(shape)

    function = compiled(net, dynamic=True)
    function(*given(4, 7))
    for batch, tokens in ((3, 5), (6, 33)):
        with fail_on_recompile():
            assert same_bytes(function(*given(batch, tokens)), net(*given(batch, tokens)))


def test_inductor() -> None:
    need_cxx()
    net = Experts(made_by("nvfp4"))
    function = compiled(net, backend="inductor", dynamic=True)
    for tokens in (13, 40):
        assert same_bytes(function(*inputs(tokens)), net(*inputs(tokens)))


def test_one_node() -> None:
    """A mixture is one operator in the graph."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    net = Experts(made_by("nvfp4"))
    torch.compile(net, backend=keep, fullgraph=True)(*inputs(9))
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(graphs) == 1 and [str(t) for t in calls if "opaq" in str(t)] == ["opaq.moe"]


# -------------------------------------------------------------------------------------------------- exported


@pytest.mark.parametrize("name", PLANS)
def test_exported(name: str) -> None:
    """The number of tokens stays a symbol; the program is saved and loaded."""
    net, tokens = Experts(made_by(name)), torch.export.Dim("tokens", min=2, max=4096)
    shapes = {"x": {0: tokens}, "weights": {0: tokens}, "ids": {0: tokens}}
    program = torch.export.export(net, inputs(13), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for module in (program.module(), torch.export.load(file).module()):
        for rows in (13, 2, 100):
            assert same_bytes(module(*inputs(rows)), net(*inputs(rows)))


def test_mlp_exported() -> None:
    net = Dense(alone(HIDDEN, 32, 1, "nvfp4", BF16, Options(x="nvfp4", h="nvfp4"), True))
    shapes = {"x": {0: torch.export.Dim("tokens", min=2, max=4096)}}
    program = torch.export.export(net, inputs(13)[:1], dynamic_shapes=shapes)
    assert same_bytes(program.module()(inputs(50)[0]), net(inputs(50)[0]))
