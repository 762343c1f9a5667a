"""Linear's results: output and gradients under every recipe against a reference that shares no code with
opaq."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import opaq
from conftest import need
from linear_reference import CASES, OVERRIDES, Case, Delayed, Linear, new_delayed, values
from torch_cases import DTYPES, same_buffers, same_bytes

torch = need("torch")

# (leading sizes of x, in features, out features): ragged, several ranks, above and below a block, one row,
# empty
SHAPES = [
    ((5,), 37, 19),
    ((33,), 130, 70),
    ((2, 3, 7), 48, 33),
    ((1,), 64, 16),
    ((), 40, 24),
    ((130,), 300, 150),
    ((300,), 20, 12),
    ((0,), 32, 16),
    ((3, 0), 33, 5),
]
ALL = {**CASES, **OVERRIDES}


def within_bounds(layer: Linear, got: tuple[Any, ...]) -> bool:
    y, dx, dw, dbias = got
    errors = [layer.y().error(y), layer.dx().error(dx), layer.dw().error(dw)]
    if dbias is not None:
        errors.append(layer.dbias().error(dbias))
    assert max(errors) <= 1 or max(errors) > 2, (
        f"{errors}: between 1 and 2, so neither correct nor clearly wrong"
    )
    return max(errors) <= 1


def run(
    case: Case,
    shape: tuple[tuple[int, ...], int, int],
    device: str,
    dtype: Any,
    seed: int = 0,
    module: Any = None,
    delayed: Delayed | None = None,
) -> tuple[Linear, tuple[Any, ...]]:
    """Runs a step of a module, and its reference."""
    leading, columns, rows = shape
    if module is None:
        module = opaq.Linear(columns, rows, dtype=dtype, device=device)
        with torch.no_grad():
            module.weight.copy_(values((rows, columns), 100, device))
            module.bias.copy_(values((rows,), 200, device))
    x = values((*leading, columns), seed + 1, device, dtype).requires_grad_()
    dy = values((*leading, rows), seed + 2, device, dtype)
    recipe = case.make()
    with opaq.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    random = tuple(y.grad_fn.saved_tensors[-1].tolist()) if case.is_stochastic and not case.backward else (0, 0)
    module.zero_grad()
    y.backward(dy)
    assert y.dtype == x.grad.dtype == dtype
    layer = Linear(case, x, module.weight.detach(), module.bias, dy, delayed, random)
    return layer, (y, x.grad, module.weight.grad, module.bias.grad)


def state_for(case: Case) -> Delayed | None:
    return new_delayed(1024) if case.is_delayed else None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_every_recipe_and_shape(name: str, shape: Any, device: str) -> None:
    layer, got = run(ALL[name], shape, device, torch.float32, delayed=state_for(ALL[name]))
    assert within_bounds(layer, got)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ALL)
def test_every_dtype(name: str, dtype: str, device: str) -> None:
    layer, got = run(ALL[name], ((33,), 130, 70), device, DTYPES[dtype], delayed=state_for(ALL[name]))
    assert within_bounds(layer, got)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("none", "custom")])
def test_the_bound_distinguishes_recipes(name: str, device: str) -> None:
    """Results of another quantizer are far outside the bound, for each operand, so these tests can fail."""
    case = CASES[name]
    layer, (y, dx, dw, _) = run(case, ((33,), 130, 70), device, torch.float32, delayed=state_for(case))
    wrong = {"x": "mxfp4", "w": "mxfp4", "dy": "mxfp4"}
    other = {key: replace(layer, case=replace(case, **{key: wrong[key]}), copies={}) for key in wrong}
    assert other["x"].y().error(y) > 100 and other["w"].y().error(y) > 100
    assert other["w"].dx().error(dx) > 100 and other["dy"].dx().error(dx) > 100
    assert other["x"].dw().error(dw) > 100 and other["dy"].dw().error(dw) > 100


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_delayed])
def test_delayed_scaling_over_steps(name: str, device: str) -> None:
    """Scales and histories bit for bit, while a large amax enters the history and leaves it again."""
    case, shape = CASES[name], ((24,), 96, 40)
    recipe: Any = case.make()
    module = opaq.Linear(96, 40, device=device)
    want, seen = new_delayed(1024), []
    first = slice(recipe.amax_history_len)  # the rows that the recipe uses
    used = Delayed(want.scale_fwd, want.amax_history_fwd[first], want.scale_bwd, want.amax_history_bwd[first])
    for step in range(8):
        layer, got = run(case, shape, device, torch.float32, 10 * step, module, used)
        assert within_bounds(layer, got)
        used.update(recipe, *layer.amaxes())
        for key, mine in vars(want).items():
            assert same_bytes(getattr(module, key).cpu(), torch.from_numpy(mine)), (step, key)
        seen.append(float(want.scale_fwd[0]))
        with torch.no_grad():
            module.weight.mul_(1.5)
    assert len(set(seen)) > 1


def test_delayed_scaling_uses_the_scale_from_before(device: str) -> None:
    module, case = opaq.Linear(64, 32, device=device), CASES["delayed"]
    with torch.no_grad():
        module.scale_fwd.copy_(torch.tensor([3.5, 11.0, 1.0]))
        module.scale_bwd.copy_(torch.tensor([0.75, 1.0]))
    state = new_delayed(1024)
    state.scale_fwd[:2], state.scale_bwd[0] = (3.5, 11.0), 0.75
    layer, got = run(case, ((16,), 64, 32), device, torch.float32, module=module, delayed=state)
    assert within_bounds(layer, got)
    _, (current, *_) = run(CASES["current"], ((16,), 64, 32), device, torch.float32, module=module)
    assert layer.y().error(current) > 100


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 0.0, 1e-42])
@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8"])
def test_special_values_do_not_spread(name: str, special: float, device: str) -> None:
    """A NaN or an infinity affects the same results as in the reference, and no others."""
    case, module = CASES[name], opaq.Linear(64, 32, bias=False, device=device)
    x = values((16, 64), 1, device)
    x[3] = special
    recipe = case.make()
    with torch.no_grad(), opaq.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    with np.errstate(all="ignore"):
        want = Linear(case, x, module.weight.detach(), None, None).y()
    assert (np.isnan(want.exact) == torch.isnan(y).cpu().numpy()).all()
    rows = [i for i in range(16) if i != 3]
    kept = replace(want, exact=want.exact[rows], terms=want.terms[rows])
    assert kept.error(y[rows]) <= 1 and not torch.isnan(y[rows]).any()


# -------------------------------------------------------------------------------- gradients against autograd


@pytest.mark.parametrize("name", OVERRIDES)
def test_gradients_of_the_forward(name: str, device: str) -> None:
    """Without quantized gradients they equal autograd's, through the dequantized or the original operands."""
    case = OVERRIDES[name]
    layer, (y, dx, dw, dbias) = run(case, ((21,), 70, 50), device, torch.float32)
    forward = replace(case, backward="") if case.backward == "dequantized" else Case(lambda: None)
    used = Linear(forward, layer.x, layer.w, None, layer.dy)
    leaves = [torch.from_numpy(used.operand(key, 1)).requires_grad_() for key in ("x", "w")]
    bias = layer.bias.detach().cpu().double().requires_grad_()
    torch.nn.functional.linear(*leaves, bias).backward(layer.dy.cpu().double())
    for reference, leaf, got in zip(
        (layer.dx(), layer.dw(), layer.dbias()), (*leaves, bias), (dx, dw, dbias), strict=True
    ):
        assert replace(reference, exact=leaf.grad.numpy()).error(got) <= 1


# Limit of the relative error of a gradient against autograd's through the dequantized forward: a few roundings
# of each format.
FAR = {
    "fp8": 0.08,
    "fp8row": 0.06,
    "fp8blk1": 0.06,
    "fp8blk2": 0.06,
    "mxfp8": 0.06,
    "mxfp4": 0.25,
    "nvfp4": 0.25,
}


@pytest.mark.parametrize("name", [name for name in CASES if name != "none"])
def test_gradients_are_near_autograd(name: str, device: str) -> None:
    case = CASES[name]
    delayed = state_for(case)
    layer, (_, dx, dw, _) = run(case, ((128,), 256, 192), device, torch.float32, delayed=delayed)
    leaves = [torch.from_numpy(layer.operand(key, 1)).requires_grad_() for key in ("x", "w")]
    torch.nn.functional.linear(*leaves).backward(layer.dy.cpu().double())
    for leaf, got in zip(leaves, (dx, dw), strict=True):
        far = (got.cpu().double() - leaf.grad).norm() / leaf.grad.norm()
        assert 0 < far < max(FAR[text.split("+")[0].split(".")[0]] for text in (case.x, case.w)), far


# ----------------------------------------------------------------------------------------- subsets of gradients


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block", "mxfp8", "nvfp4 no sr"])
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "wb", "xb"])
def test_only_the_requested_gradients(name: str, wanted: str, device: str) -> None:
    """A gradient does not depend on which others are computed."""
    case, results = CASES[name], []
    for names in ("xwb", wanted):
        module = opaq.Linear(72, 40, device=device)
        with torch.no_grad():
            module.weight.copy_(values((40, 72), 3, device))
        x = values((20, 72), 1, device).requires_grad_("x" in names)
        module.weight.requires_grad_("w" in names)
        module.bias.requires_grad_("b" in names)
        recipe = case.make()
        with opaq.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.backward(values((20, 40), 2, device))
        results.append((y, {"x": x.grad, "w": module.weight.grad, "b": module.bias.grad}))
    (y, every), (again, some) = results
    assert same_bytes(y, again)
    for key, gradient in some.items():
        assert same_bytes(gradient, every[key]) if key in wanted else gradient is None


@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4 no sr"])
def test_without_a_bias(name: str, device: str) -> None:
    case, module = CASES[name], opaq.Linear(72, 40, bias=False, device=device)
    x = values((20, 72), 1, device).requires_grad_()
    dy = values((20, 40), 2, device)
    recipe = case.make()
    with opaq.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy)
    layer = Linear(case, x, module.weight.detach(), None, dy)
    assert within_bounds(layer, (y, x.grad, module.weight.grad, None))


@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4 no sr"])
def test_bytes_do_not_depend_on_threads(name: str, device: str) -> None:
    before, results = torch.get_num_threads(), []
    module = opaq.Linear(520, 260, device=device)
    x, dy = values((130, 520), 1, device).requires_grad_(), values((130, 260), 2, device)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            recipe = CASES[name].make()
            with opaq.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x)
            results.append([y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    finally:
        torch.set_num_threads(before)
    assert same_buffers(results[0], results[1]) and same_buffers(results[0], results[2])
