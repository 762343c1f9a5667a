"""The pictures of the demonstration's page, drawn with matplotlib as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from graph_nodes import inputs_of, is_item, is_ours, name_of

BLUE, ORANGE, GREY, GREEN = "#2f6f9f", "#d9731a", "#8a8a8a", "#2e8b57"
matplotlib.rcParams.update({"svg.hashsalt": "opaq", "font.size": 10, "axes.titlesize": 11})


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


# ---- bars ----


def _bars(axes: Any, names: list[str], values: list[float], colors: list[str], text: str, title: str) -> None:
    bars = axes.barh(range(len(values)), values, color=colors, height=0.7)
    axes.bar_label(bars, [text.format(value) for value in values], padding=4)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first one on top
    axes.set_xlim(0, 1.18 * max(values))
    axes.set_title(title, loc="left")
    _clean(axes)


def formats(rows: list[dict[str, Any]], path: Path) -> None:
    """Bits per element and SQNR of each quantizer; formats of 4 bits in orange."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["quantizer"] for row in rows]
    colors = [ORANGE if row["bits"] < 6 else BLUE for row in rows]
    _bars(left, names, [row["bits"] for row in rows], colors, "{:.2f}", "bits per element (bf16: 16)")
    _bars(right, names, [row["sqnr_db"] for row in rows], colors, "{:.1f}", "SQNR, dB: higher is more accurate")
    right.tick_params(labelleft=False)
    _save(figure, path)


def pairs(charts: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """A chart of two or more bars for each quantity; the first bar is the baseline."""
    figure = Figure(figsize=(10, 1.9), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(charts)), charts.items(), strict=True):
        colors = [BLUE] + [ORANGE] * (len(values) - 1)
        _bars(axes, list(values), list(values.values()), colors, "{:.1f}", title)
    _save(figure, path)


# ---- curves ----


def curves(
    runs: Mapping[str, Any],
    limits: Mapping[str, float],
    windows: Callable[[list[float]], list[float]],
    path: Path,
) -> None:
    """A chart of bf16's loss, and for each recipe a chart of its difference to bf16."""
    figure = Figure(figsize=(10.5, 6), layout="constrained")
    first, *others = figure.subplots(2, 3, sharex=True).flat
    bf16 = runs["bf16"]
    steps = range(1, len(bf16.train_losses) + 1)
    first.plot(steps, bf16.train_losses, color=BLUE, alpha=0.3, linewidth=0.8)
    first.plot(steps, windows(bf16.train_losses), color=BLUE, label="training")
    first.plot(bf16.validation_steps, bf16.validation_losses, "o", color=ORANGE, label="validation")
    first.set_title("bf16: nats per character", loc="left")
    first.legend(frameon=False)
    _clean(first)
    smooth = {name: runs[name].smoothed(bf16) for name in limits}
    dots = {
        name: [
            100 * (a / b - 1) for a, b in zip(runs[name].validation_losses, bf16.validation_losses, strict=True)
        ]
        for name in limits
    }
    for axes, (name, limit) in zip(others, limits.items(), strict=True):
        axes.axhspan(-100 * limit, 100 * limit, color=GREEN, alpha=0.13, linewidth=0)
        axes.axhline(0, color="black", linewidth=0.8)
        for other in limits:
            if other != name:
                axes.plot(steps, smooth[other], color=GREY, linewidth=0.6, alpha=0.5)
        axes.plot(steps, smooth[name], color=BLUE, linewidth=1.8)
        axes.plot(runs[name].validation_steps, dots[name], "o", color=ORANGE, markersize=5)
        away = 100 * runs[name].to(bf16)
        axes.set_title(f"{name}: {away:+.2f} % (limit {100 * limit:g} %)", loc="left")
        # The limits of the axis ignore the warm-up steps, where differences are large and random.
        settled = [abs(value) for value in (*smooth[name][len(steps) // 5 :], *dots[name][2:])]
        reach = 1.15 * max(100 * limit, *settled)
        axes.set_ylim(-reach, reach)
        _clean(axes)
    for axes in (others[1], others[2]):
        axes.set_ylabel("% of bf16's loss")
    others[0].set_ylabel("% of bf16's loss")
    for axes in others[2:]:
        axes.set_xlabel("step")
    _save(figure, path)


# ---- graphs ----


def _label(node: Any) -> str:
    return {"placeholder": str(node.name), "output": "results"}.get(node.op) or name_of(node)


def _drawn(graph: Any) -> dict[Any, set[Any]]:
    """The nodes to draw and their inputs."""
    return {
        node: inputs_of(node)
        for node in graph.graph.nodes
        if not is_item(node) and (node.op != "placeholder" or node.users)
    }


def _draw_graph(axes: Any, graph: Any, title: str) -> None:
    """A node's level is its longest path from an input; an input is drawn one level above its first user."""
    inputs = _drawn(graph)
    nodes = list(inputs)
    level: dict[Any, int] = {}
    for node in nodes:
        level[node] = 1 + max((level[given] for given in inputs[node]), default=-1)
    for node in nodes:
        users = [level[user] for user in nodes if node in inputs[user]]
        if node.op == "placeholder" and users:
            level[node] = min(users) - 1
    place: dict[Any, tuple[float, float]] = {}
    for depth in range(max(level.values()) + 1):
        here = [node for node in nodes if level[node] == depth]
        for index, node in enumerate(here):
            place[node] = (index - (len(here) - 1) / 2, -depth)
    for node in nodes:
        for given in inputs[node]:
            axes.annotate(
                "",
                xy=place[node],
                xytext=place[given],
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": GREY,
                    "shrinkA": 10,
                    "shrinkB": 10,
                    "linewidth": 0.8,
                },
            )
    for node in nodes:
        color = ORANGE if is_ours(node) else BLUE if node.op == "call_function" else GREY
        box = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "none"}
        axes.text(*place[node], _label(node), ha="center", va="center", color="white", fontsize=8, bbox=box)
    across, down = zip(*place.values(), strict=True)
    axes.set_xlim(min(across) - 0.7, max(across) + 0.7)
    axes.set_ylim(min(down) - 0.5, max(down) + 0.5)
    axes.set_title(title, loc="left")
    axes.axis("off")


def graphs(shown: Mapping[str, Any], path: Path) -> None:
    """Two rows of graphs."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    columns = len(shown) // 2
    for axes, (title, graph) in zip(figure.subplots(2, columns).flat, shown.items(), strict=True):
        _draw_graph(axes, graph, title)
    _save(figure, path)
