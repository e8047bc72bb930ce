"""Everything that needs a GPU, row by row: ok, failed, or not run with the reason. For machines that are there for
some minutes at a time, bare and without a network: what a row has shown is written at once, and nothing outlasts its
minutes.

    tools/gpu-bundle                                   elsewhere, once: what such a machine lacks, and the tests built
    tools/gpu-check --calls                            the calls in order: what each needs there and brings back
    tools/gpu-check --call 1 --minutes 9               on the machine; results/gpu.json keeps the rows of other calls,
                                                       results/gpu.log has all that the programs have said
    tools/gpu-check                                    all of it, where time does not count
    tools/gpu-check --only kernels --only copies       rows with one of these in their name

Rows that measure nothing run beside each other, one for each four cores. What is missing on the machine is taken from
the bundle; it is used from there, nothing is installed. Needs Python 3.10 alone; the rows with PyTorch need one that
has torch and numpy. Exit status 0 where no row failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import Row, last_lines
from tasks import ROOT, TASKS, Task, build

REFERENCE = "tests/reference"  # a library, for the tests in Python
# Of Python, by the rows with PyTorch.
NEEDED = ("torch", "pybind11", "pytest", "pydantic", "safetensors", "numpy")
RESERVE_S = 15.0  # of the minutes: for the end


def unpack_programs(folder: Path) -> None:
    """They are carried compressed: there is a limit to what is carried in one piece."""
    for packed in folder.glob("*.xz"):
        program = packed.with_suffix("")
        with lzma.open(packed) as file:
            program.write_bytes(file.read())
        program.chmod(0o755)
        packed.unlink()


def bundle_environment(bundle: Path) -> dict[str, str]:
    """The bundle beside what the machine has; the machine's own programs come first."""
    libraries = [bundle / f"usr/lib/{platform.machine()}-linux-gnu", bundle / "usr/lib"]
    packages = [str(folder / "pkgconfig") for folder in [*libraries, bundle / "usr/share"]]
    return {
        "PATH": os.environ["PATH"] + f":{bundle}/usr/bin",
        "PKG_CONFIG_LIBDIR": ":".join(packages),
        "PKG_CONFIG_SYSROOT_DIR": str(bundle),
        "CMAKE_PREFIX_PATH": f"{bundle}/usr",
        # Where Debian's compilers look by themselves: hwloc has a part of its headers there.
        "CPLUS_INCLUDE_PATH": f"{bundle}/usr/include/{platform.machine()}-linux-gnu",
        "LD_LIBRARY_PATH": ":".join([*map(str, libraries), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(bundle / "python")]),
    }


def nccl_of(python: str, environment: dict[str, str]) -> dict[str, str]:
    """Where PyTorch's own NCCL lies, for the engine, which opens it by itself."""
    if "OVERSPILL_NCCL" in environment:
        return {}
    look = "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])"
    found = subprocess.run([python, "-c", look], env=environment, capture_output=True, text=True)
    library = Path(found.stdout.strip()) / "lib/libnccl.so.2"
    return {"OVERSPILL_NCCL": str(library)} if found.returncode == 0 and library.is_file() else {}


class Check:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.until = time.monotonic() + args.minutes * 60 - RESERVE_S if args.minutes else None
        self._lock = threading.RLock()  # of what rows beside each other share
        self.rows: dict[str, Row] = {}
        self.before = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
        self.only = [text.lower() for text in args.only]
        self.environment = dict(os.environ)
        if args.bundle.is_dir():
            unpack_programs(args.bundle / "bin")
            self.environment |= bundle_environment(args.bundle.resolve())
        self.environment |= nccl_of(sys.executable, self.environment)
        self.machine = machine(self)
        self._python: str | None = None
        self._sees: bool | None = None

    def run(self, command: list[str], timeout_s: float, **more: str) -> tuple[int, str]:
        """Exit status and output, which the log gets too. `more`: of the environment."""
        code, text = self._run(command, min(timeout_s, self.seconds_left()), self.environment | more)
        if self.args.out.parent.is_dir():
            with self._lock, self.args.out.with_suffix(".log").open("a") as log:
                log.write(f"$ {' '.join(command)}\n{text}\nexit status {code}\n\n")
        return code, text

    def _run(self, command: list[str], timeout_s: float, environment: dict[str, str]) -> tuple[int, str]:
        try:
            started = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            return 127, str(error)
        with started:
            try:
                text = started.communicate(timeout=timeout_s)[0]
                return started.returncode, text
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)  # and what it has started: that holds the pipe open
                return 124, f"{started.communicate()[0]}\nended after {timeout_s:.0f} s"
            except BaseException:  # Ctrl-C
                os.killpg(started.pid, signal.SIGKILL)
                raise

    def seconds_left(self) -> float:
        return float("inf") if self.until is None else max(1.0, self.until - time.monotonic())

    def wanted(self, task: Task) -> bool:
        if task.run is build:
            return not self.args.no_build
        if self.args.call and task.call not in self.args.call:
            return False
        return not self.only or any(text in task.name.lower() for text in self.only)

    def all(self) -> None:
        wanted = [task for task in TASKS if self.wanted(task)]
        for beside, tasks in itertools.groupby(wanted, lambda task: task.beside):
            with ThreadPoolExecutor(self.args.at_once if beside else 1) as pool:
                for done in [pool.submit(self.one, task) for task in tasks]:
                    done.result()

    def one(self, task: Task) -> None:
        start = time.monotonic()
        if self.seconds_left() <= 1:
            row = Row(task.name, "not run", f"the {self.args.minutes:g} minutes were over")
        else:
            row = task.run(self, task)
        row.seconds = round(time.monotonic() - start, 1)
        reason = f": {row.reason}" if row.reason else ""
        print(f"{row.status:8} {row.name} ({row.seconds} s){reason}", flush=True)
        with self._lock:
            self.rows[row.name] = row
            self.write()

    def write(self) -> None:
        """What there is; a row that was not reached now stays as another call has left it."""
        rows = {row["name"]: row for row in self.before}
        for name, row in self.rows.items():
            if not (row.status == "not run" and "minutes were over" in row.reason and name in rows):
                rows[name] = asdict(row) | {"gpus": self.machine["gpus"]}
        order = [task.name for task in TASKS]
        told = sorted(rows.values(), key=lambda row: order.index(row["name"]) if row["name"] in order else -1)
        out = self.args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        part.write_text(json.dumps({"machine": self.machine, "rows": told}, indent=1) + "\n")
        part.replace(out)

    def program(self, program: str) -> Path:
        """One that was built here, or came with the bundle."""
        built = self.args.build / program
        return built if built.is_file() else self.args.bundle.resolve() / "bin" / Path(program).name

    def why_no_python(self) -> str:
        """What the rows with PyTorch lack; empty where nothing."""
        with self._lock:
            return self._why_no_python()

    def _why_no_python(self) -> str:
        if self._python is None:
            look = f"import importlib.util as u; print(*[m for m in {NEEDED} if u.find_spec(m) is None])"
            code, text = self.run([sys.executable, "-c", look], 120)
            lacks = code != 0 or text.split()
            self._python = (
                f"{sys.executable} lacks {text.strip()} (tools/gpu-bundle carries all but torch and numpy)"
                if lacks
                else self._link_core()
            )
        return self._python

    def _link_core(self) -> str:
        found = [*(self.args.build / "bindings").glob("_core*.so")]
        if not found:
            return "overspill._core was not built"
        for library in found:
            link = ROOT / "bindings/overspill" / library.name
            if link.resolve() != library.resolve():  # another check may be using it
                link.unlink(missing_ok=True)
                link.symlink_to(library)
        paths = [str(ROOT / "bindings"), str(ROOT / "tests/python"), self.environment.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(paths)
        built = self.args.build / REFERENCE
        reference = built if [*built.glob("*.so")] else self.args.bundle.resolve() / "bin"
        self.environment["OVERSPILL_REFERENCE"] = str(reference)
        return ""

    def why_no_gpu(self) -> str:
        return "" if self.machine["gpus"] else f"no GPU: {self.machine['why_no_gpu']}"

    def why_no_torch_gpu(self) -> str:
        if why := self.why_no_python():
            return why
        with self._lock:
            if self._sees is None:
                look = "import torch; print(torch.cuda.is_available())"
                self._sees = self.run([sys.executable, "-c", look], 300)[1].strip().endswith("True")
        return "" if self._sees else f"{sys.executable}'s torch sees no GPU"


def machine(check: Check) -> dict:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max",
    ]
    code, gpus = check.run([*query, "--format=csv,noheader"], 60)
    _, nvcc = check.run(["nvcc", "--version"], 60)
    _, commit = check.run(["git", "rev-parse", "HEAD"], 60)
    return {
        "gpus": gpus.strip().splitlines() if code == 0 else [],
        "why_no_gpu": "" if code == 0 else last_lines(gpus, 1),
        "nvcc": last_lines(nvcc, 1),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "commit": commit.strip() if re.fullmatch(r"[0-9a-f]{40}", commit.strip()) else "unknown",
    }


# ---- the calls


def size_mib(path: Path) -> float:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files) / 2**20


def print_calls(args: argparse.Namespace) -> None:
    bundle = "gpu-bundle, which tools/gpu-bundle makes"
    if args.bundle.is_dir():
        bundle = f"{args.bundle.name} ({size_mib(args.bundle):.1f} MiB)"
    for call in sorted({task.call for task in TASKS} - {0}):
        rows = [task.name for task in TASKS if task.call in (0, call)]
        brings = ["gpu.json", "gpu.log"] + (["core/ (_core, about 5 MiB)"] if call == 1 else [])
        brings += ["a trace of some MiB a model (*.json)"] if call > 1 else []
        print(f"call {call}, 9 minutes at most")
        print(f"  there:   tools/gpu-check --call {call} --minutes 9 --out $OUT/gpu.json")
        print(f"  carries: the sources, {bundle}")
        print(f"  brings:  {', '.join(brings)}; then here: tools/gpu-check --take FOLDER")
        print(f"  rows:    {'; '.join(rows)}")


def take(folder: Path, args: argparse.Namespace) -> None:
    """What a call has brought back: rows into --out, _core into the bundle for the calls to come."""
    found = folder / "gpu.json"
    if not found.is_file():
        raise SystemExit(f"gpu-check: {folder} has no gpu.json: give the folder that the call brought back")
    new = json.loads(found.read_text())
    old = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
    rows = {row["name"]: row for row in old} | {row["name"]: row for row in new["rows"]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(new | {"rows": list(rows.values())}, indent=1) + "\n")
    core = folder / "core"
    if core.is_dir():
        shutil.copytree(core, args.bundle / "core", dirs_exist_ok=True)
    for trace in folder.glob("*-*.json"):
        shutil.copy(trace, args.out.parent)
    kept = ", _core is in the bundle" if core.is_dir() else ""
    print(f"gpu-check: {len(new['rows'])} rows of {folder} are in {args.out}{kept}")


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", action="store_true", help="print the calls in order, and do nothing")
    calls = sorted({task.call for task in TASKS} - {0})
    parser.add_argument("--call", type=int, nargs="+", choices=calls, default=[], help="their rows alone")
    parser.add_argument(
        "--minutes", type=float, default=0, help="begin nothing and run nothing beyond; 0: no limit"
    )
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="keep what a call has brought back")
    parser.add_argument("--bundle", type=Path, default=ROOT / "gpu-bundle")
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu")
    parser.add_argument("--no-build", action="store_true", help="--build has been built")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows with it in their name"
    )
    parser.add_argument("--bench", default="", metavar="ARGS", help="more of bench/gpu/run.py, in one text")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 4), metavar="N",
        help="rows that measure nothing beside each other (default: one for each four cores)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.build = args.build.resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    if args.calls:
        print_calls(args)
        return 0
    if args.take is not None:
        take(args.take, args)
        return 0
    check = Check(args)
    check.all()
    rows = check.rows.values()
    count = {status: sum(row.status == status for row in rows) for status in ("ok", "failed", "not run")}
    print(f"gpu-check: {count['ok']} ok, {count['failed']} failed, {count['not run']} not run: {args.out}")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
