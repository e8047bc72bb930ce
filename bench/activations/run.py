"""What moved activations cost and save: seconds of a step, and memory, beside plain torch and gradient checkpointing.

GPT models with random weights (bench/step/gpt.py), fp32, AdamW. Contenders, which take turns in one run:

    plain                     plain torch, all in memory
    plain_checkpointed        the same, each block computed anew in backward
    in_torch                  the engine with weights and states in memory; activations stay with torch
    moved                     the same with budget.activations: beyond the arena they go to the disk
    recomputed                the engine computes each block anew (engine.recompute), and moves the blocks' inputs
    chosen                    the engine chooses for how many blocks it does so ("auto"), and moves what the others save

A ratio is the median of the rounds' own ratios, `_quartiles` has their quartiles. `_grown_bytes` is how far a process
grows in a turn beyond what it has between steps: activations, and gradients in plain torch. Ends with RESULT {json}.

    bench/activations/run.py                   15 minutes
    bench/activations/run.py --quick           1 minute, a small model
    bench/activations/run.py --size 350 --length 2048 --arena 512MiB
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
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import gpt
from turns import Child, in_turn, machine, quartiles, tell

HERE = Path(__file__).resolve().parent


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", default="50", choices=gpt.SHAPES, help="millions of parameters (default 50)"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a step (default 2048)")
    parser.add_argument("--arena", default="256MiB", help="budget.activations (default 256MiB)")
    parser.add_argument("--rounds", type=int, default=4, help="(default 4)")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (default 2)")
    parser.add_argument("--quick", action="store_true", help="a small model, one round; overrides the others")
    parser.add_argument(
        "--folder", type=Path, default=Path("results"), help="on the disk to measure; cleaned up"
    )
    args = parser.parse_args()
    if args.quick:
        args.size, args.length, args.rounds = "tiny", 512, 1
        args.arena = "4MiB"
    return args


def config(folder: Path, arena: str | None, recompute: str = "none") -> dict:
    budget = {"host": "8GiB", "nvme": [str(folder)]} | ({"activations": arena} if arena else {})
    return {
        "budget": budget,
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "engine": {"placement": "host", "recompute": recompute},
    }


def contenders(shape: gpt.Shape, folder: Path, arena: str) -> dict[str, tuple[gpt.Shape, dict | None]]:
    """Each one's model, and the engine's configuration."""
    return {
        "plain": (shape, None),
        "plain_checkpointed": (shape._replace(checkpointing=True), None),
        "in_torch": (shape, config(folder, None)),
        "moved": (shape, config(folder, arena)),
        "recomputed": (shape, config(folder, arena, "blocks")),
        "chosen": (shape, config(folder, arena, "auto")),
    }


def main() -> int:
    args = options()
    args.folder.mkdir(parents=True, exist_ok=True)
    shape = gpt.SHAPES[args.size]._replace(length=args.length)
    folder = Path(tempfile.mkdtemp(prefix="bench-activations-", dir=args.folder))
    jobs = contenders(shape, folder, args.arena)
    result = {"machine": machine(), "length": args.length, "arena": args.arena}
    try:
        with contextlib.ExitStack() as stack:
            children = {}
            for name, (its, settings) in jobs.items():
                command = [
                    sys.executable,
                    str(HERE / "contender.py"),
                    json.dumps({"shape": its, "config": settings}),
                ]
                child = Child(command, log=folder / f"{name}.log", rests=True)
                stack.callback(child.close)
                children[name] = child
                child.ask(
                    do="turn", steps=3
                )  # the first makes what later ones have, the third follows "auto"
            result["parameters"] = children["plain"].hello["parameters"]
            print(
                f"{machine()}; {result['parameters'] / 1e6:.0f} M parameters, {args.length} tokens",
                flush=True,
            )
            seconds = {name: [] for name in jobs}
            last = {}
            for number in range(args.rounds):
                for name in in_turn(list(jobs), number):
                    last[name] = children[name].ask(do="turn", steps=args.steps)
                    seconds[name].append(statistics.median(last[name]["steps"]))
                told = ", ".join(f"{name} {seconds[name][-1]:.2f}" for name in jobs)
                print(f"  round {number + 1}/{args.rounds}, s a step: {told}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in jobs:
        result[f"{name}_seconds"] = statistics.median(seconds[name])
        result[f"{name}_grown_bytes"] = last[name]["grown_bytes"]
    for ours, theirs in (
        ("in_torch", "plain"),
        ("moved", "plain"),
        ("moved", "in_torch"),
        ("moved", "plain_checkpointed"),
        ("recomputed", "plain_checkpointed"),
        ("chosen", "plain"),
        ("chosen", "plain_checkpointed"),
        ("chosen", "moved"),
        ("chosen", "recomputed"),
    ):
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        lower, middle, upper = quartiles(ratios)
        result[f"{ours}_vs_{theirs}"] = round(middle, 4)
        result[f"{ours}_vs_{theirs}_quartiles"] = [round(lower, 4), round(upper, 4)]
    for key in ("kept", "written", "read"):
        result[f"moved_activations_{key}_bytes"] = last["moved"][f"activations_{key}_bytes"]
    result["moved_demand_reads"] = last["moved"]["activations_demand_reads"]
    result["moved_waited_seconds"] = last["moved"]["waited"]
    result["chosen_blocks"] = last["chosen"]["again"]
    result["losses_equal"] = len({tuple(each["losses"]) for each in last.values()}) == 1
    tell(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
