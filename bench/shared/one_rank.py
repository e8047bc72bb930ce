"""A world of one rank for DeepSpeed, without its launcher."""

import os
import socket


def be_one_rank(accelerator: str) -> None:
    """Sets what DeepSpeed reads from the environment. Before it is imported; `accelerator`: cpu or cuda."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.setdefault("DS_ACCELERATOR", accelerator)
