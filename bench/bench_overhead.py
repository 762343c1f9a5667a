"""Measures the overhead of operator calls: microseconds per eager call and per operator in a compiled graph.

    bench_overhead.py [--json FILE] [--rounds N] [--calls N]

On a tensor so small that computing takes no time, in one run:

    C op       torch.ops.opaq.quantize and dequantize, registered from C
    custom_op  the same two, registered with torch.library.custom_op: same schema, results and allocations
    F.linear   one of PyTorch's own operators, for scale
    empty      torch.empty of one result, the floor: any operator that returns a tensor allocates it

Only the registration should differ between the first two. If custom_op's Python body called the C op, dispatch
would count twice. So the body does the minimum for correct results: it allocates with torch.empty, writes
addresses into prepared views, and calls opaq_quantize or opaq_dequantize through ctypes. Unlike the C op it
parses no quantizer, derives no shape and checks no argument, which favours custom_op. "body" is that function
called directly.

Rounds are interleaved: each measures every subject once, so that a slow phase of the machine affects all of
them. A figure is the minimum over the rounds, with the rounds' 10th to 90th percentile beside it. In a
compiled graph 32 operators are chained, 16 of each; a graph without them is subtracted, and the rest divided
by 32.

Target: the C op's overhead over the floor is at most half of custom_op's; in the compiled graph, the whole time
of an operator, including allocation and computing.

Also the overhead of the modules in eager mode: the time of opaq.Linear (one row of 64, MXFP8BlockScaling, no
gradients) and of opaq.QuantizedLinear minus that of the C op with the same arguments, as the median of the
rounds' differences. Target: at most twice the time of F.linear of that size."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import opaq
from opaq import _library
from opaq._operators import ops
from opaq.quantizer import Quantizer
from opaq.recipe import MXFP8BlockScaling

TEXT = "mxfp8"
SHAPE = (1, 32)
CHAIN = 32
AIM = 0.5
LAYER = 64
LAYER_AIM = 2.0


class Body:
    """quantize and dequantize of one shape and quantizer, with the least overhead in Python."""

    def __init__(self) -> None:
        self.library = _library.library
        self.error = ctypes.byref(_library.Error())
        shape = (ctypes.c_int64 * 2)(*SHAPE)
        strides = (ctypes.c_int64 * 2)(SHAPE[1], 1)
        cpu = _library.Device(0, 0)
        spec = Quantizer(TEXT).spec
        proto = _library.Proto()
        self.plain = _library.View()
        self.quantized = _library.View()
        spans = (_library.Span * 6)()
        memory = torch.zeros(1 << 12, dtype=torch.uint8)
        self.keep = memory
        _library.call("opaq_proto_make", shape, 2, 6, spec, cpu, proto)
        self.shapes = []
        for i in range(self.library.opaq_proto_buffer_count(proto)):
            buffer = _library.Buffer()
            _library.call("opaq_proto_buffer", proto, i, buffer)
            spans[i] = _library.Span(memory.data_ptr() + 1024 * i, buffer.bytes)
            self.shapes.append(tuple(buffer.shape[: buffer.rank]))
        _library.call("opaq_view_quantized", proto, spans, len(self.shapes), self.quantized)
        plain = memory.data_ptr() + 2048
        _library.call("opaq_view_plain", shape, strides, 2, 6, cpu, plain, 128, self.plain)
        self.x, (self.data, self.scale) = self.plain.buffer[0], self.quantized.buffer[:2]
        self.plain_view, self.quantized_view = ctypes.byref(self.plain), ctypes.byref(self.quantized)

    def quantize(self, x: torch.Tensor) -> list[torch.Tensor]:
        data = torch.empty(self.shapes[0], dtype=torch.uint8)
        scale = torch.empty(self.shapes[1], dtype=torch.uint8)
        self.x.data, self.data.data, self.scale.data = x.data_ptr(), data.data_ptr(), scale.data_ptr()
        if self.library.opaq_quantize(self.plain_view, None, None, self.quantized_view, self.error):
            raise RuntimeError
        return [data, scale]

    def dequantize(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        y = torch.empty(SHAPE)
        data, scale = buffers
        self.x.data, self.data.data, self.scale.data = y.data_ptr(), data.data_ptr(), scale.data_ptr()
        if self.library.opaq_dequantize(self.quantized_view, 0, None, self.plain_view, self.error):
            raise RuntimeError
        return y


body = Body()


@torch.library.custom_op("opaq_bench::quantize", mutates_args=())
def _quantize(
    x: torch.Tensor,
    quantizer: str,
    scale: torch.Tensor | None = None,
    amax_rowwise: torch.Tensor | None = None,
    amax_columnwise: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    return body.quantize(x)


@torch.library.custom_op("opaq_bench::dequantize", mutates_args=())
def _dequantize(
    buffers: Sequence[torch.Tensor], quantizer: str, shape: Sequence[int], dtype: torch.dtype, usage: int = 0
) -> torch.Tensor:
    return body.dequantize(buffers)


@_quantize.register_fake
def _(x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    return [x.new_empty(shape, dtype=torch.uint8) for shape in body.shapes]


@_dequantize.register_fake
def _(buffers: Any, quantizer: str, shape: Any, dtype: torch.dtype, usage: int = 0) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def eager_subjects() -> dict[str, Callable[[], Any]]:
    x, weight = torch.linspace(-2, 2, SHAPE[1]).reshape(SHAPE), torch.eye(SHAPE[1])
    buffers, size = ops.quantize(x, TEXT), list(SHAPE)
    other, linear, empty, float32 = torch.ops.opaq_bench, torch.nn.functional.linear, torch.empty, torch.float32
    for mine, theirs in zip(buffers, other.quantize(x, TEXT), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(
        ops.dequantize(buffers, TEXT, size, float32), other.dequantize(buffers, TEXT, size, float32)
    )
    return {
        "quantize, C op": lambda: ops.quantize(x, TEXT),
        "quantize, custom_op": lambda: other.quantize(x, TEXT),
        "quantize, body": lambda: body.quantize(x),
        "dequantize, C op": lambda: ops.dequantize(buffers, TEXT, size, float32),
        "dequantize, custom_op": lambda: other.dequantize(buffers, TEXT, size, float32),
        "dequantize, body": lambda: body.dequantize(buffers),
        "F.linear": lambda: linear(x, weight),
        "empty": lambda: empty(SHAPE),
    }


def layer_subjects() -> dict[str, Callable[[], Any]]:
    """Modules, their operators, and F.linear; enters an autocast and does not exit it."""
    scope = opaq.autocast(recipe=MXFP8BlockScaling())
    scope.__enter__()
    x, layer = torch.linspace(-2, 2, LAYER).reshape(1, LAYER), opaq.Linear(LAYER, LAYER)
    packed = opaq.QuantizedLinear.from_linear(layer, "nvfp4")
    weight, bias, buffers = layer.weight.detach(), layer.bias.detach(), packed.weight.buffers()
    size, plan, given = list(weight.shape), "x=mxfp8 w=mxfp8", "w_given=nvfp4"
    float32, linear = torch.float32, torch.nn.functional.linear
    assert torch.equal(layer(x), ops.linear_forward([x], [weight], bias, x.shape, size, float32, plan)[0])
    assert torch.equal(packed(x), ops.linear(x, buffers, bias, size, given))
    return {
        "Linear": lambda: layer(x),
        "Linear, C op": lambda: ops.linear_forward([x], [weight], bias, x.shape, size, float32, plan),
        "QuantizedLinear": lambda: packed(x),
        "QuantizedLinear, C op": lambda: ops.linear(x, buffers, bias, size, given),
        "F.linear": lambda: linear(x, weight, bias),
    }


def chain(namespace: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for _ in range(CHAIN // 2):
            x = namespace.dequantize(namespace.quantize(x, TEXT), TEXT, SHAPE, torch.float32)
        return x

    return run


def compiled_subjects() -> dict[str, Callable[[], Any]]:
    x, weight = torch.linspace(-2, 2, SHAPE[1]).reshape(SHAPE), torch.eye(SHAPE[1])

    def linears(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for _ in range(CHAIN):
            x = torch.nn.functional.linear(x, weight)
        return x

    graphs = {
        "C op": chain(ops),
        "custom_op": chain(torch.ops.opaq_bench),
        "F.linear": linears,
        "no operator": lambda x: x + 1,
    }
    made = {name: torch.compile(graph, fullgraph=True) for name, graph in graphs.items()}
    assert torch.equal(made["C op"](x), made["custom_op"](x))
    return {name: lambda graph=graph: graph(x) for name, graph in made.items()}


def measure(subjects: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds per call, one per round."""
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for call in subjects.values():
        for _ in range(calls):
            call()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, call in subjects.items():
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            figures[name].append((time.perf_counter_ns() - start) / calls / 1000)
    gc.enable()
    return figures


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def over(figures: Sequence[float], floor: Sequence[float]) -> list[float]:
    return [us - min(floor) for us in figures]


def show(title: str, figures: dict[str, list[float]]) -> dict[str, Any]:
    print(f"\n{title:34} {'us':>8}   10% .. 90%")
    out = {}
    for name, values in figures.items():
        low, high = percentile(values, 0.1), percentile(values, 0.9)
        print(f"{name:34} {min(values):8.2f} {low:7.2f} .. {high:.2f}")
        out[name] = {"us": min(values), "p10": low, "p90": high}
    return out


def compare(what: str, mine: list[float], theirs: list[float], floor: list[float]) -> dict[str, Any]:
    mine, theirs = over(mine, floor), over(theirs, floor)
    ratio = min(mine) / min(theirs)
    by_round = [a / b for a, b in zip(mine, theirs, strict=True)]
    low, high = percentile(by_round, 0.1), percentile(by_round, 0.9)
    holds = ratio <= AIM
    print(f"{what:34} {ratio:8.2f} {low:7.2f} .. {high:.2f}   {'holds' if holds else 'DOES NOT HOLD'}")
    return {"ratio": ratio, "p10": low, "p90": high, "aim": AIM, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        eager = measure(eager_subjects(), given.rounds, given.calls)
        layers = measure(layer_subjects(), given.rounds, given.calls)
        graphs = measure(compiled_subjects(), given.rounds, max(1, given.calls // 10))
    base = graphs.pop("no operator")
    compiled = {name: [us / CHAIN for us in over(values, base)] for name, values in graphs.items()}

    print(f"PyTorch {torch.__version__}, {platform.machine()}, {TEXT} of {SHAPE}, {given.rounds} rounds")
    result: dict[str, Any] = {"torch": torch.__version__, "quantizer": TEXT, "shape": SHAPE}
    result["eager"] = show("eager, per call", eager)
    result["compiled"] = show(f"{CHAIN} in a compiled graph, per op", compiled)
    print(f"\n{'overhead, C op / custom_op':34} {'ratio':>8}   10% .. 90%   aim: at most {AIM}")
    floor = eager["empty"]
    result["overhead"] = {
        name: compare(f"{name}, eager, over empty", eager[f"{name}, C op"], eager[f"{name}, custom_op"], floor)
        for name in ("quantize", "dequantize")
    }
    result["overhead"]["compiled"] = compare("compiled", compiled["C op"], compiled["custom_op"], [0.0])
    for name in ("quantize", "dequantize"):
        plain = min(eager[f"{name}, C op"]) / min(eager[f"{name}, custom_op"])
        print(f"{name + ', eager, nothing subtracted':34} {plain:8.2f}")
    result["layers"] = show(f"layers of {LAYER} x {LAYER}, per call", layers)
    print(f"\n{'Python over the C op / F.linear':34} {'ratio':>8}   aim: at most {LAYER_AIM:g}")
    result["python"] = {}
    for name in ("Linear", "QuantizedLinear"):
        pairs = zip(layers[name], layers[f"{name}, C op"], strict=True)
        added = percentile([module - op for module, op in pairs], 0.5)
        ratio = added / percentile(layers["F.linear"], 0.5)
        holds = ratio <= LAYER_AIM
        print(f"{name:34} {ratio:8.2f}   {'holds' if holds else 'DOES NOT HOLD'}")
        result["python"][name] = {"us": added, "ratio": ratio, "aim": LAYER_AIM, "holds": holds}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    if not all(ratio["holds"] for ratio in result["overhead"].values()):
        raise SystemExit(f"bench_overhead: an operator costs more than {AIM} of custom_op's overhead")
    if not all(added["holds"] for added in result["python"].values()):
        raise SystemExit(f"bench_overhead: a layer adds more than {LAYER_AIM:g} times F.linear to its operator")


if __name__ == "__main__":
    main()
