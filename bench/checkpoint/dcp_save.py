"""torch.distributed.checkpoint as a contender of bench/checkpoint/run.py: weights and AdamW's states in fp32.

bench/checkpoint/dcp_save.py '{"shape": …}'
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/step"))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import gpt
from places import bytes_of
from turns import serve


def ready():
    """A model that was trained for one step."""
    shape = gpt.Shape(*json.loads(sys.argv[1])["shape"])
    warnings.filterwarnings("ignore", category=UserWarning)  # that there is one process
    model = gpt.make(shape, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model(gpt.batch(shape, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)

    def save(folder: str, threads: int) -> dict[str, Any]:
        """Seconds until all is durable."""
        began = time.perf_counter()
        writer = dcp.FileSystemWriter(folder, thread_count=threads)
        dcp.save({"model": weights, "optim": states}, storage_writer=writer, no_dist=True)
        return {"complete": time.perf_counter() - began, "bytes": bytes_of(Path(folder))}

    return {"parameters": sum(p.numel() for p in model.parameters())}, {"save": save}


if __name__ == "__main__":
    serve(ready)
