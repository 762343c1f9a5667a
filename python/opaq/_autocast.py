"""`autocast` selects the recipe that modules run with, `quantized_model_init` the one they are created with.

The state is per thread. torch.compile traces it without graph breaks and guards on the values that were read: a
new object with an equal recipe does not recompile, a different recipe does."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from opaq.recipe import Recipe, RecipeLike, as_recipe, default_recipe, names_recipe

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Scoped = TypeVar("_Scoped", bound="_Scope")


class _Level:
    """The settings of one `with` block and of the one around it. Immutable except `used` and `ran`, which no
    graph reads."""

    __slots__ = ("around", "detail", "ran", "recipe", "used")

    def __init__(self, recipe: Recipe | None, detail: Any, around: _Level | None) -> None:
        self.recipe = recipe
        self.detail = detail
        self.around = around
        self.used = False  # whether an operator or module of opaq outside compiled code has read the recipe
        self.ran = False  # whether a module of opaq that can be found by LATEST has run inside

    def __deepcopy__(self, memo: Any) -> _Level:
        return self

    def __reduce__(self) -> tuple[type[_Level], tuple[None, None, None]]:
        return _Level, (None, None, None)  # a module loaded from a file has no forward pass to recompute


class _Levels(threading.local):
    def __init__(self) -> None:
        self.top = _Level(None, None, None)


class _Scope:
    """A context manager and decorator that holds a recipe. It stores nothing on entry, so one object may be
    entered again inside itself and by several threads."""

    __slots__ = ("_detail", "_recipe")
    _levels: ClassVar[_Levels]

    def __init__(self, enabled: bool, recipe: RecipeLike | None, detail: Any) -> None:
        name = type(self).__name__
        if type(enabled) is not bool:
            hint = f"; a recipe is passed by its name, {name}(recipe=...)" if names_recipe(enabled) else ""
            raise TypeError(f"{name}: enabled is a {type(enabled).__name__}, expected a bool{hint}")
        if recipe is not None and not isinstance(recipe, Recipe):
            recipe = as_recipe(name, recipe)
        self._recipe = None if not enabled else default_recipe() if recipe is None else recipe
        self._detail = detail

    def __enter__(self: _Scoped) -> _Scoped:
        self._levels.top = _Level(self._recipe, self._detail, self._levels.top)
        return self

    def __exit__(self, *_: object) -> None:
        around = self._levels.top.around
        if around is None:
            raise RuntimeError(f"{type(self).__name__}: exited on a thread other than the one that entered it")
        self._levels.top = around

    def __call__(self, function: _Function) -> _Function:
        @functools.wraps(function)
        def inside(*arguments: Any, **keywords: Any) -> Any:
            self.__enter__()  # torch.compile supports `with self` only for objects created in the graph
            try:
                return function(*arguments, **keywords)
            finally:
                self.__exit__()

        return inside  # type: ignore[return-value]


# Arguments of Transformer Engine's fp8_autocast, and their names here.
_OLDER_NAMES = {"fp8_recipe": "recipe", "fp8_group": "amax_reduction_group"}


class autocast(_Scope):
    """opaq's modules inside run with the quantizers of `recipe`: a recipe, its class or its name ("nvfp4");
    None is `default_recipe()`. With `enabled=False` they run in high precision, also inside another autocast.
    Amaxes are reduced over `amax_reduction_group` if the recipe asks for that. torch.nn.Linear layers are not
    affected: `convert_training` makes them opaq's. One warning per process names their number if no module of
    opaq ran in an outermost scope, or if the models of those that ran have such layers too."""

    __slots__ = ()
    _levels = _Levels()

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: RecipeLike | None = None,
        amax_reduction_group: Any = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            hint = f"; it is called {_OLDER_NAMES[name]} here" if name in _OLDER_NAMES else ""
            raise TypeError(f"autocast: unknown argument {name!r}{hint}")
        if names_recipe(calibrating):
            raise TypeError(
                f"autocast: calibrating is a {type(calibrating).__name__}, expected a bool; a recipe is passed "
                "by its name, autocast(recipe=...)"
            )
        if calibrating:
            raise NotImplementedError(
                "autocast: calibrating=True is not supported: opaq collects no statistics without quantizing"
            )
        super().__init__(enabled, recipe, amax_reduction_group)

    def __exit__(self, *error: object) -> None:
        level = self._levels.top
        super().__exit__(*error)
        if _is_compiling():
            return
        around = self._levels.top
        around.used |= level.used
        around.ran |= level.ran
        if level.recipe is None or around.around is not None or type(self) is not autocast or any(error):
            return
        if level.ran not in _checked and (level.ran or not level.used):
            _warn_plain(level)


class _InnerAutocast(autocast):
    """An autocast that opaq enters itself; it never warns, since the modules inside may not be opaq's."""

    __slots__ = ()


_checked: set[bool] = (
    set()
)  # whether _warn_plain looked for layers outside (False) and inside of models that ran


def _is_compiling() -> bool:
    import torch

    return bool(torch.compiler.is_compiling())


def _warn_plain(level: _Level) -> None:
    """At the end of the outermost autocast of `level`: warns if no module of opaq ran in it and the process has
    torch.nn.Linear layers, or if the models of the modules that ran have some. Looks once per process for each.

    Compiled code runs no Python and cannot be observed: there is no warning once an operator of opaq was
    traced, or while PyTorch counts a compiled frame, which it forgets in `torch.compiler.reset()`."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    operators: Any = sys.modules.get("opaq._operators")
    if (operators is not None and operators.traced) or (dynamo is not None and dynamo.counters["frames"]):
        return
    _checked.add(level.ran)
    from torch import nn

    # Not isinstance, which evaluates the property __class__ of proxies.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    if level.ran:
        ran, plain = _count_beside(modules, level)
        found = f"the models that ran inside it have {ran} modules of opaq and {plain} torch.nn.Linear layers, "
        found += "which stay unquantized"
    else:
        plain = sum(type(module) is nn.Linear for module in modules)
        found = (
            f"no module of opaq ran inside it, so nothing was quantized; the {plain} torch.nn.Linear layers "
        )
        found += "of this process are not affected by it"
    if plain:
        warnings.warn(
            f"opaq.autocast: {found}. opaq.convert_training(model) makes them opaq's",
            stacklevel=3,
        )


def _count_beside(modules: list[Any], level: _Level) -> tuple[int, int]:
    """The number of opaq's modules that ran in `level`, and of torch.nn.Linear layers in the same models.
    Models that convert_training converted are not counted: its summary lists the layers that it left."""
    from torch import nn

    training: Any = sys.modules.get("opaq.training")
    parents: dict[int, list[Any]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    ran = [module for module in modules if _is_inside(module.__dict__.get(LATEST), level)]
    above = {id(module): module for module in ran}  # and their ancestors
    waiting = list(ran)
    while waiting:
        new = {id(parent): parent for parent in parents.get(id(waiting.pop()), ()) if id(parent) not in above}
        above |= new
        waiting += new.values()
    models = [list(module.modules()) for key, module in above.items() if key not in parents]
    if training is not None:
        models = [members for members in models if not any(type(m) is training.TrainingLinear for m in members)]
    members = {id(member): member for model in models for member in model}
    plain = sum(type(member) is nn.Linear for member in members.values())
    return sum(id(module) in members for module in ran), plain


def _is_inside(level: _Level | None, outer: _Level) -> bool:
    while level is not None and level is not outer:
        level = level.around
    return level is outer


class quantized_model_init(_Scope):
    """Modules created inside hold weights quantized by `recipe`: a recipe, its class or its name; None is
    `default_recipe()`. With `preserve_high_precision_init_val` they also keep the unquantized initial
    values."""

    __slots__ = ()
    _levels = _Levels()

    def __init__(
        self,
        enabled: bool = True,
        recipe: RecipeLike | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        super().__init__(enabled, recipe, preserve_high_precision_init_val)


def active() -> Recipe | None:
    """The recipe of the innermost autocast; None if there is none or it is disabled."""
    level = autocast._levels.top
    if not _is_compiling():
        level.used = True
    return level.recipe


def active_group() -> Any:
    """The process group over which the innermost autocast reduces amaxes; None is the default group."""
    return autocast._levels.top.detail


def model_init_recipe() -> Recipe | None:
    """The recipe of the innermost quantized_model_init; None if there is none or it is disabled."""
    return quantized_model_init._levels.top.recipe


def preserves_high_precision() -> bool:
    """Whether modules created now keep the unquantized initial values of their weights."""
    level = quantized_model_init._levels.top
    return level.recipe is not None and bool(level.detail)


def captured() -> autocast:
    """The current autocast state as a context manager that can be entered later, on any thread."""
    recipe = autocast._levels.top.recipe
    return _InnerAutocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=active_group())


LATEST = "_opaq_level"  # key in a module's __dict__: the level of its latest forward pass, for recomputation


def recomputing(module: Any) -> autocast | None:
    """The autocast of a module's latest forward pass, if the module runs in a backward pass outside any
    autocast: activation checkpointing recomputes it there. Otherwise None."""
    import torch

    if torch.compiler.is_compiling():  # a graph contains the recipe
        return None
    level = autocast._levels.top
    if level.around is None and torch._C._current_graph_task_id() != -1:
        if (level := module.__dict__.get(LATEST, level)).recipe is None:
            return None
        return _InnerAutocast(recipe=level.recipe, amax_reduction_group=level.detail)
    if module.training or torch.is_grad_enabled():
        module.__dict__[LATEST] = level
        level.ran = True
    return None


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: recomputation uses the
    recipe of the forward pass, wherever backward() is called."""
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    # A graph contains the recipe, and PyTorch accepts only these contexts in it. The second condition is for
    # 2.11, where is_compiling() is False here.
    if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
        made: tuple[Any, Any] = create_selective_checkpoint_contexts([])  # saves nothing
        return made
    return nullcontext(), captured()


# Lets compiled graphs with checkpoints be cached.
setattr(checkpoint_contexts, "cache_hash", "opaq.checkpoint_contexts")  # noqa: B010  # as in quantizer.py
