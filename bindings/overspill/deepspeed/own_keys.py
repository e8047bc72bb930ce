"""What of the JSON `deepspeed.initialize` itself reads, and no other way in: Fate.OWN in keys.py."""

from __future__ import annotations

from typing import Any

from ..config import Config, read_deepspeeds
from ..config.files import read_deepspeed_json
from . import layer_drop, mup

PIPELINE = "pipeline"


def read(source: Any, world: int | None = None) -> tuple[Config, dict[str, Any]]:
    """As config.read_deepspeeds, of a JSON that may have such keys: the configuration has nothing of them, the JSON
    all. Raises ConfigError."""
    data = source if isinstance(source, dict) else read_deepspeed_json(source)
    mine = {layer_drop.SECTION, PIPELINE} | ({"optimizer"} if mup.section_of(data) is not None else set())
    return read_deepspeeds({key: value for key, value in data.items() if key not in mine}, world), data
