"""Ranks: processes that torchrun, or torch.distributed in another way, started, and that share one model.

The core moves bytes (bindings/group_communicator.cc); here is what it calls of torch.distributed, and what ranks agree
on before there is an engine.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from . import _core
from ._core import EngineFailed, OverspillError
from .divided import memory_of
from .fate import LAST_WORDS_SECONDS, Fate, first_line
from .messages import Line, Messages

CONNECT_PATIENCE = datetime.timedelta(seconds=60)
LONGEST_BYTES = 1 << 30  # of what a rank says as text: as a manifest
_LEAVING = 3  # a tag; messages have others


class RankError(_core.OverspillError):
    """Ranks differ where they have to be alike. Every rank raises it; the message names the rank and what differs."""


def join(process_group: Any = None, timeout_seconds: float = 1800.0) -> Group | None:
    """The ranks of `process_group`, None for the default group, as a group of their own; None where there is one rank.
    Collective. Raises EngineFailed where another rank cannot come."""
    with Joining(process_group) as joining:
        return joining.join(timeout_seconds)[0]


class Joining:
    """`with` around all that makes an engine: what is raised inside on one rank ends the others, whatever they wait in,
    with an error that names that rank and its reason (fate.py). But for RankError, which all of them raise.

    Where nobody has called init_process_group yet, and the environment is that of torchrun (WORLD_SIZE above 1), it is
    called here, with gloo. All ranks of the groups enter it, as often as the others.
    """

    def __init__(self, process_group: Any = None, model_group: Any = None):
        self._process_group, self._model_group = process_group, model_group
        self._fates: list[Fate | None] = []
        self._groups: list[Group] = []

    def __enter__(self) -> Joining:
        try:
            self._fates.append(_fate(self._process_group))
            self._fates.append(None if self._model_group is None else _fate(self._model_group))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def join(self, timeout_seconds: float) -> tuple[Group | None, Group | None]:
        """The ranks of the two groups, each as a group of their own; None where there is one rank."""
        for fate in self._fates:  # nobody connects before all have come: a connection is waited for in vain
            if fate is not None:
                fate.wait_for_all(timeout_seconds)
        joined = []
        for given, fate in zip((self._process_group, self._model_group), self._fates, strict=True):
            joined.append(None if fate is None else Group(given, timeout_seconds, fate))
            self._groups += joined[-1:] if joined[-1] else []
        return joined[0], joined[1]

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        tell(error, self._groups)
        for group in self._groups:
            group.close()
        for fate in self._fates:
            if fate is not None and fate not in [group.fate for group in self._groups]:
                fate.failed(error)


def tell(error: BaseException, groups: Iterable[Group | None]) -> None:
    """The other ranks, that this one fails with `error`. But for RankError: all of them raise it."""
    for group in groups:
        if group is not None and not isinstance(error, RankError):
            group.abort(error)


def _fate(process_group: Any) -> Fate | None:
    """None where there is one rank."""
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
    return Fate(process_group)


class Group:
    """Sends and receives between pairs of ranks, over a torch.distributed group that nobody else uses. `fate` is what
    its ranks share; None: they make one here."""

    def __init__(self, process_group: Any = None, timeout_seconds: float = 1800.0, fate: Fate | None = None):
        self.rank, self.world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.fate = fate or Fate(process_group)
        self.patience = datetime.timedelta(seconds=timeout_seconds)
        self._lost: int | None = None  # the rank that was the first to be gone, as seen from here
        try:
            self.torch_group = self._connect(process_group)
        except RuntimeError as error:
            raise EngineFailed(f"overspill: {self.fate.failed(error)}") from error
        self._calls = Messages(self, 0)
        self._words = Messages(self, 4)  # while the core makes calls too
        self._passes = Messages(self, 16)  # of forward and backward; Lines have the tags between
        self.lines: list[Line] = []
        self.fate.shared_with(self)

    def _connect(self, process_group: Any) -> Any:
        """Of torch's own makers of groups, one gives two groups of the same ranks the same name in the store, where the
        first has ended: the second would connect to where the first was. The other one needs the whole world."""
        backend = dist.get_backend(process_group)
        if backend in ("gloo", "nccl", "undefined"):
            return dist.ProcessGroupGloo(self.fate.addresses(), self.rank, self.world, CONNECT_PATIENCE)
        return dist.new_group(
            dist.get_process_group_ranks(process_group),
            timeout=CONNECT_PATIENCE,  # of connecting alone: what is waited for later has `patience`
            backend=backend,
            use_local_synchronization=process_group is not None,
            group_desc="overspill",
        )

    # ---- what the core calls

    def exchange(self, sends: Sequence[Sequence[Any]], receives: Sequence[Sequence[Any]]) -> str:
        """Sends and receives lists of buffers, by rank (Messages.exchange). Returns when all is done: "", or what went
        wrong."""
        return self._calls.exchange(sends, receives)

    def declare(self, why: str) -> str:
        """Tells all ranks why the world ends; the first reason counts, and is returned."""
        return self.fate.declare(why, self._lost)

    def leave(self) -> None:
        """Ends the connections, so that who waits for this rank, or will, notices at once. From any thread."""
        if self.torch_group is None:
            return
        for peer in set(range(self.world)) - {self.rank}:
            try:  # gloo closes a connection on which a wait took too long; its abort() does nothing
                nothing = torch.empty(1, dtype=torch.uint8)
                self.torch_group.recv([nothing], peer, _LEAVING).wait(datetime.timedelta(milliseconds=1))
            except RuntimeError:
                pass

    def lost(self, peer: int, error: RuntimeError) -> str:
        """What there is to say of a rank that was waited for."""
        if self._lost is None:
            self._lost = peer
        text = str(error)
        if "imed out" in text or "timeout" in text:
            return f"rank {peer} did not join within {self.patience.total_seconds():g} s"
        return f"rank {peer} is gone ({first_line(error)})"

    # ---- of this rank

    def abort(self, error: BaseException) -> None:
        """Ends the world: this rank fails with `error`. Collectives of all ranks raise, now and later, with the first
        reason that was declared. From any thread."""
        self.fate.failed(error)
        self.leave()

    def close(self) -> None:
        self.fate.over()
        group, self.torch_group = self.torch_group, None
        if isinstance(group, dist.ProcessGroup) and dist.is_initialized():
            dist.destroy_process_group(group)
        for messages in (self._calls, self._words, self._passes, *self.lines):
            messages.close()

    # ---- before there is an engine

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, as JSON has it: torch's own way with objects would unpickle what comes."""
        text = bytearray(json.dumps(value).encode())
        if len(text) > LONGEST_BYTES:
            raise RankError(
                f"overspill: {len(text)} bytes are too many to be told to other ranks: {LONGEST_BYTES} at most"
            )
        sizes = [bytearray(8) for _ in range(self.world)]
        sizes[self.rank][:] = len(text).to_bytes(8, "little")
        self._swap([sizes[self.rank]] * self.world, sizes)
        texts = [
            text if rank == self.rank else bytearray(self._bounded(rank, size))
            for rank, size in enumerate(sizes)
        ]
        self._swap([text] * self.world, texts)
        return [json.loads(each) for each in texts]

    def _bounded(self, rank: int, size: bytes) -> int:
        """What a rank says that it will send: memory for it is not taken unseen."""
        declared = int.from_bytes(size, "little")
        if declared > LONGEST_BYTES:
            raise EngineFailed(
                f"overspill: rank {rank} announces {declared} bytes of text; {LONGEST_BYTES} are the most"
            )
        return declared

    def spread(self, data: memoryview) -> None:
        """Rank 0's bytes into `data` of all ranks, which is as long everywhere. Rank 0 sends each a part, and all send
        theirs to the others, so nobody sends more than twice the bytes."""
        ends = [len(data) * rank // self.world for rank in range(self.world + 1)]
        parts = [data[begin:end] for begin, end in itertools.pairwise(ends)]
        nothing = [data[:0]] * self.world
        first = self.rank == 0
        self._swap(parts if first else nothing, nothing if first else [parts[self.rank], *nothing[1:]])
        mine = [data[:0], *[parts[self.rank]] * (self.world - 1)]  # rank 0 has it all
        self._swap(mine, nothing if first else parts)

    # ---- in forward and backward

    def tables(self, mine: bytearray) -> list[bytearray]:
        """Takes this rank's bytes and returns those of all ranks, by rank; all give the same number."""
        found = [mine if rank == self.rank else bytearray(len(mine)) for rank in range(self.world)]
        self._swap([mine] * self.world, found, self._passes)
        return found

    def all_gather(self, parts: Sequence[torch.Tensor]) -> None:
        """Fills in the parts of the other ranks, in the CPU's memory, by rank; this rank's is there."""
        buffers = [memoryview(part.view(torch.uint8).numpy()) for part in parts]
        self._swap([buffers[self.rank]] * self.world, buffers, self._passes)

    def _swap(self, sends: Sequence[Any], receives: Sequence[Any], messages: Messages | None = None) -> None:
        """By rank. Raises EngineFailed when a rank is lost."""
        given = [list(sends), list(receives)]
        for of in given:
            of[:] = [[each] if len(each) > 0 and rank != self.rank else [] for rank, each in enumerate(of)]
        if why := (messages or self._words).exchange(*given):
            first = self.declare(why)
            self.leave()
            raise EngineFailed(f"overspill: {first}")

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
            group.spread(memoryview(whole.view(-1).view(torch.uint8).numpy()))
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)


def sampler(data: Any, world: int, rank: int, seed: int) -> DistributedSampler:
    """The part of that rank of a permutation, another one in every epoch that is begun."""
    return _EverySampler(data, world, rank, shuffle=True, seed=seed)


class _EverySampler(DistributedSampler):
    """Begins the next epoch by itself: who forgets set_epoch gets no epoch twice."""

    def __iter__(self) -> Iterator[int]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


def _once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _short(text: str | None) -> str:
    return "missing" if text is None else text if len(text) <= 80 else text[:77] + "..."


def rank_0s(group: Group | None, value: Any) -> Any:
    """What rank 0 has, on all ranks, which all call this."""
    return value if group is None else group.gathered(value)[0]


class ByOne:
    """`with` around what one rank does for all: what it raises, or has put into the list, all raise at the end."""

    def __init__(self, group: Group | None, call: str):
        """call: of the script's, by name."""
        self.group, self.call = group, call
        self.failures: list[Exception] = []

    def __enter__(self) -> list[Exception]:
        return self.failures

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C
        failure = error or next(iter(self.failures), None)
        if self.group is not None:
            said = self.group.gathered(None if failure is None else str(failure))
            rank, theirs = next(
                ((rank, text) for rank, text in enumerate(said) if text is not None), (0, None)
            )
            if failure is None and theirs is not None:
                raise OverspillError(f"overspill: {self.call} failed on rank {rank}: {theirs}")
        if failure is not None and error is None:
            raise failure
