"""What scripts have of tensors that the engine holds, gradients and states of the optimizer: copies, which are written
back where the script wrote into them. Digests tell, since numpy counts no versions."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

from . import _core

RECENT = 2  # copies kept that nobody else has
_SWEEP_FROM = 16


class Copy:
    """`memory`: the tensor that has its memory, itself unless it is a DTensor; `digest`: of what the engine has."""

    def __init__(self, tensor: torch.Tensor, memory: torch.Tensor, digest: int):
        self.tensor, self.digest = tensor, digest
        self._storage = memory.untyped_storage()._cdata

    def references(self) -> int:
        return sys.getrefcount(self.tensor) + torch._C._storage_Use_Count(self._storage)

    def is_used(self) -> bool:
        """Whether somebody else may have the tensor, or one over its memory."""
        return self.references() > _UNUSED


_UNUSED = (lambda tensor: Copy(tensor, tensor, 0))(torch.empty(1)).references()


class Copies:
    """A copy is kept while the script may have it too; of the others the latest few.

    as_held: (key, tensor) -> its elements as the engine takes them, without a copy where they are so already
    take:    (key, elements) makes them the engine's
    give:    (key, tensor) writes what the engine has into the tensor; False where it has nothing any more
    """

    def __init__(
        self,
        as_held: Callable[[Any, torch.Tensor], torch.Tensor],
        take: Callable[[Any, torch.Tensor], None],
        give: Callable[[Any, torch.Tensor], bool],
    ):
        self._as_held, self._take, self._give = as_held, take, give
        self._copies: dict[Any, Copy] = {}
        self._recent: deque[Any] = deque()
        self._sweep_from = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._copies)

    def get(self, key: Hashable) -> torch.Tensor | None:
        copy = self._copies.get(key)
        return None if copy is None else copy.tensor

    def keep(self, key: Hashable, tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """What the script is given, or has given, of which the engine has the same."""
        self._copies[key] = Copy(tensor, memory, _digest(self._as_held(key, tensor)))
        self._recent.append(key)
        while len(self._recent) > RECENT:
            self._let_go(self._recent.popleft())
        if len(self._copies) > self._sweep_from:
            for each in [each for each in self._copies if each not in self._recent]:
                self._let_go(each)
            self._sweep_from = max(_SWEEP_FROM, 2 * len(self._copies))
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return any(copy.tensor is tensor for copy in self._copies.values())

    def drop(self, key: Hashable) -> None:
        """The script's tensor is its own from now on."""
        self._copies.pop(key, None)

    def clear(self, of: Callable[[Any], bool] | None = None) -> None:
        """Drops those whose keys `of` takes; None: all."""
        for key in [key for key in self._copies if of is None or of(key)]:
            del self._copies[key]
        self._recent = deque(key for key in self._recent if key in self._copies)

    def settle(self, key: Hashable) -> None:
        """The engine has what the script wrote."""
        copy = self._copies.get(key)
        if copy is None:
            return
        held = self._as_held(key, copy.tensor)
        digest = _digest(held)
        if digest != copy.digest:
            self._take(key, held)
            copy.digest = digest

    def settle_all(self) -> None:
        for key, copy in list(self._copies.items()):
            self.settle(key)
            if not copy.is_used():
                self._copies.pop(key, None)

    def renew(self, key: Hashable) -> None:
        """The script sees what the engine has now."""
        copy = self._copies.get(key)
        if copy is None:
            return
        if not copy.is_used() or not self._give(key, copy.tensor):
            del self._copies[key]
        else:
            copy.digest = _digest(self._as_held(key, copy.tensor))

    def renew_all(self) -> None:
        for key in list(self._copies):
            self.renew(key)

    def _let_go(self, key: Hashable) -> None:
        copy = self._copies.get(key)
        if copy is not None and not copy.is_used():
            self.settle(key)
            del self._copies[key]


def _digest(held: torch.Tensor) -> int:
    return _core.digest(held.data_ptr(), held.numel() * held.element_size())
