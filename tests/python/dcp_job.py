"""A rank of an FSDP2 run that saves with torch.distributed.checkpoint: dcp_job.py {nested,flat} FOLDER. Three steps, a
save, and three more, whose losses are in losses.json."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).with_name("data") / "deepspeed"))

from net import Net, batch


def main(form, folder):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step(number):
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.item()

    losses = [step(number) for number in range(3)]
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    weights, states = get_state_dict(model, optimizer, options=options)
    whole = {"model": weights, "optimizer": states, "lr_scheduler": scheduler.state_dict(), "epoch": 1}
    dcp.save(whole, checkpoint_id=folder)
    losses += [step(number) for number in range(3, 6)]
    if dist.get_rank() == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
