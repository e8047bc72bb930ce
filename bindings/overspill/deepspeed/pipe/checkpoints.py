"""Checkpoints of a pipeline: a folder per tag, in it one per stage. All stages write, and load, or none does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ... import _core, checkpointing, durable, given, overwriting, ranks
from .. import tags
from ..engine import DeepSpeedEngine
from .links import PipelineError
from .module import PipelineModule


class StagedEngine(DeepSpeedEngine):
    """The engine of one stage of several, whose ranks share it."""

    module: PipelineModule
    num_stages = stage_id = 0

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """Of all ranks of all stages."""
        with ranks.ByOne(self._model_group, call), super()._together(call):
            yield

    def _is_first(self) -> bool:
        return self.rank == 0 and self.is_first_stage()

    def _agreed(self, tag: str, validation: str) -> str:
        return tags.agreed(self._model_group, super()._agreed(tag, validation), validation)

    def _save(self, path: Path, client_state: dict[str, Any]) -> None:
        """The stages of one checkpoint take the place of those of an older one at once."""
        with overwriting.place(self, path, "save_checkpoint") as new, self._together("save_checkpoint"):
            durable.make_folders(new)
            checkpointing.save(self, new / _part(self.stage_id), client_state, {})

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeedEngine's; all ranks of all stages call it. Each stage is read and compared with its checksums
        before one of them is loaded. Raises PipelineError where the checkpoint has another number of stages."""
        base = Path(given.path("load_checkpoint", load_dir))
        name = ranks.rank_0s(self._model_group, tags.latest(base) if tag is None else str(tag))
        if name is not None:
            path = base / tags.checked(name)
            overwriting.settle(self, path, "load_checkpoint")
            with self._together("load_checkpoint"):
                self._check_parts(path)
                if self.rank == 0:
                    _core.verify(path / _part(self.stage_id), None)
        with self._together("load_checkpoint"):
            return super().load_checkpoint(base, name, *args, **kwargs)

    def _settled(self, path: Path) -> Path:
        return path / _part(self.stage_id)

    def _check_parts(self, path: Path) -> None:
        there = sorted(each.name for each in path.glob("stage-*") if re.fullmatch(r"stage-\d\d", each.name))
        wanted = [_part(stage) for stage in range(self.num_stages)]
        if path.is_dir() and there != wanted:
            missing = [name for name in wanted if name not in there]
            why = f"{', '.join(missing)} is missing" if missing else f"it has {', '.join(there)}"
            raise PipelineError(
                f"overspill: load_checkpoint: {path} is no checkpoint of {self.num_stages} stages: {why}: give "
                "PipelineModule the num_stages that it was saved with"
            )

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Raises PipelineError: each stage has layers of its own."""
        raise PipelineError(
            "overspill: save_16bit_model is not supported of a pipeline, whose stages have layers of their own: use "
            "save_checkpoint, or on each stage engine.state_dict(), whose names are those of the whole model"
        )

    _zero3_consolidated_16bit_state_dict = save_16bit_model  # type: ignore[assignment]


StagedEngine._own_names = DeepSpeedEngine._own_names | frozenset(vars(StagedEngine))


def _part(stage: int) -> str:
    return f"stage-{stage:02d}"
