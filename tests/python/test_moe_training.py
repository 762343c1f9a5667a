"""Gradients of mlp, moe and grouped_linear against autograd on a loop over experts, under every recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import experts_gradients as reference
import opaq
from compiling import compiled, fail_on_recompile, fresh_compiler  # noqa: F401
from conftest import need
from experts_gradients import Texts, cosine, leaves, moved, relative_error
from experts_reference import ACTS, Act, numbers, routing
from opaq.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from torch_cases import DTYPES, same_bytes

torch = need("torch")

from opaq import functional  # noqa: E402
from opaq._operators import ops  # noqa: E402

BF16 = torch.bfloat16
ALL = "xrgdbc"  # hidden states, router weights, gate_up, down and their biases
RECIPES: dict[str, Any] = {
    "none": None,
    "current": Float8CurrentScaling(),
    "current pow2": Float8CurrentScaling(use_power_2_scales=True),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 no rht": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 rowscaled": NVFP4BlockScaling(disable_stochastic_rounding=True, row_scaled_activation=True),
    "custom": CustomRecipe(lambda role: {"input": "fp8row", "weight": "mxfp8"}.get(role.tensor_type)),
}
OVERRIDES = {
    f"{name} {override}": made
    for override in ("high_precision", "dequantized")
    for name, made in {
        "current": Float8CurrentScaling(backward_override=override),
        "block": Float8BlockScaling(backward_override=override),
        "mxfp8": MXFP8BlockScaling(backward_override=override),
        "nvfp4": NVFP4BlockScaling(backward_override=override),
    }.items()
}
EVERY = {**RECIPES, **OVERRIDES}
STOCHASTIC = NVFP4BlockScaling()


@dataclass
class Mixture:
    """Tensors of a mixture on the CPU, keyed by the letters of their gradients; of an MLP if there are no ids.
    opaq computes on `device`; its results are on the CPU again."""

    tensors: dict[str, Any]
    ids: Any
    act: Act
    dy: Any
    device: str = "cpu"

    def run(self, recipe: Any = None, wanted: str = ALL, wrap: Any = None, **more: Any) -> dict[str, Any]:
        """y and the gradients, by opaq."""
        t = leaves(moved(self.tensors, self.device), wanted)
        numbers = {"limit": self.act.limit, "alpha": self.act.alpha, "beta": self.act.beta}
        options = {"activation": self.act.name, **numbers, "recipe": recipe, **more}
        weights = t["g"], t["d"], t["b"], t["c"]
        if self.ids is None:
            y = (wrap or functional.mlp)(t["x"], *weights, **options)
        else:
            y = (wrap or functional.moe)(t["x"], t["r"], self.ids.to(self.device), *weights, **options)
        return moved(collect(y, self.dy.to(self.device), t), "cpu")

    def expected(self, recipe: Any = None, stochastic: bool = True, **more: Any) -> dict[str, Any]:
        """The same, by autograd in float64."""
        t, texts = leaves(self.tensors, ALL, torch.float64), Texts.of(recipe, stochastic)
        weights = t["g"], t["d"], t["b"], t["c"], self.act, texts
        if self.ids is None:
            y = reference.mlp(t["x"], *weights)
        else:
            y = reference.moe(t["x"], t["r"], self.ids, *weights, **more)
        return collect(y, self.dy.double(), t)


def collect(y: Any, dy: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    y.backward(dy)
    return {"y": y.detach(), **{name: t.grad for name, t in tensors.items() if t is not None}}


def mixture(
    tokens: int = 24,
    experts: int = 4,
    k: int = 2,
    hidden: int = 48,
    inner: int = 32,
    act: str = "silu",
    dtype: Any = torch.float32,
    bias: bool = True,
    seed: int = 1,
    device: str = "cpu",
) -> Mixture:
    weights, ids = routing(tokens, k, experts, seed)
    one = ACTS[act]
    width = one.width(inner)
    tensors = {
        "x": numbers((tokens, hidden), seed, dtype),
        "r": weights,
        "g": numbers((experts, width, hidden), seed + 1, dtype, hidden**-0.5),
        "d": numbers((experts, hidden, inner), seed + 2, dtype, inner**-0.5),
        "b": numbers((experts, width), seed + 3, dtype, 0.3) if bias else None,
        "c": numbers((experts, hidden), seed + 4, dtype, 0.3) if bias else None,
    }
    return Mixture(tensors, ids, one, numbers((tokens, hidden), seed + 5, dtype), device)


def alone(**options: Any) -> Mixture:
    """An MLP: one expert, for all rows."""
    made = mixture(experts=1, k=1, **options)
    first = {name: None if t is None else t[0] for name, t in made.tensors.items() if name in "gdbc"}
    return Mixture({"x": made.tensors["x"], **first}, None, made.act, made.dy, made.device)


def allowed(recipe: Any, dtype: Any = torch.float32) -> float:
    """The error limit. float32: rounding errors and rare different codes. bf16: roundings between products."""
    if dtype is not torch.float32:
        return 0.03
    return 2e-6 if recipe is None else 1e-3


def assert_near(got: dict[str, Any], want: dict[str, Any], limit: float) -> None:
    distances = {name: relative_error(got[name], tensor) for name, tensor in want.items()}
    assert all(tensor.dtype == got["y"].dtype or name == "r" for name, tensor in got.items())
    assert all(distance <= limit for distance in distances.values()), distances


# -------------------------------------------------------------------------------------------- against autograd


@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act: str, device: str) -> None:
    for made in (mixture(act=act, device=device), alone(act=act, device=device)):
        assert_near(made.run(), made.expected(), allowed(None))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("act", ["silu", "swiglu_oai", "gelu_tanh_no_mul"])
def test_other_dtypes(act: str, dtype: str, device: str) -> None:
    for make in (mixture, alone):
        made = make(act=act, dtype=DTYPES[dtype], device=device)
        assert_near(made.run(), made.expected(), allowed(None, DTYPES[dtype]))


@pytest.mark.parametrize("name", EVERY)
def test_every_recipe(name: str, device: str) -> None:
    recipe = EVERY[name]
    for made in (
        mixture(40, 3, act="silu", device=device),
        alone(tokens=33, act="gelu_no_mul", device=device),
        mixture(act="swiglu_oai", device=device),
    ):
        assert_near(made.run(recipe), made.expected(recipe), allowed(recipe))


@pytest.mark.parametrize("name", [name for name, recipe in EVERY.items() if recipe is not None])
def test_the_limit_distinguishes_recipes(name: str) -> None:
    """With another recipe every gradient that depends on its quantizers is far outside the limit."""
    made, recipe = mixture(40, 3), EVERY[name]
    got = made.run(recipe)
    other = made.expected(CustomRecipe(lambda role: "mxfp4"))
    assert all(
        relative_error(got[key], other[key]) > 0.02 for key in got if key not in "c"
    )  # the gradient of c only sums dy


@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8", "nvfp4"])
def test_bf16_under_a_recipe(name: str, device: str) -> None:
    made = mixture(64, 3, dtype=BF16, device=device)
    got, want = made.run(RECIPES[name]), made.expected(RECIPES[name])
    assert all(cosine(got[key], want[key]) > (0.98 if name == "nvfp4" else 0.998) for key in want)


@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_options_of_the_mixture(name: str, device: str) -> None:
    """Weights on the input; a slice; absent ids; repeated ones; experts without tokens; one token; ranks."""
    recipe = RECIPES[name]
    made = mixture(30, 4, 3, device=device)
    made.ids[::3, 1] = -1
    made.ids[4], made.ids[9] = 4, 2
    made.ids[made.ids == 0] = 3
    limit = allowed(recipe)
    assert_near(made.run(recipe), made.expected(recipe), limit)
    assert_near(made.run(recipe, weights_on_input=True), made.expected(recipe, on_input=True), limit)
    part = mixture(30, 3, 3, device=device)
    part.ids = torch.randint(-1, 9, (30, 3), generator=torch.Generator().manual_seed(2))
    got = part.run(recipe, num_experts=8, first_expert=2)
    assert_near(got, part.expected(recipe, first=2), limit)
    assert not got["r"][(part.ids < 2) | (part.ids > 4)].any()
    single = mixture(1, 4, 2, device=device)
    got = single.run(recipe)
    assert_near(got, single.expected(recipe), limit)
    idle = [e for e in range(4) if e not in single.ids]
    assert idle and not any(got[key][idle].any() for key in "gdbc")


def test_no_token_has_an_expert(device: str) -> None:
    made = mixture(6, device=device)
    made.ids[:] = -1
    assert not any(tensor.any() for tensor in made.run().values())
    none = mixture(0, device=device)
    got = none.run()
    assert got["x"].shape == (0, 48) and not any(got[key].any() for key in "gdbc")


@pytest.mark.parametrize("k", [1, 8])
def test_top_k(k: int, device: str) -> None:
    made = mixture(20, 9, k, device=device)
    assert_near(made.run(), made.expected(), allowed(None))
    made.ids = made.ids.int()
    assert_near(made.run(), made.expected(), allowed(None))


def test_ranks_and_strides() -> None:
    """[batch, tokens, hidden], not contiguous; and the gradient of a sum, which has strides of 0."""
    flat, deep = mixture(24), mixture(24)
    t = {name: None if x is None else x.clone().requires_grad_() for name, x in deep.tensors.items()}
    x = t["x"].detach().reshape(4, 6, 48).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    shape = 4, 6, 2
    weights = t["g"], t["d"], t["b"], t["c"]
    y = functional.moe(x, t["r"].reshape(shape), deep.ids.reshape(shape), *weights)
    assert not x.is_contiguous() and y.shape == x.shape
    y.sum().backward()
    flat.dy = torch.ones(24, 48)
    want = flat.run()
    got = {"y": y.reshape(24, 48), **{name: tensor.grad for name, tensor in t.items()}}
    got["x"] = x.grad.reshape(24, 48)
    assert all(same_bytes(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", RECIPES)
def test_leading_sizes_are_rows(name: str, device: str) -> None:
    """The bits do not depend on the rank."""
    for made in (mixture(24, device=device), alone(tokens=24, device=device)):
        want = made.run(RECIPES[name])
        made.tensors["x"], made.dy = (t.reshape(2, 3, 4, 48) for t in (made.tensors["x"], made.dy))
        got = made.run(RECIPES[name])
        assert got["x"].shape == (2, 3, 4, 48)
        assert all(same_bytes(got[key].reshape(want[key].shape), want[key]) for key in want)
    tensors, splits, dy = grouped([10, 2, 12])
    want = run_grouped(tensors, splits, dy, RECIPES[name], device=device)
    tensors["x"] = tensors["x"].reshape(2, 3, 4, 48)
    got = run_grouped(tensors, splits, dy.reshape(2, 3, 4, 40), RECIPES[name], device=device)
    assert all(same_bytes(got[key].reshape(want[key].shape), want[key]) for key in want)


def test_no_rows(device: str) -> None:
    for recipe in (None, RECIPES["mxfp8"], RECIPES["nvfp4"]):
        got = alone(tokens=0, device=device).run(recipe)
        assert not any(got[key].any() for key in "xgdbc")
        got = run_grouped(*grouped([0, 0]), recipe, device=device)
        assert not any(got[key].any() for key in "xwb")


def test_clamped_numbers_have_no_gradient() -> None:
    """Gradients are zero beyond the limit, but not at the limit, as with PyTorch's clamp."""
    one = torch.eye(2)
    for act, h, want in (
        ("silu_clamp", [3.0, 1.0], [0.0, 1.0]),
        ("silu_clamp", [1.0, 3.0], [1.0, 0.0]),
        ("silu_clamp", [1.0, -3.0], [1.0, 0.0]),
        ("silu_clamp", [2.0, -2.0], [1.0, 1.0]),
        ("silu_step", [30.0, 1.0], [0.0, 1.0]),
        ("silu_step", [1.0, -3.0], [1.0, 0.0]),
        ("swiglu_oai", [2.0, 2.0], [1.0, 1.0]),
        ("swiglu_oai", [-9.0, 1.0], [1.0, 1.0]),
        ("swiglu_oai_packed", [2.5, 1.0], [0.0, 1.0]),
    ):
        x = torch.tensor([h], requires_grad=True)
        functional.mlp(x, one, torch.ones(2, 1), activation=act, limit=2.0).sum().backward()
        assert ((x.grad[0] != 0).float() == torch.tensor(want)).all(), (act, h, x.grad)


# ---------------------------------------------------------------------------------------- subsets of gradients


@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4", "current high_precision"])
def test_only_the_requested_gradients(name: str, device: str) -> None:
    """A gradient does not depend on which others are computed."""
    made, recipe = mixture(device=device), EVERY[name]
    every = made.run(recipe)
    for wanted in ("x", "r", "g", "d", "b", "c", "xr", "gd", "xbc"):
        some = made.run(recipe, wanted)
        for key, tensor in some.items():
            assert same_bytes(tensor, every[key]) if key in wanted + "y" else tensor is None, (wanted, key)
    one = alone(device=device)
    every = one.run(recipe)
    for wanted in ("x", "g", "dc"):
        some = one.run(recipe, wanted)
        assert all(same_bytes(some[key], every[key]) for key in wanted)
        assert all(some[key] is None for key in "xgdbc" if key not in wanted)


@pytest.mark.parametrize("name", ["none", "mxfp8", "block"])
def test_the_forward_is_that_of_inference(name: str) -> None:
    for made in (mixture(dtype=BF16), alone(dtype=BF16)):
        recipe = RECIPES[name]
        trained = made.run(recipe)["y"]
        t = made.tensors
        weights = t["g"], t["d"], t["b"], t["c"]
        with torch.no_grad():
            if made.ids is None:
                y = functional.mlp(t["x"], *weights, recipe=recipe)
            else:
                y = functional.moe(t["x"], t["r"], made.ids, *weights, recipe=recipe)
        assert same_bytes(trained, y) and not y.requires_grad


def test_without_biases(device: str) -> None:
    for made in (mixture(bias=False, device=device), alone(bias=False, device=device)):
        assert_near(made.run(), made.expected(), allowed(None))


def test_an_autocast_is_the_same_as_a_recipe() -> None:
    made = mixture(dtype=BF16)
    want = made.run(RECIPES["mxfp8"])
    with opaq.autocast(recipe=RECIPES["mxfp8"]):
        got = made.run()
    assert all(same_bytes(got[key], want[key]) for key in want)


def test_delayed_scaling_is_refused() -> None:
    made = mixture()
    with pytest.raises(NotImplementedError, match="(?i)delayed"):
        made.run(DelayedScaling())


# ------------------------------------------------------------------------------------------- quantized weights


@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "fp8row"])
def test_gradients_through_quantized_weights(text: str) -> None:
    """Gradients of x, router weights and biases equal those with the dequantized weights."""
    for made in (mixture(), alone()):
        packed = {key: opaq.quantize_tensor(made.tensors[key], text) for key in "gd"}
        plain = Mixture({**made.tensors, **{k: t.dequantize() for k, t in packed.items()}}, *vars_of(made))
        want = plain.expected()
        t = leaves({k: v for k, v in made.tensors.items() if k not in "gd"}, ALL)
        weights = packed["g"], packed["d"], t["b"], t["c"]
        if made.ids is None:
            y = functional.mlp(t["x"], *weights)
        else:
            y = functional.moe(t["x"], t["r"], made.ids, *weights)
        got = collect(y, made.dy, t)
        assert_near(got, {key: want[key] for key in got}, allowed(None))


def vars_of(made: Mixture) -> tuple[Any, ...]:
    return made.ids, made.act, made.dy


# ---------------------------------------------------------------------------------------- stochastic rounding


def test_stochastic_rounding_follows_the_seed(device: str) -> None:
    made = mixture(device=device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(made.run(STOCHASTIC))
    first, again, other = results
    assert all(same_bytes(first[key], again[key]) for key in first)
    assert same_bytes(first["y"], other["y"])
    assert all(not same_bytes(first[key], other[key]) for key in "xgd")


def test_stochastic_rounding_in_direction_and_on_average() -> None:
    """Each run's gradient has a high cosine to the exact one; the mean of many runs is closer to it."""
    made, runs = mixture(40, 3), 48
    torch.manual_seed(3)
    exact = made.expected()
    found = [made.run(STOCHASTIC) for _ in range(runs)]
    texts = Texts.of(STOCHASTIC)
    unrounded = CustomRecipe(lambda role: {"input": texts.x, "weight": texts.w}.get(role.tensor_type))
    want = made.expected(unrounded)
    for key in "xgd":
        assert cosine(found[0][key], exact[key]) > 0.93
        mean = torch.stack([one[key] for one in found]).double().mean(0)
        assert relative_error(mean, want[key]) < 0.5 * relative_error(found[0][key], want[key])


# ------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8", "nvfp4", "mxfp8 dequantized"])
def test_compiled_equals_eager(name: str, device: str) -> None:
    for make, function in ((mixture, functional.moe), (alone, functional.mlp)):
        made = make(dtype=BF16, device=device)
        want = made.run(EVERY[name])
        got = made.run(EVERY[name], wrap=compiled(function))
        assert all(same_bytes(got[key], want[key]) for key in want)


def test_compiled_equals_eager_with_random_numbers() -> None:
    made, results = mixture(dtype=BF16), []
    for wrap in (None, compiled(functional.moe, backend="aot_eager_decomp_partition")):
        torch.manual_seed(5)
        results.append(made.run(STOCHASTIC, wrap=wrap))
    assert all(same_bytes(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4"])
def test_dynamic_tokens_never_recompile(name: str) -> None:
    function = compiled(functional.moe, dynamic=True)
    mixture(24).run(EVERY[name], wrap=function)
    for tokens in (5, 100, 33):
        made = mixture(tokens)
        with fail_on_recompile():
            got = made.run(EVERY[name], wrap=function)
        want = made.run(EVERY[name])
        assert all(same_bytes(got[key], want[key]) for key in want)


@pytest.mark.parametrize("recipe", [RECIPES["mxfp8"], STOCHASTIC], ids=["mxfp8", "nvfp4"])
def test_checkpointed_equals_not(recipe: Any, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    def through(*arguments: Any, **options: Any) -> Any:
        return checkpoint(functional.moe, *arguments, use_reentrant=False, **options)

    made, results = mixture(dtype=BF16, device=device), []
    for wrap in (None, through):
        torch.manual_seed(5)
        results.append(made.run(recipe, wrap=wrap))
    assert all(same_bytes(results[0][key], results[1][key]) for key in results[0])


def test_threads_do_not_change_a_bit() -> None:
    before, results = torch.get_num_threads(), []
    made = mixture(150, 5, 2, 96, 64, dtype=BF16)
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            results.append(made.run(RECIPES["nvfp4"]))
    finally:
        torch.set_num_threads(before)
    assert all(same_bytes(results[0][key], other[key]) for other in results[1:] for key in other)


# --------------------------------------------------------------------------------------------- grouped_linear


def grouped(splits: list[int], dtype: Any = torch.float32) -> tuple[dict[str, Any], Any, Any]:
    rows, experts = sum(splits), len(splits)
    tensors = {
        "x": numbers((rows, 48), 1, dtype),
        "w": numbers((experts, 40, 48), 2, dtype, 0.2),
        "b": numbers((experts, 40), 3, dtype),
    }
    return tensors, torch.tensor(splits), numbers((rows, 40), 4, dtype)


def run_grouped(
    tensors: dict[str, Any],
    splits: Any,
    dy: Any,
    recipe: Any = None,
    wanted: str = "xwb",
    wrap: Any = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """On `device`; the results are on the CPU."""
    t = leaves(moved(tensors, device), wanted)
    y = (wrap or functional.grouped_linear)(t["x"], splits.to(device), t["w"], t["b"], recipe=recipe)
    return moved(collect(y, dy.to(device), t), "cpu")


def expected_grouped(tensors: dict[str, Any], splits: Any, dy: Any, recipe: Any = None) -> dict[str, Any]:
    t = leaves(tensors, "xwb", torch.float64)
    return collect(
        reference.grouped_linear(*(t["x"], splits, t["w"], t["b"], Texts.of(recipe))), dy.double(), t
    )


@pytest.mark.parametrize("splits", [[10, 7, 20], [0, 5, 0, 33], [1], [16, 16], [0, 0, 9]], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_grouped_linear(name: str, splits: list[int], device: str) -> None:
    made = grouped(splits)
    assert_near(
        run_grouped(*made, EVERY[name], device=device),
        expected_grouped(*made, EVERY[name]),
        allowed(EVERY[name]),
    )


def test_grouped_linear_variants() -> None:
    """Without a bias, with some gradients only, in bf16, with quantized weights, compiled with any number of
    rows."""
    tensors, splits, dy = grouped([10, 7, 20])
    every = run_grouped(tensors, splits, dy, RECIPES["mxfp8"])
    for wanted in ("x", "w", "b", "xb"):
        some = run_grouped(tensors, splits, dy, RECIPES["mxfp8"], wanted)
        assert all(same_bytes(some[key], every[key]) for key in wanted)
        assert all(some[key] is None for key in "xwb" if key not in wanted)
    less = {**tensors, "b": None}
    assert_near(run_grouped(less, splits, dy), expected_grouped(less, splits, dy), allowed(None))
    short = grouped([10, 7, 20], BF16)
    assert_near(run_grouped(*short), expected_grouped(*short), allowed(None, BF16))
    packed = opaq.quantize_tensor(tensors["w"], "nvfp4")
    x = tensors["x"].clone().requires_grad_()
    got = collect(functional.grouped_linear(x, splits, packed, tensors["b"]), dy, {"x": x})
    want = expected_grouped({**tensors, "w": packed.dequantize()}, splits, dy)
    assert_near(got, {key: want[key] for key in got}, allowed(None))
    function = compiled(functional.grouped_linear, dynamic=True)
    run_grouped(tensors, splits, dy, RECIPES["mxfp8"], wrap=function)
    for other in ([4, 2, 3], [0, 50, 1]):
        made = grouped(other)
        with fail_on_recompile():
            got = run_grouped(*made, RECIPES["mxfp8"], wrap=function)
        want = run_grouped(*made, RECIPES["mxfp8"])
        assert all(same_bytes(got[key], want[key]) for key in want)


def test_grouped_linear_is_a_linear_for_each() -> None:
    """The same bits as opaq.functional.linear with the rows and the weight of each group."""
    for name in ("none", "mxfp8", "nvfp4", "block"):
        tensors, splits, dy = grouped([10, 7, 20], BF16)
        got = run_grouped(tensors, splits, dy, RECIPES[name])
        begin = 0
        for number, rows in enumerate(splits.tolist()):
            own = slice(begin, begin + rows)
            mine = {"x": tensors["x"][own], "w": tensors["w"][number], "b": tensors["b"][number]}
            t = leaves(mine, "xwb")
            with opaq.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
                one = collect(functional.linear(t["x"], t["w"], t["b"]), dy[own], t)
            assert same_bytes(got["y"][own], one["y"]) and same_bytes(got["x"][own], one["x"])
            assert same_bytes(got["w"][number], one["w"]) and same_bytes(got["b"][number], one["b"])
            begin += rows


@pytest.mark.parametrize(
    "splits, text",
    [
        (torch.tensor([10, 7, 19]), "36.*37|37.*36"),
        (torch.tensor([10, 7, 21]), "38.*37|37.*38|21"),
        (torch.tensor([30, -10, 17]), "-10"),
        (torch.tensor([30, 7]), "2.*3|3.*2"),
        (torch.tensor([10.0, 7.0, 20.0]), "f32"),
        (torch.tensor([2**62, 2**62, 2**62]), "37|46116"),
    ],
    ids=str,
)
def test_wrong_splits(splits: Any, text: str) -> None:
    tensors, _, dy = grouped([10, 7, 20])
    with pytest.raises(ValueError, match=f"^opaq.functional.grouped_linear: .*({text})"):
        run_grouped(tensors, splits, dy)


# --------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("plan", ["act=silu", "act=gelu_no_mul x=mxfp8 h=mxfp8 w=mxfp8 dy=mxfp8"])
def test_opcheck(plan: str) -> None:
    """The operators below: forward with h, and backward."""
    act = plan.split()[0].removeprefix("act=")
    made, one = mixture(act=act, dtype=BF16), alone(act=act, dtype=BF16)
    t = made.tensors
    shapes = t["g"].shape, t["d"].shape
    forward = (t["x"], t["r"], made.ids, [t["g"]], [t["d"]], t["b"], t["c"], *shapes, f"{plan} grad={ALL}")
    torch.library.opcheck(ops.moe_forward.default, forward)
    _, h = ops.moe_forward(*forward)
    backward = (made.dy, t["x"], t["r"], made.ids, h, [t["g"]], [t["d"]], t["c"], *shapes, BF16)
    for grad in (ALL, "x", "gd"):
        torch.library.opcheck(ops.moe_backward.default, (*backward, f"{plan} grad={grad}"))
    t = one.tensors
    shapes = t["g"].shape, t["d"].shape
    both = (t["x"], [t["g"]], [t["d"]], t["b"], t["c"], *shapes, f"{plan} grad=xgdbc")
    torch.library.opcheck(ops.mlp_forward.default, both)
    _, h = ops.mlp_forward(*both)
    mlp_backward = (one.dy, t["x"], h, [t["g"]], [t["d"]], *shapes, BF16, f"{plan} grad=xgdbc")
    torch.library.opcheck(ops.mlp_backward.default, mlp_backward)


def test_opcheck_of_grouped_linear() -> None:
    tensors, splits, dy = grouped([10, 7, 20], BF16)
    w = tensors["w"]
    for plan in ("grad=xwb", "x=mxfp8 w=mxfp8 dy=mxfp8 grad=xwb"):
        torch.library.opcheck(
            ops.grouped_linear.default, (tensors["x"], splits, [w], tensors["b"], w.shape, plan)
        )
        torch.library.opcheck(
            ops.grouped_linear_backward.default, (dy, tensors["x"], splits, [w], w.shape, BF16, plan)
        )
    torch.library.opcheck(ops.random_state.default, (dy,))
