"""Tensors in files that have no name and end with the process: the kernel writes them out where memory is short."""

from __future__ import annotations

import errno
import math
import os
import tempfile
import warnings
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

from . import _core

FROM = 1 << 20  # bytes; smaller tensors are plain memory


def tensor(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, folder: str, what: str, way_out: str
) -> torch.Tensor:
    """Dense in the given memory order, with any content; to torch it is memory as any other. Raises OSError where the
    disk has no room for it: `what` says who keeps what there, `way_out` what to do."""
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    size = like.numel() * dtype.itemsize
    if size < FROM:
        return torch.empty_strided(shape, stride, dtype=dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not SIGBUS later
            memory = from_dlpack(_core.file_capsule(file.fileno(), size))
    except (OSError, MemoryError) as error:
        number = getattr(error, "errno", None) or errno.ENOMEM
        why = f"overspill: {what} ({size} bytes) in a file in {folder}: {os.strerror(number)}; {way_out}"
        raise OSError(number, why, folder) from None
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape, stride)


class Folder:
    """Where large tensors that are the script's lie in files. `path`: None where they lie in memory, from the beginning
    or since the disk had no room for one."""

    def __init__(self, path: str | None):
        self.path = path

    def tensor(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, what: str
    ) -> torch.Tensor | None:
        """As `tensor`; None where it is to lie in memory. A warning tells of a disk without room, once."""
        if self.path is None or math.prod(shape) * dtype.itemsize < FROM:
            return None
        try:
            return tensor(shape, stride, dtype, self.path, what, "it stays in memory, as all that follow")
        except OSError as error:
            self.path = None
            warnings.warn(error.strerror, stacklevel=3)
            return None
