"""One rank of test_generation.py:   generation_job.py FOLDER STAGE

Each rank goes on from another prompt for another number of tokens, over frozen weights in 4 bits."""

import sys
from pathlib import Path

import tiny
import torch
from test_generation import llama

import overspill

folder, stage = Path(sys.argv[1]), int(sys.argv[2])
model = llama().requires_grad_(False)
model.model.norm.weight.requires_grad_(True)
config = {
    "budget": {"host": "64MiB", "nvme": [str(folder)]},
    "zero_optimization": {"stage": stage},
    "frozen": {"format": "nf4"},
    "engine": {"chunk_elements": 4096, "threads": 1, "placement": "nvme"},
}
engine = overspill.initialize(model, config).engine.eval()
prompt = torch.arange(1, 4 + engine.rank)[None] % tiny.SMALL["vocab_size"]
count = 4 + 3 * engine.rank
tokens = engine.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
torch.save((prompt, tokens), folder / f"tokens-{engine.rank}.pt")
engine.close()
