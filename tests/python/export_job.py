"""One rank of test_export.py:   export_job.py FOLDER STAGE"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overspill
from overspill import durable, exporting

folder, stage = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
).bfloat16()
config = {
    "budget": {"host": "64MiB"},
    "optimizer": {"lr": 1e-2},
    "zero_optimization": {"stage": stage},
    "engine": {"chunk_elements": 4096, "threads": 1},
}
engine, *_ = overspill.initialize(model, config)
ids = torch.arange(24).view(2, 12) % 64  # the same on all ranks: the mean is what one rank has
engine.backward(engine(input_ids=ids, labels=ids).loss)
engine.step()
engine.save_pretrained(folder / f"out-{engine.world_size}")
said = {}


def refused(name: str) -> None:
    try:
        engine.save_pretrained(folder / name)
    except (overspill.OverspillError, OSError) as error:
        said[name] = str(error)


refused("taken")
if engine.rank == 0:  # its disk fails in the middle, and the other rank has all weights to read still

    def fail(*arguments) -> None:
        raise OSError(28, "No space left on device", "disk")

    exporting._write_value = fail
refused("full")
assert not durable.part_of(folder / "full").exists() and not (folder / "full").exists()
(folder / f"said-{engine.world_size}-{engine.rank}.json").write_text(json.dumps(said))
engine.close()
