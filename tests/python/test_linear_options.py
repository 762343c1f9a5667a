"""Options of Linear, eager and compiled."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import opaq
from compiling import fresh_compiler  # noqa: F401
from conftest import need
from linear_reference import CASES, Linear, values
from linear_training import (
    FEATURES,
    HIDDEN,
    MAIN,
    WRAPS,
    Net,
    layer_of,
    quantized_layer,
    same,
    step,
    train,
    under,
)
from torch_cases import DTYPES, same_buffers, same_bytes

torch = need("torch")


# --------------------------------------------------------------------------------------- saved for the backward


@pytest.mark.parametrize("option", ["save_original_input", "save_original_weight"])
@pytest.mark.parametrize(
    "name", ["none", "current", "block", "mxfp8", "nvfp4", "nvfp4 rowscaled", "nvfp4 4over6"]
)
def test_originals_are_kept_and_give_the_same_bits(name: str, option: str, device: str) -> None:
    results = []
    for options in ({}, {option: True}):
        module = layer_of(device, **options)
        x, y, _ = step(module, CASES[name], device)
        results.append([[y.detach(), x.grad, module.weight.grad, module.bias.grad]])
    assert same(*results)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_cached_weight_and_another_backward(override: str, wrap: Any, device: str) -> None:
    """The backward equals that without a cache: through the weight itself, or through the forward's
    operands."""
    recipe = opaq.recipe.MXFP8BlockScaling(backward_override=override)
    results = []
    for flags in ((None, None), (True, False)):
        module = layer_of(device)
        function, cached = wrap(module), None
        found = []
        for first in flags:
            x = values((24, 72), 1, device).requires_grad_()
            with opaq.autocast(recipe=recipe):
                y = function(x, is_first_microbatch=first)
            y.backward(values(y.shape, 2, device))
            found += [y.detach(), x.grad]
            cached = module._cached_weight if first else cached if first is False else None
        assert module._cached_weight is cached  # the second call used the cache
        results.append([[*found, module.weight.grad]])
    assert same(*results)


def test_saved_tensors(device: str) -> None:
    """Quantized bytes, or the tensor itself; never a copy of it."""
    kept = {}
    for options in ({}, {"save_original_input": True}, {"save_original_weight": True}):
        module = layer_of(device, **options)
        x = values((24, 72), 1, device).requires_grad_()
        with under(CASES["mxfp8"]):
            y = module(x)
        saved = y.grad_fn.saved_tensors
        mine = {t.data_ptr() for t in saved if t.dtype == torch.float32}
        kept[tuple(options)] = (x.data_ptr() in mine, module.weight.data_ptr() in mine, len(mine))
        assert all(t.dtype == torch.uint8 for t in saved if t.data_ptr() not in mine)
    assert list(kept.values()) == [(False, False, 0), (True, False, 1), (False, True, 1)]


def test_nothing_is_saved_without_gradients(device: str) -> None:
    module = layer_of(device).requires_grad_(False)
    with under(CASES["mxfp8"]):
        assert module(values((24, 72), 1, device)).grad_fn is None
        x = values((24, 72), 1, device).requires_grad_()
        y = module(x)
    saved = y.grad_fn.saved_tensors
    assert [t.dtype for t in saved] == [torch.uint8] * 2  # the weight's buffers; the backward does not need x


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_originals_are_kept_in_a_graph(name: str, device: str) -> None:
    results = []
    for wrap in WRAPS.values():
        net = Net(device, save_original_input=True, save_original_weight=True)
        function = wrap(net)
        with under(CASES[name]):
            results.append(train(net, function, device=device))
    plain = Net(device)
    with under(CASES[name]):
        assert same(results[0], train(plain, plain, device=device))
    assert same(*results)


# --------------------------------------------------------------------------------------- gradients accumulated


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", MAIN)
def test_gradients_go_into_main_grad(name: str, wrap: str, device: str) -> None:
    """is_first_microbatch=True overwrites it, None and False add to it; weight.grad stays None."""
    case, module = CASES[name], layer_of(device, fuse_wgrad_accumulation=True)
    plain = layer_of(device)
    step(plain, case, device)
    function = WRAPS[wrap](module)
    module.weight.main_grad = torch.full((40, 72), 1000.0, device=device)
    seen = []
    for first in (True, False, None):
        x, y, dy = step(module, case, device, function, is_first_microbatch=first)
        seen.append(module.weight.main_grad.clone())
        assert module.weight.grad is None and x.grad is not None and module.bias.grad is not None
    assert same_bytes(seen[0], plain.weight.grad)
    if not case.is_delayed:  # delayed scales change from step to step
        assert same_bytes(seen[1], seen[0] + seen[0]) and same_bytes(seen[2], seen[1] + seen[0])


@pytest.mark.parametrize("wrap", WRAPS)
def test_main_grad_of_a_quantized_parameter(wrap: str, device: str) -> None:
    module = quantized_layer("mxfp8", device, preserve=True, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(40, 72, device=device)
    x, _, dy = step(module, CASES["mxfp8"], device, WRAPS[wrap](module))
    weight = module.weight.get_high_precision_init_val().to(device)
    assert Linear(CASES["mxfp8"], x, weight, module.bias, dy).dw().error(module.weight.main_grad) <= 1
    assert module.weight.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad_has_its_own_dtype(dtype: str, device: str) -> None:
    module = layer_of(device, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
    module.weight.main_grad = torch.zeros(40, 72, dtype=DTYPES[dtype], device=device)
    x, _, dy = step(module, CASES["mxfp8"], device, dtype=torch.bfloat16)
    layer = Linear(CASES["mxfp8"], x, module.weight.detach(), module.bias, dy)
    assert layer.dw().error(module.weight.main_grad) <= 1


def test_main_grad_may_be_overwritten(device: str) -> None:
    module = layer_of(device, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.full((40, 72), 1000.0, device=device)
    module.weight.overwrite_main_grad = True
    plain = layer_of(device)
    step(module, CASES["mxfp8"], device), step(plain, CASES["mxfp8"], device)
    assert same_bytes(module.weight.main_grad, plain.weight.grad)


def test_a_frozen_weight_needs_no_main_grad(device: str) -> None:
    module = layer_of(device, fuse_wgrad_accumulation=True)
    module.weight.requires_grad_(False)
    x, _, _ = step(module, CASES["mxfp8"], device)
    assert x.grad is not None and module.weight.grad is None


# -------------------------------------------------------------------------------------------- biases and parts


@pytest.mark.parametrize("wrap", WRAPS)
def test_return_bias(wrap: str, device: str) -> None:
    module, plain = layer_of(device, return_bias=True), layer_of(device)
    x = values((24, 72), 1, device)
    with under(CASES["mxfp8"]):
        y, bias = WRAPS[wrap](module)(x)
        assert torch.equal(bias, module.bias) and same_bytes(y + bias, plain(x))
    (y + bias).sum().backward()
    assert torch.equal(module.bias.grad, torch.full_like(bias, 24))
    none = layer_of(device, return_bias=True, bias=False)
    assert none(x)[1] is None and same_bytes(none(x)[0], layer_of(device, bias=False)(x))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("split", [("query", "key_", "value"), {"q": 96, "kv": 24}], ids=str)
def test_a_weight_in_parts(split: Any, wrap: str, device: str) -> None:
    """The same bits as with one weight, and each part gets its rows of the gradient."""
    whole = layer_of(device, 120)
    module = opaq.Linear(72, 120, parameters_split=split, device=device)
    sizes = list(split.values()) if isinstance(split, dict) else [40] * 3
    names = [name.rstrip("_") for name in split]
    wanted = [f"{name}_{kind}" for name in names for kind in ("weight", "bias")]
    assert [name for name, _ in module.named_parameters()] == wanted == list(module.state_dict())
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for name, rows in zip(names, getattr(whole, kind).split(sizes), strict=True):
                getattr(module, f"{name}_{kind}").copy_(rows)
    x, y, _ = step(module, CASES["mxfp8"], device, WRAPS[wrap](module))
    again, want, _ = step(whole, CASES["mxfp8"], device)
    assert same_bytes(y, want) and same_bytes(x.grad, again.grad)
    for kind in ("weight", "bias"):
        for name, rows in zip(names, getattr(whole, kind).grad.split(sizes), strict=True):
            assert same_bytes(getattr(module, f"{name}_{kind}").grad, rows.contiguous())


# ---------------------------------------------------------------------------------------- dtypes and strides


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_torch_autocast(name: str, wrap: str, device: str) -> None:
    """x is cast; the weight stays float32 and has float32 gradients; y is bfloat16, as with nn.Linear."""
    module, again = layer_of(device), layer_of(device)
    x, dy = values((24, 72), 1, device).requires_grad_(), values((24, 40), 2, device, torch.bfloat16)
    function = WRAPS[wrap](module)
    with under(CASES[name]), torch.autocast(device, torch.bfloat16):
        y = function(x)
    y.backward(dy)
    z = x.detach().clone().requires_grad_()
    with under(CASES[name]):
        want = again(z.bfloat16())
    want.backward(dy)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == module.weight.grad.dtype == torch.float32
    assert same_bytes(y, want) and same_bytes(x.grad, z.grad)
    assert same_bytes(module.weight.grad, again.weight.grad)
    with under(CASES[name]), torch.autocast(device, enabled=False):
        assert module(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8", "nvfp4 no sr"])
def test_a_float32_weight_under_another_input(name: str, dtype: str, device: str) -> None:
    """It is quantized from float32, without a cast, and has float32 gradients."""
    case, module = CASES[name], layer_of(device)
    x, y, dy = step(module, case, device, dtype=DTYPES[dtype])
    assert y.dtype == x.grad.dtype == DTYPES[dtype] and module.weight.grad.dtype == torch.float32
    layer = Linear(case, x, module.weight.detach(), module.bias, dy)
    errors = [layer.y().error(y), layer.dx().error(x.grad), layer.dw().error(module.weight.grad)]
    assert max(errors) <= 1 and layer.dbias().error(module.bias.grad) <= 1


STRIDED = {
    "transposed": lambda device: values((72, 24), 1, device).t(),
    "rows apart": lambda device: values((24, 100), 1, device)[:, 10:82],
    "expanded": lambda device: values((1, 72), 1, device).expand(24, 72),
    "permuted": lambda device: values((4, 6, 72), 1, device).transpose(0, 1),
    "every other": lambda device: values((24, 144), 1, device)[:, ::2],
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", STRIDED)
def test_any_strides(kind: str, wrap: str, device: str) -> None:
    results = []
    for contiguous in (True, False):
        module, x = layer_of(device), STRIDED[kind](device)
        x = (x.contiguous() if contiguous else x).detach().requires_grad_()
        dy = values((1, 40), 2, device).expand(*x.shape[:-1], 40)
        with under(CASES["mxfp8"]):
            y = WRAPS[wrap](module)(x)
        y.backward(dy.contiguous() if contiguous else dy)
        results.append([[y.detach(), x.grad.contiguous(), module.weight.grad, module.bias.grad]])
    assert same(*results)


def test_a_weight_with_strides(device: str) -> None:
    x, w = values((24, 72), 1, device), values((72, 40), 3, device).t()
    assert same_bytes(opaq.functional.linear(x, w), opaq.functional.linear(x, w.contiguous()))


# ------------------------------------------------------------------------------- the function, export, opcheck


@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4"])
def test_the_function_is_the_module(name: str, device: str) -> None:
    module, x = layer_of(device), values((24, 72), 1, device)
    with under(CASES[name]):
        want = module(x)
        assert same_bytes(opaq.functional.linear(x, module.weight, module.bias), want)
    recipe = CASES[name].make()
    assert same_bytes(opaq.functional.linear(x, module.weight, module.bias, recipe=recipe), want)


def test_the_function_caches(device: str) -> None:
    module, x, recipe = layer_of(device), values((24, 72), 1, device), CASES["mxfp8"].make()
    y, cached = opaq.functional.linear(x, module.weight, module.bias, recipe=recipe, cache_weight=True)
    again = opaq.functional.linear(x, module.weight, module.bias, recipe=recipe, cached_weight=cached)
    assert isinstance(cached, opaq.QuantizedTensor) and same_bytes(y, again)


def test_a_gradient_has_no_gradient(device: str) -> None:
    module, x = layer_of(device), values((24, 72), 1, device).requires_grad_()
    with under(CASES["mxfp8"]):
        y = module(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="^opaq.Linear does not support double backward"):
        gradient.sum().backward()


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A network that enters its recipe in forward()."""

    def __init__(self, name: str, device: str, weights: Any = None) -> None:
        super().__init__()
        self.name = name
        with opaq.quantized_model_init(enabled=weights is not None, recipe=weights):
            self.net = opaq.Linear(FEATURES, HIDDEN, device=device)

    def forward(self, x: Any) -> Any:
        with under(CASES[self.name]):
            return torch.relu(self.net(x))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["none", "delayed", "current", "block", "mxfp8", "nvfp4"])
def test_export(name: str, quantized: bool, device: str) -> None:
    """With a dynamic batch, saved, loaded and run."""
    least = 129 if name == "block" else 1
    model = Model(name, device, CASES[name].make() if quantized else None).eval().requires_grad_(False)
    batch = torch.export.Dim("batch", min=least, max=4096)
    x = values((140, FEATURES), 1, device)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}})
    nodes = [node for node in program.graph.nodes if "opaq" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["opaq.linear_forward.default"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (129, 140, 257) if least > 1 else (1, 2, 64, 140, 300):
        x = values((rows, FEATURES), rows, device)
        assert same_bytes(loaded(x), model(x))


def opcheck_cases(device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Arguments of the linear operators, as the function calls them."""
    x, w, bias = values((5, 37), 1, device), values((19, 37), 2, device), values((19,), 3, device)
    dy, shapes = values((5, 19), 4, device), ((5, 37), (19, 37))
    scale = torch.tensor([3.0, 2.0, 1.0], device=device)
    f32 = torch.float32
    plans = {
        "": None,
        "grad=xwb": None,
        "x=mxfp8 w=mxfp8+2d dy=mxfp8.e5m2 grad=xwb": None,
        "x=mxfp8 w=mxfp8 dy=mxfp8 grad=w save=x cache": None,
        "x=fp8blk1 w=fp8blk2 y=mxfp8": None,
        "x=nvfp4+rht w=nvfp4 dy=nvfp4+rht grad=xb backward=dequantized": None,
        "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=xwb history=max margin=0": scale,
    }
    for plan, given in plans.items():
        yield "linear_forward", ([x], [w], bias, *shapes, f32, plan, given)
        if "grad" not in plan:
            continue
        forward = torch.ops.opaq.linear_forward([x], [w], bias, *shapes, f32, plan, given)
        places = opaq._operators.result_places("linear_forward", plan)
        x_saved, w_saved, amax = (forward[begin:end] for begin, end in places[1:4])
        grad = plan.split("grad=")[1].split(" ")[0]
        kept = (x_saved or [x]) if "w" in grad else [], (w_saved or [w]) if "x" in grad else []
        arguments = ([dy], *kept, *shapes, f32, f32, plan, None)
        if given is None:
            yield "linear_backward", arguments
            yield "linear_backward_changing", (*arguments, None)
        else:
            state = new_state(device)
            yield "linear_backward_changing", (*arguments, amax[0], None, *state)
            yield "delayed_update", (plan, *state[:2])
            yield "delayed_update", (plan, *state[2:])
    main_grad = torch.ones(19, 37, device=device)
    arguments = ([dy], [x], [w], *shapes, f32, f32)
    yield "linear_backward_changing", (*arguments, "grad=xwb main_grad=add", None, None, main_grad)
    yield "linear_backward", (*arguments, "dy=nvfp4+rht+sr grad=xwb", torch.tensor([5, 6], device=device))
    for text in ("fp8", "nvfp4+rht", "nvfp4", "fp8+both"):
        yield "amax", (x, text)


def new_state(device: str) -> tuple[Any, ...]:
    """A state of delayed scaling as during training."""
    return (
        torch.tensor([3.0, 2.0, 1.0], device=device),
        torch.rand((4, 3), device=device),
        torch.tensor([2.0, 1.0], device=device),
        torch.rand((4, 2), device=device),
    )


@pytest.mark.parametrize(
    "name", ["linear_forward", "linear_backward", "linear_backward_changing", "amax", "delayed_update"]
)
def test_opcheck(name: str, device: str) -> None:
    of_name = [arguments for key, arguments in opcheck_cases(device) if key == name]
    assert of_name
    for arguments in of_name:
        torch.library.opcheck(getattr(torch.ops.opaq, name).default, arguments)


# ----------------------------------------------------------------------------------------------------- threads


def test_many_threads(device: str) -> None:
    """Each uses another recipe on one module; the results equal those of one thread."""
    module = layer_of(device)
    names = [name for name in CASES if not CASES[name].is_delayed and not CASES[name].is_stochastic]
    want, got, errors = {}, {}, []
    barrier = threading.Barrier(len(names))

    def run(name: str, results: dict[str, Any], waits: bool) -> None:
        try:
            for repeat in range(10 if waits else 1):
                if waits:
                    barrier.wait(60)
                x = values((24, 72), 1, device).requires_grad_()
                with under(CASES[name]):
                    y = module(x)
                gradients = torch.autograd.grad(y, [x, module.weight], values((24, 40), 2, device))
                results[name, repeat] = [y.detach(), *gradients]
        except BaseException as error:
            errors.append(error)
            raise

    for name in names:
        run(name, want, False)
    threads = [threading.Thread(target=run, args=(name, got, True)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(got) == 10 * len(names) > 100
    for (name, _), tensors in got.items():
        assert same_buffers(tensors, want[name, 0])
