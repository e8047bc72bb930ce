"""deepspeed.comm: torch.distributed, and a group of one rank where nothing else is set up."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # noqa: F401  # the module has them, as DeepSpeed's has
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    get_backend,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
    recv,
    reduce,
    reduce_scatter_tensor,
    scatter,
    send,
)


def init_distributed(dist_backend: str | None = None, *_: Any, **__: Any) -> None:
    """The default group: as torchrun says, or of this process alone. Nothing where it is set up."""
    if dist.is_initialized():
        return
    import torch

    backend = dist_backend if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def get_rank(group: Any = None) -> int:
    """0 where no group is set up."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """1 where no group is set up."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """The rank on this machine, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))
