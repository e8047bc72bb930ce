"""Write text with a Hugging Face model on the CPU.

The text is printed as it is made. Temperature 0 takes the likeliest token each time.
"""

import argparse
import sys
from pathlib import Path

from overspill.cli.common import (
    load_tokenizer,
    model_folder,
    natural,
    nonnegative,
    positive,
    quiet_transformers,
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder, e.g. of merge"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.add_argument("--temperature", type=nonnegative, default=0.0, metavar="T")
    parser.add_argument("--seed", type=natural, default=0)


def run(args: argparse.Namespace) -> int:
    folder = model_folder(args.model)
    quiet_transformers()
    import torch
    from transformers import AutoModelForCausalLM, TextStreamer

    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    inputs = tokenizer(
        args.prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False
    )
    torch.manual_seed(args.seed)
    sampling = (
        {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    )
    model.generate(
        **inputs,
        **sampling,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )
    sys.stdout.flush()
    return 0
