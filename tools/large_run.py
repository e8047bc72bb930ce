"""The one process of tools/large_job.py, inside the cgroup: a Llama from its construction to the merged checkpoint.

tools/large_run.py '{"shape": …, "folder": …, …}'
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bindings"))

import torch

import overspill
from overspill import memory, merge

PROGRESS_S = 15
COMPARED = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process had read from and written to disks, by the kernel's count."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class Phases:
    """Says what goes on, every few seconds, and what each phase took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began, before, over = time.perf_counter(), moved_bytes(), threading.Event()

        def say(end: str) -> None:
            read, written = (now - then for now, then in zip(moved_bytes(), before, strict=True))
            print(
                f"{name:14}{time.perf_counter() - began:7.1f} s{read / 1e9:8.2f} GB read{written / 1e9:8.2f} written, "
                f"resident {memory.rss_bytes() / 1e9:.2f} GB{end}",
                flush=True,
            )

        def watch() -> None:
            while not over.wait(PROGRESS_S):
                say(" …")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        self.seconds[name] = round(time.perf_counter() - began, 2)
        say("")


def llama(job: dict[str, Any]) -> torch.nn.Module:
    """With random weights, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, wide, layers, heads, pairs = job["shape"]
    config = LlamaConfig(
        vocab_size=job["vocabulary"],
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        max_position_embeddings=job["length"],
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def train(engine: Any, job: dict[str, Any], phases: Phases) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses and reports of the steps, over one batch of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(job["vocabulary"], (job["batch"], job["length"]), generator=generator)
    losses, reports = [], []
    for number in range(job["steps"]):
        with phases.phase(f"step {number + 1}"):
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        reports.append(engine.report())
        print(f"  loss {losses[-1]:.4f}, norm {engine.last_step.norm:.3f}, clip {engine.last_step.clip:.3f}")
    return losses, reports


def compare(merged: Path, held: dict[str, torch.Tensor], parameters: int) -> None:
    """Raises SystemExit unless the files have all parameters, and these values."""
    from safetensors import safe_open

    found = 0
    for path in sorted(merged.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            for name in names:
                found += torch.Size(file.get_slice(name).get_shape()).numel()
                if name in held and not torch.equal(file.get_tensor(name), held.pop(name)):
                    raise SystemExit(f"large: {name} is not in {path.name} as the engine held it")
    if held or found != parameters:
        raise SystemExit(f"large: merged {found} of {parameters} parameters; not there: {sorted(held)}")


def main() -> int:
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    config = overspill.Config.read(
        {
            "budget": {"host": job["host_budget"], "nvme": [str(folder)]},
            "optimizer": {"type": "AdamW", "lr": 1e-4},
            "gradient_clipping": 1.0,
            "engine": {"device": "host", "train_after_save": False},
        }
    )
    phases = Phases()
    torch.manual_seed(0)
    with phases.phase("construct"), overspill.Init(config):
        model = llama(job)
    model.config.save_pretrained(folder / "hf")
    model.activation_checkpointing_enable()
    parameters = sum(p.numel() for p in model.parameters())
    if parameters != job["parameters"]:
        raise SystemExit(f"large: the model has {parameters} parameters, {job['parameters']} were expected")
    with phases.phase("initialize"):
        engine, *_ = overspill.initialize(model, config)
    print(engine.plan_text, end="", flush=True)
    losses, reports = train(engine, job, phases)
    if not losses[-1] < losses[0]:
        raise SystemExit(f"large: the loss did not fall: {losses}")
    with phases.phase("save"):
        engine.save_checkpoint(folder / "checkpoint")
    held = {name: engine.weight(p).clone() for name, p in model.named_parameters() if name in COMPARED}
    stats = engine.stats()
    engine.close()
    with phases.phase("merge"):
        merge(folder / "checkpoint", folder / "merged", model=folder / "hf")
    with phases.phase("compare"):
        compare(folder / "merged", held, parameters)
    keys = (
        "total_seconds",
        "compute_seconds",
        "wait_seconds",
        "update_seconds",
        "read_bytes",
        "written_bytes",
    )
    found = {
        "losses": losses,
        "phase_seconds": phases.seconds,
        "steps": [{key: report[key] for key in keys} for report in reports],
        "peak_rss_bytes": memory.peak_rss_bytes(),
        "host_budget_bytes": stats["host_budget_bytes"],
        "host_peak_bytes": stats["host_peak_bytes"],
    }
    print(f"FOUND {json.dumps(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
