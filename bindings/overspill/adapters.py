"""Adapters of PEFT over a base that an engine holds."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from . import reading
from .state import persistent_buffers


def is_adapted(module: Any) -> bool:
    """Whether it is a model of PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of those weights that `save_pretrained` of a model of PEFT writes: it takes them as its `state_dict`. What
    PEFT does by itself is to read the whole base before it picks them.

        model.save_pretrained(FOLDER, state_dict=overspill.adapters.weights(model))

    Args:
        model: of PEFT, which an engine has, or a part of a model that one has. Of several ranks all call this

    Returns: tensors on the CPU by their names in the model, in its own shapes and dtypes; they are the caller's.

    Raises: TypeError where it is no model of PEFT.
    """
    if not is_adapted(model):
        raise TypeError(
            f"overspill: adapters.weights: {type(model).__name__} is no model of PEFT: give a PeftModel"
        )
    held = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)
    return reading.copies({name: held[name] for name in _chosen(model, held)})


def _chosen(model: Any, held: dict[str, torch.Tensor]) -> list[str]:
    """The names that PEFT picks where it is shown tensors without memory; all where it computes with them."""
    import peft

    shown = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in held.items()}
    places = {id(tensor): name for name, tensor in shown.items()}
    picked: set[str] = set()
    for adapter in model.peft_config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says the same once more where it saves
            try:
                found = peft.get_peft_model_state_dict(model, state_dict=shown, adapter_name=adapter).values()
            except (NotImplementedError, RuntimeError):
                return list(held)
        if any(id(each) not in places and getattr(each, "is_meta", False) for each in found):
            return list(held)
        picked |= {places[id(each)] for each in found if id(each) in places}
    return [name for name in held if name in picked]
