"""autocast: which recipe is active where; and in compiled code: no graph breaks, and recompilation only if a
different recipe is active."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import opaq
from compiling import compiled, fail_on_recompile
from conftest import need, need_cxx
from torch_cases import make_tensor, same_bytes

torch = need("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from opaq import Quantizer  # noqa: E402
from opaq._autocast import (  # noqa: E402
    active,
    active_group,
    autocast,
    captured,
    checkpoint_contexts,
    model_init_recipe,
    preserves_high_precision,
    quantized_model_init,
)
from opaq.recipe import (  # noqa: E402
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
)

PLAIN = NVFP4BlockScaling(True, True, True)
MAKERS: dict[str, Callable[[], Recipe]] = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp8 2d": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "current": Float8CurrentScaling,
    "current eps": lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=1e-3)),
    "block": lambda: Float8BlockScaling(use_f32_scales=True),
    "nvfp4": NVFP4BlockScaling,
    "custom": lambda: CustomRecipe(factory),
}


def factory(role: QuantizerRole) -> Quantizer | str | None:
    if role.tensor_type in ("output", "grad_input"):
        return None
    return "nvfp4+both" if role.name == "first" else Quantizer("mxfp8+columnwise")


def step(x: Any, name: str = "") -> Any:
    """Uses the active recipe like a module."""
    recipe = active()
    if recipe is None:
        return x + 1
    texts = recipe.linear_quantizers(name)
    return opaq.quantize_tensor(x, texts.input).dequantize() * len(texts.grad_output)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    assert active() is None and active_group() is None and model_init_recipe() is None


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert results, "the thread raised"
    return results[0]


# ----------------------------------------------------------------------------------------- without a compiler


def test_nesting() -> None:
    assert active() is None
    with autocast():
        assert active() == MXFP8BlockScaling()
        with autocast(recipe=PLAIN, amax_reduction_group="a group"):
            assert active() is PLAIN and active_group() == "a group"
            with autocast(enabled=False, recipe=MXFP8BlockScaling()):
                assert active() is None and active_group() is None
            assert active() is PLAIN
        assert active() == MXFP8BlockScaling() and active_group() is None
    assert active() is None


def test_exceptions_restore() -> None:
    with autocast(recipe=PLAIN):
        with pytest.raises(KeyError), autocast():
            with autocast(enabled=False):
                raise KeyError
        assert active() is PLAIN


def test_one_object_entered_again_and_again() -> None:
    scope = autocast(recipe=PLAIN)
    with scope as entered, autocast(), scope, scope:
        assert entered is scope and active() is PLAIN
    with scope:
        assert in_thread(active) is None
        assert in_thread(lambda: scope.__enter__() and active()) is PLAIN


def test_decorator() -> None:
    @autocast(recipe=PLAIN)
    def depth(count: int, *, fail: bool = False) -> int:
        """Text."""
        assert active() is PLAIN
        if fail:
            raise KeyError
        return 1 + depth(count - 1) if count else 0

    assert depth(3) == 3 and (depth.__name__, depth.__doc__) == ("depth", "Text.")
    with pytest.raises(KeyError):
        depth(0, fail=True)
    assert active() is None


def test_threads_do_not_see_each_other() -> None:
    barrier = threading.Barrier(2, timeout=30)
    seen: dict[Recipe, list[Recipe | None]] = {}

    def run(recipe: Recipe) -> None:
        mine = seen.setdefault(recipe, [])
        for _ in range(20):
            with autocast(recipe=recipe):
                barrier.wait()
                mine.append(active())
                barrier.wait()

    recipes = [PLAIN, MXFP8BlockScaling()]
    threads = [threading.Thread(target=run, args=(recipe,)) for recipe in recipes]
    with autocast(recipe=Float8CurrentScaling()):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert in_thread(active) is None and active() == Float8CurrentScaling()
    assert seen == {recipe: [recipe] * 20 for recipe in recipes}


def test_left_on_another_thread() -> None:
    with autocast() as scope:
        message = "autocast: exited on a thread other than the one that entered it"
        in_thread(lambda: pytest.raises(RuntimeError, scope.__exit__).match(message))


def test_wrong_arguments() -> None:
    with pytest.raises(NotImplementedError, match="autocast: calibrating=True is not supported"):
        autocast(calibrating=True)
    wrong: Any = "nvfp4"
    with pytest.raises(TypeError, match="autocast: recipe is a float, expected an opaq.recipe.Recipe"):
        autocast(recipe=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="quantized_model_init: enabled is a str, expected a bool"):
        quantized_model_init(wrong)
    with pytest.raises(TypeError, match="autocast: enabled is a MXFP8BlockScaling, expected a bool"):
        autocast(MXFP8BlockScaling())  # type: ignore[arg-type]


def test_quantized_model_init() -> None:
    assert not preserves_high_precision()
    with quantized_model_init(), autocast(recipe=PLAIN):
        assert model_init_recipe() == MXFP8BlockScaling() and not preserves_high_precision()
        with quantized_model_init(recipe=PLAIN, preserve_high_precision_init_val=True):
            assert model_init_recipe() is PLAIN and preserves_high_precision()
            with quantized_model_init(enabled=False, preserve_high_precision_init_val=True):
                assert model_init_recipe() is None and not preserves_high_precision()
            assert in_thread(model_init_recipe) is None
        assert active() is PLAIN
    assert model_init_recipe() is None


def test_captured() -> None:
    with autocast(recipe=PLAIN, amax_reduction_group=7):
        inside = captured()
    outside = captured()
    with inside:
        assert (active(), active_group()) == (PLAIN, 7)
        with outside:
            assert (active(), active_group()) == (None, None)
        assert in_thread(lambda: inside.__enter__() and (active(), active_group())) == (PLAIN, 7)


def test_nothing_is_kept() -> None:
    with autocast(recipe=PLAIN):
        pass
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        with autocast(), autocast(recipe=PLAIN):
            pass
    gc.collect()
    assert len(gc.get_objects()) < before + 20


# -------------------------------------------------------------------------- autocast around a compiled region


@pytest.mark.parametrize("name", MAKERS)
def test_an_equal_recipe_does_not_recompile(name: str, device: str) -> None:
    x, function = make_tensor((24, 96), device), compiled(step)
    with autocast(recipe=MAKERS[name]()):
        want = step(x)
        assert same_bytes(function(x), want)
    function(x)
    with fail_on_recompile():
        for _ in range(3):
            with autocast(recipe=MAKERS[name]()):  # a new object each time
                assert same_bytes(function(x), want)
                with autocast(enabled=False):
                    assert same_bytes(function(x), x + 1)
            assert same_bytes(function(x), x + 1)


def test_another_recipe_recompiles(device: str) -> None:
    x, function = make_tensor((24, 96), device), compiled(step)
    for name in MAKERS:
        with autocast(recipe=MAKERS[name]()):
            with fail_on_recompile(), pytest.raises(RuntimeError, match="recompile"):
                function(x)
            assert same_bytes(function(x), step(x)), name
    with fail_on_recompile():
        for name in MAKERS:
            with autocast(recipe=MAKERS[name]()):
                assert same_bytes(function(x), step(x)), name


def test_nesting_depth_does_not_recompile(device: str) -> None:
    x, function = make_tensor((24, 96), device), compiled(step)
    with autocast(recipe=PLAIN):
        function(x)
        with (
            fail_on_recompile(),
            autocast(),
            autocast(enabled=False),
            autocast(recipe=NVFP4BlockScaling(*[True] * 3)),
        ):
            assert same_bytes(function(x), step(x))


def test_compiled_in_one_thread_used_in_another(device: str) -> None:
    x, function = make_tensor((24, 96), device), compiled(step)
    with autocast(recipe=PLAIN):
        want = function(x)
    function(x)

    def run() -> Any:
        with fail_on_recompile():
            plain = function(x)
            with autocast(recipe=PLAIN):
                return plain, function(x)

    with autocast(recipe=Float8CurrentScaling()):  # not active in the other thread
        plain, quantized = in_thread(run)
    assert same_bytes(plain, x + 1) and same_bytes(quantized, want)


def test_inductor(device: str) -> None:
    need_cxx()
    x, function = make_tensor((24, 96), device), compiled(nested, backend="inductor")
    with autocast(recipe=PLAIN):
        assert same_bytes(function(x), nested(x))
        with fail_on_recompile():
            function(x)


# -------------------------------------------------------------------------- autocast inside a compiled region


def nested(x: Any) -> Any:
    y = step(x)
    with autocast():
        y = step(y)
        with autocast(recipe=PLAIN):
            y = step(y)
            with autocast(enabled=False):
                y = step(y)
        y = step(y)
    return step(y)


def raising(x: Any) -> Any:
    try:
        with autocast(recipe=PLAIN), autocast():
            y = step(x)
            raise KeyError("x")
    except KeyError:
        pass
    return step(y)


@autocast(recipe=PLAIN)
def decorated(x: Any) -> Any:
    return step(x)


def decorated_inside(x: Any) -> Any:
    @autocast(recipe=Float8CurrentScaling())
    def inner(x: Any) -> Any:
        return step(x)

    return step(inner(decorated(x)))


def decorated_raising(x: Any) -> Any:
    @autocast(recipe=PLAIN)
    def inner() -> None:
        raise KeyError("x")

    try:
        inner()
    except KeyError:
        return step(x)


def captured_inside(x: Any) -> Any:
    with autocast(recipe=PLAIN):
        scope = captured()
    with scope:
        return step(x)


def constructed(x: Any) -> Any:
    """Recipes constructed in the graph, with fields of all kinds."""
    for recipe in (
        Float8BlockScaling(fp8_quant_fwd_inp=QParams(power_2_scale=True, amax_epsilon=1e-3)),
        Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3),
        MXFP8BlockScaling(enable_2d_quantization=True),
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
        CustomRecipe(factory),
    ):
        with autocast(recipe=recipe):
            x = step(x, "first")
    return x


@pytest.mark.parametrize(
    "function",
    [nested, raising, decorated, decorated_inside, decorated_raising, captured_inside, constructed],
    ids=lambda function: function.__name__,
)
def test_inside(function: Callable[[Any], Any], device: str) -> None:
    x, made = make_tensor((24, 96), device), compiled(function)
    assert same_bytes(made(x), function(x))
    assert active() is None
    with autocast(recipe=Float8CurrentScaling()):
        around = active()
        assert same_bytes(made(x), function(x))
        assert active() is around
    with fail_on_recompile():
        assert same_bytes(made(x), function(x))
        with autocast(recipe=Float8CurrentScaling()):
            assert same_bytes(made(x), function(x))


def test_a_recipe_as_an_argument(device: str) -> None:
    def run(x: Any, recipe: Recipe | None, enabled: bool = True) -> Any:
        with autocast(enabled, recipe=recipe):
            return step(x)

    x, function = make_tensor((24, 96), device), compiled(run)
    makers = list(MAKERS.values())[:5]
    for make in makers:
        function(x, make())
    assert same_bytes(function(x, PLAIN, False), x + 1)
    assert same_bytes(function(x, None), run(x, MXFP8BlockScaling()))
    with fail_on_recompile():
        for make in makers:
            assert same_bytes(function(x, make()), run(x, make()))


def test_custom_recipe_by_the_modules_name(device: str) -> None:
    def run(x: Any) -> Any:
        with autocast(recipe=CustomRecipe(factory)):
            return step(x, "first"), step(x, "second")

    x = make_tensor((24, 96), device)
    first, second = compiled(run)(x)
    assert same_bytes(first, opaq.quantize_tensor(x, "nvfp4").dequantize() * len("nvfp4"))
    assert same_bytes(second, opaq.quantize_tensor(x, "mxfp8").dequantize() * len("mxfp8"))


def test_a_graph_break_inside(device: str) -> None:
    def run(x: Any) -> Any:
        with autocast(recipe=PLAIN):
            y = step(x)
            torch._dynamo.graph_break()
            y = step(y)
        return step(y)

    x = make_tensor((24, 96), device)
    assert same_bytes(compiled(run, fullgraph=False)(x), run(x))


def test_an_exception_leaves_a_compiled_region(device: str) -> None:
    def run(x: Any) -> Any:
        with autocast(recipe=PLAIN):
            raise KeyError(step(x).shape)

    x = make_tensor((24, 96), device)
    with autocast() as around, pytest.raises(KeyError):
        assert active() == MXFP8BlockScaling() and around
        compiled(run, fullgraph=False)(x)
    assert active() is None


def test_a_wrong_field_is_named_in_a_graph_too(device: str) -> None:
    def run(x: Any) -> Any:
        with autocast(recipe=NVFP4BlockScaling(nvfp4_4over6="some")):
            return step(x)

    with pytest.raises(Exception, match="nvfp4_4over6 is 'some', expected 'none', 'weights'"):
        compiled(run)(make_tensor((24, 96), device))


def test_export(device: str) -> None:
    class Nested(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return step(x)

    x = make_tensor((24, 96), device)
    with autocast(recipe=PLAIN):
        want = step(x)
        programs = [torch.export.export(Nested(), (x,), strict=strict) for strict in (False, True)]
    for program in programs:  # the recipe is in it
        assert same_bytes(program.module()(x), want)


def test_groups(device: str) -> None:
    groups = torch.distributed
    if not groups.is_available():
        pytest.skip("PyTorch was built without distributed")
    groups.init_process_group("gloo", store=groups.HashStore(), rank=0, world_size=1)
    try:
        group = groups.new_group([0])

        def run(x: Any) -> Any:
            y = step(x)
            groups.all_reduce(y, group=active_group())
            return y

        x, function = make_tensor((24, 96), device), compiled(run)
        with autocast(recipe=PLAIN, amax_reduction_group=group):
            assert same_bytes(function(x), step(x))
        with fail_on_recompile(), autocast(recipe=PLAIN, amax_reduction_group=group):
            assert same_bytes(function(x), step(x))
    finally:
        groups.destroy_process_group()


# ----------------------------------------------------------------------------------- activation checkpointing


def block(x: Any) -> Any:
    return (step(x) * x).sum()


def checkpointed(x: Any) -> Any:
    return checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)


def checkpointed_in_two_levels(x: Any) -> Any:
    def outer(x: Any) -> Any:
        return checkpoint(block, x * 2, use_reentrant=False, context_fn=checkpoint_contexts) + block(x)

    return checkpoint(outer, x, use_reentrant=False, context_fn=checkpoint_contexts)


def gradient(function: Any, x: Any, recipe: Recipe | None, backward: Callable[[Any], None]) -> Any:
    x = x.clone().requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        loss = function(x)
    backward(loss)
    return x.grad


BACKWARDS: dict[str, Callable[[Any], None]] = {
    "outside": lambda loss: loss.backward(),
    "under another recipe": autocast(recipe=Float8CurrentScaling())(lambda loss: loss.backward()),
    "in another thread": lambda loss: in_thread(lambda: loss.backward() or True),
}


@pytest.mark.parametrize("where", BACKWARDS)
@pytest.mark.parametrize("compiles", ["not", "the block", "all"])
def test_recomputation_uses_the_same_recipe(where: str, compiles: str, device: str) -> None:
    x = make_tensor((24, 96), device).float()
    function = checkpointed
    if compiles == "the block":
        made = compiled(block)

        def function(x: Any) -> Any:
            return checkpoint(made, x, use_reentrant=False, context_fn=checkpoint_contexts)

    elif compiles == "all":
        function = compiled(checkpointed)
    for recipe in (MXFP8BlockScaling(), PLAIN, None):
        want = gradient(block, x, recipe, BACKWARDS["outside"])
        assert same_bytes(gradient(function, x, recipe, BACKWARDS[where]), want)


def test_nested_checkpoints(device: str) -> None:
    x = make_tensor((24, 96), device).float()
    want = gradient(lambda x: block(x * 2) + block(x), x, PLAIN, BACKWARDS["outside"])
    for where in BACKWARDS:
        assert same_bytes(gradient(checkpointed_in_two_levels, x, PLAIN, BACKWARDS[where]), want)


def test_autocast_around_a_checkpoint_in_a_graph(device: str) -> None:
    x = make_tensor((24, 96), device).float()
    function = compiled(autocast(recipe=PLAIN)(checkpointed))
    want = gradient(block, x, PLAIN, BACKWARDS["outside"])
    assert same_bytes(gradient(function, x, MXFP8BlockScaling(), BACKWARDS["outside"]), want)


def test_autocast_within_a_checkpoint_in_a_graph(device: str) -> None:
    """PyTorch rejects side effects there by default, even if they are undone."""

    def run(x: Any) -> Any:
        return checkpoint(autocast(recipe=PLAIN)(block), x, use_reentrant=False)

    x = make_tensor((24, 96), device).float()
    want = gradient(block, x, PLAIN, BACKWARDS["outside"])
    assert same_bytes(gradient(run, x, None, BACKWARDS["in another thread"]), want)
    with pytest.raises(Exception, match="skip_fwd_side_effects_in_bwd_under_checkpoint"):
        compiled(run)(x.clone().requires_grad_())
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        assert same_bytes(gradient(compiled(run), x, None, BACKWARDS["outside"]), want)
