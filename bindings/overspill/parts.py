"""Several optimizers of one engine, each over a part of its model.

Each steps, clears and is saved alone, as in plain PyTorch: what the others' parameters have, gradients, states and
weights, stays as it is. One rank. What means all gradients or all optimizers at once (engine.step(), train_batch,
gradient_clipping, an lr_scheduler given to initialize) is refused.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .config import Config

if TYPE_CHECKING:
    from .groups import Groups
    from .optimizer import OverspillOptimizer
    from .segments import Segment


@dataclass(frozen=True)
class Part:
    """What one of several optimizers trains: units of that `number`; `groups`: its first one among those of all
    optimizers, and the one behind its last."""

    number: int
    groups: tuple[int, int]

    def has(self, segment: Segment) -> bool:
        return segment.unit.part == self.number


def groups_of(part: Part | None) -> tuple[int, int] | None:
    """As the core takes it; None: all."""
    return None if part is None else part.groups


class Several:
    """The optimizers of one engine, in the order in which `initialize` was given them: to be unpacked, or asked by
    number. `step`, `zero_grad`, `state_dict` and `load_state_dict` call each one's. `last_step`: the outcome of the
    last step of any."""

    def __init__(self, optimizers: Sequence[OverspillOptimizer]):
        self._each = tuple(optimizers)
        self.outcomes: deque[Any] = deque(maxlen=1)
        for optimizer in self._each:
            optimizer.outcomes = self.outcomes
            optimizer.beside.update(other for other in self._each if other is not optimizer)

    def __len__(self) -> int:
        return len(self._each)

    def __getitem__(self, number: int) -> OverspillOptimizer:
        return self._each[number]

    def __iter__(self) -> Iterator[OverspillOptimizer]:
        return iter(self._each)

    def __repr__(self) -> str:
        return repr(list(self._each))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all, in order."""
        return list(itertools.chain.from_iterable(each.param_groups for each in self._each))

    @property
    def last_step(self) -> Any:
        """The outcome of the last step of any; None before the first."""
        return self.outcomes[0] if self.outcomes else None

    def step(self) -> None:
        """Of each, one after the other."""
        for each in self._each:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each.

        Args:
            set_to_none: False keeps zeros where there were gradients

        Raises: RuntimeError where another thread is at work.
        """
        for each in self._each:
            each.zero_grad(set_to_none)

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each, in order."""
        return [each.state_dict() for each in self._each]

    def load_state_dict(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Of each; load the model's state_dict first.

        Args:
            state_dicts: the list that `state_dict` gave

        Raises: ValueError where they are of other optimizers.
        """
        if not isinstance(state_dicts, (list, tuple)) or len(state_dicts) != len(self._each):
            raise ValueError(
                f"overspill: load_state_dict of {len(self._each)} optimizers takes as many state dicts, in a list: "
                "what their state_dict gave"
            )
        for each, saved in zip(self._each, state_dicts, strict=True):
            each.load_state_dict(saved)

    # ---- what the engine asks of its optimizer

    def start_states(self) -> None:
        hyper_parameters = [group for each in self._each for group in each.numbers()]
        self._each[0].residency.core.start_states(hyper_parameters)
        for each in self._each:
            each.take_over_states()

    def settle(self) -> None:
        for each in self._each:
            each.settle()

    def prepare_to_leave(self) -> None:
        for each in self._each:
            each.prepare_to_leave()

    def stay(self) -> None:
        for each in self._each:
            each.stay()

    def leave(self) -> None:
        for each in self._each:
            each.leave()

    def leave_states(self) -> None:
        for each in self._each:
            each.leave_states()

    def loaded(self) -> None:
        for each in self._each:
            each.loaded()

    def states_of(self, segment: Segment) -> dict[str, torch.Tensor]:
        return self._each[segment.unit.part].states_of(segment)

    def hyper_parameters(self) -> dict[str, Any]:
        return {"groups": [group for each in self._each for group in each.hyper_parameters()["groups"]]}

    def restore_hyper_parameters(self, saved: dict[str, Any]) -> None:
        groups = iter(saved["groups"])
        for each in self._each:
            each.restore_hyper_parameters({"groups": list(itertools.islice(groups, len(each.param_groups)))})


def number(found: Sequence[Groups]) -> None:
    """Gives the groups of each of several optimizers their range among all."""
    first = 0
    for place, groups in enumerate(found):
        end = first + len(groups.groups)
        groups.part = Part(place, (first, end))
        first = end


def by_parameter(found: Iterable[Groups]) -> dict[int, int]:
    """The number of each parameter's optimizer, by the parameter's id."""
    return {
        id(p): place for place, each in enumerate(found) for group in each.groups for p in group["params"]
    }


def check(config: Config, lr_scheduler: Any) -> None:
    """Raises ValueError for what means one optimizer."""
    given = {
        "gradient_clipping": (
            config.gradient_clipping,
            "call torch.nn.utils.clip_grad_norm_ before the steps that it is for",
        ),
        "gradient_accumulation_steps": (
            config.gradient_accumulation_steps if config.gradient_accumulation_steps > 1 else None,
            "step each optimizer when its gradients are complete, and divide the loss by the number of micro-batches",
        ),
        "lr_scheduler": (lr_scheduler, "make one on each optimizer, and step them"),
        "vertical_accumulation": (
            config.vertical_accumulation,
            "it is train_batch's, which steps one optimizer",
        ),
    }
    for name, (value, instead) in given.items():
        if value:
            raise ValueError(
                f"overspill: {name} = {value!r:.60} works with one optimizer, and initialize was given a list: leave "
                f"it out; {instead}"
            )


def each(optimizer: Any) -> list[Any]:
    """The optimizers of an engine, given what it calls its optimizer."""
    return list(optimizer) if isinstance(optimizer, Several) else [optimizer]


def require_one(optimizer: Any, call: str) -> None:
    if isinstance(optimizer, Several):
        raise RuntimeError(
            f"overspill: {call} steps one optimizer, and this engine has {len(optimizer)}: call the step and zero_grad "
            "of each, as in plain PyTorch"
        )
