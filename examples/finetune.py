"""Fine-tune a Hugging Face model in a script of your own, in one process or in several:

python examples/finetune.py MODEL_DIR TEXT_FILE NVME_DIR [TOKENS_OF_A_SEQUENCE]
torchrun --nproc_per_node=2 examples/finetune.py MODEL_DIR TEXT_FILE NVME_DIR [TOKENS_OF_A_SEQUENCE]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import overspill

if len(sys.argv) not in (4, 5):
    sys.exit(__doc__)
folder, text, nvme, *rest = sys.argv[1:]
target = overspill.output_folder("finetuned")  # an error, where it cannot be written, comes before training
length = int(rest[0]) if rest else 256
tokens = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(), return_tensors="pt").input_ids[0]
data = tokens[: len(tokens) // length * length].view(-1, length)
if len(data) == 0:
    sys.exit(
        f"{text} has {len(tokens)} tokens, and a sequence {length}: give more text, or shorter sequences"
    )
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

config = {
    "budget": {"host": "600MiB", "nvme": [nvme]},
    "optimizer": {"type": "AdamW", "lr": 5e-5},
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 4,
}
engine, optimizer, loader, _ = overspill.initialize(model=model, config=config, training_data=data)
for step, batch in enumerate(loader):
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / engine.world_size
    if engine.world_size > 1:
        torch.distributed.all_reduce(mean)
    if engine.rank == 0:
        print(f"step {step}  loss {mean.item():.5f}", flush=True)
engine.save_pretrained(target)  # opens with AutoModelForCausalLM.from_pretrained("finetuned")
