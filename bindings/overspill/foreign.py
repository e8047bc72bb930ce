"""Optimizers that the engine's update does not have, and float64 weights: torch's own code makes the step.

The engine holds weights and gradients, and no states. Of an optimizer of torch.optim that treats each parameter by
itself, the step runs unit by unit: the unit's weights are gathered, the optimizer sees its parameters alone, and what
it wrote becomes the weight. Any other one (LBFGS, a class of the script's own) runs once over all of them: each weight
that it touches is gathered for that (released.py), and the gradients that it asks for stay in memory meanwhile.

States are the optimizer's own tensors. Where the engine has a disk, those of the former lie in files there.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from . import calls, given, hooks, script_optimizer, showing
from ._core import CheckpointError
from .groups import Groups
from .optimizer import OverspillOptimizer, evaluated
from .parts import groups_of
from .residency import Residency
from .segments import Segment, Unit, registry

_BY_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_NO_UPDATE = {
    "optimizer": "sgd",
    "lr": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


def of_torch(groups: Groups) -> torch.optim.Optimizer:
    """The configured optimizer as torch has it, for weights that the engine has no update of."""
    kind = getattr(torch.optim, groups.kind, None)
    if kind is None:
        raise ValueError(
            f"overspill: the model has float64 weights, and torch.optim, which would have to train them, has no "
            f"{groups.kind}: configure AdamW, Adam or SGD, or use model.float()"
        )
    known = {"params", *inspect.signature(kind).parameters}
    return kind([{name: value for name, value in group.items() if name in known} for group in groups.groups])


@dataclass(frozen=True)
class Outcome:
    """As the core's StepResult."""

    step: int
    norm: float
    clip: float
    skipped: bool
    not_finite: str


class ForeignOptimizer(OverspillOptimizer):
    """`user`: the script's own, whose groups and states these are. `clipping`: the configuration's limit of the norm,
    0: none."""

    def __init__(
        self,
        groups: Groups,
        owner: Residency,
        user: torch.optim.Optimizer,
        folder: str | None,
        ranks: int,
        life: Any,
        clipping: float,
    ):
        super().__init__(groups, owner, user, folder, ranks, life)
        self.clipping = clipping
        self._in_files = WeakIdKeyDictionary()  # states
        self._one_by_one = _is_by_parameter(type(user))
        where = "one unit after the other" if self._one_by_one else "over all its parameters at once"
        warnings.warn(
            f"overspill: the engine has no update of {groups.foreign}: {type(user).__qualname__}'s own code makes the "
            f"steps, {where}. They are exact, and slower; its states are not counted in the budget "
            "(docs/scripts.md, Optimizers)",
            stacklevel=given.script_level(),
        )

    def _share_hooks(self, user: torch.optim.Optimizer) -> None:
        if _is_by_parameter(type(user)):  # else its own step runs them
            script_optimizer.share_hooks(user, self, ("step",))
        for call in ("state_dict", "load_state_dict"):  # its own calls run them
            for name in script_optimizer.HOOKS[call]:
                setattr(self, name, getattr(user, name))

    def _take_states(self, user: torch.optim.Optimizer) -> None:
        """They stay its own."""

    @property
    def state(self) -> Any:
        return self.user.state

    @state.setter
    def state(self, states: Any) -> None:
        if "user" in self.__dict__:  # else torch's, at the beginning
            self.user.state = states

    def numbers(self) -> list[dict]:
        self._check_groups()
        return [_NO_UPDATE] * len(self.param_groups)

    def start_states(self) -> None:
        """They are the optimizer's own."""

    def prepare_to_leave(self) -> None:
        """They are there already."""

    def stay(self) -> None:
        """Nothing was taken out."""

    def leave(self) -> None:
        script_optimizer.let_go(self.user)

    def undo(self) -> None:
        script_optimizer.let_go(self.user)

    def expect_step(self) -> None:
        """Nothing can be guessed."""

    def step(self, closure: Callable | None = None) -> Any:
        loss = evaluated(closure) if self._one_by_one else None
        if self.before_step is not None and not (self.residency.closed or self.residency.leaving):
            self.before_step()
        hyper_parameters, part = self.numbers(), self.groups.part
        with calls.Alone():
            calls.refuse_update(self.residency, "a step of the optimizer")
            calls.clear_spoiled(self.residency)
            gradients = self.residency.gradients
            limit = self.clipping if self.clipping and not gradients.clipped else math.inf
            with DisableTorchFunction():
                norm = gradients.scale(limit) if part is None else gradients.norm(part)
            if math.isfinite(norm) or self.on_nonfinite == "propagate":
                if self._one_by_one:
                    self._step_by_unit()
                else:
                    loss = self._own_step(closure)
                showing.settle_all(self.residency)  # what it wrote through views
                with DisableTorchFunction():
                    gradients.settle()
                self.residency.core.use_gradients(groups_of(part))

            left_out = not math.isfinite(norm) and self.on_nonfinite != "propagate"
            culprit = gradients.first_not_finite(part) if left_out else None

            def count() -> Outcome:
                core, range_ = self.residency.core, groups_of(part)
                made = core.step(hyper_parameters, range_) if culprit is None else core.skip_step(range_)
                return Outcome(
                    made.step,
                    norm,
                    min(limit / (norm + 1e-6), 1.0),
                    made.skipped,
                    culprit or made.not_finite,
                )

            self._make(count)
        self._raise_skipped()
        return loss

    def _own_step(self, closure: Callable | None) -> Any:
        step = type(self.user).step
        return step(self.user) if closure is None else step(self.user, closure)

    def _step_by_unit(self) -> None:
        """The optimizer's own step, with groups of one parameter at a time. It changes nothing in a group, and each
        update depends on that parameter alone."""
        own, groups = script_optimizer.without_hooks(type(self.user).step), self.user.param_groups
        try:
            for unit, members in self._by_unit():
                with hooks.Gathered([unit]):
                    for segment, group in members:
                        self.user.param_groups = [group | {"params": [segment.parameter]}]
                        own(self.user)
                        increment_version(segment.parameter)  # fused ones do not
                        self._into_files(segment)
        finally:
            self.user.param_groups = groups

    def _by_unit(self) -> Iterator[tuple[Unit, list[tuple[Segment, dict]]]]:
        """Units with gradients, with their parameters and the groups of those."""
        found: dict[Unit, list] = {}
        for group in self.param_groups:
            for segment in (registry.get(id(p)) for p in group["params"]):
                if segment is not None and segment.has_gradient():
                    found.setdefault(segment.unit, []).append((segment, group))
        return iter(sorted(found.items(), key=lambda item: item[0].index))

    def _into_files(self, segment: Segment) -> None:
        """New states of a large parameter: they stay where they are put, since the optimizer updates them in place."""
        folder, states = self.residency.folder, self.state.get(segment.parameter, {})
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value not in self._in_files:
                what = f"{type(self.user).__name__} keeps {name} of {segment.name}"
                kept = folder.tensor(value.shape, value.stride(), value.dtype, what)
                if kept is not None:
                    self._in_files[kept] = None
                    states[name] = kept.copy_(value)

    def room(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, name: str
    ) -> torch.Tensor | None:
        """Memory in a file for a state that is loaded, where a step would have put it in a file; None where it
        belongs in memory."""
        if not self._one_by_one:
            return None
        kept = self.residency.folder.tensor(shape, stride, dtype, f"load_checkpoint keeps {name}")
        if kept is not None:
            self._in_files[kept] = None
        return kept

    def states_of(self, segment: Segment) -> dict[str, torch.Tensor]:
        states = self.state.get(segment.parameter, {})
        return {name: value.clone() for name, value in states.items() if isinstance(value, torch.Tensor)}

    def state_dict(self) -> dict:
        return type(self.user).state_dict(self.user)

    def load_state_dict(self, state_dict: dict) -> None:
        type(self.user).load_state_dict(self.user, state_dict)
        self.param_groups = self.user.param_groups

    def hyper_parameters(self) -> dict[str, Any]:
        """Nothing of each group: a checkpoint has them with the states (own_states.py)."""
        self._check_groups()
        return {"groups": [{} for _ in self.param_groups]}

    def restore_hyper_parameters(self, saved: dict[str, Any]) -> None:
        """They came with the states."""

    def restore(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Gives the optimizer the values of state_dict, which nobody else may use afterwards. Returns what undoes
        it. Raises CheckpointError where the class does not take it; then nothing is changed."""
        user, before = self.user, dict(vars(self.user))
        states = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in user.state.items()}
        groups = [dict(group) for group in user.param_groups]

        def undo() -> None:
            vars(user).clear()
            vars(user).update(before)
            user.state.clear()
            user.state.update(states)
            user.param_groups[:] = groups
            self.param_groups = user.param_groups

        try:
            self.load_state_dict(state_dict)
            self._put_exactly(state_dict["state"])
        except BaseException as error:
            undo()
            if not isinstance(error, Exception):
                raise
            kind = type(user).__name__
            raise CheckpointError(
                f"overspill: {kind}.load_state_dict does not take the state that the checkpoint has of it "
                f"({type(error).__name__}: {error!s:.200}): use {kind} as it was in the run that saved"
            ) from error
        return undo

    def _put_exactly(self, states: dict[Any, Any]) -> None:
        """torch's load_state_dict turns states into the dtype of their parameter: the saved values take their place.
        What a hook, or a class whose state_dict does not give the states themselves, has made of them stays."""
        shown = self.state_dict()["state"]
        hooks_of_load = script_optimizer.HOOKS["load_state_dict"]
        hooked = any([*getattr(each, name).values()] for each in (self, self.user) for name in hooks_of_load)
        parameters = [p for group in self.param_groups for p in group["params"]]
        with DisableTorchFunction():
            for number, parameter in enumerate(parameters):
                own = self.user.state.get(parameter)
                if number not in states or not isinstance(own, dict):
                    continue
                if shown.get(number) is own and not hooked:
                    own.clear()
                    own.update(states[number])
                else:
                    own.update(_uncast(own, states[number]))


def _uncast(now: Any, saved: Any) -> Any:
    """`now` with the saved tensors in place of those that are nothing but these in another dtype."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved if now.dtype is not saved.dtype and _is_cast(now, saved) else now
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _uncast(value, saved.get(key)) for key, value in now.items()}
    if type(now) is str and type(saved) is str:  # of a text torch makes the text of a generator
        return saved if now.startswith("<generator object Optimizer.load_state_dict") else now
    if type(now) in (list, tuple) and type(now) is type(saved) and len(now) == len(saved):
        return type(now)(map(_uncast, now, saved))
    return now


def _is_cast(now: torch.Tensor, saved: torch.Tensor) -> bool:
    if now.shape != saved.shape:
        return False
    cast = saved.to(now.dtype)
    return bool(((now == cast) | ((now != now) & (cast != cast))).all())


def _is_by_parameter(kind: type) -> bool:
    return kind in _BY_PARAMETER and script_optimizer.has_torchs_step(kind)
