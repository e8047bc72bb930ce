"""Write a model as a GGUF file, for llama.cpp and what is built on it.

Takes a Hugging Face folder (what merge writes) or a checkpoint, which is merged into a folder beside FILE first. Of
the Llama, Mistral and Qwen families: llama, mistral, qwen2, qwen3, qwen3_moe, with byte-level tokenizers or
SentencePiece's BPE. It needs pip install 'overspill[gguf]'.

examples:
  overspill export ./tuned tuned.gguf --type q8_0
  overspill export runs/first/checkpoints/step-000040 tuned.gguf
"""

import argparse

from overspill import gguf_file
from overspill.cli.common import path_of, sigterm_ends
from overspill.cli.progress import on_terminal
from overspill.memory import human


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=path_of, metavar="DIR", help="a model's folder, or a checkpoint")
    parser.add_argument("file", type=path_of, metavar="FILE", help="file to write: a new name")
    parser.add_argument(
        "--type",
        choices=gguf_file.TYPES,
        default="bf16",
        help="of matrices; q8_0 holds 32 weights in 34 bytes (default bf16)",
    )
    parser.add_argument(
        "--pre",
        metavar="NAME",
        help="llama.cpp's name of how the tokenizer cuts texts, where it is not found",
    )


def run(args: argparse.Namespace) -> int:
    with sigterm_ends():
        done = gguf_file.export_gguf(
            args.model, args.file, type=args.type, pre=args.pre, progress=on_terminal("export")
        )
    print(f"{args.file}: {done.tensors} tensors, {human(done.bytes)}, {args.type}")
    return 0
