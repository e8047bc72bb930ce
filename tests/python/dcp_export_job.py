"""A rank of an engine whose checkpoint is exported: dcp_export_job.py FOLDER. Three steps, a save, an export by rank 0,
and three more steps, whose losses are in FOLDER/losses.json."""

import json
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).with_name("data") / "deepspeed"))

from net import Net, batch

import overspill


def main(folder):
    torch.manual_seed(0)
    config = {
        "budget": {"host": "64MiB"},
        "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.01},
        "zero_optimization": {"stage": 3},
        "engine": {"chunk_elements": 64, "threads": 1},
    }
    engine, *_ = overspill.initialize(Net(), config)

    def step(number):  # the same batch on all ranks: the mean is what one rank has
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        return loss.item()

    for number in range(3):
        step(number)
    engine.save_checkpoint(folder / "saved")
    if engine.rank == 0:
        overspill.export_dcp(folder / "saved", folder / "dcp")
    losses = [step(number) for number in range(3, 6)]
    if engine.rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
