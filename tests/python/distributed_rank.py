"""One rank of test_torch_distributed.py: `distributed_rank.py <case> <rank> <world> <folder>`. A case is a
function below; the exit status is 0 if it passes on this rank."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from opaq import QuantizedTensor, quantize_tensor

ROWS, COLUMNS = 512, 192  # two shards of 256 rows, which have whole blocks with every quantizer
QUANTIZERS = (
    *("fp8", "fp8.e5m2+columnwise", "fp8row+both", "fp8blk1+both", "fp8blk2", "fp8blk2+both+pow2"),
    *("mxfp8", "mxfp8+both", "mxfp8+both+2d+swizzle", "mxfp4", "mxfp4+columnwise+swizzle"),
    *("nvfp4", "nvfp4+both", "nvfp4+both+2d", "nvfp4+both+rht+swizzle", "nvfp4+rowscaled"),
)
# numbers of rows for which two ranks would split a block, and the multiple of rows that the quantizer needs
CUT_BLOCKS = (
    *(("fp8blk2", 128, 128), ("fp8blk2+both", 192, 128), ("fp8blk1+columnwise", 128, 128)),
    *(("mxfp8+both", 32, 32), ("mxfp4+2d", 32, 32), ("nvfp4+columnwise", 16, 16), ("nvfp4+2d", 48, 16)),
)


class Linear(nn.Module):
    """x times a quantized weight, plus a plain bias, so that FSDP2 gathers bytes and floats together."""

    def __init__(self, weight: torch.Tensor, quantizer: str, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantize_tensor(weight, quantizer), requires_grad=trained)
        self.bias = nn.Parameter(torch.arange(len(weight), dtype=weight.dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.dequantize(), self.bias)


class RecordedAllGather:
    """FSDP2's all-gather; records the inputs of each call."""

    def __init__(self) -> None:
        self.sent: list[tuple[torch.dtype, int]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.sent.append((input_tensor.dtype, input_tensor.nbytes))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def shard(module: nn.Module, **options: Any) -> Any:
    """fully_shard on the CPU, also if PyTorch has an accelerator."""
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers that are the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def byte_count(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def error_of(call: Any) -> str:
    """The text of the exception that the call raises on this rank."""
    try:
        call()
    except BaseException as error:  # CheckpointException is not an Exception
        return str(error)
    raise AssertionError("no exception was raised")


def gather(rank: int, world: int, folder: Path) -> None:
    """FSDP2 gathers only the quantized bytes, and the gathered weight equals the whole one byte for byte."""
    for quantizer in QUANTIZERS:
        weight, x = numbers(ROWS, COLUMNS), numbers(3, COLUMNS, seed=1)
        whole, sharded = Linear(weight, quantizer), Linear(weight, quantizer)
        shard(sharded, reshard_after_forward=True)
        comm = RecordedAllGather()
        sharded.set_custom_all_gather(comm)
        assert isinstance(sharded.weight, DTensor), quantizer
        mine = sharded.weight.to_local()
        assert isinstance(mine, QuantizedTensor), quantizer
        step = ROWS // world
        assert torch.equal(mine, whole.weight[rank * step : (rank + 1) * step]), quantizer

        gathered: list[torch.dtype] = []
        pre_all_gather = QuantizedTensor.fsdp_pre_all_gather

        def watched(self: Any, *arguments: Any, hook: Any = pre_all_gather, seen: Any = gathered) -> Any:
            inputs, metadata = hook(self, *arguments)
            seen += [tensor.dtype for tensor in inputs]
            return inputs, metadata

        # FSDP2 counts the hook's parameters, so its replacement has as many.
        QuantizedTensor.fsdp_pre_all_gather = lambda self, a, b, c, d, e: watched(self, a, b, c, d, e)
        try:
            for _ in range(3):  # the first allocates the gathered weight, the others write into it
                assert torch.equal(sharded(x), whole(x)), quantizer
                assert isinstance(sharded.weight, DTensor), quantizer  # sharded again
        finally:
            QuantizedTensor.fsdp_pre_all_gather = pre_all_gather

        assert gathered == [buffer.dtype for _ in range(3) for buffer in whole.weight.buffers()], quantizer
        assert gathered[0] == torch.uint8, quantizer
        expected = byte_count(mine.buffers()) + byte_count([whole.bias]) // world
        assert comm.sent == [(torch.uint8, expected)] * 3, (quantizer, comm.sent, expected)

        sharded.unshard()
        assert isinstance(sharded.weight, QuantizedTensor), quantizer
        assert sharded.weight.quantizer == whole.weight.quantizer
        assert torch.equal(sharded.weight, whole.weight), quantizer
        sharded.reshard()


def train(rank: int, world: int, folder: Path) -> None:
    """FSDP2's mixed precision sets the weight's dtype; gradients of quantized weights are plain tensors."""
    weight, x = numbers(ROWS, COLUMNS), numbers(3, COLUMNS, seed=1)
    for quantizer in ("mxfp8", "nvfp4+both", "fp8"):
        half = Linear(weight, quantizer)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        shard(half, mp_policy=policy, reshard_after_forward=True)
        whole = Linear(weight, quantizer)
        dequantized = whole.weight.dequantize(torch.bfloat16)
        expected = nn.functional.linear(x.bfloat16(), dequantized, whole.bias.bfloat16())
        for _ in range(2):
            made = half(x)
            assert made.dtype == torch.bfloat16
            assert torch.equal(made, expected), quantizer

        trained = Linear(weight, quantizer, trained=True)
        shard(trained)
        trained(x * (rank + 1)).sum().backward()
        whole = Linear(weight, quantizer, trained=True)
        whole(x * (world + 1) / 2).sum().backward()  # the mean over the ranks
        step = ROWS // world
        mine = whole.weight.grad[rank * step : (rank + 1) * step]
        torch.testing.assert_close(trained.weight.grad.to_local(), mine)


def refuse(rank: int, world: int, folder: Path) -> None:
    """Shards that cannot be created or gathered are an error on every rank, and the process can continue."""
    for quantizer, rows, multiple in CUT_BLOCKS:
        module = Linear(numbers(rows, COLUMNS), quantizer)
        message = error_of(lambda module=module: shard(module))
        assert "cut a block in two" in message, message
        assert f"multiples of {multiple} rows" in message, message
        dist.barrier()
    for rows in (1, 3, 257):
        module = Linear(numbers(rows, COLUMNS), "mxfp8")
        message = error_of(lambda module=module: shard(module)(numbers(2, COLUMNS)))
        # PyTorch pads the last rank's shard, which fails before the gathering on the other ranks
        assert f"{rows} rows are not divided evenly by {world} ranks" in message or rank == world - 1, message
        assert "evenly" in message, message
        dist.barrier()


def checkpoint(rank: int, world: int, folder: Path) -> None:
    """torch.distributed.checkpoint of quantized weights: saved and loaded whole and sharded, in all pairs."""
    weight = numbers(ROWS, COLUMNS)
    for number, quantizer in enumerate(QUANTIZERS):
        whole, sharded = Linear(weight, quantizer), Linear(weight, quantizer)
        shard(sharded)
        saved = {"whole": folder / f"whole{number}", "sharded": folder / f"sharded{number}"}
        dcp.save(whole.state_dict(), checkpoint_id=saved["whole"])
        dcp.save(sharded.state_dict(), checkpoint_id=saved["sharded"])
        for source, path in saved.items():
            size = sum(file.stat().st_size for file in path.glob("*.distcp"))
            assert size < byte_count([*whole.weight.buffers(), whole.bias]) + 16384, (quantizer, source, size)

            other = Linear(numbers(ROWS, COLUMNS, seed=2), quantizer)
            shard(other)
            state = other.state_dict()
            dcp.load(state, checkpoint_id=path)
            other.load_state_dict(state)
            assert torch.equal(other.weight.to_local(), sharded.weight.to_local()), (quantizer, source)
            other.unshard()
            assert torch.equal(other.weight, whole.weight), (quantizer, source)
            assert torch.equal(other.bias, whole.bias), (quantizer, source)

            plain = {"weight": torch.zeros(ROWS, COLUMNS)}
            dcp.load(plain, checkpoint_id=path)
            assert torch.equal(plain["weight"], whole.weight.dequantize()), (quantizer, source)

            state = Linear(numbers(ROWS, COLUMNS, seed=2), quantizer).state_dict()
            if source == "whole":
                dcp.load(state, checkpoint_id=path)
                assert torch.equal(state["weight"], whole.weight), quantizer
            else:  # it would be loaded in pieces, and a piece does not share memory with the whole
                message = error_of(lambda state=state, path=path: dcp.load(state, checkpoint_id=path))
                assert "does not share its memory" in message, message
        dist.barrier()


CASES = {function.__name__: function for function in (gather, train, refuse, checkpoint)}


def main() -> None:
    case, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    CASES[case](rank, world, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
