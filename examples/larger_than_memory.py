"""Train a model that does not fit in memory, from random weights.   python examples/larger_than_memory.py NVME_DIR"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overspill

if len(sys.argv) != 2:
    sys.exit(__doc__)
config = {"budget": {"host": "1500MiB", "nvme": [sys.argv[1]]}, "optimizer": {"lr": 1e-5}}
torch.manual_seed(0)
with overspill.Init(config):  # one parameter at a time: the rest is on disk
    model = LlamaForCausalLM._from_config(LlamaConfig(num_hidden_layers=4), dtype=torch.bfloat16)
model.requires_grad_(False)
model.model.layers[-1].requires_grad_(True)
engine, optimizer, _, _ = overspill.initialize(model, config)
print(engine.plan_text)
ids = torch.randint(0, model.config.vocab_size, (1, 64))
for step in range(3):
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    print(f"step {step}  loss {loss.item():.4f}", flush=True)
