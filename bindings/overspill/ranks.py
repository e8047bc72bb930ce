"""Ranks: processes that torchrun, or torch.distributed in another way, started, and that share one model.

The core moves bytes (bindings/group_communicator.cc); here is what it calls of torch.distributed, and what ranks agree
on before there is an engine.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
import json
import os
import sys
import time
import types
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler

from . import _core
from .divided import memory_of

STORE_PATIENCE = datetime.timedelta(seconds=10)
CONNECT_PATIENCE = datetime.timedelta(seconds=60)
LAST_WORDS_SECONDS = 10.0  # that SIGTERM leaves under torchrun to say which rank was lost
_FAILURE = "overspill/failure"
_HEARD = "overspill/heard/"  # and a rank
_CALL, _LEAVING, _END, _GOT = range(4)  # tags
_SMALL_BYTES = 1024  # of a message that arrives whole or not at all


class RankError(_core.OverspillError):
    """Ranks differ where they have to be alike; the message names the rank and what differs."""


def join(process_group: Any = None, timeout_seconds: float = 1800.0) -> Group | None:
    """The ranks of `process_group`, None for the default group, as a group of their own; None where there is one rank.

    Where nobody has called init_process_group yet, and the environment is that of torchrun (WORLD_SIZE above 1), it is
    called here, with gloo. Collective: all ranks of `process_group` call it, as often as the others.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        dist.init_process_group("gloo")
    if dist.get_world_size(process_group) == 1:
        return None
    if dist.get_rank(process_group) < 0:
        raise RankError("overspill: this process is not in the process_group given to overspill.initialize")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _core.linger_when_terminated(LAST_WORDS_SECONDS)
    return Group(process_group, timeout_seconds)


class Group:
    """Sends and receives between pairs of ranks, over a torch.distributed group that nobody else uses."""

    def __init__(self, process_group: Any = None, timeout_seconds: float = 1800.0):
        self.rank, self.world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.closed = False
        self._patience = datetime.timedelta(seconds=timeout_seconds)
        self._sent: dict[int, list[Any]] = {}  # by rank: what it may not have yet
        backend = dist.get_backend(process_group)
        self.torch_group = dist.new_group(
            dist.get_process_group_ranks(process_group),
            timeout=max(self._patience, CONNECT_PATIENCE),
            backend="gloo" if backend in ("nccl", "undefined") else backend,
            use_local_synchronization=process_group is not None,
            group_desc="overspill",
        )
        # A connection of our own, with patience of our own: failures are told here when the group is broken.
        self._kept = distributed_c10d._get_process_group_store(self.torch_group)
        self._store = self._kept.clone()
        self._store.set_timeout(STORE_PATIENCE)
        self._keeper = _keeper(process_group)
        self._lingers = False  # at exit, so that the others hear
        atexit.register(_tell_why, weakref.ref(self))

    # ---- what the core calls

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> str:
        """Sends and receives buffers, by rank; None for no bytes. Returns when all is done: "", or what went wrong.

        When a connection breaks, gloo (pair.cc, signalException) tells those who wait for a receive that has not begun,
        and nobody else: who waits for a transfer in progress waits until its timeout. So only empty messages and small
        ones are waited for here. One follows each large transfer, and one answers it.
        """
        peer = self.rank
        try:
            arriving, leaving = [], []
            for peer, buffer in enumerate(receives):
                if buffer is not None:
                    works = [self._receive(_tensor(buffer), peer, _CALL)]
                    if len(buffer) > _SMALL_BYTES:
                        works.append(self._receive(_nothing(), peer, _END))
                    arriving.append((peer, works))
            before, self._sent = self._sent, {}
            for peer, buffer in enumerate(sends):
                if buffer is None:
                    continue
                if len(buffer) <= _SMALL_BYTES:
                    self._send(_tensor(bytearray(buffer)), peer, _CALL)
                else:
                    got = self._receive(_nothing(), peer, _GOT)
                    leaving.append((peer, [self._send(_tensor(buffer), peer, _CALL), got]))
                    self._send(_nothing(), peer, _END)
            for peer, works in arriving:
                self._wait(works)
                before.pop(peer, None)  # who sends has all that was sent to it before this call
                if len(works) > 1:
                    self._send(_nothing(), peer, _GOT)
            for peer, works in leaving:  # noqa: B007 (the error names it)
                self._wait(works)
            for peer, works in before.items():
                self._sent.setdefault(peer, []).extend(works)
        except RuntimeError as error:
            return f"rank {peer} {self._why(error)}"
        return ""

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self.torch_group.recv([tensor], peer, tag)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Kept until the peer has it: gloo forgets what nobody holds."""
        work = self.torch_group.send([tensor], peer, tag)
        self._sent.setdefault(peer, []).append((work, tensor))
        return work

    def _wait(self, works: list[Any]) -> None:
        """The last one shows that the others are done."""
        for work in reversed(works):
            work.wait(self._patience)

    def declare(self, why: str) -> str:
        """Tells all ranks why the world ends; the first reason counts, and is returned. Raises when nobody keeps it.

        A rank that keeps the store ends only when the others have heard (_linger). So where the store is gone, its rank
        was the first to go, and whoever else is gone left because of it.
        """
        try:
            first = self._store.compare_set(_FAILURE, "", why).decode()
            self._store.set(f"{_HEARD}{self.rank}", "")
        except dist.DistNetworkError as error:
            if self._keeper in (None, self.rank):
                raise
            return f"rank {self._keeper} {self._why(error)}"
        if self._keeper == self.rank and not self._lingers:
            self._lingers = True
            atexit.register(_linger, self._kept, self._store, self.world)
        return first

    def leave(self) -> None:
        """Ends the connections, so that who waits for this rank, or will, notices at once. From any thread."""
        for peer in set(range(self.world)) - {self.rank}:
            try:  # gloo closes a connection on which a wait took too long; its abort() does nothing
                nothing = torch.empty(1, dtype=torch.uint8)
                self.torch_group.recv([nothing], peer, _LEAVING).wait(datetime.timedelta(milliseconds=1))
            except RuntimeError:
                pass

    def abort(self, reason: str) -> None:
        """Ends the world: collectives of all ranks raise, now and later, with the first reason that was declared."""
        try:
            self.declare(f"rank {self.rank} {reason}")
        except RuntimeError:
            pass  # the store is gone; that this rank leaves is noticed all the same
        self.leave()

    def _why(self, error: RuntimeError) -> str:
        text = str(error)
        if "imed out" in text or "timeout" in text:
            return f"did not join within {self._patience.total_seconds():g} s"
        return f"is gone ({(text.splitlines() or [text])[0].rpartition('] ')[2].partition('. This is')[0]})"

    # ---- before there is an engine

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, as JSON has it: torch's own way with objects would unpickle what comes."""
        text = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.torch_group)
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, _tensor(bytearray(text.ljust(longest))), group=self.torch_group)
        return [json.loads(bytes(each[: int(size)].tolist())) for each, size in zip(texts, sizes)]

    def check_alike(self, what: dict[str, Any]) -> None:
        """Raises RankError, on every rank, where a value differs from rank 0's."""
        mine = {name: json.dumps(value, default=str) for name, value in what.items()}
        digest = hashlib.blake2b(json.dumps(mine).encode()).hexdigest()
        if len(set(self.gathered(digest))) == 1:
            return
        first = self.gathered(mine)[0]
        names = [n for n in {**first, **mine} if first.get(n) != mine.get(n)]
        told = (names[0], mine.get(names[0]), first.get(names[0])) if names else None
        rank, (name, theirs, zeros) = next((r, told) for r, told in enumerate(self.gathered(told)) if told)
        raise RankError(
            f"overspill: {name} is {_short(theirs)} on rank {rank} and {_short(zeros)} on rank 0; ranks of one engine "
            "need the same model and configuration"
        )

    def close(self) -> None:
        self.closed = True
        if dist.is_initialized():
            dist.destroy_process_group(self.torch_group)


def _keeper(process_group: Any) -> int | None:
    """The rank of the group whose process has the store; None where it is torchrun's agent, or nobody of the group."""
    base = distributed_c10d._get_default_store()
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    ranks = dist.get_process_group_ranks(process_group)
    return ranks.index(0) if 0 in ranks else None


def _linger(kept: Any, store: Any, world: int) -> None:
    """At exit, for the rank whose process keeps the store: all others but one, which is lost, have heard why the world
    ends, or had the time. `kept`, only held, is what other processes reach; `store` is a connection to it."""
    until = time.monotonic() + LAST_WORDS_SECONDS
    try:
        while sum(store.check([f"{_HEARD}{rank}"]) for rank in range(world)) < world - 1:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
    except RuntimeError:
        pass  # nobody can be told any more


def _tell_why(reference: weakref.ref) -> None:
    """At exit. The other ranks need not wait for one that ends by an exception."""
    group, error = reference(), getattr(sys, "last_value", None)
    if group is not None and not group.closed and error is not None:
        group.abort(f"failed: {type(error).__name__}: {error}")


def counted_elsewhere(
    model_group: Group | None,
    model: nn.Module,
    replicated: Iterable[Any] | Mapping[Any, str],
    copies: Mapping[str, str] = types.MappingProxyType({}),
) -> frozenset[int]:
    """The ids of those parameters of `replicated`, and of `copies` (names, each with one that all ranks have), that a
    lower rank of the group holds too: its norm counts them. Collective. Raises ValueError for what is no parameter of
    the model, RankError where no other rank has a copy."""
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    keys = {id(parameters[name]): key for name, key in copies.items()}
    for given in replicated:
        p = parameters.get(given) if isinstance(given, str) else given
        if id(p) not in names:
            raise ValueError(f"overspill: replicated names {given!r:.80}, which is no parameter of the model")
        keys[id(p)] = str(replicated[given]) if isinstance(replicated, Mapping) else names[id(p)]
    if model_group is None:
        return frozenset()
    said = model_group.gathered(sorted(keys.values()))
    for rank, theirs in enumerate(said):
        lone = [key for key in theirs if sum(key in each for each in said) == 1]
        if lone:
            raise RankError(
                f"overspill: replicated names {lone[0]} on rank {rank} of model_group and on no other: name it "
                "on all that hold it, or on none"
            )
    lower = {key for theirs in said[: model_group.rank] for key in theirs}
    return frozenset(p for p, key in keys.items() if key in lower)


class Checksums:
    """Of what each rank read by itself, compared once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._sums[name] = zlib.crc32(memoryview(flat.numpy()))

    def compare(self, group: Group) -> None:
        group.check_alike({f"the checksum of {name}": value for name, value in self._sums.items()})


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Rank 0's parameters and buffers, on all ranks, as DistributedDataParallel does at its start."""
    for tensor in _once(map(memory_of, (*model.parameters(), *model.buffers()))):
        if tensor.numel():
            whole = tensor.detach().cpu().contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), group=group.torch_group, group_src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)


def sampler(data: Any, group: Group, seed: int) -> DistributedSampler:
    """Each rank's part of a permutation, another one in every epoch that is begun."""
    return _EverySampler(data, group.world, group.rank, shuffle=True, seed=seed)


class _EverySampler(DistributedSampler):
    """Begins the next epoch by itself: who forgets set_epoch gets no epoch twice."""

    def __iter__(self) -> Iterator[int]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


def _once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _tensor(buffer: Any) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _short(text: str | None) -> str:
    return "missing" if text is None else text if len(text) <= 80 else text[:77] + "..."
