"""Parameters that came into a model, or left it, since its engine was made: a checkpoint is of those that the engine
has, and would not be the model's."""

from __future__ import annotations

from torch import nn

from .divided import memory_of
from .pretrained import some
from .residency import Residency


def check(model: nn.Module, owner: Residency) -> None:
    """Before a save. Raises RuntimeError that names them, frozen ones too."""
    check_new(model, owner)
    present = {id(p) for p in model.parameters()}
    left = [segment.name for segment in owner.segments if id(segment.parameter) not in present]
    if left:
        raise RuntimeError(
            f"overspill: save_checkpoint: {some(left)} left the model after overspill.initialize, and a checkpoint "
            "would keep the values: change the model before initialize, or save engine.state_dict() with torch.save"
        )


def check_new(model: nn.Module, owner: Residency) -> None:
    """Raises RuntimeError that names those which came."""
    mine = {id(segment.parameter) for segment in owner.segments}
    came = [name for name, p in model.named_parameters() if id(p) not in mine and _has_elements(p)]
    if came:
        raise RuntimeError(
            f"overspill: save_checkpoint: {some(came)} came into the model after overspill.initialize, and a "
            "checkpoint would not have the values: change the model before initialize, keep what is new outside it, "
            "or save engine.state_dict() with torch.save"
        )


def _has_elements(parameter: nn.Parameter) -> bool:
    uninitialized = isinstance(parameter, nn.parameter.UninitializedTensorMixin)
    return not uninitialized and memory_of(parameter).numel() > 0
