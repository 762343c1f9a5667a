"""Every activation by itself: with these weights h is x, so the result is the formula with its roundings.

In bf16 and f16 results are expected bit for bit: errors of the float32 evaluation disappear in rounding. Only
if the exact value of the gate is so close to the midpoint of two numbers of the dtype that a float32 evaluation
may be on either side (experts_reference.activated_gate has the bound), both are accepted. In float32 the
accepted range is the error bound of a float32 evaluation of the formula: a few units in the last place."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from conftest import need
from experts_reference import ACTS, Act, Range, activate, exactly, numbers
from torch_cases import DTYPES

torch = need("torch")

ops = torch.ops.opaq
INF, NAN = math.inf, math.nan


def identity(act: Act, inner: int, dtype: Any) -> tuple[Any, Any]:
    """gate_up such that h is x, and down such that y is the activation followed by zeros."""
    width = act.width(inner)
    return torch.eye(width, dtype=dtype), torch.eye(width, inner, dtype=dtype)


def seen(act: Act, h: Any) -> Any:
    """The activation of finite rows h, in float64."""
    inner = h.shape[-1] // 2 if act.is_gated else h.shape[-1]
    gate_up, down = identity(act, inner, h.dtype)
    y = ops.mlp(h, [gate_up], [down], None, None, gate_up.shape, down.shape, act.words())
    assert y.dtype == h.dtype and not y[..., inner:].any()
    return y[..., :inner].double()


def through_bias(act: Act, h: list[float], dtype: Any) -> Any:
    """The activation of one gate and up, which may be infinite or NaN: weights are zero, and h is the bias."""
    bias = torch.tensor(h, dtype=dtype)
    gate_up, down = torch.zeros(len(h), 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    x = torch.zeros(1, 1, dtype=dtype)
    return ops.mlp(x, [gate_up], [down], bias, None, gate_up.shape, down.shape, act.words())[0].double()


def assert_holds(want: Range, got: Any, h: Any) -> None:
    wrong = (~want.holds(got)).nonzero()[:3].tolist()
    what = [(h[tuple(i[:-1])].tolist(), got[tuple(i)].item(), want.middle[tuple(i)].item()) for i in wrong]
    assert not wrong, f"h, got, expected: {what}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTS)
def test_formula(name: str, dtype: str) -> None:
    """Numbers of several magnitudes around 1, of both signs. In bf16 and f16 almost all ranges are single
    numbers."""
    act, kind = ACTS[name], DTYPES[dtype]
    inner = 12
    h = numbers((120, act.width(inner)), 3, torch.float32)
    h = (h * torch.exp2(torch.arange(120) % 9 - 4.0)[:, None]).to(kind)
    want = activate(act, exactly(h.double()), kind)
    assert_holds(want, seen(act, h), h)
    if dtype != "f32":
        assert (want.low < want.high).double().mean() < (
            0.05 if "gelu" in name else 0.01
        )  # which is soon all but 0


def every_gate(dtype: Any) -> Any:
    """All bf16 or f16 numbers of moderate magnitude; for float32, those and their neighbours."""
    bits = torch.arange(0, 2**15, 1 if dtype is torch.float16 else 7, dtype=torch.int32)
    if dtype is torch.float32:
        found = torch.cat([((bits << 16) + offset).view(torch.float32) for offset in (0, 1, 0x5555)])
    else:
        found = bits.to(torch.int16).view(dtype)
    found = found[found.isfinite() & (found.abs() < 1e4)]
    return torch.cat([found, -found])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTS)
def test_all_gates(name: str, dtype: str) -> None:
    """Gates from the smallest subnormal to where the function is 0 or x; up is near 1."""
    act, kind = ACTS[name], DTYPES[dtype]
    g = every_gate(kind)
    g = g[g.abs() < 128] if name.startswith("relu2") else g  # their squares do not overflow f16
    h = g[:, None] if not act.is_gated else torch.stack([g, (1 + torch.arange(len(g)) % 5 / 4).to(kind)], -1)
    assert_holds(activate(act, exactly(h.double()), kind), seen(act, h), h)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu2", "relu2_no_mul"])
def test_ranges_are_single_numbers_without_exponentials(name: str, dtype: str) -> None:
    act, kind = ACTS[name], DTYPES[dtype]
    h = numbers((50, act.width(12)), 4, kind, 3.0)
    want = activate(act, exactly(h.double()), kind)
    assert torch.equal(want.low, want.high)
    assert torch.equal(seen(act, h), want.middle)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 7.0, -7.5, 88.0, -90.0, 200.0, -300.0, 60000.0, -60000.0, INF, -INF, NAN]
HUGE = [1e30, -1e30, 3e38, -3e38, 1e-42, -1e-42]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTS)
def test_extremes(name: str, dtype: str) -> None:
    """Every pair of extreme gates and ups. A limit does not remove a NaN of the formula."""
    act, kind = ACTS[name], DTYPES[dtype]
    line = SPECIAL if dtype == "f16" else SPECIAL + HUGE
    found = [[g] for g in line] if not act.is_gated else [list(pair) for pair in itertools.product(line, line)]
    h = torch.tensor(found, dtype=kind)
    got = torch.stack([through_bias(act, pair, kind) for pair in found])
    assert_holds(activate(act, exactly(h.double()), kind), got, h)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_an_infinity_that_is_read(name: str) -> None:
    """x is infinite, and gate and up are both x."""
    one = torch.ones(1, 1)
    x = torch.tensor([[INF], [NAN], [2.0]])
    y = ops.mlp(x, [torch.ones(2, 1)], [one], None, None, [2, 1], [1, 1], f"act={name}")
    assert y[0, 0] == INF and y[1, 0].isnan() and y[2, 0].isfinite()


def test_interleaved_and_packed_order() -> None:
    h = numbers((6, 16), 5)
    pairs = torch.cat([h[:, ::2], h[:, 1::2]], -1)
    one, other = ACTS["swiglu_oai"], ACTS["swiglu_oai_packed"]
    assert torch.equal(seen(one, h), seen(other, pairs))
    assert not torch.equal(seen(one, h), seen(other, h))


@pytest.mark.parametrize("name", ["swiglu_oai", "swiglu_oai_packed", "silu_clamp"])
def test_default_parameters(name: str) -> None:
    h = numbers((40, 16), 6, size=6.0)
    if name == "silu_clamp":
        least, whole = Act(name, limit=2.0), Act(name, limit=2.0, alpha=1.0, beta=0.0)
    else:
        least, whole = Act(name), Act(name, limit=7.0, alpha=1.702, beta=1.0)
    assert torch.equal(seen(least, h), seen(whole, h))


def test_a_huge_limit_has_no_effect() -> None:
    h = numbers((40, 16), 7, torch.bfloat16, 4.0)
    far = [Act("silu_clamp", limit=1e30), Act("silu_step", limit=1e30)]
    assert all(torch.equal(seen(ACTS["silu"], h), seen(act, h)) for act in far)


def test_the_ranges_distinguish_activations() -> None:
    """Another activation of the same form is outside the range, so these tests can fail."""
    h = numbers((40, 24), 8, torch.bfloat16, 3.0)
    for one, other in itertools.permutations(ACTS.values(), 2):
        if one.is_gated == other.is_gated:
            wrong = activate(other, exactly(h.double()), torch.bfloat16)
            assert (~wrong.holds(seen(one, h))).double().mean() > 0.02, (one, other)
