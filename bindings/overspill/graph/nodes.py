"""A graph of a step, and what follows from it. Nothing here knows an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# What a node is, in the order of a step.
KINDS = {
    "gather": "weights come into memory: from NVMe, from the host or from other ranks",
    "forward": "a use of a unit's weights in forward",
    "saved": "what autograd keeps of a use until backward",
    "loss": "the end of forward, on which backward begins",
    "backward": "a use of a unit's weights in backward",
    "gradient": "a unit's gradient, complete",
    "reduce": "the ranks sum a unit's gradients",
    "decision": "step() has seen all gradients: their norm, and whether they are finite",
    "update": "the optimizer updates a unit on the CPU",
    "write": "updated states go back to NVMe",
}


@dataclass(frozen=True)
class Node:
    """`unit`: its number, -1 for none; `use`: which of the unit's uses in a pass, from 0. `bytes`: moved, kept or
    summed; 0 for a computation. `seconds`: as measured; None where the engine measures no such time. `after`: the
    numbers of the nodes whose results it needs, all of them earlier in the list."""

    kind: str
    unit: int
    use: int
    bytes: int
    seconds: float | None
    after: tuple[int, ...]


@dataclass(frozen=True)
class CriticalPath:
    """`nodes`: numbers, in order. `seconds`: the sum of what was measured on the path. `unmeasured`: those of its nodes
    for which there is no time; they count as 0, so the true path may be another one where they take long."""

    nodes: tuple[int, ...]
    seconds: float
    unmeasured: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """`units`: their names. `nodes`: sorted so that each comes after all that it needs."""

    units: tuple[str, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def _ancestors(self) -> list[int]:
        """Of each node all that it needs, directly or not, as a set of bits."""
        found: list[int] = []
        for node in self.nodes:
            bits = 0
            for each in node.after:
                bits |= found[each] | 1 << each
            found.append(bits)
        return found

    def of(self, kind: str, unit: str | None = None) -> list[int]:
        """The numbers of the nodes of a kind, of all units or of one. Raises ValueError for an unknown one."""
        if kind not in KINDS:
            raise ValueError(f"overspill: graph: kind {kind!r:.40}: known are {', '.join(KINDS)}")
        index = None if unit is None else self._index(unit)
        return [i for i, n in enumerate(self.nodes) if n.kind == kind and index in (None, n.unit)]

    def depends(self, unit: str, on: str) -> bool:
        """Whether a forward use of `unit` needs a result of `on`. Raises ValueError for an unknown unit."""
        needed = sum(1 << i for i in self.of("forward", on))
        return any(self._ancestors[i] & needed for i in self.of("forward", unit))

    def independent_of(self, unit: str) -> list[str]:
        """The units that forward used of which none needs `unit`, and which `unit` does not need."""
        used = [self.units[i] for i in sorted({self.nodes[n].unit for n in self.of("forward")})]
        return [
            name
            for name in used
            if name != unit and not self.depends(name, unit) and not self.depends(unit, name)
        ]

    def independent(self) -> list[tuple[str, ...]]:
        """Sets of at least two units that may run at the same time, in order of their depth: of units at one depth (the
        longest chain of uses before the first use) those that are pairwise independent."""
        depth: dict[int, int] = {}
        levels: dict[int, list[str]] = {}
        for i in self.of("forward"):
            before = [depth[j] for j in depth if self._ancestors[i] >> j & 1]
            depth[i] = 1 + max(before, default=-1)
            if self.nodes[i].use == 0:
                levels.setdefault(depth[i], []).append(self.units[self.nodes[i].unit])
        groups = []
        for _, names in sorted(levels.items()):
            group: list[str] = []
            for name in names:
                if all(not self.depends(name, other) and not self.depends(other, name) for other in group):
                    group.append(name)
            if len(group) > 1:
                groups.append(tuple(group))
        return groups

    def together(self, bucket: int) -> dict[str, list[tuple[str, ...]]]:
        """Which collectives may go as one call of at most `bucket` bytes: "gather", in order of use, since weights need
        no result of forward; "reduce", of gradients that are complete without one another. A larger one goes alone."""
        gathers = sorted(self.of("gather"), key=self._first_use)
        found = {"gather": self._groups(gathers, bucket, lambda a, b: self.nodes[a].use == self.nodes[b].use)}
        found["reduce"] = self._groups(self.of("reduce"), bucket, self._are_apart)
        return found

    def critical_path(self) -> CriticalPath:
        """The longest path by measured seconds: no order, and no number of devices, makes this step shorter while each
        node takes as long as it took. The critical-path method of Kelley and Walker, "Critical-path planning and
        scheduling" (Eastern Joint Computer Conference, 1959)."""
        ends: list[float] = []
        before: list[int] = []
        for node in self.nodes:
            last = max(node.after, key=lambda i: ends[i], default=-1)
            before.append(last)
            ends.append((ends[last] if last >= 0 else 0.0) + (node.seconds or 0.0))
        at = max(range(len(ends)), key=ends.__getitem__, default=-1)
        seconds, path = (ends[at] if at >= 0 else 0.0), []
        while at >= 0:
            path.append(at)
            at = before[at]
        path.reverse()
        return CriticalPath(tuple(path), seconds, tuple(i for i in path if self.nodes[i].seconds is None))

    def seconds(self) -> float:
        """Of all nodes together: what one after another would take."""
        return sum(node.seconds or 0.0 for node in self.nodes)

    def write(self, path: str | Path) -> None:
        """Writes the graph as .json (Graph.read), or as a picture (.svg, .png). Raises ValueError for another ending,
        MissingExtra for a picture without matplotlib, OSError."""
        from . import check, write

        write(self, check(path))

    @classmethod
    def read(cls, path: str | Path) -> Graph:
        """Raises ValueError for a file that is no graph, OSError."""
        from . import file

        return file.read(Path(path))

    def _index(self, unit: str) -> int:
        if unit not in self.units:
            raise ValueError(f"overspill: graph: no unit is named {unit!r:.80}: Graph.units has the names")
        return self.units.index(unit)

    def _first_use(self, node: int) -> tuple[int, int]:
        uses = [i for i, n in enumerate(self.nodes) if node in n.after]
        return self.nodes[node].use, min(uses, default=len(self.nodes))

    def _are_apart(self, one: int, other: int) -> bool:
        return not (self._ancestors[one] >> other & 1 or self._ancestors[other] >> one & 1)

    def _groups(self, nodes: Iterable[int], bucket: int, fit: object) -> list[tuple[str, ...]]:
        assert callable(fit)
        groups: list[list[int]] = []
        for i in nodes:
            last = groups[-1] if groups else []
            size = sum(self.nodes[j].bytes for j in [*last, i])
            if last and size <= bucket and all(fit(i, j) for j in last):
                last.append(i)
            else:
                groups.append([i])
        return [tuple(self.units[self.nodes[i].unit] for i in group) for group in groups]
