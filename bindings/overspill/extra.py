"""What a checkpoint says besides weights and states: read and checked whole, before a load changes anything.

The text is not trusted. Whatever it says, the outcome is an `Extra` that can be applied, or a CheckpointError
that names the checkpoint and the entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import state
from ._core import CheckpointError
from .config.optimizers import wrong_hyper_parameter
from .divided import Division
from .loss_scaling import Course
from .own_states import Saved
from .tensor_file import no_number

_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)
_WAY_OUT = "it is damaged, or another program wrote it: use another checkpoint"
# Of torch's schedulers: numbers that all of them count with, and lists with a number a parameter group.
_COUNTS = ("last_epoch", "_step_count")
_A_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


@dataclass(frozen=True)
class Extra:
    """Entries of a checkpoint, decoded. `random` has the states of each rank of the run that saved."""

    folder: str
    client_state: state.ClientState
    groups: list[dict[str, Any]]
    lr_scheduler: dict[str, Any] | None
    buffers: dict[str, torch.Tensor]
    global_steps: int
    micro_steps: int
    random: list[dict[str, Any]]
    own_states: Saved | None
    loss_scaling: Course | None

    @classmethod
    def read(cls, text: str, folder: Any) -> Extra:
        """What `Engine.save_checkpoint` wrote. `folder` is what errors name. Raises CheckpointError."""
        entries = _entries(text, folder)

        def get(name: str, parse: Callable[[Any], Any]) -> Any:
            if name not in entries:
                raise CheckpointError(
                    f"overspill: {folder}: its manifest's entry 'extra' has no {name}; {_WAY_OUT}"
                )
            return _entry(folder, name, parse, entries[name])

        ranks = "random_of_ranks" if "random_of_ranks" in entries else "random"
        return cls(
            folder=str(folder),
            client_state=get("client_state", _client_state),
            groups=get("optimizer", _groups),
            lr_scheduler=_entry(folder, "lr_scheduler", _scheduler, entries.get("lr_scheduler")),
            buffers=get("buffers", _tensors),
            global_steps=get("global_steps", _count),
            micro_steps=get("micro_steps", _count),
            loss_scaling=_entry(folder, "loss_scaling", Course.from_json, entries.get("loss_scaling")),
            own_states=_entry(folder, "own_states", Saved.from_json, entries.get("own_states")),
            random=get(ranks, _random if ranks == "random_of_ranks" else lambda value: _random([value])),
        )

    def check(self, buffers: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises CheckpointError unless this is of a model with these buffers, of an optimizer with these groups."""
        if len(self.groups) != len(groups):
            raise CheckpointError(
                f"overspill: {len(self.groups)} parameter groups in the checkpoint {self.folder}, {len(groups)} "
                "here; give initialize the groups of that run"
            )
        for i, (saved, mine) in enumerate(zip(self.groups, groups, strict=True)):
            for name, value in saved.items():
                if name in mine and not _alike(value, mine[name]):
                    raise CheckpointError(
                        f"overspill: parameter group {i} has {name} = {value!r:.60} in the checkpoint {self.folder}, "
                        f"{mine[name]!r:.60} here; use the optimizer of that run"
                    )
                if name in mine and (why := _wrong_number(name, value)):
                    raise CheckpointError(
                        f"overspill: parameter group {i} has {name} = {value!r:.60} in the checkpoint {self.folder}: "
                        f"{why}; {_WAY_OUT}"
                    )
        here, there = _forms(buffers), _forms(self.buffers)
        wrong = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
        if wrong:
            raise CheckpointError(
                f"overspill: buffer {wrong[0]} is {here.get(wrong[0], 'absent')} here, "
                f"{there.get(wrong[0], 'absent')} in the checkpoint {self.folder}; load it into the model that it "
                "was saved from"
            )

    def restore_scheduler(self, scheduler: Any) -> None:
        """Raises CheckpointError for a state that the scheduler does not take; it may have changed then."""

        if self.lr_scheduler is None:
            raise CheckpointError(
                f"overspill: the checkpoint {self.folder} has no scheduler, and this run has one: leave lr_scheduler "
                "out of initialize, load, and make the scheduler then"
            )
        load_scheduler(self.folder, scheduler, self.lr_scheduler)


def load_scheduler(folder: Any, scheduler: Any, values: dict[str, Any]) -> None:
    """Raises CheckpointError for a state that the scheduler does not take; it may have changed then."""

    def load(values: dict[str, Any]) -> None:
        for name in values:
            if name == "optimizer" or callable(getattr(type(scheduler), name, None)):
                raise ValueError(f"{name!r} is no value of a scheduler")
        _check_like(values, scheduler.state_dict(), "")
        scheduler.load_state_dict(values)

    _entry(folder, "lr_scheduler", load, values)


def tensors(text: str, folder: Any) -> dict[str, torch.Tensor]:
    """What a merged model has beside the engine's parameters: persistent buffers, and parameters without elements; none
    where the checkpoint is not of a PyTorch model. Raises CheckpointError."""
    entries = _entries(text, folder)
    names = ("buffers", "empty_parameters")
    buffers, empty = (_entry(folder, name, _tensors, entries.get(name, {})) for name in names)
    return {**empty, **buffers}


def tied(text: str, folder: Any) -> dict[str, str]:
    """Further names that a state dict has, each with the name of the same tensor in the checkpoint; none in one of a
    version that did not write them. Raises CheckpointError."""
    found: dict[str, str] = _entry(folder, "tied", _tied, _entries(text, folder).get("tied", {}))
    return found


def division(text: str, folder: Any) -> Division | None:
    """Which part of a divided model the checkpoint has; None of a whole one, or where it does not say. Raises
    CheckpointError."""
    found: Division | None = _entry(
        folder, "division", Division.from_json, _entries(text, folder).get("division")
    )
    return found


def _entries(text: str, folder: Any) -> dict[str, Any]:
    entries = _entry(folder, "extra", lambda text: json.loads(text, parse_constant=no_number), text)
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"overspill: {folder}: its manifest's entry 'extra' is not a JSON object; {_WAY_OUT}"
        )
    return entries


def _entry(folder: Any, name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except _WRONG as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"overspill: {folder}: {name} cannot be read ({reason}); {_WAY_OUT}") from None


def _client_state(value: Any) -> state.ClientState:
    decoded = state.decode(value)
    if not isinstance(decoded, dict):
        raise ValueError(f"{decoded!r:.40} is no dict, which is what save_checkpoint takes")
    return state.ClientState(decoded)


def _groups(value: Any) -> list[dict[str, Any]]:
    groups = state.decode(value)["groups"]
    if not isinstance(groups, list) or not all(_named(group) and "params" not in group for group in groups):
        raise ValueError("groups are a list of objects")
    return groups


def _scheduler(value: Any) -> dict[str, Any] | None:
    decoded = state.decode(value)
    if decoded is not None and not _named(decoded):
        raise ValueError("the state of a scheduler is an object")
    return decoded


def _tensors(value: Any) -> dict[str, torch.Tensor]:
    if not _named(value):
        raise ValueError("an object of tensors is expected")
    for name in value:
        name.encode()  # JSON can spell what no file can: half of a surrogate pair
    return {name: state.tensor_from_json(saved) for name, saved in value.items()}


def _tied(value: Any) -> dict[str, str]:
    if not _named(value) or not all(isinstance(name, str) for name in value.values()):
        raise ValueError("an object of names is expected")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _random(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r:.40} is no list with the states of each rank")
    for states in value:
        state.check_random_states(states)
    return value


def _named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _wrong_number(name: str, value: Any) -> str:
    """As of the configuration, but for the sign of a rate: a schedule may end a rounding error below zero."""
    signless = name in ("lr", "initial_lr") and isinstance(value, (int, float))
    return wrong_hyper_parameter("lr", abs(value)) if signless else wrong_hyper_parameter(name, value)


def _check_like(saved: Any, mine: Any, name: str) -> None:
    """Raises ValueError where a scheduler's value is of another kind than the one here: the scheduler's next step would
    fail, when the weights have changed. A value that is None, or absent, on one side is taken: a scheduler of the
    user's may set it later."""
    if isinstance(saved, dict) and isinstance(mine, dict):
        for key in saved.keys() & mine.keys():
            _check_like(saved[key], mine[key], str(key))
        return
    if name in _COUNTS and _is_number(mine) and not _is_number(saved):
        raise ValueError(f"{name} = {saved!r:.40} is no number")
    if isinstance(saved, (list, tuple)) and isinstance(mine, (list, tuple)):
        if name in _A_GROUP and (len(saved) != len(mine) or not all(map(_is_number, saved))):
            raise ValueError(f"{name} = {saved!r:.40} is no number for each of {len(mine)} parameter groups")
        for one, other in zip(saved, mine, strict=False):
            _check_like(one, other, "")
    elif saved is not None and mine is not None and _kind(saved) is not _kind(mine):
        raise ValueError(f"{name} = {saved!r:.40} is of another kind than {mine!r:.40}, which it is here")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _kind(value: Any) -> type:
    """One for all numbers, truth values too: versions of torch differ in them."""
    kinds = ((int, float), str, (list, tuple), dict)
    return next(
        (of[0] if isinstance(of, tuple) else of for of in kinds if isinstance(value, of)), type(value)
    )


def _alike(saved: Any, mine: Any) -> bool:
    """Whether a hyper-parameter has the kind of value that it has here."""
    if mine is None:
        return not isinstance(saved, (dict, list, tuple))
    if saved is None:
        return isinstance(mine, bool) or not isinstance(mine, (int, float, list, tuple, torch.Tensor))
    if isinstance(mine, (list, tuple)):
        alike = isinstance(saved, (list, tuple)) and len(saved) == len(mine)
        return alike and all(map(_alike, saved, mine))
    if isinstance(mine, (int, float, torch.Tensor)) and not isinstance(mine, bool):
        return isinstance(saved, (int, float)) and not isinstance(saved, bool)
    return isinstance(saved, type(mine))


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
