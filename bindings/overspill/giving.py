"""What an engine leaves behind that gives its model back: a model as plain PyTorch has one."""

from __future__ import annotations

from torch._C import DisableTorchFunction

from . import files, hooks, reading
from .memory import available_bytes, human
from .residency import Residency, registry, set_data

GIVEN = (
    "the engine of this model was ended by give_back(), and the weights are the model's: make a new engine, or an "
    "optimizer of torch, for it"
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


def give(owner: Residency) -> None:
    """Between two passes, inside calls.Alone. May be called again where Ctrl-C broke it off."""
    for s in owner.segments:
        if registry.get(id(s.parameter)) is not s:
            continue  # given already
        value = reading.copy(s)
        with DisableTorchFunction():
            set_data(s.memory, value)
            s.parameter.__class__ = s.kind
            del registry[id(s.parameter)]
    hooks.detach(owner)
    owner.why_closed = GIVEN
