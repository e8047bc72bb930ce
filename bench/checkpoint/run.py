"""What checkpoints cost: bytes copied, steps held up, restores, merges, beside fio, DeepSpeed and torch's own.

GPT models with random weights (bench/step/gpt.py), bf16, AdamW, all weights and states on NVMe where nothing else is
said. What is compared takes turns in one run; a ratio is the median of the rounds' own ratios, and `_quartiles` has
their quartiles. In "stall" and "copy" the same process trains on, A B A B. Parts:

    two-disks   bytes that one save copies where the states lie on two disks (loop devices; root)
    stall       bytes that a save copies on the states' own disk, and the longest step beside a save (call included)
    copy        a step beside a copy to another file system: an image on the same disk (root), one in memory
    restore     load_checkpoint, nothing in the page cache, over fio (O_DIRECT) on the same file
    merge       a checkpoint of 3 B parameters (or the largest that has room) as a Hugging Face folder, beside fio
    deepspeed   the same in fp32 beside DeepSpeed's zero_to_fp32
    dcp         save_checkpoint beside torch.distributed.checkpoint.save, fp32

Keys with _vs_fio, _vs_dcp and _vs_zero_to_fp32 are our speed over theirs (but for the _peak_ of two peaks); those with
_vs_step are seconds over the median step without saves, stalls less 1. Ends with RESULT {json}; docs/performance.md
explains the keys.

    bench/checkpoint/run.py             20 minutes
    bench/checkpoint/run.py --quick     2 minutes, smaller models
    bench/checkpoint/run.py --parts stall,copy --size 350
"""

import argparse
import contextlib
import datetime
import json
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))

import disk_speed
import files
import gpt
import places
import training
from beside_dcp import beside_dcp
from measured import Bench
from turns import Failed, machine

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("two-disks", "stall", "copy", "restore", "merge", "deepspeed", "dcp")
QUICK = {
    "size": "50",
    "two_disks_size": "tiny",
    "merge_sizes": "160",
    "rounds": 1,
    "copy_rounds": 1,
    "merge_rounds": 1,
    "steps": 3,
    "every": 3,
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ",".join(gpt.SHAPES)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
    parser.add_argument(
        "--size", default="160", choices=gpt.SHAPES, help="millions of parameters (default 160)"
    )
    parser.add_argument(
        "--two-disks-size", default="50", choices=gpt.SHAPES, help="of that part (default 50)"
    )
    parser.add_argument(
        "--merge-sizes", default="3000,1500,690,160", help=f"the first that has room; of {known}"
    )
    parser.add_argument("--rounds", type=int, default=4, help="(default 4)")
    parser.add_argument(
        "--copy-rounds", type=int, default=2, help="of the part copy, each with one save (default 2)"
    )
    parser.add_argument("--merge-rounds", type=int, default=2, help="of the part merge (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="of a turn (default 4)")
    parser.add_argument("--every", type=int, default=4, help="steps from one save to the next (default 4)")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds: 2 minutes")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "results", help="on the file system to measure; cleaned up"
    )
    parser.add_argument(
        "--image-folder", type=Path, help="for the loop device of the part copy (default --folder)"
    )
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    args.parts, args.merge_sizes = args.parts.split(","), args.merge_sizes.split(",")
    for given, allowed in ((args.parts, PARTS), (args.merge_sizes, gpt.SHAPES)):
        for name in given:
            if name not in allowed:
                parser.error(f"'{name}' is none of {','.join(allowed)}")
    return args


def measure(bench: Bench) -> None:
    """The parts asked for, each after the one before. One that fails is a line that says so."""
    alone = {"two-disks": training.two_disks, "merge": files.merge, "dcp": beside_dcp}
    trained = {
        "stall": training.stalls,
        "copy": training.copying,
        "restore": files.restore,
        "deepspeed": files.zero_to_fp32,
    }
    with contextlib.ExitStack() as stack:
        engine = None
        for part in PARTS:
            if part not in bench.args.parts:
                continue
            print(f"\n{part}", flush=True)
            began = time.perf_counter()
            try:
                if part in alone:
                    alone[part](bench)
                else:
                    engine = engine or stack.enter_context(bench.engine([bench.folder]))
                    engine.ask(do="turn", steps=2)  # the first has no states to read
                    trained[part](bench, engine)
            except Failed as error:
                print(f"  FAILED: {error}", flush=True)
                bench.failed[part] = str(error)
            print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)


def main() -> int:
    args = options()
    args.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with places.scratch(args.folder) as folder:
        bench = Bench(args, folder)
        print(
            f"machine: {machine()}; {bench.parameters / 1e6:.0f} M parameters; the disk's speed by {disk_speed.name()}"
        )
        measure(bench)
    header = {"bench": "checkpoint", "date": datetime.date.today().isoformat(), "machine": machine()}
    header |= {"seconds": round(time.perf_counter() - began), "parameters": bench.parameters}
    header |= {"disk_speed_by": disk_speed.name(), "parts": args.parts}
    print(f"RESULT {json.dumps(header | bench.found | {'skipped': bench.skipped, 'failed': bench.failed})}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            print("bench-checkpoint: stopped; what it made is removed", file=sys.stderr)
            sys.exit(130)
