"""Under which recipe modules run (`autocast`) and with which one they are made (`quantized_model_init`).

The state belongs to the thread: a forward pass in one thread does not see another's. torch.compile traces all
of this without breaking the graph, and what it guards are the values that were read: an equal recipe in a new
object compiles nothing again, another one does."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from opaq.recipe import Recipe, default_recipe

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Scoped = TypeVar("_Scoped", bound="_Scope")


class _Level:
    """What holds inside one `with`, and what held around it. It is never changed."""

    __slots__ = ("around", "detail", "recipe")

    def __init__(self, recipe: Recipe | None, detail: Any, around: _Level | None) -> None:
        self.recipe = recipe
        self.detail = detail
        self.around = around

    def __deepcopy__(self, memo: Any) -> _Level:
        return self

    def __reduce__(self) -> tuple[type[_Level], tuple[None, None, None]]:
        return _Level, (None, None, None)  # a module in a file has had no forward pass


class _Levels(threading.local):
    def __init__(self) -> None:
        self.top = _Level(None, None, None)


class _Scope:
    """A context manager, and a decorator, that holds a recipe. It keeps no record of being entered: one object
    may be entered again inside itself and by several threads."""

    __slots__ = ("_detail", "_recipe")
    _levels: ClassVar[_Levels]

    def __init__(self, enabled: bool, recipe: Recipe | None, detail: Any) -> None:
        name = type(self).__name__
        if type(enabled) is not bool:
            raise TypeError(f"{name}: enabled is a {type(enabled).__name__}, expected a bool")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"{name}: recipe is a {type(recipe).__name__}, expected an opaq.recipe.Recipe")
        self._recipe = None if not enabled else default_recipe() if recipe is None else recipe
        self._detail = detail

    def __enter__(self: _Scoped) -> _Scoped:
        self._levels.top = _Level(self._recipe, self._detail, self._levels.top)
        return self

    def __exit__(self, *_: object) -> None:
        around = self._levels.top.around
        if around is None:
            raise RuntimeError(f"{type(self).__name__}: left on another thread than it was entered on")
        self._levels.top = around

    def __call__(self, function: _Function) -> _Function:
        @functools.wraps(function)
        def inside(*arguments: Any, **keywords: Any) -> Any:
            self.__enter__()  # not `with self`: a compiler takes that only of what is made in the graph
            try:
                return function(*arguments, **keywords)
            finally:
                self.__exit__()

        return inside  # type: ignore[return-value]


class autocast(_Scope):
    """Modules inside run with the quantizers of `recipe`; None stands for `default_recipe()`. With
    `enabled=False` they run in high precision, also inside another autocast. Largest values are reduced over
    `amax_reduction_group` where the recipe asks for that."""

    __slots__ = ()
    _levels = _Levels()

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if calibrating:
            raise NotImplementedError(
                "autocast: calibrating=True is not supported: opaq collects no statistics without quantizing"
            )
        super().__init__(enabled, recipe, amax_reduction_group)


class quantized_model_init(_Scope):
    """Modules made inside hold their weights quantized as `recipe` says; None stands for `default_recipe()`.
    With `preserve_high_precision_init_val` they also keep the values from before."""

    __slots__ = ()
    _levels = _Levels()

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        super().__init__(enabled, recipe, preserve_high_precision_init_val)


def active() -> Recipe | None:
    """The recipe of the innermost autocast; None where there is none or it is not enabled."""
    return autocast._levels.top.recipe


def active_group() -> Any:
    """The innermost autocast's group for the largest values; None stands for the default group."""
    return autocast._levels.top.detail


def model_init_recipe() -> Recipe | None:
    """The recipe of the innermost quantized_model_init; None where there is none or it is not enabled."""
    return quantized_model_init._levels.top.recipe


def preserves_high_precision() -> bool:
    """Whether modules made now keep their weights' values from before quantization."""
    level = quantized_model_init._levels.top
    return level.recipe is not None and bool(level.detail)


def captured() -> autocast:
    """A context manager under which modules run as they would run now, later and on any thread."""
    recipe = active()
    return autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=active_group())


LATEST = (
    "_opaq_level"  # in a module's __dict__: what held in its latest forward pass that may be computed again
)


def recomputing(module: Any) -> autocast | None:
    """For a module that runs outside every autocast inside a backward pass, which is what activation
    checkpointing does where backward() is called outside: the autocast of its latest forward pass.
    Else None."""
    import torch

    if torch.compiler.is_compiling():  # a graph has the recipe in it
        return None
    level = autocast._levels.top
    if level.around is None and torch._C._current_graph_task_id() != -1:
        if (level := module.__dict__.get(LATEST, level)).recipe is None:
            return None
        return autocast(recipe=level.recipe, amax_reduction_group=level.detail)
    if module.training or torch.is_grad_enabled():
        module.__dict__[LATEST] = level
    return None


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`: what is computed again
    runs under the recipe of the forward pass, wherever backward() is called."""
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    # A graph has the recipe in it, and PyTorch takes these contexts only. The second question is for 2.11,
    # whose is_compiling() is False when this is called.
    if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
        made: tuple[Any, Any] = create_selective_checkpoint_contexts([])  # nothing is kept
        return made
    return nullcontext(), captured()


# So that a compiled graph with checkpoints can be cached.
setattr(checkpoint_contexts, "cache_hash", "opaq.checkpoint_contexts")  # noqa: B010  # as in quantizer.py
