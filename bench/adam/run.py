"""The update beside torch's, DeepSpeed's and the memory's limit, in one run, in turn.

Contenders: overspill's AdamW in each format, torch.optim.AdamW(fused=True) and DeepSpeedCPUAdam(adamw_mode=True), both
in fp32. Each has one tensor and its gradient: fp32 for the fp32 rows, 16 bits for exact, compact, 8bit (bf16) and fp16.
The limit of a format is the fastest of several loops (bench/adam/limits.cc) that only read and write the same streams.

    bench/adam/run.py                          everything, under 8 minutes; 256 million parameters need 13 GiB
    bench/adam/run.py --millions 64            that size alone
    bench/adam/run.py --millions 64 --formats fp32,8bit --threads 2 --rounds 5

A turn is one update (at 1 million parameters, which stay in the cache, sixteen). Who begins changes from round to
round; a ratio is the median of the rounds' own ratios. Sizes too large for the memory to hold all contenders at once
are taken in groups; overspill's fp32, its limit and DeepSpeed are in every group. Ends with RESULT {json}; the plot is
results/adam.svg.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import peers
from plot import draw
from turns import Child, in_turn, machine, quartiles

ROOT = Path(__file__).resolve().parents[2]

BENCH = ROOT / "build/release/bench/bench_adam"
GIB = 1 << 30
HEADLINE = (64, 2)  # millions of parameters, threads
# Bytes of an element that an update moves and, gradient included, holds.
MOVED = {"fp32": 28, "exact": 26, "fp16": 28, "compact": 18, "8bit": 12, "torch": 28, "deepspeed": 28}
HELD = {"fp32": 16, "exact": 14, "fp16": 16, "compact": 10, "8bit": 7.1, "torch": 16, "deepspeed": 16}
FORMATS = ("fp32", "exact", "fp16", "compact", "8bit")
ALWAYS = ("fp32", "deepspeed")  # in every group
KEYS = {"8bit": "int8"}  # how RESULT calls a format


class Work(NamedTuple):
    """What one turn does."""

    contender: str
    form: str = ""  # of the limit; empty: the update


class Contender:
    """A child, and which of its loops are the fastest at a number of threads."""

    def __init__(self, name: str, millions: int):
        self.name = name
        script = str(ROOT / "bench/adam/torch_adam.py")
        if name == "deepspeed":
            self.child = Child([peers.python(), script, name, str(millions)], peers.environment())
        elif name == "torch":
            self.child = Child([sys.executable, script, name, str(millions)])
        else:
            self.child = Child([str(BENCH), name, str(millions)])
        self.times = max(1, 16 // millions)
        self.forms: dict[int, list[str]] = {}

    def huge_share(self) -> float:
        """The part of its memory that is in huge pages."""
        rollup = Path(f"/proc/{self.child.process.pid}/smaps_rollup").read_text().split()
        return int(rollup[rollup.index("AnonHugePages:") + 1]) / int(rollup[rollup.index("Anonymous:") + 1])

    def seconds(self, threads: int, form: str = "") -> float:
        """One turn. The pause lets threads that wait by spinning give the cores back."""
        time.sleep(0.01)
        reply = self.child.ask(f"{'limit ' + form if form else 'go'} {threads} {self.times}")
        return reply["seconds"]

    def compute_seconds(self) -> float:
        """Of an element, on one core, out of its cache: the fastest of 15 turns, because what disturbs only adds."""
        turns = [self.child.ask("compute 1 50")["seconds"] for _ in range(15)]
        return min(turns) / (32 << 10)

    def choose_forms(self, threads: int) -> None:
        """The two fastest of the limit's loops, of four turns each; the first is not counted."""
        names = self.child.hello.get("limits", [])
        tried = {name: [] for name in names}
        for turn in range(4):
            for name in in_turn(names, turn):
                tried[name].append(self.seconds(threads, name))
        self.forms[threads] = sorted(names, key=lambda name: statistics.median(tried[name][1:]))[:2]


def available_bytes() -> int:
    """What the kernel says can still be taken."""
    for line in Path("/proc/meminfo").read_text().split("\n"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def groups(names: list[str], millions: int) -> Iterator[list[str]]:
    """Those that can live at once, each time with those of ALWAYS."""
    always = [name for name in ALWAYS if name in names]
    guests = [name for name in names if name not in always]

    def room(of: list[str]) -> float:
        return sum(HELD[name] * (millions << 20) + 0.4 * GIB for name in of)

    free = available_bytes() - 1.5 * GIB
    if room(always) + max((room([g]) for g in guests), default=0) > free:
        raise MemoryError(f"{free / GIB:.1f} GiB are free")
    while guests or always:
        group = list(always)
        while guests and room([*group, guests[0]]) <= free:
            group.append(guests.pop(0))
        yield group
        if not guests:
            return


def take_turns(group: dict[str, Contender], threads: int, rounds: int) -> dict[Work, list[float]]:
    """Seconds of each turn; the first round only warms up."""
    for contender in group.values():
        if threads not in contender.forms:
            contender.choose_forms(threads)
    works = [Work(name) for name in group]
    works += [Work(name, form) for name, one in group.items() for form in one.forms[threads]]
    seconds = {work: [] for work in works}
    for turn in range(rounds + 1):
        for work in in_turn(works, turn):
            taken = group[work.contender].seconds(threads, work.form)
            if turn > 0:
                seconds[work].append(taken)
    return seconds


def over(seconds: dict[Work, list[float]], numerator: Work, denominator: Work) -> list[float]:
    """Quartiles of the rounds' ratios."""
    return quartiles([a / b for a, b in zip(seconds[numerator], seconds[denominator])])


def rows_of(seconds: dict[Work, list[float]], millions: int, threads: int) -> list[dict[str, Any]]:
    """A row for each contender of a group."""

    def limit_of(name: str) -> Work | None:
        forms = [work for work in seconds if work.contender == name and work.form]
        return min(forms, key=lambda work: statistics.median(seconds[work]), default=None)

    count = millions << 20
    limit32 = limit_of("fp32")
    rows = []
    for work in seconds:
        name = work.contender
        if work.form:
            continue
        low, mid, high = quartiles([count / s for s in seconds[work]])
        row = {
            "contender": name,
            "parameters": count,
            "threads": threads,
            "params_per_s": mid,
            "params_per_s_quartiles": [low, high],
            "gb_per_s": mid * MOVED[name] * 1e-9,
        }
        if limit := limit_of(name):
            per_s = count / statistics.median(seconds[limit])
            row |= {"limit_params_per_s": per_s, "limit_gb_per_s": per_s * MOVED[name] * 1e-9}
            row |= {"limit_form": limit.form, "vs_limit": over(seconds, limit, work)}
        if limit32:
            row["vs_fp32_limit"] = over(seconds, limit32, work)
        for other in ("deepspeed", "torch"):
            if Work(other) in seconds and other != name:
                row[f"vs_{other}"] = over(seconds, Work(other), work)
        rows.append(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """A row as a line."""
    cells = f"{row['contender']:10} {row['params_per_s'] * 1e-9:6.2f} G/s {row['gb_per_s']:6.1f} GB/s"
    if "vs_limit" in row:
        cells += f"   {row['vs_limit'][1]:.3f} of the limit ({row['limit_gb_per_s']:.1f} GB/s, {row['limit_form']})"
    for other in ("deepspeed", "torch"):
        if f"vs_{other}" in row:
            cells += f"   {row[f'vs_{other}'][1]:.2f}x {other}"
    print(cells, flush=True)


def measure(names: list[str], millions: int, threads: list[int], rounds: int) -> tuple[list[dict], dict]:
    """All rows of a size, and of each format the seconds of an element out of the cache."""
    rows: list[dict] = []
    compute: dict[str, float] = {}
    contenders: dict[str, Contender] = {}
    try:
        for group in groups(names, millions):
            for name in [name for name in contenders if name not in group]:
                contenders.pop(name).child.close()
            for name in group:
                if name not in contenders:
                    contenders[name] = Contender(name, millions)
            huge = ", ".join(f"{name} {one.huge_share():.0%}" for name, one in contenders.items())
            print(f"\n{millions} Mi parameters; memory in huge pages: {huge}", flush=True)
            for name in group:
                if name in FORMATS and name not in compute:
                    compute[name] = contenders[name].compute_seconds()
            for count in threads:
                print(f"{count} thread{'s' * (count > 1)}", flush=True)
                new = rows_of(take_turns(contenders, count, rounds), millions, count)
                for row in new:
                    seen = any((r["contender"], r["threads"]) == (row["contender"], count) for r in rows)
                    show(row)
                    if not seen:
                        rows.append(row)
    finally:
        for contender in contenders.values():
            contender.child.close()
    return rows, compute


def headline(rows: list[dict], compute: dict[str, float], cores: int = 8) -> dict[str, Any]:
    """The RESULT's keys, and what more cores would give: on one core an update takes its cached time, cores share
    the memory's limit as it was measured here, and neither gets slower by the other."""
    r: dict[str, Any] = {}
    at = {row["contender"]: row for row in rows if (row["parameters"] >> 20, row["threads"]) == HEADLINE}
    theirs = at.get("deepspeed", {}).get("params_per_s")
    for name in FORMATS:
        row, key = at.get(name), KEYS.get(name, name)
        if row is None:
            continue
        r[f"{key}_vs_limit"] = round(row["vs_limit"][1], 3)
        r[f"{key}_limit_gb_per_s"] = round(row["limit_gb_per_s"], 1)
        if "vs_deepspeed" in row:
            suffix = "" if name in ("fp32", "exact") else "_fp32"
            r[f"{key}_vs_deepspeed{suffix}"] = round(row["vs_deepspeed"][1], 3)
        if "vs_torch" in row and name == "fp32":
            r["fp32_vs_torch_fused"] = round(row["vs_torch"][1], 3)
        r[f"{key}_compute_ns"] = round(compute[name] * 1e9, 4)
        if theirs:
            more = min(row["limit_params_per_s"], cores / compute[name]) / theirs
            r[f"{key}_vs_deepspeed_fp32_at_{cores}_cores"] = round(more, 2)
    return r


def contenders_of(formats: list[str]) -> list[str]:
    """Names, DeepSpeed only where it is."""
    names = [*formats, "torch"]
    if peers.deepspeed_is_there():
        return [*names, "deepspeed"]
    print("bench-adam: DeepSpeed is left out: tools/peers could not install it")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", default="1,64,256", help="sizes (default %(default)s)")
    parser.add_argument("--threads", default="1,2", help="default %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=21, help="above 64 million half as many (default %(default)s)"
    )
    parser.add_argument("--formats", default=",".join(FORMATS), help="default %(default)s")
    args = parser.parse_args()
    args.millions = [int(word) for word in args.millions.split(",")]
    args.threads = [int(word) for word in args.threads.split(",")]
    args.formats = args.formats.split(",")
    unknown = [name for name in args.formats if name not in FORMATS]
    if unknown or min(*args.millions, *args.threads, args.rounds, 1) < 1:
        parser.error(f"unknown formats {unknown}" if unknown else "numbers start at 1")
    return args


def main() -> int:
    args = arguments()
    start = time.monotonic()
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    result: dict[str, Any] = {
        "bench": "adam",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "transparent_hugepage": thp,
        "rounds": args.rounds,
    }
    print(f"{result['machine']}; transparent huge pages: {thp}")
    names = contenders_of(args.formats)
    rows: list[dict] = []
    compute: dict[str, float] = {}
    try:
        for millions in args.millions:
            try:
                rounds = args.rounds if millions <= HEADLINE[0] else (args.rounds + 1) // 2
                more, cached = measure(names, millions, args.threads, rounds)
            except MemoryError as error:
                print(f"bench-adam: {millions} Mi parameters are left out: {error}")
                continue
            rows += more
            compute = cached
            print(f"{time.monotonic() - start:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("bench-adam: interrupted", file=sys.stderr)
        return 130
    result |= headline(rows, compute) | {"rows": rows, "seconds": round(time.monotonic() - start)}
    draw(rows, ROOT / "results/adam.svg")
    print(f"RESULT {json.dumps(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
