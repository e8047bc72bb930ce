"""What an engine leaves behind that gives its model back: a model as plain PyTorch has one, and the states of its
optimizers in the script's own objects."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import files, hooks, moments, optim, reading
from .memory import available_bytes, human
from .residency import Residency, registry, set_data

GIVEN = (
    "the engine of this model was ended by give_back(), and the weights are the model's: make a new engine, or an "
    "optimizer of torch, for it"
)
_MASTER = "master"  # moments.py
_UNFIT = "_has_states_of_an_engine"  # an attribute of the user's own optimizer


def check_room(owner: Residency) -> None:
    """Raises MemoryError where the weights that do not lie in files have no room beside the engine's."""
    needed = sum(s.bytes for s in owner.segments if owner.folder.path is None or s.bytes < files.FROM)
    available = available_bytes()
    if needed > available:
        raise MemoryError(
            f"overspill: give_back needs {human(needed)} of memory beside the engine's, and {human(available)} are "
            "available: with a folder in budget.nvme the weights lie in files there, or save them "
            "(engine.save_checkpoint) and load them into a new model"
        )


def give(owner: Residency, optimizer: Any) -> None:
    """Between two passes, inside calls.Alone. May be called again where Ctrl-C broke it off."""
    optimizer.settle()
    optimizer.prepare_to_leave()
    try:
        _give_weights(owner)
    except Exception:
        optimizer.stay()
        raise
    optimizer.leave()
    hooks.detach(owner)
    owner.why_closed = GIVEN


def _give_weights(owner: Residency) -> None:
    for s in owner.segments:
        if registry.get(id(s.parameter)) is not s:
            continue  # given already
        value = reading.copy(s)
        with DisableTorchFunction():
            set_data(s.memory, value)
            s.parameter.__class__ = s.kind
            del registry[id(s.parameter)]


def states(optimizer: Any) -> defaultdict[Any, dict]:
    """Those that the engine holds, as torch's optimizer of the class has them; in fp32, with the master of bf16
    weights, so that an engine which takes the optimizer over goes on to the bit. Raises OSError where large ones, which
    lie in files, have no room. The optimizer is settled."""
    names = optimizer.groups.states()
    found: defaultdict[Any, dict] = defaultdict(dict)
    entries = moments.states_of(optimizer.param_groups, names, optimizer.residency, optimizer.folder)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entry in entries.items():
        # Torch's SGD counts no steps; a master alone has to tell that there were some.
        if not optimizer.state.counted and ("momentum_buffer" in entry or _MASTER not in entry):
            entry.pop("step")
        if entry:
            found[every[number]] = entry
    return found


def leave(user: torch.optim.Optimizer, given: defaultdict[Any, dict]) -> None:
    """The states are the user's own optimizer's. May be called again."""
    user.state = given
    user.__dict__[_UNFIT] = any(p.dtype is not torch.float32 for p in given)
    user.step = _fitting(user)


def _fitting(user: torch.optim.Optimizer) -> Callable:
    """The optimizer's step, before which states get the form that it wants."""
    reference = weakref.ref(user)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        _fit(optimizer)
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # as a scheduler expects it
    return step


def _fit(optimizer: torch.optim.Optimizer) -> None:
    if not optimizer.__dict__.get(_UNFIT):
        return
    if isinstance(optimizer, optim.Optimizer) and optimizer.state:
        raise RuntimeError(
            f"overspill: the states of this {type(optimizer).__name__} are those that engine.give_back() left, and a "
            "step without an engine keeps states of bf16 weights in another form: give the optimizer to "
            "overspill.initialize, or call optimizer.state.clear() to start without states"
        )
    for parameter, entry in optimizer.state.items():
        entry.pop(_MASTER, None)
        for name, value in entry.items():
            if name != "step" and isinstance(value, torch.Tensor):
                entry[name] = value.to(parameter.dtype)
    optimizer.__dict__[_UNFIT] = False
