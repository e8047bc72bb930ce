"""The memory of the whole process, beside what it may take (`budget.process`). What forward saves is counted, and what
backward is given and makes; the process is looked at before it has grown much. So a run that does not fit ends in its
first step with a message, which says what would do, and not by the kernel's killer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import heap
from .._core import BudgetError
from ..config import Config
from ..divided import memory_of
from ..layers import logits
from ..memory import human, own_bytes

_MOST_BETWEEN = 32 << 20  # bytes saved, or made in backward, between two looks
_SECONDS_BETWEEN = 0.01  # of backward, which may make more than the engine sees


class Watch:
    """Of one engine. Only the thread that trains uses it."""

    def __init__(self, config: Config):
        assert config.budget.process is not None
        self.limit: int = config.budget.process
        self._config = config
        self._every = min(_MOST_BETWEEN, max(1, self.limit // 64))
        self.heads: frozenset[int] = frozenset()  # ids of linear layers outside the model's blocks
        self._saved = self._since = self._largest = 0  # bytes since the pass began, and since the last look
        self._seen: dict[int, StorageWeakRef] = {}  # storages that this pass has saved
        self._looked = 0.0  # when

    def begin_pass(self) -> None:
        self._saved = self._since = self._largest = 0
        self._seen.clear()

    def saved(self, tensor: torch.Tensor, module: Any) -> None:
        """Called for a tensor that autograd keeps in torch's memory. Raises BudgetError."""
        memory = memory_of(tensor)
        if memory.layout is torch.strided:
            storage = memory.untyped_storage()
            seen = self._seen.get(storage._cdata)
            if seen is not None and not seen.expired():
                return
            self._seen[storage._cdata] = StorageWeakRef(storage)
            size = min(memory.nbytes, storage.nbytes())
        else:
            size = memory.nbytes
        self._saved += size
        self._since += size
        self._largest = max(self._largest, size)
        if self._since >= self._every:
            self._since = 0
            self.look(f"forward, in {type(module).__name__}")

    def came(self, size: int) -> None:
        """Called for a gradient that has arrived, and for what the engine gives backward. Raises BudgetError."""
        self._since += size
        self._largest = max(self._largest, size)
        if self._since >= self._every or time.monotonic() - self._looked >= _SECONDS_BETWEEN:
            self._since = 0
            self.look("backward")

    def before(self, module: nn.Linear, arguments: Any) -> None:
        """Called before a linear layer, whose result may be far larger than all before it: the logits of a vocabulary,
        whose loss makes two more in fp32. Raises BudgetError."""
        given = arguments[0] if arguments else None
        if not isinstance(given, torch.Tensor) or isinstance(module.__dict__.get("forward"), logits.Layer):
            return
        kind = given.device.type
        width = (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype).itemsize
        elements = given.numel() // max(1, module.in_features) * module.out_features
        result = elements * width
        if result > self._every:
            loss = 2 * 4 * elements if torch.is_grad_enabled() and id(module) in self.heads else 0
            self.look(f"forward, before a Linear whose result takes {human(result)}", result + loss)

    def look(self, where: str, ahead: int = 0) -> None:
        """Raises BudgetError where the process has, or would have with the next tensors, more than it may take.
        `ahead`: what they are known to take."""
        # A result of the next function, and what it needs meanwhile.
        ahead = max(ahead, self._every, 2 * self._largest)
        self._looked = time.monotonic()
        if own_bytes() + ahead <= self.limit:
            return
        heap.give_back()
        now = own_bytes()
        if now + ahead > self.limit:
            raise BudgetError(self._text(now, where))

    def _text(self, now: int, where: str) -> str:
        budget, engine = self._config.budget, self._config.engine
        ways = []
        if engine.recompute == "none":
            ways.append('engine.recompute = "blocks" (backward computes blocks again)')
        if budget.activations is None and budget.nvme:
            ways.append("budget.activations (what forward saves moves to NVMe)")
        if budget.logits is None:
            ways.append("budget.logits (the loss of a large vocabulary in tiles)")
        ways += [
            f"a smaller budget.host than {human(budget.host)}",
            "smaller micro-batches",
            "a larger budget.process",
        ]
        return (
            f"overspill: budget.process = {human(self.limit)}: the process has {human(now)} in {where}, of which "
            f"forward has saved {human(self._saved)} in this pass, and the next tensors would not fit. What would do: "
            + "; ".join(ways)
        )
