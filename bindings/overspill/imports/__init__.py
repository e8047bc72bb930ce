"""Checkpoints that other systems wrote: DeepSpeed's ZeRO, torch.distributed.checkpoint. Nothing in them is run
(torch_file.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import dcp, taking, zero

if TYPE_CHECKING:
    from ..engine import Engine


def is_foreign(folder: Path) -> bool:
    """Whether another system's checkpoint is there, and none of Overspill's."""
    return not (folder / "manifest.json").exists() and (dcp.is_one(folder) or zero.is_one(folder))


def load(engine: Engine, folder: Path) -> dict[str, Any]:
    """What engine.load_checkpoint does with such a folder."""
    return taking.load(engine, dcp.open_one(folder) if dcp.is_one(folder) else zero.open_one(folder))
