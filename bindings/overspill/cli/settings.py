"""The settings of a training run, all in one table: default, where a configuration file says it, and whether it may
change when the run goes on. Which value counts is decided in chosen.py."""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from overspill.cli.common import FORMATS, OPTIMIZERS, named

DTYPES = ("bf16", "fp32")
PACKED = ("nf4", "int8")
RECOMPUTED = ("none", "blocks", "auto")
REPORTS = ("tensorboard", "wandb", "none")
SCHEDULES = ("constant", "linear", "cosine")
STEPS = 100  # where neither --steps nor --epochs says how many


def _field(
    default: Any,
    fixed: bool,
    key: str | None,
    required: bool = False,
    least: int | None = None,
    among: Collection[str] | None = None,
) -> Any:
    """`key`: where a configuration file says the same, dotted; None: only the command line does. `least` and `among`:
    which values of its type the field takes."""
    metadata = {"fixed": fixed, "key": key, "required": required, "least": least, "among": among}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All options of `overspill train`. A fixed one decides the numbers, so it cannot change when a run goes on."""

    model: str | None = _field(None, fixed=True, key=None, required=True)
    data: str | None = _field(None, fixed=True, key=None, required=True)
    heldout: str | None = _field(None, fixed=True, key=None)
    batch: int = _field(4, fixed=True, key="train_micro_batch_size_per_gpu", least=1)
    seq_len: int = _field(256, fixed=True, key=None, least=2)  # one token predicts nothing
    accumulate: int = _field(1, fixed=True, key="gradient_accumulation_steps", least=1)
    vertical: bool = _field(False, fixed=True, key="vertical_accumulation")
    optimizer: str | None = _field(None, fixed=True, key="optimizer.type", among=OPTIMIZERS)
    format: str | None = _field(None, fixed=True, key="format", among=FORMATS)
    lr: float = _field(5e-5, fixed=True, key="optimizer.lr", least=0)
    warmup: int = _field(0, fixed=True, key=None, least=0)
    schedule: str = _field("constant", fixed=True, key=None, among=SCHEDULES)
    weight_decay: float = _field(0.01, fixed=True, key="optimizer.weight_decay", least=0)
    clip: float = _field(1.0, fixed=True, key="gradient_clipping", least=0)
    seed: int = _field(0, fixed=True, key="seed", least=0)
    dtype: str = _field("bf16", fixed=True, key="dtype", among=DTYPES)
    checkpointing: bool = _field(False, fixed=True, key=None)
    recompute: str = _field("none", fixed=False, key="engine.recompute", among=RECOMPUTED)
    compile: bool = _field(False, fixed=False, key="engine.compile")
    activations: int | None = _field(None, fixed=False, key="budget.activations", least=0)
    logits: int | None = _field(None, fixed=False, key="budget.logits", least=1 << 20)
    tile: int | None = _field(None, fixed=False, key="budget.tile", least=1 << 16)
    lora_rank: int | None = _field(None, fixed=True, key=None, least=1)
    lora_alpha: float | None = _field(None, fixed=True, key=None, least=0)
    lora_dropout: float = _field(0.0, fixed=True, key=None, least=0)
    lora_targets: list[str] | None = _field(None, fixed=True, key=None)
    frozen: str | None = _field(None, fixed=True, key="frozen.format", among=PACKED)
    torch_threads: int | None = _field(None, fixed=True, key=None, least=1)
    steps: int | None = _field(None, fixed=False, key=None, least=1)
    epochs: float | None = _field(None, fixed=False, key=None, least=0)
    host_budget: int | None = _field(None, fixed=False, key="budget.host", least=0)
    nvme: list[str] | None = _field(None, fixed=False, key="budget.nvme")
    device_budget: int | None = _field(None, fixed=False, key="budget.device", least=0)
    endurance_tbw: float | None = _field(None, fixed=False, key="budget.endurance_tbw", least=0)
    config: str | None = _field(None, fixed=False, key=None)
    threads: int | None = _field(None, fixed=False, key="engine.threads", least=0)
    device: str | None = _field(None, fixed=False, key="engine.device")
    job: str | None = _field(None, fixed=False, key="engine.job")
    save_every: int = _field(0, fixed=False, key=None, least=0)
    save_minutes: float = _field(30.0, fixed=False, key=None, least=0)
    keep: int = _field(1, fixed=False, key="engine.checkpoints_kept", least=0)
    keep_every: int | None = _field(None, fixed=False, key=None, least=1)
    blocking_saves: bool = _field(False, fixed=False, key=None)
    eval_every: int = _field(0, fixed=False, key=None, least=0)
    eval_batches: int = _field(16, fixed=False, key=None, least=0)
    cache: str | None = _field(None, fixed=False, key=None)
    report_to: list[str] | None = _field(None, fixed=False, key=None)
    metrics: list[str] | None = _field(None, fixed=False, key=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        return dataclasses.asdict(self)

    def steps_of(self, sequences: int, ranks: int = 1) -> int:
        """How many steps the run has, over a data set of so many sequences."""
        if self.epochs is None:
            return self.steps or STEPS
        return max(1, math.ceil(self.epochs * sequences / (self.batch * self.accumulate * ranks)))

    def kept(self, step: int) -> int:
        """How many checkpoints are there, at most, after so many steps."""
        return self.keep + (step // self.keep_every if self.keep_every else 0)

    def learning_rate(self, step: int, steps: int) -> float:
        """Of the step that comes after `step` finished ones, of `steps` in all: linear warm-up, then constant, or down
        to 0 linearly or as half a cosine (Loshchilov and Hutter 2017)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        passed = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return self.lr * (1 - passed if self.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2)


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def key_of(name: str) -> str | None:
    """Where a configuration file says what this field says, dotted."""
    return FIELDS[name].metadata["key"]


def option(name: str) -> str:
    """The field as it is typed."""
    return "--" + name.replace("_", "-")


def default_text(name: str) -> str:
    return f"(default {FIELDS[name].default})"


def absolute(path: str | Path | None) -> str | None:
    """A path that still means the same when the run goes on from another folder. Also an argparse type."""
    return None if path is None else str(Path(named(path)).resolve())
