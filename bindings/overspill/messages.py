"""Bytes between two ranks of a group, over its gloo connections, so that a rank that is lost is noticed at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._core import EngineFailed

if TYPE_CHECKING:
    from .ranks import Group

_SMALL_BYTES = 1024  # of a message that arrives whole or not at all


class Messages:
    """Between pairs of ranks, of the calls that one thread makes after another. `tag`: the first of four that are its
    own."""

    def __init__(self, group: Group, tag: int):
        self._torch_group, self._rank, self._patience = group.torch_group, group.rank, group.patience
        self._call, self._end, self._got = tag, tag + 1, tag + 2
        self._lost = group.lost
        self._sent: dict[int, list[Any]] = {}  # by rank: what it may not have yet

    def exchange(self, sends: Sequence[Sequence[Any]], receives: Sequence[Sequence[Any]]) -> str:
        """Sends and receives buffers, by rank: of each a list, none of them empty, and both ends of a pair give the
        same lengths in the same order. Returns when all is done: "", or what went wrong.

        When a connection breaks, gloo (pair.cc, signalException) tells those who wait for a receive that has not begun,
        and nobody else: who waits for a transfer in progress waits until its timeout. So only empty messages and small
        ones are waited for here. One follows the buffers for a rank where one of them is large, and one answers it.
        """
        peer = self._rank
        try:
            arriving, leaving = [], []
            for peer, buffers in enumerate(receives):
                if buffers:
                    arriving.append((peer, self._begin_receive(list(map(_tensor, buffers)), peer)))
            before, self._sent = self._sent, {}
            for peer, buffers in enumerate(sends):
                if _is_large(buffers):
                    leaving.append((peer, self._begin_send(list(map(_tensor, buffers)), peer)))
                    continue
                for buffer in buffers:
                    self._send(_tensor(bytearray(buffer)), peer, self._call)
            for peer, works in arriving:
                self._wait(works)
                before.pop(peer, None)  # who sends has all that was sent to it before this call
                if _is_large(receives[peer]):
                    self._send(_nothing(), peer, self._got)
            for peer, works in leaving:
                self._wait(works)
                before.pop(peer, None)  # and so has who answers
            for peer, works in before.items():
                self._sent.setdefault(peer, []).extend(works)
        except RuntimeError as error:
            return self._lost(peer, error)
        return ""

    def close(self) -> None:
        """gloo ends its connections when nobody holds the group."""
        self._torch_group, self._sent = None, {}

    def _begin_receive(self, tensors: list[torch.Tensor], peer: int) -> list[Any]:
        """What is to be waited for. Messages of one tag arrive in the order in which they were sent."""
        works = [self._receive(tensor, peer, self._call) for tensor in tensors]
        if _is_large(tensors):
            works.append(self._receive(_nothing(), peer, self._end))
        return works

    def _begin_send(self, tensors: list[torch.Tensor], peer: int) -> list[Any]:
        """Where one is large: what is to be waited for."""
        got = self._receive(_nothing(), peer, self._got)
        works = [*(self._send(tensor, peer, self._call) for tensor in tensors), got]
        self._send(_nothing(), peer, self._end)
        return works

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self._torch_group.recv([tensor], peer, tag)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Kept until the peer has it: gloo forgets what nobody holds."""
        work = self._torch_group.send([tensor], peer, tag)
        self._sent.setdefault(peer, []).append((work, tensor))
        return work

    def _wait(self, works: list[Any]) -> None:
        """The last one shows that the others are done."""
        for work in reversed(works):
            work.wait(self._patience)


class Line(Messages):
    """A channel to one other rank of a group. One thread uses it, which makes no other call of the group meanwhile. A
    send returns before it has arrived. Both sides make matching calls, in the same order. `tag`: as of Messages, from
    8. All raise EngineFailed where the other rank is lost. The group closes it."""

    def __init__(self, group: Group, peer: int, tag: int):
        super().__init__(group, tag)
        self._group, self._peer = group, peer
        self._leaving: list[list[list[Any]]] = [[]]  # by value: what shows that its messages have arrived
        self._answers: list[list[Any]] = [[]]  # by value: gloo forgets what nobody holds
        group.lines.append(self)

    def begin_sending(self) -> None:
        """The messages of a value follow. Waits until those of the value before the last one have arrived: both sides
        may send one at once before they receive."""
        with self._noticing():
            while len(self._leaving) > 1:
                for works in self._leaving.pop(0):
                    self._arrived(works)
        self._leaving.append([])

    def send(self, tensor: torch.Tensor) -> None:
        """Borrows a contiguous tensor on the CPU: nobody changes it until `finish` has returned."""
        with self._noticing():
            self._leaving[-1].append(self._begin_send([_bytes_of(tensor)], self._peer))

    def begin_receiving(self) -> None:
        """The messages of a value follow. Who sends them has the answers to the value before the last one."""
        self._answers = [*self._answers[-2:], []]

    def receive(self, tensor: torch.Tensor) -> None:
        """Into a contiguous one on the CPU. Returns when it is there."""
        with self._noticing():
            end = self._receive(_nothing(), self._peer, self._end)
            self._wait([self._receive(_bytes_of(tensor), self._peer, self._call), end])
            nothing = _nothing()
            self._answers[-1].append((self._torch_group.send([nothing], self._peer, self._got), nothing))

    def finish(self) -> None:
        """Returns when the other rank has what was sent to it."""
        with self._noticing():
            while self._leaving:
                for works in self._leaving.pop(0):
                    self._arrived(works)
        self._leaving = [[]]

    def close(self) -> None:
        super().close()
        self._leaving, self._answers = [[]], [[]]

    def _arrived(self, works: list[Any]) -> None:
        self._wait(works)
        sent = self._sent[self._peer]
        at = next(i for i, (work, _) in enumerate(sent) if work is works[0])
        del sent[: at + 2]  # and the empty one after it

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        if self._torch_group is None:
            raise EngineFailed("overspill: the engine of this stage is closed")
        try:
            yield
        except RuntimeError as error:
            first = self._group.declare(self._lost(self._peer, error))
            self._group.leave()
            raise EngineFailed(f"overspill: {first}") from None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _is_large(buffers: Sequence[Any]) -> bool:
    """Buffers or tensors of bytes."""
    return any(len(buffer) > _SMALL_BYTES for buffer in buffers)


def _tensor(buffer: Any) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
