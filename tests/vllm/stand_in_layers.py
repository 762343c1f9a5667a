"""Part of the stand-in for vLLM (stand_in.py): parameters, and linear layers with their shards and loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stand_in_methods import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    loader_v2_methods,
)

# ---- parameters ----


class BasevLLMParameter(nn.Parameter):
    def __new__(cls, data: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Any, weight_loader: Callable[..., Any]) -> None:
        self.weight_loader = weight_loader
        self.tp_rank = get_tensor_model_parallel_rank()
        self.tp_size = get_tensor_model_parallel_world_size()

    def _load(self, loaded_weight: Any) -> None:
        assert self.data.shape == loaded_weight.shape or self.numel() == loaded_weight.numel() == 1
        self.data.copy_(loaded_weight)

    def _load_part(self, loaded_weight: Any, dim: int, offset: int, size: int, rank: int) -> None:
        part, given = self.data.narrow(dim, offset, size), loaded_weight.narrow(dim, rank * size, size)
        assert part.shape == given.shape
        part.copy_(given)


class _Column(BasevLLMParameter):
    def __init__(self, output_dim: int, **kwargs: Any) -> None:
        self.output_dim = output_dim
        super().__init__(**kwargs)

    def load_column_parallel_weight(self, loaded_weight: Any) -> None:
        size = self.data.shape[self.output_dim]
        self._load_part(loaded_weight, self.output_dim, 0, size, self.tp_rank)

    def load_merged_column_weight(self, loaded_weight: Any, **kwargs: Any) -> None:
        offset, size = kwargs["shard_offset"], kwargs["shard_size"]
        self._load_part(loaded_weight, self.output_dim, offset, size, self.tp_rank)

    def load_qkv_weight(self, loaded_weight: Any, **kwargs: Any) -> None:
        offset, size = kwargs["shard_offset"], kwargs["shard_size"]
        rank = self.tp_rank if kwargs["shard_id"] == "q" else self.tp_rank // kwargs["num_heads"]
        self._load_part(loaded_weight, self.output_dim, offset, size, rank)

    def load_row_parallel_weight(self, loaded_weight: Any) -> None:  # as all parameters have it
        self._load(loaded_weight)


class RowvLLMParameter(BasevLLMParameter):
    def __init__(self, input_dim: int, **kwargs: Any) -> None:
        self.input_dim = input_dim
        super().__init__(**kwargs)

    def load_row_parallel_weight(self, loaded_weight: Any) -> None:
        self._load_part(loaded_weight, self.input_dim, 0, self.data.shape[self.input_dim], self.tp_rank)


class _Both(_Column, RowvLLMParameter):
    load_row_parallel_weight = RowvLLMParameter.load_row_parallel_weight


class ModelWeightParameter(_Both):
    pass


class GroupQuantScaleParameter(_Both):
    pass


class BlockQuantScaleParameter(_Both):
    pass


class ChannelQuantScaleParameter(_Column):
    pass


class PerTensorScaleParameter(BasevLLMParameter):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def load_row_parallel_weight(self, *args: Any, **kwargs: Any) -> None:
        self._load(*args, **kwargs)

    load_column_parallel_weight = load_row_parallel_weight

    def load_merged_column_weight(self, *args: Any, **kwargs: Any) -> None:
        self._load_into_shard_id(*args, **kwargs)

    load_qkv_weight = load_merged_column_weight

    def _load_into_shard_id(self, loaded_weight: Any, shard_id: Any, **kwargs: Any) -> None:
        index = {"q": 0, "k": 1, "v": 2}.get(shard_id, shard_id)
        self.data[index].copy_(loaded_weight.reshape(()))


# ---- linear layers ----


class LinearBase(nn.Module):
    """Layers whose weights are created by the method, with the loader of the second version."""

    def _create(
        self,
        sizes: tuple[int, int],
        part: int,
        parts: list[int],
        bias: bool,
        dtype: Any,
        config: Any,
        prefix: str,
    ) -> None:
        """sizes: of the whole layer's input and output. part, parts: of this rank's."""
        super().__init__()
        self.input_size, self.output_size = sizes
        self.tp_rank, self.tp_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.quant_method = config.get_quant_method(self, prefix=prefix)
        assert type(self.quant_method).__name__ in loader_v2_methods
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=part,
            output_partition_sizes=parts,
            input_size=self.input_size,
            output_size=self.output_size,
            params_dtype=dtype,
            weight_loader=self.weight_loader_v2,
        )
        made = nn.Parameter(torch.empty(sum(parts), dtype=dtype), requires_grad=False) if bias else None
        self.register_parameter("bias", made)
        self.update_param_tp_status()

    def update_param_tp_status(self) -> None:
        for param in self.parameters():
            if isinstance(param, BasevLLMParameter):
                param.tp_rank, param.tp_size = self.tp_rank, self.tp_size

    def _scale_rows(self, param: Any, size: int, offset: int) -> tuple[int, int]:
        """Rows of a weight as rows of scales."""
        block = self.weight_block_size[0] if isinstance(param, BlockQuantScaleParameter) else 1
        return -(-size // block), -(-offset // block)


class ColumnParallelLinear(LinearBase):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        params_dtype: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        outputs = getattr(self, "output_sizes", [output_size])
        parts = [size // get_tensor_model_parallel_world_size() for size in outputs]
        self._create((input_size, output_size), input_size, parts, bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param: Any, loaded_weight: Any) -> None:
        given = loaded_weight.reshape(1) if loaded_weight.dim() == 0 else loaded_weight
        param.load_column_parallel_weight(loaded_weight=given)

    def forward(self, input_: Any) -> Any:
        return self.quant_method.apply(self, input_, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        params_dtype: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        self.__dict__["output_sizes"] = output_sizes
        super().__init__(input_size, sum(output_sizes), bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param: Any, loaded_weight: Any, loaded_shard_id: Any = None) -> None:
        outputs = self.__dict__["output_sizes"]
        offset = sum(outputs[:loaded_shard_id]) // self.tp_size
        size, offset = self._scale_rows(param, outputs[loaded_shard_id] // self.tp_size, offset)
        param.load_merged_column_weight(
            loaded_weight=loaded_weight, shard_id=loaded_shard_id, shard_offset=offset, shard_size=size
        )


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        params_dtype: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        kv_heads = total_num_kv_heads or total_num_heads
        rows = [total_num_heads * head_size, kv_heads * head_size, kv_heads * head_size]
        self.__dict__["output_sizes"] = rows
        super().__init__(hidden_size, sum(rows), bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param: Any, loaded_weight: Any, loaded_shard_id: str | None = None) -> None:
        index = "qkv".index(str(loaded_shard_id))
        rows = [size // self.tp_size for size in self.__dict__["output_sizes"]]
        size, offset = self._scale_rows(param, rows[index], sum(rows[:index]))
        param.load_qkv_weight(
            loaded_weight=loaded_weight,
            num_heads=1,
            shard_id=loaded_shard_id,
            shard_offset=offset,
            shard_size=size,
        )


class RowParallelLinear(LinearBase):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        params_dtype: Any = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        part = input_size // get_tensor_model_parallel_world_size()
        self._create((input_size, output_size), part, [output_size], bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param: Any, loaded_weight: Any) -> None:
        given = loaded_weight.reshape(1) if loaded_weight.dim() == 0 else loaded_weight
        param.load_row_parallel_weight(loaded_weight=given)

    def forward(self, input_: Any) -> Any:
        return self.quant_method.apply(self, input_, self.bias)
