"""Activations that the engine keeps: what autograd saves in forward goes into the engine's memory and on to its disks,
and comes back in backward, to the bit (`budget.activations`, engine/activations/activation_stash.h).

What is kept is a storage, once for all tensors that are saved of it: views of one another stay so. Whether it is still
the same is asked of its bytes, since not all that writes into a tensor counts versions: what is saved after a change
keeps the storage anew, and what was saved before has the bytes of before."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from . import _core, heap

FROM = 64 << 10  # bytes; smaller ones are not worth a transfer


class Kept:
    """The bytes of one storage in the engine's keeping, as long as something refers to it."""

    __slots__ = ("__weakref__", "activation", "digest", "source")

    def __init__(self, activation: Any, source: StorageWeakRef, digest: int):
        self.activation, self.source, self.digest = activation, source, digest


class Moved:
    """A tensor that autograd has saved and the engine keeps."""

    __slots__ = ("dtype", "kept", "offset", "size", "stride")

    def __init__(self, kept: Kept, tensor: torch.Tensor):
        self.kept, self.dtype = kept, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        memory = from_dlpack(self.kept.activation.hold())
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class Moving:
    """Of one engine: `core` has an arena for activations. `freed` counts what leaves torch's memory."""

    def __init__(self, core: Any, freed: heap.Freed):
        self.core, self.freed = core, freed
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()  # by storage

    def keep(self, tensor: torch.Tensor) -> Moved | None:
        """None where the tensor is better left where it is: small, a small part of a large storage, or more than there
        is room for."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < FROM or 2 * tensor.numel() * tensor.itemsize < size or tensor.is_conj() or tensor.is_neg():
            return None
        # A weak reference keeps the address: no other storage can have it.
        kept = self._kept.get(storage._cdata)
        digest = _core.digest(storage.data_ptr(), size)
        if kept is None or kept.digest != digest or kept.source.expired():
            activation = self.core.keep_activation(storage.data_ptr(), size)
            if activation is None:
                return None
            self._kept[storage._cdata] = kept = Kept(activation, StorageWeakRef(storage), digest)
            self.freed.add(size)
        return Moved(kept, tensor)
