"""A model on the CPU beside llama.cpp, in turn, and beside what memory and disk allow.

    bench/inference/run.py                         all groups; those that results/inference/ has are not run again
    bench/inference/run.py --groups resident_1b    one group, again
    bench/inference/run.py --turns 9

Contenders are processes, stopped between their turns: this library; llama.cpp as it comes (mmap); llama.cpp tuned
(GLIBC_TUNABLES=glibc.malloc.hugetlb=1, no mmap). Models: SmolLM2-135M, and a Llama of 1.2 B parameters with Gaussian
weights, both in bf16. A ratio is the median of the turns' own ratios. In the groups `stream_…` each contender is inside
a memory cgroup (root, cgroup v1) that is smaller than the model. Ends with RESULT {json}; docs/inference.md explains
the keys. A key that cannot be had is absent, and the reason is printed.
"""

import argparse
import contextlib
import inspect
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import models
from cgroups import Missing, cgroup, inside
from turns import Child, Failed, in_turn, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEPT = ROOT / "results" / "inference"
LLAMA = Path(os.environ.get("LLAMA_VENV") or ROOT / "results" / "llama-venv")
TUNED = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PROMPT, WRITTEN = 256, 32  # tokens of a turn
POSITIONS = 1024  # of a cache
FEW = 128  # the same where memory is scarce
CHARGED = 16 << 20  # of a cgroup's limit: what the kernel charges beside a process's own pages


def ours(name: str, group: Path | None = None, **options: Any) -> Child:
    options = {"threads": os.cpu_count(), **options}
    command = [sys.executable, str(HERE / "ours.py"), str(models.folder_of(name)), json.dumps(options)]
    return child("ours", command, group)


def llama(
    name: str, way: str, group: Path | None = None, positions: int = POSITIONS, **environment: str
) -> Child:
    if not (LLAMA / "ready").exists():
        raise Missing("llama.cpp is not there (tools/llama_cpp said why)")
    path = models.gguf_of(models.folder_of(name))
    numbers = [str(os.cpu_count()), way, str(positions)]
    command = [str(LLAMA / "bin/python"), str(HERE / "llama.py"), str(path), *numbers]
    return child(f"llama-{way}", command, group, **environment)


def child(label: str, command: list[str], group: Path | None, **environment: str) -> Child:
    """`group`: the cgroup that it moves into before it becomes the contender."""
    KEPT.mkdir(parents=True, exist_ok=True)
    return Child(inside(group, command), {**os.environ, **environment}, log=KEPT / f"{label}.log", rests=True)


@contextlib.contextmanager
def together(**makers: Callable[[], Child]) -> Iterator[dict[str, Child]]:
    with contextlib.ExitStack() as stack:
        children = {}
        for name, make in makers.items():
            children[name] = make()
            stack.callback(children[name].close)
        yield children


def rounds(children: dict[str, Child], turns: int, **request: Any) -> dict[str, list[dict[str, Any]]]:
    """Each contender's answers, one a turn; the first turn is not counted."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    for turn in range(turns + 1):
        for name in in_turn(list(children), turn):
            answer = children[name].ask(**request)
            if turn > 0:
                found[name].append(answer)
    return found


def ratio(found: dict[str, list[dict[str, Any]]], ours: str, theirs: str, key: str) -> float:
    """How many times as fast `ours` is: the median over the turns."""
    return statistics.median(b[key] / a[key] for a, b in zip(found[ours], found[theirs], strict=True))


def median(answers: list[dict[str, Any]], key: str) -> float:
    return statistics.median(answer[key] for answer in answers)


def agree(found: dict[str, list[dict[str, Any]]], a: str, b: str) -> int:
    """Of the tokens that were written, how many are the same from the first on."""
    pairs = list(zip(found[a][0]["tokens"], found[b][0]["tokens"], strict=True))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def resident(name: str, turns: int, label: str) -> dict[str, Any]:
    """Prefill and decode of a model that is held in memory."""
    with together(
        ours=lambda: ours(name),
        llamacpp=lambda: llama(name, "mmap"),
        tuned=lambda: llama(name, "read", **TUNED),
    ) as children:
        expected = children["ours"].hello["expected"]
        found = rounds(children, turns, do="answer", prompt=PROMPT, tokens=WRITTEN)
    result: dict[str, Any] = {}
    for who in ("llamacpp", "tuned"):
        for what in ("decode", "prefill"):
            result[f"{what}_{label}_vs_{who}"] = ratio(found, "ours", who, what)
    for who in found:
        result[f"decode_{label}_{who}_tokens_per_s"] = 1 / median(found[who], "decode")
        result[f"prefill_{label}_{who}_tokens_per_s"] = PROMPT / median(found[who], "prefill")
    result[f"same_tokens_{label}"] = agree(found, "ours", "llamacpp")
    result[f"prediction_error_{label}"] = abs(expected * median(found["ours"], "decode") - 1)
    return result


def coded(turns: int) -> dict[str, Any]:
    """The same weights in 12 bits."""
    need_12bit()
    with together(
        ours=lambda: ours("1b", weights="12bit"), tuned=lambda: llama("1b", "read", **TUNED)
    ) as children:
        found = rounds(children, turns, do="answer", prompt=PROMPT, tokens=WRITTEN)
    return {
        "decode_1b_12bit_vs_tuned": ratio(found, "ours", "tuned", "decode"),
        "decode_1b_12bit_tokens_per_s": 1 / median(found["ours"], "decode"),
        "prefill_1b_12bit_vs_tuned": ratio(found, "ours", "tuned", "prefill"),
    }


def read_loop(name: str, turns: int) -> dict[str, Any]:
    """Decoding beside a loop that only reads the same bytes, in one process."""
    program = ROOT / "build/release/bench/bench_inference_decode"
    if not program.exists():
        raise Missing(f"{program} is not built")
    found = []
    for threads in sorted({1, os.cpu_count() or 1}):
        command = [str(program), str(models.folder_of(name)), str(threads), str(2 * turns)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        found.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return {
        f"decode_{name}_vs_read_loop": found[-1]["decode_vs_read_loop"],
        f"decode_{name}_1thread_vs_read_loop": found[0]["decode_vs_read_loop"],
        f"read_{name}_gb_per_s": found[-1]["read_gb_per_s"],
        f"read_{name}_1thread_gb_per_s": found[0]["read_gb_per_s"],
    }


def batch(turns: int) -> dict[str, Any]:
    """Tokens a second of four texts at once, and of one."""
    with together(ours=lambda: ours("1b")) as children:
        if not children["ours"].hello["can_batch"]:
            raise Missing("overspill.inference has no Batch yet")
        ratios = []
        for _ in range(turns):
            one = children["ours"].ask(do="answer", prompt=PROMPT, tokens=WRITTEN)
            four = children["ours"].ask(do="batch", texts=4, prompt=PROMPT, tokens=WRITTEN)
            ratios.append(one["decode"] / four["decode"])
    return {"batch4_vs_single": statistics.median(ratios)}


def not_cached(path: Path) -> None:
    """Pages that another process brought to memory would cost the cgroup nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def stream(limit_mib: int, turns: int, label: str, **options: Any) -> dict[str, Any]:
    """Inside a cgroup that the model does not fit in. A turn is few tokens: llama.cpp needs a second for one."""
    if options:
        need_12bit()
    limit = limit_mib << 20
    for path in (models.gguf_of(models.folder_of("1b")), *models.folder_of("1b").glob("*.safetensors")):
        not_cached(path)
    with (
        cgroup("ours", limit) as of_ours,
        cgroup("llama", limit) as of_llama,
        together(
            ours=lambda: ours("1b", of_ours, process=limit - CHARGED, positions=FEW, **options),
            llamacpp=lambda: llama("1b", "mmap", of_llama, FEW),
        ) as children,
    ):
        hello = children["ours"].hello
        found = rounds(children, turns, do="answer", prompt=16, tokens=4)
    return {
        f"{label}_{limit_mib}_vs_llamacpp": ratio(found, "ours", "llamacpp", "decode"),
        f"{label}_{limit_mib}_ours_tokens_per_s": 1 / median(found["ours"], "decode"),
        f"{label}_{limit_mib}_llamacpp_tokens_per_s": 1 / median(found["llamacpp"], "decode"),
        f"{label}_{limit_mib}_bytes_a_token": hello["streamed_bytes"],
        f"{label}_{limit_mib}_gb_per_s": hello["streamed_bytes"] / median(found["ours"], "decode") / 1e9,
        f"{label}_{limit_mib}_peak_rss_mib": max(a["peak_rss_bytes"] for a in found["ours"]) / 2**20,
        f"{label}_{limit_mib}_expected_tokens_per_s": hello["expected"],
        f"prediction_error_{label}_{limit_mib}": abs(hello["expected"] * median(found["ours"], "decode") - 1),
    }


def perplexity(turns: int) -> dict[str, Any]:
    """A text's perplexity with a third of the weights read for each pass, and with all in memory."""
    with together(
        resident=lambda: ours("1b"),
        streamed=lambda: ours("1b", budget=1700 << 20, positions=POSITIONS, rows=512),
    ) as children:
        found = rounds(children, turns, do="perplexity", tokens=POSITIONS)
    if found["resident"][0]["perplexity"] != found["streamed"][0]["perplexity"]:
        raise Failed("the streamed model's perplexity is another one than the resident model's")
    return {
        "perplexity_streamed_vs_resident": ratio(found, "streamed", "resident", "reading"),
        "perplexity_resident_tokens_per_s": POSITIONS / median(found["resident"], "reading"),
        "perplexity_streamed_tokens_per_s": POSITIONS / median(found["streamed"], "reading"),
    }


def need_12bit() -> None:
    from overspill import inference

    if "weights" not in inspect.signature(inference.load).parameters:
        raise Missing("overspill.inference.load has no weights='12bit' yet")


GROUPS: dict[str, Callable[[int], dict[str, Any]]] = {
    "read_loop_1b": lambda turns: read_loop("1b", turns),
    "read_loop_135m": lambda turns: read_loop("135m", 4 * turns),
    "resident_1b": lambda turns: resident("1b", turns, "1b"),
    "resident_135m": lambda turns: resident("135m", 2 * turns, "135m"),
    "coded": coded,
    "batch": batch,
    "stream_1700": lambda turns: stream(1700, turns, "stream"),
    "stream_1200": lambda turns: stream(1200, turns, "stream"),
    "stream_12bit_1700": lambda turns: stream(1700, turns, "stream_12bit", weights="12bit"),
    "stream_12bit_1200": lambda turns: stream(1200, turns, "stream_12bit", weights="12bit"),
    "perplexity": lambda turns: perplexity(max(1, turns // 2)),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5, help="of each contender in each group (default 5)")
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    for name in args.groups or GROUPS:
        kept = KEPT / f"{name}.json"
        if kept.exists() and not args.groups:
            found = json.loads(kept.read_text())
            print(f"{name}: from {kept}")
        else:
            try:
                found = GROUPS[name](args.turns)
            except (Missing, Failed) as reason:
                print(f"{name}: not measured, because {reason}", flush=True)
                continue
            KEPT.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        for key, value in found.items():
            print(f"  {key:48} {value:.4g}", flush=True)
        result |= found
    errors = [value for key, value in result.items() if key.startswith("prediction_error_")]
    if errors:
        result["prediction_error"] = max(errors)
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
