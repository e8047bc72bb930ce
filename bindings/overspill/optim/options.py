"""Options of torch's optimizers that ours have not."""

from __future__ import annotations

from typing import Any

# How a step is computed there, and what would change its result.
_HOW = ("foreach", "fused", "capturable")
NOT_OURS = ("amsgrad", "centered")  # the update does not have them
_WHAT = (*NOT_OURS, "differentiable")


def check(kind: str, given: dict[str, Any]) -> None:
    """Raises TypeError for what is no option of torch's, ValueError for one that would change the result."""
    for name, value in given.items():
        if name not in (*_HOW, *_WHAT):
            raise TypeError(f"overspill: {kind}() has no argument {name!r}")
        if name in _WHAT and value:
            raise ValueError(
                f"overspill: {kind}({name}={value!r}) is not supported: leave it out, or take torch.optim's"
            )


def check_ours(kind: str, group: dict[str, Any], number: int) -> None:
    """Raises ValueError where a group asks for what the update does not have."""
    for option in NOT_OURS:
        if group.get(option):
            raise ValueError(
                f"overspill: parameter group {number} has {option} = {group[option]!r:.40}, which Overspill's update "
                f"of {kind} does not have, and which came too late for torch's own code: set it before initialize"
            )


def check_8bit(kind: str) -> None:
    """Raises ValueError for Adamax: a code's least step of the average is far above the norm of small gradients, so
    that single steps would be hundreds of times too large."""
    if kind == "Adamax":
        raise ValueError(
            'overspill: Adamax has no format "8bit", in which gradients that differ much in size would make steps far '
            'too large: take "compact", or another optimizer'
        )
