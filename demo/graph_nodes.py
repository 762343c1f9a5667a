"""Functions on the nodes of PyTorch's graphs, for counting and drawing them."""

from __future__ import annotations

import operator
from typing import Any


def is_item(node: Any) -> bool:
    """Whether the node only selects one output of another node."""
    return node.target is operator.getitem


def operations(graph: Any) -> list[Any]:
    """The nodes that compute something."""
    return [node for node in graph.graph.nodes if node.op == "call_function" and not is_item(node)]


def name_of(node: Any) -> str:
    """The operator's name; the wrapped operator's if PyTorch wraps it because it writes to arguments."""
    wraps = node.op == "call_function" and "auto_functionalized" in str(node.target)
    return str(node.args[0] if wraps else node.target).removesuffix(".default")


def is_ours(node: Any) -> bool:
    return name_of(node).startswith("opaq.")


def inputs_of(node: Any) -> set[Any]:
    """The nodes whose outputs are the node's inputs."""
    found = set()
    for given in node.all_input_nodes:
        while is_item(given):
            given = given.args[0]
        found.add(given)
    return found
