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

from . import _core, heap

FROM = 64 << 10  # bytes; smaller ones are not worth a transfer


class Kept:
    """The bytes of one storage in the engine's keeping, as long as something refers to it."""

    __slots__ = ("__weakref__", "activation", "bytes", "digest", "source")

    def __init__(self, activation: Any, source: StorageWeakRef, size: int, digest: int):
        self.activation, self.source, self.bytes, self.digest = activation, source, size, digest


class Moved:
    """A tensor that autograd has saved and the engine keeps."""

    __slots__ = ("dtype", "kept", "offset", "size", "stride")

    def __init__(self, kept: Kept, tensor: torch.Tensor):
        self.kept, self.dtype = kept, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """The caller's own: whoever writes into it, as some backwards do, changes nothing for others."""
        kept = self.kept
        memory = torch.UntypedStorage(kept.bytes)
        kept.activation.read(memory.data_ptr(), kept.bytes)
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)


class Moving:
    """Of one engine: `core` has an arena of `most` bytes. `freed` counts what leaves torch's memory."""

    def __init__(self, core: Any, most: int, freed: heap.Freed):
        self.core, self.most, self.freed = core, most, freed
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()  # by storage

    def keep(self, tensor: torch.Tensor) -> Moved | None:
        """None where the tensor is better left where it is: small, a small part of a large storage, larger than the
        arena, a parameter that no engine has, or not in the CPU's memory."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not FROM <= size <= self.most or 2 * tensor.numel() * tensor.itemsize < size:
            return None
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or storage.data_ptr() == 0:
            return None
        if tensor.is_leaf and tensor.requires_grad:
            return None
        # A weak reference keeps the address: no other storage can have it.
        kept = self._kept.get(storage._cdata)
        digest = _core.digest(storage.data_ptr(), size)
        if kept is None or kept.digest != digest or kept.source.expired():
            activation = self.core.keep_activation(storage.data_ptr(), size)
            if activation is None:
                return None
            self._kept[storage._cdata] = kept = Kept(activation, StorageWeakRef(storage), size, digest)
            self.freed.add(size)
        return Moved(kept, tensor)
