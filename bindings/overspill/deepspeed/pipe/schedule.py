"""What a stage does at each moment of a batch: lists of instructions, which engine.py runs.

Micro-batch m is in the forward of stage s at moment 2 m + s, and in its backward at 2 m + 2 S - 1 - s, of S stages (one
forward, one backward: Narayanan et al. 2019, PipeDream; its synchronous form, Narayanan et al. 2021, arXiv 2006.09503).
So stage s keeps the activations of at most S - s micro-batches, and what one stage sends at a moment the next one
receives at the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One thing to do. `kwargs` are attributes too."""

    def __init__(self, **kwargs: Any):
        self.name, self.kwargs = type(self).__name__, kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """The update, at the end of a batch."""


class ReduceGrads(PipeInstruction):
    """Sums gradients of the ranks that share a stage; the engine does it in backward and in its step."""


class ReduceTiedGrads(PipeInstruction):
    """Sums gradients of a layer that several stages hold."""


class BufferOpInstruction(PipeInstruction):
    """What belongs to one of the micro-batches under way: `buffer_id`."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """The first stage takes the next inputs, the last one the next labels."""


class ForwardPass(BufferOpInstruction):
    """Of this stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Of this stage's layers."""


class SendActivation(BufferOpInstruction):
    """To the next stage."""


class RecvActivation(BufferOpInstruction):
    """From the stage before."""


class SendGrad(BufferOpInstruction):
    """Of what was received, to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Of what was sent, from the next stage."""


class PipeSchedule:
    """Iterates over lists of instructions, one list per moment. A class of its own gives `steps` and
    `num_pipe_buffers`."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int):
        """stage_id: this rank's, from 0."""
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._moments: Iterator[list[PipeInstruction]] | None = None

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The lists, in order."""
        raise NotImplementedError(
            f"overspill: {type(self).__name__} needs steps(), a generator of instructions"
        )

    def num_pipe_buffers(self) -> int:
        """How many micro-batches are under way at once, at most."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self._moments = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._moments is None:
            self._moments = self.steps()
        return next(self._moments)

    def _buffer(self, micro_batch: int) -> int:
        return micro_batch % self.num_pipe_buffers()

    def _forward(self, micro_batch: int) -> Iterator[PipeInstruction]:
        """All that the forward of a micro-batch needs in this stage, and it."""
        buffer = self._buffer(micro_batch)
        if not self.is_first_stage:
            yield RecvActivation(buffer)
        if self.is_first_stage or self.is_last_stage:
            yield LoadMicroBatch(buffer)
        yield ForwardPass(buffer)


class InferenceSchedule(PipeSchedule):
    """Forward alone. A stage sends a moment after it has computed, while it computes the next micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for moment in range(self.micro_batches + self.stages - 1):
            now, before = moment - self.stage_id, moment - self.stage_id - 1
            todo: list[PipeInstruction] = []
            if not self.is_last_stage and self._is_one(before):
                todo.append(SendActivation(self._buffer(before)))
            if self._is_one(now):
                todo += self._forward(now)
            yield todo

    def _is_one(self, micro_batch: int) -> bool:
        return 0 <= micro_batch < self.micro_batches

    def num_pipe_buffers(self) -> int:
        """The one that is sent, and the one that is computed."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward: see above."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        moments = 2 * (self.micro_batches + self.stages - 1)
        for moment in range(moments):
            todo = [*self._sent(moment - 1), *self._computed(moment)]
            if moment == moments - 1:
                todo += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield todo

    def _in_forward(self, moment: int) -> int | None:
        return self._micro_batch(moment - self.stage_id)

    def _in_backward(self, moment: int) -> int | None:
        return self._micro_batch(moment - 2 * self.stages + 1 + self.stage_id)

    def _micro_batch(self, twice: int) -> int | None:
        return twice // 2 if twice % 2 == 0 and 0 <= twice // 2 < self.micro_batches else None

    def _sent(self, moment: int) -> Iterator[PipeInstruction]:
        """What was computed then goes to its neighbour now, which receives it at this moment."""
        forward, backward = self._in_forward(moment), self._in_backward(moment)
        if forward is not None and not self.is_last_stage:
            yield SendActivation(self._buffer(forward))
        if backward is not None and not self.is_first_stage:
            yield SendGrad(self._buffer(backward))

    def _computed(self, moment: int) -> Iterator[PipeInstruction]:
        forward, backward = self._in_forward(moment), self._in_backward(moment)
        if forward is not None:
            yield from self._forward(forward)
        if backward is not None:
            if not self.is_last_stage:
                yield RecvGrad(self._buffer(backward))
            yield BackwardPass(self._buffer(backward))

    def num_pipe_buffers(self) -> int:
        """Those whose backward is still to come; two at least, of which one is sent."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """Of one stage: accumulation of gradients."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for number in range(self.micro_batches):
            todo: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if number == self.micro_batches - 1:
                todo += [ReduceGrads(), OptimizerStep()]
            yield todo

    def num_pipe_buffers(self) -> int:
        return 1
