"""The same training under other budgets, on other numbers of ranks, with something faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .machine import Machine
from .models import Model
from .step import Estimate, Load, estimate

_WORTH = 1.02  # times as fast
_MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class Gain:
    """what: its name; machine: with it; step: a step there."""

    what: str
    machine: Machine
    step: Estimate


def budgets(
    model: Model, machine: Machine, load: Load, config: Mapping[str, Any], ranks: int, sizes: Sequence[int]
) -> list[tuple[int, Estimate]]:
    """One estimate for each size of a rank's host memory."""
    return [
        (size, estimate(model, replace(machine, host_bytes=min(size, _MOST_BYTES)), load, config, ranks))
        for size in sizes
    ]


def rank_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`, at most six of them: the largest ones."""
    counts = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return sorted({*counts, most})[-6:]


def gains(
    model: Model, machine: Machine, load: Load, config: Mapping[str, Any], ranks: int, now: Estimate
) -> list[Gain]:
    """Each part of the machine twice as large or as fast, by itself; those that make a step shorter, the best first. Of
    a model that does not fit, what makes it fit."""
    tries = {
        "twice the host memory": replace(machine, host_bytes=min(2 * machine.host_bytes, _MOST_BYTES)),
        "twice the GPU's memory": replace(machine, device_bytes=min(2 * machine.device_bytes, _MOST_BYTES)),
        "twice the compute": replace(machine, flops_per_s=2 * machine.flops_per_s),
        "disks twice as fast": replace(
            machine,
            disk_bytes_per_s=2 * machine.disk_bytes_per_s,
            read_bytes_per_s=2 * machine.read_bytes_per_s,
            write_bytes_per_s=2 * machine.write_bytes_per_s,
        ),
        "a link twice as fast": replace(machine, link_bytes_per_s=2 * machine.link_bytes_per_s),
        "host memory twice as fast": replace(
            machine,
            memory_bytes_per_s=2 * machine.memory_bytes_per_s,
            update_s=None if machine.update_s is None else machine.update_s / 2,
            intake_s=None if machine.intake_s is None else machine.intake_s / 2,
        ),
        "a disk of 6 GB/s": machine
        if machine.disk_bytes_per_s or now.plan is not None
        else replace(machine, disk_bytes_per_s=6e9),
        "a network twice as fast": replace(machine, network_bytes_per_s=2 * machine.network_bytes_per_s),
    }
    found = []
    for what, other in tries.items():
        if other == machine:
            continue
        step = estimate(model, other, load, config, ranks)
        if step.plan is None or (now.plan is not None and now.step_s < _WORTH * step.step_s):
            continue
        found.append(Gain(what, other, step))
    return sorted(found, key=lambda gain: gain.step.step_s)
