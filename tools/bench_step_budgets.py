"""How well the planner predicts a step: seven host budgets over one model, predicted from what one of them measured.

Part of make bench-step; `plan_error` is the largest |predicted - measured| / measured.
"""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench_step_turns import Contender, Failed

BYTES_A_PARAMETER = (5.0, 4.0, 4.5, 6.0, 8.0, 11.0, 15.5)  # the first is measured from
EXTRA_BYTES = 56 << 20  # ring and scratch
STEPS = 4


def plan_error(shape: tuple, parameters: int, folder: Path) -> dict[str, Any]:
    """Runs them one after the other; the keys of the RESULT."""
    budgets = [int(each * parameters) + EXTRA_BYTES for each in BYTES_A_PARAMETER]
    rows: list[dict[str, Any]] = []
    predicted: dict[int, dict[str, Any]] = {}
    for number, budget in enumerate(budgets):
        disk = folder / f"budget-{number}"
        disk.mkdir()
        config = {
            "budget": {"host": budget, "nvme": [str(disk)]},
            "gradient_clipping": 1e6,
            "engine": {"train_after_save": False},
        }
        command = [sys.executable, str(Path(__file__).with_name("bench_step_ours.py"))]
        command.append(json.dumps({"shape": shape, "config": config}))
        contender = Contender(f"budget {number}", command, dict(os.environ), disk / "log")
        try:
            contender.start()
            contender.ask(do="turn", steps=2)
            seconds = statistics.median(contender.ask(do="turn", steps=STEPS)["steps"])
            own = contender.ask(do="predict", budgets=budgets)
        except Failed as error:
            print(f"  budget {budget / 2**30:.2f} GiB: {error}", flush=True)
            continue
        finally:
            contender.close()
        if not predicted:
            predicted = {row["host_budget_bytes"]: row for row in own["budgets"]}
            print(own["text"].rstrip(), flush=True)
        there = predicted[budget]["step_seconds"]
        row = {
            "host_budget_bytes": budget,
            "measured_seconds": round(seconds, 3),
            "predicted_seconds": round(there, 3),
            "predicted_by_its_own_figures_seconds": round(own["step_seconds"], 3),
            "limit": predicted[budget]["limit"],
            "error": round(abs(there - seconds) / seconds, 3),
        }
        rows.append(row)
        print(
            f"  budget {budget / 2**30:6.2f} GiB: predicted {there:.2f} s, by its own figures "
            f"{own['step_seconds']:.2f}, measured {seconds:.2f}, error {row['error']:.2f}",
            flush=True,
        )
    found: dict[str, Any] = {"budgets": rows}
    if rows:
        found["plan_error"] = max(row["error"] for row in rows)
    return found
