"""A step of a model of two towers on two ranks over gloo, with gathers that go together (engine.bucket) and one by one.

The contenders are two processes each, and take turns in one run; between its turns a contender is stopped. `same`: both
ranks run the towers in one order; `swapped`: rank 1 runs the right tower first, as data-dependent routing may. Losses
have to be equal to the last bit."""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "shared"))

from teams import Team  # noqa: E402
from turns import in_turn, machine, tell  # noqa: E402

WORLD = 2
BUCKETS = {"together": 1 << 20, "alone": 0}


def measure(options: argparse.Namespace, swapped: bool, folder: Path) -> dict[str, Any]:
    shape = [str(options.blocks), str(options.width), str(int(swapped))]
    teams = [
        Team(
            name,
            [sys.executable, str(HERE / "rank.py"), str(bucket), *shape],
            WORLD,
            dict(os.environ),
            1,
            folder,
        )
        for name, bucket in BUCKETS.items()
    ]
    steps: dict[str, list[float]] = {team.name: [] for team in teams}
    calls: dict[str, list[float]] = {team.name: [] for team in teams}
    losses: dict[str, list[float]] = {team.name: [] for team in teams}
    for team in teams:
        team.ask(do="turn", steps=options.steps)  # warms up: the first steps are not predicted
    for turn in range(options.rounds):
        for team in in_turn(teams, turn):
            answers = team.ask(do="turn", steps=options.steps)
            slowest = [max(each) for each in zip(*(a["steps"] for a in answers), strict=True)]
            steps[team.name].append(statistics.median(slowest))
            calls[team.name].append(answers[0]["calls"])
            losses[team.name] += [loss for a in answers for loss in a["losses"]]
    parameters = teams[0].said[0]["parameters"]
    for team in teams:
        team.close()
    if losses["together"] != losses["alone"]:
        raise SystemExit("bench-graph: the losses differ with engine.bucket")
    ratios = [a / b for a, b in zip(steps["together"], steps["alone"], strict=True)]
    found: dict[str, Any] = {"parameters": parameters, "ratio": round(statistics.median(ratios), 3)}
    for name in BUCKETS:
        found[f"{name}_step_seconds"] = round(statistics.median(steps[name]), 4)
        found[f"{name}_calls"] = round(statistics.median(calls[name]), 1)
    return found | {"ratios": [round(ratio, 3) for ratio in ratios]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="of a tower")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-graph-") as folder:
        found = {name: measure(options, name == "swapped", Path(folder)) for name in ("same", "swapped")}
    tell({"world": WORLD, "blocks": options.blocks, "width": options.width, **found, "machine": machine()})


if __name__ == "__main__":
    main()
