"""Recipes as values, and the quantizers that they select."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from opaq import OpaqError, Quantizer, _library, recipe
from opaq.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    LinearQuantizers,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
    default_recipe,
)


def by_name(role: QuantizerRole) -> Quantizer | str | None:
    """A factory that uses every field of the role."""
    assert role.module_type == "linear"
    if role.tensor_type in ("output", "grad_input"):
        return None
    if role.name == "head":
        return Quantizer("mxfp8+both")
    return "nvfp4+columnwise+2d" if role.tensor_type == "weight" else "nvfp4+sr"


RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
VALUES: list[Recipe] = [
    *(kind() for kind in RECIPES),
    DelayedScaling(margin=2, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent"),
    Float8CurrentScaling(True, backward_override="dequantized"),
    Float8CurrentScaling(fp8_quant_bwd_grad=QParams(amax_epsilon=1e-12, stochastic_rounding=True)),
    Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
    MXFP8BlockScaling(enable_2d_quantization=True, backward_override="high_precision"),
    NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
]

# --------------------------------------------------------------------------------- Transformer Engine's names

COMMON = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
GEMMS = {name: MMParams(True) for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")}
PARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
FIELDS: dict[type[Recipe], dict[str, object]] = {  # in the order of positional arguments
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        **COMMON,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        **GEMMS,
        "fp8_gemm_fprop": MMParams(False),
        **COMMON,
    },
    Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        **GEMMS,
        **COMMON,
    },
    MXFP8BlockScaling: {"margin": 0, "fp8_format": Format.E4M3, **COMMON, "enable_2d_quantization": False},
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        **COMMON,
    },
}


@pytest.mark.parametrize("kind", RECIPES)
def test_fields_and_defaults(kind: type[Recipe]) -> None:
    made: Any = kind()
    assert {name: getattr(made, name) for name in FIELDS[kind]} == FIELDS[kind]
    parameters = inspect.signature(kind).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == list(FIELDS[kind])
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert keywords == (list(PARAMS) if kind in (Float8CurrentScaling, Float8BlockScaling) else [])
    for name in keywords:
        assert getattr(made, name) == QParams(power_2_scale=kind is Float8BlockScaling)


def test_parts() -> None:
    assert [f.value for f in Format] == [(6, 6), (448, 448), (57344, 57344), (448, 57344)]
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert MMParams().use_split_accumulator
    assert QParams() == QParams(False, 0.0, False, False, False)
    assert QuantizerRole() == QuantizerRole(module_type="", tensor_type="", name="")
    assert default_recipe() == MXFP8BlockScaling()
    assert LinearQuantizers() == LinearQuantizers("", "", "", "", "", "")
    four = NVFP4BlockScaling()
    assert four.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert four.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert four.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)


def test_predicates_of_recipes() -> None:
    questions = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom")
    for index, made in enumerate([*(kind() for kind in RECIPES), CustomRecipe(by_name)]):
        answers = [getattr(made, question)() for question in questions]
        assert answers == [question == questions[index] for question in questions]
        assert made.float8_per_tensor_scaling() == (index < 2)


# ------------------------------------------------------------------------------------------------------ texts

TEXTS: list[tuple[Recipe, tuple[str, str, str, str, str]]] = [  # input, weight, grad_output, output, grad_input
    (
        DelayedScaling(),
        ("fp8+delayed", "fp8+delayed", "fp8.e5m2+delayed", "fp8+delayed", "fp8.e5m2+delayed"),
    ),
    (DelayedScaling(fp8_format=Format.E4M3), ("fp8+delayed",) * 5),
    (Float8CurrentScaling(), ("fp8", "fp8", "fp8.e5m2", "fp8", "fp8.e5m2")),
    (Float8CurrentScaling(True, Format.E4M3), ("fp8+pow2",) * 5),
    (
        Float8CurrentScaling(
            fp8_quant_fwd_inp=QParams(amax_epsilon=1e-12),
            fp8_quant_bwd_grad=QParams(power_2_scale=True, stochastic_rounding=True, amax_epsilon=2.5e10),
        ),
        ("fp8+eps=1e-12", "fp8", "fp8.e5m2+pow2+sr+eps=2.5e10", "fp8+eps=1e-12", "fp8.e5m2+pow2+eps=2.5e10"),
    ),
    (
        Float8BlockScaling(),
        ("fp8blk1+pow2", "fp8blk2+pow2", "fp8blk1+pow2", "fp8blk1+pow2", "fp8blk1+pow2"),
    ),
    (
        Float8BlockScaling(True, Format.HYBRID),
        ("fp8blk1", "fp8blk2", "fp8blk1.e5m2", "fp8blk1", "fp8blk1.e5m2"),
    ),
    (
        Float8BlockScaling(
            w_block_scaling_dim=1,
            x_block_scaling_dim=2,
            fp8_quant_fwd_weight=QParams(power_2_scale=True, amax_epsilon=1),
        ),
        ("fp8blk2+pow2", "fp8blk1+pow2+eps=1", "fp8blk1+pow2", "fp8blk2+pow2", "fp8blk1+pow2"),
    ),
    (MXFP8BlockScaling(), ("mxfp8",) * 5),
    (
        MXFP8BlockScaling(0, Format.HYBRID, enable_2d_quantization=True),
        ("mxfp8", "mxfp8+2d", "mxfp8.e5m2", "mxfp8", "mxfp8.e5m2"),
    ),
    (NVFP4BlockScaling(), ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr", "nvfp4", "nvfp4")),
    (NVFP4BlockScaling(True, True, True), ("nvfp4",) * 5),
    (NVFP4BlockScaling(True), ("nvfp4", "nvfp4+2d", "nvfp4+sr", "nvfp4", "nvfp4")),
    (
        NVFP4BlockScaling(row_scaled_activation=True, disable_stochastic_rounding=True),
        ("nvfp4+rht+rowscaled", "nvfp4+2d", "nvfp4+rht", "nvfp4", "nvfp4"),
    ),
    (
        NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE"),
        ("nvfp4+rht", "nvfp4+2d+4over6=mse", "nvfp4+rht+sr", "nvfp4", "nvfp4"),
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="activations", nvfp4_4over6_e4m3_use_256="weights"),
        ("nvfp4+4over6+e4m3max=448", "nvfp4+2d", "nvfp4+sr", "nvfp4", "nvfp4"),
    ),
    (
        NVFP4BlockScaling(
            disable_rht=True,
            row_scaled_activation=True,
            nvfp4_4over6="all",
            nvfp4_4over6_e4m3_use_256="activations",
        ),
        ("nvfp4+rowscaled+4over6", "nvfp4+2d+4over6+e4m3max=448", "nvfp4+sr", "nvfp4", "nvfp4"),
    ),
]


@pytest.mark.parametrize(("made", "texts"), TEXTS, ids=lambda value: type(value).__name__)
def test_quantizers_of_a_linear_layer(made: Recipe, texts: tuple[str, ...]) -> None:
    assert made.linear_quantizers() == made.linear_quantizers("name") == LinearQuantizers(*texts, "")
    for text in texts:
        assert str(Quantizer(text)) == text
        Quantizer(text).with_usage(columnwise=True)


def test_backward_override() -> None:
    for kind in RECIPES[1:]:
        for override in (None, "high_precision", "dequantized"):
            made: Any = kind(backward_override=override)  # type: ignore[call-arg]
            assert made.linear_quantizers().backward_override == (override or "")
    assert CustomRecipe(by_name, backward_override="dequantized").linear_quantizers().backward_override
    assert DelayedScaling().linear_quantizers().backward_override == ""


# ----------------------------------------------------------------------------------------------- CustomRecipe


def test_custom_recipe() -> None:
    made = CustomRecipe(by_name)
    assert (made.fp8_format, made.quantization_alignment) == (Format.HYBRID, 128)
    assert made.linear_quantizers("head") == LinearQuantizers("mxfp8", "mxfp8", "mxfp8", "", "", "")
    assert made.linear_quantizers() == LinearQuantizers("nvfp4+sr", "nvfp4+2d", "nvfp4+sr", "", "", "")
    assert made == CustomRecipe(by_name) and hash(made) == hash(CustomRecipe(by_name))
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            "fp8+both+delayed",
            "qfactory returned 'fp8.delayed' for 'input', but delayed scaling keeps a history",
        ),
        (Quantizer("fp8.e5m2+delayed"), "delayed scaling keeps a history that only the recipe DelayedScaling"),
        (7, "qfactory returned 7 for 'input', expected a Quantizer, a str or None"),
        ("nvfp4+rth", 'unknown option "rth"'),
    ],
)
def test_custom_recipe_with_a_wrong_factory(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CustomRecipe(lambda role: result).linear_quantizers()


# ----------------------------------------------------------------------------------------------- wrong values

WRONG: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (DelayedScaling, {"amax_history_len": 2000}, "is 2000, expected an int, from 1 to 1024"),
    (DelayedScaling, {"amax_history_len": 0}, "is 0, expected an int, from 1 to 1024"),
    (DelayedScaling, {"amax_history_len": 16.0}, "is 16.0, expected an int"),
    (DelayedScaling, {"amax_compute_algo": "mean"}, "is 'mean', expected 'max' or 'most_recent'"),
    (DelayedScaling, {"amax_compute_algo": max}, "a function as .* is not a plain value"),
    (DelayedScaling, {"scaling_factor_compute_algo": max}, "a function as .* is not a plain value"),
    (DelayedScaling, {"scaling_factor_compute_algo": 1}, "is 1, expected only None"),
    (DelayedScaling, {"margin": -1}, "is -1, expected an int, 0 or more"),
    (DelayedScaling, {"margin": True}, "is True, expected an int"),
    (DelayedScaling, {"reduce_amax": 1}, "is 1, expected a bool"),
    (DelayedScaling, {"backward_override": "dequantized"}, "is 'dequantized', expected only None"),
    (DelayedScaling, {"fp8_format": Format.E5M2}, "is Format.E5M2, expected Format.E4M3 or Format.HYBRID"),
    (DelayedScaling, {"fp8_format": "E4M3"}, "is 'E4M3', expected Format.E4M3 or Format.HYBRID"),
    (Float8CurrentScaling, {"use_power_2_scales": "yes"}, "is 'yes', expected a bool"),
    (Float8CurrentScaling, {"fp8_quant_fwd_inp": True}, "is True, expected a QParams"),
    (Float8CurrentScaling, {"fp8_gemm_dgrad": True}, "is True, expected an MMParams"),
    (Float8CurrentScaling, {"fp8_dpa": None}, "is None, expected a bool"),
    (
        Float8CurrentScaling,
        {"backward_override": ""},
        "is '', expected None, 'high_precision' or 'dequantized'",
    ),
    (Float8BlockScaling, {"x_block_scaling_dim": 3}, "is 3, expected an int, from 1 to 2"),
    (Float8BlockScaling, {"fp8_gemm_wgrad": MMParams(False)}, "expected a split accumulator"),
    (Float8BlockScaling, {"fp8_mha": True}, "is True, expected False: there is no attention"),
    (MXFP8BlockScaling, {"fp8_format": Format.E2M1}, "is Format.E2M1, expected Format.E4M3 or Format.HYBRID"),
    (MXFP8BlockScaling, {"enable_2d_quantization": 2}, "is 2, expected a bool"),
    (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, "is Format.E4M3, expected only Format.E2M1"),
    (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, "is Format.HYBRID, expected only Format.E4M3"),
    (NVFP4BlockScaling, {"nvfp4_4over6": True}, "expected 'none', 'weights', 'activations' or 'all'"),
    (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "mae"}, "is 'mae', expected 'MAE' or 'MSE'"),
    (NVFP4BlockScaling, {"disable_rht": 0}, "is 0, expected a bool"),
    (CustomRecipe, {"qfactory": "nvfp4"}, "is 'nvfp4', expected a function of a QuantizerRole"),
    (MMParams, {"use_split_accumulator": None}, "is None, expected a bool"),
    (QParams, {"amax_epsilon": -1.0}, "is -1.0, expected a number, 0 or more"),
    (QParams, {"amax_epsilon": float("nan")}, "is nan, expected a number"),
    (QParams, {"amax_epsilon": float("inf")}, "is inf, expected a number"),
    (QParams, {"stochastic_rounding": 1}, "is 1, expected a bool"),
]


@pytest.mark.parametrize(("kind", "keywords", "message"), WRONG)
def test_a_wrong_field_is_named(kind: type, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: .*{message}") as caught:
        kind(**keywords)
    assert next(iter(keywords)) in str(caught.value)


@pytest.mark.parametrize("alignment", [0, -1, 1.5])
def test_a_wrong_alignment(alignment: Any) -> None:
    with pytest.raises(ValueError, match=f"quantization_alignment is {alignment}, expected an int, 1 or more"):
        CustomRecipe(by_name, quantization_alignment=alignment)


@pytest.mark.parametrize(
    ("kind", "keywords", "one", "other"),
    [
        (NVFP4BlockScaling, {"nvfp4_4over6": "all"}, "nvfp4_4over6='all'", "disable_rht=False"),
        (NVFP4BlockScaling, {"nvfp4_4over6": "activations"}, "nvfp4_4over6='activations'", "disable_rht=False"),
        (Float8BlockScaling, {"x_block_scaling_dim": 2}, "x_block_scaling_dim=2", "w_block_scaling_dim=2"),
        (
            Float8BlockScaling,
            {"grad_block_scaling_dim": 2},
            "w_block_scaling_dim=2",
            "grad_block_scaling_dim=2",
        ),
        (
            Float8BlockScaling,
            {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
            "x_block_scaling_dim=2",
            "grad_block_scaling_dim=2",
        ),
    ],
)
def test_a_contradiction_names_both_fields(kind: type, keywords: dict[str, Any], one: str, other: str) -> None:
    with pytest.raises(ValueError, match=f"^{kind.__name__}: {one} contradicts {other}: "):
        kind(**keywords)


def test_options_that_a_format_does_not_take() -> None:
    for params, part in (
        (QParams(random_hadamard_transform=True), "rht"),
        (QParams(fp4_2d_quantization=True), "2d"),
        (QParams(amax_epsilon=1e300), "1e300"),
    ):
        with pytest.raises(OpaqError, match=f'"{part}" at position'):
            Float8CurrentScaling(fp8_quant_fwd_weight=params)


# ---------------------------------------------------------------------------------------------- Python's view


@pytest.mark.parametrize("made", VALUES, ids=lambda made: type(made).__name__)
def test_repr_pickle_hash_copy(made: Recipe) -> None:
    again = eval(repr(made), vars(recipe))
    assert again == made and type(again) is type(made) and repr(again) == repr(made)
    for other in (again, copy.copy(made), copy.deepcopy(made), replace(made)):  # type: ignore[type-var]
        assert other == made and hash(other) == hash(made)
        assert other.linear_quantizers() == made.linear_quantizers()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(made, protocol))
        assert loaded == made and loaded.linear_quantizers() == made.linear_quantizers()


def test_different_values_differ() -> None:
    assert len(set(VALUES)) == len(VALUES)
    assert len({*VALUES, *(kind() for kind in RECIPES)}) == len(VALUES)
    assert MXFP8BlockScaling() != DelayedScaling() and MXFP8BlockScaling() != "MXFP8BlockScaling()"
    assert Float8CurrentScaling() == Float8CurrentScaling(fp8_quant_fwd_inp=QParams())
    assert CustomRecipe(by_name) != CustomRecipe(lambda role: None)


def test_a_recipe_cannot_be_changed() -> None:
    for made in VALUES:
        for name in ("fp8_format", "backward_override"):
            with pytest.raises(FrozenInstanceError):
                setattr(made, name, None)
    changed = replace(NVFP4BlockScaling(), disable_rht=True)
    assert changed == NVFP4BlockScaling(disable_rht=True)
    assert changed.linear_quantizers().input == "nvfp4"


def test_recipes_need_no_pytorch(tmp_path: Path) -> None:
    library = tmp_path / "libopaq.so"  # without the bridge to PyTorch
    shutil.copy(_library.path, library)
    code = "import sys, opaq.recipe, opaq._autocast; assert 'torch' not in sys.modules"
    environment = {**os.environ, "OPAQ_LIBRARY": str(library), "PYTHONPATH": str(ROOT / "python")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
