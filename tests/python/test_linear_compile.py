"""Linear in compiled graphs: one node forward, one backward, no recompilation, and the same bits as eager
mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import opaq
from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need, need_cxx, slow_but
from linear_reference import CASES, values
from linear_training import ALL, CLASSES, FEATURES, MAIN, Net, same, train, under
from torch_cases import same_bytes

torch = need("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

WITH_INDUCTOR = ("none", "delayed", "nvfp4")


ROWS = (2, 17, 100, 128, 129, 257)  # one graph serves all of them, also if scales cover 128 rows


def around(net: Any, name: str) -> Callable[[Any], Any]:
    """The network with its recipe inside the compiled region."""

    def run(x: Any) -> Any:
        with under(CASES[name]):
            return net(x)

    return run


# ------------------------------------------------------------------------ the graph, and compiled equals eager


def capturing(function: Any) -> tuple[Any, dict[str, Any]]:
    """The compiled function, and a dictionary that receives the graphs of the backend."""
    found: dict[str, Any] = {}

    def keep(key: str) -> Any:
        def compiler(graph: Any, _: Any) -> Any:
            assert key not in found
            found[key] = graph
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    return compiled(function, backend=backend), found


def operators_in(graph: Any) -> list[str]:
    """The names of opaq's operators, in order; mutating ones may be wrapped."""
    names = []
    for node in graph.graph.nodes:
        targets = [node.target, *node.args[:1]] if node.op == "call_function" else []
        names += [t._opname for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace == "opaq"]
    return names


@pytest.mark.parametrize("name", slow_but(ALL, *MAIN))
def test_one_node_each_and_the_bits_of_eager(name: str, device: str) -> None:
    """A layer is one opaq operator forward and one backward; three steps give the same bits."""
    net, plain = Net(device), Net(device)
    function, graphs = capturing(net)
    with under(ALL[name]):
        assert same(train(net, function, device=device), train(plain, plain, device=device))
    assert [name.removesuffix("_random") for name in operators_in(graphs["forward"])] == ["linear_forward"] * 2
    backward = "linear_backward_changing" if ALL[name].is_delayed else "linear_backward"
    assert operators_in(graphs["backward"]) == [backward] * 2
    targets = [str(node.target) for graph in graphs.values() for node in graph.graph.nodes]
    assert not [target for target in targets if "mm" in target or "_to_copy" in target]


def test_one_node_for_inference(device: str) -> None:
    net = Net(device)
    function, graphs = capturing(around(net, "mxfp8"))
    with torch.no_grad():
        function(values((20, FEATURES), 1, device, torch.bfloat16))
    assert operators_in(graphs["forward"]) == ["linear_forward"] * 2
    calls = [node for node in graphs["forward"].graph.nodes if node.op == "call_function"]
    assert len(calls) == 5  # two layers, the first tensor of each list, a relu


@pytest.mark.parametrize("name", WITH_INDUCTOR)
def test_inductor_equals_eager(name: str, device: str) -> None:
    need_cxx()
    results = []
    for wrap in (lambda f: f, lambda f: compiled(f, backend="inductor", dynamic=True)):
        net = Net(device)
        results.append(train(net, wrap(around(net, name)), 4, rows=(20, 7, 33), device=device))
    assert same(*results)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_equal_calls_are_not_merged(name: str, device: str) -> None:
    """Each uses its own random numbers."""
    results = []
    for wrap in (lambda f: f, lambda f: compiled(f, backend="aot_eager_decomp_partition")):
        net = Net(device)

        def run(x: Any, net: Any = net) -> Any:
            with under(CASES[name]):
                return net.second(net.first(x) * 2 + net.first(x) * 4)

        results.append(train(net, wrap(run), 1, device=device))
    assert same(*results)


def test_compiled_autograd_equals_eager(device: str) -> None:
    results = []
    for compiles in (False, True):
        net = Net(device)
        function = compiled(around(net, "delayed")) if compiles else around(net, "delayed")
        with torch._dynamo.config.patch(compiled_autograd=compiles):
            results.append(train(net, function, device=device))
    assert same(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_compiled_equals_eager_in_other_dtypes(dtype: Any, device: str) -> None:
    results = []
    for wrap in (lambda f: f, compiled):
        net = Net(device, dtype)
        results.append(train(net, wrap(around(net, "mxfp8")), device=device))
    assert same(*results)


def test_reduce_overhead_equals_eager(device: str) -> None:
    """CUDA graphs: none is skipped, and replays give the same result. On the CPU the default mode."""
    need_cxx()
    counters = torch._dynamo.utils.counters
    counters.clear()
    mode = "reduce-overhead" if device == "cuda" else "default"
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, mode=mode)):
        net = Net(device)
        results.append(train(net, wrap(around(net, "mxfp8")), 4, device=device))
    assert same(*results)
    assert counters["inductor"]["cudagraph_skips"] == 0


# ------------------------------------------------------------------------------------------ no recompilation


def once(function: Any) -> Callable[..., Any]:
    """Fails if anything is compiled after the first call."""
    calls = []

    def run(*arguments: Any) -> Any:
        calls.append(arguments)
        with fail_on_recompile() if len(calls) > 1 else nullcontext():
            return function(*arguments)

    return run


@pytest.mark.parametrize("name", [*MAIN, "nvfp4 rowscaled", "custom"])
def test_dynamic_batches_never_recompile(name: str, device: str) -> None:
    results = []
    for wrap in (lambda f: f, lambda f: once(compiled(f, dynamic=True))):
        net = Net(device)
        results.append(train(net, wrap(around(net, name)), len(ROWS), ROWS, device))
    assert same(*results)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed", "block"])
def test_a_marked_batch_is_not_specialised(name: str, device: str) -> None:
    net = Net(device)
    function = compiled(around(net, name))
    x = values((20, FEATURES), 1, device, torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)  # raises if anything specializes on the size
    function(x).sum().backward()
    with fail_on_recompile():
        assert function(values((35, FEATURES), 1, device, torch.bfloat16)).shape == (35, CLASSES)


def test_a_static_batch_becomes_dynamic_once(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    net = Net(device)
    function = compiled(around(net, "mxfp8"), backend=counter)
    for rows in (20, 20, 33, 64, 7, 128):
        function(values((rows, FEATURES), 1, device, torch.bfloat16))
    assert counter.frame_count == 2


# ------------------------------------------------------------------------------------- position of autocast


@pytest.mark.parametrize("name", MAIN)
def test_autocast_inside_and_outside(name: str, device: str) -> None:
    """One graph for each recipe; an equal recipe in a new object does not recompile."""
    results = []
    for inside in (True, False):
        net = Net(device)
        function = once(compiled(around(net, name) if inside else net))

        def run(x: Any, inside: bool = inside, function: Any = function) -> Any:
            with under(CASES["none" if inside else name]):
                return function(x)

        results.append(train(net, run, device=device))
    assert same(*results)


def test_a_recipe_changes_between_calls(device: str) -> None:
    net, plain = Net(device), Net(device)
    function = compiled(net)
    for again in (False, True):
        for name in MAIN:
            if name == "nvfp4":
                torch.manual_seed(4)
            with under(CASES[name]), fail_on_recompile() if again else nullcontext():
                got = train(net, function, 1, device=device)
            with under(CASES[name]):
                assert same(got, train(plain, plain, 1, device=device)), (name, again)


def test_a_recipe_changes_inside_a_region(device: str) -> None:
    def run(net: Any, x: Any) -> Any:
        with under(CASES["mxfp8"]):
            h = net.first(x)
            with under(CASES["none"]):
                h = h + net.first(x)
            with under(CASES["current"]):
                y = net.second(torch.relu(h))
        return y + net.second(h)

    results = []
    for wrap in (lambda f: f, compiled):
        net, function = Net(device), wrap(run)
        results.append(train(net, lambda x, net=net, f=function: f(net, x), device=device))
    assert same(*results)


@pytest.mark.parametrize("name", ["none", "delayed", "nvfp4"])
def test_training_and_evaluation_take_turns(name: str, device: str) -> None:
    """Evaluation does not change delayed scaling's state, and gives the same results as training."""
    results = []
    for wrap in (lambda f: f, compiled):
        net = Net(device)
        function, x = wrap(around(net, name)), values((20, FEATURES), 5, device, torch.bfloat16)
        steps = []
        for _ in range(2):
            steps += train(net, function, 1, device=device)
            before = {key: value.clone() for key, value in net.state_dict().items()}
            net.eval()
            with torch.no_grad():
                without = function(x)
            with torch.inference_mode():
                inferred = function(x)
            net.train()
            assert not without.requires_grad and same_bytes(without, inferred.clone())
            assert same_bytes(without, function(x).detach())
            assert all(same_bytes(before[key], value) for key, value in net.state_dict().items())
            steps.append([without])
        results.append(steps)
    assert same(*results)


# -------------------------------------------------------------------------------- activation checkpointing


def with_checkpoint(net: Any, name: str) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        with under(CASES[name]):
            return checkpoint(net, x, use_reentrant=False, context_fn=opaq.checkpoint_contexts)

    return run


@pytest.mark.parametrize("name", CASES)
def test_checkpointed_equals_not(name: str, device: str) -> None:
    results = []
    for wrap in (around, with_checkpoint):
        net = Net(device)
        results.append(train(net, wrap(net, name), device=device))
    assert same(*results)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [*MAIN[:-1], "nvfp4 no sr", "nvfp4"])
def test_checkpointed_in_a_graph_equals_not(name: str, backend: str, device: str) -> None:
    need_cxx()
    if backend == "inductor" and name not in ("delayed", "nvfp4"):
        backend = "aot_eager_decomp_partition"  # the same partition into forward and backward, and faster
    results = []
    for wrap in (around, lambda net, name: compiled(with_checkpoint(net, name), backend=backend)):
        net = Net(device)
        results.append(train(net, wrap(net, name), device=device))
    assert same(*results)


def test_a_checkpoint_saves_less(device: str) -> None:
    """Also inside a graph only the arguments of the layers are saved for the backward."""
    kept = []
    for wrap in (around, with_checkpoint):
        function, graphs = capturing(wrap(Net(device), "mxfp8"))
        function(values((20, FEATURES), 1, device, torch.bfloat16).requires_grad_()).sum().backward()
        output = next(node for node in graphs["forward"].graph.nodes if node.op == "output")
        kept.append(sum(node.op != "placeholder" for node in output.args[0]))
    assert kept[1] == 1 < kept[0]


# ------------------------------------------------------------------------------- microbatches share a weight


def accumulate(net: Any, function: Any, device: str) -> list[list[Any]]:
    """Two steps of three microbatches; the weight is quantized in the first microbatch."""
    results = []
    for step in range(2):
        cached = []
        for number in range(3):
            x = values((20, FEATURES), 10 * step + number, device, torch.bfloat16).requires_grad_()
            y = function(x, number == 0)
            y.backward(values(tuple(y.shape), 3 + number, device, torch.bfloat16))
            cached.append((net.first._cached_weight, net.second._cached_weight))
            results.append([t.detach().clone() for t in (y, x.grad, *(p.grad for p in net.parameters()))])
        for layer in range(2):
            assert isinstance(cached[0][layer], opaq.QuantizedTensor)
            assert cached[0][layer] is cached[1][layer] is cached[2][layer]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(parameter.grad, alpha=2.0**-10)
                parameter.grad = None
    return results


@pytest.mark.parametrize("name", MAIN[1:])
def test_microbatches_share_a_quantized_weight(name: str, device: str) -> None:
    results = []
    for wrap in (lambda f: f, compiled):
        net = Net(device)
        torch.manual_seed(3)
        with under(CASES[name]):
            results.append(accumulate(net, wrap(net), device))
    assert same(*results)
    first, second, third = results[0][:3]
    assert not same_bytes(first[2], second[2]) and not same_bytes(second[2], third[2])  # gradients add up


def test_a_cached_weight_without_the_copy_that_gradients_need(device: str) -> None:
    """A weight cached in evaluation has no columnwise copy; training replaces it."""
    results = []
    for evaluates in (True, False):
        net, x = Net(device), values((20, FEATURES), 1, device, torch.bfloat16).requires_grad_()
        with under(CASES["mxfp8"]):
            if evaluates:
                with torch.no_grad():
                    net(x, True)
                assert net.first._cached_weight.quantizer.usage == "rowwise"
            y = net(x, False)
            y.sum().backward()
        assert net.first._cached_weight.quantizer.usage == "both"
        results.append([[y.detach(), x.grad]])
    assert same(*results)


def test_a_new_step_quantizes_the_weight_again(device: str) -> None:
    net, x = Net(device), values((20, FEATURES), 1, device, torch.bfloat16)
    function = compiled(net)
    with under(CASES["mxfp8"]):
        function(x, True)
        before, cached = function(x, False), net.first._cached_weight
        with torch.no_grad():
            net.first.weight.mul_(2)
        assert same_bytes(function(x, False), before)  # the cached weight
        with fail_on_recompile():
            after = function(x, True)
        assert net.first._cached_weight is not cached
        assert not same_bytes(after, before) and same_bytes(after, net(x))
