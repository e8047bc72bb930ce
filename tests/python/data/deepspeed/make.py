"""Made the checkpoints beside it, with DeepSpeed 0.19.6 and torch 2.13 on the CPU:

    torchrun --nproc_per_node RANKS make.py STAGE {fp32,bf16} FOLDER

Three steps, a save, and three more, whose losses are in losses.json. Every rank has the same batches. The folders
universal2 and universal3 were made of such by python -m deepspeed.checkpoint.ds_to_universal, which wants an entry
universal_checkpoint_info in the client_state at stage 2.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from net import Net, batch


def main(stage, dtype, folder):
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def step(number):
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        return loss.item()

    losses = [step(number) for number in range(3)]
    state = {"epoch": 1} | (
        {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}} if stage == 2 else {}
    )
    engine.save_checkpoint(folder, client_state=state)
    losses += [step(number) for number in range(3, 6)]
    if engine.global_rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
