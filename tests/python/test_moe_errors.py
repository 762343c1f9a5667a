"""Errors of moe through the bridge. tests/c/test_experts_errors.c and test_experts_plan.c test all errors of
the library."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import need
from experts_calls import call
from experts_reference import ops

torch = need("torch")


def arguments(**changed: Any) -> dict[str, Any]:
    """Arguments of a valid call: 7 tokens of 48, 5 experts with an inner size of 32, nvfp4."""
    made = call(7, text="nvfp4", bias=True)
    s = made.stored
    right = {
        "hidden_states": made.x,
        "topk_weights": made.weights,
        "topk_ids": made.ids,
        "gate_up": s.gate_up,
        "down": s.down,
        "gate_up_bias": s.biases[0],
        "down_bias": s.biases[1],
        "gate_up_shape": s.gate_up_shape,
        "down_shape": s.down_shape,
        "plan": made.plan,
        "input_scale": None,
        "hidden_scale": None,
    }
    assert not set(changed) - set(right)
    return {**right, **changed}


def test_the_call_is_valid() -> None:
    assert ops.moe(**arguments()).isfinite().all()


def wrong() -> dict[str, tuple[dict[str, Any], str]]:
    """Arguments whose way through the bridge differs: 64-bit integers, a dtype that the library has no number
    for, lists of tensors, lists of sizes, texts."""
    right = arguments()
    ids = right["topk_ids"]
    large = ids.clone()
    large[4, 1] = 2**32 + 1
    return {
        "ids": ({"topk_ids": large}, f"{2**32 + 1} at token 4, choice 1, expected 0 to 4"),
        "dtype": ({"topk_ids": ids.short()}, "topk_ids holds another dtype"),
        "buffers": ({"gate_up": right["gate_up"][:2]}, "gate_up.*2.*3"),
        "sizes": ({"gate_up_shape": [64, 48]}, "gate_up"),
        "text": ({"plan": "act=swish"}, '"act=swish".*silu'),
    }


@pytest.mark.parametrize("what", wrong())
def test_errors(what: str) -> None:
    changed, text = wrong()[what]
    with pytest.raises(RuntimeError, match=f"(?s)^opaq: moe: .*({text})"):
        ops.moe(**arguments(**changed))
