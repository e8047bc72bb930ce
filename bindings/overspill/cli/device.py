"""Where the model computes, in words: a GPU that is not used is said aloud, one that was asked for is there or
refused."""

from typing import Any

from overspill.cli.common import CliError


def device_line(asked: str, device: Any) -> str:
    """For a run whose engine computes on the torch device `device`."""
    why = unused_gpu() if asked == "auto" and device.type == "cpu" else ""
    return unused_text(why) if why else f"device: {device}"


def unused_text(why: str) -> str:
    return (
        f"WARNING: device: cpu, although torch sees a GPU, which the engine cannot use: {why}. --device cuda "
        "refuses to "
        "train without it, --device host says that the CPU is meant"
    )


def planned_line(asked: str, device_budget: int | None) -> str:
    """For a plan. Raises CliError where a GPU was asked for and cannot be used."""
    if asked != "auto":
        require(asked)
        return f"device: {asked}"
    why = unused_gpu()
    if why:
        return unused_text(why)
    if device_budget is None and _sees_gpu():
        return (
            "device: planned for the CPU; training would take the GPU: add --device cuda or --device-budget"
        )
    return "device: cpu" if device_budget is None else "device: cuda"


def require(asked: str) -> None:
    """Raises CliError where the engine cannot compute on the device that was asked for."""
    from overspill import place

    try:
        place.find(asked, None)
    except ValueError as error:
        raise CliError(str(error).replace("overspill: engine.device = ", "--device ")) from None


def unused_gpu() -> str:
    """Why the engine cannot use the GPU that torch sees; "" where it can or there is none."""
    from overspill import _core

    return _core.why_no_cuda(0) if _sees_gpu() else ""


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
