"""mlp and moe against a loop over experts, with error bounds, on every device; and on the CPU against the
definition bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from conftest import need
from experts_calls import BF16, Call, alone, call
from experts_reference import ACTS, Act, Options, Stored, Weights, defined_moe, ops, stored
from torch_cases import DTYPES, same_bytes

torch = need("torch")

# Quantizers of a stack of weights; "" is plain.
FORMATS = ("", "nvfp4", "nvfp4+rowscaled", "mxfp8", "mxfp4", "fp8row", "fp8blk2", "nvfp4+2d", "mxfp8+swizzle")
# Quantizers of the inputs of the two products.
ACTIVATIONS = ("", "nvfp4", "nvfp4+rowscaled", "mxfp8", "mxfp4", "fp8", "fp8row", "fp8blk1", "mxfp8.e5m2")


def right(made: Call) -> bool:
    """Whether the result is within its error bound; asserts that wrong results are clearly outside."""
    off = made.expected().off(made.mlp() if made.ids is None else made.moe())
    assert off <= 1 or off > 2, f"{off}: between 1 and 2, so neither correct nor clearly wrong"
    return off <= 1


# ------------------------------------------------------------------------------------------ against the loop


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTS)
def test_every_activation(name: str, dtype: str, device: str) -> None:
    for quantized in ("", "mxfp8"):
        options = Options(ACTS[name], x=quantized, h=quantized)
        assert right(call(dtype=DTYPES[dtype], options=options, text=quantized, device=device))
        assert right(alone(40, 24, 7, quantized, DTYPES[dtype], options, bias=True, device=device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("text", FORMATS)
def test_every_format(text: str, activation: str, device: str) -> None:
    """An expert has a multiple of 128 rows, so that no block of fp8blk2 belongs to two experts."""
    for dtype in (BF16, torch.float32):
        options = Options(x=activation, h=activation)
        assert right(call(9, 3, 2, 128, 64, text=text, dtype=dtype, options=options, device=device))
        assert right(alone(128, 64, 5, text, dtype, options, bias=False, device=device))


@pytest.mark.parametrize("which", ["x", "h"])
@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "fp8row"])
def test_only_one_input_quantized(text: str, which: str, device: str) -> None:
    assert right(call(text=text, options=replace(Options(), **{which: text}), device=device))
    assert right(call(options=replace(Options(), **{which: text}), device=device))


def test_the_two_weights_may_differ(device: str) -> None:
    """Also one may be quantized and the other plain."""
    one, other, plain = (call(text=text, device=device) for text in ("mxfp8", "nvfp4", ""))
    for first, second in ((one, other), (plain, one), (other, plain)):
        a, b = first.stored, second.stored
        words = [word for word in a.words.split() if word.startswith("gate_up")]
        words += [word for word in b.words.split() if word.startswith("down")]
        mixed = replace(
            a, down=b.down, words=" ".join(words), reference=Weights(a.reference.gate_up, b.reference.down)
        )
        assert right(replace(first, stored=mixed))


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4+2d", "nvfp4+rowscaled", "mxfp8", "mxfp4", "fp8", "fp8blk2"])
def test_weights_quantized_in_the_operator(text: str) -> None:
    """Each expert's weight is quantized separately; the bits equal those with weights quantized before."""
    plain = call(options=Options(x="mxfp8", h="mxfp8"))
    plain.stored.gate_up[0] *= torch.exp2(3.0 * torch.arange(5))[:, None, None].bfloat16()  # experts differ
    weights = plain.stored.gate_up, plain.stored.down
    back = [torch.stack([dequantized(matrix, text) for matrix in w]) for (w,) in weights]
    before = replace(plain, stored=replace(plain.stored, gate_up=[back[0]], down=[back[1]]))
    here = replace(plain, stored=replace(plain.stored, words=f"w={text}"))
    assert same_bytes(here.moe(), before.moe()) and not same_bytes(here.moe(), plain.moe())
    one = alone(48, 32, 9, "", BF16, plain.options, True)
    back = [dequantized(w, text) for (w,) in (one.stored.gate_up, one.stored.down)]
    before = replace(one, stored=replace(one.stored, gate_up=[back[0]], down=[back[1]]))
    assert same_bytes(replace(one, stored=replace(one.stored, words=f"w={text}")).mlp(), before.mlp())


def dequantized(matrix: Any, text: str) -> Any:
    return ops.dequantize(ops.quantize(matrix, text), text, matrix.shape, torch.float32)


@pytest.mark.parametrize("text", ["", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("k", [1, 2, 8])
def test_top_k(k: int, ids: Any, text: str, device: str) -> None:
    made = call(17, 11, k, text=text, ids=ids, device=device)
    assert right(made)
    other = replace(made, ids=made.ids.to(torch.int64 if ids is torch.int32 else torch.int32))
    assert same_bytes(made.moe(), other.moe())


@pytest.mark.parametrize("text", ["", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3])
def test_weights_on_the_input(k: int, dtype: str, text: str, device: str) -> None:
    made = call(
        19, k=k, dtype=DTYPES[dtype], text=text, options=Options(on_input=True, x=text, h=text), device=device
    )
    assert right(made)
    after = replace(made, options=replace(made.options, on_input=False))
    assert made.expected().off(after.moe()) > 2


@pytest.mark.parametrize("name", ["silu", "swiglu_oai", "relu2_no_mul"])
@pytest.mark.parametrize("text", ["", "mxfp4"])
def test_biases(text: str, name: str, device: str) -> None:
    """The router weight multiplies the bias too, on the input or after."""
    for on_input in (False, True):
        made = call(text=text, bias=True, options=Options(ACTS[name], on_input=on_input), device=device)
        assert right(made)
        for missing in (0, 1):
            biases = [None if i == missing else b for i, b in enumerate(made.stored.biases)]
            less = replace(made, stored=replace(made.stored, biases=(biases[0], biases[1])))
            assert made.expected().off(less.moe()) > 2
            key = ("gate_up_bias", "down_bias")[missing]
            reference = replace(made.stored.reference, **{key: None})
            assert right(replace(less, stored=replace(less.stored, reference=reference)))


@pytest.mark.parametrize("tokens", [1, 3000])
@pytest.mark.parametrize("text", ["", "nvfp4", "mxfp8"])
def test_one_token_and_thousands(text: str, tokens: int, device: str) -> None:
    """Most experts get hundreds of rows or none."""
    assert right(call(tokens, 16, 2, 32, 16, text=text, options=Options(x=text, h=text), device=device))


@pytest.mark.parametrize("hidden, inner", [(1, 1), (37, 19), (300, 5), (16, 270)])
@pytest.mark.parametrize("text", ["", "nvfp4", "mxfp8", "fp8row"])
def test_ragged_sizes(text: str, hidden: int, inner: int, device: str) -> None:
    assert right(call(6, 3, 2, hidden, inner, text=text, options=Options(x=text, h=text), device=device))


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 4), (0,), (2, 0)], ids=str)
def test_ranks(shape: tuple[int, ...], device: str) -> None:
    """Leading sizes are rows; the router's tensors have the same leading sizes, or one for all rows."""
    count = int(torch.tensor(shape).prod())
    made = call(count, k=3, text="mxfp8", options=Options(x="mxfp8", h="mxfp8"), device=device)
    got = made.moe()
    deep = replace(made, x=made.x.reshape(*shape, 48))
    assert same_bytes(deep.moe(), got.reshape(deep.x.shape)) and right(deep)
    every = replace(deep, weights=made.weights.reshape(*shape, 3), ids=made.ids.reshape(*shape, 3))
    assert same_bytes(every.moe(), got.reshape(deep.x.shape))


def test_mlp_of_any_rank(device: str) -> None:
    made = alone(40, 24, 12, "nvfp4", BF16, Options(), True, device=device)
    for shape in ((3, 4), (2, 1, 6), (12,)):
        deep = replace(made, x=made.x.reshape(*shape, -1))
        assert right(deep) and same_bytes(deep.mlp(), made.mlp().reshape(deep.x.shape))
    single = replace(made, x=made.x[0])
    assert same_bytes(single.mlp(), made.mlp()[0])


def padded(t: Any) -> Any:
    """The same values with gaps between the rows."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 5, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def test_strided_inputs() -> None:
    """Rows with gaps, and every second row: the same bits."""
    made = call(16, text="mxfp8", bias=True)
    want = made.moe()
    for x in (padded(made.x), made.x.repeat_interleave(2, 0)[::2]):
        assert not x.is_contiguous() and same_bytes(replace(made, x=x).moe(), want)
    assert same_bytes(replace(made, x=padded(made.x).unflatten(0, (4, 4))).moe(), want.unflatten(0, (4, 4)))
    assert same_bytes(replace(made, weights=padded(made.weights), ids=padded(made.ids)).moe(), want)
    one = alone(40, 24, 12, "mxfp8", BF16, Options(), True)
    assert same_bytes(replace(one, x=padded(one.x)).mlp(), one.mlp())


def test_strided_weights() -> None:
    made = call(bias=True)
    a, b = ([padded(w)] for (w,) in (made.stored.gate_up, made.stored.down))
    assert same_bytes(replace(made, stored=replace(made.stored, gate_up=a, down=b)).moe(), made.moe())


# ------------------------------------------------------------------------------------------------- routings


def routed(ids: Any, experts: int = 5, **more: Any) -> Call:
    made = call(len(ids), experts, ids.shape[1], **more)
    return replace(made, ids=ids)


HOSTILE = {
    "all to one": torch.full((30, 2), 3),
    "all to the last": torch.full((30, 1), 4),
    "each its own": torch.arange(30).reshape(30, 1) % 5,
    "repeated": torch.tensor([[2, 2, 2], [1, 3, 1], [0, 0, 4], [4, 4, 4]] * 5),
    "descending": torch.tensor([[4, 3, 2, 1, 0]] * 9),
    "none": torch.full((7, 2), -1),
    "one of many": torch.where(torch.arange(60).reshape(20, 3) == 31, 2, -1),
}


@pytest.mark.parametrize("text", ["", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_routings(what: str, text: str, device: str) -> None:
    for on_input in (False, True):
        made = routed(
            HOSTILE[what], text=text, options=Options(x=text, h=text, on_input=on_input), device=device
        )
        assert right(made)


@pytest.mark.parametrize("absent", [-1, 5])
@pytest.mark.parametrize("text", ["", "nvfp4"])
def test_absent_ids(text: str, absent: int, device: str) -> None:
    """-1 and the number of experts mean no expert: the router weight is ignored."""
    made = call(20, 5, 3, text=text, options=Options(x=text, h=text), device=device)
    made.ids[::2, 1] = absent
    made.ids[4] = absent
    made.weights[::2, 1] = float("nan")
    clean = made.weights.nan_to_num(0)
    assert replace(made, weights=clean).expected().off(made.moe()) <= 1
    assert not made.moe()[4].any()
    assert same_bytes(made.moe(), replace(made, weights=clean).moe())


def test_all_ids_absent(device: str) -> None:
    made = routed(torch.tensor([[-1, 5], [5, 5]]), bias=True, device=device)
    got = made.moe()
    assert not got.any() and not torch.signbit(got).any()


def test_no_slots_and_no_experts(device: str) -> None:
    """The result is zero."""
    made = call(6, device=device)
    assert not replace(made, weights=made.weights[:, :0], ids=made.ids[:, :0]).moe().any()
    a, b = ([w[:0]] for (w,) in (made.stored.gate_up, made.stored.down))
    none = replace(made.stored, gate_up=a, down=b, gate_up_shape=[0, 64, 48], down_shape=[0, 48, 32])
    assert not replace(made, stored=none, options=Options(total=5, first=4)).moe().any()


@pytest.mark.parametrize("text", ["", "nvfp4", "nvfp4+rowscaled", "mxfp4", "fp8row"])
def test_slices_sum_to_the_whole(text: str) -> None:
    """Each slice against the loop over its experts, and their sum within one rounding for each slice."""
    whole = call(24, 8, 3, text=text, dtype=torch.float32, bias=True, options=Options(x=text, h=text))
    total = torch.zeros_like(whole.x)
    plain = stored(8, 48, 32, whole.options.act, dtype=torch.float32, bias=True, seed=1)
    for first, count in ((0, 3), (3, 1), (4, 4)):
        part = slice_of(whole, plain, first, count, text)
        assert right(part)
        total += part.moe()
    want = whole.expected()
    want.error += 4 * 2.0**-24 * want.exact.abs()
    if text == "nvfp4":  # a slice has another amax
        assert (total - whole.moe()).norm() < 0.2 * whole.moe().norm()
    else:
        assert want.off(total) <= 1


def slice_of(whole: Call, plain: Stored, first: int, count: int, text: str) -> Call:
    """The call of a process that has and quantizes only these experts."""
    some = slice(first, first + count)
    parts, back = [], []
    for (w,) in (plain.gate_up, plain.down):
        own = w[some].contiguous()
        parts.append(ops.quantize(own, text) if text else [own])
        back.append(ops.dequantize(parts[-1], text, own.shape, torch.float32) if text else own)
    biases = [b[some] for b in plain.biases]
    reference = Weights(*(t.double() for t in (*back, *biases)))
    made = replace(
        plain,
        gate_up=parts[0],
        down=parts[1],
        gate_up_shape=[count, *plain.gate_up_shape[1:]],
        down_shape=[count, *plain.down_shape[1:]],
        words=whole.stored.words,
        reference=reference,
        biases=(biases[0], biases[1]),
    )
    return replace(whole, stored=made, options=replace(whole.options, total=8, first=first))


def test_a_slice_ignores_other_experts(device: str) -> None:
    """Experts of other slices, -1, and the total number of experts are absent."""
    made = call(20, 3, 4, text="mxfp8", options=Options(total=9, first=4), device=device)
    generator = torch.Generator().manual_seed(5)
    made.ids = torch.randint(-1, 10, (20, 4), generator=generator)
    assert right(made)
    made.ids = torch.where((made.ids >= 4) & (made.ids < 7), 9, made.ids)
    assert not made.moe().any()


def test_the_order_of_slots_does_not_matter(device: str) -> None:
    """Experts are summed in ascending order, so slots of different experts may be exchanged."""
    made = call(20, 9, 5, text="mxfp8", dtype=torch.float32, device=device)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    other = replace(made, weights=made.weights[:, order], ids=made.ids[:, order])
    assert same_bytes(made.moe(), other.moe())


def test_repeated_ids_add_up(device: str) -> None:
    made = routed(torch.full((6, 2), 1), dtype=torch.float32, device=device)
    once = replace(made, ids=made.ids[:, :1], weights=made.weights.sum(1, keepdim=True))
    torch.testing.assert_close(made.moe(), once.moe())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_router_weights_of_other_dtypes(dtype: str) -> None:
    """They are converted to float32."""
    made = call(dtype=DTYPES[dtype])
    short = replace(made, weights=made.weights.to(DTYPES[dtype]))
    assert same_bytes(short.moe(), replace(made, weights=short.weights.float()).moe())


# ------------------------------------------------------------------------------------------------- given scales


@pytest.mark.parametrize("text", ["fp8+delayed", "nvfp4"])
def test_given_scales(text: str, device: str) -> None:
    """Scales of calibrated activations; each affects its own operand."""
    scales = {"input_scale": torch.tensor([24.0]), "hidden_scale": torch.tensor([12.0])}
    made = call(options=Options(x=text, h=text), device=device)
    made = replace(made, **scales)
    assert right(made)
    for name in scales:
        other = replace(made, **{name: scales[name] * 1.4})
        assert right(other) and not same_bytes(other.moe(), made.moe())
    one = replace(alone(48, 32, 9, "mxfp8", BF16, made.options, True, device=device), **scales)
    assert right(one)
    each = {name: scale * torch.exp2(torch.arange(5) - 2.0) for name, scale in scales.items()}
    assert right(replace(made, **each))  # one for each expert


def test_an_expert_s_rows_are_quantized_separately(device: str) -> None:
    """Quantizers with one scale per tensor use the rows of one expert: a large token of another expert has no
    effect."""
    options = Options(x="nvfp4", h="nvfp4")
    made = routed(torch.arange(10).reshape(10, 1) % 5, text="nvfp4", options=options, device=device)
    large = replace(made, x=made.x.clone())
    large.x[3] *= 1000
    mine = [i for i in range(10) if i % 5 == 3]
    others = [i for i in range(10) if i % 5 != 3]
    assert right(large) and same_bytes(large.moe()[others], made.moe()[others])
    assert not same_bytes(large.moe()[mine[1:]], made.moe()[mine[1:]])


# ----------------------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["", "nvfp4", "mxfp8", "fp8row", "mxfp4"])
def test_the_definition_bit_for_bit(text: str, dtype: str) -> None:
    """Sums in the order of docs/linear.md, experts ascending, one rounding at the end."""
    for name in ("relu2", "relu2_no_mul"):
        for on_input, hidden, inner in ((False, 40, 300), (True, 300, 24)):
            options = Options(Act(name), x=text, h=text, on_input=on_input)
            made = call(11, 4, 3, hidden, inner, text=text, dtype=DTYPES[dtype], bias=True, options=options)
            made.ids[3], made.ids[5] = 2, torch.tensor([1, -1, 1])
            want = defined_moe(made.x, made.weights, made.ids, made.stored.reference, options)
            assert same_bytes(made.moe(), want)


@pytest.mark.parametrize("text", ["", "nvfp4", "fp8blk2"])
def test_threads_and_repetition(text: str) -> None:
    before, results = torch.get_num_threads(), []
    made = call(200, 7, 3, 128, 64, text=text, bias=True, options=Options(x=text and "nvfp4", h=text and "fp8"))
    one = alone(256, 128, 70, text, BF16, Options(), bias=True)
    try:
        for threads in (1, 2, 2, 1):
            torch.set_num_threads(threads)
            results.append((made.moe(), one.mlp()))
    finally:
        torch.set_num_threads(before)
    assert all(same_bytes(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_several_callers_at_once() -> None:
    made = [call(40, seed=seed, text="nvfp4", options=Options(x="nvfp4", h="mxfp8")) for seed in range(4)]
    want = [one.moe() for one in made]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(same_bytes(a, b) for a, b in zip(pool.map(Call.moe, made), want, strict=True))


def test_flushing_denormals_does_not_change_a_bit() -> None:
    """x is small and the weights are large: flushed numbers would be missing from the result."""
    made = call(9, dtype=torch.float32)
    made.x.mul_(1e-40)
    made.stored.gate_up[0].mul_(1e38)
    want = made.moe()
    assert want.abs().max() > 1e-4
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        got = made.moe()
    finally:
        torch.set_flush_denormal(False)
    assert same_bytes(got, want)


def test_a_token_does_not_depend_on_the_batch(device: str) -> None:
    """With quantizers that have scales per row."""
    for text in ("", "mxfp8", "fp8row"):
        made = call(12, text=text, options=Options(x=text, h=text), device=device)
        want = made.moe()
        for row in (0, 5, 11):
            own = slice(row, row + 1)
            single = replace(made, x=made.x[own], weights=made.weights[own], ids=made.ids[own])
            assert same_bytes(single.moe(), want[own])


def test_arguments_are_not_changed() -> None:
    made = call(text="nvfp4", bias=True, options=Options(x="nvfp4", h="nvfp4"))
    tensors = [made.x, made.weights, made.ids, *made.stored.gate_up, *made.stored.down, *made.stored.biases]
    before = [t.clone() for t in tensors]
    made.moe()
    assert all(same_bytes(a, b) for a, b in zip(before, tensors, strict=True))


# -------------------------------------------------------------------------------------- the bound, and specials


@pytest.mark.parametrize("text", ["", "mxfp8", "nvfp4"])
def test_the_bound_detects_errors(text: str) -> None:
    """With another expert, weight, activation, format or quantizer the result is far outside the bound."""
    made = call(text=text, options=Options(x=text, h=text))
    got, options = made.moe(), made.options
    weight = "mxfp4" if text != "mxfp4" else "fp8row"
    others = {
        "expert": replace(made, ids=(made.ids + 1) % 5),
        "weight": replace(made, weights=made.weights * 1.05),
        "activation": replace(made, options=replace(options, act=ACTS["gelu"])),
        "x": replace(made, options=replace(options, x=weight)),
        "h": replace(made, options=replace(options, h=weight)),
        "w": replace(made, stored=stored(5, 48, 32, options.act, text=weight, dtype=BF16, seed=1)),
    }
    for what, other in others.items():
        assert other.expected().off(got) > 4, what


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_special_values_do_not_spread(special: float) -> None:
    for text in ("", "mxfp8"):
        made = call(14, text=text, options=Options(x=text, h=text))
        want = made.moe()
        made.x[3] = special
        got = made.moe()
        others = [i for i in range(14) if i != 3]
        assert same_bytes(got[others], want[others])
        if not text or special != special:
            assert not got[3].isfinite().any()
    made = call(14)
    made.weights[5, 1] = float("nan")
    assert made.moe()[5].isnan().all() and made.moe().isnan().any(1).sum() == 1
