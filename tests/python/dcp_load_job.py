"""A rank of an FSDP2 run that goes on from a folder of torch.distributed.checkpoint:
dcp_load_job.py FOLDER OUT {fp32,bf16} {nested,flat}. Three steps, whose losses are written to OUT."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.append(str(Path(__file__).with_name("data") / "deepspeed"))

from net import Net, train


def main(folder, out, dtype, form):
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = Net()
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model.scale = model.scale.bfloat16()
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=7.0)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    weights, states = get_state_dict(model, optimizer, options=options)
    found = {"model": weights, "optim": states}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"], options=options
    )
    losses = train(model, optimizer, range(3, 6))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
