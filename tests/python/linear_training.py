"""Shared by the tests of Linear: a small network, trained for a few steps, and a record of all its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import opaq
from conftest import need
from linear_reference import CASES, OVERRIDES, Case, values
from torch_cases import same_bytes

torch = need("torch")

ALL = {**CASES, **OVERRIDES}
MAIN = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
QUANTIZED = tuple(name for name, case in CASES.items() if case.w and name != "custom")
WRAPS = {"eager": lambda f: f, "compiled": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")}
FEATURES, HIDDEN, CLASSES = 72, 56, 40
STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Two layers, the second without a bias."""

    def __init__(self, device: str, dtype: Any = torch.bfloat16, **options: Any) -> None:
        super().__init__()
        self.first = opaq.Linear(FEATURES, HIDDEN, dtype=dtype, device=device, **options)
        self.second = opaq.Linear(HIDDEN, CLASSES, bias=False, dtype=dtype, device=device, **options)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(values(tuple(parameter.shape), 50 + seed, device))

    def forward(self, x: Any, is_first_microbatch: bool | None = None) -> Any:
        return self.second(torch.relu(self.first(x, is_first_microbatch)), is_first_microbatch)


def under(case: Case) -> Any:
    recipe = case.make()
    return opaq.autocast(enabled=recipe is not None, recipe=recipe)


def record(net: Any, y: Any, x: Any) -> list[Any]:
    """Copies of the output, the gradients and delayed scaling's state."""
    gradients = [x.grad, *(parameter.grad for parameter in net.parameters())]
    state = [getattr(layer, key) for layer in (net.first, net.second) for key in STATE]
    return [t.detach().clone() for t in (y, *gradients, *state)]


def train(
    net: Any, function: Callable[..., Any], steps: int = 3, rows: Sequence[int] = (20,), device: str = "cpu"
) -> list[list[Any]]:
    """Trains with SGD; returns the record of each step."""
    torch.manual_seed(11)
    dtype = next(net.parameters()).dtype
    results = []
    for step in range(steps):
        x = values((rows[step % len(rows)], FEATURES), 10 * step, device, dtype).requires_grad_()
        y = function(x)
        y.backward(values(tuple(y.shape), 10 * step + 1, device, dtype))
        results.append(record(net, y, x))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(parameter.grad, alpha=2.0**-10)
                parameter.grad = None
    return results


def same(first: list[list[Any]], second: list[list[Any]]) -> bool:
    """Bit for bit, step by step."""
    pairs = zip(first, second, strict=True)
    return all(all(same_bytes(a, b) for a, b in zip(one, other, strict=True)) for one, other in pairs)


# ------------------------------------------------------------------------------------------------- one layer


def layer_of(device: str, rows: int = 40, columns: int = 72, **options: Any) -> Any:
    made = opaq.Linear(columns, rows, device=device, **options)
    with torch.no_grad():
        made.weight.copy_(values((rows, columns), 3, device))
        if made.bias is not None:
            made.bias.copy_(values((rows,), 4, device))
    return made


def step(
    module: Any, case: Case, device: str, function: Any = None, dtype: Any = torch.float32, **call: Any
) -> Any:
    """Runs one forward and backward; returns x, y and dy."""
    columns, rows = module.in_features, module.out_features
    x, dy = values((24, columns), 1, device, dtype).requires_grad_(), values((24, rows), 2, device, dtype)
    torch.manual_seed(8)
    with under(case):
        y = (module if function is None else function)(x, **call)
    y.backward(dy)
    return x, y, dy


def quantized_layer(name: str, device: str, preserve: bool = False, **options: Any) -> Any:
    recipe = CASES[name].make()
    with opaq.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return opaq.Linear(72, 40, device=device, **options)
