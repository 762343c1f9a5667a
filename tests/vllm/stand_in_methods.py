"""Part of the stand-in for vLLM (stand_in.py): the platform, ranks, and the base classes of configurations and
methods."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# ---- platform, ranks ----


class Platform:
    """vLLM's name of the device it runs on."""

    supported_quantization: list[str] = []  # noqa: RUF012  # as vLLM's
    device_name = "cpu"

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"


current_platform = Platform()
_place = [0, 1]


def get_tensor_model_parallel_rank() -> int:
    return _place[0]


def get_tensor_model_parallel_world_size() -> int:
    return _place[1]


@contextmanager
def tensor_parallel(rank: int, size: int) -> Iterator[None]:
    """Layers are those of one of several ranks."""
    _place[:] = rank, size
    try:
        yield
    finally:
        _place[:] = 0, 1


def init_logger(name: str) -> Any:
    return logging.getLogger(name)


def set_weight_attrs(weight: Any, weight_attrs: Any) -> None:
    for key, value in (weight_attrs or {}).items():
        assert not hasattr(weight, key), f"Overwriting existing tensor attribute: {key}"
        setattr(weight, key, value)


# ---- configurations and methods ----


class QuantizeMethodBase(ABC):
    uses_meta_device = False

    @abstractmethod
    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None: ...

    @abstractmethod
    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        return


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[Any]: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Any: ...

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> Any:
        return None

    @abstractmethod
    def get_quant_method(self, layer: Any, prefix: str) -> Any: ...

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        return


configurations: dict[str, Any] = {}


def register_quantization_config(quantization: str) -> Any:
    def keep(config: Any) -> Any:
        configurations[quantization] = config
        return config

    return keep


def get_quantization_config(quantization: str) -> Any:
    return configurations[quantization]


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: Any,
        **extra_weight_attrs: Any,
    ) -> None: ...

    @abstractmethod
    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any: ...


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel = None

    @abstractmethod
    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any,
        **extra_weight_attrs: Any,
    ) -> None: ...

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: Any) -> Any: ...

    def apply(
        self,
        layer: Any,
        x: Any,
        topk_weights: Any,
        topk_ids: Any,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Any:
        raise NotImplementedError


class BaseKVCacheMethod(QuantizeMethodBase):
    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config

    def create_weights(self, layer: Any) -> None:
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            setattr(layer, name, nn.Parameter(torch.tensor(-1.0), requires_grad=False))

    def apply(self, layer: Any) -> Any:
        raise RuntimeError("not called")


class Attention(nn.Module):
    pass


class MLAAttention(nn.Module):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    """Only to be returned: the stand-in runs no plain layers."""

    create_weights = apply = None  # type: ignore[assignment]


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    create_weights = get_fused_moe_quant_config = None  # type: ignore[assignment]


loader_v2_methods: list[str] = []


def register_weight_loader_v2_supported_method(cls: Any) -> Any:
    loader_v2_methods.append(cls.__name__)
    return cls
