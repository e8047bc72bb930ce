"""A graph of what a traced forward and a timed step have shown."""

from __future__ import annotations

from collections.abc import Iterable

from ..timeline.spans import Span, Timeline
from .nodes import Graph, Node
from .trace import Tracer


class _Maker:
    def __init__(self, tracer: Tracer, timed: Timeline, trained: list[bool], ranks: int):
        self.uses, self.timed, self.trained, self.ranks = tracer.uses, timed, trained, ranks
        self.nodes: list[Node] = []
        spans = {lane.key: lane.spans for lane in timed.lanes}
        self.caller, self.updates = spans["caller"], spans.get("updates", [])
        self.coming, self.sums = spans.get("coming", []), spans.get("sums", [])
        self.writes = [span for span in spans.get("ring", []) if span.kind == "writing"]
        self.backward_at = min((s.begin for s in self.caller if s.kind == "backward"), default=timed.duration)
        gradients = {s.unit for s in spans.get("gradients", [])}
        self.has_backward = tracer.in_backward | {u for u in gradients if trained[u]}

    def add(
        self, kind: str, unit: int, use: int, size: int, seconds: float | None, after: Iterable[int]
    ) -> int:
        self.nodes.append(Node(kind, unit, use, size, seconds, tuple(sorted(set(after)))))
        return len(self.nodes) - 1

    def make(self) -> Graph:
        forward, saved = self._forward()
        backward = self._backward(forward, saved)
        self._step(backward)
        return Graph(tuple(unit.name for unit in self.timed.units), tuple(self.nodes))

    def _gathers(self, after_backward: bool) -> dict[int, int]:
        """By unit, of those that were gathered in that pass."""
        by_unit: dict[int, list[Span]] = {}
        for span in self.coming:
            if (span.begin >= self.backward_at) == after_backward:
                by_unit.setdefault(span.unit, []).append(span)
        return {
            unit: self.add(
                "gather", unit, int(after_backward), self.timed.units[unit].weights_bytes, _seconds(spans), ()
            )
            for unit, spans in sorted(by_unit.items())
        }

    def _forward(self) -> tuple[dict[int, int], dict[int, int]]:
        """The nodes of each use: its computation, and what is kept of it."""
        gathers = self._gathers(False)
        forward: dict[int, int] = {}
        saved: dict[int, int] = {}
        for i, use in enumerate(self.uses):
            needed = [forward[each] for each in _nearest(self.uses, use.after)]
            needed += [gathers[use.unit]] if use.unit in gathers else []
            forward[i] = self.add("forward", use.unit, use.number, 0, self._took("forward", use.unit), needed)
            if use.saved_bytes:
                saved[i] = self.add("saved", use.unit, use.number, use.saved_bytes, None, [forward[i]])
        return forward, saved

    def _backward(self, forward: dict[int, int], saved: dict[int, int]) -> dict[int, list[int]]:
        """By unit, the nodes of its uses in backward."""
        last = set(forward) - {each for use in self.uses for each in use.after}
        loss = self.add("loss", -1, 0, 0, None, [forward[i] for i in last])
        gathers = self._gathers(True)
        consumers: dict[int, list[int]] = {}
        for i, use in enumerate(self.uses):
            for each in _nearest(self.uses, use.after):
                consumers.setdefault(each, []).append(i)
        ends: dict[int, set[int]] = {}  # by use, nodes whose results its own backward needs
        by_unit: dict[int, list[int]] = {}
        for i in reversed(range(len(self.uses))):
            use = self.uses[i]
            later = set().union(*(ends[j] for j in consumers.get(i, [])))
            if use.unit not in self.has_backward:
                ends[i] = later  # gradients pass through it
                continue
            needed = [*(later or [loss]), saved.get(i, forward[i])]
            needed += [gathers[use.unit]] if use.unit in gathers else []
            node = self.add("backward", use.unit, use.number, 0, self._took("backward", use.unit), needed)
            ends[i] = {node}
            by_unit.setdefault(use.unit, []).append(node)
        return by_unit

    def _step(self, backward: dict[int, list[int]]) -> None:
        ends: dict[int, int] = {}
        for unit, nodes in backward.items():
            if not self.trained[unit]:
                continue
            size = self.timed.units[unit].gradient_bytes
            ends[unit] = self.add("gradient", unit, 0, size, None, nodes)
            if self.ranks > 1:
                took = _seconds(span for span in self.sums if span.unit == unit)
                ends[unit] = self.add("reduce", unit, 0, size, took, [ends[unit]])
        if not self.timed.steps:
            return  # nothing was updated
        decision = self.add("decision", -1, 0, 0, None, ends.values())
        for unit in ends:
            spans = [s for s in self.updates if s.unit == unit]
            size = self.timed.units[unit].states_bytes
            update = self.add("update", unit, 0, size, _seconds(spans), [decision, ends[unit]])
            writes = [s for s in self.writes if s.unit == unit]
            if writes:
                self.add("write", unit, 0, size, _seconds(writes), [update])

    def _took(self, kind: str, unit: int) -> float | None:
        """Uses of a unit share its time: the engine notes units, no uses."""
        uses = sum(use.unit == unit for use in self.uses)
        seconds = _seconds(s for s in self.caller if s.kind == kind and s.unit == unit)
        return None if seconds is None else seconds / uses


def make(tracer: Tracer, timed: Timeline, trained: list[bool], ranks: int) -> Graph:
    """`trained`: by unit, whether a step updates it."""
    return _Maker(tracer, timed, trained, ranks).make()


def _seconds(spans: Iterable[Span]) -> float | None:
    found = [span.end - span.begin for span in spans]
    return sum(found) * 1e-9 if found else None


def _nearest(uses: list, after: frozenset[int]) -> list[int]:
    """Without those that another of them needs."""
    return [i for i in sorted(after) if not any(uses[j].before >> i & 1 for j in after)]
