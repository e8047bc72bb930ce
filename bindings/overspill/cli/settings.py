"""The settings of a training run, all in one table: default, where a configuration file says it, and whether it may
change when the run goes on. Which value counts is decided in chosen.py."""

import dataclasses
from pathlib import Path
from typing import Any


def _field(default: Any, fixed: bool, key: str | None, required: bool = False) -> Any:
    """`key`: where a configuration file says the same, dotted; None: only the command line does."""
    return dataclasses.field(default=default, metadata={"fixed": fixed, "key": key, "required": required})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All options of `overspill train`. A fixed one decides the numbers, so it cannot change when a run goes on."""

    model: str | None = _field(None, fixed=True, key=None, required=True)
    data: str | None = _field(None, fixed=True, key=None, required=True)
    heldout: str | None = _field(None, fixed=True, key=None)
    batch: int = _field(4, fixed=True, key="train_micro_batch_size_per_gpu")
    seq_len: int = _field(256, fixed=True, key=None)
    accumulate: int = _field(1, fixed=True, key="gradient_accumulation_steps")
    vertical: bool = _field(False, fixed=True, key="vertical_accumulation")
    optimizer: str | None = _field(None, fixed=True, key="optimizer.type")
    format: str | None = _field(None, fixed=True, key="format")
    lr: float = _field(5e-5, fixed=True, key="optimizer.lr")
    warmup: int = _field(0, fixed=True, key=None)
    weight_decay: float = _field(0.01, fixed=True, key="optimizer.weight_decay")
    clip: float = _field(1.0, fixed=True, key="gradient_clipping")
    seed: int = _field(0, fixed=True, key="seed")
    dtype: str = _field("bf16", fixed=True, key=None)
    checkpointing: bool = _field(False, fixed=True, key=None)
    torch_threads: int | None = _field(None, fixed=True, key=None)
    steps: int = _field(100, fixed=False, key=None)
    host_budget: int | None = _field(None, fixed=False, key="budget.host")
    nvme: list[str] | None = _field(None, fixed=False, key="budget.nvme")
    device_budget: int | None = _field(None, fixed=False, key="budget.device")
    endurance_tbw: float | None = _field(None, fixed=False, key="budget.endurance_tbw")
    config: str | None = _field(None, fixed=False, key=None)
    threads: int | None = _field(None, fixed=False, key="engine.threads")
    device: str | None = _field(None, fixed=False, key="engine.device")
    job: str | None = _field(None, fixed=False, key="engine.job")
    save_every: int = _field(0, fixed=False, key=None)
    save_minutes: float = _field(30.0, fixed=False, key=None)
    keep: int = _field(1, fixed=False, key="engine.checkpoints_kept")
    eval_batches: int = _field(16, fixed=False, key=None)
    cache: str | None = _field(None, fixed=False, key=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        return dataclasses.asdict(self)

    def learning_rate(self, step: int) -> float:
        """Of the step that comes after `step` finished ones: linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr


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
    """A path that still means the same when the run goes on from another folder."""
    return None if path is None else str(Path(path).resolve())
