"""The section of each optimizer, DeepSpeed's form of one, and which numbers an optimizer can use."""

from __future__ import annotations

import numbers
import warnings
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from .section import Section
from .values import Float

_Rate = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
_Beta = Annotated[Float, Field(ge=0, lt=1)]


class AdamW(Section):
    """Decoupled weight decay. Hyper-parameters have torch.optim's names, in this section and those below."""

    type: Literal["AdamW"] = "AdamW"
    """Which optimizer: upper and lower case are alike."""
    lr: _Rate = 1e-3
    """Learning rate."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay of the average of gradients, and of that of their squares."""
    eps: _Rate = 1e-8
    """Is added to the root of the second average."""
    weight_decay: _Rate = 0.01
    """A fraction of the weight a step, times lr."""
    maximize: bool = False
    """Steps up the gradient."""


class Adam(AdamW):
    """Weight decay as an L2 term, as torch's Adam. In DeepSpeed's form, with "params", Adam is AdamW unless adam_w_mode
    is false."""

    type: Literal["Adam"] = "Adam"  # type: ignore[assignment]
    """Which optimizer."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight."""


class Adagrad(Section):
    """Duchi, Hazan and Singer 2011."""

    type: Literal["Adagrad"] = "Adagrad"
    """Which optimizer."""
    lr: _Rate = 1e-2
    """Learning rate."""
    lr_decay: _Rate = 0.0
    """The rate of a step is lr / (1 + (step - 1) lr_decay)."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight."""
    initial_accumulator_value: _Rate = 0.0
    """What the sums of squares begin with."""
    eps: _Rate = 1e-10
    """Is added to the root of the sum of squares."""
    maximize: bool = False
    """Steps up the gradient."""


class Lion(Section):
    """Chen et al. 2023 (arXiv 2302.06675): steps by the sign of an average."""

    type: Literal["Lion"] = "Lion"
    """Which optimizer."""
    lr: _Rate = 1e-4
    """Learning rate, about a tenth of AdamW's."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)
    """Decay of what gives the sign, and of the average."""
    weight_decay: _Rate = 0.0
    """A fraction of the weight a step, times lr."""
    maximize: bool = False
    """Steps up the gradient."""


class SGD(Section):
    """With momentum and Nesterov's form of it."""

    type: Literal["SGD"] = "SGD"
    """Which optimizer."""
    lr: _Rate = 1e-3
    """Learning rate."""
    momentum: _Rate = 0.0
    """Of the buffer of past gradients; 0 has none."""
    dampening: Float = Field(0.0, allow_inf_nan=False)
    """Of the gradient that enters the buffer."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight."""
    nesterov: bool = False
    """Nesterov's form; needs a momentum and no dampening."""
    maximize: bool = False
    """Steps up the gradient."""

    @model_validator(mode="after")
    def _check(self) -> SGD:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum and no dampening")
        return self


class RMSprop(Section):
    """Tieleman and Hinton 2012, with or without momentum."""

    type: Literal["RMSprop"] = "RMSprop"
    """Which optimizer."""
    lr: _Rate = 1e-2
    """Learning rate."""
    alpha: _Beta = 0.99
    """Decay of the average of squares."""
    eps: _Rate = 1e-8
    """Is added to the root of the average."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight."""
    momentum: _Rate = 0.0
    """Of the buffer of past steps; 0 has none."""
    maximize: bool = False
    """Steps up the gradient."""


class NAdam(Section):
    """Dozat 2016: Adam with Nesterov's momentum."""

    type: Literal["NAdam"] = "NAdam"
    """Which optimizer."""
    lr: _Rate = 2e-3
    """Learning rate."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay of the average of gradients, and of that of their squares; betas[0] must not change during training."""
    eps: _Rate = 1e-8
    """Is added to the root of the second average."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight; or see decoupled_weight_decay."""
    momentum_decay: _Rate = 4e-3
    """The momentum of a step is betas[0] (1 - 0.96^(step momentum_decay) / 2); it must not change during
    training."""
    decoupled_weight_decay: bool = False
    """weight_decay is a fraction of the weight a step, times lr, as in AdamW."""
    maximize: bool = False
    """Steps up the gradient."""


class Adamax(Section):
    """Kingma and Ba 2014, algorithm 2: Adam that divides by the largest past gradient, which decays by betas[1] a
    step."""

    type: Literal["Adamax"] = "Adamax"
    """Which optimizer."""
    lr: _Rate = 2e-3
    """Learning rate."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay of the average of gradients, and of their largest size."""
    eps: _Rate = 1e-8
    """Is added to the gradient's size."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight."""
    maximize: bool = False
    """Steps up the gradient."""


class Adadelta(Section):
    """Zeiler 2012: steps as large as the last ones were."""

    type: Literal["Adadelta"] = "Adadelta"
    """Which optimizer."""
    lr: _Rate = 1.0
    """What a step is multiplied by."""
    rho: _Beta = 0.9
    """Decay of the averages of the gradient's and the steps' squares."""
    eps: _Rate = 1e-6
    """Is added to both averages."""
    weight_decay: _Rate = 0.0
    """Is added to the gradient, times the weight."""
    maximize: bool = False
    """Steps up the gradient."""


_TYPES = {
    kind.__name__.lower(): kind
    for kind in (AdamW, Adam, Adagrad, Lion, SGD, RMSprop, NAdam, Adamax, Adadelta)
}


def flat_optimizer(data: Any) -> Any:
    """DeepSpeed's {"type", "params": {...}} with what it means there, as the flat form; a flat one as it is. Raises
    ValueError."""
    if not isinstance(data, dict):
        return data
    name = data.get("type", "AdamW")
    kind = _TYPES.get(str(name).lower())
    params = data.get("params")
    if not isinstance(params, dict):
        return {**data, "type": kind.__name__ if kind else name}
    beside = {key: value for key, value in data.items() if key not in ("params", "type")}
    if "type" in params:
        raise ValueError("type belongs beside params, not in it")
    for key in params.keys() & beside.keys():
        if params[key] != beside[key]:
            raise ValueError(
                f"{key} = {beside[key]!r} beside params and {params[key]!r} in it: leave one out"
            )
    params = {**params, **beside}
    if "max_grad_norm" in params:
        raise ValueError("max_grad_norm does not belong here; give gradient_clipping")
    if kind in (AdamW, Adam):
        from_torch = params.pop("torch_adam", False)
        unsaid = kind is Adam and "adam_w_mode" not in params
        decoupled = params.pop("adam_w_mode", True)  # there Adam is AdamW unless this says otherwise
        kind = AdamW if kind is AdamW or decoupled else Adam
        if params.pop("bias_correction", True) is not True:
            raise ValueError("bias_correction = false is not supported")
        params.setdefault("weight_decay", kind.model_fields["weight_decay"].default if from_torch else 0.0)
        if unsaid and params["weight_decay"]:
            _tell_adam_is_adamw()
    if kind is Lion:
        params.setdefault("lr", 1e-3)
        params.setdefault("betas", (0.9, 0.999))
    if kind in (AdamW, Adam, Adagrad, Lion) and params.pop("fp32_optimizer_states", True) is not True:
        raise ValueError('fp32_optimizer_states = false: give "format": "compact" for states in bf16')
    if kind is not None and params.pop("amsgrad", False):
        raise ValueError("amsgrad is not supported")
    return {**params, "type": kind.__name__ if kind else name}


def optimizer_keys(kind: Any) -> set[str]:
    """What the section of this type of optimizer may have; nothing where there is no such type."""
    section = _TYPES.get(kind.lower()) if isinstance(kind, str) else None
    return set(section.model_fields) if section else set()


def wrong_hyper_parameter(name: str, value: Any) -> str:
    """Why the optimizers that have a number `name` (betas: numbers) do not take this one, in words; empty where they
    do, or where none has it."""
    kind = next((kind for kind in _TYPES.values() if name in kind.model_fields), None)
    if kind is None or value is None or isinstance(value, bool):
        return ""
    try:
        kind.model_validate({name: value})
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return ""


def unusable_number(optimizer: str, name: str, value: Any, scheduled: bool = True) -> str:
    """Why an update cannot use a parameter group's number, in words; empty where it can, or where the optimizer has no
    such number. As a configuration, but that it takes no number in words. `scheduled`: a rate may be below zero, where
    a schedule's last steps lead it in torch too."""
    field = _TYPES[optimizer.lower()].model_fields.get(name)
    if field is None or field.annotation is bool or name == "type":
        return ""
    single = field.annotation is float
    values = [value] if single or not isinstance(value, (tuple, list)) else value
    if any(isinstance(each, bool) or not isinstance(each, numbers.Real) for each in values):
        return "a number is expected" if single else "two numbers are expected"
    if single:
        try:
            value = float(value)
        except OverflowError:
            return "the number is too large"
        value = abs(value) if scheduled and name == "lr" else value
    return wrong_hyper_parameter(name, value)


def _tell_adam_is_adamw() -> None:
    warnings.warn(
        'overspill: optimizer {"type": "Adam", "params": {...}} is AdamW, as in DeepSpeed: weight decay is decoupled. '
        '"adam_w_mode": true in its params says that this is meant, false makes weight decay an L2 term',
        stacklevel=3,
    )


Optimizer = Annotated[
    AdamW | Adam | Adagrad | Lion | SGD | RMSprop | NAdam | Adamax | Adadelta,
    Field(discriminator="type"),
    BeforeValidator(flat_optimizer),
]
