"""What overspill.estimate says of a step, beside the step: GPT models of bench/step on one, two and four CPU ranks.

Configurations take turns. In each turn the rates of the machine are measured anew, with small linear layers
(overspill.estimate.measured), and, with several ranks, the speed of collectives by steps of a model that is none of the
cases. Before and after each case the model's own forward and backward in plain torch are timed, as many processes at it
as there are ranks. The estimate knows nothing else of the step. Ends with RESULT {json}.

    step_error_*  |estimated - measured| / measured, of the medians of all turns
    bytes_error_max: the same of bytes, the mean of all turns: held in memory and on NVMe, read and written a step

    bench/plan/run.py [--quick]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch

import gpt
from overspill.estimate import Estimate, Load, Machine, Model, estimate
from overspill.estimate.measured import ELEMENTS, LAYERS, disk_rates
from overspill.estimate.step import Work, described, shared_out
from teams import Team
from turns import machine as machine_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB = 1 << 20
TURNS, STEPS = 2, 3
CLIP = 1e6  # on, and never reached


class Case(NamedTuple):
    """`per_parameter`: bytes of host memory for each, beside EXTRA; None: all of it."""

    name: str
    size: str
    ranks: int = 1
    per_parameter: float | None = None
    placement: str = "auto"
    micros: int = 1
    speculate: bool = False
    stage: int = 3


EXTRA = 64 * MIB
REFERENCE = "reference"
gpt.SHAPES[REFERENCE] = gpt.Shape(512, 8, 8)
CASES = [
    Case("50 M, in memory", "50"),
    Case("50 M, all on NVMe", "50", placement="nvme"),
    Case("160 M, in memory", "160"),
    Case("160 M, 2.6 bytes a parameter", "160", per_parameter=2.6),
    Case("160 M, states on NVMe", "160", per_parameter=4.5),
    Case("160 M, half the states on NVMe", "160", per_parameter=9.0),
    Case("160 M, all on NVMe", "160", placement="nvme"),
    Case("160 M, states on NVMe, speculation", "160", per_parameter=6.5, speculate=True),
    Case("160 M, states on NVMe, 4 micro-batches", "160", per_parameter=6.5, micros=4),
    Case("350 M, in memory", "350"),
    Case("350 M, states on NVMe", "350", per_parameter=4.5),
    Case("50 M, 2 ranks, in memory", "50", 2),
    Case("160 M, 2 ranks, in memory", "160", 2),
    Case("160 M, 2 ranks, stage 2", "160", 2, stage=2),
    Case("160 M, 2 ranks, all on NVMe", "160", 2, placement="nvme"),
    Case("160 M, 2 ranks, 2 micro-batches", "160", 2, micros=2),
    Case("50 M, 4 ranks, in memory", "50", 4),
    Case("50 M, 4 ranks, all on NVMe", "50", 4, placement="nvme"),
]
QUICK = [CASES[0], CASES[1], CASES[11]]


def config_of(case: Case, parameters: int, disk: Path) -> dict[str, Any]:
    host = 16 * parameters + 1024 * MIB
    if case.per_parameter is not None:
        host = int(case.per_parameter * parameters) + EXTRA
    engine: dict[str, Any] = {"device": "host", "train_after_save": False, "placement": case.placement}
    if case.ranks > 1:
        engine["threads"] = 1
    return {
        "budget": {"host": host, "nvme": [str(disk)]},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "gradient_clipping": CLIP,
        "gradient_accumulation_steps": case.micros,
        "zero_optimization": {"stage": case.stage},
        "engine": engine | {"speculate": case.speculate},
    }


def model_of(size: str) -> Model:
    """Shapes alone."""
    shape = gpt.SHAPES[size]
    with torch.device("meta"):
        module = gpt.make(shape)
    return Model(module, f"GPT {size} M", shape.width, shape.layers, gpt.VOCAB)


def least(team: Team, placement: str, disk: Path) -> list[dict[str, Any]]:
    """Of three, by rank and part: what others do on the machine can only add."""
    tries = [team.ask(do="rates", placement=placement, disk=str(disk)) for _ in range(3)]
    return [
        {part: min(each[part] for each in of_rank) for part in of_rank[0]}
        for of_rank in zip(*tries, strict=True)
    ]


def machine_of(team: Team, disk: Path) -> Machine:
    """Rates of one rank of the team, all of it at work; the slowest rank decides."""
    world = len(team.ranks)
    inside, away = least(team, "host", disk), least(team, "nvme", disk)

    def slowest(answers: list[dict[str, Any]], part: str) -> float:
        return max(answer[part] for answer in answers)

    parts = ("update", "update_cpu", "slots")
    speed, processor = disk_rates(
        {part: slowest(inside, part) for part in parts},
        {part: slowest(away, part) for part in parts},
        ELEMENTS / world,
        (os.cpu_count() or 1) / world,
    )
    backward = slowest(inside, "backward") - slowest(inside, "plain_backward") + slowest(inside, "step")
    machine = Machine(
        host_bytes=0,
        flops_per_s=1,
        memory_bytes_per_s=1,
        disk_bytes_per_s=speed,
        disk_processor=processor,
        network_latency_s=0,
        network_processor=1,
        update_s=slowest(inside, "update") * world / ELEMENTS,
        intake_s=max(0.0, backward) / (2 * ELEMENTS) if world == 1 else 0,
        use_s=max(0.0, slowest(inside, "forward") - slowest(inside, "plain_forward")) / LAYERS
        if world == 1
        else 50e-6,
    )
    return machine if world == 1 else with_network(machine, team, disk)


def with_network(machine: Machine, team: Team, disk: Path) -> Machine:
    """The speed of collectives under compute on the same cores, by steps of a model that is none of the cases: at which
    the estimate is what they took."""
    case = Case("reference", REFERENCE, len(team.ranks))
    found = Compared(case)
    found.turn(team, replace(machine, network_bytes_per_s=1e9), disk)
    took, plain = statistics.median(found.measured), found.plain
    slow, fast = 1e7, 1e10
    for _ in range(40):
        middle = (slow * fast) ** 0.5
        if found.estimate(replace(machine, network_bytes_per_s=middle), plain, disk).step_s > took:
            slow = middle
        else:
            fast = middle
    return replace(machine, network_bytes_per_s=slow)


def work_of(model: Model, config: dict[str, Any], plain: list[dict[str, Any]]) -> list[Work]:
    """The plain model's seconds, of the slowest rank."""
    _, specs, _ = described(model.module, config)
    forward, backward = (max(answer[part] for answer in plain) for part in ("forward", "backward"))
    return shared_out(model, specs, forward, backward)


class Compared:
    """A case's estimates and measurements."""

    def __init__(self, case: Case):
        self.case = case
        self.model = model_of(case.size)
        self.estimated: list[float] = []
        self.measured: list[float] = []
        self.errors: list[dict[str, float]] = []
        self.plain: list[dict[str, Any]] = []

    def estimate(self, machine: Machine, plain: list[dict[str, Any]], disk: Path) -> Estimate:
        """`plain`: of the model without an engine, by rank."""
        shape = gpt.SHAPES[self.case.size]
        config = config_of(self.case, self.model.parameters, disk)
        load = Load(shape.batch, shape.length, self.case.micros, recomputed=False)
        return estimate(
            self.model, machine, load, config, self.case.ranks, work_of(self.model, config, plain)
        )

    def turn(self, team: Team, machine: Machine, disk: Path) -> None:
        config = config_of(self.case, self.model.parameters, disk)
        shape = gpt.SHAPES[self.case.size]
        before = team.ask(do="plain", shape=shape, micros=5)
        answers = team.ask(do="train", shape=shape, config=config, steps=STEPS)
        after = team.ask(do="plain", shape=shape, micros=5)
        self.plain = [
            {part: statistics.median(a[part] + b[part]) for part in ("forward", "backward")}
            for a, b in zip(before, after, strict=True)
        ]
        found = self.estimate(machine, self.plain, disk)
        measured = [max(steps) for steps in zip(*(a["steps"] for a in answers), strict=True)]
        self.estimated.append(found.step_s)
        self.measured += measured
        self.errors.append(bytes_errors(found, answers))
        print(
            f"  {self.case.name:40} estimated {found.step_s:7.3f} s, measured {statistics.median(measured):7.3f}, "
            f"plain {self.plain[0]['forward'] + self.plain[0]['backward']:.3f}, bytes off "
            + ", ".join(f"{key} {value:+.3f}" for key, value in self.errors[-1].items()),
            flush=True,
        )

    def row(self) -> dict[str, Any]:
        estimated, measured = statistics.median(self.estimated), statistics.median(self.measured)
        return {
            "case": self.case.name,
            "ranks": self.case.ranks,
            "estimated_seconds": round(estimated, 3),
            "measured_seconds": round(measured, 3),
            "error": round((estimated - measured) / measured, 3),
            "bytes_errors": {
                key: round(statistics.fmean(errors[key] for errors in self.errors), 4)
                for key in self.errors[0]
            },
        }


def bytes_errors(found: Estimate, answers: list[dict[str, Any]]) -> dict[str, float]:
    """Of what there is: estimated over measured, the mean of the ranks, less 1."""
    assert found.plan is not None and found.moved is not None
    plan = found.plan.as_dict()
    said = {
        "host": found.plan.host_bytes,
        "nvme": plan["weights_nvme_bytes"] + plan["states_nvme_bytes"],
        "read": found.moved["read"],
        "written": found.moved["write"],
    }
    was = {key: statistics.fmean(answer[key] for answer in answers) for key in said}
    return {key: said[key] / was[key] - 1 for key in said if was[key]}


def measure(cases: list[Case], turns: int, folder: Path) -> dict[str, Any]:
    """Each turn starts teams of its own, since one that has trained keeps memory that the next one needs."""
    compared = [Compared(case) for case in cases]
    for turn in range(turns):
        print(f"turn {turn + 1} of {turns}", flush=True)
        for world in sorted({case.ranks for case in cases}):
            threads = max(1, (os.cpu_count() or 1) // world)
            command = [sys.executable, str(HERE / "rank.py"), str(threads), str(world)]
            team = Team(f"ranks-{world}", command, world, dict(os.environ), threads, folder)
            try:
                machine = machine_of(team, folder)
                print(f"  {world} ranks: {machine}", flush=True)
                for each in compared:
                    if each.case.ranks == world:
                        each.turn(team, machine, folder)
            finally:
                team.close()
    rows = [each.row() for each in compared]
    errors = [abs(row["error"]) for row in rows]
    of_bytes = [abs(value) for row in rows for value in row["bytes_errors"].values()]
    return {
        "bench": "plan",
        "machine": machine_name(),
        "turns": turns,
        "rows": rows,
        "step_error_median": round(statistics.median(errors), 3),
        "step_error_max": round(max(errors), 3),
        "bytes_error_max": round(max(of_bytes), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three cases, one turn")
    parser.add_argument("--only", help="cases whose names have this in them")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    cases = QUICK if options.quick else CASES
    if options.only:
        cases = [case for case in CASES if options.only in case.name]
    (ROOT / "results").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-plan-", dir=ROOT / "results") as folder:
        result = measure(cases, 1 if options.quick else options.turns, Path(folder))
    for row in result["rows"]:
        print(
            f"  {row['case']:40} estimated {row['estimated_seconds']:7.3f} s, measured {row['measured_seconds']:7.3f}, "
            f"{row['error']:+.0%}"
        )
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
