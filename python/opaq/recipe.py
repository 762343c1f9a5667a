"""Recipes: the quantizer of each tensor of a module. Classes, fields and defaults are Transformer Engine's;
here a recipe is immutable, and environment variables have no effect. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from opaq.quantizer import Quantizer, derive, kept, query

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "LinearQuantizers",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRole",
    "Recipe",
    "default_recipe",
]

# Default replaced in __post_init__: a dataclass as a default could not be constructed in a compiled graph.
_SET_LATER: Any = None
_OVERRIDES = (None, "high_precision", "dequantized")
_SCOPES = ("none", "weights", "activations", "all")


# ------------------------------------------------------------------------------------------ parts of recipes


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """The elements of a recipe; the value holds the largest one forward and backward."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)  # E4M3 forward, E5M2 backward

    def __repr__(self) -> str:
        return f"Format.{self.name}"


def _expect(owner: object, name: str, is_right: bool, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{type(owner).__name__}: {name} is {getattr(owner, name)!r}, expected {expected}")


def _expect_bools(owner: object, *names: str) -> None:
    for name in names:
        _expect(owner, name, type(getattr(owner, name)) is bool, "a bool")


def _expect_one_of(owner: object, name: str, choices: tuple[object, ...]) -> None:
    value = getattr(owner, name)
    is_right = any(type(value) is type(choice) and value == choice for choice in choices)
    *first, last = [repr(choice) for choice in choices]
    _expect(owner, name, is_right, f"{', '.join(first)} or {last}" if first else f"only {last}")


def _expect_int(owner: object, name: str, least: int, most: float = inf) -> None:
    value = getattr(owner, name)
    limits = f"{least} or more" if most == inf else f"from {least} to {most}"
    _expect(owner, name, type(value) is int and least <= value <= most, f"an int, {limits}")


@dataclass(frozen=True)
class MMParams:
    """How a matrix product accumulates on a tensor core. It has no effect on opaq's kernels."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        _expect_bools(self, "use_split_accumulator")


@dataclass(frozen=True)
class QParams:
    """How one tensor is quantized, apart from its format."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        _expect_bools(self, "power_2_scale", "random_hadamard_transform")
        _expect_bools(self, "stochastic_rounding", "fp4_2d_quantization")
        epsilon = self.amax_epsilon
        is_right = type(epsilon) in (int, float) and 0 <= epsilon < inf
        _expect(self, "amax_epsilon", is_right, "a number, 0 or more")


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for: `tensor_type` is "input", "weight", "output", "grad_output" or
    "grad_input", `name` is the module's."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclass(frozen=True)
class LinearQuantizers:
    """The quantizers of a linear layer's tensors as canonical texts without usages, "" where there is none.
    `backward_override` is "" for None."""

    input: str = ""
    weight: str = ""
    grad_output: str = ""
    output: str = ""
    grad_input: str = ""
    backward_override: str = ""


HIGH_PRECISION = LinearQuantizers("", "", "", "", "", "")


# ---------------------------------------------------------------------------------------------------- texts


@kept
def _number(value: float) -> str:
    return repr(float(value)).replace("e+", "e")


def _text(start: str, params: QParams, more: str = "") -> str:
    """The canonical text; the library refuses invalid combinations."""
    text = start
    text += "+pow2" if params.power_2_scale else ""
    text += "+2d" if params.fp4_2d_quantization else ""
    text += "+rht" if params.random_hadamard_transform else ""
    text += "+sr" if params.stochastic_rounding else ""
    text += f"+eps={_number(params.amax_epsilon)}" if params.amax_epsilon else ""
    return str(Quantizer(text + more))


# -------------------------------------------------------------------------------------------------- recipes


def _is_one_of(*names: str) -> Any:
    """A class method: whether it is one of these recipes."""
    return classmethod(lambda cls: any(base.__name__ in names for base in cls.__mro__))


class Recipe:
    """Base of all recipes. `fp8_dpa` and `fp8_mha` concern attention, which opaq does not have: they are stored
    and have no effect."""

    fp8_format: Format
    fp8_dpa: bool
    fp8_mha: bool
    backward_override: str | None
    _quantizers: LinearQuantizers

    def linear_quantizers(self, name: str = "") -> LinearQuantizers:
        """The quantizers of the linear layer that is called `name`; traceable by torch.compile."""
        return self._quantizers

    # Transformer Engine's predicates of a recipe or its class
    delayed = _is_one_of("DelayedScaling")
    float8_current_scaling = _is_one_of("Float8CurrentScaling")
    float8_per_tensor_scaling = _is_one_of("DelayedScaling", "Float8CurrentScaling")
    float8_block_scaling = _is_one_of("Float8BlockScaling")
    mxfp8 = _is_one_of("MXFP8BlockScaling")
    nvfp4 = _is_one_of("NVFP4BlockScaling")
    custom = _is_one_of("CustomRecipe")

    def _default(self, name: str, value: object) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check(self, *formats: Format) -> tuple[str, str]:
        """Checks the fields that every recipe has and returns the FP8 elements forward and backward."""
        _expect_one_of(self, "fp8_format", formats)
        _expect_bools(self, "fp8_dpa", "fp8_mha")
        _expect_one_of(self, "backward_override", _OVERRIDES)
        return "e4m3", "e5m2" if self.fp8_format is Format.HYBRID else "e4m3"

    def _set(self, input: str, weight: str, grad_output: str) -> None:
        handed_on = derive(input, "handed_on"), derive(grad_output, "handed_on")
        made = LinearQuantizers(input, weight, grad_output, *handed_on, self.backward_override or "")
        object.__setattr__(self, "_quantizers", made)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, computed from the amaxes of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        forward, backward = self._check(Format.E4M3, Format.HYBRID)
        _expect_int(self, "margin", 0)
        _expect_int(self, "amax_history_len", 1, 1024)
        _expect_bools(self, "reduce_amax")
        _expect_one_of(self, "backward_override", (None,))
        if callable(self.amax_compute_algo) or callable(self.scaling_factor_compute_algo):
            raise ValueError(
                "DelayedScaling: a function as amax_compute_algo or scaling_factor_compute_algo is not a plain "
                "value, so a recipe cannot hold it; amax_compute_algo is 'max' or 'most_recent'"
            )
        _expect_one_of(self, "amax_compute_algo", ("max", "most_recent"))
        _expect_one_of(self, "scaling_factor_compute_algo", (None,))
        texts = [str(Quantizer(f"fp8.{element}+delayed")) for element in (forward, backward)]
        self._set(texts[0], texts[0], texts[1])


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, computed from the tensor itself. `use_power_2_scales` is the default of
    the three `fp8_quant_...` and does not change those that are given."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(default=_SET_LATER, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_SET_LATER, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_SET_LATER, kw_only=True)
    fp8_gemm_fprop: MMParams = _SET_LATER
    fp8_gemm_dgrad: MMParams = _SET_LATER
    fp8_gemm_wgrad: MMParams = _SET_LATER
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        forward, backward = self._check(Format.E4M3, Format.HYBRID)
        _expect_bools(self, "use_power_2_scales")
        _fill(self, self.use_power_2_scales, fprop=False)
        self._set(
            _text(f"fp8.{forward}", self.fp8_quant_fwd_inp),
            _text(f"fp8.{forward}", self.fp8_quant_fwd_weight),
            _text(f"fp8.{backward}", self.fp8_quant_bwd_grad),
        )


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each 1x128 or 128x128 block. `use_f32_scales` sets the default of the three
    `fp8_quant_...` and does not change those that are given."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = field(default=_SET_LATER, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_SET_LATER, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_SET_LATER, kw_only=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = _SET_LATER
    fp8_gemm_dgrad: MMParams = _SET_LATER
    fp8_gemm_wgrad: MMParams = _SET_LATER
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        forward, backward = self._check(Format.E4M3, Format.HYBRID)
        _expect_bools(self, "use_f32_scales")
        _fill(self, not self.use_f32_scales, fprop=True)
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in dims:
            _expect_int(self, name, 1, 2)
        for one, other in ((dims[0], dims[1]), (dims[0], dims[2]), (dims[1], dims[2])):
            if getattr(self, one) == getattr(self, other) == 2:
                raise ValueError(
                    f"Float8BlockScaling: {one}=2 contradicts {other}=2: two tensors with square blocks are "
                    "not multiplied with each other"
                )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            _expect(self, name, getattr(self, name).use_split_accumulator, "a split accumulator")
        for name in ("fp8_dpa", "fp8_mha"):
            _expect(self, name, not getattr(self, name), "False: there is no attention with these blocks")
        self._set(
            _text(f"fp8blk{self.x_block_scaling_dim}.{forward}", self.fp8_quant_fwd_inp),
            _text(f"fp8blk{self.w_block_scaling_dim}.{forward}", self.fp8_quant_fwd_weight),
            _text(f"fp8blk{self.grad_block_scaling_dim}.{backward}", self.fp8_quant_bwd_grad),
        )


def _fill(recipe: Float8CurrentScaling | Float8BlockScaling, power_2_scale: bool, fprop: bool) -> None:
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        recipe._default(name, QParams(power_2_scale=power_2_scale))
        _expect(recipe, name, isinstance(getattr(recipe, name), QParams), "a QParams")
    for name, split in (("fp8_gemm_fprop", fprop), ("fp8_gemm_dgrad", True), ("fp8_gemm_wgrad", True)):
        recipe._default(name, MMParams(use_split_accumulator=split))
        _expect(recipe, name, isinstance(getattr(recipe, name), MMParams), "an MMParams")


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power of two for each 32 values. `margin` is stored and has no effect: these scales have
    none."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        forward, backward = self._check(Format.E4M3, Format.HYBRID)
        _expect_int(self, "margin", 0)
        _expect_bools(self, "enable_2d_quantization")
        self._set(
            _text(f"mxfp8.{forward}", QParams()),
            _text(f"mxfp8.{forward}", QParams(fp4_2d_quantization=self.enable_2d_quantization)),
            _text(f"mxfp8.{backward}", QParams()),
        )


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """FP4 with an E4M3 scale for each 16 values and a float for the tensor, or for each row of the input with
    `row_scaled_activation`. `nvfp4_4over6` says which tensors choose between 4 and 6 as the code of a block's
    largest value, `nvfp4_4over6_e4m3_use_256` which of these aim at 256 and not 448 as the largest scale; both
    are "none", "weights", "activations" or "all". Gradients never choose."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check(Format.E4M3)
        _expect_bools(self, "disable_rht", "disable_stochastic_rounding")
        _expect_bools(self, "disable_2d_quantization", "row_scaled_activation")
        _expect_one_of(self, "nvfp4_4over6", _SCOPES)
        _expect_one_of(self, "nvfp4_4over6_e4m3_use_256", _SCOPES)
        _expect_one_of(self, "nvfp4_4over6_err_mode", ("MAE", "MSE"))
        _expect_one_of(self, "fp4_format", (Format.E2M1,))
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError(
                f"NVFP4BlockScaling: nvfp4_4over6={self.nvfp4_4over6!r} contradicts disable_rht=False: the "
                "choice compares rounding errors, which the input's Hadamard transform changes"
            )
        self._set(
            _text("nvfp4", self.fp4_quant_fwd_inp, self._more("activations")),
            _text("nvfp4", self.fp4_quant_fwd_weight, self._more("weights")),
            _text("nvfp4", self.fp4_quant_bwd_grad),
        )

    def _more(self, scope: str) -> str:
        text = "+rowscaled" if self.row_scaled_activation and scope == "activations" else ""
        if self.nvfp4_4over6 in (scope, "all"):
            text += "+4over6=mse" if self.nvfp4_4over6_err_mode == "MSE" else "+4over6"
            text += "" if self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else "+e4m3max=448"
        return text

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """How the input is quantized."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """How the weight is quantized."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """How the output's gradient is quantized."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Calls `qfactory(role)` for each tensor's quantizer: a Quantizer, its text, or None for a tensor that is
    not quantized. Its usages are ignored: the module sets them. Recipes with the same function are equal."""

    qfactory: Callable[[QuantizerRole], Quantizer | str | None]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        self._check(Format.E4M3, Format.E5M2, Format.HYBRID)
        _expect(self, "qfactory", callable(self.qfactory), "a function of a QuantizerRole")
        _expect_int(self, "quantization_alignment", 1)

    def linear_quantizers(self, name: str = "") -> LinearQuantizers:
        """The quantizers that `qfactory` returns for the linear layer that is called `name`."""
        forward = self._ask("input", name), self._ask("weight", name)
        backward = self._ask("grad_output", name)
        handed_on = self._ask("output", name), self._ask("grad_input", name)
        return LinearQuantizers(*forward, backward, *handed_on, self.backward_override or "")

    def _ask(self, tensor_type: str, name: str) -> str:
        made = self.qfactory(QuantizerRole("linear", tensor_type, name))
        if made is None:
            return ""
        if not isinstance(made, (Quantizer, str)):
            raise ValueError(
                f"CustomRecipe: qfactory returned {made!r} for {tensor_type!r}, expected a Quantizer, a str or "
                "None"
            )
        text = str(Quantizer(str(made)).with_usage(rowwise=True, columnwise=False))
        if query(text, "is_delayed"):
            raise ValueError(
                f"CustomRecipe: qfactory returned {text!r} for {tensor_type!r}, but delayed scaling keeps "
                "a history that only the recipe DelayedScaling describes"
            )
        return text


# Short names of the recipes; the classes' own names are accepted too, both in any case.
_NAMES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "fp8": Float8CurrentScaling,
    "fp8blk": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


RecipeLike = Recipe | type[Recipe] | str  # what an argument `recipe` takes


def names_recipe(given: Any) -> bool:
    """Whether an argument is a recipe, a class of recipes or a text."""
    return isinstance(given, (Recipe, str)) or (isinstance(given, type) and issubclass(given, Recipe))


def as_recipe(caller: str, given: Any) -> Recipe | None:
    """The recipe that an argument names: a recipe, its class, its name, or None."""
    if given is None or isinstance(given, Recipe):
        return given
    if isinstance(given, type) and issubclass(given, Recipe):
        return given()
    classes = {**_NAMES, **{kind.__name__.lower(): kind for kind in _NAMES.values()}}
    if isinstance(given, str) and given.lower() in classes:
        return classes[given.lower()]()
    known = ", ".join(map(repr, _NAMES))
    if not isinstance(given, str):
        raise TypeError(
            f"{caller}: recipe is a {type(given).__name__}, expected an opaq.recipe.Recipe, its class or its "
            f"name, one of {known}"
        )
    nearest = get_close_matches(given.lower(), classes, 1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{caller}: recipe is {given!r}, expected one of {known}{hint}")


def default_recipe() -> Recipe:
    """The recipe used if none is given. Every format runs on every machine."""
    return MXFP8BlockScaling()
