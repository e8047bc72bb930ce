"""One part of a model: a checkpoint, of any number of ranks, that each parameter can be read from alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import extra, lora, packed
from .._core import CheckpointError
from ..opened import Opened


class Part(Opened):
    """Raises CheckpointError for what is no checkpoint, and for one whose weights alone are not the model's."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise CheckpointError(
                f"part {folder} is no folder; give folders that engine.save_checkpoint wrote"
            )
        super().__init__(folder)
        self.division = extra.division(self.extra_json, folder)
        _refuse_adapters(folder, self.manifest)


def _refuse_adapters(folder: Path, manifest: Mapping[str, Any]) -> None:
    if (folder / lora.FOLDER).is_dir():
        raise CheckpointError(f"{folder} has an adapter, and parts of adapters are not joined")
    if packings := packed.of_units(unit["name"] for unit in manifest["units"]):
        raise CheckpointError(f"{folder} holds frozen weights in {packings}, which merge does not unpack")
