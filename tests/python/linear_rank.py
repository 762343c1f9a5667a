"""One rank of test_linear_distributed.py: `linear_rank.py <device> <rank> <world> <folder> [<case>...]`. It
runs the cases of its world in order, by gloo or, with the device cuda, by NCCL and with a GPU for each rank,
and writes the name of each one that passes to <folder>/done<rank>. All cases run in the same processes, because
starting them takes longer than most cases. The cases are in linear_rank_*.py."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from linear_rank_delayed import delayed
from linear_rank_dtensor import dtensor
from linear_rank_errors import errors
from linear_rank_fsdp import from_meta, fsdp, two_dimensions
from linear_rank_layers import Rank
from linear_rank_pairs import inductor, pair
from linear_rank_parallel import options, tensor_parallel
from linear_rank_states import state_dicts

# By name: the case, and the numbers of ranks that it runs on.
CASES = {
    function.__name__: (function, worlds)
    for function, worlds in (
        (errors, (2, 4)),
        (tensor_parallel, (2, 4)),
        (options, (2,)),
        (delayed, (2, 4)),
        (pair, (2, 4)),
        (dtensor, (2, 4)),
        (state_dicts, (2,)),
        (fsdp, (2,)),
        (from_meta, (2,)),
        (two_dimensions, (4,)),
        (inductor, (2,)),
    )
}


def main() -> None:
    me = Rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[1])
    torch.set_num_threads(1)
    if me.device != "cpu":
        torch.cuda.set_device(me.rank)
        torch.set_default_device(me.device)
    dist.init_process_group(
        "gloo" if me.device == "cpu" else "nccl",
        init_method=(me.folder / "store").as_uri(),
        rank=me.rank,
        world_size=me.world,
        timeout=datetime.timedelta(seconds=120),
    )
    wanted = sys.argv[5:]
    for name, (function, worlds) in CASES.items():
        if me.world in worlds and (not wanted or name in wanted):
            begin = time.monotonic()
            print(f"== {name}", flush=True)
            function(me)
            dist.barrier()
            print(f"== {time.monotonic() - begin:.1f} s", flush=True)
            with (me.folder / f"done{me.rank}").open("a") as done:
                done.write(f"{name}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
