"""Activations that the engine keeps: what autograd saves in forward goes into the engine's memory and on to its disks,
and comes back in backward, to the bit (`budget.activations`, engine/activations/activation_stash.h).

What is kept is a storage, once for all tensors that are saved of it: views of one another stay so. Whether it is still
the same is asked of its bytes, since not all that writes into a tensor counts versions: what is saved after a change
keeps the storage anew, and what was saved before has the bytes of before."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _core, heap
from ..config.values import LEAST_MOVED

FROM = LEAST_MOVED
PARTS = 8  # a tensor is a part of its storage as large as one of so many, or the storage is not kept for it


class Kept:
    """The bytes of one storage in the engine's keeping, as long as something refers to it."""

    __slots__ = ("__weakref__", "_copy", "activation", "bytes", "digest", "mark", "owner", "source")

    def __init__(self, owner: Moving, activation: Any, source: StorageWeakRef, size: int, digest: int):
        self.activation, self.source, self.bytes, self.digest = activation, source, size, digest
        self.owner, self.mark = owner, owner.kept_bytes  # before it
        self._copy: StorageWeakRef | None = None

    def copy(self) -> torch.UntypedStorage:
        """In torch's memory; one for all who have it at the same time, as what was saved is one storage."""
        living = self._copy and torch.UntypedStorage._new_with_weak_ptr(self._copy.cdata)
        if living is not None:
            return living
        begin = time.perf_counter()
        storage = torch.UntypedStorage(self.bytes)
        self.activation.read(storage.data_ptr(), self.bytes)
        self.owner.take_seconds += time.perf_counter() - begin
        self._copy = StorageWeakRef(storage)
        return storage


class Moved:
    """A tensor that autograd has saved and the engine keeps."""

    __slots__ = ("dtype", "kept", "offset", "size", "stride")

    def __init__(self, kept: Kept, tensor: torch.Tensor):
        self.kept, self.dtype = kept, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """A copy: whoever writes into it, as some backwards do, does not change what is kept."""
        return torch.empty(0, dtype=self.dtype).set_(self.kept.copy(), self.offset, self.size, self.stride)


class Moving:
    """Of one engine: `core` has an arena of `most` bytes. `freed` counts what leaves torch's memory; `watch`
    (watch.Watch), where the whole process has a budget, what comes back."""

    def __init__(self, core: Any, most: int, freed: heap.Freed, watch: Any):
        self.core, self.most, self.freed, self.watch = core, most, freed, watch
        self.kept_bytes = 0  # since the start
        self.keep_seconds = 0.0  # that it took to keep them, or to find them kept
        self.take_seconds = 0.0  # that it took to give them back
        self._told = False
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()  # by storage

    def keep(self, tensor: torch.Tensor) -> Moved | None:
        """None where the tensor is better left where it is: small, a small part of a large storage, larger than the
        arena, a parameter that no engine has, or not in the CPU's memory."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < FROM or PARTS * tensor.numel() * tensor.itemsize < size:
            return None
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or storage.data_ptr() == 0:
            return None
        if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return None
        if size > self.most:
            self._tell_of(size)
            return None
        begin = time.perf_counter()
        try:
            kept = self._keep(storage, size)
        finally:
            self.keep_seconds += time.perf_counter() - begin
        return None if kept is None else Moved(kept, tensor)

    def _keep(self, storage: torch.UntypedStorage, size: int) -> Kept | None:
        # A weak reference keeps the address: no other storage can have it.
        kept = self._kept.get(storage._cdata)
        digest = _core.digest(storage.data_ptr(), size)
        if kept is None or kept.digest != digest or kept.source.expired():
            activation = self.core.keep_activation(storage.data_ptr(), size)
            if activation is None:
                return None
            self._kept[storage._cdata] = kept = Kept(self, activation, StorageWeakRef(storage), size, digest)
            self.freed.add(size)
            self.kept_bytes += size
        return kept

    def kept_since(self, tensors: Iterable[torch.Tensor], mark: int) -> int:
        """Bytes of these that were kept since `kept_bytes` was `mark`."""
        storages = {each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided}
        found = [kept for each in storages if (kept := self._kept.get(each)) is not None]
        return sum(kept.bytes for kept in found if kept.mark >= mark)

    def _tell_of(self, size: int) -> None:
        if self._told:
            return
        self._told = True
        warnings.warn(
            f"overspill: a tensor of {size} bytes that autograd saves stays in torch's memory, as all that are larger "
            f"than budget.activations, which is {self.most}: give more to have them moved",
            stacklevel=2,
        )
