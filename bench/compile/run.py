"""What engine.compile saves: seconds of a step on the CPU of Llama, GPT-2 and ViT, in turn in one run.

Models with random weights (models.py), fp32, AdamW. Contenders:

    plain             plain torch, all in memory
    plain_compiled    the same, the whole model compiled by torch.compile
    engine            the engine with all in memory
    engine_compiled   the same, with engine.compile: its blocks are compiled

A ratio is the median of the rounds' own ratios, `_quartiles` has their quartiles. `_loss_difference` is the largest of
a step, relative to the loss without compilation; torch.compile's own stands beside it, which draws other random numbers
(GPT-2 has dropout). Steps that compile are no part of a time: `_first_seconds` has the first step's. Ends with RESULT
{json}.

    bench/compile/run.py              10 minutes
    bench/compile/run.py --quick      2 minutes, small models
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from turns import Child, in_turn, machine, quartiles, tell

HERE = Path(__file__).resolve().parent
MODELS = ("llama", "gpt2", "vit")
WAYS = ("plain", "plain_compiled", "engine", "engine_compiled")
RATIOS = (("engine_compiled", "engine"), ("plain_compiled", "plain"), ("engine_compiled", "plain_compiled"))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    parser.add_argument("--steps", type=int, default=3, help="of a turn (default 3)")
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="for logs; cleaned up")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    return args


def config(way: str) -> dict | None:
    if way.startswith("plain"):
        return None
    return {
        "budget": {"host": "6GiB"},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "engine": {"placement": "host", "compile": way == "engine_compiled"},
    }


def of_model(name: str, args: argparse.Namespace, folder: Path) -> dict:
    """What is measured of one model."""
    result, seconds, losses, last = {}, {way: [] for way in WAYS}, {}, {}
    with contextlib.ExitStack() as stack:
        children = {}
        for way in WAYS:
            job = {"model": name, "quick": args.quick, "way": way, "config": config(way)}
            child = Child(
                [sys.executable, str(HERE / "contender.py"), json.dumps(job)],
                log=folder / f"{name}-{way}.log",
                rests=True,
            )
            stack.callback(child.close)
            children[way] = child
            first = child.ask(do="turn", steps=2)
            result[f"{name}_{way}_first_seconds"] = round(first["steps"][0], 2)
            losses[way] = first["losses"]
        result[f"{name}_parameters"] = children["plain"].hello["parameters"]
        print(f"{name}: {result[f'{name}_parameters'] / 1e6:.0f} M parameters", flush=True)
        for number in range(args.rounds):
            for way in in_turn(list(WAYS), number):
                last[way] = children[way].ask(do="turn", steps=args.steps)
                seconds[way].append(statistics.median(last[way]["steps"]))
                losses[way] += last[way]["losses"]
            told = ", ".join(f"{way} {seconds[way][-1]:.3f}" for way in WAYS)
            print(f"  round {number + 1}/{args.rounds}, s a step: {told}", flush=True)
    for way in WAYS:
        result[f"{name}_{way}_seconds"] = round(statistics.median(seconds[way]), 4)
    for ours, theirs in RATIOS:
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        lower, middle, upper = quartiles(ratios)
        result[f"{name}_{ours}_vs_{theirs}"] = round(middle, 4)
        result[f"{name}_{ours}_vs_{theirs}_quartiles"] = [round(lower, 4), round(upper, 4)]
    for ours, theirs in RATIOS[:2]:
        pairs = zip(losses[ours], losses[theirs], strict=True)
        result[f"{name}_{ours}_loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    for key, value in last["engine_compiled"]["compiled"].items():
        result[f"{name}_{key}"] = value
    return result


def main() -> int:
    args = options()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-compile-", dir=args.folder))
    result = {"machine": machine()}
    print(machine(), flush=True)
    try:
        for name in args.models:
            result |= of_model(name, args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
