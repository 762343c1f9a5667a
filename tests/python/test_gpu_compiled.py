"""`torch.compile(mode="reduce-overhead")` of every operator, forward and backward: a CUDA graph is recorded and
replayed, none is skipped, and the results are those of eager calls. On the CPU the same functions are compiled
without graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need
from linear_reference import CASES
from linear_training import Net, under
from test_gpu_graphs import DRAWS, changed_by, tensors_of
from test_torch_ops import NAMES, cases
from torch_cases import make_tensor, same_buffers, same_bytes

torch = need("torch")

from opaq import functional  # noqa: E402

ops = torch.ops.opaq
BF16 = torch.bfloat16
CALLS = 5  # warm up, record, replay three times
CASES_OF_AN_OPERATOR = 4  # at most, in one graph


class Graphs:
    """The CUDA graphs that a test recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def check(self, device: str) -> None:
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
        if device == "cuda":
            assert self.recorded > 0 and self.replayed >= self.recorded


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    found = Graphs()
    torch._dynamo.utils.counters.clear()
    begin, replay = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.replay

    def counted_begin(self: Any, *arguments: Any, **named: Any) -> Any:
        found.recorded += 1
        return begin(self, *arguments, **named)

    def counted_replay(self: Any) -> Any:
        found.replayed += 1
        return replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", counted_begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted_replay)
    yield found


def fast(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    if device == "cuda":
        return torch.compile(function, fullgraph=True, mode="reduce-overhead")  # type: ignore[no-any-return]
    return compiled(function)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- operators


class Place:
    """A tensor's place in a list of all."""

    def __init__(self, index: int) -> None:
        self.index = index


def without_tensors(value: Any, tensors: list[Any]) -> Any:
    """The value with a place for each tensor, which is appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: without_tensors(part, tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [without_tensors(part, tensors) for part in value]
    return value


def with_tensors(value: Any, tensors: Any) -> Any:
    if isinstance(value, Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: with_tensors(part, tensors) for key, part in value.items()}
    if isinstance(value, list):
        return [with_tensors(part, tensors) for part in value]
    return value


def some_cases(name: str, device: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Spread over all cases of the operator; without empty tensors, of which Inductor records no graph."""
    found = [(arguments, named) for of, arguments, named in cases(device) if of == name]
    found = [case for case in found if not (isinstance(case[0][0], torch.Tensor) and case[0][0].numel() == 0)]
    assert found
    return found[:: -(-len(found) // CASES_OF_AN_OPERATOR)]


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_compiled(name: str, device: str, graphs: Graphs) -> None:
    """All chosen cases in one function. What an operator changes has a static address, as parameters have."""
    operator = getattr(ops, name).default
    chosen = some_cases(name, device)
    tensors: list[Any] = []
    templates = [without_tensors([list(arguments), named], tensors) for arguments, named in chosen]
    changed = [tensor for arguments, named in chosen for tensor in changed_by(operator, arguments, named)]
    saved = [tensor.clone() for tensor in changed]
    if device == "cuda":
        for tensor in changed:
            torch._dynamo.mark_static_address(tensor)

    def restore() -> None:
        for tensor, value in zip(changed, saved, strict=True):
            tensor.copy_(value)

    def run(*given: Any) -> list[Any]:
        made = []
        for template in templates:
            arguments, named = with_tensors(template, given)
            result = operator(*arguments, **named)
            made += list(result) if isinstance(result, (list, tuple)) else [] if result is None else [result]
        return made

    function = fast(run, device)
    want = tensors_of(run(*tensors))
    after = [tensor.clone() for tensor in changed]
    results = []
    with torch.no_grad():
        for _ in range(CALLS):
            restore()
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            results.append([tensor.clone() for tensor in tensors_of(function(*tensors))])
            assert same_buffers(changed, after)
    if name == "random_state":
        assert all(not same_buffers(a, b) for a, b in zip(results, results[1:], strict=False))
    elif name not in DRAWS:
        assert all(same_buffers(result, want) for result in results)
    graphs.check(device)


# ---------------------------------------------------------------------------------------------- training

HIDDEN, INNER, EXPERTS, TOKENS = 96, 64, 3, 13


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A function of parameters with gradients and of x."""

    def __init__(self, function: Callable[..., Any], device: str, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for number, shape in enumerate(shapes):
            draw = torch.Generator().manual_seed(number)
            values = torch.randn(shape, generator=draw).to(device, BF16) * shape[-1] ** -0.5
            self.register_parameter(f"weight{number}", torch.nn.Parameter(values))
        ids = torch.stack([torch.arange(TOKENS) % EXPERTS, (torch.arange(TOKENS) + 1) % EXPERTS], -1)
        self.register_buffer("ids", ids.to(device))
        self.register_buffer("splits", torch.tensor([TOKENS - 4, 0, 4], device=device))

    def forward(self, x: Any) -> Any:
        return self.function(self, x, *self.parameters())


def packed(make: Callable[..., Any], device: str) -> Any:
    """A packed module with weights that are not zeros."""
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5).to(parameter.dtype))
    return module.to(device)


class PackedExperts(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, device: str) -> None:
        super().__init__()
        self.experts = packed(lambda: opaq.MoE(HIDDEN, INNER, EXPERTS, quantizer="nvfp4", dtype=BF16), device)
        ids = torch.stack([torch.arange(TOKENS) % EXPERTS, (torch.arange(TOKENS) + 1) % EXPERTS], -1)
        self.register_buffer("ids", ids.to(device))
        self.register_buffer("weights", torch.full((TOKENS, 2), 0.5, device=device))

    def forward(self, x: Any) -> Any:
        return self.experts(x, self.weights, self.ids)


class Accumulating(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A linear layer whose weight's gradient is added to `main_grad`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = opaq.Linear(HIDDEN, INNER, dtype=BF16, device=device, fuse_wgrad_accumulation=True)
        self.layer.weight.main_grad = torch.zeros(INNER, HIDDEN, device=device)
        if device == "cuda":
            torch._dynamo.mark_static_address(self.layer.weight.main_grad)

    def forward(self, x: Any) -> Any:
        with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
            return self.layer(x)


def routed(self: Any, x: Any, router: Any, up: Any, down: Any, **options: Any) -> Any:
    return functional.moe(x, router.abs().float(), self.ids, up, down, **options)


UP, DOWN = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
RECIPE = opaq.recipe.MXFP8BlockScaling()
LAYERS: dict[str, Callable[[str], Any]] = {
    "mlp": lambda device: Layer(lambda _, x, up, down: functional.mlp(x, up, down), device, UP[1:], DOWN[1:]),
    "moe": lambda device: Layer(routed, device, (TOKENS, 2), UP, DOWN),
    "moe, mxfp8": lambda device: Layer(
        lambda self, *given: routed(self, *given, recipe=RECIPE), device, (TOKENS, 2), UP, DOWN
    ),
    "grouped_linear": lambda device: Layer(
        lambda self, x, w: functional.grouped_linear(x, self.splits, w), device, UP
    ),
    "grouped_linear, mxfp8": lambda device: Layer(
        lambda self, x, w: functional.grouped_linear(x, self.splits, w, recipe=RECIPE), device, UP
    ),
    "packed linear": lambda device: packed(
        lambda: opaq.QuantizedLinear(HIDDEN, INNER, quantizer="nvfp4", input_quantizer="mxfp8", dtype=BF16),
        device,
    ),
    "packed mlp": lambda device: packed(lambda: opaq.MLP(HIDDEN, INNER, quantizer="mxfp4", dtype=BF16), device),
    "packed moe": PackedExperts,
    "main_grad": Accumulating,
    "any order": lambda device: Layer(
        lambda _, x, w: functional.linear(x, w, order="any"), device, (INNER, HIDDEN)
    ),
}


def gradients_of(module: Any) -> list[Any]:
    """Of all parameters that have one, and main_grad."""
    found = []
    for parameter in module.parameters():
        found += [t for t in (parameter.grad, getattr(parameter, "main_grad", None)) if t is not None]
    return found


def train(module: Any, function: Callable[..., Any], device: str) -> list[list[Any]]:
    """The results and gradients of each step. Steps differ in x and dy."""
    results = []
    for turn in range(CALLS):
        x = make_tensor((TOKENS, HIDDEN), device, BF16, gap=turn).contiguous()
        x = (x / x.abs().amax()).requires_grad_()
        for tensor in gradients_of(module):
            tensor.zero_()
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        y = function(x)
        y.backward(make_tensor(tuple(y.shape), device, y.dtype, gap=turn).contiguous() / 512)
        results.append([tensor.detach().clone() for tensor in (y, x.grad, *gradients_of(module))])
        for parameter in module.parameters():
            parameter.grad = None
    return results


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_forward_and_backward(name: str, device: str, graphs: Graphs) -> None:
    eager, module = LAYERS[name](device), LAYERS[name](device)
    want, got = train(eager, eager, device), train(module, fast(module, device), device)
    for turn, (a, b) in enumerate(zip(got, want, strict=True)):
        assert len(a) == len(b) > 1, turn
        if name == "any order" and device == "cuda":  # cuBLASLt may choose by an address's alignment
            assert all(
                (p.float() - q.float()).norm() <= 2**-6 * q.float().norm() for p, q in zip(a, b, strict=True)
            )
        else:
            assert same_buffers(a, b), turn
    graphs.check(device)


def test_stochastic_rounding_differs_between_replays_of_a_step(device: str, graphs: Graphs) -> None:
    """The recipe nvfp4 rounds dy stochastically: each replay has another gradient of the weight."""
    net = Net(device)
    assert CASES["nvfp4"].is_stochastic

    def run(x: Any) -> Any:
        with under(CASES["nvfp4"]):
            return net(x)

    function, found = fast(run, device), []
    x = torch.randn(32, 72, generator=torch.Generator().manual_seed(1)).to(device, BF16)
    for _ in range(CALLS + 1):
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        y = function(x.clone())
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(y.dtype))
        found.append((y.detach().clone(), net.first.weight.grad.clone()))
        net.zero_grad(set_to_none=True)
    assert all(same_bytes(y, found[0][0]) for y, _ in found)  # x and w are rounded to nearest
    gradients = [dw for _, dw in found]
    assert all(not same_bytes(a, b) for a, b in zip(gradients, gradients[1:], strict=False))
    assert all((dw - gradients[0]).norm() < 0.5 * gradients[0].norm() for dw in gradients)
    graphs.check(device)
