"""Which blocks backward computes again, and which have what they saved moved (`engine.recompute = "auto"`): the number
for which a pass is predicted to be the shortest, from what one took.

The second pass is measured, since the first one warms up: from its begin to the end of forward, and on to the last
gradient that arrives. The waits of the arena, for its disks, are left out; copies into it and out of it are counted
apart. They take time of their own for each byte, while what the disks do costs time only as far as they do not keep up
with all else. A block that is computed again costs its forward. With k blocks computed again, m(k) bytes given to the
arena, and w(k) of them beyond what it holds:

    pass(k) = max(forward + m(k) keep, w(k) / write) + max(backward + m(k) take + k block, w(k) / read)

Of equal passes the one with fewer blocks computed again counts. The speed of a disk that was never busy enough to
measure it counts as infinite: it has kept up. The blocks are spread evenly, so that transfers have computing beside
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
    """Of one pass: the seconds of forward and of what follows it, without the arena's copies and waits; the bytes that
    forward gave to the arena, and the seconds that they took to be copied there, and back. Of the mean block its
    seconds and the bytes that it gave beside its inputs. Bytes a second of all disks together."""

    blocks: int
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    keep_seconds: float
    take_seconds: float
    block_seconds: float
    block_bytes: int
    arena_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float

    def pass_seconds(self, again: int) -> float:
        """Predicted, with so many blocks computed again."""
        moved = max(0, self.kept_bytes - again * self.block_bytes)
        share = moved / self.kept_bytes if self.kept_bytes else 0.0
        left = max(0, moved - self.arena_bytes)
        forward = self.forward_seconds + share * self.keep_seconds
        backward = self.backward_seconds + share * self.take_seconds + again * self.block_seconds
        return max(forward, left / self.write_bytes_per_s) + max(backward, left / self.read_bytes_per_s)

    def choice(self) -> int:
        """How many blocks to compute again."""
        return min(range(self.blocks + 1), key=self.pass_seconds)


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
        """Before each pass that trains. One that was broken off, that no backward followed, or that called other parts
        of the model, is not chosen by: the next one is measured."""
        last = self._pass
        if last is not None and last.calls and last.end is not None:
            if self._first is None:
                self._first = set(last.calls)
            elif set(last.calls) >= self._first:
                self._choose(last)
                return
        self._pass = _Pass(self._moment())

    def end_forward(self) -> None:
        """When the outermost call of the model has ended."""
        if self._pass is not None and self._pass.forward is None:
            self._pass.forward = self._moment()

    def arrived(self) -> None:
        """When a gradient has arrived in the engine."""
        if self._pass is not None and self._pass.forward is not None:
            self._pass.end = self.clock()

    def clock(self) -> float:
        """Seconds, without those in which the arena took tensors, or gave them back."""
        moving = self.owner.moving
        return time.perf_counter() - float(moving.keep_seconds) - float(moving.take_seconds)

    def _moment(self) -> _Moment:
        moving = self.owner.moving
        waited = self.owner.core.stats()["activations_wait_seconds"]
        return _Moment(self.clock(), moving.kept_bytes, moving.keep_seconds, moving.take_seconds, waited)

    def called(self, block: Any, begin: float, kept: int) -> None:
        """Called when a block's forward has ended: when it began, and how many bytes beside its inputs it has given."""
        number = next((i for i, each in enumerate(self._blocks) if each() is block), None)
        if number is None or self._pass is None:
            return
        seconds, before = self._pass.calls.get(number, (0.0, 0))
        self._pass.calls[number] = (seconds + self.clock() - begin, before + kept)

    def _choose(self, measured: _Pass) -> None:
        self.owner.planner = None
        found = [
            (block, measured.calls[i])
            for i, each in enumerate(self._blocks)
            if i in measured.calls and (block := each()) is not None
        ]
        begin, forward, end, now = measured.begin, measured.forward, measured.end, self._moment()
        assert forward is not None and end is not None
        paths = self.owner.core.stats()["paths"]
        seen = Seen(
            blocks=len(found),
            forward_seconds=forward.clock - begin.clock,
            backward_seconds=end - forward.clock,
            kept_bytes=forward.kept_bytes - begin.kept_bytes,
            keep_seconds=forward.keep_seconds - begin.keep_seconds - (forward.waited - begin.waited),
            take_seconds=now.take_seconds - forward.take_seconds - (now.waited - forward.waited),
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


@dataclass(frozen=True)
class _Moment:
    """`clock`: Planner.clock. The others count since the engine was made."""

    clock: float
    kept_bytes: int
    keep_seconds: float
    take_seconds: float
    waited: float


@dataclass
class _Pass:
    """`forward`: the moment of its end; `end`: the clock when the last gradient arrived. `calls`: seconds and bytes of
    each block that was called, by its number."""

    begin: _Moment
    forward: _Moment | None = None
    end: float | None = None
    calls: dict[int, tuple[float, int]] = field(default_factory=dict)


def _speed(of_paths: Iterable[float]) -> float:
    """0 of a path: it was not measured."""
    found = list(of_paths)
    return sum(found) if all(found) else math.inf


def _text(seen: Seen, chosen: int) -> str:
    passes = {again: seen.pass_seconds(again) for again in (0, chosen, seen.blocks)}
    return (
        f"{chosen} of {seen.blocks} blocks; predicted for forward and backward of one pass: {passes[chosen]:.3g} s so, "
        f"{passes[0]:.3g} s with no block, {passes[seen.blocks]:.3g} s with all"
    )
