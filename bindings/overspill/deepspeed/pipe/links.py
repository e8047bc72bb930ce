"""Tensors from one stage to its neighbours. The sender describes the first tensors of a batch (dtype, shape); later
ones must match them, unless the pipeline's shapes are dynamic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._core import OverspillError
from ...messages import Line

Value = torch.Tensor | tuple[torch.Tensor, ...]
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_MOST_NUMBERS = 1 << 16  # of a description; a sender that is out of step would ask for any amount of memory


class PipelineError(OverspillError, RuntimeError):
    """What a pipeline cannot do: a call that it has no meaning for, values that it cannot send."""


@dataclass(frozen=True)
class TensorMeta:
    """Describes what a stage sends: whether it is a tuple, and each tensor's dtype, requires_grad and shape."""

    is_tuple: bool
    tensors: tuple[tuple[torch.dtype, bool, tuple[int, ...]], ...]

    @classmethod
    def of(cls, value: Any) -> TensorMeta:
        """Raises PipelineError for what is neither a tensor nor a tuple of tensors."""
        for each in tensors_of(value):
            if (
                not isinstance(each, torch.Tensor)
                or each.dtype not in _DTYPES
                or each.layout is not torch.strided
            ):
                raise PipelineError(
                    f"overspill: a stage of a pipeline gives its next one a tensor or a tuple of tensors, and this one "
                    f"gave {type(each).__name__}: change what its last layer returns"
                )
        return cls(
            isinstance(value, tuple),
            tuple((t.dtype, t.requires_grad, tuple(t.shape)) for t in tensors_of(value)),
        )

    def numbers(self) -> list[int]:
        found = [int(self.is_tuple), len(self.tensors)]
        for dtype, requires_grad, shape in self.tensors:
            found += [_DTYPES.index(dtype), int(requires_grad), len(shape), *shape]
        return found

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> TensorMeta:
        at, tensors = 2, []
        for _ in range(numbers[1]):
            dtype, requires_grad, dims = numbers[at : at + 3]
            at += 3 + dims
            tensors.append((_DTYPES[dtype], bool(requires_grad), tuple(numbers[at - dims : at])))
        return cls(bool(numbers[0]), tuple(tensors))


def tensors_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Link:
    """Of this stage with another. Both make matching calls, in the same order. One thread. A stage that is lost ends
    the others with EngineFailed, whatever they wait in. What is sent goes by way of the host."""

    def __init__(self, line: Line, device: torch.device, dynamic: bool):
        """device: where tensors are received. dynamic: each is described anew."""
        self._line, self._device, self._dynamic = line, device, dynamic
        self._sent: TensorMeta | None = None
        self._received: TensorMeta | None = None

    def begin(self) -> None:
        """A batch begins: its first tensors are described."""
        self._sent = self._received = None

    def send(self, value: Value) -> None:
        """Returns before it has arrived; `finish` waits."""
        meta = TensorMeta.of(value)
        self._line.begin_sending()
        if self._sent is None or self._dynamic:
            numbers = meta.numbers()
            if len(numbers) > _MOST_NUMBERS:
                raise PipelineError(
                    f"overspill: a stage gave {len(meta.tensors)} tensors: return fewer, stacked"
                )
            self._line.send(torch.tensor([len(numbers)]))
            self._line.send(torch.tensor(numbers))
            self._sent = meta
        elif meta != self._sent:
            raise PipelineError(
                f"overspill: a stage gave {_said(meta)} after {_said(self._sent)} in one batch: give PipelineModule "
                "dynamic_shape=True"
            )
        self._send(value)

    def receive(self) -> tuple[Value, TensorMeta]:
        self._line.begin_receiving()
        if self._received is None or self._dynamic:
            count = torch.empty(1, dtype=torch.int64)
            self._line.receive(count)
            if not 2 <= int(count) <= _MOST_NUMBERS:
                raise PipelineError(
                    f"overspill: the stage before is out of step with this one: it sent {int(count)} numbers"
                )
            numbers = torch.empty(int(count), dtype=torch.int64)
            self._line.receive(numbers)
            self._received = TensorMeta.from_numbers(numbers.tolist())
        return self._receive(self._received), self._received

    def send_known(self, value: Value) -> None:
        """Sends tensors whose description the receiver already has."""
        self._line.begin_sending()
        self._send(value)

    def receive_known(self, meta: TensorMeta) -> Value:
        self._line.begin_receiving()
        return self._receive(meta)

    def _send(self, value: Value) -> None:
        """Copies: the script or a layer may change what it gave before it has arrived."""
        for each in tensors_of(value):
            if each.numel():
                self._line.send(each.detach().to("cpu", copy=True).contiguous())

    def _receive(self, meta: TensorMeta) -> Value:
        made = []
        for dtype, _, shape in meta.tensors:
            made.append(torch.empty(shape, dtype=dtype))
            if made[-1].numel():
                self._line.receive(made[-1])
        there = tuple(each.to(self._device) for each in made)
        return there if meta.is_tuple else there[0]

    def finish(self) -> None:
        """What was sent has arrived."""
        self._line.finish()


def _said(meta: TensorMeta) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, _, shape in meta.tensors)
