"""How well the planner predicts a step: seven host budgets over one model, from the smallest that is possible to all in
memory, predicted from what one of them measured.

Part of make bench-step. All seven are alive and take turns, so that what the machine does meanwhile meets all of them;
the first step of a turn is left out, for its updates had the disk to themselves. `plan_error` is the largest
|predicted - measured| / measured.

    bench/step/budgets.py 160      alone; ends with RESULT {json}
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import gpt
from placements import CLIP, GIB, available_bytes, count
from turns import Child, Failed, in_turn, machine

ROOT = Path(__file__).resolve().parents[2]

MEASURED = 5.0  # bytes a parameter: weights and gradients in memory; the others are predicted from it
OTHERS = (2.6, 4.0, 7.0, 10.0, 15.5)  # and the smallest
EXTRA_BYTES = 56 << 20  # ring and scratch
ROUNDS, STEPS = 5, 3


def start(shape: gpt.Shape, budget: int, folder: Path) -> Child:
    """A process with this host budget, before its first step. Raises Failed."""
    disk = folder / f"budget-{budget}"
    disk.mkdir()
    config = {
        "budget": {"host": budget, "nvme": [str(disk)]},
        "gradient_clipping": CLIP,
        "engine": {"device": "host", "train_after_save": False},
    }
    command = [sys.executable, str(Path(__file__).with_name("ours.py"))]
    command.append(json.dumps({"shape": shape, "config": config}))
    return Child(command, dict(os.environ), disk / "log", rests=True)


def least_budget(contender: Child, most: int) -> int:
    """The smallest possible one, to a two-thousandth of `most`, which is possible."""
    least = 0
    for _ in range(2):
        step = max(1, (most - least) // 48)
        answer = contender.ask(do="predict", budgets=[least + k * step for k in range(1, 48)])
        possible = (row["host_budget_bytes"] for row in answer["budgets"] if row["possible"])
        most = min(possible, default=most)
        least = most - step
    return most


def turns(contenders: dict[int, Child]) -> dict[int, list[float]]:
    """Seconds of the steps of each budget."""
    seconds: dict[int, list[float]] = {budget: [] for budget in contenders}
    for number in range(ROUNDS):
        for budget in in_turn(list(contenders), number):
            seconds[budget] += contenders[budget].ask(do="turn", steps=STEPS)["steps"][1:]
    return seconds


def plan_error(shape: gpt.Shape, parameters: int, folder: Path) -> dict[str, Any]:
    """The keys of the RESULT."""
    needed = int((sum(OTHERS) + MEASURED + 2) * parameters) + 7 * GIB // 2
    if needed > available_bytes():
        print(f"  budgets: no room: {needed / 1e9:.0f} GB for seven at once", flush=True)
        return {}
    measured = int(MEASURED * parameters) + EXTRA_BYTES
    with contextlib.ExitStack() as stack:
        contenders: dict[int, Child] = {}

        def add(budget: int) -> Child:
            contenders[budget] = start(shape, budget, folder)
            stack.callback(contenders[budget].close)
            return contenders[budget]

        try:
            base = add(measured)
            least = least_budget(base, measured)
            for budget in (least, *(max(least, int(each * parameters) + EXTRA_BYTES) for each in OTHERS)):
                if budget not in contenders:
                    add(budget)
            for contender in contenders.values():
                contender.ask(do="turn", steps=2)
            seconds = turns(contenders)
            answer = base.ask(do="predict", budgets=sorted(contenders))
        except Failed as error:
            print(f"  budgets: {error}", flush=True)
            return {}
    print(answer["text"].rstrip())
    rows = []
    for row in answer["budgets"]:
        took = statistics.median(seconds[row["host_budget_bytes"]])
        error = round((row["step_seconds"] - took) / took, 3)
        rows.append(
            {
                "host_budget_bytes": row["host_budget_bytes"],
                "measured_seconds": round(took, 3),
                "predicted_seconds": round(row["step_seconds"], 3),
                "limit": row["limit"],
                "error": error,
            }
        )
        own = ", measured from here" if row["host_budget_bytes"] == measured else ""
        print(
            f"  budget {row['host_budget_bytes'] / 2**30:6.2f} GiB: predicted {row['step_seconds']:.2f} s, measured "
            f"{took:.2f}, error {error:+.2f}{own}",
            flush=True,
        )
    return {"budgets": rows, "plan_error": max(abs(row["error"]) for row in rows)}


def main() -> int:
    size = sys.argv[1] if len(sys.argv) > 1 else "160"
    shape = gpt.SHAPES[size]
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-step-", dir=results) as folder:
        found = plan_error(shape, count(shape), Path(folder))
    print(f"RESULT {json.dumps({'bench': 'budgets', 'machine': machine(), 'size': size} | found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
