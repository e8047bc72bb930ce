"""TRL's trainers, plain and then over an engine, under torchrun: prints their losses and norms as JSON on rank 0.

trl_ranks_job.py MODEL FOLDER
"""

import json
import sys

import datasets
import launch
import torch
import trl
from test_trl import COMMON, over, parts, run, texts


def made(kind, arguments, rows, model_folder, out, **more):
    model, tokenizer = parts(model_folder)
    args = arguments(out, max_length=64, **COMMON)
    assert args.world_size == torch.distributed.get_world_size() == 2
    data = datasets.Dataset.from_list(rows)
    return kind(model, args=args, train_dataset=data, processing_class=tokenizer, **more)


def main(model_folder, folder):
    torch.set_num_threads(1)
    pairs = [{"prompt": each["text"], "chosen": " the end", "rejected": " an end of it"} for each in texts()]
    memory = {
        "budget": {"host": "256MiB", "nvme": [folder]},
        "engine": {"placement": "nvme", "chunk_elements": 4096},
    }
    found = {}
    for kind, arguments, rows in (
        (trl.SFTTrainer, trl.SFTConfig, texts()),
        (trl.DPOTrainer, trl.DPOConfig, pairs),
    ):
        name = kind.__name__
        plain = run(made(kind, arguments, rows, model_folder, f"{folder}/plain-{name}"))
        ours = made(over(kind), arguments, rows, model_folder, f"{folder}/{name}", overspill=memory)
        found[name] = plain, run(ours)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
    launch.end_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
