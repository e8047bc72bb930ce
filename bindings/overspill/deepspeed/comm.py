"""deepspeed.comm: torch.distributed, and a group of one rank where nothing else is set up."""

from __future__ import annotations

import os
from datetime import timedelta
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
    destroy_process_group,
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

# What says how many processes mpirun and srun have started.
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """The default group: as `init_method`, or torchrun, says, or of this process alone. Nothing where it is set up.
    auto_mpi_discovery, distributed_port, verbose, dist_init_required, config: without a meaning here.

    Raises RuntimeError where a launcher other than torchrun has started several processes.
    """
    if dist.is_initialized():
        return
    import torch

    backend = dist_backend if torch.cuda.is_available() else "gloo"
    if init_method is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, init_method, timeout, world_size, rank)
        return
    for name in _OTHER_LAUNCHERS:
        if os.environ.get(name, "1") != "1" and "RANK" not in os.environ:
            raise RuntimeError(
                f"overspill: {name} = {os.environ[name]}: there are several processes, and nothing says which rank "
                "this one is: start them by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
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
