"""One step of one model on one kind of machine: planned as a run would, and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import _core
from .._core import BudgetError
from ..config import Config
from ..groups import make_groups
from ..handover import core_units, mark_tiles
from ..packed import chosen as packings_of
from ..plan import Plan
from ..units import UnitSpec, partition
from .machine import Machine
from .models import Model

_CHUNKS_MOST = 1_000_000  # of a rank; of larger models chunks are larger, so that a plan stays small
_OWN_BYTES = 1 << 30  # of a process: torch, its libraries, what it allocates besides
Work = tuple[
    float, float, bool
]  # of a unit: seconds of forward and backward, whether backward needs the weights


@dataclass(frozen=True)
class Load:
    """What a step does.

    sequences:  of a micro-batch, on one rank
    length:     tokens of a sequence
    micros:     micro-batches a step
    recomputed: layers are computed again in backward, so that forward keeps only their inputs
    """

    sequences: int = 1
    length: int = 2048
    micros: int = 1
    recomputed: bool = True

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on one rank."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Estimate:
    """Of one rank; all ranks are alike. Seconds and bytes are of a step.

    plan:       None where the model does not fit; `why` says what is missing
    tokens:     of all ranks
    step_s, waited_s: in all, and of it what the caller waits for anything but compute
    busy_s:     by lane: compute, update, read, write, up, down, network
    moved:      bytes by lane
    activations: bytes that forward keeps for backward, about
    """

    plan: Plan | None
    why: str = ""
    ranks: int = 1
    tokens: int = 0
    step_s: float = 0
    waited_s: float = 0
    busy_s: Mapping[str, float] | None = None
    moved: Mapping[str, float] | None = None
    activations: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "fits": self.plan is not None,
            "why": self.why,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "step_seconds": self.step_s,
            "waited_seconds": self.waited_s,
            "tokens_per_second": self.tokens_per_s,
            "busy_seconds": dict(self.busy_s or {}),
            "moved_bytes": dict(self.moved or {}),
            "activations_bytes": self.activations,
            "plan": self.plan.as_dict() if self.plan else None,
        }


def described(module: nn.Module, config: Any) -> tuple[Config, list[UnitSpec], list[Any]]:
    """The configuration as it is read, the model's units, and these as the core takes them. Raises ConfigError."""
    settings = Config.read(config)
    specs = partition(module, packings=packings_of(module, settings.frozen.format))
    mark_tiles(module, settings, specs)
    groups = make_groups(settings.optimizer, module.parameters())
    return settings, specs, core_units(module, settings, specs, [groups])


def shared_out(model: Model, specs: Sequence[UnitSpec], forward_s: float, backward_s: float) -> list[Work]:
    """By unit, its part of these seconds of a micro-batch, by the products that its weights are in; and whether
    backward needs the weights, as it does for products."""
    elements = model.matmul_elements()
    by_unit = [sum(elements.get(id(p.parameter), 0.0) for p in spec.parameters) for spec in specs]
    total = sum(by_unit) or 1.0
    return [(forward_s * each / total, backward_s * each / total, each > 0) for each in by_unit]


def work_of(model: Model, specs: Sequence[UnitSpec], load: Load, flops_per_s: float) -> list[Work]:
    """The same of the model's products: backward has twice those of forward, and forward's once more where layers are
    recomputed."""
    seconds = model.forward_flops(load.tokens, load.length) / flops_per_s
    return shared_out(model, specs, seconds, (3 if load.recomputed else 2) * seconds)


def with_budgets(config: Mapping[str, Any], machine: Machine, activations: int) -> dict[str, Any]:
    """The configuration, with the budgets that are not in it: what the machine has, less activations and what a process
    takes by itself. Where it has a disk the states may go there."""
    budget = dict(config.get("budget", {}))
    own = _OWN_BYTES if machine.host_bytes > 4 * _OWN_BYTES else machine.host_bytes // 8
    on_device = machine.device_bytes > 0
    budget.setdefault("host", max(0, machine.host_bytes - own - (0 if on_device else activations)))
    if on_device:
        budget.setdefault("device", max(1, machine.device_bytes - activations - _OWN_BYTES))
    if machine.disk_bytes_per_s > 0:
        budget.setdefault("nvme", ["nvme"])
    engine = {"device": "cuda" if on_device else "host", **config.get("engine", {})}
    return {**config, "budget": budget, "engine": engine}


def estimate(
    model: Model,
    machine: Machine,
    load: Load,
    config: Mapping[str, Any] | None = None,
    ranks: int = 1,
    work: Sequence[Work] | None = None,
) -> Estimate:
    """A step of `model` on so many ranks, each of which has what `machine` has.

    Args:
        config: as `overspill.initialize` takes it; budgets that are not in it are what the machine has
        work: by unit; by default that of the model's products at machine.flops_per_s

    Raises: ConfigError; ValueError where the plan needs a disk, a link or a network that the machine lacks.
    """
    activations = model.activation_bytes(load.tokens, load.recomputed)
    said = with_budgets(config or {}, machine, activations)
    said["gradient_accumulation_steps"] = load.micros
    settings, specs, units = described(model.module, said)
    asked = settings.to_core(_core)
    while model.parameters / ranks / asked.chunk_elements > _CHUNKS_MOST:
        asked.chunk_elements *= 2
    seconds = work if work is not None else work_of(model, specs, load, machine.flops_per_s)
    try:
        found = _core.simulate(units, asked, list(seconds), machine.rates(), ranks)
    except BudgetError as error:
        return Estimate(None, str(error), ranks, activations=activations)
    return Estimate(
        Plan.of(found["plan"]),
        "",
        ranks,
        load.tokens * load.micros * ranks,
        found["step_seconds"],
        found["waited_seconds"],
        found["busy_seconds"],
        found["bytes"],
        activations,
    )
