"""What `make train` runs: SmolLM2-135M fine-tuned with most of its states on disk, beside the plain PyTorch loop.

Two processes take turns, never at work at once: ours is `overspill train` itself, plain is tools/plain.py over
the same batches. A turn is STEPS/TURNS steps in a row. Between its turns a process is stopped (SIGSTOP), engine
threads and all: updates and writes that step() left for later stand still until its next turn, and are charged
to it. So every turn of ours pays for exactly as many updates as it has steps, in the steady state of a run alone.
`step_vs_plain` is the median over turns of ours / plain.
A third process measures what plain forward and backward alone need, for the promise: peak RSS <= budget + that.
By default the comparison is short, so that a first run ends within minutes; `make train-compare` is long enough for
figures to quote. Last line: RESULT {json}.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bindings")]

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both sides compute on the CPU, whatever the machine has

CACHE = ROOT / ".cache"
LR, CLIP, WEIGHT_DECAY, SEED = 5e-5, 1.0, 0.01, 0
BATCH, SEQ_LEN = 4, 256
LOSS_TOLERANCE = 0.01
# Of the loss: forward in bf16 rounds activations, which the engine for inference keeps in fp32.
MERGED_TOLERANCE = 1e-3


class Turns:
    """The child's end: `begin` waits for the turn, `end` gives it back with what it took."""

    def __init__(self, pipe):
        self.pipe, self.started = pipe, 0.0

    def begin(self) -> None:
        self.pipe.recv()
        self.started = time.perf_counter()

    def end(self, **found: Any) -> None:
        self.pipe.send({"seconds": time.perf_counter() - self.started, **found})


class Child:
    """The coordinator's end: a process that works only during `turn()`, and is stopped between turns."""

    def __init__(self, function, *args):
        self.name = function.__name__
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=function, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def turn(self) -> dict[str, Any]:
        try:
            os.kill(self.process.pid, signal.SIGCONT)
            self.pipe.send("go")
            answer = self.pipe.recv()
            os.kill(self.process.pid, signal.SIGSTOP)
            return answer
        except (EOFError, BrokenPipeError):
            self.process.join()
            raise SystemExit(
                f"train_job: the process '{self.name}' ended with {self.process.exitcode}"
            ) from None

    def join(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.join()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():  # an error or Ctrl-C: a stopped process would never see a gentler signal
            self.process.kill()
            self.process.join()


def ours(pipe, job: argparse.Namespace) -> None:
    """`overspill train` in this process; the turn changes hands between its steps."""
    from overspill import memory
    from overspill.cli import parser
    from overspill.cli.train import train

    turns = Turns(pipe)
    turns.begin()

    def hook(loop) -> None:
        if loop.step % (job.steps // job.turns) == 0 and not hook.finished:
            hook.finished = loop.step == job.steps
            turns.end()
            turns.begin()

    hook.finished = False
    options = {
        "model": job.model,
        "data": job.data,
        "heldout": job.heldout,
        "out": job.out,
        "cache": job.cache,
        "host-budget": job.host_budget,
        "nvme": job.nvme,
        "steps": job.steps,
        "batch": BATCH,
        "seq-len": SEQ_LEN,
        "lr": LR,
        "clip": CLIP,
        "weight-decay": WEIGHT_DECAY,
        "seed": SEED,
        "eval-batches": job.eval_batches,
        "save-minutes": 0,  # no save inside a turn that is measured
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    code, summary = train(parser().parse_args(["train", *arguments]), hook)
    if code:
        sys.exit(code)
    turns.end(peak_rss_bytes=memory.peak_rss_bytes(), **summary)


def texts() -> tuple[Path, Path]:
    """Files of the text to train on and of the held-out one."""
    import stdlib_text

    return stdlib_text.prepare(CACHE / f"stdlib-{sys.version_info[0]}.{sys.version_info[1]}")


def sequences(model: Path) -> list:
    """Both texts, tokenized by the model's tokenizer."""
    from overspill import data
    from overspill.cli.common import load_tokenizer, quiet_transformers

    quiet_transformers()
    tokenizer = load_tokenizer(model)
    return [data.Sequences(data.tokenize(path, tokenizer, CACHE), SEQ_LEN) for path in texts()]


def plain(pipe, job: argparse.Namespace) -> None:
    """The plain loop over the same batches."""
    from overspill import data, memory
    from plain import PlainLoop, load, mean_loss

    turns = Turns(pipe)
    training, heldout = sequences(job.model)
    turns.begin()
    model = load(job.model)
    loop = PlainLoop(model, data.Batches(training, BATCH, SEED), LR, CLIP, WEIGHT_DECAY)
    for _ in range(job.turns):
        turns.end()
        turns.begin()
        losses = [loop.step() for _ in range(job.steps // job.turns)]
    turns.end(loss=losses[-1])
    turns.begin()
    loss = mean_loss(model, data.evaluation_batches(heldout, BATCH, job.eval_batches))
    turns.end(heldout_loss=loss, peak_rss_bytes=memory.peak_rss_bytes())


def forward_backward(pipe, job: argparse.Namespace) -> None:
    """Peak RSS of plain forward and backward alone."""
    from overspill import data
    from plain import forward_backward_peak

    turns = Turns(pipe)
    turns.begin()
    ids = data.Batches(sequences(job.model)[0], BATCH, SEED).at(0)
    turns.end(**forward_backward_peak(job.model, ids))


def measure(job: argparse.Namespace) -> dict[str, Any]:
    """All turns of the three processes. Ours is first: its plan is what a newcomer waits for."""
    steps, pairs = job.steps // job.turns, []
    with Child(ours, job) as a, Child(plain, job) as b:
        a.turn(), b.turn()
        for number in range(job.turns):
            pair = a.turn()["seconds"], b.turn()["seconds"]
            pairs.append(pair)
            print(
                f"turn {number + 1}/{job.turns}: ours {pair[0] / steps:.2f}, plain {pair[1] / steps:.2f} s a step, "
                f"ratio {pair[0] / pair[1]:.3f}",
                flush=True,
            )
        mine, theirs = a.turn(), b.turn()
        a.join(), b.join()
    with Child(forward_backward, job) as alone:
        floor = alone.turn()
        alone.join()
    seconds = sum(pair[0] for pair in pairs)
    return {
        "heldout_loss_before": mine["heldout_loss_before"],
        "heldout_loss_after": mine["heldout_loss_after"],
        "heldout_loss_plain": theirs["heldout_loss"],
        "step_vs_plain": statistics.median(pair[0] / pair[1] for pair in pairs),
        "step_seconds": statistics.median(pair[0] for pair in pairs) / steps,
        "plain_step_seconds": statistics.median(pair[1] for pair in pairs) / steps,
        "host_budget_bytes": mine["stats"]["host_budget_bytes"],
        "peak_host_bytes": mine["stats"]["host_peak_bytes"],
        "peak_rss_bytes": mine["peak_rss_bytes"],
        "plain_fwd_bwd_rss_bytes": floor["peak_rss_bytes"],
        "plain_rss_bytes": theirs["peak_rss_bytes"],
        "nvme_bytes": mine["nvme_peak_bytes"],
        "nvme_read_bytes": mine["stats"]["nvme_read_bytes"],
        "nvme_written_bytes": mine["stats"]["nvme_written_bytes"],
        "tokens_per_s": job.steps * BATCH * SEQ_LEN / seconds,
        "steps": job.steps,
        "checkpoint": mine["checkpoint"],
        "plot": mine["plot"],
    }


def command(*args: str) -> str:
    """Runs `overspill …`; returns what it printed, which is shown too. Raises SystemExit when it fails."""
    line = [sys.executable, "-m", "overspill.cli", *args]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "bindings")}
    )
    print(done.stdout, end="" if done.stdout.endswith("\n") else "\n", flush=True)
    if done.returncode:
        raise SystemExit(f"train_job: 'overspill {' '.join(args)}' ended with {done.returncode}")
    return done.stdout


def merged_loss(merged: Path, batches: int) -> float:
    """The held-out loss of what was merged, by the engine for inference, which is the logarithm of its perplexity."""
    import torch

    from overspill import data, inference

    model = inference.load(merged)
    total, count = 0.0, 0
    for words in data.evaluation_batches(sequences(merged)[1], BATCH, batches):
        for row in words:
            logits = model.logits(row.tolist())[:-1]
            total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
            count += len(row) - 1
    return total / count


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4, help="must divide the steps")
    parser.add_argument("--host-budget", default="600MiB")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "train", help="replaced by each run")
    job = parser.parse_args()
    if job.steps % job.turns:
        parser.error(f"--turns {job.turns} does not divide --steps {job.steps}")
    return job


def main() -> int:
    started = time.perf_counter()
    job = options()
    import smollm2

    multiprocessing.set_start_method("spawn")
    job.cache, job.out, job.nvme = CACHE, job.folder / "run", job.folder / "nvme"
    merged = job.folder / "merged"
    for old in (job.out, job.nvme, merged):
        shutil.rmtree(old, ignore_errors=True)
    job.nvme.mkdir(parents=True)
    job.model = smollm2.prepare()
    job.data, job.heldout = texts()
    print(f"model {job.model}, prepared in {time.perf_counter() - started:.0f} s", flush=True)

    result = measure(job)
    command("merge", result.pop("checkpoint"), str(merged), "--dtype", "bf16")
    result["heldout_loss_merged"] = merged_loss(merged, job.eval_batches)
    print("completion:", flush=True)
    # A budget makes it certain that Overspill writes it: where transformers has to run a model, one is refused.
    sampling = ("--max-new-tokens", "64", "--temperature", "0.6", "--seed", "1", "--budget", job.host_budget)
    completion = command("generate", "--model", str(merged), "--prompt", "def ", *sampling).rstrip()
    report(result, merged)
    result.pop("plot")
    result.update(seconds=time.perf_counter() - started, completion=completion, machine=machine())
    broken = broken_promises(result)
    print("".join(f"BROKEN: {line}\n" for line in broken), end="")
    print("RESULT " + json.dumps(result))
    return 1 if broken else 0


def broken_promises(result: dict[str, Any]) -> list[str]:
    """What the engine promised and did not keep in this run. Speed is reported, never judged."""
    broken = []
    if abs(result["heldout_loss_after"] - result["heldout_loss_plain"]) > LOSS_TOLERANCE:
        broken.append(f"the held-out loss differs from the plain loop's by more than {LOSS_TOLERANCE}")
    merged, trained = result["heldout_loss_merged"], result["heldout_loss_after"]
    if abs(merged - trained) > MERGED_TOLERANCE * trained:
        broken.append(f"the merged model's held-out loss is not the engine's to {MERGED_TOLERANCE} of it")
    if result["peak_host_bytes"] > result["host_budget_bytes"]:
        broken.append("the engine held more host memory than its budget")
    if result["peak_rss_bytes"] > result["host_budget_bytes"] + result["plain_fwd_bwd_rss_bytes"]:
        broken.append("peak RSS is above the budget plus plain forward and backward")
    return broken


def machine() -> str:
    """Processor and cores, for whoever reads the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"


def report(result: dict[str, Any], merged: Path) -> None:
    """The figures for people."""
    from overspill.memory import human

    promise = result["host_budget_bytes"] + result["plain_fwd_bwd_rss_bytes"]
    print(
        f"""
held-out loss      {result["heldout_loss_before"]:.4f} before, {result["heldout_loss_after"]:.4f} after, {
            result["heldout_loss_plain"]:.4f} by the plain loop; {
            result["heldout_loss_merged"]:.4f} by the engine for inference, of the merged model
a step             {result["step_seconds"]:.2f} s, plain {
            result["plain_step_seconds"]:.2f} s; ratio, median of turns: {result["step_vs_plain"]:.3f}
host memory        {human(result["peak_host_bytes"])} of a budget of {human(result["host_budget_bytes"])}
NVMe               {human(result["nvme_bytes"])} allocated at most, {human(result["nvme_read_bytes"])} read, {
            human(result["nvme_written_bytes"])
        } written
process (RSS)      {human(result["peak_rss_bytes"])} at most; budget + plain forward and backward: {
            human(promise)
        }; {human(result["plain_rss_bytes"])} for the plain loop
plot               {result["plot"]}
merged checkpoint  {merged}""",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
