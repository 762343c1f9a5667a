"""Batch invariance: a row of a result has the same bits alone, in every batch and at every address. The tests
run on the CPU too; sizes for which a GPU has other kernels are skipped there."""

from __future__ import annotations

from typing import Any

import pytest

import opaq
from conftest import need
from test_gpu import BF16, EXPERTS, F32, HIDDEN, INNER, experts, near, need_gpu, numbers, ops
from torch_cases import quantized, same_bytes

torch = need("torch")

from opaq import functional  # noqa: E402
from opaq._operators import result_places  # noqa: E402

ROWS = (1, 3, 8, 17, 64, 129, 513)
INVARIANT = (
    "",
    "x=mxfp8 w=mxfp8",
    "x=fp8row w=fp8row",
    "x=fp8blk1 w=fp8blk2",
    "x=nvfp4+rowscaled w=nvfp4",
    "w=mxfp4",
)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_a_row_does_not_depend_on_the_others(dtype: Any, device: str) -> None:
    x, w = numbers((ROWS[-1], 160), 16, device, dtype), numbers((72, 160), 17, device, dtype)
    given = {
        f"w_given={text}": quantized(text, (72, 160), device, dtype).buffers() for text in ("nvfp4", "mxfp8")
    }
    for plan in (*INVARIANT, *given):
        whole = ops.linear(x, given.get(plan, [w]), None, w.shape, plan)
        for rows in ROWS[:-1]:
            assert same_bytes(ops.linear(x[:rows], given.get(plan, [w]), None, w.shape, plan), whole[:rows]), (
                plan,
                rows,
            )


@pytest.mark.parametrize("columns, terms", [(1032, 4224), (4096, 2048), (520, 2880)], ids=str)
def test_a_row_of_a_large_product_does_not_depend_on_the_others(columns: int, terms: int, device: str) -> None:
    """Sizes for which a GPU has other kernels than for small ones; also near the product in float64."""
    need_gpu(device, 2 << 30)
    x, w = numbers((4096, terms), 18, device, BF16), numbers((columns, terms), 19, device, BF16)
    texts = ("nvfp4", "nvfp4+swizzle", "mxfp4", "mxfp8", "fp8", "fp8row", "fp8blk2")
    given = {f"w_given={text}": quantized(text, w.shape, device, BF16).buffers() for text in texts}
    scale = torch.tensor([64.0], device=device)
    for plan in (*INVARIANT, "x=fp8+delayed w=fp8", *given):
        weight, more = given.get(plan, [w]), [scale] if "delayed" in plan else []
        whole = ops.linear(x, weight, None, w.shape, plan, *more)
        for rows in (1, 2, 3, 8, 13, 16, 17, 24, 32, 48, 64, 129, 513, 2000):
            got = ops.linear(x[:rows], weight, None, w.shape, plan, *more)
            assert same_bytes(got, whole[:rows]), (plan, rows)
        if plan in given:
            back = ops.dequantize(weight, plan.removeprefix("w_given="), list(w.shape), F32)
            want = x[:257].double() @ back.double().T
            assert near(ops.linear(x[:257].clone(), weight, None, w.shape, plan), want, 3e-3), plan


def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    many = experts(ROWS[-1], device)
    whole = functional.moe(*many)
    for tokens in ROWS[:-1]:
        assert same_bytes(functional.moe(*(part[:tokens] for part in many[:3]), *many[3:]), whole[:tokens]), (
            tokens
        )


def test_a_row_does_not_depend_on_its_address(device: str) -> None:
    """Rows of a wider tensor, of which only some are at a multiple of 16 bytes; and whole batches."""
    wide = numbers((24, 164), 21, device, BF16)
    x, w = wide[:, :160], numbers((72, 160), 22, device, BF16)
    memory = torch.zeros(24 * 160 + 8, dtype=BF16, device=device)
    given = {
        f"w_given={text}": quantized(text, (72, 160), device, BF16).buffers() for text in ("nvfp4", "mxfp8")
    }
    for plan in (*INVARIANT, *given):
        weight = given.get(plan, [w])
        whole = ops.linear(x.contiguous(), weight, None, w.shape, plan)
        assert same_bytes(ops.linear(x, weight, None, w.shape, plan), whole), plan
        for row in range(8):
            assert same_bytes(
                ops.linear(x[row : row + 1], weight, None, w.shape, plan), whole[row : row + 1]
            ), (
                plan,
                row,
            )
        for offset in (1, 4):
            moved = memory[offset : offset + 24 * 160].view(24, 160)
            moved.copy_(x)
            assert same_bytes(ops.linear(moved, weight, None, w.shape, plan), whole), (plan, offset)


GRADIENTS = (
    "",
    "x=mxfp8 w=mxfp8 dy=mxfp8",
    "x=fp8row w=fp8row dy=fp8row",
    "x=fp8blk1 w=fp8blk2 dy=fp8blk1",
)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_a_row_of_an_input_gradient_does_not_depend_on_the_others(dtype: Any, device: str) -> None:
    x, w = numbers((ROWS[-1], 160), 23, device, dtype), numbers((72, 160), 24, device, dtype)
    dy = numbers((ROWS[-1], 72), 25, device, dtype)

    def gradient(plan: str, rows: int) -> Any:
        sizes, words = ([rows, 160], [72, 160]), f"{plan} grad=x".strip()
        made = ops.linear_forward([x[:rows]], [w], None, *sizes, dtype, words)
        _, kept_x, kept_w, _, _ = (made[begin:end] for begin, end in result_places("linear_forward", words))
        kept = kept_x or [x[:rows]], kept_w or [w]
        return ops.linear_backward([dy[:rows]], *kept, *sizes, dtype, dtype, words)[0]

    for plan in GRADIENTS:
        whole = gradient(plan, ROWS[-1])
        assert whole.shape == x.shape
        for rows in ROWS[:-1]:
            assert same_bytes(gradient(plan, rows), whole[:rows]), (plan, rows)


# ---------------------------------------------------------------------------------------------- experts

QUANTIZED_INPUTS = {"input_quantizer": "mxfp8", "hidden_quantizer": "mxfp8"}
STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}),
    "nvfp4": ("nvfp4", {}),
    "fp8row": ("fp8row", {}),
    "mxfp8 by mxfp8": ("mxfp8", QUANTIZED_INPUTS),
    "mxfp8 by mxfp4": ("mxfp4", QUANTIZED_INPUTS),
}


def expert_inputs(name: str, tokens: int, device: str) -> tuple[Any, ...]:
    """In bf16, with packed stacks, and the quantizers of the inputs."""
    x, weights, ids, *stacks = experts(tokens, device)
    text, inputs = STACKS[name]
    stacks = [stack.to(BF16) for stack in stacks]
    return x.to(BF16), weights, ids, *(opaq.quantize_tensor(w, text) if text else w for w in stacks), inputs


@pytest.mark.parametrize("name", STACKS)
def test_a_token_of_a_packed_mixture_does_not_depend_on_the_others(name: str, device: str) -> None:
    x, weights, ids, up, down, inputs = expert_inputs(name, ROWS[-1], device)
    whole = functional.moe(x, weights, ids, up, down, **inputs)
    assert whole.shape == x.shape and bool(whole.any())
    for tokens in ROWS[:-1]:
        got = functional.moe(x[:tokens], weights[:tokens], ids[:tokens], up, down, **inputs)
        assert same_bytes(got, whole[:tokens]), tokens


@pytest.mark.parametrize("name", STACKS)
def test_a_row_of_an_mlp_does_not_depend_on_the_others(name: str, device: str) -> None:
    x, _, _, up, down, inputs = expert_inputs(name, ROWS[-1], device)
    whole = functional.mlp(x, up[1], down[1], **inputs)
    for rows in ROWS[:-1]:
        assert same_bytes(functional.mlp(x[:rows], up[1], down[1], **inputs), whole[:rows]), rows


@pytest.mark.parametrize("name", ["plain", "nvfp4", "recipe"])
def test_a_row_of_a_group_does_not_depend_on_the_others(name: str, device: str) -> None:
    up = expert_inputs(name.replace("recipe", "plain"), 1, device)[3]
    recipe = opaq.recipe.MXFP8BlockScaling() if name == "recipe" else None
    most = 129
    x = numbers((EXPERTS, most, HIDDEN), 26, device, BF16)

    def result(rows: int) -> Any:
        splits = torch.full((EXPERTS,), rows, dtype=torch.int64, device=device)
        y = functional.grouped_linear(x[:, :rows].reshape(-1, HIDDEN), splits, up, recipe=recipe)
        return y.view(EXPERTS, rows, 2 * INNER)

    whole = result(most)
    for rows in (1, 3, 8, 17, 64):
        assert same_bytes(result(rows), whole[:, :rows].contiguous()), rows
