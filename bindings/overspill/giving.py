"""What an engine leaves behind that gives its model back: a model as plain PyTorch has one, and the states of its
optimizers in the script's own objects.

Those of fp32 weights are what the engine has. Of bf16 weights torch keeps states in bf16, and no fp32 master, so the
script's optimizer gets such; what is exact lies beside, for the next engine, as long as the script has not changed
state or weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction

from . import _core, files, hooks, moments, optim, reading, script_optimizer
from .memory import available_bytes, human
from .residency import Residency
from .segments import Segment, get_grad, registry, set_data, set_grad
from .units import memory_order

if TYPE_CHECKING:
    from .engine import Engine

GIVEN = (
    "the engine of this model was ended by give_back(): the weights are in the model, and the states in the optimizer "
    "that was given to overspill.initialize. Use those, run forward again, or make a new engine"
)
_EXACT = "_exact_states_of_an_engine"  # an attribute of the script's own optimizer


def is_possible(engine: Engine) -> bool:
    """Of several ranks only where no optimizer of a script gets states, and no gradient has to be given."""
    if not engine._place.on_host:
        return False
    if engine._group is None and engine.world_size == 1:
        return True
    user = getattr(engine.optimizer, "user", engine)  # several optimizers are the script's
    return user is None and not any(s.unit.trainable and s.has_gradient() for s in engine._residency.segments)


def check_gradients(owner: Residency) -> None:
    """Raises RuntimeError where there are gradients that a plain model could not use."""
    scale = owner.gradients.loss_scale
    if scale != 1 and any(s.unit.trainable and s.has_gradient() for s in owner.segments):
        raise RuntimeError(
            f"overspill: give_back: the engine has gradients of a loss times {scale:g} (loss_scaling), and a plain "
            "model has nobody who divides them: end the step (engine.step), or call engine.zero_grad(), before"
        )


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
    try:
        optimizer.settle()
        optimizer.prepare_to_leave()
        _give_weights(owner)
    except BaseException:
        if not owner.leaving:
            owner.given_out = None
            optimizer.stay()
        raise
    optimizer.leave()
    owner.gradients.by_torch = []  # they are the model's
    hooks.detach(owner)
    owner.why_closed = GIVEN


def _give_weights(owner: Residency) -> None:
    """All that may fail comes before the first weight is given."""
    if owner.given_out is None:
        owner.given_out = [(s, reading.copy(s), _gradient(s)) for s in owner.segments]
    owner.leaving = True  # from here on only another call of give_back goes on
    with DisableTorchFunction():
        for s, value, gradient in owner.given_out:
            if registry.get(id(s.parameter)) is not s:
                continue  # given already
            set_data(s.memory, value)
            s.parameter.__class__ = s.kind
            set_grad(s.parameter, gradient)
            del registry[id(s.parameter)]


def _gradient(s: Segment) -> torch.Tensor | None:
    with DisableTorchFunction():
        return get_grad(s.parameter) if s.unit.trained_by_torch else s.unit.residency.gradients.take_out(s)


@dataclass(frozen=True)
class _Kept:
    """What an engine had of one parameter, and digests of what the script's optimizer has got of it: fused steps count
    no versions."""

    exact: dict[str, torch.Tensor]
    given: dict[str, int]

    def is_unchanged(self, state: dict) -> bool:
        return digests(state) == self.given


def digests(state: dict[str, torch.Tensor]) -> dict[str, int]:
    with DisableTorchFunction():
        return {name: _core.digest(value.data_ptr(), value.nbytes) for name, value in state.items()}


@dataclass(frozen=True)
class Left:
    """What the script's optimizer gets: states, and what is exact of them. `is_ours`: it is of overspill.optim."""

    state: defaultdict[Any, dict]
    kept: dict[Any, _Kept]
    is_ours: bool


def states(optimizer: Any, held: Any) -> Left:
    """Those that the engine holds. Raises OSError where large ones, which lie in files, have no room. The optimizer is
    settled. `held`: its States."""
    groups, names, folder = optimizer.param_groups, optimizer.groups.states(), optimizer.folder
    every = [p for group in groups for p in group["params"]]
    found = Left(defaultdict(dict, held.others()), {}, isinstance(optimizer.user, optim.Optimizer))
    for number, entry in moments.states_of(groups, names, optimizer.residency, folder, held.has).items():
        parameter = every[number]
        if found.is_ours:  # it keeps states of bf16 weights in another form
            found.state[parameter] = entry
            continue
        theirs = {
            name: value if name in moments.SCALARS else _as_torchs(value, parameter.dtype, folder)
            for name, value in entry.items()
            if name != moments.MASTER and (held.counted or name != "step")
        }
        if theirs:
            found.state[parameter] = theirs
        if parameter.dtype is not torch.float32:
            found.kept[parameter] = _Kept(entry, digests(theirs))
    return found


def _as_torchs(value: torch.Tensor, dtype: torch.dtype, folder: str) -> torch.Tensor:
    if value.dtype is dtype:
        return value
    with torch.inference_mode(False), DisableTorchFunction():
        what, way_out = "engine.give_back() keeps the optimizer's states", "free space there"
        return files.tensor(value.shape, value.stride(), dtype, folder, what, way_out).copy_(value)


def leave(user: torch.optim.Optimizer, left: Left) -> None:
    """The states are the user's own optimizer's, whose calls are its own again. May be called again."""
    user.state = left.state
    others = user.__dict__.get(_EXACT, {})  # of parameters that this engine did not train
    user.__dict__[_EXACT] = {p: kept for p, kept in others.items() if p not in left.kept} | left.kept
    script_optimizer.let_go(user, _refuse if left.is_ours else None)


def exact(user: torch.optim.Optimizer, parameter: torch.Tensor) -> dict:
    """The parameter's state for an engine that takes the optimizer over: as the last engine had it, where the script
    has not changed it since; a weight that was changed has no master any more."""
    state = user.state.get(parameter, {})
    kept = user.__dict__.get(_EXACT, {}).get(parameter)
    if kept is not None and all(map(_is_dense, state.values())) and kept.is_unchanged(state):
        state = kept.exact
    master = state.get(moments.MASTER)
    if master is None or moments.is_rounded(parameter, master):
        return state
    return {name: value for name, value in state.items() if name != moments.MASTER}


def forget_exact(user: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """An engine has them again."""
    for parameter in parameters:
        user.__dict__.get(_EXACT, {}).pop(parameter, None)


def _is_dense(value: Any) -> bool:
    is_here = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided
    return is_here and memory_order(value) == value.stride()


def _refuse(user: torch.optim.Optimizer) -> None:
    if not any(moments.MASTER in entry for entry in user.state.values()):
        return  # others by now
    raise RuntimeError(
        f"overspill: the states of this {type(user).__name__} are those that engine.give_back() left, and a step "
        "without an engine keeps states of bf16 weights in another form: give the optimizer to overspill.initialize, "
        "or call optimizer.state.clear() to start without states"
    )
