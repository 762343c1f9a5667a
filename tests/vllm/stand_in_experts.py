"""Part of the stand-in for vLLM (stand_in.py): methods that quantize while a checkpoint is loaded, and routed
experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stand_in_layers import ModelWeightParameter
from stand_in_methods import (
    FusedMoEMethodBase,
    LinearMethodBase,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    set_weight_attrs,
)

# ---- quantizing while loading ----


def initialize_online_processing(layer: Any) -> None:
    """A layer of meta tensors gets memory when its first tensor is loaded, on the device that is the default
    here, and is processed after the last one."""
    device, left = torch.get_default_device(), sum(param.numel() for param in layer.parameters())

    def wrapped(name: str, original: Any) -> Any:
        def online_process_loader(param: Any, loaded_weight: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal left
            mine = getattr(layer, name)
            if mine.is_meta:
                made = nn.Parameter(torch.empty_like(mine, device=device), requires_grad=False)
                made.__class__ = mine.__class__
                made.__dict__.update(mine.__dict__)
                layer.register_parameter(name, made)
                mine = made
            original(mine, loaded_weight, *args, **kwargs)
            left -= loaded_weight.numel() // get_tensor_model_parallel_world_size()
            if not left:
                layer.quant_method.process_weights_after_loading(layer)

        return online_process_loader

    for name, param in list(layer.named_parameters()):
        param.weight_loader = wrapped(name, param.weight_loader)


class OnlineLinearBase(LinearMethodBase):
    uses_meta_device = True

    def __init__(self) -> None:
        self.input_dtype = torch.get_default_dtype()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: Any,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = sum(output_partition_sizes), input_size_per_partition
        data = torch.empty(shape, device="meta", dtype=params_dtype)
        loader = extra_weight_attrs["weight_loader"]
        layer.weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        initialize_online_processing(layer)


class OnlineMoEMethodBase(FusedMoEMethodBase):
    uses_meta_device = True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any,
        **extra_weight_attrs: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        for name, shape in (("w13", (2 * inner, hidden_size)), ("w2", (hidden_size, inner))):
            data = torch.empty(num_experts, *shape, device="meta", dtype=params_dtype)
            layer.register_parameter(f"{name}_weight", nn.Parameter(data, requires_grad=False))
            set_weight_attrs(getattr(layer, f"{name}_weight"), extra_weight_attrs)
        initialize_online_processing(layer)


# ---- experts ----

FUSED_MOE_UNQUANTIZED_CONFIG = SimpleNamespace(name="unquantized")


class FusedMoeWeightScaleSupported(Enum):
    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"


@dataclass
class FusedMoEConfig:
    num_experts: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    activation: MoEActivation = MoEActivation.SILU
    has_bias: bool = False
    is_act_and_mul: bool = True  # in vLLM a property of the activation


class ExpertMap:
    """In place of vLLM's ExpertMapManager: experts here, and -1 for those of other ranks."""

    def __init__(self, total: int, first: int = 0, count: int | None = None) -> None:
        self.local_num_experts = total if count is None else count
        places = [i - first if first <= i < first + self.local_num_experts else -1 for i in range(total)]
        self.expert_map = None if count is None else torch.tensor(places, dtype=torch.int32)
        self.map_global_to_local = places.__getitem__


class RoutedExperts(nn.Module):
    def __init__(
        self,
        layer_name: str,
        params_dtype: Any,
        moe_config: Any,
        quant_config: Any,
        expert_map_manager: Any,
        ckpt_gate_proj_name: str = "gate_proj",
        ckpt_down_proj_name: str = "down_proj",
        ckpt_up_proj_name: str | None = "up_proj",
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        swiglu_beta: float | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> None:
        super().__init__()
        self.moe_config, self.expert_map_manager = moe_config, expert_map_manager
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name = ckpt_gate_proj_name, ckpt_up_proj_name
        self.ckpt_down_proj_name, self.activation = ckpt_down_proj_name, moe_config.activation
        self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta = swiglu_limit, swiglu_alpha, swiglu_beta
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.tp_rank, self.tp_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.register_buffer("_expert_map", expert_map_manager.expert_map, persistent=False)
        self.quant_config, self.quant_method = quant_config, quant_config.get_quant_method(self, layer_name)
        self.quant_method.create_weights(
            layer=self,
            num_experts=moe_config.num_local_experts,
            hidden_size=moe_config.hidden_dim,
            unpadded_hidden_size=moe_config.hidden_dim,
            intermediate_size_per_partition=moe_config.intermediate_size_per_partition,
            params_dtype=params_dtype,
            weight_loader=self.weight_loader,
            global_num_experts=moe_config.num_experts,
        )

    @property
    def expert_map(self) -> Any:
        return self._expert_map

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Any,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if self.quant_config.get_name() == "gpt_oss_mxfp4":  # all experts in one tensor
            param.data[tuple(slice(size) for size in loaded_weight.shape)].copy_(loaded_weight)
            return True if return_success else None
        local = self.expert_map_manager.map_global_to_local(expert_id)
        if local >= 0:
            self._load(param, param.data[local], loaded_weight, weight_name, shard_id)
        return local >= 0 if return_success else None

    def _load(self, param: Any, mine: Any, given: Any, weight_name: str, shard_id: str) -> None:
        kind, first = getattr(param, "quant_method", None), shard_id in ("w1", "w3")
        if "input_scale" in weight_name:
            mine[...] = given
        elif kind == "tensor":
            mine[int(shard_id == "w3") if first else ...] = given.reshape(())
        elif first:
            half = mine.shape[0] // 2
            part = given.narrow(0, given.shape[0] // self.tp_size * self.tp_rank, half)
            mine.narrow(0, half * (shard_id == "w3"), half).copy_(part)
        elif "bias" in weight_name or kind == "channel":
            mine.copy_(given)
        else:
            mine.copy_(given.narrow(1, mine.shape[1] * self.tp_rank, mine.shape[1]))

    def forward_modular(
        self,
        x: Any,
        topk_weights: Any,
        topk_ids: Any,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Any:
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
