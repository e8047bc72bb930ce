"""The optimizer that scripts and schedulers see: torch's interface over the engine's own update."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from . import _core, boundary, calls, giving, momenta, moments, optim, reading, script_optimizer
from .config.optimizers import unusable_number
from .parts import Part, groups_of
from .ranks import RankError
from .residency import Residency
from .segments import Segment, registry
from .states import States

_NAMES = ("AdamW", "Adam", "Adagrad", "SGD", "RMSprop", "NAdam", "Adamax", "Adadelta")
_TORCH = tuple(getattr(torch.optim, name) for name in _NAMES)
_OWN = (*(getattr(optim, name) for name in _NAMES), optim.Lion)
_REFUSED = ("differentiable",)
# Of a group that is loaded: these are as they are here.
_STAY = ("params", "param_names", "name", "decoupled", "decoupled_weight_decay", "format", "seed")
_CORE_WITH_MOMENTUM = {"SGD": ("sgd", "momentum"), "RMSprop": ("rmsprop", "rmsprop_momentum")}


class NonFiniteError(_core.OverspillError, FloatingPointError):
    """A gradient has an inf or a NaN, and on_nonfinite is "raise". The step was left out, its gradients are gone."""


class Groups:
    """Parameter groups and what they belong to. `kind` is torch's name of the optimizer, `core` the core's; `format`
    and `seed` are those of an optimizer of overspill.optim. `foreign`: what the engine has no update of, so that the
    optimizer's own code makes the steps (foreign.py). `taken`: the states of one that has stepped, by the
    place of their parameter."""

    def __init__(
        self,
        kind: str,
        groups: list[dict[str, Any]],
        format: str | None = None,
        seed: int | None = None,
        foreign: str | None = None,
    ):
        self.kind, self.groups, self.format, self.seed = kind, groups, format, seed
        self.foreign = foreign
        self.part: Part | None = None  # of one of several optimizers
        self.taken: dict[str, Any] | None = None
        if foreign:
            self.core = "sgd"
        elif kind in _CORE_WITH_MOMENTUM:
            # Groups share a layout: one with momentum gives all of them a buffer.
            self.core = _CORE_WITH_MOMENTUM[kind][any(float(group["momentum"]) for group in groups)]
        else:
            self.core = getattr(optim, kind)._kind

    def hyper_parameters(self, group: dict[str, Any], number: int) -> dict[str, Any]:
        """A group as the core takes it, plain numbers; it looks for what its optimizer has. Raises ValueError where an
        update could not use them."""
        hyper = {name: _plain(value) for name, value in group.items() if name != "params"}
        _check_numbers(self.kind, group, number)
        optim.check_ours(self.kind, group, number)
        hyper["optimizer"] = self.core
        if "betas" in hyper:
            hyper["beta1"], hyper["beta2"] = hyper["betas"]
        if self.core in ("sgd", "rmsprop") and hyper["momentum"]:
            raise ValueError(
                f"overspill: momentum = {group['momentum']} came after overspill.initialize, which found none and "
                "made no buffers for it: make what sets it (a scheduler such as OneCycleLR) before initialize"
            )
        return hyper

    def states(self) -> dict[str, str]:
        """The core's names of the optimizer's states -> torch's."""
        names = getattr(optim, self.kind)._names
        held = _core.optim.components(self.core, "fp32", 1)
        return {name: names.get(name, name) for name, number, *_ in held if number >= 0}


def take_over(optimizer: Any) -> Groups:
    """The groups of a user's optimizer, of torch.optim or overspill.optim: the same dict objects, so that a scheduler
    bound to it drives the engine.

    Raises TypeError for what is no optimizer of torch, ValueError for options that nobody here has.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"overspill: optimizer {kind.__module__}.{kind.__qualname__} is not supported: give an optimizer of "
            "torch.optim or overspill.optim, a child of torch.optim.Optimizer, or a list of such"
        )
    if isinstance(optimizer, OverspillOptimizer):
        raise TypeError(
            "overspill: this optimizer is the one that overspill.initialize returned, and belongs to its engine: give "
            "the optimizer that was given to it, which has the states after engine.give_back(), or a new one of torch"
        )
    script_optimizer.check(optimizer)
    groups = optimizer.param_groups
    for group in groups:
        for option in _REFUSED:
            if group.get(option):
                raise ValueError(f"overspill: {_name(kind)}({option}=True) is not supported")
    if (foreign := foreign_update(kind, groups)) is not None:
        return Groups(kind.__name__, groups, foreign=foreign)
    found = _known(optimizer, kind, groups)
    for number, group in enumerate(groups):
        found.hyper_parameters(group, number)
    found.taken = _states_to_take(optimizer, found) or None
    return found


def _states_to_take(optimizer: torch.optim.Optimizer, found: Groups) -> dict[int, dict[str, Any]]:
    """By the place of the parameter. Raises ValueError for what is no state of it."""
    names, states = found.states(), {}
    for number, (group, p) in enumerate((each, p) for each in found.groups for p in each["params"]):
        if not (p.requires_grad and p.numel()):
            state = optimizer.state.get(p, {})  # stays as it is
        else:
            state = _usable(moments.present(giving.exact(optimizer, p)), set(names.values()))
            state = moments.with_buffer(state, names, group)
            if state:
                moments.check_entry(f"parameter {number} of the {found.kind}", p.shape, state, names, group)
        if state and not (found.kind == "Adagrad" and _is_adagrads_start(found.groups, p, state)):
            states[number] = state
    return states


def _usable(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """SGD's momentum may have come or gone since: torch makes the buffer anew, or leaves it alone."""
    if names == {"momentum_buffer"} and "momentum_buffer" not in state:
        return {}
    return state if names else {name: value for name, value in state.items() if name != "momentum_buffer"}


def _is_adagrads_start(groups: list[dict[str, Any]], parameter: torch.Tensor, state: dict[str, Any]) -> bool:
    """Torch's Adagrad has states before its first step."""
    if "sum" not in state or _steps(state):
        return False
    group = next(group for group in groups if any(p is parameter for p in group["params"]))
    return bool((state["sum"] == group.get("initial_accumulator_value", 0.0)).all())


def _steps(state: dict[str, Any]) -> float:
    return float(state.get("step", 0.0))


def foreign_update(kind: type, groups: list[dict[str, Any]]) -> str | None:
    """What of an optimizer of that class, with these groups, the engine has no update of, by name, or None."""
    if kind not in (*_TORCH, *_OWN) or (kind in _TORCH and not script_optimizer.has_torchs_step(kind)):
        return f"{kind.__module__}.{kind.__qualname__}"
    used = [option for option in optim.NOT_OURS if any(group.get(option) for group in groups)]
    if used:
        return f"{_name(kind)} with {used[0]}"
    return "float64 weights" if has_float64(groups) else None


def has_float64(groups: list[dict[str, Any]]) -> bool:
    return any(p.dtype is torch.float64 for group in groups for p in group["params"])


def _known(optimizer: torch.optim.Optimizer, kind: type, groups: list[dict[str, Any]]) -> Groups:
    for group in groups:
        if kind in (torch.optim.AdamW, torch.optim.Adam, optim.AdamW, optim.Adam):
            group["decoupled"] = kind.__name__ == "AdamW" or bool(group.get("decoupled_weight_decay"))
    if kind in _TORCH:
        return Groups(kind.__name__, groups)
    return Groups(kind.__name__, groups, _common(groups, "format"), _common(groups, "seed"))


def _name(kind: type) -> str:
    return f"{'torch' if kind in _TORCH else 'overspill'}.optim.{kind.__name__}"


def _common(groups: list[dict[str, Any]], option: str) -> Any:
    values = {group[option] for group in groups}
    if len(values) > 1:
        raise ValueError(f"overspill: parameter groups differ in {option}: {values}; an engine has one")
    return values.pop()


def make_groups(config: Any, parameters: Iterable[Any]) -> Groups:
    """Groups of the configured optimizer over parameters, or over dicts with "params" and hyper-parameters
    of their own. As in torch, parameters may come with their names (model.named_parameters()); the model knows them.
    Raises TypeError for what is no parameter."""
    items = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if items and isinstance(items[0], dict):
        for number, item in enumerate(items):
            if not isinstance(item, dict):
                raise TypeError(
                    f"overspill: model_parameters has {item!r:.60} at place {number}, a {type(item).__name__}, among "
                    "groups: put it into the params of one"
                )
        groups = [dict(item) for item in items]
    else:
        groups = [{"params": items}]
    defaults = config.model_dump(exclude={"type"})
    if config.type in ("AdamW", "Adam"):
        defaults["decoupled"] = config.type == "AdamW"
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(
                f"overspill: parameter group {number} of model_parameters has no params: it has {sorted(group)}; add "
                "params, a list of parameters"
            )
        unknown = set(group) - set(defaults) - {"params", "name"}
        if unknown:
            raise ValueError(
                f"overspill: parameter group has unknown keys {sorted(unknown)}; known: {sorted(defaults)}"
            )
        group["params"] = [p for p in _unnamed(group["params"]) if p.requires_grad]
        for name, value in defaults.items():
            group.setdefault(name, value)
        _check_numbers(config.type, group, number, scheduled=False)
    return Groups(config.type, groups)


def _check_numbers(kind: str, group: dict[str, Any], number: int, scheduled: bool = True) -> None:
    """Raises ValueError that names a number of the group, of an optimizer of that name, which no update can use."""
    for name, value in group.items():
        if name != "params" and (why := unusable_number(kind, name, _plain(value), scheduled)):
            raise ValueError(f"overspill: parameter group {number} has {name} = {value!r:.60}: {why}")


def unit_format(own: str, chosen: str | None) -> str:
    """The core's format of a unit: `own` is what units.py found, `chosen` the format of bf16 weights."""
    if own == "float64":
        return "frozen"
    return (chosen or "exact") if own == "bf16_split" else own


def choose_format(config: str | None, groups: Groups, formats: Iterable[str]) -> str | None:
    """The format of bf16 weights: the configuration's or the user's own optimizer's. `formats` are the units'. Raises
    ValueError where the two differ, or where no weight can have it."""
    if None not in (config, groups.format) and config != groups.format:
        raise ValueError(
            f"overspill: format is {config!r} in the configuration, {groups.format!r} in the optimizer"
        )
    chosen = config or groups.format
    known = set(formats)
    if chosen == "fp32" and "bf16_split" not in known:  # of an overspill.optim over fp32 weights
        return None
    if chosen == "8bit":
        optim.check_8bit(groups.kind)
    if chosen is not None and (chosen not in ("exact", "compact", "8bit") or "bf16_split" not in known):
        raise ValueError(
            f"overspill: format {chosen!r} holds {'fp16' if chosen == 'fp16' else 'bf16'} weights, and none of the "
            "model's trainable ones are; make it with model.bfloat16(), or leave format out"
        )
    return chosen


def _unnamed(given: Any) -> list[torch.Tensor]:
    parameters = [
        item[1] if isinstance(item, tuple) and len(item) == 2 else item
        for item in ([given] if isinstance(given, torch.Tensor) else given)
    ]
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"overspill: model_parameters has {parameter!r:.60} at place {number}, a {type(parameter).__name__}: "
                "give parameters, pairs of a name and a parameter, or groups (dicts with params)"
            )
    return parameters


def group_indices(groups: list[dict[str, Any]], model: nn.Module) -> dict[int, int]:
    """id of each trainable parameter of the model -> its group. Raises ValueError unless each is in exactly
    one."""
    index: dict[int, int] = {}
    known = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if index.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"overspill: {known.get(id(parameter), 'a parameter')} is in two parameter groups, "
                    f"{index[id(parameter)]} and {number} (of several optimizers, counted through): leave it in one; "
                    "tied weights are one parameter"
                )
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in index]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"overspill: {', '.join(missing[:3])}{more}: trainable, but in no parameter group; add a group with it, "
            "freeze it with requires_grad_(False), or give initialize a list of optimizers where another one has it"
        )
    strange = [p for group in groups for p in group["params"] if id(p) not in known]
    if strange:
        raise ValueError(
            "overspill: the optimizer has parameters that are not the model's (one of shape "
            f"{tuple(strange[0].shape)}): of several models make one, nn.ModuleList([a, b]), "
            "and give that to initialize; make a parameter the model's own, model.name = nn.Parameter(...)"
        )
    return index


class OverspillOptimizer(torch.optim.Optimizer):
    """`param_groups` are read at every step. `step` enqueues the engine's update; moments live in the engine: `state`
    (states.py), `state_dict` and `Engine.optimizer_state` give copies.

    folder: where state_dict keeps large tensors. ranks: that hold parts of the states. life: the engine's, kept."""

    def __init__(
        self,
        groups: Groups,
        residency: Residency,
        user: torch.optim.Optimizer | None = None,
        folder: str | None = None,
        ranks: int = 1,
        life: Any = None,
    ):
        defaults = {name: value for name, value in groups.groups[0].items() if name not in ("params", "name")}
        self._states: States | None = None
        super().__init__([dict(group) for group in groups.groups], defaults)
        self.param_groups = groups.groups
        self.groups, self.residency, self.user = groups, residency, user
        self._list = self.param_groups
        self._taken = _parameters_of(groups.groups)
        self.outcomes: deque[Any] = deque(maxlen=1)  # several optimizers share one
        self.folder, self.ranks, self.life = folder or tempfile.gettempdir(), ranks, life
        self.before_step: Callable[[], None] | None = None  # raises where the step must not be taken
        self.keeps_gradients: Callable[[], bool] = lambda: True  # by torch's rule: until zero_grad
        self.on_nonfinite = "skip"
        self.beside: weakref.WeakSet[OverspillOptimizer] = weakref.WeakSet()  # others of several
        self._told = False  # of a skipped step
        self._momenta = momenta.Watch()
        self._given: Any = None  # the states that the user's own optimizer gets at the end
        if not groups.foreign:
            self._states = States(self.param_groups, groups.states(), residency, ranks, groups.part)
        if user is not None:
            self._share_hooks(user)
            self._take_states(user)
            script_optimizer.pass_on(user, self)

    def _share_hooks(self, user: torch.optim.Optimizer) -> None:
        script_optimizer.share_hooks(user, self, script_optimizer.HOOKS)

    def _take_states(self, user: torch.optim.Optimizer) -> None:
        """They are the engine's now."""
        self._before, user.state = user.state, self._states

    @property
    def state(self) -> Any:
        """States by parameter, as torch has them: a mapping of dicts of tensors on the CPU, read from the engine when
        they are asked for (docs/scripts.md)."""
        self._follow_user()
        return self._states

    def _follow_user(self) -> None:
        """The user's own optimizer may have been given other states, or another list of groups."""
        user = self.user
        if user is None:
            return
        if user.param_groups is not self._list:  # the user's, or this one's, was set to another list
            self.param_groups = user.param_groups
        elif self.param_groups is not self._list:
            user.param_groups = self.param_groups
        self._list = self.param_groups
        if self._states is not None:
            self._states.groups = self._list
        if self._states is not None and user.state is not self._states:
            self.state = user.state

    @state.setter
    def state(self, states: Any) -> None:
        if self._states is None or states is self._states:  # None: torch's, at the beginning
            return
        self._states = self._states.replaced(states)
        if self.user is not None:
            self.user.state = self._states

    def prepare_to_leave(self) -> None:
        """Takes out the states that the user's own optimizer will have, once. Inside calls.Alone, settled."""
        if self.user is not None and self._given is None:
            self._given = giving.states(self, self._states)

    def stay(self) -> None:
        """After prepare_to_leave, where the engine does not end."""
        self._given = None

    def leave(self) -> None:
        """After prepare_to_leave: states are the user's own optimizer's, which is as it was before `initialize`. May be
        called again where Ctrl-C broke it off."""
        if self.user is not None:
            giving.leave(self.user, self._given)
            self.user = None
        if self._states is not None:
            self._states.groups = []  # it keeps no parameters

    def undo(self) -> None:
        """The engine is not made after all: the user's own optimizer is as it was."""
        if self.user is not None:
            script_optimizer.let_go(self.user)
            self.user.state = self._before

    def loaded(self) -> None:
        """States are others now: what scripts have of those of before is their own."""
        self._momenta.forget()
        if self._states is not None:
            self._states.forget()

    def settle(self) -> None:
        """What scripts wrote into states is the engine's. Inside calls.Alone."""
        self._follow_user()
        if self._states is not None:
            self._states.settle()

    def leave_states(self) -> None:
        """States will be others: the dicts that scripts have of them are their own from now on."""
        if self._states is not None:
            self._states.leave()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "overspill: the optimizer cannot be copied or pickled, its states live in the engine: save "
            "optimizer.state_dict(), or use engine.save_checkpoint"
        )

    def _check_groups(self) -> None:
        """Raises RuntimeError where groups came, went or changed since initialize. The list is the user's own, and
        nobody would train what the engine did not take."""
        self._follow_user()
        now = _parameters_of(self.param_groups)
        if now == self._taken:
            return
        number = next((i for i, (a, b) in enumerate(zip(now, self._taken)) if a != b), None)
        if number is not None:
            what = f"parameter group {number} has other parameters than at overspill.initialize"
        elif len(now) > len(self._taken):
            what = f"parameter group {len(self._taken)} was not there at overspill.initialize"
        else:
            what = f"parameter group {len(now)} of overspill.initialize is no longer there"
        raise RuntimeError(
            f"overspill: {what}, and the engine trains those that it took: put param_groups back as "
            "they were, and give it to initialize instead"
        )

    def numbers(self) -> list[dict[str, Any]]:
        """The groups as the core takes them."""
        self._check_groups()
        self._momenta.check(self.param_groups)
        return [self.groups.hyper_parameters(group, i) for i, group in enumerate(self.param_groups)]

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """One update by the engine, with the gradients that it holds; `param_groups` are read now. It returns once the
        norm is known; the states are updated under the next forward.

        Args:
            closure: computes the loss and the gradients; called once

        Returns: the closure's loss; None without one. The outcome is in `last_step`.

        Raises:
            NonFiniteError: a gradient has an inf or a NaN, and on_nonfinite is "raise"
            ValueError: a group has a number that no update can use
            RuntimeError: groups came, went or changed since `initialize`
            EngineFailed, StoreError: the engine, a disk or another rank failed
        """
        loss = evaluated(closure)
        if self.before_step is not None and not (self.residency.closed or self.residency.leaving):
            self.before_step()
        hyper_parameters = self.numbers()
        with calls.Alone():
            calls.start_update(self.residency, "a step of the optimizer")
            self.settle()
            range_ = groups_of(self.groups.part)
            self._make(functools.partial(self.residency.core.step, hyper_parameters, range_))
        self._raise_skipped()
        return loss

    def _make(self, step: Callable[[], Any]) -> None:
        """`step` makes the core's, and returns the outcome. Inside calls.Alone."""
        if self.user is not None:
            self.user._opt_called = True  # what a scheduler bound to the user's optimizer looks for
        gradients = self.residency.gradients
        for other in self.beside:
            other.settle()
        with DisableTorchFunction():
            gradients.update(functools.partial(boundary.keep, self.outcomes, step), self.keeps_gradients())
            gradients.updated(self.last_step.skipped, self.groups.part)
        if self.last_step.skipped:
            self._tell_skipped()
        self.residency.refresh()
        for each in (self, *self.beside):
            if each._states is not None:
                each._states.updated()

    @property
    def last_step(self) -> Any:
        """The outcome of the last step: `step` (updates so far), `norm` of the gradients over all ranks, `clip` (what
        they were multiplied by), `skipped`. None before the first."""
        return self.outcomes[0] if self.outcomes else None

    def _tell_skipped(self) -> None:
        if self._told or self.on_nonfinite == "raise":
            return
        self._told = True
        warnings.warn(
            f"overspill: a step is skipped, because {self._culprit()} has an inf or a NaN: weights and states stay as "
            "they are. This warning comes once; engine.last_step.skipped tells it for every step, "
            'engine.stats()["skipped_steps"] counts such steps',
            stacklevel=5,
        )

    def _raise_skipped(self) -> None:
        if self.on_nonfinite == "raise" and self.last_step.skipped:
            raise NonFiniteError(
                f"overspill: {self._culprit()} has an inf or a NaN: the step is left out, weights and states are as "
                'they were, and its gradients are gone (on_nonfinite = "raise"; "skip" goes on with a warning)'
            )

    def _culprit(self) -> str:
        where = self.last_step.not_finite
        return f"the gradient of {where}" if where else "a gradient of another rank"

    def expect_step(self) -> None:
        """Tells the engine what the next step will be given, as far as anybody knows now (speculation)."""
        try:
            hyper_parameters = self.numbers()
        except (RuntimeError, ValueError):
            return  # the step says it, unless it is put right before
        self.residency.core.expect_step(hyper_parameters)

    def start_states(self) -> None:
        """Once, before the first step: states of an optimizer that does not start with zero, or has stepped."""
        self.residency.core.start_states(self.numbers())
        self._momenta.forget()  # there is no product yet
        self.take_over_states()

    def take_over_states(self) -> None:
        """Those of an optimizer that has stepped. What the engine does not train keeps its own."""
        if self.groups.taken is None:
            return
        taken, self.groups.taken = self.groups.taken, None
        parameters = [p for group in self.param_groups for p in group["params"]]
        with calls.Alone():
            loading = moments.Loading(self.param_groups, self.groups.states(), self.residency, {})
            for number, entry in taken.items():
                if loading.segments[number] is None:
                    self._states.keep(parameters[number], entry)
                else:
                    loading.entries[number] = entry
            loading.check()  # again: the weights may be a checkpoint's, of which a master is none
            loading.apply()
            self._states.begin(loading.segments[number] for number in loading.entries)
        giving.forget_exact(self.user, (parameters[number] for number in loading.entries))

    def states_of(self, segment: Segment) -> dict[str, torch.Tensor]:
        """Copies, in fp32, by torch's names."""
        self.settle()
        return {theirs: reading.state(segment, ours) for ours, theirs in self.groups.states().items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the whole model, whatever parameters the groups have: all that require a gradient are in one. Of one
        optimizer of several, those of its own groups.

        Args:
            set_to_none: False keeps zeros where there were gradients

        Raises: RuntimeError where another thread is at work.
        """
        with calls.Alone(), DisableTorchFunction():
            self.residency.clear_gradients("optimizer.zero_grad()", set_to_none, self.groups.part)

    def __repr__(self) -> str:
        last = self.last_step
        steps = f"step {last.step}" if last is not None else "no step yet"
        own = super().__repr__().removeprefix(type(self).__name__)
        return f"{type(self).__name__} of {self.groups.kind}, {steps}{own}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "residency"):
            if self.residency.closed:
                raise RuntimeError(
                    "overspill: add_param_group: the engine of this optimizer has ended: add the group to the "
                    "optimizer that was given to overspill.initialize, which has the states after engine.give_back()"
                )
            raise RuntimeError(
                "overspill: add_param_group: groups are fixed at overspill.initialize: give it all of them, or call "
                "engine.give_back(), add the group to the optimizer that was given to initialize, and initialize again "
                "(docs/scripts.md, Optimizers)"
            )
        super().add_param_group(param_group)

    def hyper_parameters(self) -> dict[str, Any]:
        """What the engine's checkpoint keeps of the optimizer beside its states: plain numbers."""
        self._check_groups()
        groups = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"groups": groups}

    def restore_hyper_parameters(self, saved: dict[str, Any]) -> None:
        for group, values in zip(self.param_groups, saved["groups"], strict=True):
            group.update({name: tuple(value) if name == "betas" else value for name, value in values.items()})
        self._momenta.forget()
        self._momenta.check(self.param_groups)  # from here on they have to stay

    def state_dict(self) -> dict[str, Any]:
        """States and hyper-parameters in torch's layout, fp32 on the CPU; for torch.save, beside the model's
        state_dict. Large tensors lie in files where the engine has a disk. With several ranks only before the first
        step, when there is no state yet: RankError afterwards."""
        if self._has_states():
            self._require_one_rank("state_dict")
        if self.residency.closed:  # or it would look like one before the first step
            raise RuntimeError(f"overspill: {self.residency.closed}")
        self._check_groups()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        groups, number = [], itertools.count()
        for group in self.param_groups:
            options = {k: v for k, v in group.items() if k != "params"}
            saved = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            names = moments.names_of(group)
            groups.append(saved | {"params": [next(number) for _ in names], "param_names": names})
        with calls.Alone():
            self.settle()
            names, has = self.groups.states(), self._states.has
            several = self.ranks > 1  # which have no states yet
            states = (
                {}
                if several
                else moments.states_of(self.param_groups, names, self.residency, self.folder, has)
            )
        found = {"state": states, "param_groups": groups}
        for hook in self._optimizer_state_dict_post_hooks.values():
            found = hook(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, and that of a torch optimizer of the same class over the same parameters; load
        the model's state_dict first.

        Args:
            state_dict: such a dict

        Raises:
            ValueError: it is of another optimizer or model; nothing is changed
            RankError: there are several ranks, and there are states, here or in the dict
        """
        if self._has_states() or (isinstance(state_dict, Mapping) and state_dict.get("state")):
            self._require_one_rank("load_state_dict")
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"overspill: load_state_dict was given a {type(state_dict).__name__}: give the dict that "
                "state_dict gave (of a file: torch.load)"
            )
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        if "state" not in state_dict or "param_groups" not in state_dict:
            why = "it was made by an earlier version" if "groups" in state_dict else "no optimizer made it"
            raise ValueError(
                f"overspill: this state dict has {sorted(map(str, state_dict)) or 'nothing'}, not state and "
                f"param_groups: {why}, so it holds no states. Load the checkpoint of that step with "
                "engine.load_checkpoint"
            )
        _check_form(state_dict)
        merged = self._merged(state_dict["param_groups"])
        states = renumbered(state_dict)
        with calls.Alone():
            calls.refuse_update(self.residency, "optimizer.load_state_dict")
            come = [group | values for group, values in zip(self.param_groups, merged, strict=True)]
            loading = moments.Loading(come, self.groups.states(), self.residency, states)
            loading.check()
            calls.start_update(self.residency, "optimizer.load_state_dict")
            self.leave_states()
            loading.apply()
            self.loaded()
            for group, values in zip(self.param_groups, merged, strict=True):
                group.update(values)
            self._momenta.check(self.param_groups)  # from here on they have to stay
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _merged(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved groups' hyper-parameters, checked against the groups here."""
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"overspill: {len(saved)} parameter groups were saved, {len(self.param_groups)} are here: "
                "give initialize the groups that it was saved with"
            )
        merged = []
        for number, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            _check_group(number, group, values)
            stay = [name for name in _STAY if not (momenta.has(group) and name == "decoupled_weight_decay")]
            merged.append({name: value for name, value in values.items() if name not in stay})
            _check_kinds(number, group, merged[-1])
            self.groups.hyper_parameters(group | merged[-1], number)
        return merged

    def _has_states(self) -> bool:
        """Whether a state dict would have any. True where that is not known."""
        if self._states is None or self.residency.closed:
            return True
        parameters = (p for group in self.param_groups for p in group["params"])
        segments = (registry.get(id(p)) for p in parameters)
        return any(self._states.has_begun(segment) for segment in segments if segment is not None)

    def _require_one_rank(self, call: str) -> None:
        if self.ranks > 1:
            raise RankError(
                f"overspill: optimizer.{call}: {self.ranks} ranks hold parts of the states, and scripts call this on "
                "one rank alone: use engine.save_checkpoint and engine.load_checkpoint, on all of them"
            )


def evaluated(closure: Callable[..., Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _parameters_of(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


def _check_form(state_dict: dict[str, Any]) -> None:
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise ValueError(
            f"overspill: param_groups of this state dict: {groups!r:.60}; a list of dicts with params is expected: "
            "load what state_dict gave"
        )
    if not isinstance(states, Mapping):
        raise ValueError(
            f"overspill: state of this state dict is a {type(states).__name__}, not a dict: load what state_dict gave"
        )


def _check_group(number: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
    count = len(saved["params"])
    if count != len(group["params"]):
        raise ValueError(
            f"overspill: group {number} has {count} parameters in the state dict, {len(group['params'])} here: "
            "give initialize the groups that it was saved with"
        )
    for option in (*_REFUSED, *optim.NOT_OURS):
        if saved.get(option):
            raise ValueError(
                f"overspill: group {number} of the state dict has {option}=True, which the engine's optimizers do not "
                "have: save it from an optimizer without it"
            )
    if "decoupled" in group:
        theirs = saved.get("decoupled", saved.get("decoupled_weight_decay", group["decoupled"]))
        if bool(theirs) != bool(group["decoupled"]):
            kinds = ("AdamW", "Adam") if theirs else ("Adam", "AdamW")
            raise ValueError(
                f"overspill: the state dict is that of {kinds[0]}, this optimizer is {kinds[1]}: "
                "their weight decay differs. Give initialize the optimizer that made it"
            )
    names = moments.names_of(group)
    for theirs, ours in zip(saved.get("param_names") or names, names, strict=True):
        if ours is not None and theirs is not None and theirs != ours:
            raise ValueError(
                f"overspill: the state dict has {theirs} where {ours} is here: the groups are those of another model, "
                "or in another order; where only the names differ, remove param_names from its groups"
            )


def _check_kinds(number: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError where a hyper-parameter that the engine takes has no value that a step could use."""
    for name, value in saved.items():
        here, there = _numbers(group.get(name)), _numbers(value)
        if here is not None and (there is None or len(there) != len(here)):
            raise ValueError(
                f"overspill: group {number} of the state dict has {name} = {value!r:.60}, which is "
                f"{group[name]!r:.60} here: the state dict is damaged, or of another optimizer"
            )


def _numbers(value: Any) -> list[float] | None:
    """The finite numbers that a hyper-parameter is, None where it is anything else."""
    values = _plain(value)
    values = values if isinstance(values, list) else [values]
    numbers = [v for v in values if type(v) in (int, float) and math.isfinite(v)]
    return numbers if values and len(numbers) == len(values) else None


def renumbered(state_dict: dict[str, Any]) -> dict[int, Any]:
    """The states by the place of their parameter in the groups, whatever numbers the state dict gives them."""
    numbers = [key for group in state_dict["param_groups"] for key in group["params"]]
    places = {key: place for place, key in enumerate(numbers)}
    return {places.get(key, key): entry for key, entry in state_dict["state"].items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value
