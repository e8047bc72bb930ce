"""What a training run was asked for: from the command line, and from the run's own folder when it goes on."""

import dataclasses
from pathlib import Path
from typing import Any

from overspill.cli.common import CliError


def _field(default: Any, fixed: bool, required: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"fixed": fixed, "required": required})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All options of `overspill train`. A fixed one decides the numbers, so it cannot change when a run goes on."""

    model: str | None = _field(None, fixed=True, required=True)
    data: str | None = _field(None, fixed=True, required=True)
    heldout: str | None = _field(None, fixed=True)
    batch: int = _field(4, fixed=True)
    seq_len: int = _field(256, fixed=True)
    accumulate: int = _field(1, fixed=True)
    vertical: bool = _field(False, fixed=True)
    optimizer: str | None = _field(None, fixed=True)
    format: str | None = _field(None, fixed=True)
    lr: float = _field(5e-5, fixed=True)
    warmup: int = _field(0, fixed=True)
    weight_decay: float = _field(0.01, fixed=True)
    clip: float = _field(1.0, fixed=True)
    seed: int = _field(0, fixed=True)
    dtype: str = _field("bf16", fixed=True)
    checkpointing: bool = _field(False, fixed=True)
    torch_threads: int | None = _field(None, fixed=True)
    steps: int = _field(100, fixed=False)
    host_budget: int | None = _field(None, fixed=False)
    nvme: list[str] | None = _field(None, fixed=False)
    device_budget: int | None = _field(None, fixed=False)
    endurance_tbw: float | None = _field(None, fixed=False)
    config: str | None = _field(None, fixed=False)
    threads: int | None = _field(None, fixed=False)
    save_every: int = _field(0, fixed=False)
    keep: int = _field(1, fixed=False)
    eval_batches: int = _field(16, fixed=False)
    cache: str | None = _field(None, fixed=False)

    @classmethod
    def merge(cls, given: dict[str, Any], stored: dict[str, Any] | None) -> "Settings":
        """`given` holds None for what was not said; `stored` is an earlier run's. Raises CliError."""
        values = {}
        for field in dataclasses.fields(cls):
            said, before = given.get(field.name), (stored or {}).get(field.name)
            if stored is not None and field.metadata["fixed"] and said is not None and said != before:
                option = "--" + field.name.replace("_", "-")
                raise CliError(
                    f"{option} {said} differs from {before}, with which the run began; leave it out to go on, or start "
                    "a new run in another --out"
                )
            if said is None and stored is not None:
                said = before
            if said is None:
                said = field.default
            if said is None and field.metadata["required"]:
                raise CliError(f"--{field.name} is missing (it may be left out with --resume only)")
            values[field.name] = said
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        return dataclasses.asdict(self)

    def learning_rate(self, step: int) -> float:
        """Of the step that comes after `step` finished ones: linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr


def absolute(path: str | Path | None) -> str | None:
    """A path that still means the same when the run goes on from another folder."""
    return None if path is None else str(Path(path).resolve())
