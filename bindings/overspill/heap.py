"""What the process has freed goes back to the kernel. glibc keeps freed memory for later allocations: tensors of some
ten MiB lie in its heap, one small allocation behind each keeps all of it, and a model that was handed over would stay
in memory. Where malloc_trim is not there (musl), the allocator gives memory back by itself."""

from __future__ import annotations

import ctypes

EVERY = 64 << 20  # bytes freed between two calls of `give_back`

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """The pages of the heap that nothing lies in."""
    if _trim is not None:
        _trim(0)


class Freed:
    """Counts what is freed, and gives it back now and then."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= EVERY:
            self._bytes = 0
            give_back()
