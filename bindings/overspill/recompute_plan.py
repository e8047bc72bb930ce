"""Which blocks backward computes again, and which have what they saved moved (`engine.recompute = "auto"`): the number
for which a step is predicted to be the shortest, from what one pass took.

The second pass is measured, since the first one warms up; what it takes to give the arena its bytes, and to wait for
room there, is left out. What is moved costs time only as far as the disks do not keep up with the computing beside
them; what is computed again costs a block's forward each. With k blocks computed again, w bytes beyond the arena, and
backward taken as twice as long as forward:

    step(k) = max(forward, w(k) / write) + max(2 forward + k block, w(k) / read)

Of equal steps the one with fewer blocks counts. The speed of a disk that was never busy enough to measure it counts as
infinite: it has kept up. The blocks are spread evenly, so that transfers have computing beside
them all the way."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """Of one pass: the seconds that forward computed, and the bytes that it gave to the arena; of the mean block its
    seconds and the bytes that it gave beside its inputs. Bytes a second of all disks together."""

    blocks: int
    forward_seconds: float
    kept_bytes: int
    block_seconds: float
    block_bytes: int
    arena_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float

    def step_seconds(self, again: int) -> float:
        """Predicted, with so many blocks computed again."""
        left = max(0, self.kept_bytes - again * self.block_bytes - self.arena_bytes)
        forward = max(self.forward_seconds, left / self.write_bytes_per_s)
        return forward + max(
            2 * self.forward_seconds + again * self.block_seconds, left / self.read_bytes_per_s
        )

    def choice(self) -> int:
        """How many blocks to compute again."""
        return min(range(self.blocks + 1), key=self.step_seconds)


def spread(blocks: int, chosen: int) -> list[bool]:
    """Which of so many blocks are the chosen ones, evenly spread."""
    return [i * chosen // blocks != (i + 1) * chosen // blocks for i in range(blocks)]


class Planner:
    """Of one engine, until it has chosen. `blocks`: of recompute.Block, in the model's order; each gets `chosen`. They
    are the module's, and the planner refers to them weakly: else it would keep the module, and so the engine, alive."""

    def __init__(self, owner: Any, blocks: list[Any]):
        self.owner, self._blocks = owner, [weakref.ref(block) for block in blocks]
        self._first: set[int] | None = None  # the numbers of the blocks that the first pass called
        self._pass: _Pass | None = None  # the one under way, or the last
        for block in blocks:
            block.chosen = False

    def begin_pass(self) -> None:
        """Before each pass that trains. One that was broken off, or called other parts of the model, is not chosen by:
        the next one is measured."""
        last = self._pass
        if last is not None and last.calls:
            if self._first is None:
                self._first = set(last.calls)
            elif set(last.calls) >= self._first:
                self._choose(last)
                return
        self._pass = _Pass(self.clock(), self.owner.moving.kept_bytes)

    def clock(self) -> float:
        """Seconds, without those in which the engine took tensors, or waited for room."""
        return time.perf_counter() - float(self.owner.moving.seconds)

    def called(self, block: Any, begin: float, kept: int) -> None:
        """Called when a block's forward has ended: when it began, and how many bytes beside its inputs it has given."""
        number = next((i for i, each in enumerate(self._blocks) if each() is block), None)
        if number is None or self._pass is None:
            return
        now = self._pass.end = self.clock()
        seconds, before = self._pass.calls.get(number, (0.0, 0))
        self._pass.calls[number] = (seconds + now - begin, before + kept)

    def _choose(self, measured: _Pass) -> None:
        self.owner.planner = None
        found = [
            (block, measured.calls[i])
            for i, each in enumerate(self._blocks)
            if i in measured.calls and (block := each()) is not None
        ]
        paths = self.owner.core.stats()["paths"]
        seen = Seen(
            blocks=len(found),
            forward_seconds=measured.end - measured.begin,
            kept_bytes=self.owner.moving.kept_bytes - measured.kept_bytes,
            block_seconds=sum(seconds for _, (seconds, _) in found) / len(found),
            block_bytes=sum(kept for _, (_, kept) in found) // len(found),
            arena_bytes=self.owner.moving.most,
            write_bytes_per_s=_speed(path["write_bytes_per_s"] for path in paths),
            read_bytes_per_s=_speed(path["read_bytes_per_s"] for path in paths),
        )
        chosen = seen.choice()
        for (block, _), is_chosen in zip(found, spread(len(found), chosen), strict=True):
            block.chosen = is_chosen
        self.owner.recomputes = _text(seen, chosen)


@dataclass
class _Pass:
    """`calls`: seconds and bytes of each block that was called, by its number."""

    begin: float
    kept_bytes: int
    end: float = 0.0
    calls: dict[int, tuple[float, int]] = field(default_factory=dict)


def _speed(of_paths: Iterable[float]) -> float:
    """0 of a path: it was not measured."""
    found = list(of_paths)
    return sum(found) if all(found) else math.inf


def _text(seen: Seen, chosen: int) -> str:
    steps = {again: seen.step_seconds(again) for again in (0, chosen, seen.blocks)}
    return (
        f"{chosen} of {seen.blocks} blocks; predicted for forward and backward of one pass: {steps[chosen]:.3g} s so, "
        f"{steps[0]:.3g} s with no block, {steps[seen.blocks]:.3g} s with all"
    )
