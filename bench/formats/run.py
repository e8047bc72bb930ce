"""What `make bench-formats` runs: how much of the exact format's learning the smaller formats keep.

The job of `make train` (SmolLM2-135M, its text, batches and hyper-parameters) by a plain PyTorch loop whose update is
overspill.optim.AdamW in each format: three seeds of 40 steps and one run of 300. The seed orders the batches and draws
the rounding. `kept` is the improvement in held-out loss over that of the exact format with the same seed and steps.
A finished run is left in results/formats/ and not repeated, nor are those kept in docs/results/formats/: an interrupted
job goes on where it was; --fresh starts anew.
Runs are spread over --jobs processes that share the cores.
Last line: RESULT {json}; the plot is results/formats/formats.png.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bindings")]
FOLDER = ROOT / "results" / "formats"
KEPT = ROOT / "docs" / "results" / "formats"
FORMATS = ("exact", "compact", "8bit")
LEAST_KEPT = 0.95


def train(model, job: dict[str, Any], batches) -> list[float]:
    """`job["steps"]` steps on `model` (bf16 weights) in the format; the loss of each."""
    import torch

    from overspill import optim
    from train_job import CLIP, LR, WEIGHT_DECAY

    optimizer = optim.AdamW(
        model.parameters(),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        format=job["format"],
        threads=torch.get_num_threads(),
        seed=job["seed"],
    )
    losses, position, started = [], 0, time.perf_counter()
    for step in range(job["steps"]):
        ids = batches.at(position)
        position += len(ids)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = optimizer.grad_norm().item()
        if not torch.isfinite(torch.tensor(norm)):
            raise SystemExit(f"bench-formats: gradient norm {norm} in step {step + 1} of {job}")
        optimizer.step(grad_scale=min(1.0, CLIP / (norm + 1e-6)))
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            left = (time.perf_counter() - started) / (step + 1) * (job["steps"] - step - 1)
            print(f"{label(job)}: step {step + 1}, loss {losses[-1]:.4f}, {left:.0f} s left", flush=True)
    return losses


def label(job: dict[str, Any]) -> str:
    return f"{job['format']}, seed {job['seed']}, {job['steps']} steps"


def run(job: dict[str, Any], folder: Path, threads: int, kept: bool) -> dict[str, Any]:
    """One run, or what an earlier call left of it."""
    import torch

    from overspill import data
    from plain import load, mean_loss
    from train_job import BATCH, SEQ_LEN, sequences

    path = FOLDER / f"{job['format']}-{job['steps']}-{job['seed']}.json"
    for there in (path, *((KEPT / path.name,) if kept else ())):
        if there.exists() and (found := json.loads(there.read_text()))["job"] == job:
            return found
    torch.set_num_threads(threads)
    training, heldout = sequences(folder)
    model = load(folder)
    evaluation = list(data.evaluation_batches(heldout, BATCH, job["eval_batches"]))
    before = mean_loss(model, evaluation)
    started = time.perf_counter()
    losses = train(model, job, data.Batches(training, BATCH, job["seed"]))
    result = {
        "job": job,
        "before": before,
        "after": mean_loss(model, evaluation),
        "losses": losses,
        "seconds": time.perf_counter() - started,
        "threads": threads,
        "tokens_per_step": BATCH * SEQ_LEN,
    }
    print(f"{label(job)}: held-out {before:.4f} -> {result['after']:.4f}", flush=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.rename(path)
    return result


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The long runs first, so that no process is left alone with one at the end."""
    runs = [(0, options.long_steps)] if options.long_steps else []
    runs += [(seed, options.steps) for seed in range(options.seeds)]
    return [
        {"format": form, "seed": seed, "steps": steps, "eval_batches": options.eval_batches}
        for seed, steps in runs
        for form in FORMATS
    ]


def compare(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a seed and length: losses of each format, and the part of exact's improvement that it kept."""
    rows = []
    for start in range(0, len(results), len(FORMATS)):
        runs = {result["job"]["format"]: result for result in results[start : start + len(FORMATS)]}
        exact = runs["exact"]
        gain = exact["before"] - exact["after"]
        rows.append(
            {
                "seed": exact["job"]["seed"],
                "steps": exact["job"]["steps"],
                "before": exact["before"],
                **{f"after_{form}": runs[form]["after"] for form in FORMATS},
                **{
                    f"kept_{form}": (runs[form]["before"] - runs[form]["after"]) / gain
                    for form in FORMATS[1:]
                },
            }
        )
    return rows


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Training loss of the longest runs, and of each the difference to exact's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(result["job"]["steps"] for result in results)
    runs = [r for r in results if r["job"]["steps"] == longest and r["job"]["seed"] == 0]
    figure, (losses, apart) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for run in runs:
        name, steps = run["job"]["format"], range(1, longest + 1)
        losses.plot(steps, run["losses"], label=f"{name}: held-out {run['after']:.4f}", linewidth=1)
        apart.plot(steps, [a - b for a, b in zip(run["losses"], runs[0]["losses"])], label=name, linewidth=1)
    losses.set_ylabel("training loss"), apart.set_ylabel("loss - exact's"), apart.set_xlabel("step")
    losses.legend(), losses.set_title(f"SmolLM2-135M, seed 0, held-out {runs[0]['before']:.4f} before")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--long-steps", type=int, default=300, help="0: no long run")
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="forget the runs that are there, those in docs/results/formats too",
    )
    options = parser.parse_args()
    import smollm2
    from train_job import sequences

    if options.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder, threads = smollm2.prepare(), max(1, len(os.sched_getaffinity(0)) // options.jobs)
    sequences(folder)  # tokenizes once, before the processes would
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(run, job, folder, threads, not options.fresh) for job in jobs(options)]
        results = [each.result() for each in started]
    rows = compare(results)
    plot(results, FOLDER / "formats.png")
    print(
        f"{'seed':>4} {'steps':>5} {'before':>8} {'exact':>8} {'compact':>8} {'8bit':>8}   kept: compact    8bit"
    )
    for row in rows:
        print(
            f"{row['seed']:4} {row['steps']:5} {row['before']:8.4f} {row['after_exact']:8.4f} "
            f"{row['after_compact']:8.4f} {row['after_8bit']:8.4f} {row['kept_compact']:15.4f} {row['kept_8bit']:7.4f}"
        )
    least = {f"least_kept_{form}": min(row[f"kept_{form}"] for row in rows) for form in FORMATS[1:]}
    print("RESULT " + json.dumps({**least, "runs": rows}))
    return 0 if min(least.values()) >= LEAST_KEPT else 1


if __name__ == "__main__":
    sys.exit(main())
