"""What mlp and moe refuse: a sentence with the operation, what was expected and what there was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conftest import need
from experts_calls import BF16, alone, call
from experts_reference import Act, Options, numbers, ops, routing

torch = need("torch")


def arguments(**changed: Any) -> dict[str, Any]:
    """Those of a call that is right: 7 tokens of 48, 5 experts with an inner size of 32, nvfp4."""
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


def plan_with(words: str, without: str = "none such") -> str:
    kept = [w for w in arguments()["plan"].split() if not w.startswith(without)]
    return " ".join([*kept, *words.split()])


def ids_with(value: int, dtype: Any = torch.int64) -> Any:
    ids = arguments()["topk_ids"].to(dtype)
    ids[4, 1] = value
    return ids


def refused(text: str, **changed: Any) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)^opaq: moe: .*({text})"):
        ops.moe(**arguments(**changed))


def test_the_call_itself_is_right() -> None:
    assert ops.moe(**arguments()).isfinite().all()


# ------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", [-2, 6, 1000, -(2**31), 2**31 - 1])
def test_ids_out_of_range(value: int, dtype: Any) -> None:
    refused(f"{value}.*5|5.*{value}", topk_ids=ids_with(value, dtype))


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 2**32 + 1, 2**32 - 1, -(2**32)])
def test_large_ids_do_not_wrap(value: int) -> None:
    refused(str(value), topk_ids=ids_with(value))


def test_ids_out_of_range_of_a_slice() -> None:
    plan = plan_with("experts=9 first=2")
    assert ops.moe(**arguments(topk_ids=ids_with(8), plan=plan)).isfinite().all()
    assert ops.moe(**arguments(topk_ids=ids_with(9), plan=plan)).isfinite().all()
    refused("10.*9|9.*10", topk_ids=ids_with(10), plan=plan)
    last = plan_with("first=2")  # without a total it is the last slice
    assert ops.moe(**arguments(topk_ids=ids_with(7), plan=last)).isfinite().all()
    refused("8.*7|7.*8", topk_ids=ids_with(8), plan=last)


def test_a_wrong_id_in_the_middle_of_thousands() -> None:
    weights, ids = routing(3000, 2, 5, 1)
    ids[2222, 1] = 77
    refused("77", hidden_states=numbers((3000, 48), 1, BF16), topk_weights=weights, topk_ids=ids)


# ------------------------------------------------------------------------------------------- shapes and dtypes


def wrong_tensors() -> dict[str, tuple[dict[str, Any], str]]:
    right = arguments()
    x, weights, ids = (right[key] for key in ("hidden_states", "topk_weights", "topk_ids"))
    gate_up, down = right["gate_up_bias"], right["down_bias"]
    plain = arguments(**plain_weights())
    return {
        "hidden": ({"hidden_states": x[:, :47]}, "47.*48|48.*47"),
        "a number": ({"hidden_states": x[0, 0]}, "hidden_states"),
        "tokens": ({"hidden_states": x[:6]}, "6|7"),
        "rows of ids": ({"topk_ids": ids[:6]}, "topk_"),
        "rows of weights": ({"topk_weights": weights[:6]}, "topk_"),
        "slots": ({"topk_ids": ids[:, :1]}, "topk_"),
        "no slots": ({"topk_ids": ids[:, 0], "topk_weights": weights[:, 0]}, "topk_"),
        "gate_up bias": ({"gate_up_bias": gate_up[:, :63]}, "gate_up_bias.*63"),
        "gate_up bias of four": ({"gate_up_bias": gate_up[:4]}, "gate_up_bias.*4"),
        "down bias": ({"down_bias": down[:, :47]}, "down_bias.*47"),
        "down bias of two dimensions fewer": ({"down_bias": down.reshape(-1)}, "down_bias.*240"),
        "gate_up shape": ({"gate_up_shape": [5, 64, 47]}, "47"),
        "experts differ": ({"gate_up_shape": [4, 64, 48]}, "4"),
        "an odd inner size": ({"gate_up_shape": [5, 63, 48]}, "63"),
        "down shape": ({"down_shape": [5, 48, 31]}, "31"),
        "down rows": ({"down_shape": [5, 47, 32]}, "47"),
        "two dimensions": ({"gate_up_shape": [64, 48]}, "gate_up|64"),
        "four dimensions": ({"down_shape": [1, 5, 48, 32]}, "down|1,5"),
        "plain of another shape": ({**plain, "gate_up": [plain["gate_up"][0][:, :60]]}, "60"),
        "hidden dtype": ({"hidden_states": x.double()}, "hidden_states"),
        "hidden integers": ({"hidden_states": x.long()}, "hidden_states.*int64"),
        "ids as floats": ({"topk_ids": ids.float()}, "topk_ids.*f32"),
        "ids as bytes": ({"topk_ids": ids.to(torch.uint8)}, "topk_ids"),
        "ids as shorts": ({"topk_ids": ids.short()}, "topk_ids"),
        "weights as integers": ({"topk_weights": ids}, "topk_weights.*int64"),
        "weights as doubles": ({"topk_weights": weights.double()}, "topk_weights"),
        "bias dtype": ({"gate_up_bias": gate_up.double()}, "gate_up_bias"),
        "bias of another half": ({"down_bias": down.half()}, "down_bias.*f16"),
        "plain of another half": ({**plain, "down": [plain["down"][0].half()]}, "down.*f16"),
        "buffers missing": ({"gate_up": right["gate_up"][:2]}, "gate_up.*2.*3"),
        "no buffers": ({"down": []}, "down"),
        "buffers of another dtype": ({"down": [t.to(torch.int64) for t in right["down"]]}, "down"),
        "a buffer of another shape": ({"gate_up": [right["gate_up"][0][:4], *right["gate_up"][1:]]}, "gate_up"),
    }


def plain_weights() -> dict[str, Any]:
    made = call(7, bias=True)
    return {"gate_up": made.stored.gate_up, "down": made.stored.down, "plan": made.plan}


@pytest.mark.parametrize("what", wrong_tensors())
def test_wrong_tensors(what: str) -> None:
    changed, text = wrong_tensors()[what]
    refused(text, **changed)


def test_rows_per_expert_that_share_a_block() -> None:
    """fp8blk2 has a scale for 128 rows: one that lies in two experts is not read."""
    made = call(7, 3, 2, 48, 40, text="fp8blk2")
    with pytest.raises(RuntimeError, match="opaq: moe: (gate_up has 80|down has 48) rows for each expert"):
        made.moe()


# --------------------------------------------------------------------------------------------------- the plan

WORDS = {
    "unknown": ("quick", "none", '"quick"'),
    "unknown key": ("y=mxfp8", "none", '"y=mxfp8"'),
    "twice": ("act=silu", "none", '"act=silu"'),
    "activation": ("act=swish", "act=", '"act=swish".*silu'),
    "no name": ("act=", "act=", "act"),
    "limit": ("limit=much", "none", '"limit=much"'),
    "negative limit": ("limit=-1", "none", "limit"),
    "limit of a function that has none": ("act=gelu limit=3", "act=", "limit"),
    "alpha of a function that has none": ("alpha=2", "none", "alpha"),
    "not a number": ("act=silu_clamp limit=nan", "act=", "limit"),
    "spec": ("x=nvfp5", "none", '"nvfp5"'),
    "spec of a weight": ("gate_up_given=nvfp5", "gate_up_given", '"nvfp5"'),
    "quantized and given": ("w=nvfp4", "none", "w="),
    "a slice beyond the total": ("experts=6 first=2", "none", "6"),
    "a total below": ("experts=4", "none", "4"),
    "negative first": ("experts=9 first=-1", "none", "first"),
    "total is no number": ("experts=many", "none", '"experts=many"'),
    "weights": ("weights=twice", "none", '"weights=twice"'),
}


@pytest.mark.parametrize("what", WORDS)
def test_wrong_words(what: str) -> None:
    more, without, text = WORDS[what]
    refused(text, plan=plan_with(more, without))


def test_a_limit_that_is_missing() -> None:
    """Only swiglu_oai has one by itself."""
    for name in ("silu_clamp", "silu_step"):
        refused("limit", plan=plan_with(f"act={name}", "act="))


def test_an_activation_of_the_other_form() -> None:
    """Without a gate the inner size is all of gate_up's rows."""
    refused("64.*32|32.*64", plan=plan_with("act=silu_no_mul", "act="))
    made = call(7, options=Options(Act("silu_no_mul")))
    with pytest.raises(RuntimeError, match="opaq: moe: .*(32|16)"):
        replace(made, options=Options(Act("silu"))).moe()


# ----------------------------------------------------------------------------------------------------- scales


def wrong_scales() -> dict[str, tuple[str, str, Any, str]]:
    one = torch.ones(1)
    return {
        "input missing": ("x=fp8+delayed", "input_scale", None, "input_scale"),
        "hidden missing": ("h=fp8+delayed", "hidden_scale", None, "hidden_scale"),
        "input for none": ("", "input_scale", one, "input_scale"),
        "hidden for none": ("x=fp8", "hidden_scale", one, "hidden_scale"),
        "input of two": ("x=fp8+delayed", "input_scale", torch.ones(2), "input_scale.*2"),
        "hidden of two": ("h=nvfp4", "hidden_scale", torch.ones(2), "hidden_scale.*2"),
        "input as doubles": ("x=nvfp4", "input_scale", one.double(), "input_scale"),
        "for rows": ("x=nvfp4+rowscaled", "input_scale", one, "input_scale"),
        "for blocks": ("h=mxfp8", "hidden_scale", one, "hidden_scale"),
    }


@pytest.mark.parametrize("what", wrong_scales())
def test_scales(what: str) -> None:
    words, key, tensor, text = wrong_scales()[what]
    refused(text, plan=plan_with(words), **{key: tensor})


# -------------------------------------------------------------------------------------------------------- mlp


def test_mlp() -> None:
    """The same sentences under its own name, and none of the words that only a mixture has."""
    made = alone(48, 32, 7, "nvfp4", BF16, Options(), True)
    s = made.stored
    shapes = s.gate_up_shape, s.down_shape
    calls = {
        "47.*48|48.*47": (made.x[:, :47], s.gate_up, s.down, *s.biases, *shapes, made.plan),
        "gate_up_bias.*63": (made.x, s.gate_up, s.down, s.biases[0][:63], s.biases[1], *shapes, made.plan),
        "31": (made.x, s.gate_up, s.down, *s.biases, shapes[0], [48, 31], made.plan),
        "gate_up": (made.x, s.gate_up[:1], s.down, *s.biases, *shapes, made.plan),
        "swish": (made.x, s.gate_up, s.down, *s.biases, *shapes, "act=swish"),
        "experts": (made.x, s.gate_up, s.down, *s.biases, *shapes, made.plan + " experts=4 first=0"),
        "weights": (made.x, s.gate_up, s.down, *s.biases, *shapes, made.plan + " weights=input"),
        "input_scale": (made.x, s.gate_up, s.down, *s.biases, *shapes, made.plan + " x=fp8+delayed"),
        "int64": (made.x.long(), s.gate_up, s.down, *s.biases, *shapes, made.plan),
    }
    assert ops.mlp(made.x, s.gate_up, s.down, *s.biases, *shapes, made.plan).isfinite().all()
    for text, given in calls.items():
        with pytest.raises(RuntimeError, match=f"(?s)^opaq: mlp: .*({text})"):
            ops.mlp(*given)
