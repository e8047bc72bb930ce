"""The optimizer that `deepspeed.initialize` returns: Overspill's, with what scripts ask of DeepSpeed's beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from .. import calls
from ..optimizer import OverspillOptimizer
from ..segments import Segment, registry


class PartsOfStates(Mapping[nn.Parameter, dict[str, torch.Tensor]]):
    """`optimizer.state` of several ranks: by parameter this rank's own part of each state, as DeepSpeed's has it. They
    are copies, fp32, of one dimension, in the order in which the parameter lies in memory; of no elements where the
    rank has none of the parameter."""

    def __init__(self, optimizer: OverspillOptimizer):
        self._optimizer = optimizer

    def _segments(self) -> Iterator[tuple[nn.Parameter, Segment]]:
        states = self._optimizer._states
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                segment = registry.get(id(parameter))
                if segment is not None and segment.unit.trainable and states.has_begun(segment):
                    yield parameter, segment

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter, _ in self._segments())

    def __len__(self) -> int:
        return sum(1 for _ in self._segments())

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        for each, segment in self._segments():
            if each is parameter:
                return self._parts(segment)
        raise KeyError(parameter)

    def _parts(self, segment: Segment) -> dict[str, torch.Tensor]:
        core, unit = self._optimizer.residency.core, segment.unit
        with calls.Alone(), torch.inference_mode(False), DisableTorchFunction():
            _, count = core.own_part(unit.index, segment.index)
            states = self._optimizer._states
            found = {name: states.fetch(segment, name) for name in states.counted}
            for ours, theirs in self._optimizer.groups.states().items():
                part = found[theirs] = torch.empty(count)
                core.read_own_state(unit.index, segment.index, ours, part.data_ptr(), part.nbytes)
        return found


class DeepSpeedOptimizer(OverspillOptimizer):
    """With several ranks `state` has this rank's parts (PartsOfStates). zero_stage: the engine's."""

    zero_stage = 0

    def _own_state(self) -> Any:
        whole = OverspillOptimizer.state.fget(self)  # type: ignore[attr-defined]
        return whole if self.ranks == 1 or whole is None else PartsOfStates(self)

    state = OverspillOptimizer.state.getter(_own_state)  # type: ignore[attr-defined]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The script's own, or the one that mup made for the JSON; else this one. All have the same groups."""
        return self if self.user is None else self.user

    def needs_scaler(self) -> bool:
        """Whether the loss is scaled (fp16): bf16 and fp32 need no scaling."""
        return self.residency.gradients.scaler is not None

    @property
    def loss_scale(self) -> float:
        """Of the next backward; 1 where no loss is scaled."""
        return self.residency.gradients.loss_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was left out."""
        return self.last_step is not None and self.last_step.skipped


@functools.cache
def beside(kind: type[torch.optim.Optimizer]) -> type[DeepSpeedOptimizer]:
    """For stage 0, where DeepSpeed returns the script's own optimizer: one that isinstance takes for that class, and
    that is equal to the script's."""

    def is_same(self: DeepSpeedOptimizer, other: object) -> bool:
        return other is self or (other is not None and other is self.user)

    def hashed(self: DeepSpeedOptimizer) -> int:
        return id(self) if self.user is None else hash(self.user)

    members = {"__eq__": is_same, "__hash__": hashed, "__doc__": DeepSpeedOptimizer.__doc__}
    return type("DeepSpeedOptimizer", (DeepSpeedOptimizer, kind), members)


class _OfStages(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, DeepSpeedOptimizer) and value.zero_stage > 0


class ZeROOptimizer(metaclass=_OfStages):
    """deepspeed.runtime.base_optimizer: what an engine's optimizer is at stages 1 to 3, for isinstance."""
