"""Two ranks on the CPU over gloo, beside DeepSpeed's ZeRO-3: step time, bytes a rank, bytes sent.

A GPT with random weights in bf16 (bench/step/gpt.py), everything in host memory, one torch thread and other data
each rank. Contenders take turns in one run and are stopped between them, both ranks at once; a ratio is the median of
the rounds' own. Bytes a rank are its peak resident bytes less those before the model: activations count, and of ours
the whole model before it is handed over. Ends with RESULT {json}.

    bench/ranks/beside_deepspeed.py [--size 160] [--rounds 3] [--steps 3]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))

import gpt
import peers
from placements import deepspeed_config
from teams import Team
from turns import in_turn, machine

WORLD = 2
HERE = Path(__file__).resolve().parent


def contenders(shape: gpt.Shape, folder: Path) -> list[Team]:
    found = []
    config = {
        "budget": {"host": "4GiB"},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "gradient_clipping": 1.0,
        "engine": {"device": "host", "threads": 1},
    }
    for name, python, env, options in (
        ("ours", sys.executable, dict(os.environ), config),
        ("deepspeed", peers.python(), peers.environment(), deepspeed_config("ram", folder, shape.batch)),
    ):
        command = [python, str(HERE / "rank.py"), name, json.dumps(shape), json.dumps(options)]
        found.append(Team(name, command, WORLD, env, 1, folder))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(gpt.SHAPES), default="160")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if not peers.deepspeed_is_there():
        raise SystemExit("bench-ranks-deepspeed: DeepSpeed is not there; tools/peers makes its environment")
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    teams = contenders(gpt.SHAPES[options.size], folder)
    parameters = teams[0].said[0]["parameters"]
    steps: dict[str, list[float]] = {team.name: [] for team in teams}
    last: dict[str, list[dict[str, Any]]] = {}
    losses: dict[str, list[float]] = {team.name: [] for team in teams}
    for team in teams:
        last[team.name] = team.ask(do="turn", steps=1)  # warms up
    for turn in range(options.rounds):
        for team in in_turn(teams, turn):
            answers = last[team.name] = team.ask(do="turn", steps=options.steps)
            steps[team.name].append(statistics.median(max(s) for s in zip(*(a["steps"] for a in answers))))
            losses[team.name].append(sum(sum(a["losses"]) for a in answers) / (WORLD * options.steps))
    rows = {}
    for team in teams:
        answers = last[team.name]
        held = max(a["peak_rss_bytes"] - s["rss_before"] for a, s in zip(answers, team.said, strict=True))
        sent = max(a["sent_bytes"] for a in answers) / (WORLD * options.steps)
        rows[team.name] = {
            "step_seconds": round(statistics.median(steps[team.name]), 3),
            "rank_bytes_per_param": round(held / parameters, 2),
            "sent_bytes_per_param": round(sent / parameters, 2),
            "losses": [round(loss, 4) for loss in losses[team.name]],
        }
        team.close()
    ratios = [a / b for a, b in zip(steps["ours"], steps["deepspeed"], strict=True)]
    print(f"{'':12}{'s a step':>10}{'B/param a rank':>16}{'B/param sent':>14}")
    for name, row in rows.items():
        print(
            f"{name:12}{row['step_seconds']:10.3f}{row['rank_bytes_per_param']:16.2f}"
            f"{row['sent_bytes_per_param']:14.2f}"
        )
    result = {"parameters": parameters, "world": WORLD, **rows, "machine": machine()}
    result |= {
        "step_vs_deepspeed": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
