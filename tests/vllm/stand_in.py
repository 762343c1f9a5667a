"""A stand-in for the part of vLLM that the plug-in uses, for machines without vLLM, such as one with a GPU: the
base classes of methods, parameters, linear layers with their shards, routed experts and their loaders, as vLLM
0.32 has them. `installed` makes it importable as `vllm`; test_stand_in.py compares signatures with vLLM's.

It has no counterpart of routing, attention (beyond its name), the scheduler and processes. `tensor_parallel`
sets a rank without starting others, so results of layers are not reduced."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from stand_in_experts import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    ExpertMap,
    FusedMoEConfig,
    FusedMoeWeightScaleSupported,
    MoEActivation,
    OnlineLinearBase,
    OnlineMoEMethodBase,
    RoutedExperts,
)
from stand_in_layers import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ColumnParallelLinear,
    GroupQuantScaleParameter,
    LinearBase,
    MergedColumnParallelLinear,
    ModelWeightParameter,
    PerTensorScaleParameter,
    QKVParallelLinear,
    RowParallelLinear,
)
from stand_in_methods import (
    Attention,
    BaseKVCacheMethod,
    FusedMoEMethodBase,
    LinearMethodBase,
    MLAAttention,
    QuantizationConfig,
    QuantizeMethodBase,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
    configurations,
    current_platform,
    get_quantization_config,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    init_logger,
    loader_v2_methods,
    register_quantization_config,
    register_weight_loader_v2_supported_method,
    set_weight_attrs,
    tensor_parallel,
)

__all__ = ["CONSTANTS", "MODULES", "ExpertMap", "installed", "tensor_parallel"]

_LAYERS = "vllm.model_executor.layers"
MODULES: dict[str, tuple[Any, ...]] = {
    "vllm.logger": (init_logger,),
    "vllm.distributed": (get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size),
    "vllm.model_executor.utils": (set_weight_attrs,),
    "vllm.model_executor.parameter": (
        BlockQuantScaleParameter,
        ChannelQuantScaleParameter,
        GroupQuantScaleParameter,
        ModelWeightParameter,
        PerTensorScaleParameter,
    ),
    f"{_LAYERS}.linear": (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
        register_weight_loader_v2_supported_method,
    ),
    f"{_LAYERS}.quantization": (register_quantization_config, get_quantization_config),
    f"{_LAYERS}.quantization.base_config": (QuantizationConfig, QuantizeMethodBase),
    f"{_LAYERS}.quantization.kv_cache": (BaseKVCacheMethod,),
    f"{_LAYERS}.attention": (Attention, MLAAttention),
    f"{_LAYERS}.quantization.online.fp8": (OnlineLinearBase,),
    f"{_LAYERS}.quantization.online.moe_base": (OnlineMoEMethodBase,),
    f"{_LAYERS}.fused_moe": (FusedMoEMethodBase, RoutedExperts),
    f"{_LAYERS}.fused_moe.activation": (MoEActivation,),
    f"{_LAYERS}.fused_moe.config": (FusedMoEConfig,),
    f"{_LAYERS}.fused_moe.routed_experts": (FusedMoeWeightScaleSupported, RoutedExperts),
    f"{_LAYERS}.fused_moe.unquantized_fused_moe_method": (UnquantizedFusedMoEMethod,),
}
CONSTANTS = {
    "vllm.platforms": {"current_platform": current_platform},
    f"{_LAYERS}.fused_moe.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": FUSED_MOE_UNQUANTIZED_CONFIG},
}


class _Environment(ModuleType):
    """vllm.envs, which reads variables when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name == "VLLM_BATCH_INVARIANT":
            return bool(int(os.getenv(name, "0")))
        raise AttributeError(name)


def _modules() -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = {"vllm": ModuleType("vllm"), "vllm.envs": _Environment("vllm.envs")}
    for name in (*MODULES, *CONSTANTS):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for name, rows in MODULES.items():
        vars(made[name]).update({row.__name__: row for row in rows})
    for name, values in CONSTANTS.items():
        vars(made[name]).update(values)
    for name, module in made.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
        module.__path__ = []  # a package
    return made


def _forget() -> dict[str, ModuleType]:
    """Removes vLLM, and the plug-in's modules that imported it."""
    plugin = "opaq.integrations.vllm_"
    names = [name for name in sys.modules if name.partition(".")[0] == "vllm" or name.startswith(plugin)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if name.startswith(plugin):
            vars(sys.modules[parent]).pop(leaf, None)
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def installed(device: str) -> Iterator[ModuleType]:
    """Makes the stand-in importable, on this device, and yields the plug-in's module vllm_config."""
    kept = _forget()
    sys.modules.update(_modules())
    current_platform.__dict__["device_name"] = device
    try:
        importlib.import_module("opaq.integrations.vllm").register()
        yield sys.modules["opaq.integrations.vllm_config"]
    finally:
        _forget()
        sys.modules.update(kept)
        loader_v2_methods.clear()
        configurations.clear()
