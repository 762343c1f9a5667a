"""Part 2: the graphs that torch.compile makes of a linear layer before and after conversion: the nodes of the
forward and backward passes for every recipe, and those of a layer with a packed weight for several batch
sizes."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import opaq
from demo_page import Listing, Part, Picture, Table
from graph_nodes import is_ours, operations
from recipes import RECIPES
from terminal import Bar

if TYPE_CHECKING:
    from run_demo import Settings

PACKED = ("fp8", "fp8blk2", "mxfp8", "mxfp4", "nvfp4")
ROWS, INPUTS, OUTPUTS = 48, 256, 512
BATCHES = (3, 17, 100)

Graph = torch.fx.GraphModule


def layer(device: str) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16, device=device)


def captured(module: nn.Module, x: torch.Tensor) -> dict[str, Graph]:
    """The forward and backward graphs of one training step under torch.compile(fullgraph=True)."""
    graphs: dict[str, Graph] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: Graph, _: Any) -> Any:
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    torch.compile(module, fullgraph=True, backend=backend)(x).sum().backward()
    return graphs


def packed_row(quantizer: str, device: str) -> dict[str, Any]:
    """Measures a packed layer. Required: one graph for all batch sizes, one opaq node, eager results."""
    torch.compiler.reset()
    plain = layer(device)
    model = nn.Sequential(layer(device))
    opaq.quantize_(model, quantizer, progress=False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    equal = True
    for rows in BATCHES:
        x = torch.randn(rows, INPUTS, dtype=torch.bfloat16, device=device)
        equal &= torch.equal(compiled(x), model(x))
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    nodes = operations(exported.run_decompositions())
    return {
        "quantizer": quantizer,
        "bytes": model[0].weight.nbytes,
        "plain_bytes": plain.weight.nbytes,
        "sqnr_db": opaq.sqnr(plain.weight, opaq.quantize_tensor(plain.weight.detach(), quantizer)),
        "graphs": counter.frame_count,
        "opaq_nodes": sum(map(is_ours, nodes)),
        "other_nodes": sum(not is_ours(node) for node in nodes),
        "equal": equal,
    }


def run(part: Part, settings: Settings) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch's, about its own pytrees
    x = torch.randn(ROWS, INPUTS, dtype=torch.bfloat16, device=settings.device, requires_grad=True)
    graphs, rows = {}, []
    with Bar("tracing", len(RECIPES) + len(PACKED), "layer") as bar:
        for name, chosen in RECIPES.items():
            bar.rename(f"tracing {name}")
            module = layer(settings.device)
            if chosen is not None:
                opaq.convert_training(module, chosen)
            graphs[name] = captured(module, x)
            counts = {}
            for way, graph in graphs[name].items():
                nodes = operations(graph)
                counts[way] = {"nodes": len(nodes), "opaq": sum(map(is_ours, nodes))}
            rows.append({"recipe": name, **counts})
            bar.advance()
        packed = []
        for quantizer in PACKED:
            bar.rename(f"packing {quantizer}")
            packed.append(packed_row(quantizer, settings.device))
            bar.advance()
    part.figures = {"training": rows, "packed": packed}
    part.wrong += wrong_of(rows, packed)
    add_blocks(part, settings, graphs, rows, packed)
    part.headline = (
        "In each recipe a linear layer is one opaq node forward and one backward; a packed layer has one graph "
        f"for {len(BATCHES)} batch sizes."
    )


def wrong_of(rows: list[dict[str, Any]], packed: list[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        expected = 0 if RECIPES[row["recipe"]] is None else 1
        for way in ("forward", "backward"):
            count = row[way]["opaq"]
            if count != expected:
                found.append(f"{row['recipe']}, {way}: {count} opaq nodes, expected {expected}.")
    for row in packed:
        if (row["graphs"], row["opaq_nodes"]) != (1, 1):
            found.append(
                f"{row['quantizer']}, packed: {row['graphs']} graphs and {row['opaq_nodes']} opaq nodes, "
                "expected 1 and 1."
            )
        if not row["equal"]:
            found.append(f"{row['quantizer']}, packed: compiled and eager results differ.")
        if not row["bytes"] < row["plain_bytes"]:
            found.append(
                f"{row['quantizer']}, packed: {row['bytes']} bytes, no fewer than bf16's {row['plain_bytes']}."
            )
    return found


def add_blocks(
    part: Part,
    settings: Settings,
    graphs: dict[str, dict[str, Graph]],
    rows: list[dict[str, Any]],
    packed: list[dict[str, Any]],
) -> None:
    part.blocks.append(
        f"`nn.Linear({INPUTS}, {OUTPUTS})` in bf16, before and after `opaq.convert_training(layer, recipe)`, "
        f"in one training step on {ROWS} rows under `torch.compile(fullgraph=True)`, where a graph break is an "
        "error. Quantization, scales, transposed copies, Hadamard transform and stochastic rounding are "
        "inside opaq's nodes."
    )
    if importlib.util.find_spec("matplotlib") is not None:
        import pictures

        shown = {"before: bf16": graphs["bf16"], "after: NVFP4BlockScaling": graphs["nvfp4"]}
        pictures.graphs(
            {f"{title}, {way}": one[way] for way in ("forward", "backward") for title, one in shown.items()},
            settings.out / "graph.svg",
        )
        part.blocks.append(
            Picture(
                "graph.svg",
                "Four graphs: the layer's forward and backward passes before conversion, with PyTorch nodes "
                "only, and after it, with one node opaq.linear_forward and one node opaq.linear_backward. "
                "The table below has the numbers of nodes.",
                "The layer's graphs. Grey: inputs and outputs; blue: operators of PyTorch; orange: of opaq.",
            )
        )
    part.blocks.append(
        Table(
            "Nodes that compute something in one training step; delayed scaling also copies its state",
            ("recipe", "forward", "opaq nodes", "backward", "opaq nodes"),
            [
                (
                    row["recipe"],
                    *(str(row[way][kind]) for way in ("forward", "backward") for kind in ("nodes", "opaq")),
                )
                for row in rows
            ],
        )
    )
    part.blocks.append(
        Table(
            f"The same layer packed by opaq.quantize_; batches of {', '.join(map(str, BATCHES))} rows",
            (
                "quantizer",
                "weight bytes",
                "of bf16",
                "SQNR, dB",
                "graphs compiled",
                "opaq nodes",
                "other nodes",
                "compiled equals eager",
            ),
            [
                (
                    f"`{row['quantizer']}`",
                    f"{row['bytes']:,}",
                    f"{row['bytes'] / row['plain_bytes']:.3f}",
                    f"{row['sqnr_db']:.2f}",
                    str(row["graphs"]),
                    str(row["opaq_nodes"]),
                    str(row["other_nodes"]),
                    "yes, bit by bit" if row["equal"] else "no",
                )
                for row in packed
            ],
        )
    )
    text = "\n".join(f"{way} of nvfp4:\n{graph.code.strip()}\n" for way, graph in graphs["nvfp4"].items())
    part.blocks.append(Listing("The graphs after conversion, as code", text, True))
