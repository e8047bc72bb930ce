"""How a model's folder says that its tokens are to be drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path

# generation_config.json's names, those of `inference.Model.tokens`, and the values that make sense.
_NAMES = {
    "temperature": ("temperature", 0.0, math.inf),
    "top_k": ("top_k", 0, 2**31 - 1),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("repetition", 1e-6, math.inf),
}


def of_folder(folder: Path) -> dict[str, float]:
    """What generation_config.json says of how tokens are drawn, by the names of `inference.Model.tokens`. A value that
    cannot be meant is left out, and a folder without the file says nothing: it is advice, and the weights are not."""
    try:
        found = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    advice = {}
    for theirs, (ours, least, most) in _NAMES.items():
        value = found.get(theirs)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if number and least <= value <= most:
            advice[ours] = int(value) if ours == "top_k" else float(value)
    if found.get("do_sample") is False:
        advice["temperature"] = 0.0
    return advice
