"""Everything that needs a GPU, row by row: ok, failed, or not run with the reason. Writes results/gpu.json.

tools/gpu-check [--bundle DIR] [--build DIR] [--no-build] [--out FILE] [--jobs N] [--only TEXT ...] [--bench ARGS]

    tools/gpu-check                                          all of it
    tools/gpu-check --only kernels --only copies             rows with one of these in their name; FILE keeps the others
    tools/gpu-check --no-build --only benchmark --bench "--minutes 9 --models 7b"

Exit status 0 where no row failed. What is missing on the machine is taken from DIR (default gpu-bundle, which
tools/gpu-bundle makes elsewhere); it is used from there, nothing is installed. Needs Python 3.10 alone; the rows with
PyTorch need one that has torch and numpy.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ["kernels_cuda_test", "engine_tests", "engine_ranks_test", "engine_nccl_test", "bench_cuda_copy"]
PYTHON_TARGETS = ["_core", "overspill_reference_c"]
# Of Python, by the rows with PyTorch.
NEEDED = ("torch", "pybind11", "pytest", "pydantic", "safetensors", "numpy")


@dataclass
class Row:
    name: str
    status: str  # ok, failed, not run
    reason: str = ""
    seconds: float = 0.0
    result: dict | None = None


def last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def judge_gtest(name: str, code: int, text: str) -> Row:
    """A run in which a test was skipped, or none ran, has not shown its row."""
    ran = re.search(r"\[==========\] (\d+) tests? from .* ran\.", text)
    if code != 0:
        return Row(name, "failed", last_lines(text))
    if ran is None or int(ran[1]) == 0:
        return Row(name, "failed", "no test ran")
    reasons = sorted(set(re.findall(r": Skipped\n(.+)", text)))
    if reasons:
        skipped = text.count("[  SKIPPED ] ") // 2  # once where it happens, once in the summary
        return Row(name, "not run", f"{skipped} of {ran[1]} tests were skipped: {'; '.join(reasons)}")
    return Row(name, "ok", f"{ran[1]} tests")


def judge_pytest(name: str, code: int, text: str) -> Row:
    """As judge_gtest."""
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}
    if code != 0 or counts.get("passed", 0) == 0:
        failed = re.findall(r"^(?:FAILED|ERROR) .+", text, re.MULTILINE)
        return Row(name, "failed", "\n".join(failed[:15]) or last_lines(text))
    if counts.get("skipped", 0):
        reasons = sorted(set(re.findall(r"^SKIPPED \[\d+\] \S+ (.+)", text, re.MULTILINE)))
        whole = counts["passed"] + counts["skipped"]
        return Row(
            name, "not run", f"{counts['skipped']} of {whole} tests were skipped: {'; '.join(reasons)}"
        )
    return Row(name, "ok", f"{counts['passed']} tests")


def judge_overlap(name: str, code: int, text: str) -> Row:
    """Of the training benchmark's output: copies lay under compute, by the device's own events."""
    row = judge_bench(name, code, text)
    if row.status != "ok":
        return row
    row.result = row.result.get("overlap", {})
    shares = [found["up_under_compute"] for found in row.result.values()]
    if not shares:
        return Row(name, "failed", "the benchmark left no trace")
    return row if max(shares) > 0 else Row(name, "failed", f"no copy lies under compute: {row.result}")


def judge_bench(name: str, code: int, text: str) -> Row:
    lines = [line[len("RESULT ") :] for line in text.splitlines() if line.startswith("RESULT ")]
    if code == 3:
        return Row(name, "not run", last_lines(text))
    if code != 0 or not lines:
        return Row(name, "failed", last_lines(text))
    return Row(name, "ok", result=json.loads(lines[-1]))


def bundle_environment(bundle: Path) -> dict[str, str]:
    """The bundle beside what the machine has; the machine's own programs come first."""
    libraries = [bundle / f"usr/lib/{platform.machine()}-linux-gnu", bundle / "usr/lib"]
    packages = [str(folder / "pkgconfig") for folder in [*libraries, bundle / "usr/share"]]
    return {
        "PATH": os.environ["PATH"] + f":{bundle}/usr/bin",
        "PKG_CONFIG_LIBDIR": ":".join(packages),
        "PKG_CONFIG_SYSROOT_DIR": str(bundle),
        "CMAKE_PREFIX_PATH": f"{bundle}/usr",
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
        self.rows: list[Row] = []
        self.only = [text.lower() for text in args.only]
        self.environment = dict(os.environ)
        if args.bundle.is_dir():
            self.environment |= bundle_environment(args.bundle.resolve())
        self.environment |= nccl_of(sys.executable, self.environment)

    def run(self, command: list[str], timeout_s: int) -> tuple[int, str]:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment, text=True, timeout=timeout_s, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            text = error.stdout or b""
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            return 124, f"{text}\nended after {timeout_s} s"
        except OSError as error:
            return 127, str(error)
        return done.returncode, done.stdout

    def wanted(self, name: str) -> bool:
        return not self.only or any(text in name.lower() for text in self.only)

    def add(self, row: Row, start: float) -> Row:
        row.seconds = round(time.monotonic() - start, 1)
        self.rows.append(row)
        print(
            f"{row.status:8} {row.name} ({row.seconds} s){': ' + row.reason if row.reason else ''}",
            flush=True,
        )
        return row

    def step(self, name: str, command: list[str], timeout_s: int) -> bool:
        start = time.monotonic()
        code, text = self.run(command, timeout_s)
        row = Row(name, "ok") if code == 0 else Row(name, "failed", last_lines(text))
        return self.add(row, start).status == "ok"

    def why_no_python(self) -> str:
        """What the rows with PyTorch lack; empty where nothing."""
        look = f"import importlib.util as u; print(*[m for m in {NEEDED} if u.find_spec(m) is None])"
        code, text = self.run([sys.executable, "-c", look], 120)
        if code != 0 or text.split():
            return f"{sys.executable} lacks {text.strip()} (tools/gpu-bundle carries all but torch and numpy)"
        code, text = self.run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], 300)
        return "" if text.strip().endswith("True") else f"{sys.executable}'s torch sees no GPU"

    def with_pytorch(self) -> None:
        names = {
            "zoo on CUDA": ["-k", "bit_equal"],
            "streams, inputs, checkpoints, autocast on CUDA": ["-k", "not bit_equal"],
        }
        measured = ("training benchmark, 1 B and 7 B", "overlap in a trace from CUDA events")
        wanted = [name for name in (*names, *measured) if self.wanted(name)]
        start = time.monotonic()
        if wanted and (why := self.why_no_python()):
            for name in wanted:
                self.add(Row(name, "not run", why), start)
            return
        for library in (self.args.build / "bindings").glob("_core*.so"):
            link = ROOT / "bindings/overspill" / library.name
            link.unlink(missing_ok=True)
            link.symlink_to(library)
        paths = [str(ROOT / "bindings"), str(ROOT / "tests/python"), self.environment.get("PYTHONPATH", "")]
        self.environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "OVERSPILL_DEVICE": "cuda",
            "OVERSPILL_REFERENCE": str(self.args.build / "tests/reference"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic products
        }
        tests = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "tests/python/on_accelerator.py",
        ]
        for name, chosen in names.items():
            start = time.monotonic()
            if name in wanted:
                self.add(judge_pytest(name, *self.run([*tests, *chosen], 900)), start)
        if not set(measured) & set(wanted):
            return
        start = time.monotonic()
        traces = self.args.out.resolve().parent
        bench = [sys.executable, "bench/gpu/run.py", "--trace", str(traces), *self.args.bench.split()]
        found = self.run(bench, 2400)
        for name, judge in zip(measured, (judge_bench, judge_overlap), strict=True):
            self.add(judge(name, *found), start)

    def judged(self, name: str, judge, program: str, arguments: list[str], before: list[str] | None = None,
               timeout_s: int = 300) -> None:  # fmt: skip
        if not self.wanted(name):
            return
        start = time.monotonic()
        path = self.args.build / program
        if not path.is_file():
            self.add(Row(name, "not run", f"{program} was not built"), start)
            return
        self.add(judge(name, *self.run([*(before or []), str(path), *arguments], timeout_s)), start)

    def build(self) -> bool:
        configure = [
            "cmake", "-S", ".", "-B", str(self.args.build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            "-DOVERSPILL_CUDA=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON",
        ]  # fmt: skip
        targets = list(TARGETS)
        code, pybind11 = self.run([sys.executable, "-m", "pybind11", "--cmakedir"], 60)
        configure.append(f"-DOVERSPILL_PYTHON={'ON' if code == 0 else 'OFF'}")
        if code == 0:
            configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.strip()}"]
            targets += PYTHON_TARGETS
        compile = ["cmake", "--build", str(self.args.build), "-j", str(self.args.jobs), "--target", *targets]
        return self.step("configure", configure, 300) and self.step("build", compile, 900)

    def sanitized(self, tool: str) -> None:
        name = f"compute-sanitizer {tool}"
        if not self.wanted(name):
            return
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            self.add(Row(name, "not run", "compute-sanitizer is not installed"), time.monotonic())
            return
        # A test hands CUDA a wrong address on purpose: refused calls are no finding, accesses and races are.
        before = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
        before += ["--report-api-errors", "no"] if tool == "memcheck" else []
        self.judged(
            name,
            judge_gtest,
            "tests/kernels/kernels_cuda_test",
            ["--gtest_filter=Cuda*-CudaAbsence*"],
            before,
        )

    def all(self) -> None:
        if not self.args.no_build and not self.build():
            return
        kernels = "tests/kernels/kernels_cuda_test"
        engine = "tests/engine/engine_tests"
        self.judged("device conformance", judge_gtest, kernels, ["--gtest_filter=Cuda.*:Cuda/Device*"])
        of_kernels = "--gtest_filter=CudaKernels*:Cuda/Kernel*"
        self.judged("kernels have the CPU's bits", judge_gtest, kernels, [of_kernels])
        self.judged("training has the reference's bits", judge_gtest, engine, ["--gtest_filter=*_cuda_*"])
        for name, program, tests in [
            ("two ranks on one GPU", engine, "TwoRanks*"),
            ("stages over ranks on one GPU", "tests/engine/engine_ranks_test", "*Stages*EveryDevice*"),
        ]:
            no_gpu = why_no_gpu(self)
            if no_gpu and self.wanted(name):
                self.add(Row(name, "not run", no_gpu), time.monotonic())
            elif not no_gpu:
                self.judged(name, judge_gtest, program, [f"--gtest_filter={tests}"])
        self.sanitized("memcheck")
        self.sanitized("racecheck")
        self.judged("copies beside cudaMemcpyAsync", judge_bench, "bench/bench_cuda_copy", [])
        nccl = "tests/engine/engine_nccl_test"
        self.judged("NCCL on one GPU", judge_gtest, nccl, ["--gtest_filter=Gpus/*of_1:RealNcclOnOneGpu*"])
        self.judged("NCCL between two GPUs", judge_gtest, nccl, ["--gtest_filter=Gpus/*of_2"])
        self.with_pytorch()


def why_no_gpu(check: Check) -> str:
    """Those tests take CUDA in where it is, without a word where it is not."""
    code, text = check.run(["nvidia-smi", "-L"], 60)
    return "" if code == 0 and "GPU" in text else f"no GPU: {last_lines(text, 1)}"


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
        "nvcc": last_lines(nvcc, 1),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "commit": commit.strip() if re.fullmatch(r"[0-9a-f]{40}", commit.strip()) else "unknown",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=ROOT / "gpu-bundle")
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu")
    parser.add_argument("--no-build", action="store_true", help="--build has been built")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows with it in their name"
    )
    parser.add_argument("--bench", default="", metavar="ARGS", help="of bench/gpu/run.py, in one text")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    check = Check(parser.parse_args(argv))
    check.args.build = check.args.build.resolve()
    check.all()
    rows = {row.name: asdict(row) for row in check.rows}
    if check.only and check.args.out.is_file():
        rows = {row["name"]: row for row in json.loads(check.args.out.read_text())["rows"]} | rows
    out = {"machine": machine(check), "rows": list(rows.values())}
    check.args.out.parent.mkdir(parents=True, exist_ok=True)
    check.args.out.write_text(json.dumps(out, indent=1) + "\n")
    count = {
        status: sum(row.status == status for row in check.rows) for status in ("ok", "failed", "not run")
    }
    print(
        f"gpu-check: {count['ok']} ok, {count['failed']} failed, {count['not run']} not run: {check.args.out}"
    )
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
