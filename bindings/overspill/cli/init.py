"""Write a configuration and a training script for this machine, to start from.

overspill.json has a host budget of half the memory that is available now, and the folder on a disk that --nvme names
(default: the current one). train.py fine-tunes a causal language model on a text with it, and leaves a Hugging Face
folder. Both are yours to change. A file that is there is not replaced.
"""

import argparse
import json
import shutil
from pathlib import Path

from overspill import durable
from overspill.cli.common import CliError, nvme_folders, path_of
from overspill.memory import available_bytes, human

CONFIG, SCRIPT = "overspill.json", "train.py"
STEP_BYTES = 256 << 20  # budgets are multiples of it

TEXT = '''"""Fine-tunes a causal language model on a text.   python train.py MODEL_DIR TEXT_FILE [TOKENS_OF_A_SEQUENCE]

MODEL_DIR is a Hugging Face folder, e.g. of `hf download HuggingFaceTB/SmolLM2-135M --local-dir MODEL_DIR`.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

import overspill

if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
folder, text, *rest = sys.argv[1:]
length = int(rest[0]) if rest else 256
target = overspill.output_folder("finetuned")  # an error, where it cannot be written, comes before training
tokens = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(), return_tensors="pt").input_ids[0]
data = tokens[: len(tokens) // length * length].view(-1, length)  # a sequence a row
if len(data) == 0:
    sys.exit(f"{text} has {len(tokens)} tokens, and a sequence {length}: give more text, or shorter sequences")

config = Path(__file__).with_name("overspill.json")
engine, optimizer, loader, _ = overspill.initialize(config=config, checkpoint=folder, training_data=data)
print(engine.plan)
for step, batch in enumerate(loader):
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    print(f"step {step}  loss {loss.item():.4f}", flush=True)
engine.save_pretrained(target)  # opens with AutoModelForCausalLM.from_pretrained("finetuned")
'''


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nvme", action="append", metavar="DIR", help="folder on a fast disk (default: the current folder)"
    )
    parser.add_argument(
        "--out",
        type=path_of,
        default=Path("."),
        metavar="DIR",
        help="where the two files go (default: the current folder)",
    )


def run(args: argparse.Namespace) -> int:
    folders = nvme_folders(args.nvme or ["."])
    taken = [path for path in (args.out / CONFIG, args.out / SCRIPT) if path.exists()]
    if taken:
        raise CliError(f"{taken[0]} is there already; move it away, or name another folder with --out")
    available = available_bytes()
    durable.make_folders(args.out)
    durable.write_text(args.out / CONFIG, json.dumps(starter(available, folders), indent=2) + "\n")
    durable.write_text(args.out / SCRIPT, TEXT)
    print(f"memory: {human(available)} available now, of which {args.out / CONFIG} takes half")
    for folder in folders:
        print(f"{folder}: {human(shutil.disk_usage(folder).free)} free for weights and states")
    print(
        f"wrote {args.out / CONFIG} and {args.out / SCRIPT}\n"
        f"what fits:  overspill plan --model MODEL_DIR --config {args.out / CONFIG}\n"
        f"train:      python {args.out / SCRIPT} MODEL_DIR TEXT_FILE\n"
        f"or:         overspill train --model MODEL_DIR --data TEXT_FILE --config {args.out / CONFIG} --out runs/first"
    )
    return 0


def starter(available: int, folders: list[str]) -> dict:
    """The configuration for a machine with so many bytes of memory."""
    host = max(STEP_BYTES, available // 2 // STEP_BYTES * STEP_BYTES)
    return {
        "budget": {"host": f"{host >> 20}MiB", "nvme": folders},
        "optimizer": {"type": "AdamW", "lr": 5e-5, "weight_decay": 0.01},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 4,
    }
