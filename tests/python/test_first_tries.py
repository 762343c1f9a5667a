"""Likely first attempts: texts and names in any case, arrays, other dtypes, other libraries' names. Each is
accepted, or refused with a hint; likely mistakes give one warning, with numbers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest

from conftest import need

np = need("numpy")
torch = need("torch")
opaq = need("opaq")
from torch import nn  # noqa: E402

X, GATE_UP = torch.randn(64, 64), torch.randn(128, 64)
ROUTING = torch.full((64, 1), 0.5), torch.zeros(64, 1, dtype=torch.int64)  # all tokens to expert 0


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), *more)


def only_warning(call: Any) -> str:
    """The text of the one warning that a call gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert [warning.filename for warning in found] == [__file__]
    return str(found[0].message)


# ---- texts of quantizers ----


@pytest.mark.parametrize(
    "take",
    [
        lambda q: opaq.Quantizer(str(q)),
        lambda q: opaq.quantize(X.numpy(), q).quantizer,
        lambda q: opaq.quantize_tensor(X, q).quantizer,
        lambda q: opaq.TensorProto((4, 64), torch.float32, q).quantizer,
        lambda q: opaq.QuantizedLinear(64, 64, quantizer=q).quantizer,
        lambda q: opaq.QuantizedLinear(64, 64, quantizer="mxfp4", input_quantizer=q).input_quantizer,
        lambda q: opaq.quantize_(net(), q, progress=False).quantizer,
        lambda q: opaq.quantize_(net(), "mxfp4", activations=q, progress=False).activations,
        lambda q: opaq.QuantizedLinear.from_linear(nn.Linear(64, 64), q).quantizer,
        lambda q: opaq.QuantizedLinear.from_linear(nn.Linear(64, 64), "mxfp4", q).input_quantizer,
        lambda q: opaq.MLP(64, 64, quantizer=q).gate_up.quantizer,
        lambda q: opaq.MLP(64, 64, input_quantizer="mxfp4", hidden_quantizer=q).hidden_quantizer,
        lambda q: opaq.MoE(64, 64, 4, quantizer=q).down.quantizer,
        lambda q: opaq.MoE(64, 64, 4, input_quantizer=q).input_quantizer,
        lambda q: opaq.MoE(64, 64, 4, hidden_quantizer=q).hidden_quantizer,
        lambda q: opaq.GroupedLinear(2, 64, 64, quantizer=q).weight.quantizer,
        lambda q: opaq.runner.create_linear(X, quantizer=q).info().format,
        lambda q: opaq.runner.create_mlp(GATE_UP, X, quantizer=q).info().format,
        lambda q: opaq.runner.create_moe(GATE_UP[None], X[None], quantizer=q).info().format.partition("+")[0],
        lambda q: opaq.recipe.CustomRecipe(lambda role: q).linear_quantizers().weight,
    ],
)
def test_a_quantizer_is_a_value_or_its_text_in_any_case(take: Any) -> None:
    assert str(take("NVFP4")) == str(take("nvfp4")) == str(take(opaq.Quantizer("nvfp4"))) == "nvfp4"


def test_input_quantizers_of_functions() -> None:
    weight = opaq.quantize_tensor(X, "nvfp4")
    gate_up, down = GATE_UP, torch.randn(64, 64)
    experts = gate_up[None], down[None]
    for given in ("MXFP8", opaq.Quantizer("mxfp8")):
        for call in (
            lambda q: opaq.functional.quantized_linear(X, weight, input_quantizer=q),
            lambda q: opaq.functional.mlp(X, gate_up, down, input_quantizer=q),
            lambda q: opaq.functional.mlp(X, gate_up, down, input_quantizer="mxfp4", hidden_quantizer=q),
            lambda q: opaq.functional.moe(X, *ROUTING, *experts, input_quantizer=q),
            lambda q: opaq.functional.moe(X, *ROUTING, *experts, input_quantizer="mxfp4", hidden_quantizer=q),
            lambda q: opaq.runner.create_linear(X, input_quantizer=q)(X),
            lambda q: opaq.runner.create_mlp(gate_up, down, input_quantizer=q)(X),
            lambda q: opaq.runner.create_mlp(gate_up, down, input_quantizer="mxfp4", hidden_quantizer=q)(X),
            lambda q: opaq.runner.create_moe(*experts, input_quantizer=q)(X, *ROUTING),
            lambda q: opaq.functional.linear(X, X, recipe=opaq.recipe.CustomRecipe(lambda role: q)),
        ):
            assert torch.equal(call(given), call("mxfp8"))
    assert opaq.proto((4, 64), torch.float32, "nvfp4") == opaq.proto((4, 64), "float32", "nvfp4")
    assert opaq.proto((4, 64), "float32", "NVFP4") == opaq.proto((4, 64), "float32", opaq.Quantizer("nvfp4"))


def test_quantizers_of_a_checkpoint_configuration() -> None:
    need("transformers")
    for given in ("NVFP4", opaq.Quantizer("nvfp4")):
        config = opaq.Config(given, activations=given)
        assert config.to_dict() == opaq.Config("nvfp4", activations="nvfp4").to_dict()
        assert (config.quantizer, config.activations) == ("nvfp4", "nvfp4")
    with pytest.raises(opaq.OpaqError, match=r"did you mean 'nvfp4'\?$"):
        opaq.Config("nvpf4")


def test_texts_of_the_operators() -> None:
    """They take texts only."""
    made, expected = (torch.ops.opaq.quantize(X, text) for text in ("NVFP4+2D", "nvfp4+2d"))
    assert len(made) == len(expected) and all(map(torch.equal, made, expected))
    with pytest.raises(RuntimeError, match='opaq: quantize: .*"nvpf4".* expected fp8, .* or nvfp4'):
        torch.ops.opaq.quantize(X, "nvpf4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvpf4", "'nvfp4'"),
        ("NVPF4", "'nvfp4'"),
        ("mxfp88", "'mxfp8'"),
        ("nvfp4+2dd", "'2d'"),
        ("fp8+delay", "'delayed'"),
        ("NVFP4BlockScaling", "'nvfp4'"),
        ("fp8_e4m3", "'fp8'"),
        ("float8_e4m3fn", "'fp8'"),
        ("mxfp8+e5m2", "'mxfp8.e5m2'"),
    ],
)
def test_did_you_mean(text: str, expected: str) -> None:
    with pytest.raises(opaq.OpaqError, match=f"did you mean {expected}\\?$"):
        opaq.quantize_(net(), text)
    weight = opaq.quantize_tensor(X, "nvfp4")
    with pytest.raises(opaq.OpaqError, match=f"quantized_linear: .*did you mean {expected}\\?$"):
        opaq.functional.quantized_linear(X, weight, input_quantizer=text)


def test_no_suggestion_for_distant_names() -> None:
    with pytest.raises(opaq.OpaqError) as raised:
        opaq.Quantizer("int8")
    assert "did you mean" not in str(raised.value)


# ---- recipes ----


@pytest.mark.parametrize("given", ["nvfp4", "NVFP4", "NVFP4BlockScaling", opaq.recipe.NVFP4BlockScaling])
def test_a_recipe_is_a_value_its_class_or_its_name(given: Any) -> None:
    recipe = opaq.recipe.NVFP4BlockScaling()
    assert opaq.convert_training(net(), given).recipe == recipe
    weight, gate_up = torch.randn(32, 64), torch.randn(128, 64)
    with opaq.autocast(recipe=given):
        inside = opaq.functional.linear(X, weight)
    assert torch.equal(inside, opaq.functional.linear(X, weight, recipe=recipe))
    assert torch.equal(inside, opaq.functional.linear(X, weight, recipe=given))
    made, expected = (opaq.functional.mlp(X, gate_up, X, recipe=r) for r in (given, recipe))
    assert torch.equal(made, expected)
    with opaq.quantized_model_init(recipe=given):
        assert isinstance(opaq.Linear(64, 64).weight, opaq.QuantizedTensor)


def test_a_recipe_by_name_compiles() -> None:
    layer = opaq.Linear(64, 64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x: Any) -> Any:
        with opaq.autocast(recipe="mxfp8"):
            return layer(x)

    with opaq.autocast(recipe=opaq.recipe.MXFP8BlockScaling()):
        assert torch.equal(inside(X), layer(X))


def test_wrong_recipes() -> None:
    with pytest.raises(
        ValueError, match=r"convert_training: recipe is 'nvpf4', .*'nvfp4'; did you mean 'nvfp4'\?"
    ):
        opaq.convert_training(net(), "nvpf4")
    with pytest.raises(
        TypeError, match="autocast: recipe is a int, expected an opaq.recipe.Recipe, its class or"
    ):
        opaq.autocast(recipe=3)


# ---- arrays and tensors ----


def test_arrays_that_are_not_contiguous_are_copied() -> None:
    array = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)
    for view in (array.T, array[:, ::2], array[::-1, ::-1]):
        made, expected = (opaq.quantize(a, "nvfp4").buffers for a in (view, view.copy()))
        assert all(np.array_equal(made[name], expected[name]) for name in expected)


def test_an_array_dequantizes_itself() -> None:
    made = opaq.quantize(X.numpy(), "nvfp4+both")
    for given in ({}, {"dtype": "float16"}, {"usage": "columnwise"}):
        assert np.array_equal(made.dequantize(**given), opaq.dequantize(made, **given))


def test_tensors_that_are_not_contiguous_are_taken() -> None:
    weight = opaq.QuantizedLinear.from_linear(nn.Linear(64, 64), "nvfp4")
    for x in (X.t(), X[:, ::1][::2], X.unsqueeze(0).expand(3, 64, 64)):
        assert torch.equal(weight(x), weight(x.contiguous()))
        assert torch.equal(
            opaq.quantize_tensor(x, "nvfp4").dequantize(),
            opaq.quantize_tensor(x.contiguous(), "nvfp4").dequantize(),
        )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: opaq.quantize(X, "nvfp4"), TypeError, "opaq.quantize_tensor takes a torch.Tensor"),
        (lambda: opaq.quantize_tensor(X.numpy(), "nvfp4"), TypeError, r"torch.from_numpy\(x\) is one"),
        (lambda: opaq.Linear(64, 64)(X.numpy()), TypeError, r"opaq.Linear: x is a ndarray.*from_numpy"),
        (lambda: opaq.quantize(X.numpy().astype("f8"), "nvfp4"), ValueError, "float64"),
        (lambda: opaq.quantize(X.numpy().astype(">f4"), "nvfp4"), ValueError, "ascontiguousarray"),
        (
            lambda: opaq.quantize_tensor(X.double(), "nvfp4"),
            ValueError,
            "x is float64, expected f32, bf16 or f16",
        ),
        (lambda: opaq.Linear(64, 64)(X.double()), ValueError, "opaq.Linear: x is float64, expected f32, bf16"),
        (lambda: opaq.functional.linear(X, X.double()), ValueError, "w holds float64, expected f32"),
        (lambda: opaq.quantize_(X.numpy()), TypeError, "expected a torch.nn.Module"),
        (
            lambda: opaq.quantize_(net(), opaq.recipe.NVFP4BlockScaling()),
            TypeError,
            "opaq.quantize_: quantizer is a NVFP4BlockScaling, .* recipes are for opaq.autocast",
        ),
        (
            lambda: opaq.quantize_(net(), opaq.recipe.NVFP4BlockScaling),
            TypeError,
            "quantizer is the class NVFP4BlockScaling",
        ),
        (lambda: opaq.quantize_(net(), None), TypeError, "a NoneType, expected an opaq.Quantizer or its text"),
        (lambda: opaq.quantize_(net(), "mxfp8", activations=8), TypeError, "quantizer is a int"),
        (lambda: opaq.quantize_(net(), ignore=None), TypeError, r"ignore is None, .* \(\) ignores nothing"),
        (lambda: opaq.convert_training(net(), ignore=[0]), TypeError, r"convert_training: ignore is \[0\]"),
        (lambda: opaq.QuantizedLinear.from_linear(X, "nvfp4"), TypeError, "got a Tensor; from_weight takes"),
        (lambda: opaq.autocast("nvfp4"), TypeError, r"expected a bool; .* autocast\(recipe=...\)"),
        (lambda: opaq.autocast(opaq.recipe.NVFP4BlockScaling), TypeError, r"autocast\(recipe=...\)"),
        (
            lambda: opaq.autocast(True, opaq.recipe.MXFP8BlockScaling()),
            TypeError,
            r"calibrating is a MXFP8BlockScaling, expected a bool; .* autocast\(recipe=...\)",
        ),
        (
            lambda: opaq.runner.create_linear(X.numpy()),
            TypeError,
            r"create_linear: weight is a ndarray, .*from_numpy\(weight\)",
        ),
        (
            lambda: opaq.runner.create_mlp(GATE_UP, X.numpy(), precision="near"),
            TypeError,
            "create_mlp: down is a ndarray, expected a torch.Tensor",
        ),
        (
            lambda: opaq.runner.create_moe(GATE_UP[None].numpy(), X[None]),
            TypeError,
            "create_moe: gate_up is a ndarray",
        ),
        (
            lambda: opaq.sqnr(X.numpy(), opaq.quantize_tensor(X, "nvfp4")),
            TypeError,
            r"sqnr: x is a ndarray.*from_numpy",
        ),
        (
            lambda: opaq.QuantizedLinear.from_weight(X),
            TypeError,
            "from_weight: weight is a Tensor, expected a QuantizedTensor; from_linear",
        ),
        (lambda: opaq.proto(64, "float32", "nvfp4"), TypeError, "opaq.proto: shape is 64, expected a sequence"),
        (
            lambda: opaq.MLP(64, 64, activation="swiglu"),
            ValueError,
            r"opaq.MLP: activation is 'swiglu', expected one of silu, .*; did you mean 'silu'\?",
        ),
        (lambda: opaq.MoE(64, 64, 4, activation="gelu_tahn"), ValueError, r"did you mean 'gelu_tanh'\?"),
        (lambda: opaq.autocast(fp8_recipe=None), TypeError, "'fp8_recipe'; it is called recipe here"),
        (lambda: opaq.autocast(enabled=True, recipee=None), TypeError, "unknown argument 'recipee'$"),
        (lambda: opaq.quantized_model_init("nvfp4"), TypeError, r"quantized_model_init\(recipe=...\)"),
        (lambda: opaq.dequantize(opaq.quantize_tensor(X, "nvfp4")), TypeError, r"method dequantize\(\)"),
        (lambda: opaq.dequantize(X.numpy()), TypeError, "expected an opaq.QuantizedArray, got a ndarray$"),
        (lambda: opaq.convert_training(X), TypeError, "expected a torch.nn.Module"),
        (lambda: opaq.explain(X), TypeError, "expected a torch.nn.Module or an opaq.runner.Runner"),
        (
            lambda: opaq.Linear(64, 64, params_dtype=torch.bfloat16)(X),
            ValueError,
            "x holds f32, but w holds bf16",
        ),
    ],
)
def test_errors_have_hints(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fp8_autocast", "use opaq.autocast"),
        ("TransformerLayer", "use your own layer after opaq.convert_training"),
        ("NVFP4Quantizer", r"use opaq.Quantizer\('nvfp4'\)"),
        ("is_fp8_available", "not needed"),
        ("convert_to_float8_training", "use opaq.convert_training"),
        (
            "Float8DynamicActivationFloat8WeightConfig",
            "use opaq.quantize_.*for PerRow: 'fp8row'",
        ),
    ],
)
def test_names_of_other_libraries(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(opaq, name)


# ---- warnings ----


def test_a_pattern_that_matches_nothing() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(64, 64), "body": nn.Linear(64, 64)})
    said = only_warning(lambda: opaq.quantize_(model, ignore=["lm_haed", "lm_head"], progress=False))
    assert said == (
        "opaq.quantize_: 1 of 2 patterns of ignore match none of the 3 modules: 'lm_haed'; "
        "did you mean 'lm_head'?"
    )
    said = only_warning(lambda: opaq.convert_training(net(), "mxfp8", ignore="re:.*head"))
    assert said.startswith(
        "opaq.convert_training: 1 of 1 patterns of ignore match none of the 3 modules: 're:.*head'"
    )


def test_nothing_to_convert() -> None:
    model = nn.Sequential(nn.ReLU())
    for call, name in (
        (opaq.quantize_, "quantize_: nothing was quantized"),
        (opaq.convert_training, "nothing was conv"),
    ):
        assert (
            f"{name}" in (said := only_warning(lambda call=call: call(model)))
            and "none of the 2 modules" in said
        )
    said = only_warning(lambda: opaq.convert_training(net(), ignore="*"))
    assert said.endswith("none of the 2 linear layers and experts was converted: 2 ignored")


def test_nothing_to_tile() -> None:
    said = only_warning(lambda: opaq.tile_(net()))
    assert said.startswith("opaq.tile_: nothing was tiled: none of the 3 modules has packed weights")


def test_training_a_packed_model() -> None:
    model = net()
    opaq.quantize_(model, progress=False)
    said = only_warning(lambda: opaq.convert_training(model, "nvfp4"))
    assert said == (
        "opaq.convert_training: none of the 2 linear layers and experts was converted: "
        "2 packed by quantize_, which dequantize_ undoes"
    )
    opaq.dequantize_(model)
    assert len(opaq.convert_training(model, "nvfp4").converted) == 2


def test_a_second_quantization() -> None:
    model = net()
    opaq.quantize_(model, progress=False)
    said = only_warning(lambda: opaq.quantize_(model, "mxfp8", progress=False))
    assert said.startswith(
        "opaq.quantize_: 2 of 2 linear layers and experts are quantized already and stay as they are"
    )
    packed = opaq.quantize_tensor(X, "nvfp4")
    said = only_warning(lambda: opaq.quantize_tensor(packed, "mxfp8"))
    assert said.startswith("opaq.quantize_tensor: x of shape (64, 64) is quantized already (nvfp4)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("text", ["nvfp4", "fp8row", "mxfp8"])
def test_weights_that_are_not_finite(text: str, value: float) -> None:
    model = net()
    with torch.no_grad():
        model[1].weight[3, 5] = value
    said = only_warning(lambda: opaq.quantize_(model, text, progress=False))
    assert said.startswith("opaq.quantize_: 1 of 2 weights have NaNs or infinities, the first is 1; ")


def test_mixed_formats_without_a_warning() -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opaq.quantize_(model, "mxfp8", ignore=["0"], progress=False)
        made = opaq.quantize_(model, "nvfp4", ignore=["1"], progress=False)
    assert [module.name for module in made.modules] == ["0"] and made.left == {"1": "ignored"}


@pytest.mark.parametrize("given", [{"quantizer": "nvfp4+sr"}, {"activations": "nvfp4+sr"}])
def test_stochastic_rounding_is_refused_before_work(given: dict[str, str]) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"opaq.quantize_: \w+='nvfp4\+sr' rounds stochastically"):
        opaq.quantize_(model, **given, progress=False)
    assert all(type(layer) is nn.Linear for layer in model)


AUTOCAST = """
import warnings, torch, opaq
from torch import nn
model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
layer = opaq.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
def scope(function, **how):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with opaq.autocast(recipe="mxfp8", **how):
            function()
    print(len(found), *(warning.message for warning in found))
"""
SCOPES = """
scope(lambda: (model(x), layer(x)))
scope(lambda: (model(x), opaq.functional.linear(x, x)))
scope(lambda: opaq.MLP(8, 8)(x))
scope(lambda: model(x), enabled=False)
{more}
scope(lambda: model(x))
scope(lambda: model(x))
"""


def autocast_output(more: str, scopes: str = SCOPES) -> list[str]:
    code = AUTOCAST + scopes.replace("{more}", more)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def test_plain_layers_beside_modules_that_ran() -> None:
    more = """
part, other = nn.Sequential(nn.Linear(8, 8), opaq.Linear(8, 8)), nn.Linear(8, 8)
whole = nn.ModuleList([part, nn.ModuleList([opaq.MLP(8, 8), nn.Linear(8, 8)]), opaq.Linear(8, 8)])
def call():
    with opaq.autocast(recipe="nvfp4"):
        part(x)
    whole[1][0](other(x))
scope(call)
scope(call)
"""
    assert autocast_output(more, "{more}") == [
        "1 opaq.autocast: the models that ran inside it have 2 modules of opaq and 2 torch.nn.Linear layers, "
        "which stay unquantized. opaq.convert_training(model) makes them opaq's",
        "0",
    ]


def test_plain_layers_that_convert_training_left() -> None:
    more = """
opaq.convert_training(model, ignore="0")
print(sum(type(module) is nn.Linear for module in model))
"""
    assert autocast_output(more) == ["0"] * 4 + ["1"] + ["0"] * 2


def test_plain_layers_in_an_autocast() -> None:
    *quiet, first, again = autocast_output("")
    assert quiet == ["0"] * 4 and again == "0"
    assert (
        first.startswith("1 opaq.autocast: no module of opaq ran inside it")
        and "the 2 torch.nn.Linear" in first
    )


@pytest.mark.parametrize("after", ["", "; torch.compiler.reset()"])
def test_no_warning_where_code_is_compiled(after: str) -> None:
    """In compiled code it is unknown whether opaq's modules have run."""
    compiled = f"scope(lambda: torch.compile(layer, backend='eager')(x)){after}"
    assert autocast_output(compiled) == ["0"] * 7


# ---- explain ----


def test_explain_is_a_table() -> None:
    layers = nn.ModuleList(net() for _ in range(3))
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(64, 64)})
    opaq.quantize_(model, ignore="head", progress=False)
    found = opaq.explain(model)
    assert len(found) == 7 and [row.name for row in found][:2] == ["layers.0.0.weight", "layers.0.1.weight"]
    header, *lines = str(found).splitlines()
    assert header.split() == list(found.HEADER)
    assert [line.split()[:3] for line in lines] == [
        ["layers.*.*.weight", "6", "nvfp4+tiled"],
        ["head.weight", "1", "plain"],
    ]
    assert "opaq.quantize_ packs it" in lines[1]
    page = found._repr_html_()
    assert page.startswith("<table><tr><th>weight</th>") and page.count("<tr>") == 3
