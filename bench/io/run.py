"""The store beside fio and DeepSpeed on one file system, in one run, in turn.   bench/io/run.py [--pairs N]

Each contender first tries its settings and keeps its best for each pattern; then all take turns, in rotating order.
Where on the disk a file lies decides up to a tenth of its speed, and the file system gives the first file made the
first place; so the files are laid out as often as there are contenders, and each has every place once.
Every turn is timed by the contender itself, around the transfers alone. A ratio is the median of the rounds' own
ratios. CPU seconds are user and system of the whole process (kernel threads of its rings included). "mixed" is the
pattern of a step: states are read, updated and written, with the same AdamW for every contender. "moved" leaves the
update out, so that nobody looks at what was read; fio, which updates nothing, is compared in that one. "store" is
what the engine makes of the store for all its states: blocks are checked by the worker that uses them; "by_store" is
the store that checks them itself, as it does for weights and checkpoints. Ends with RESULT {json}.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import peers
from huge_pages import huge_pages
from paths import two_paths_vs_sum
from turns import Child, in_turn, machine, quartiles

ROOT = Path(__file__).resolve().parents[2]

BENCH = ROOT / "build/release/bench"
SEQUENTIAL_MIB = 1024
MOVED_MIB = 635  # what bench_io and DeepSpeed move in a moved or mixed turn
PATTERNS = ("read", "write", "moved", "mixed")


class Turn(NamedTuple):
    """What one turn measured."""

    gb_per_s: float
    cpu_s_per_gb: float
    switches_per_gb: float  # of context


class Timed(Child):
    """A contender that times its own turns."""

    def timed(self, line: str) -> Turn:
        """One turn."""
        r = self.ask(line)
        gb = r["bytes"] * 1e-9
        return Turn(gb / r["seconds"], r["cpu_s"] / gb, r["switches"] / gb)


class Store(Timed):
    """Our own driver, bench/io/io.cc."""

    patterns = PATTERNS

    def __init__(self, program: str, folder: Path, *options: str):
        super().__init__([str(BENCH / program), str(folder), "--mib", str(SEQUENTIAL_MIB), *options])

    def settings(self, pattern: str) -> list[dict]:
        """None: the store is measured as it ships."""
        return [{}]

    def turn(self, pattern: str, setting: dict) -> Turn:
        """One turn."""
        return self.timed(pattern)


class DeepSpeed(Timed):
    """bench/io/deepspeed_aio.py in its own environment."""

    patterns = PATTERNS

    def __init__(self, folder: Path):
        script = str(ROOT / "bench/io/deepspeed_aio.py")
        consumer = str(BENCH / "libbench_io_consumer.so")
        command = [peers.python(), script, str(folder), str(SEQUENTIAL_MIB), consumer]
        super().__init__(command, peers.environment())

    def settings(self, pattern: str) -> list[dict]:
        """Blocks, depths, ways to submit, threads; for moved turns also how often it waits."""
        shapes = [
            (1, 32, 1),
            (1, 128, 1),
            (1, 32, 2),
            (4, 32, 1),
            (4, 64, 1),
            (4, 32, 2),
            (8, 32, 1),
            (8, 32, 4),
        ]
        ways = [(block, depth, threads, False, True) for block, depth, threads in shapes]
        ways += [(4, 32, 1, False, False), (4, 32, 1, True, True), (8, 32, 2, True, False)]
        names = ("block_mib", "queue_depth", "parallel", "single_submit", "overlap_events")
        waits = ("shard", "all") if pattern == "moved" else ("shard",)
        return [dict(zip(names, way)) | {"wait": wait} for way, wait in itertools.product(ways, waits)]

    def turn(self, pattern: str, setting: dict) -> Turn:
        """One turn."""
        return self.timed(json.dumps({"pattern": pattern} | setting))


class Fio:
    """fio with io_uring: a process a turn, timed by itself."""

    patterns = ("read", "write", "moved")

    def __init__(self, folder: Path, huge: bool):
        self.file, self.huge = folder / "fio.bin", huge
        self.run("write", 1024, {"bs": "4m", "iodepth": 16})

    def settings(self, pattern: str) -> list[dict]:
        """Blocks and depths with registered buffers and files, in huge pages; then the best without, or polled."""
        sizes = [
            ("1m", 32),
            ("1m", 64),
            ("2m", 32),
            ("2m", 64),
            ("4m", 16),
            ("4m", 32),
            ("4m", 64),
            ("8m", 32),
        ]
        grid = [{"bs": bs, "iodepth": depth} for bs, depth in sizes]
        grid += [{"bssplit": "1m/33:2m/67", "iodepth": 64}]  # the sizes of lo, m and v
        fixed = {"fixedbufs": 1, "registerfiles": 1}
        huge = {"iomem": "mmaphuge"} if self.huge else {}
        return [
            *(one | fixed | huge for one in grid),
            {"bs": "4m", "iodepth": 32} | fixed,
            {"bs": "4m", "iodepth": 32} | huge,
            {"bs": "4m", "iodepth": 32, "sqthread_poll": 1} | fixed | huge,
        ]

    def run(self, rw: str, mib: int, setting: dict) -> Turn:
        """One process."""
        command = ["fio", "--name=turn", f"--filename={self.file}", f"--size={mib}m", f"--rw={rw}"]
        command += ["--ioengine=io_uring", "--direct=1", "--overwrite=1", "--scramble_buffers=0"]
        command += ["--output-format=json", *(f"--{key}={value}" for key, value in setting.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        gb = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) * 1e-9
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) * 1e-3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) * 1e-2 * job["job_runtime"] * 1e-3
        return Turn(gb / seconds, cpu_s / gb, job["ctx"] / gb)

    def turn(self, pattern: str, setting: dict) -> Turn:
        """One turn."""
        moved = pattern == "moved"
        return self.run("rw" if moved else pattern, MOVED_MIB if moved else SEQUENTIAL_MIB, setting)

    def close(self) -> None:
        """Nothing is left but the file."""


def best_settings(name: str, contender: Any) -> dict[str, dict]:
    """The fastest of a contender's settings for each pattern, by two passes over all of them."""
    best = {}
    for pattern in contender.patterns:
        settings = contender.settings(pattern)
        speeds = [[] for _ in settings]
        if len(settings) > 1:
            for _ in range(2):
                for i, setting in enumerate(settings):
                    speeds[i].append(contender.turn(pattern, setting).gb_per_s)
        top = max(range(len(settings)), key=lambda i: sum(speeds[i]))
        best[pattern] = settings[top]
        if speeds[top]:
            print(
                f"{name:10} {pattern:6} best of {len(settings)}: "
                f"{statistics.mean(speeds[top]):.2f} GB/s with {best[pattern]}",
                flush=True,
            )
    return best


Makers = dict[str, Callable[[Path], Any]]


@contextlib.contextmanager
def laid_out(makers: Makers, parent: Path, place: int) -> Iterator[dict[str, Any]]:
    """The contenders with new files, made in another order for each place."""
    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix=f"place-{place}-", dir=parent) as folder:
        try:
            for name in in_turn(list(makers), place):
                made[name] = makers[name](Path(folder))
            yield {name: made[name] for name in makers}
        finally:
            for contender in made.values():
                contender.close()


def take_turns(makers: Makers, parent: Path, pairs: int) -> tuple[dict, dict, str]:
    """[pattern][contender] -> a Turn a round; the settings; the store's backend. At least `pairs` rounds; who begins
    changes from round to round."""
    best: dict[str, dict] = {}
    turns: dict[str, dict[str, list[Turn]]] = {}
    backend = ""
    rounds = itertools.count()
    for place in range(len(makers)):
        with laid_out(makers, parent, place) as contenders:
            if place == 0:
                best = {name: best_settings(name, contender) for name, contender in contenders.items()}
                turns = {
                    p: {name: [] for name, one in contenders.items() if p in one.patterns} for p in PATTERNS
                }
                backend = contenders["store"].hello["backend"]
            for i in itertools.islice(rounds, -(-pairs // len(makers))):
                for pattern in PATTERNS:
                    for name in in_turn(list(turns[pattern]), i):
                        turns[pattern][name].append(contenders[name].turn(pattern, best[name][pattern]))
    for pattern in PATTERNS:
        print(f"\n{pattern:6} {'':14} {'GB/s: quartiles':>22} {'CPU s/GB':>10} {'switches/GB':>12}")
        for name, done in turns[pattern].items():
            low, mid, high = quartiles([turn.gb_per_s for turn in done])
            cpu = statistics.median(turn.cpu_s_per_gb for turn in done)
            switches = statistics.median(turn.switches_per_gb for turn in done)
            print(f"{'':6} {name:14} {low:6.2f}  {mid:6.2f}  {high:6.2f} {cpu:10.4f} {switches:12.0f}")
    return turns, best, backend


def report(turns: dict, best: dict, store_backend: str) -> dict[str, Any]:
    """The RESULT's keys."""
    r: dict[str, Any] = {"pairs": len(turns["read"]["store"])}

    def ratios(pattern: str, other: str, ours: str = "store") -> list[float]:
        both = zip(turns[pattern][ours], turns[pattern][other])
        return quartiles([one.gb_per_s / two.gb_per_s for one, two in both])

    for pattern, ours in itertools.product(PATTERNS, ("store", "by_store")):
        for other in turns[pattern] if ours in turns[pattern] else ():
            if other not in ("fio", "deepspeed"):
                continue
            low, mid, high = ratios(pattern, other, ours)
            key = f"{pattern}{'_by_store' if ours == 'by_store' else ''}_vs_{other}"
            r[key] = round(mid, 3)
            r[f"{key}_quartiles"] = [round(low, 3), round(high, 3)]
    r["mixed_vs_fio"] = r["moved_vs_fio"]  # fio updates nothing
    for pattern in PATTERNS:
        for name, done in turns[pattern].items():
            if name == "unchecked" and pattern != "mixed":
                continue
            cpu = statistics.median(turn.cpu_s_per_gb for turn in done)
            prefix = "" if pattern == "mixed" else f"{pattern}_"
            r[f"{prefix}cpu_s_per_gb{'' if name == 'store' else '_' + name}"] = round(cpu, 4)
    r["checksum_cost"] = round(1 - ratios("moved", "unchecked")[1], 3)
    for pattern, ours in itertools.product(("moved", "mixed"), ("store", "by_store")):
        cpu = [
            one.cpu_s_per_gb - bare.cpu_s_per_gb
            for one, bare in zip(turns[pattern][ours], turns[pattern]["unchecked"])
        ]
        key = f"{'' if pattern == 'mixed' else 'moved_'}checksum_cpu_s_per_gb"
        r[key + ("" if ours == "store" else "_by_store")] = round(statistics.median(cpu), 4)
    r["gb_per_s"] = {
        pattern: {
            name: [round(q, 3) for q in quartiles([t.gb_per_s for t in done])] for name, done in of.items()
        }
        for pattern, of in turns.items()
    }
    r["settings"] = {name: best[name] for name in ("fio", "deepspeed") if name in best}
    return r | {"backend": store_backend}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=ROOT / "results", help="on the file system to measure")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        print("bench-io: fio is not there; tools/peers installs it", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        "bench": "io",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=args.folder) as name, huge_pages() as huge:
        makers: Makers = {
            "fio": lambda folder: Fio(folder, huge),
            "store": lambda folder: Store("bench_io", folder),
            "by_store": lambda folder: Store("bench_io", folder, "--by-store"),
            "unchecked": lambda folder: Store("bench_io_unchecked", folder, "--by-store"),
        }
        if peers.deepspeed_is_there():
            makers["deepspeed"] = DeepSpeed
        else:
            print("bench-io: DeepSpeed is left out: tools/peers could not install it")
        result |= report(*take_turns(makers, Path(name), args.pairs))
    result |= two_paths_vs_sum(BENCH / "bench_io")
    print(f"RESULT {json.dumps(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
