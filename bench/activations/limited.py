"""A model and a batch that fit only where activations are computed again or moved: steps in a memory cgroup.

A GPT with random weights (bench/step/gpt.py), fp32, AdamW. Contenders, each alone on the machine, one after the other
in each round, since two do not fit at once:

    plain                 plain torch, without checkpointing, in all of the machine's memory
    plain_checkpointed    the same, each block computed anew in backward
    chosen                in a cgroup of --limit: budget.process is nearly that, weights and states are on NVMe, and the
                          engine chooses how many blocks it computes again ("auto"); what the others save moves
    recomputed            the same; all blocks are computed again
    moved                 the same; none is, and all that forward saves moves

First plain_checkpointed runs in the cgroup, where the kernel has to kill it. `peak_rss_vs_budget`: the most resident
bytes of `chosen` over the limit; `plan_error`: predicted seconds of forward and backward of `chosen` over the measured
ones, less 1; `nvme_activations_vs_recompute`: a step of `moved` over one of `recomputed`, and `moved_bound` says what a
step of `moved` waits for most. A ratio is the median of the rounds' own. Needs root and cgroup v1. Ends with
RESULT {json}.

    bench/activations/limited.py                    690 M at 4,096 tokens; 25 minutes a round on 2 cores
    bench/activations/limited.py --quick            a small model; 5 minutes
"""

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import gpt
from cgroups import Missing, cgroup, inside, peak_bytes
from turns import Child, Failed, in_turn, machine, tell

HERE = Path(__file__).resolve().parent
BESIDE = (
    256 << 20
)  # of a cgroup's limit: pages of files, such as torch's libraries, and what the kernel charges
OURS = {"chosen": "auto", "recomputed": "blocks", "moved": "none"}
PLAIN = ("plain", "plain_checkpointed")
FIRST = {"chosen": 3}  # steps that are not measured, of others 1: by the second the engine chooses


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="690", choices=gpt.SHAPES, help="millions (default 690)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a step (default 4096)")
    parser.add_argument("--limit", type=float, default=8.0, help="of the cgroup, in GiB (default 8)")
    parser.add_argument("--host", type=float, default=4.0, help="budget.host, in GiB (default 4)")
    parser.add_argument("--arena", type=float, default=2.0, help="budget.activations, in GiB (default 2)")
    parser.add_argument("--logits", type=float, default=0.25, help="budget.logits, in GiB (default 0.25)")
    parser.add_argument("--rounds", type=int, default=1, help="(default 1)")
    parser.add_argument("--steps", type=int, default=1, help="that are measured in a turn (default 1)")
    parser.add_argument("--quick", action="store_true", help="a small model; overrides the others")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="on the disk; cleaned up")
    args = parser.parse_args()
    if args.quick:
        args.size, args.length, args.rounds, args.steps = "50", 2048, 1, 2
        args.limit, args.host, args.arena, args.logits = 1.75, 0.5, 0.2, 0.03
    return args


def gib(count: float) -> int:
    return int(count * (1 << 30))


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.shape = gpt.SHAPES[args.size]._replace(length=args.length)

    def config(self, name: str) -> dict | None:
        if name in PLAIN:
            return None
        args = self.args
        activations = gib(args.arena) if name != "recomputed" else None
        return {
            "budget": {
                "process": gib(args.limit) - BESIDE,
                "host": gib(args.host),
                "nvme": [str(self.folder)],
                "activations": activations,
                "logits": gib(args.logits),
            },
            "optimizer": {"type": "AdamW", "lr": 1e-4},
            "engine": {"recompute": OURS[name]},
        }

    def turn(self, name: str, group: Path | None) -> dict[str, Any]:
        """The last steps of a process of its own. Raises Failed."""
        shape = self.shape._replace(checkpointing=name == "plain_checkpointed")
        job = json.dumps({"shape": shape, "config": self.config(name)})
        command = [sys.executable, str(HERE / "contender.py"), job]
        child = Child(inside(group, command), log=self.folder / f"{name}.log")
        try:
            first = child.ask(do="turn", steps=FIRST.get(name, 1))
            last = child.ask(do="turn", steps=self.args.steps)
            peaks = (first["peak_bytes"], last["peak_bytes"])
            return last | {"parameters": child.hello["parameters"], "peak_bytes": max(peaks)}
        finally:
            child.close()

    def limited(self, name: str) -> dict[str, Any]:
        with cgroup(name, gib(self.args.limit)) as group:
            return self.turn(name, group) | {"charged_bytes": peak_bytes(group)}

    def is_killed(self, name: str) -> bool:
        try:
            self.limited(name)
        except Failed as error:
            if "SIGKILL" not in str(error):
                raise
            return True
        return False


def predicted(said: str | None) -> float | None:
    """Seconds of forward and backward, of what engine.computed_again says."""
    found = re.search(r"predicted for forward and backward of one pass: ([0-9.e+-]+) s", said or "")
    return float(found[1]) if found else None


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def measure(bench: Bench) -> dict[str, Any]:
    args, result = bench.args, {"machine": machine()}
    result |= {"length": args.length, "limit_bytes": gib(args.limit), "host_bytes": gib(args.host)}
    killed = bench.is_killed("plain_checkpointed")
    print(
        f"plain_checkpointed in {args.limit:g} GiB: {'killed by the kernel' if killed else 'not killed'}",
        flush=True,
    )
    names = [*PLAIN, *OURS]
    turns: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in in_turn(names, number):
            turns[name].append(bench.turn(name, None) if name in PLAIN else bench.limited(name))
            last = turns[name][-1]
            print(
                f"  round {number + 1}/{args.rounds}: {name} {statistics.median(last['steps']):.2f} s a step, "
                f"{last['peak_bytes'] / 2**30:.2f} GiB" + (f"; {last['again']}" if last.get("again") else ""),
                flush=True,
            )
    seconds = {name: [statistics.median(turn["steps"]) for turn in turns[name]] for name in names}
    result["parameters"] = turns["plain"][0]["parameters"]
    result["plain_checkpointed_killed"] = killed
    for name in names:
        result[f"{name}_seconds"] = median(seconds[name])
        result[f"{name}_peak_bytes"] = max(turn["peak_bytes"] for turn in turns[name])
    result["chosen_charged_bytes"] = max(turn["charged_bytes"] for turn in turns["chosen"])
    result["peak_rss_vs_budget"] = round(result["chosen_peak_bytes"] / gib(args.limit), 4)
    for key, ours, theirs in (
        ("step_vs_plain_unlimited", "chosen", "plain"),
        ("step_vs_plain_checkpointed", "chosen", "plain_checkpointed"),
        ("nvme_activations_vs_recompute", "moved", "recomputed"),
    ):
        result[key] = median([a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)])
    result["moved_bound"] = turns["moved"][-1]["bound"]
    errors = [
        abs(guess / statistics.median(turn["passes"]) - 1)
        for turn in turns["chosen"]
        if (guess := predicted(turn["again"])) is not None
    ]
    if errors:
        result["plan_error"] = median(errors)
    result["chosen_blocks"] = turns["chosen"][-1]["again"]
    return result


def main() -> int:
    args = options()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-limited-", dir=args.folder))
    print(machine(), flush=True)
    try:
        result = measure(Bench(args, folder))
    except Missing as error:
        print(f"not run: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
