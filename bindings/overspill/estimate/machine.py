"""A machine in numbers, and the rates that the core's simulation takes (engine/plan/simulate.h, Rates)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..config.values import parse_size

# Bytes that host memory moves for an element: an update reads the gradient, and reads and writes weight and states.
UPDATE_BYTES = 26
# For a byte of a gradient that comes: it is read and written, and read for the norm.
_INTAKE_BYTES = 3
_USE_S = 50e-6  # hooks and a lease, measured on one core
_LATENCY_S = 20e-6  # of a collective call


def parse_rate(text: str) -> float:
    """Bytes a second, of "25GB/s", "6GiB/s" or, in bits as networks are sold, "200Gb/s". Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?\s*[KMGTkmgt]?i?)([Bb])(?:/s|ps)\s*", text)
    try:
        rate = parse_size(f"{match[1]}B") / (8 if match[2] == "b" else 1) if match else 0
    except ValueError:  # an i without a prefix, or far too much
        match = None
    if not match:
        raise ValueError("a speed is a text such as 6GB/s, 6GiB/s or, in bits, 200Gb/s")
    if not 0 < rate < 1e18:
        raise ValueError("a speed has to be above 0 and below 10^18 bytes a second")
    return rate


@dataclass(frozen=True)
class Machine:
    """What one rank has. Speeds are in bytes a second; those of a thing that is not there are 0.

    host_bytes:          of host memory
    flops_per_s:         that forward and backward reach
    memory_bytes_per_s:  of host memory, which decides how fast the update is, unless `update_s` is given
    device_bytes:        of a GPU's memory; 0: models compute on the CPU
    link_bytes_per_s:    between host and GPU, each way
    disk_bytes_per_s:    reads and writes together
    read_bytes_per_s, write_bytes_per_s: of the disks, alone; 0: as disk_bytes_per_s
    network_bytes_per_s: to and from other ranks, each way
    network_latency_s:   of a collective call
    update_s:            of one element of the exact format, by all workers; None: by the memory's speed
    intake_s:            of one byte of a gradient that arrives on the host; None: by the memory's speed
    use_s:               of one use of a unit: hooks and a lease
    disk_processor:      share of the processors that a disk at its full speed takes: checksums, and the kernel's work
    network_processor:   share of the processors that collectives take, 0 to 1: gloo's are copies by the CPU
    """

    host_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    device_bytes: int = 0
    link_bytes_per_s: float = 0
    disk_bytes_per_s: float = 0
    read_bytes_per_s: float = 0
    write_bytes_per_s: float = 0
    network_bytes_per_s: float = 0
    network_latency_s: float = _LATENCY_S
    update_s: float | None = None
    intake_s: float | None = None
    use_s: float = _USE_S
    disk_processor: float = 0
    network_processor: float = 0

    def shared_by(self, ranks: int) -> Machine:
        """What each of so many ranks has of a machine that they share. GPU, link and compute are each rank's own, where
        there is a GPU. The network is not divided then: NCCL's rings pass each machine once, so a gathered unit crosses
        its network once for all of its ranks (links between its GPUs are taken to be faster)."""
        own = self.device_bytes > 0
        return replace(
            self,
            host_bytes=self.host_bytes // ranks,
            flops_per_s=self.flops_per_s / (1 if own else ranks),
            memory_bytes_per_s=self.memory_bytes_per_s / ranks,
            disk_bytes_per_s=self.disk_bytes_per_s / ranks,
            read_bytes_per_s=self.read_bytes_per_s / ranks,
            write_bytes_per_s=self.write_bytes_per_s / ranks,
            network_bytes_per_s=self.network_bytes_per_s / (1 if own else ranks),
            update_s=None if self.update_s is None else self.update_s * ranks,
            intake_s=None if self.intake_s is None else self.intake_s * ranks,
        )

    def rates(self) -> dict[str, Any]:
        """As the core takes them."""
        computes_beside = self.device_bytes > 0
        return {
            "update_s_per_element": self._of_memory(self.update_s, UPDATE_BYTES),
            "intake_s_per_byte": self._of_memory(self.intake_s, _INTAKE_BYTES),
            "use_s": self.use_s,
            "network_latency_s": self.network_latency_s,
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "bytes_per_s": {
                "read": self.read_bytes_per_s or self.disk_bytes_per_s,
                "write": self.write_bytes_per_s or self.disk_bytes_per_s,
                "up": self.link_bytes_per_s,
                "down": self.link_bytes_per_s,
                "network": self.network_bytes_per_s,
            },
            "processor": {
                "compute": 0.0 if computes_beside else 1.0,
                "read": self.disk_processor,
                "write": self.disk_processor,
                "network": self.network_processor,
            },
        }

    def _of_memory(self, given: float | None, moved: float) -> float:
        return moved / self.memory_bytes_per_s if given is None else given
