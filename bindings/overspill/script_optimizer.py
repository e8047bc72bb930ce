"""The script's own optimizer object, while an engine trains for it: its calls reach the engine's optimizer, its hooks
run there, and it is as it was once the engine lets it go."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import lr_scheduler

from .loss_scaling import PROTOCOL

PASSED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "_find_overflow")
HOOKS = {
    call: [f"_optimizer_{call}_{when}_hooks" for when in ("pre", "post")]
    for call in ("step", "state_dict", "load_state_dict")
}
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def without_hooks(step: Callable) -> Callable:
    """A class's step as it was written: torch wraps it for hooks when the first object of the class is made."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step


_STEPS = {
    kind: without_hooks(kind.step)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}


def has_torchs_step(kind: type) -> bool:
    """Whether the class's step is the one that torch has written, not one that a script has put in its place."""
    return without_hooks(kind.step) is _STEPS.get(kind)


def check(user: torch.optim.Optimizer) -> None:
    """Raises ValueError where a call of this object was replaced, which the engine would not make."""
    for name in PASSED:
        own = vars(user).get(name)
        if own is not None and not _is_known(own, type(user)):
            raise ValueError(
                f"overspill: the {name} of this {type(user).__name__} object was replaced, and the engine would not "
                f"call what took its place: write a child of the class with a {name} of its own"
                + (", or use hooks (register_step_pre_hook)" if name == "step" else "")
            )


def _is_known(own: Any, kind: type) -> bool:
    """Ours, or a scheduler's, which counts the calls of the class's own."""
    code = getattr(own, "__code__", None)
    if code is None or code.co_filename == __file__:
        return code is not None
    return code.co_filename == lr_scheduler.__file__ and own.__wrapped__ is kind.step


def pass_on(user: torch.optim.Optimizer, to: Any) -> None:
    """Calls of the user's object reach the one that has gradients and states, and do not keep it: the former has
    none."""
    reference = weakref.ref(to)

    def passing(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            alive = reference()
            if alive is None:
                raise RuntimeError(
                    f"overspill: {name}: the engine that took over this optimizer has ended, and the states with "
                    "it: keep the engine as long as you need them"
                )
            return getattr(alive, name)(*args, **kwargs)

        # A scheduler of the user's object wraps its step to see that it is called, or warns where something else stands
        # in its place; ours tells it (OverspillOptimizer.step).
        call._wrapped_by_lr_sched = True
        return call

    for name in PASSED:
        setattr(user, name, passing(name))
    # Torch's fused ones have it, and where their own code makes the steps the engine would clip scaled gradients.
    setattr(user, PROTOCOL, hasattr(to, PROTOCOL))


def let_go(user: torch.optim.Optimizer, before_step: Callable | None = None) -> None:
    """Its calls are its own again; `before_step` is called with it before each step. A scheduler that it has, or gets,
    is told of its steps."""
    for name in PASSED:
        user.__dict__.pop(name, None)
    user.__dict__.pop(PROTOCOL, None)
    if user.defaults.get("fused"):  # as torch has set it
        setattr(user, PROTOCOL, True)
    reference = weakref.ref(user)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        if before_step is not None:
            before_step(optimizer)
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    user.step = step


class Hooks(OrderedDict):
    """Those of the engine's optimizer, and before them those of the user's own, which are given that one."""

    def __init__(self, user: torch.optim.Optimizer, theirs: dict):
        super().__init__()
        self._user, self._theirs = user, theirs

    def values(self) -> Iterable[Callable]:
        return [*map(self._bound, list(self._theirs.values())), *super().values()]

    def _bound(self, hook: Callable) -> Callable:
        return lambda _, *args: hook(self._user, *args)


def share_hooks(user: torch.optim.Optimizer, to: Any, calls: Iterable[str]) -> None:
    for call in calls:
        for name in HOOKS[call]:
            setattr(to, name, Hooks(user, getattr(user, name)))
