"""What `accelerator.prepare` of Hugging Face's Accelerate does with an engine: it wraps a model of several processes in
DistributedDataParallel, unless the model says that it is prepared already."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_prepared(module: nn.Module, ranks: int) -> bool:
    """True of several ranks, whose gradients the engine sums; of one Accelerate may do what it does, which wraps
    nothing.

    Raises ValueError where Accelerate would put its autocast around the forward pass of several ranks, which then
    nobody does.
    """
    if ranks == 1:
        return bool(getattr(module, "_is_accelerate_prepared", False))
    precision = _mixed_precision()
    if precision != "no":
        raise ValueError(
            f"overspill: accelerator.prepare(engine) with mixed_precision = {precision!r} and {ranks} ranks: make the "
            "Accelerator without it, and put torch.autocast around the forward pass in the script"
        )
    return True


def _mixed_precision() -> str:
    """Of the process's accelerator; "no" where there is none."""
    module: Any = sys.modules.get("accelerate.state")
    if module is None or not module.AcceleratorState._shared_state:
        return "no"
    return str(module.AcceleratorState().mixed_precision)
