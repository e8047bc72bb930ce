"""The optimizer that scripts and schedulers see: torch's interface over the engine's own update."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import (
    boundary,
    calls,
    giving,
    loss_scaling,
    momenta,
    moments,
    reading,
    script_optimizer,
    state_dicts,
)
from .groups import Groups, plain
from .leaving_out import LeavingOut
from .parts import groups_of
from .ranks import RankError
from .residency import Residency
from .segments import Segment, registry
from .states import States


class OverspillOptimizer(LeavingOut, torch.optim.Optimizer):
    """`param_groups` are read at every step. `step` enqueues the engine's update; moments live in the engine: `state`
    (states.py), `state_dict` and `Engine.optimizer_state` give copies.

    folder: where state_dict keeps large tensors. ranks: those that hold parts of the states. life: kept alive."""

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
        self.outcomes = deque(maxlen=1)  # several optimizers share one
        self.folder, self.ranks, self.life = folder or tempfile.gettempdir(), ranks, life
        self.before_step: Callable[[], None] | None = None  # raises where the step must not be taken
        self.keeps_gradients: Callable[[], bool] = lambda: True  # by torch's rule: until zero_grad
        self.beside: weakref.WeakSet[OverspillOptimizer] = weakref.WeakSet()  # others of several
        self._momenta = momenta.Watch()
        self._given: Any = None  # the states that the user's own optimizer gets at the end
        if not groups.foreign:
            setattr(self, loss_scaling.PROTOCOL, True)
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
        """Follows the user's own optimizer, which may have other states now, or another list of groups."""
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
        """Undoes prepare_to_leave, if the engine does not end."""
        self._given = None

    def leave(self) -> None:
        """After prepare_to_leave: gives the states to the user's own optimizer, which otherwise is as it was before
        `initialize`. May be called again if Ctrl-C interrupted it."""
        if self.user is not None:
            giving.leave(self.user, self._given)
            self.user = None
        if self._states is not None:
            self._states.groups = []  # it keeps no parameters

    def undo(self) -> None:
        """Restores the user's own optimizer when the engine cannot be made."""
        if self.user is not None:
            script_optimizer.let_go(self.user)
            self.user.state = self._before

    def loaded(self) -> None:
        """Called when states were replaced: copies that scripts have of the old ones are their own."""
        self._momenta.forget()
        if self._states is not None:
            self._states.forget()

    def settle(self) -> None:
        """Hands what scripts wrote into states to the engine. Inside calls.Alone."""
        self._follow_user()
        if self._states is not None:
            self._states.settle()

    def leave_states(self) -> None:
        """Called before states are replaced: the dicts that scripts have of them are their own from now on."""
        if self._states is not None:
            self._states.leave()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "overspill: the optimizer cannot be copied or pickled, its states live in the engine: save "
            "optimizer.state_dict(), or use engine.save_checkpoint"
        )

    def _check_groups(self) -> None:
        """Raises RuntimeError where groups came, went or changed since initialize. The list is the user's own, and
        parameters that the engine did not take would not be trained."""
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
            NonFiniteError: a gradient has an inf or a NaN, and on_nonfinite is "raise", or the loss scale at its least
            ValueError: a group has a number that no update can use
            RuntimeError: groups came, went or changed since `initialize`
            EngineFailed, StoreError: the engine, a disk or another rank failed
        """
        try:
            loss = evaluated(closure)
            if self.before_step is not None and not (self.residency.closed or self.residency.leaving):
                self.before_step()
            hyper_parameters = self.numbers()
            with calls.Alone():
                calls.start_update(self.residency, "a step of the optimizer")
                self.settle()
                self._step_core(hyper_parameters)
            self._raise_skipped()
        except BaseException:
            loss_scaling.drop_given(*self._stepped())
            raise
        return loss

    def _stepped(self) -> list[Any]:
        """The objects of which a script may call `step`."""
        return [self] if self.user is None else [self, self.user]

    def _step_core(self, hyper_parameters: list[dict[str, Any]]) -> None:
        """Makes the core's step; where GradScaler has given the scale of the loss with this one, with that. What is
        made is a call of C alone: Ctrl-C would lose the outcome between it and a function around it."""
        core, range_ = self.residency.core, groups_of(self.groups.part)
        step = functools.partial(core.step, hyper_parameters, range_)
        given = loss_scaling.take_scale(*self._stepped())
        scale, self._expected = given or (1.0, False)
        if self.residency.gradients.scaler is not None:
            if given is not None:
                raise RuntimeError(
                    "overspill: a step by torch.amp.GradScaler, where loss_scaling is enabled: the engine scales "
                    "losses itself: call engine.backward(loss) and engine.step(), or leave loss_scaling out"
                )
            self._make(step)
            return
        if given is None:
            self._tell_of_fp16()
        if self._expected and self.ranks == 1 and not self._leaves_out_itself():
            step = functools.partial(core.skip_step, range_)
        elif self._expected and self.on_nonfinite == "propagate":
            raise RankError(
                'overspill: torch.amp.GradScaler leaves this step out, and on_nonfinite = "propagate" takes it, on '
                f'{self.ranks} ranks: set on_nonfinite to "skip"'
            )
        core.set_loss_scale(scale)  # also 1: Ctrl-C may have kept the last step from setting it below
        try:
            self._make(step)
        finally:
            core.set_loss_scale(1.0)

    def _leaves_out_itself(self) -> bool:
        """Whether the core leaves the step out, and tells its norm: else the script has made gradients finite since."""
        with DisableTorchFunction():
            norm = self.residency.gradients.norm(self.groups.part)
        return self.on_nonfinite != "propagate" and not math.isfinite(norm)

    def _find_overflow(self, found_inf: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        """For GradScaler (loss_scaling.py), before it gives a step its scale. Collective."""
        loss_scaling.drop_given(*self._stepped())
        with calls.Alone(), DisableTorchFunction():
            norm = self.residency.gradients.norm(self.groups.part)
        return loss_scaling.find_overflow(norm, found_inf)

    def _make(self, step: Callable[[], Any]) -> None:
        """Makes one update: `step` makes the core's update and returns the outcome. Inside calls.Alone."""
        if self.user is not None:
            self.user._opt_called = True  # what a scheduler bound to the user's optimizer looks for
        gradients = self.residency.gradients
        for other in self.beside:
            other.settle()
        with DisableTorchFunction():
            gradients.update(functools.partial(boundary.keep, self.outcomes, step), self.keeps_gradients())
            gradients.updated(self.last_step.skipped, self.groups.part)
        scaler = gradients.scaler
        self._overflowed = scaler is not None and not scaler.follow(self.last_step)
        scales = scaler is not None and scaler.is_dynamic  # then some steps have to overflow
        if self.last_step.skipped and not scales and not self._expected:
            self._tell_skipped()
        self.residency.refresh()
        for each in (self, *self.beside):
            if each._states is not None:
                each._states.updated()

    def expect_step(self) -> None:
        """Tells the engine what the next step will be given, as far as anybody knows now (speculation)."""
        try:
            hyper_parameters = self.numbers()
        except (RuntimeError, ValueError):
            return  # the step says it, unless it is put right before
        self.residency.core.expect_step(hyper_parameters)

    def start_states(self) -> None:
        """Sets, once before the first step, the states of an optimizer that does not start at zero, or has stepped."""
        self.residency.core.start_states(self.numbers())
        self._momenta.forget()  # there is no product yet
        self.take_over_states()

    def take_over_states(self) -> None:
        """Takes an optimizer's states after it has stepped; those of parameters not trained here stay with it."""
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
        """Clears the gradients of the whole model: every parameter that requires a gradient is in a group. With several
        optimizers each clears those of its own groups.

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
        groups = [{k: plain(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
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
        """Loads a dict from `state_dict`, or from a torch optimizer of the same class over the same parameters. Load
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
        state_dicts.check_form(state_dict)
        merged = state_dicts.merged(self.groups, self.param_groups, state_dict["param_groups"])
        states = state_dicts.renumbered(state_dict)
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
