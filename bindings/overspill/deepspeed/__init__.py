"""What scripts for DeepSpeed bring: its JSON (settings.py, by the table in keys.py), its schedules (lr_schedules.py),
its engine's calls (engine.py), and the name itself.

    import overspill.deepspeed as deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")

`python -m overspill.deepspeed script.py` runs a script unchanged: `import deepspeed` in it gives these modules
(finder.py).
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = (
    "initialize",
    "init_distributed",
    "add_config_arguments",
    "get_accelerator",
    "log_dist",
    "DeepSpeedEngine",
    "__version__",
)
_PARTS = ("zero", "comm", "checkpointing")


def __getattr__(name: str) -> Any:
    # Not imported above: the configuration reads DeepSpeed's JSON before there is an engine.
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        raise AttributeError(f"overspill: deepspeed.{name} is not supported (docs/coming-from-deepspeed.md)")
    return importlib.import_module(f"{__name__}.modules").MODULES["deepspeed"][name]
