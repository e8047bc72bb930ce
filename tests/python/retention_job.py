"""One rank of two that save again and again, and fall back: prints what it has."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_scene import damage

import overspill
from overspill import retention


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    options = {"budget": {"host": "64MiB"}, "optimizer": {"type": "AdamW", "lr": 1e-2}}
    engine, *_ = overspill.initialize(torch.nn.Linear(16, 16), options)
    said = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            engine(torch.ones(2, 16)).square().mean().backward()
            engine.step()
            engine.save_checkpoint(f"{folder}/step-{step}", {"step": step}, keep_last=2)
        dist.barrier()
        if rank == 0:
            damage(Path(folder, "step-3"))
        dist.barrier()
        state = engine.load_checkpoint(folder, fall_back=True)
        said = [str(each.message) for each in warned if "skipped" in str(each.message)]
    read_back = retention.read_back

    def damaged(path):
        damage(path)
        read_back(path)

    retention.read_back = damaged
    try:
        engine.save_checkpoint(f"{folder}/step-4", keep_last=1)
        error = ""
    except overspill.OverspillError as raised:
        error = str(raised)
    engine.close()
    names = sorted(os.listdir(folder))
    print(
        json.dumps(
            {"state": state, "step": engine.global_steps, "said": said, "error": error, "names": names}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
