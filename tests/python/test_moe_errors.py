"""Errors of mlp and moe through the bridge. tests/c/test_experts_errors.c and test_experts_plan.c test all
errors of the library."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import need
from experts_calls import BF16, alone, call
from experts_reference import Options, ops

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


def ids_with(value: int, dtype: Any = torch.int64) -> Any:
    ids = arguments()["topk_ids"].to(dtype)
    ids[4, 1] = value
    return ids


def refused(text: str, **changed: Any) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)^opaq: moe: .*({text})"):
        ops.moe(**arguments(**changed))


def test_the_call_is_valid() -> None:
    assert ops.moe(**arguments()).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids(dtype: Any) -> None:
    refused("6 at token 4, choice 1, expected 0 to 4", topk_ids=ids_with(6, dtype))


def test_large_ids_do_not_wrap() -> None:
    refused(str(2**32 + 1), topk_ids=ids_with(2**32 + 1))


def wrong_tensors() -> dict[str, tuple[dict[str, Any], str]]:
    """Tensors with wrong dtypes, sizes or numbers of buffers."""
    right = arguments()
    x, weights, ids = (right[key] for key in ("hidden_states", "topk_weights", "topk_ids"))
    return {
        "hidden": ({"hidden_states": x[:, :47]}, "47 features"),
        "a number": ({"hidden_states": x[0, 0]}, "hidden_states"),
        "hidden dtype": ({"hidden_states": x.double()}, "hidden_states"),
        "hidden integers": ({"hidden_states": x.long()}, "hidden_states.*int64"),
        "ids as floats": ({"topk_ids": ids.float()}, "topk_ids.*f32"),
        "ids as shorts": ({"topk_ids": ids.short()}, "topk_ids"),
        "weights as integers": ({"topk_weights": ids}, "topk_weights.*int64"),
        "weights as doubles": ({"topk_weights": weights.double()}, "topk_weights"),
        "bias of another half": ({"down_bias": right["down_bias"].half()}, "down_bias.*f16"),
        "buffers missing": ({"gate_up": right["gate_up"][:2]}, "gate_up.*2.*3"),
        "no buffers": ({"down": []}, "down"),
        "shape": ({"gate_up_shape": [64, 48]}, "gate_up"),
        "plan": ({"plan": "act=swish"}, '"act=swish".*silu'),
        "scale": ({"input_scale": torch.ones(1)}, "input_scale"),
    }


@pytest.mark.parametrize("what", wrong_tensors())
def test_wrong_tensors(what: str) -> None:
    changed, text = wrong_tensors()[what]
    refused(text, **changed)


def test_mlp() -> None:
    """The same messages with its own name."""
    made = alone(48, 32, 7, "nvfp4", BF16, Options(), True)
    s = made.stored
    shapes = s.gate_up_shape, s.down_shape
    assert ops.mlp(made.x, s.gate_up, s.down, *s.biases, *shapes, made.plan).isfinite().all()
    with pytest.raises(RuntimeError, match="(?s)^opaq: mlp: .*47 features"):
        ops.mlp(made.x[:, :47], s.gate_up, s.down, *s.biases, *shapes, made.plan)
