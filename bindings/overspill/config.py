"""The configuration: what a script or a JSON file may say, checked before anything is allocated."""

from __future__ import annotations

import difflib
import importlib
import itertools
import json
import math
import numbers
import os
import re
import secrets
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from . import memory
from ._core import OverspillError, StoreError
from .deepspeed import settings as deepspeed_json

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class ConfigError(OverspillError, ValueError):
    """A key or a value of the configuration is wrong; the message names it and what would be right."""


class NotSupportedHere(ConfigError, NotImplementedError):
    """A key of DeepSpeed's JSON asks for what Overspill does not have."""


def parse_size(value: Any) -> int:
    """Bytes, of an int or a text such as "600MiB", "20 GiB" or "1.5GB" (powers of 1000). Raises
    ValueError."""
    if isinstance(value, bool):
        raise ValueError('a size is a number of bytes or a text such as "600MiB"')
    size: float
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if not match or match[2].lower() not in _UNITS:
            raise ValueError('a size is a number of bytes or a text such as "600MiB", "20GiB"')
        unit = _UNITS[match[2].lower()]
        size = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if size < 0:
        raise ValueError("a size cannot be negative")
    if size >= 2**63:
        raise ValueError("a size has to be below 8388608TiB (2**63 bytes)")
    return int(size)


# A number of bytes, or a text such as "600MiB".
Bytes = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str)]


def can_name_a_file(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False


def _path(text: str) -> str:
    if not text:
        raise ValueError("the path is empty; name a folder (. is the current one)")
    if not can_name_a_file(text):
        raise ValueError(f"{text!r:.60} has characters that no path can have; name another folder")
    return text


def check_folders(folders: list[str]) -> None:
    """Raises StoreError for one that is no folder which can be written to. The core looks at them only once something
    has to lie there, and a typo would show in the middle of a run."""
    for folder in folders:
        is_folder = os.path.isdir(folder)
        if is_folder and os.access(folder, os.W_OK | os.X_OK):
            continue
        shown = os.fsencode(folder).decode("utf-8", "backslashreplace")
        if is_folder:
            raise StoreError(f"budget.nvme: {shown} is not writable for this user; name another folder")
        wrong = "is a file, not a folder" if os.path.exists(folder) else "does not exist"
        raise StoreError(f"budget.nvme: {shown} {wrong}; name a folder that is on the disk you mean")


def named_twice(folders: list[str]) -> str:
    """Which folder is there twice, in words; empty where none is. The second store in one folder would wait for the
    first one's lock."""
    seen: dict[str, str] = {}
    for folder in folders:
        real = os.path.realpath(folder)
        if real in seen:
            before = seen[real]
            names = f", as {before} and as {folder}" if before != folder else ""
            return f"{real} is named twice{names}; leave one out"
        seen[real] = folder
    return ""


def _each_once(folders: list[str]) -> list[str]:
    if twice := named_twice(folders):
        raise ValueError(twice)
    return folders


def _no_truth_value(value: Any) -> Any:
    """Python's True is 1: a key that was taken for a switch would be a number."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


# Numbers of the sections below.
Int = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
    from pydantic_core import ErrorDetails
else:
    ModelMetaclass = type(BaseModel)


class _Named(ModelMetaclass):
    """Of sections: what is wrong in one that is made in Python is a ConfigError too, in the same words."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(_explained(error, cls)) from None  # type: ignore[arg-type]


class _Section(BaseModel, metaclass=_Named):
    # The text below a field is its description (schema.py, docs/configuration.md).
    model_config = ConfigDict(
        extra="forbid", strict=False, validate_assignment=True, use_attribute_docstrings=True
    )

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if name not in kind.model_fields:
            whose = "; the model's own configuration is engine.module.config" if kind is Config else ""
            raise ConfigError(_unknown(name, name, value, kind) + whose)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(_explained(error, kind)) from None


def _measured() -> int:
    """budget.host where nobody gives it, said in one line."""
    free = memory.free_bytes()
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = max(1, int(text)) if text.isdecimal() else 1
    share = free // (2 * ranks)
    warnings.warn(
        f"overspill: budget.host is not given: the engine may use {memory.human(share)} of host memory, half of the "
        f"{memory.human(free)} that are free" + (f", divided by {ranks} ranks" if ranks > 1 else ""),
        stacklevel=2,
    )
    return share


class Budget(_Section):
    """Bytes that each tier may use."""

    host: Bytes = Field(default_factory=_measured)
    """Host memory of this rank: what the engine holds there. Activations and torch's own memory come on top. Where it
    is missing: half of what is free when the configuration is read, divided by the ranks on this machine."""
    device: Bytes | None = None
    """Memory of a GPU: for gathered weights, then for units that live there. The rest is the model's, for activations.
    null: half of what is free when the engine starts."""
    nvme: Annotated[list[Annotated[str, AfterValidator(_path)]], AfterValidator(_each_once)] = []
    """Folders on fast disks, one a disk. An empty list keeps everything in host memory."""
    endurance_tbw: Float | None = Field(None, ge=0)
    """Terabytes that each of their drives is rated to be written, from its data sheet. Only reports use it. null: what
    the drive tells."""


_Rate = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
_Beta = Annotated[Float, Field(ge=0, lt=1)]


class AdamW(_Section):
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


class Adagrad(_Section):
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


class Lion(_Section):
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


class SGD(_Section):
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


class RMSprop(_Section):
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


class NAdam(_Section):
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


class Adamax(_Section):
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


class Adadelta(_Section):
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


def _schedule(name: str) -> str:
    from .deepspeed.lr_schedules import find

    find(name)
    return name


Optimizer = Annotated[
    AdamW | Adam | Adagrad | Lion | SGD | RMSprop | NAdam | Adamax | Adadelta,
    Field(discriminator="type"),
    BeforeValidator(flat_optimizer),
]


class Scheduler(_Section):
    """Stepped by `engine.step` at every update that is not skipped."""

    type: Annotated[str, AfterValidator(_schedule)]
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, which are DeepSpeed's; or a class of
    torch.optim.lr_scheduler."""
    params: dict[str, Any] = {}
    """Its arguments, without the optimizer."""


class ZeroOptimization(_Section):
    """DeepSpeed's section: what is partitioned over ranks."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_truth_value)] = 3
    """0: nothing; 1: states; 2: gradients too; 3: weights too. The same bits at every stage (docs/ranks.md)."""


_LONGEST_SECONDS = 1e9  # 31 years: the core counts nanoseconds in 64 bits


def _job(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", name):
        raise ValueError(
            "a name has up to 200 letters, digits, '-', '_' and '.', and does not begin with '.' (--job); leave it out "
            "for one that no other run has"
        )
    return name


class Frozen(_Section):
    """How weights that do not train are held."""

    format: Literal["nf4", "int8"] | None = None
    """Of linear layers: in 4 or 8 bits with a scale for each 64, as QLoRA's base (docs/peft.md). null: as they are."""


class EngineOptions(_Section):
    """How the engine works; nothing here changes a result. Upper bounds are far above any use, and below what the
    core's integers hold."""

    threads: Int = Field(0, ge=0, le=2**16)
    """Of updates, beside torch's own. 0: all cores."""
    prefetch_units: Int = Field(4, ge=0, lt=2**31)
    """How many units are read ahead of the one that computes."""
    speculate: bool = False
    """Updates run in backward, before the norm is known: for runs that seldom clip. A wrong guess costs time and wear,
    never a bit."""
    chunk_elements: Int = Field(524288, gt=0, le=2**40)
    """Numbers in the piece in which states are moved and updated. The same on all ranks."""
    placement: Literal["auto", "host", "half", "nvme", "device"] = "auto"
    """Where weights and states live. "auto": as budgets allow; the others force one tier, and "half" two in turn."""
    device: str = "auto"
    """Where the model computes. "auto": a GPU where there is one; "host" (or "cpu"); "cuda", "cuda:1" and so on."""
    checkpoints_kept: Int = Field(1, ge=0, le=10**6)
    """For so many checkpoints the engine reserves room on the disks at its start."""
    train_after_save: bool = True
    """false: the engine reserves room for one copy of the states only, and makes no step after a save."""
    io_backend: Literal["auto", "io_uring", "threads"] = "auto"
    """How disks are read and written. "auto": io_uring where the kernel allows it, else threads."""
    job: Annotated[str, AfterValidator(_job)] | None = None
    """Names the files on NVMe, with the rank. null: a name of its own for every engine."""
    transport: Literal["auto", "group", "nccl"] = "auto"
    """What carries bytes between ranks. "auto": NCCL where each has a GPU of its own, else the group of
    torch.distributed."""
    rank_timeout_seconds: Float = Field(1800.0, gt=0, le=_LONGEST_SECONDS)
    """So long ranks wait for one another in a collective."""
    io_deadline_seconds: Float = Field(0.0, ge=0, le=_LONGEST_SECONDS)
    """A disk that answers nothing for so long fails the engine, which names it and the last complete checkpoint. 0: the
    engine waits for ever. Either way a line on stderr names the disk after 10 s, 20 s, 40 s and so on."""

    @field_validator("device")
    @classmethod
    def _host(cls, name: str) -> str:
        return "host" if name == "cpu" else name


_engines = itertools.count()  # of this process, for their files' names


class Config(_Section):
    """The whole configuration. `Config.read` accepts a dict, the path of a JSON file, or a Config; every key is in
    docs/configuration.md."""

    budget: Budget = Field(default_factory=Budget)
    """What the engine may use of each tier."""
    optimizer: Optimizer = AdamW()
    """Not used where `initialize` is given an optimizer. DeepSpeed's form {"type": ..., "params": {...}} is taken too,
    with what it means there."""
    format: Literal["exact", "compact", "8bit"] | None = None
    """How bf16 weights and their states are held (docs/update.md); fp32 weights have fp32 states. null: "exact"."""
    dtype: Literal["bf16", "fp32"] | None = None
    """To which `initialize` converts the weights before it takes them; buffers stay as they are. null: none is
    converted."""
    frozen: Frozen = Frozen()
    """Weights that do not train, such as the base of adapters."""
    scheduler: Scheduler | None = None
    """Of the learning rate. Not used where `initialize` is given one."""
    seed: Int = Field(0, ge=0, lt=2**63)
    """Of stochastic rounding, in "compact" and "8bit", and of the order of `training_data` over several ranks."""
    gradient_accumulation_steps: Int = Field(1, ge=1, lt=2**31)
    """Micro-batches of a step; `engine.backward` divides the loss by it."""
    managed_gradient_accumulation: bool = True
    """false: every `engine.step` updates, with all that was added up since the last one; gradient_accumulation_steps
    then only divides the loss."""
    vertical_accumulation: bool = False
    """In `engine.train_batch` the micro-batches of a step pass each layer together, so weights move once a pass."""
    gradient_clipping: Float = Field(0.0, ge=0)
    """Largest 2-norm of all gradients together. 0: no clipping (DeepSpeed's default is 1.0)."""
    on_nonfinite: Literal["skip", "raise", "propagate"] = "skip"
    """A step whose gradients have an inf or a NaN is left out; left out, and an error; or taken, as torch does."""
    gradients_of_ranks: Literal["mean", "sum"] = "mean"
    """What a step of several ranks uses: the mean of their gradients, or their sum."""
    train_micro_batch_size_per_gpu: Int | None = Field(None, ge=1)
    """Samples that the loader of `training_data` puts together, of one rank."""
    dataloader_drop_last: bool = False
    """The loader of `training_data` leaves out a last micro-batch that is smaller."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What ranks divide among themselves."""
    engine: EngineOptions = EngineOptions()
    """How the engine works."""

    @classmethod
    def read(cls, source: Config | dict[str, Any] | str | os.PathLike[str]) -> Config:
        """The configuration, checked; nothing is allocated.

        Args:
            source: a dict, the path of a JSON file, or a Config, which is returned as it is. A dict or file with keys
                of DeepSpeed's JSON is read as that (docs/coming-from-deepspeed.md)

        Raises: ConfigError that names the key, its value and the nearest valid key.
        """
        if isinstance(source, cls):
            return source
        if not isinstance(source, dict):
            source = _read_json(source)
        try:
            return cls.model_validate(meant(source))
        except ValidationError as error:
            raise ConfigError(_explained(error, cls)) from None

    def shared(self) -> dict[str, Any]:
        """What has to be the same on all ranks: all but budgets, disks and how the engine works."""
        return self.model_dump(mode="json", exclude={"budget", "engine"}) | {
            "engine.chunk_elements": self.engine.chunk_elements
        }

    def to_core(self, core: Any, rank: int | None = None, part: int | None = None, place: Any = None) -> Any:
        """The flat configuration of `overspill._core`; `rank` where there are several, `part` of a model that other
        ranks hold the rest of: files are named by both. `place` (place.py) is where the model computes; without it, for
        a plan, the device that is named."""
        flat = core.Config()
        flat.host_budget_bytes = self.budget.host
        flat.device_budget_bytes = self._device_bytes(place)
        flat.nvme = list(self.budget.nvme)
        open_ended = not self.managed_gradient_accumulation  # nobody knows which pass is a step's last
        flat.gradient_accumulation = max(self.gradient_accumulation_steps, 1 + open_ended)
        flat.micro_batches_together = self.vertical_accumulation
        flat.max_grad_norm = self.gradient_clipping
        flat.sum_over_ranks = self.gradients_of_ranks == "sum"
        flat.skip_nonfinite = self.on_nonfinite != "propagate"
        flat.rounding_seed = self.seed
        flat.stage = self.zero_optimization.stage
        flat.rank_timeout_ms = round(self.engine.rank_timeout_seconds * 1000)
        flat.io_deadline_ms = math.ceil(self.engine.io_deadline_seconds * 1000)
        for name in type(self.engine).model_fields:
            if name not in ("job", "rank_timeout_seconds", "io_deadline_seconds", "device", "transport"):
                setattr(flat, name, getattr(self.engine, name))
        flat.device = place.name if place is not None else self._planned_device()
        if flat.device == "host" and self.engine.placement == "device":
            raise ConfigError(
                "config: engine.placement = 'device' and the model computes on the host, where there is no device's "
                "memory: name a GPU (engine.device, --device), or another placement"
            )
        # Containers count processes by themselves: two on one disk may both be process 1.
        flat.job = self.engine.job or f"{os.getpid()}-{next(_engines)}-{secrets.token_hex(4)}"
        if rank is not None:
            flat.job += f"-rank{rank}"
        if part is not None:
            flat.job += f"-part{part}"
        return flat

    def _planned_device(self) -> str:
        if self.engine.device != "auto":
            return self.engine.device
        return "host" if self.budget.device is None else "cuda"

    def _device_bytes(self, place: Any) -> int:
        free = place.free_bytes() if place is not None and self.budget.device is None else None
        return self.budget.device or (free or 0) // 2


def meant(data: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's JSON as the configuration that it means, and a warning that names what has no meaning here; another
    one as it is. Raises ConfigError."""
    return _of_deepspeeds(data) if deepspeed_json.is_deepspeeds(data, set(Config.model_fields)) else data


def read_deepspeeds(source: dict[str, Any] | str | os.PathLike[str]) -> tuple[Config, dict[str, Any]]:
    """What DeepSpeed's JSON means, also where no key of it is DeepSpeed's alone, and the JSON. Raises ConfigError."""
    data = source if isinstance(source, dict) else read_deepspeed_json(source)
    return Config.read(_of_deepspeeds(data)), data


def read_deepspeed_json(path: Any) -> dict[str, Any]:
    """As JSON; else as HJSON, which DeepSpeed reads too, where the package hjson is installed. Raises ConfigError."""
    try:
        return _read_json(path)
    except ConfigError as error:
        if "is no JSON file" not in str(error):
            raise
        why = str(error)
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        raise ConfigError(
            f"{why}; HJSON, which DeepSpeed reads too, needs the package hjson: write JSON, or install it"
        ) from None
    try:
        data = hjson.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_with_each_key_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{why}, and no HJSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {os.fspath(path)} holds a {type(data).__name__}, not an object")
    return data


def _of_deepspeeds(data: dict[str, Any]) -> dict[str, Any]:
    own = set(Config.model_fields)
    try:
        translated = deepspeed_json.translate(data, own)
    except ValueError as error:
        kind = NotSupportedHere if ": not supported: " in str(error) else ConfigError
        raise kind(str(error)) from None
    if message := translated.message():
        warnings.warn(message, stacklevel=4)
    return translated.config


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"{json.dumps(twice)} is there twice in one object; leave one out")
    return made


def parse_json(text: str | bytes) -> Any:
    """JSON in which no object has a key twice: the last one would count without a word. NaN and Infinity, which Python
    reads, are no JSON. Raises ValueError, and RecursionError where it is nested too deeply.
    """

    def refused(constant: str) -> float:
        raise ValueError(f"{constant} is no number of JSON")

    return json.loads(text, object_pairs_hook=_with_each_key_once, parse_constant=refused)


def _read_json(path: Any) -> dict[str, Any]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            data = parse_json(file.read())
    except TypeError:
        swapped = hasattr(path, "param_groups")  # as in DeepSpeed's initialize
        raise ConfigError(
            f"config: a dict, a path or a Config is expected, not {type(path).__name__}"
            + (
                "; the optimizer is the third argument: initialize(model, config, optimizer)"
                if swapped
                else ""
            )
        ) from None
    except OSError as error:
        raise ConfigError(f"config: cannot read {os.fspath(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or a path that no file can have
        raise ConfigError(f"config: {os.fspath(path)!r} is no JSON file in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {os.fspath(path)} holds a {type(data).__name__}, not an object")
    return data


def _explained(error: ValidationError, root: type[BaseModel]) -> str:
    """`root`: the section that was made or changed, from which keys are counted."""
    return "\n".join(_explain(item, root) for item in error.errors())


def _explain(item: ErrorDetails, root: type[BaseModel]) -> str:
    """One line for one pydantic error."""
    path: list[Any] = list(item["loc"])
    if item["type"] == "union_tag_invalid":
        known = ", ".join(kind.__name__ for kind in _TYPES.values())
        where = ".".join(map(str, [*path, "type"]))
        return f"config: {where} = {item['ctx']['tag']!r}: one of {known} is expected"
    tag = path.pop(1) if path[:1] == ["optimizer"] and len(path) > 1 else None
    where = ".".join(str(part) for part in path)
    if item["type"] == "missing":
        return f"config: {where} is missing"
    if item["type"] != "extra_forbidden":
        reason = item["msg"].removeprefix("Value error, ")
        return f"config: {where} = {item['input']!r}: {reason}"
    return _unknown(where, str(path[-1]), item["input"], _section(path[:-1], tag, root))


def _unknown(where: str, name: str, value: Any, section: type[BaseModel]) -> str:
    known = sorted(section.model_fields)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    advice = f'did you mean "{near[0]}"?' if near else f"valid keys here: {', '.join(known)}"
    return f"config: {where} = {value!r}: unknown key; {advice}"


def _section(path: list[Any], tag: str | None, root: type[BaseModel]) -> type[BaseModel]:
    """`tag` is the optimizer's type, where the path leads into it."""
    if tag is not None:
        return _TYPES[tag.lower()]
    model = root
    for name in path:
        annotation = model.model_fields[name].annotation
        options = [annotation, *get_args(annotation)]
        model = next(kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model
