"""The parts of one model as a source of `merge`: joined tensor by tensor, no more than one of them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import architecture, exporting, merging
from .._core import CheckpointError
from .rules import Rules
from .styles import Whole
from .together import Together

_DTYPES = {"bf16": "BF16", "fp32": "F32"}


class Parts:
    """A merging.Source."""

    def __init__(self, folders: Sequence[Path], rules: Mapping[str, Any] | str | os.PathLike[str] | None):
        if not folders:
            raise CheckpointError("merge of no parts; give the checkpoints of all parts")
        self._rules = Rules.read(rules)
        self._together = Together(folders)
        parts = self._together.parts
        self.folder = next(
            (p.folder for p in parts if (p.folder / "hf/config.json").is_file()), parts[0].folder
        )

    def write(
        self, part: Path, small: Path, dtype: str, shard_bytes: int, tell: Callable[[int, int], None]
    ) -> tuple[dict[str, int], str]:
        family = _model_type(part / "small")
        found = architecture.undivided(self._together.names(), part / "small", small)
        joints = self._together.joints(self._rules, family, whole_of(found.shapes, found.config))
        shapes = {name: joint.shape for name, joint in joints.items()}
        said = merging.check_names(shapes, self._together.said, part / "small", small)
        tensors = list(self._together.tensors(joints, _DTYPES[dtype]))
        total = sum(tensor.bytes for tensor in tensors)
        (part / "model").mkdir()
        files = exporting.write_shards(part / "model", tensors, shard_bytes, lambda done: tell(done, total))
        count = len(self._together.parts)
        return {"tensors": len(tensors), "bytes": total, "files": files}, f"joined of {count} parts; {said}"


def _model_type(folder: Path) -> str | None:
    """Of a config.json that was read before."""
    value = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    return value if isinstance(value, str) else None


def whole_of(shapes: Mapping[str, tuple[int, ...]], config: Any) -> dict[str, Whole]:
    """By name. `config`: of transformers, or None."""
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int):  # some models have a number for each layer
        heads = kv_heads = None
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    return {name: Whole(tuple(shape), heads, kv_heads) for name, shape in shapes.items()}
