"""Where the model computes, in words: a GPU that torch sees and the engine cannot use is refused, unless the CPU is
asked for."""

from overspill.cli.common import CliError


def unused_text(why: str) -> str:
    return (
        f"WARNING: torch sees a GPU, and the engine cannot use it: {why}. train refuses to begin, unless --device host "
        "says that the CPU is meant"
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
            "device: this plan is for the CPU, but training would use the GPU: add --device cuda or "
            "--device-budget to plan for it"
        )
    return "device: cpu" if device_budget is None else "device: cuda"


def require(asked: str, device_budget: int | None = None) -> None:
    """Raises CliError where the engine cannot compute on the device that was asked for."""
    from overspill import place

    try:
        place.find(asked, device_budget)
    except ValueError as error:
        words = str(error).removeprefix("overspill: ").replace('engine.device = "host"', "--device host")
        words = words.replace("engine.device = ", "--device ").replace("budget.device = ", "--device-budget ")
        raise CliError(words.replace("budget.device", "--device-budget")) from None


def unused_gpu() -> str:
    """Why the engine cannot use the GPU that torch sees; "" where it can or there is none."""
    from overspill import _core

    return _core.why_no_cuda(0) if _sees_gpu() else ""


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
