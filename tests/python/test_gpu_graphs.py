"""CUDA graphs: every operator can be captured, replays give the bytes of eager calls, random numbers advance,
and `torch.compile(mode="reduce-overhead")` records graphs and skips nothing. On the CPU the same calls run
without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import opaq
from compiling import compiled, fresh_compiler  # noqa: F401
from conftest import need, slow_but
from linear_reference import CASES
from linear_training import MAIN, Net, same, train, under
from test_torch_ops import NAMES, cases
from torch_cases import make_tensor, same_buffers, same_bytes

torch = need("torch")
ops = torch.ops.opaq
DRAWS = ("linear_forward_random", "random_state")  # operators that draw random numbers themselves


def tensors_of(result: Any) -> list[Any]:
    """The tensors of an operator's result."""
    values = result if isinstance(result, (list, tuple)) else [] if result is None else [result]
    return [value for value in values if isinstance(value, torch.Tensor)]


class Recorded:
    """Work as a CUDA graph, recorded after it has run once; on the CPU, the work itself."""

    def __init__(self, work: Callable[[], Any], device: str) -> None:
        self.work, self.graph, self.made = work, None, []
        if device == "cuda":
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                work()
            torch.cuda.current_stream().wait_stream(aside)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.made = tensors_of(work())

    def replay(self) -> list[Any]:
        if self.graph is None:
            return tensors_of(self.work())
        self.graph.replay()
        return [tensor.clone() for tensor in self.made]


def changed_by(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The arguments that the operator changes."""
    found = []
    for index, argument in enumerate(operator._schema.arguments):
        value = arguments[index] if index < len(arguments) else named.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            found.append(value)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_in_a_graph(name: str, device: str) -> None:
    operator = getattr(ops, name).default
    count = 0
    for _, arguments, named in (case for case in cases(device) if case[0] == name):
        changed = changed_by(operator, arguments, named)
        saved = [tensor.clone() for tensor in changed]

        def restore(changed: Any = changed, saved: Any = saved) -> None:
            for tensor, value in zip(changed, saved, strict=True):
                tensor.copy_(value)

        want = tensors_of(operator(*arguments, **named))
        after = [tensor.clone() for tensor in changed]
        restore()
        recorded = Recorded(lambda a=arguments, n=named: operator(*a, **n), device)
        replays = []
        for _ in range(3):
            restore()
            replays.append(recorded.replay())
            assert same_buffers(changed, after)
        if name == "random_state":
            assert not same_buffers(replays[0], replays[1]) and not same_buffers(replays[1], replays[2])
        elif name not in DRAWS:
            assert all(same_buffers(replay, want) for replay in replays), (arguments, named)
        count += 1
    assert count > 0


def test_a_replay_reads_what_its_input_holds_now(device: str) -> None:
    x, w = make_tensor((40, 96), device), make_tensor((24, 96), device)

    def work() -> list[Any]:
        return [*ops.quantize(x, "nvfp4+both+rht"), ops.linear(x, [w], None, w.shape, "x=nvfp4 w=nvfp4")]

    recorded = Recorded(work, device)
    for turn in range(3):
        x.copy_(make_tensor((40, 96), device, gap=turn) * (turn + 1))
        assert same_buffers(recorded.replay(), work())


def test_stochastic_rounding_advances_in_replays(device: str) -> None:
    """Replays round differently, and their mean is nearer to x than one of them."""
    x = torch.rand(64, 256, device=device) + 0.5
    recorded = Recorded(
        lambda: opaq.quantize_tensor(x, "mxfp4+sr", random=ops.random_state(x)).dequantize(), device
    )
    replays = [recorded.replay()[0] for _ in range(32)]
    assert all(not same_bytes(a, b) for a, b in zip(replays, replays[1:], strict=False))
    one, mean = (replays[0] - x).norm(), (torch.stack(replays).mean(0) - x).norm()
    assert mean < 0.5 * one


@pytest.mark.parametrize("name", slow_but(CASES, *MAIN))
def test_training_with_reduce_overhead(name: str, device: str) -> None:
    """Forward, backward and delayed scaling's state: the results of eager mode in every step, and no skipped
    graph. Where gradients are rounded stochastically, only what comes before them is compared."""
    if device == "cpu" and name != "delayed":
        pytest.skip("needs a GPU; test_linear_compile.py compares all recipes on the CPU")
    counters = torch._dynamo.utils.counters
    counters.clear()

    def fast(function: Any) -> Any:
        return (
            torch.compile(function, fullgraph=True, mode="reduce-overhead")
            if device == "cuda"
            else compiled(function)
        )

    results = []
    for wrap in (lambda function: function, fast):
        net = Net(device)

        def run(x: Any, net: Any = net) -> Any:
            with under(CASES[name]):
                return net(x)

        results.append(train(net, wrap(run), 5, device=device))  # warm up, record, replay, replay, replay
    if CASES[name].is_stochastic and device == "cuda":
        assert same_bytes(results[0][0][0], results[1][0][0])
        assert all(value.isfinite().all() for step in results[1] for value in step)
    else:
        assert same(*results)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_packed_models_with_reduce_overhead(device: str) -> None:
    """Inference with packed weights, among them a mixture of experts."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.GELU(), torch.nn.Linear(64, 40)).to(
        device, torch.bfloat16
    )
    opaq.quantize_(net, "nvfp4", activations="mxfp8", progress=False)
    up, down = (
        make_tensor((3, 64, 96), device, torch.bfloat16),
        make_tensor((3, 96, 32), device, torch.bfloat16),
    )
    ids = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1]], device=device)
    weights = torch.full((4, 2), 0.5, device=device)

    def run(x: Any) -> Any:
        return net(opaq.functional.moe(x, weights, ids, up, down))

    function = torch.compile(run, fullgraph=True, mode="reduce-overhead") if device == "cuda" else compiled(run)
    with torch.no_grad():
        for turn in range(5):
            x = make_tensor((4, 96), device, torch.bfloat16, gap=turn)
            torch.testing.assert_close(function(x).clone(), run(x), rtol=2**-6, atol=2**-6)
    assert counters["inductor"]["cudagraph_skips"] == 0


def graphs_recorded() -> int:
    """The number of CUDA graphs that torch.compile has recorded on this GPU. Each call may count as one."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return 0 if manager is None else int(manager.new_graph_id().id)


class Adapted(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A packed linear layer with an adapter, packed experts with a trained router, and a head."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.packed = opaq.QuantizedLinear.from_linear(torch.nn.Linear(96, 64), "nvfp4")
        self.experts = opaq.MoE(64, 32, 4, quantizer="mxfp4")
        with torch.no_grad():
            for parameter in self.experts.parameters():
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
        self.down, self.up = torch.nn.Linear(96, 8, bias=False), torch.nn.Linear(8, 64, bias=False)
        self.router, self.head = torch.nn.Linear(64, 4), torch.nn.Linear(64, 16)
        self.to(device)

    def forward(self, x: Any) -> Any:
        h = self.packed(x) + self.up(self.down(x))
        weights, ids = self.router(h).softmax(-1).topk(2)
        return self.head(h + self.experts(h, weights, ids))


def test_training_through_packed_weights_with_reduce_overhead(device: str) -> None:
    """Forward and backward are CUDA graphs: losses and gradients of eager mode, and no skipped graph."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    before = graphs_recorded() if device == "cuda" else 0
    results = []
    for is_compiled in (False, True):
        net = Adapted(device)
        trained = [p for p in net.parameters() if p.requires_grad]
        assert len(trained) == 6

        def loss_of(x: Any, target: Any, net: Any = net) -> Any:
            return torch.nn.functional.mse_loss(net(x), target)

        step: Any = loss_of
        if is_compiled:
            options: dict[str, Any] = (
                {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
            )
            step = torch.compile(loss_of, fullgraph=True, **options)
        found = []
        for turn in range(5):  # warm up, record, replay, replay, replay
            x, target = make_tensor((20, 96), device, gap=turn).sigmoid(), make_tensor((20, 16), device).tanh()
            loss = step(x, target)
            loss.backward()
            found += [loss.detach().clone(), *(p.grad.clone() for p in trained)]
            with torch.no_grad():
                for parameter in trained:
                    parameter.sub_(parameter.grad, alpha=0.05)
                    parameter.grad = None
        results.append(found)
    for eager, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, eager, rtol=1e-3, atol=1e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0 and not counters["graph_break"]
    if device == "cuda":
        assert graphs_recorded() - before >= 2
