"""Saves beside torch.distributed.checkpoint's: the same model and AdamW states in fp32, on the same disk, in turn."""

import contextlib
import json
import os
import sys

import places
from measured import HERE, Bench, median
from turns import Child, in_turn

OURS = {"ram": "host", "nvme": "nvme"}
# Whose time is put over whose. What returns is ours alone: dcp.save returns when all is durable.
RATIOS = {
    "save_vs_dcp": ("ram blocking", "complete"),
    "return_vs_dcp": ("ram behind", "returned"),
    "save_behind_vs_dcp": ("ram behind", "complete"),
    "save_nvme_vs_dcp": ("nvme blocking", "complete"),
    "return_nvme_vs_dcp": ("nvme behind", "returned"),
}


def beside_dcp(bench: Bench) -> None:
    """dcp.save is given as many threads as there are cores, and one; what is faster in a round counts."""
    job = json.dumps({"shape": bench.shape})
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, placement in OURS.items():
            disk = bench.folder / f"dcp-{name}"
            disk.mkdir()
            disks = [disk] if placement == "nvme" else []
            children[name] = stack.enter_context(bench.engine(disks, placement, "float32"))
        children["dcp"] = stack.enter_context(
            bench.contender([sys.executable, str(HERE / "dcp_save.py"), job])
        )
        asked = {
            f"{name} {how}": (name, {"blocking": how == "blocking"})
            for name in OURS
            for how in ("blocking", "behind")
        }
        asked |= {
            f"dcp {threads}": ("dcp", {"threads": threads}) for threads in sorted({1, os.cpu_count() or 1})
        }
        rounds = []
        for number in range(bench.args.rounds):
            row = {}
            for turn in in_turn(list(asked), number):
                name, options = asked[turn]
                folder = bench.folder / "saved"
                row[turn] = children[name].ask(do="save", folder=str(folder), **options)
                places.remove(folder)
            rounds.append(row)
            print(
                "  s: " + ", ".join(f"{turn} {one['complete']:.2f}" for turn, one in row.items()), flush=True
            )
    theirs = [min(one["complete"] for turn, one in row.items() if turn.startswith("dcp")) for row in rounds]
    for key, (turn, what) in RATIOS.items():
        bench.ratio(key, [them / row[turn][what] for row, them in zip(rounds, theirs, strict=True)])
    bench.figure("dcp_seconds", median(theirs))
    bench.figure("dcp_bytes", rounds[-1]["dcp 1"]["bytes"])
