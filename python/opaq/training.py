"""convert_training: makes the linear layers and experts of a model train by a recipe, in place. revert_training
undoes it. docs/training.md.

Modules and parameters stay the same objects; only the class of a module changes, as in
torch.nn.utils.parametrize and FSDP2. Hooks, names, tied weights and references to modules keep working."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from opaq import _stacked
from opaq._autocast import LATEST, autocast, quantized_model_init, recomputing
from opaq._names import Names
from opaq._summary import left_lines, some
from opaq._warnings import DEFAULT_IGNORE, patterns_of, warn_nothing_done, warn_unmatched
from opaq.linear import Linear
from opaq.packed import PackedModule, QuantizedLinear
from opaq.quantized_tensor import QuantizedTensor
from opaq.recipe import DelayedScaling, Recipe, RecipeLike, as_recipe

_BEFORE = "_opaq_before_training"  # in a converted module's __dict__: its _Record
_kinds: dict[type, type] = {}


@dataclass(frozen=True)
class TrainingSummary:
    """The result of `convert_training`. Printed, it has a line for each kind of module."""

    recipe: Recipe | None
    converted: dict[str, str]  # names of modules, and their classes before
    left: dict[str, str]  # modules that stay as they are, and why

    def __str__(self) -> str:
        kinds: dict[str, list[str]] = {}
        for name, kind in self.converted.items():
            kinds.setdefault(kind, []).append(name)
        how = "the active opaq.autocast" if self.recipe is None else repr(self.recipe)
        lines = [f"{len(self.converted)} modules train by {how}"]
        lines += [f"  {len(names)} {kind}: {some(names)}" for kind, names in kinds.items()]
        return "\n".join([*lines, *left_lines(self.left)])


class TrainingLinear(Linear):
    """An nn.Linear that `convert_training` made an opaq.Linear; it keeps nn.Linear's initialization."""

    def reset_parameters(self) -> None:
        nn.Linear.reset_parameters(self)
        self.reset_state()

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.recipe is None else f", recipe={type(self.recipe).__name__}")


# ---- selection of modules ----


def _why_not(module: nn.Module, recipe: Recipe | None) -> str:
    """Why a linear layer or experts cannot be converted; "" if they can."""
    if isinstance(module, QuantizedLinear):
        return "packed by quantize_, which dequantize_ undoes"
    if _stacked.weight_names(module):
        if _stacked.is_packed(module):
            return "packed by quantize_, which dequantize_ undoes"
        if isinstance(recipe, DelayedScaling):
            return "experts do not support DelayedScaling"
        return _stacked.why_not(module)
    kind, weight = type(module), module._parameters.get("weight")
    if kind.__name__.startswith("FSDP"):
        return "fully_shard was called on the layer itself; convert before that"
    if nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized"
    if kind is not nn.Linear and kind is not Linear:
        return f"it is a {kind.__name__}, a subclass of nn.Linear"
    if "forward" in vars(module):
        return "it has a forward of its own"
    if kind is nn.Linear and weight is None:
        return "its weight is computed from other parameters"
    return "its weight is quantized" if isinstance(weight, QuantizedTensor) else ""


def _ends(model: nn.Module, first: int, last: int) -> set[str]:
    """The names of the first and last blocks: members of the outermost ModuleLists."""
    if first < 0 or last < 0:
        raise ValueError(f"opaq.convert_training: skip_first is {first}, skip_last {last}, expected 0 or more")
    found: set[str] = set()
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            lists.append(name)
            members = [f"{name}.{index}".removeprefix(".") for index in range(len(module))]
            found.update(members[:first], members[len(members) - last :])
    if (first or last) and not lists:
        raise ValueError(
            "opaq.convert_training: skip_first and skip_last count members of an nn.ModuleList, and the model "
            "has none; use filter"
        )
    return found


# ---- converting ----


class _Record(NamedTuple):
    """The state of a module before conversion; plain data, which is copied and saved with the module."""

    kind: type
    added: tuple[str, ...] = ()  # attributes and buffers that it did not have
    attributes: tuple[tuple[str, Any], ...] = ()  # those that were changed


def _convert_linear(module: Any, name: str, recipe: Recipe | None) -> _Record:
    """Adds the attributes of an opaq.Linear to an nn.Linear."""
    weight = module.weight
    with autocast(enabled=recipe is not None, recipe=recipe), quantized_model_init(enabled=False):
        made = Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=weight.dtype,
            device="meta",
            name=name,
        )
    record = _Record(type(module), (*(key for key in vars(made) if key not in vars(module)), *made._buffers))
    vars(module).update({key: vars(made)[key] for key in record.added if key in vars(made)})
    for key, buffer in made._buffers.items():
        module._buffers[key] = torch.empty_like(buffer, device=weight.device)
    module._non_persistent_buffers_set |= made._non_persistent_buffers_set
    module.__class__ = TrainingLinear
    module.reset_state()
    return record


def _experts_class(kind: type) -> type:
    """The class of experts with a recipe of their own."""

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.recipe is None or autocast._levels.top.around is not None:
            return kind.forward(self, *arguments, **keywords)  # type: ignore[attr-defined]
        if (scope := recomputing(self)) is None:
            scope = autocast(recipe=self.recipe)
        with scope:
            return kind.forward(self, *arguments, **keywords)  # type: ignore[attr-defined]

    def reduce(self: Any) -> Any:
        return _blank, (kind,), {key: value for key, value in vars(self).items() if key != LATEST}

    if kind not in _kinds:
        methods = {"forward": forward, "__reduce__": reduce, "__module__": kind.__module__}
        _kinds[kind] = type(kind.__name__, (kind,), methods)
    return _kinds[kind]


def _blank(kind: type) -> Any:
    made: Any = _experts_class(kind)
    return made.__new__(made)


def _convert_experts(module: Any) -> _Record:
    """Makes experts run as one operator."""
    kind = type(module)
    changed: tuple[tuple[str, Any], ...] = ()
    if not isinstance(module, PackedModule):
        changed = (("config", module.config),)
        module.config = copy.copy(module.config)  # a copy: other experts keep their implementation
        module.config._experts_implementation_internal = _stacked.IMPLEMENTATION
    module.__class__ = _experts_class(kind)
    return _Record(kind, (), changed)


def convert_training(
    model: nn.Module,
    recipe: RecipeLike | None = None,
    filter: Callable[[nn.Module, str], bool] | None = None,  # noqa: A002  # the name that torchao uses
    *,
    skip_first: int = 0,
    skip_last: int = 0,
    ignore: Iterable[str] = DEFAULT_IGNORE,
) -> TrainingSummary:
    """Makes every nn.Linear an opaq.Linear, and runs the experts that opaq knows as one operator, in place.

    `recipe` (a recipe, its class or its name) applies wherever no `opaq.autocast` is active; without it the
    modules quantize only inside one. `filter(module, name)` selects modules; `ignore` lists modules to skip, as
    in `quantize_`. The first `skip_first` and last `skip_last` members of each outermost nn.ModuleList, a
    model's blocks, are skipped. A second call converts more modules and gives the selected ones the new
    recipe."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"opaq.convert_training: model is a {type(model).__name__}, expected a torch.nn.Module")
    recipe = as_recipe("opaq.convert_training", recipe)
    ends = _ends(model, skip_first, skip_last)
    patterns = patterns_of("opaq.convert_training", ignore)
    names = Names(patterns)
    converted: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        is_packed = isinstance(module, QuantizedLinear)
        if not is_linear and not is_packed and not _stacked.weight_names(module):
            continue
        if name in names:
            left[name] = "ignored"
        elif any(name == end or name.startswith(f"{end}.") for end in ends):
            left[name] = "in one of the first or last blocks"
        elif filter is not None and not filter(module, name):
            left[name] = "filtered"
        elif _BEFORE in vars(module):
            converted[name] = vars(module)[_BEFORE].kind.__name__
            module.recipe = recipe
        elif reason := _why_not(module, recipe):
            left[name] = reason
        else:
            kind = type(module)
            converted[name] = kind.__name__
            if kind is Linear:
                record = _Record(kind)
            else:
                record = _convert_linear(module, name, recipe) if is_linear else _convert_experts(module)
            vars(module)[_BEFORE] = record
            module.recipe = recipe
    modules = [name for name, _ in model.named_modules()]
    warn_unmatched("opaq.convert_training", patterns, modules, 2)
    if not converted:
        warn_nothing_done("opaq.convert_training", "converted", len(modules), left, 2)
    return TrainingSummary(recipe, converted, left)


def revert_training(model: nn.Module) -> int:
    """Undoes `convert_training`: restores the classes and attributes of the modules. Returns their number."""
    found = [module for module in model.modules() if _BEFORE in vars(module)]
    for module in found:
        record: _Record = vars(module).pop(_BEFORE)
        for key in (*record.added, "recipe", LATEST):
            vars(module).pop(key, None)
            module._buffers.pop(key, None)
            module._non_persistent_buffers_set.discard(key)
        vars(module).update(record.attributes)
        module.__class__ = record.kind
    return len(found)
