"""Train a model that does not fit in memory, from random weights.   python examples/larger_than_memory.py NVME_DIR"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import overspill

if len(sys.argv) != 2:
    sys.exit(__doc__)
config = {"budget": {"host": "1500MiB", "nvme": [sys.argv[1]]}, "optimizer": {"lr": 1e-5}}
torch.manual_seed(0)
with overspill.Init(config):  # one parameter at a time: the rest is on disk
    config_of_model = LlamaConfig(num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config_of_model, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
model.requires_grad_(False)
model.model.layers[-1].requires_grad_(True)
engine = overspill.initialize(model, config).engine
print(engine.plan)
ids = torch.randint(0, model.config.vocab_size, (1, 64))
for step in range(3):
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    print(f"step {step}  loss {loss.item():.4f}", flush=True)
