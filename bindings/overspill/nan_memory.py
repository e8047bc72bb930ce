"""What released parameters lie over: memory that reads as NaN in full length, for the price of a few pages.

On the host each has a mapping of its own, so that what writes to its raw address changes no other's, and its address is
no other's: by that scripts tell which parameters share memory. A process may have some 65,000 mappings; of what would
take more than a quarter of them, parameters share one, each at an address of its own while there are any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _core, place

MAPPINGS_MOST = 1 << 14
_PLACES = 1 << 14  # of 64 bytes, in the shared mapping
_places = itertools.count(1)
_shared: dict[torch.device, torch.Tensor] = {}


def nan_like(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    where: place.Place = place.HOST,
    core: Any = None,
) -> torch.Tensor:
    """A tensor over such memory; dense, so its elements bound its memory. `core`: an engine's, which has the memory of
    an accelerator."""
    size = max(64, (math.prod(shape) * dtype.itemsize + 63) // 64 * 64)
    memory = _own.make(size) if where.on_host else None
    if memory is None:
        memory = _of_all(size, where, core)
    return memory.view(dtype).as_strided(shape, stride, 0)


class _Own:
    """The mappings that single parameters have."""

    def __init__(self):
        self._held: list[tuple[StorageWeakRef, int]] = []
        self._mappings = 0
        self._refused = 0

    def make(self, size: int) -> torch.Tensor | None:
        """None where the process has too many, or no address space for it."""
        # As many as the kernel has to keep for it, at most (host_memory.cc, nan_window_bytes).
        mappings = max(min(size // (2 << 20) + 1, 17), size // (64 << 20) + 1)
        if self._mappings + mappings > MAPPINGS_MOST:
            self._refused += 1
            if self._refused % 256 == 1:  # a look takes as long as there are many
                self._forget_freed()
            if self._mappings + mappings > MAPPINGS_MOST:
                return None
        try:
            memory = from_dlpack(_core.nan_capsule(size))
        except MemoryError:
            return None
        self._held.append((StorageWeakRef(memory.untyped_storage()), mappings))
        self._mappings += mappings
        return memory

    def _forget_freed(self) -> None:
        self._held = [(storage, mappings) for storage, mappings in self._held if not storage.expired()]
        self._mappings = sum(mappings for _, mappings in self._held)


_own = _Own()


def _of_all(size: int, where: place.Place, core: Any) -> torch.Tensor:
    begin = 64 * (next(_places) % _PLACES) if where.on_host else 0
    whole = size + (64 * _PLACES if where.on_host else 0)
    mapping = _shared.get(where.device)
    if mapping is None or mapping.numel() < whole:
        made = _core.nan_capsule(whole) if where.on_host else core.nan_capsule(whole, *where.dlpack)
        mapping = _shared[where.device] = from_dlpack(made)
    own = mapping[begin:]
    return from_dlpack(to_dlpack(own)) if begin else own  # with a storage of its own
