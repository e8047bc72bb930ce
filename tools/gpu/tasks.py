"""The rows of tools/gpu-check: what each runs, in which call, and how it is judged."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rows import (
    Row,
    judge_bench,
    judge_gtest,
    judge_overlap,
    judge_pytest,
    judge_sanitizer,
    judge_update,
    last_lines,
)

if TYPE_CHECKING:
    from check import Check


ROOT = Path(__file__).resolve().parents[2]
KERNELS, ENGINE = "tests/kernels/kernels_cuda_test", "tests/engine/engine_tests"
RANKS, NCCL = "tests/engine/engine_ranks_test", "tests/engine/engine_nccl_test"
COPIES, UPDATE = "bench/bench_cuda_copy", "bench/bench_adam"
PROGRAMS = (KERNELS, ENGINE, RANKS, NCCL, COPIES, UPDATE)
TARGETS = [Path(program).name for program in PROGRAMS]
SOURCES = ("CMakeLists.txt", "base", "bindings", "cpu_optim", "engine", "io", "kernels")  # of _core


@dataclass(frozen=True)
class Task:
    """A row, and how it comes about. `call`: of those that fit into some minutes each. `limit_s`: of its program.
    `beside`: it measures nothing, so that others like it may run at the same time."""

    name: str
    call: int
    run: Callable[[Check, Task], Row]
    limit_s: float = 300
    beside: bool = False


def digest_of_sources() -> str:
    """Of all that _core is built from, and of the Python that it is built for."""
    found = hashlib.sha256(str(sysconfig.get_config_var("EXT_SUFFIX")).encode())
    for name in SOURCES:
        top = ROOT / name
        for path in sorted(p for p in ([top] if top.is_file() else top.rglob("*")) if p.is_file()):
            if path.suffix in (".cc", ".cu", ".h", ".txt", ".cmake"):
                found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def build(check: Check, task: Task) -> Row:
    """_core for the Python here, and the tests where the bundle has none."""
    args, kept = check.args, check.args.bundle.resolve() / "core"
    digest = digest_of_sources()
    if (kept / "digest").is_file() and (kept / "digest").read_text().strip() == digest:
        (args.build / "bindings").mkdir(parents=True, exist_ok=True)
        for library in kept.glob("_core*.so"):
            shutil.copy(library, args.build / "bindings")
        return Row(task.name, "ok", "of an earlier call, from the same sources")
    carried = all((args.bundle / "bin" / target).is_file() for target in TARGETS)
    configure = [
        "cmake", "-S", ".", "-B", str(args.build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DOVERSPILL_CUDA=ON", "-DOVERSPILL_WERROR=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON",
        f"-DOVERSPILL_TESTS={'OFF' if carried else 'ON'}", f"-DOVERSPILL_BENCH={'OFF' if carried else 'ON'}",
    ]  # fmt: skip
    targets = [] if carried else [*TARGETS]
    code, pybind11 = check.run([sys.executable, "-m", "pybind11", "--cmakedir"], 60)
    configure.append(f"-DOVERSPILL_PYTHON={'ON' if code == 0 else 'OFF'}")
    if code == 0:
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.strip()}"]
        targets += ["_core"] if carried else ["_core", "overspill_reference_c"]
    elif carried:
        return Row(task.name, "not run", f"{sys.executable} has no pybind11")
    compile = ["cmake", "--build", str(args.build), "-j", str(args.jobs), "--target", *targets]
    for command in (configure, compile):
        code, text = check.run(command, task.limit_s)
        if code != 0:
            return Row(task.name, "failed", last_lines(text))
    keep_core(check, digest)
    return Row(task.name, "ok", f"{', '.join(targets)}")


def keep_core(check: Check, digest: str) -> None:
    """Beside the results, to be carried by the next call: `--take` puts it into the bundle."""
    folder = check.args.out.parent / "core"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for library in (check.args.build / "bindings").glob("_core*.so"):
        shutil.copy(library, folder)
        check.run(["strip", str(folder / library.name)], 60)
    (folder / "digest").write_text(digest + "\n")


def programs(check: Check, task: Task) -> Row:
    """They find their libraries here."""
    failed, count = [], 0
    for program in PROGRAMS:
        path = check.program(program)
        if not path.is_file():
            failed.append(f"{program} was not built")
            continue
        listing = ["--help"] if program in (COPIES, UPDATE) else ["--gtest_list_tests"]
        code, text = check.run([str(path), *listing], 60)
        count += 1
        if code != 0:
            failed.append(f"{program}: {last_lines(text, 3)}")
    return (
        Row(task.name, "failed", "\n".join(failed)) if failed else Row(task.name, "ok", f"{count} programs")
    )


def tests(program: str, chosen: str, hidden: bool = False) -> Callable[[Check, Task], Row]:
    """`hidden`: they take CUDA in where it is, without a word where it is not."""

    def run(check: Check, task: Task) -> Row:
        if hidden and (why := check.why_no_gpu()):
            return Row(task.name, "not run", why)
        path = check.program(program)
        if not path.is_file():
            return Row(task.name, "not run", f"{program} was not built")
        return judge_gtest(task.name, *check.run([str(path), f"--gtest_filter={chosen}"], task.limit_s))

    return run


def sanitizer(tool: str) -> Callable[[Check, Task], Row]:
    def run(check: Check, task: Task) -> Row:
        found, path = shutil.which("compute-sanitizer"), check.program(KERNELS)
        if found is None or not path.is_file():
            return Row(
                task.name, "not run", f"{'compute-sanitizer' if found is None else KERNELS} is not here"
            )
        if why := check.why_no_gpu():
            return Row(task.name, "not run", why)
        # One test hands CUDA a wrong address on purpose, another compares clocks, which the tool slows down.
        command = [found, "--tool", tool, "--error-exitcode", "1"]
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [str(path), "--gtest_filter=Cuda*-CudaAbsence*:*ACopyOutside*:*TimedEvents*"]
        return judge_sanitizer(task.name, *check.run(command, task.limit_s))

    return run


def copies(check: Check, task: Task) -> Row:
    path = check.program(COPIES)
    if not path.is_file():
        return Row(task.name, "not run", f"{COPIES} was not built")
    return judge_bench(task.name, *check.run([str(path)], task.limit_s))


def update(check: Check, task: Task) -> Row:
    """On all cores and on those that the engine's workers have beside a GPU, in turn with loops that only read and
    write the same bytes: what bounds a step whose update nothing hides."""
    path = check.program(UPDATE)
    if why := check.why_no_gpu() or ("" if path.is_file() else f"{UPDATE} was not built"):
        return Row(task.name, "not run", why)
    cores = os.cpu_count() or 1
    counts = sorted({cores, max(1, cores - 2)})
    asked = [
        f"{what} {threads} 2" for threads in counts for what in ("go", *(f"limit {form}" for form in LIMITS))
    ]
    lines = " ".join(f"'{line}'" for line in asked * 3)
    code, text = check.run(
        ["bash", "-c", f"printf '%s\\n' {lines} | '{path}' exact {UPDATED_MILLIONS}"], task.limit_s
    )
    return judge_update(task.name, code, text, asked, UPDATED_MILLIONS << 20)


def python_tests(*chosen: str, device: str = "cuda", processes: int = 1) -> Callable[[Check, Task], Row]:
    """`chosen`: files, and options that choose among their tests. `processes`: that share them where there is
    pytest-xdist and four cores for each."""

    def run(check: Check, task: Task) -> Row:
        why = check.why_no_torch_gpu() if device == "cuda" else check.why_no_python()
        if why:
            return Row(task.name, "not run", why)
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *chosen]
        share = min(processes, (os.cpu_count() or 1) // 4)
        if share > 1 and check.run([sys.executable, "-c", "import xdist"], 60)[0] == 0:
            command += ["-n", str(share)]
        deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        ran = check.run(command, task.limit_s, OVERSPILL_DEVICE=device, **deterministic)
        return judge_pytest(task.name, *ran)

    return run


def training(*arguments: str) -> Callable[[Check, Task], Row]:
    def run(check: Check, task: Task) -> Row:
        if why := check.why_no_torch_gpu():
            return Row(task.name, "not run", why)
        minutes = min(task.limit_s, check.seconds_left()) / 60
        given = [
            *arguments,
            "--trace",
            str(check.args.out.resolve().parent),
            "--minutes",
            f"{minutes * 0.7:.1f}",
        ]
        command = [sys.executable, "bench/gpu/run.py", *given, *check.args.bench.split()]
        return judge_bench(task.name, *check.run(command, task.limit_s))

    return run


def overlap(check: Check, task: Task) -> Row:
    bench = check.rows.get(BENCH_1B)
    if bench is None:
        return Row(task.name, "not run", f"{BENCH_1B} has to run before")
    return judge_overlap(task.name, bench)


UPDATED_MILLIONS, LIMITS = 256, ("64-prefetched", "1024", "64-non-temporal")
BENCH_1B, BENCH_7B = "training benchmark, 1 B", "training benchmark, 7 B"
LARGEST = "training benchmark, 9 B of 131 GB in 100 GiB of host memory, a card of 24 GB and 38 GB of disk"
ON_ACCELERATOR, PLANS = "tests/python/on_accelerator.py", "tests/python/on_accelerator_plans.py"
FP16 = "tests/python/on_accelerator_fp16.py"
SMOKE = "tests/python/smoke.py"
A_ZOO, NOT_ZOO = "bit_equal", "not bit_equal"
# In order: what the others need first, then what is short; of rows beside each other the longest first.
TASKS = (
    Task("build", 0, build, 420),
    Task("programs find their libraries", 1, programs),
    Task("smoke on the CPU", 1, python_tests(SMOKE, device="host"), 120),
    Task("smoke on CUDA", 1, python_tests(SMOKE), 120),
    Task("copies beside cudaMemcpyAsync", 1, copies, 60),
    Task("zoo on CUDA", 1, python_tests(ON_ACCELERATOR, "-k", A_ZOO, processes=4), 300, True),
    Task("compute-sanitizer racecheck", 1, sanitizer("racecheck"), 240, True),
    Task("compute-sanitizer memcheck", 1, sanitizer("memcheck"), 240, True),
    Task("training has the reference's bits", 1, tests(ENGINE, "*_cuda_*"), 180, True),
    Task(
        "streams, inputs, checkpoints, autocast on CUDA",
        1, python_tests(ON_ACCELERATOR, PLANS, FP16, "-k", NOT_ZOO, processes=2), 240, True,
    ),
    Task("device conformance", 1, tests(KERNELS, "Cuda.*:Cuda/Device*-*ACopyOutside*"), 120, True),
    Task("a wrong address fails its stream", 1, tests(KERNELS, "Cuda*ACopyOutside*"), 120, True),
    Task("kernels have the CPU's bits", 1, tests(KERNELS, "CudaKernels*:Cuda/Kernel*"), 120, True),
    Task("two ranks on one GPU", 1, tests(ENGINE, "TwoRanks*", hidden=True), 120, True),
    Task("stages over ranks on one GPU", 1, tests(RANKS, "*Stages*EveryDevice*", hidden=True), 120, True),
    Task("NCCL on one GPU", 1, tests(NCCL, "Gpus/*of_1:RealNcclOnOneGpu*"), 120, True),
    Task("NCCL between two GPUs", 1, tests(NCCL, "Gpus/*of_2"), 120, True),
    Task("update beside the memory's limit", 2, update, 120),
    Task(BENCH_1B, 2, training("--models", "1b", "--modes", "clipped", "default"), 520),
    Task("overlap in a trace from CUDA events", 2, overlap),
    Task(BENCH_7B, 3, training("--models", "7b", "--modes", "clipped", "default", "--tokens", "32768", "65536"), 520),
    Task(LARGEST, 4, training("--models", "9b", "--modes", "largest-24", "--tokens", "16384", "--rounds", "2"), 520),
)  # fmt: skip
