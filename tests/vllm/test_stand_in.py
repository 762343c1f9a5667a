"""The stand-in for vLLM (stand_in.py) has the names, parameters and defaults of the real one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

import stand_in

# Constructors of layers: the stand-in's have some of the parameters, with the same defaults.
PARTIAL = {
    "LinearBase",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "RoutedExperts",
    "FusedMoEConfig",
}
# Parameters of vLLM's own types, and parts that the stand-in builds in another way.
OTHERS = {("FusedMoEConfig", "is_act_and_mul"), ("RoutedExperts", "expert_map")}
ROWS = [(module, row) for module, rows in stand_in.MODULES.items() for row in rows]


def functions(row: Any) -> Iterator[tuple[str, Any]]:
    """A class's methods that vLLM or the plug-in calls, or a function itself."""
    if not isinstance(row, type):
        yield "", row
        return
    for name, value in inspect.getmembers(row):
        is_ours = any(name in vars(base) for base in row.__mro__ if base.__module__.startswith("stand_in"))
        if is_ours and callable(value) and (name == "__init__" or not name.startswith("_")):
            yield name, value


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    """By name: the kind and the default."""
    found = inspect.signature(function).parameters.values()
    return {p.name: (p.kind, p.default) for p in found}


@pytest.mark.parametrize(("module", "row"), ROWS, ids=[f"{m}.{r.__name__}" for m, r in ROWS])
def test_signatures(module: str, row: Any) -> None:
    theirs = getattr(importlib.import_module(module), row.__name__)
    if isinstance(row, type) and issubclass(row, Enum):
        assert {member.name: member.value for member in row}.items() <= {
            m.name: m.value for m in theirs
        }.items()
        return
    for name, mine in functions(row):
        if row.__name__ in ("UnquantizedLinearMethod", "UnquantizedFusedMoEMethod", "QuantizationConfig"):
            assert not name or hasattr(theirs, name), name
            continue
        other = getattr(theirs, name) if name else theirs
        given, real = parameters(mine), parameters(other)
        if name == "__init__" and row.__name__ in PARTIAL:
            given = {key: value for key, value in given.items() if (row.__name__, key) not in OTHERS}
            missing = {key for key in given if key not in real}
            assert not missing, missing
            for key, (_, default) in given.items():
                if inspect.Parameter.empty not in (default, real[key][1]):
                    assert default == real[key][1], key
        elif name == "load_row_parallel_weight" and "args" in real:
            assert set(given) <= {"self", "loaded_weight", "args", "kwargs"}
        else:
            assert list(given.items()) == list(real.items()), name


def test_constants() -> None:
    for module, values in stand_in.CONSTANTS.items():
        for name, value in values.items():
            theirs = getattr(importlib.import_module(module), name)
            for method in ("is_cpu", "is_cuda", "device_name"):
                assert hasattr(theirs, method) == hasattr(value, method), (name, method)
    assert importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT is False
