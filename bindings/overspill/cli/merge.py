"""Turn a checkpoint into a Hugging Face folder: safetensors, config, tokenizer.

Weights are streamed, in memory of about one tensor. bf16 reads only the halves that forward uses; fp32 writes the exact
masters. Buffers are written as they are. Names and shapes have to be those of a class that config.json means; the last
line names that class, or says why they were not compared. Experts of a mixture have the fused names of transformers 5
(experts.gate_up_proj), which older versions do not know. The folder appears under its name only when it is whole.

Several checkpoints are the parts of one model, divided by tensor or expert parallelism; they are joined. Parts of
DTensors, and those of an engine with a model_group, say which part they are, so their order does not matter; any others
are given in order. How DTensors were divided the checkpoints know. Parts divided by hand follow --rules, else the table
of config.json's family (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma, phi3, gpt2, gpt_neox and more). What
every part has whole has to be equal in all of them.

examples:
  overspill merge runs/first/checkpoints/step-000040 ./tuned
  overspill merge runs/first/checkpoints/step-000040 ./exact --dtype fp32 --model ./base
  overspill merge saved/part0 saved/part1 ./tuned --model ./base
  overspill merge saved/part* ./tuned --model ./base --rules rules.json
      with rules.json such as {"*.attention.qkv.weight": "qkv", "*.mlp.up.weight": "column", "*": "replicated"}
"""

import argparse
import signal
import sys

from overspill.cli.common import path_of, size
from overspill.cli.progress import on_terminal
from overspill.memory import human

DTYPES = ("bf16", "fp32")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoints",
        type=path_of,
        nargs="+",
        metavar="CHECKPOINT",
        help="e.g. runs/first/checkpoints/step-000040; all parts of a model divided by tensor parallelism",
    )
    parser.add_argument(
        "out", type=path_of, metavar="OUT", help="folder to write: a new name, or an empty folder"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="bf16, or fp32 for the exact masters (default bf16)"
    )
    parser.add_argument(
        "--shard-size", type=size, default=4 << 30, metavar="SIZE", help="largest file (default 4GiB)"
    )
    parser.add_argument(
        "--model",
        type=path_of,
        metavar="DIR",
        help="where config and tokenizer come from, if not from the checkpoint",
    )
    parser.add_argument(
        "--rules",
        type=path_of,
        metavar="FILE",
        help="JSON: how parts were divided, pattern of names -> style (docs/ranks.md lists the styles)",
    )


def run(args: argparse.Namespace) -> int:
    from overspill.merging import merge

    progress = on_terminal("merge")
    # Like Ctrl-C, SIGTERM ends the merge by an exception, so that what is half written is removed.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        merged = merge(
            args.checkpoints if len(args.checkpoints) > 1 else args.checkpoints[0],
            args.out,
            dtype=args.dtype,
            shard_size=args.shard_size,
            model=args.model,
            rules=args.rules,
            progress=progress,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"merged {merged.tensors} tensors, {human(merged.bytes)}, into {args.out.resolve()}; {merged.said}")
    return 0
