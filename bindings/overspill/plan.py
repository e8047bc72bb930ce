"""The plan as scripts see it: which tier holds what, decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIERS = ("device", "host", "nvme")


@dataclass(frozen=True)
class Tiers:
    """Bytes by the tier that holds them: the memory of a GPU, host memory, disks."""

    device: int
    host: int
    nvme: int

    @property
    def bytes(self) -> int:
        """Of all tiers."""
        return self.device + self.host + self.nvme

    @property
    def home(self) -> str:
        """ "device", "host" or "nvme"; "host+nvme" where both hold a part; "" where there is nothing to hold."""
        return "+".join(tier for tier in TIERS if getattr(self, tier))

    def __add__(self, other: Tiers) -> Tiers:
        return Tiers(self.device + other.device, self.host + other.host, self.nvme + other.nvme)

    def __str__(self) -> str:
        return self.home or "nothing"


@dataclass(frozen=True)
class Unit:
    """Parameters that the engine gathers and drops together, mostly those of one layer, and where their bytes live.

    name:       the module that has them, such as "model.layers.0"; "*", or "model.*", for small parameters of several
    parameters: how many numbers, of all ranks, without padding
    trainable:  whether the engine updates them
    weights:    bytes of this rank's shard of what forward uses, by tier
    states:     the same of what only the update uses: the rest of the fp32 master, and the optimizer's states
    """

    name: str
    parameters: int
    trainable: bool
    weights: Tiers
    states: Tiers

    @property
    def home(self) -> str:
        """Where all of it lives: "device", "host" or "nvme", or several of them, such as "host+nvme"."""
        return (self.weights + self.states).home

    @property
    def bytes(self) -> int:
        """Of weights and states of this rank, in all tiers."""
        return self.weights.bytes + self.states.bytes

    def __repr__(self) -> str:
        return (
            f"<Unit {self.name!r}: {self.parameters:,} parameters, weights on {self.weights}, states on "
            f"{self.states}, {self.bytes:,} bytes>"
        )


@dataclass(frozen=True)
class Plan:
    """Where weights, states and gradients of one rank live, and what memory the step needs. `str(plan)` is the table
    that the commands print.

    Attributes:
        units: in the order of the model
        host_budget_bytes: the budget of host memory
        host_bytes: what the plan takes of it
        device_bytes: of a GPU's memory; 0 where the model computes on the CPU
        nvme_reserve_bytes: room on the disks that the engine reserves at its start, checkpoints included
        nvme_read_bytes_per_step: of the disks, with one forward and one backward pass
        nvme_written_bytes_per_step: the same
    """

    units: tuple[Unit, ...]
    host_budget_bytes: int
    host_bytes: int
    device_bytes: int
    nvme_reserve_bytes: int
    nvme_read_bytes_per_step: int
    nvme_written_bytes_per_step: int
    _figures: Mapping[str, Any]
    _text: str

    @classmethod
    def of(cls, core: Any) -> Plan:
        """The plan that the core has made.

        Args:
            core: its plan (`overspill._core.Plan`)

        Raises: nothing.
        """
        figures = core.as_dict()
        units = tuple(
            Unit(
                name=unit["name"].split(":")[0],  # then its format and dtype (units.py)
                parameters=unit["parameters"],
                trainable=unit["trainable"],
                weights=Tiers(**unit["weights_bytes"]),
                states=Tiers(**unit["states_bytes"]),
            )
            for unit in figures["units"]
        )
        return cls(
            units=units,
            host_budget_bytes=figures["host_budget_bytes"],
            host_bytes=figures["host_bytes"],
            device_bytes=figures["gather_device_bytes"]
            + figures["units_device_bytes"]
            + figures["sums_device_bytes"],
            nvme_reserve_bytes=figures["nvme_reserve_bytes"],
            nvme_read_bytes_per_step=figures["nvme_read_bytes_per_step"],
            nvme_written_bytes_per_step=figures["nvme_written_bytes_per_step"],
            _figures=figures,
            _text=core.text,
        )

    @property
    def parameters(self) -> int:
        """How many numbers, of all ranks."""
        return sum(unit.parameters for unit in self.units)

    def as_dict(self) -> dict[str, Any]:
        """All figures, in bytes, as JSON takes them; `units` is a list of dicts."""
        return dict(self._figures)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return (
            f"<Plan: {len(self.units)} units, {self.parameters:,} parameters, {self.host_bytes:,} of "
            f"{self.host_budget_bytes:,} bytes of host memory, {self.nvme_reserve_bytes:,} bytes reserved on NVMe>"
        )
