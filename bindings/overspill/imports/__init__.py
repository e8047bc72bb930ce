"""Checkpoints that other systems wrote: DeepSpeed's ZeRO, torch.distributed.checkpoint. Nothing in them is run
(torch_file.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import saves
from .._core import CheckpointError
from . import dcp, zero
from .taking import Taking

if TYPE_CHECKING:
    from ..engine import Engine


def is_one(folder: Path) -> bool:
    """Whether such a checkpoint is there, and none of Overspill's. False where that cannot be found out: Overspill's
    own reader then says why."""
    try:
        return not saves.is_complete(folder) and (dcp.is_one(folder) or zero.is_one(folder))
    except (OSError, CheckpointError):
        return False


def taking_over(engine: Engine, folder: Path) -> Taking:
    """A checkpoint that the engine may take over: it was looked through. Raises CheckpointError, OSError."""
    found = Taking(engine, dcp.open_one(folder) if dcp.is_one(folder) else zero.open_one(folder))
    found.check()
    return found
