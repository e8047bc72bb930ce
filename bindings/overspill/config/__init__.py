"""The configuration: what a script or a JSON file may say, checked before anything is allocated.

Here are `Config`, its sections and what they mean for the core. Optimizers have sections of their own (optimizers.py);
below lie what a section is (section.py), what a value is (values.py) and how files are read (files.py)."""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import warnings
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from .. import memory
from ..deepspeed import settings as deepspeed_json
from .files import read_json
from .optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    NAdam,
    Optimizer,
    RMSprop,
)
from .section import ConfigError, NotSupportedHere, Section, explained
from .values import LEAST_MOVED, Bytes, Float, Int, each_once, folder, no_truth_value, parse_size

__all__ = (
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Budget",
    "Config",
    "ConfigError",
    "EngineOptions",
    "Frozen",
    "Lion",
    "LossScaling",
    "NAdam",
    "NotSupportedHere",
    "RMSprop",
    "Scheduler",
    "ZeroOptimization",
    "parse_size",
)


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


class Budget(Section):
    """Bytes that each tier may use."""

    process: Bytes | None = None
    """What the process may take of host memory in all: `host`, activations, gradients on their way, torch and Python.
    Where forward would take more, it raises a BudgetError, which says what would do
    (docs/activations.md#the-whole-process). If `host` is not given, the engine takes half of what remains of `process`
    after what the process already holds when it reads the configuration. Only where the CPU computes. null: the engine
    does not limit the process."""
    host: Bytes = Field(default_factory=_measured)
    """Host memory of this rank: what the engine holds there, the arena of `activations` included. Other activations and
    torch's own memory come on top. Where it is missing: half of what is free when the configuration is read, divided by
    the ranks on this machine."""
    device: Bytes | None = None
    """Memory of a GPU: for gathered weights, then for units that live there. The rest is the model's, for activations.
    null: half of what is free when the engine starts."""
    nvme: Annotated[list[Annotated[str, AfterValidator(folder)]], AfterValidator(each_once)] = []  # noqa: RUF012  # pydantic copies it
    """Folders on fast disks, one a disk. An empty list keeps everything in host memory."""
    activations: Bytes | None = None
    """The part of `host`, of each rank, that holds what autograd saves in forward; what does not fit goes to `nvme`,
    and gradients are the same to the bit (docs/activations.md). Not on a GPU. null: it stays where the model
    computes."""
    logits: Annotated[Bytes | None, Field(ge=1 << 20)] = None
    """The most that logits, in fp32, may take at once: where a linear layer outside the model's blocks makes more, the
    engine computes their loss in tiles of tokens (docs/activations.md#logits). Sums are then in another order. null:
    logits are whole."""
    tile: Annotated[Bytes | None, Field(ge=1 << 16)] = None
    """Linear layers and embeddings whose weight takes more than this are computed in tiles of so many bytes, so that no
    weight has to fit into `host` whole (docs/large-models.md#a-weight-larger-than-memory). Sums are then in another
    order. Only on one rank, and where the CPU computes. null: weights are whole."""
    endurance_tbw: Float | None = Field(None, ge=0)
    """Terabytes (TBW) that may be written to each drive below `nvme`, from its data sheet. Only reports use it. null:
    what the drive tells."""

    @model_validator(mode="before")
    @classmethod
    def _host_of_process(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("process") is None or given.get("host") is not None:
            return given
        try:
            limit = parse_size(given["process"])
        except (TypeError, ValueError):
            return given  # the field's own error
        left = memory.left_of(limit)
        if left == 0:
            raise ValueError(
                f"process: the process has {memory.human(memory.own_bytes())} already, and nothing is left of "
                f"{memory.human(limit)}: give more, or build the model inside overspill.Init"
            )
        return given | {"host": left // 2}


def _schedule(name: str) -> str:
    from ..deepspeed.lr_schedules import find

    find(name)
    return name


class Scheduler(Section):
    """Stepped by `engine.step` at every update that is not skipped."""

    type: Annotated[str, AfterValidator(_schedule)]
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, which are DeepSpeed's; or a class of
    torch.optim.lr_scheduler."""
    params: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it
    """Its arguments, without the optimizer."""


class ZeroOptimization(Section):
    """DeepSpeed's section: what is partitioned over ranks."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(no_truth_value)] = 3
    """0: nothing; 1: states; 2: gradients too; 3: weights too. The same bits at every stage (docs/ranks.md)."""


_LONGEST_SECONDS = 1e9  # 31 years: the core counts nanoseconds in 64 bits


def _job(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", name):
        raise ValueError(
            "a name has up to 200 letters, digits, '-', '_' and '.', and does not begin with '.' (--job); leave it out "
            "for one that no other run has"
        )
    return name


class Frozen(Section):
    """How weights that do not train are held."""

    format: Literal["nf4", "int8"] | None = None
    """The format of frozen linear layers: 4 or 8 bits, with one scale for each 64 numbers, as in QLoRA (docs/peft.md).
    null: they stay as they are."""


class LossScaling(Section):
    """`engine.backward` multiplies the loss by a scale, for weights in fp16 or torch.autocast in fp16. The engine
    divides by it before it computes norms, clips and updates. Needs `on_nonfinite` "skip". The keys are those of
    DeepSpeed's fp16 (docs/scripts.md, fp16)."""

    enabled: bool = False
    """false: a loss is taken as it is; a script may scale it with torch.amp.GradScaler."""
    loss_scale: Float = Field(0.0, ge=0, le=2.0**100)
    """A fixed scale. 0: the engine adjusts the scale while it trains; the keys below apply only then."""
    initial_scale_power: Int = Field(16, ge=0, le=100)
    """The first scale is 2 to this power."""
    loss_scale_window: Int = Field(1000, ge=1, lt=2**31)
    """After so many steps in a row without an inf or a NaN the scale doubles."""
    hysteresis: Int = Field(2, ge=1, lt=2**31)
    """So many steps must overflow (an inf or a NaN) before the scale halves; each further one then halves it again."""
    consecutive_hysteresis: bool = False
    """true: a step without overflow starts the count of `hysteresis` again. false: only a scale that doubles does."""
    min_loss_scale: Float = Field(1.0, gt=0, le=2.0**100)
    """The least scale. A step that overflows at it, where the scale would halve, raises NonFiniteError."""


class EngineOptions(Section):
    """How the engine works. Only `compile` and `device` change a result: torch adds in another order in compiled code
    and on a GPU. Upper bounds are far above any use, and below what the core's integers hold."""

    threads: Int = Field(0, ge=0, le=2**16)
    """How many threads the engine uses for updates. Torch's own threads come on top. 0: one for each core, or two fewer
    beside a GPU."""
    prefetch_units: Int = Field(4, ge=0, lt=2**31)
    """How many units (mostly: layers) are read ahead of the one that computes."""
    speculate: bool = False
    """Updates run in backward, before the norm is known: for runs that seldom clip. A wrong guess costs time and wear,
    never a bit."""
    chunk_elements: Int = Field(524288, gt=0, le=2**40)
    """Numbers in the piece in which states are moved and updated. The same on all ranks."""
    placement: Literal["auto", "host", "half", "nvme", "device"] = "auto"
    """Where weights and states live. "auto": the planner chooses, within the budgets. "host", "nvme" and "device" force
    that tier; "half" puts the parts alternately into host memory and on NVMe."""
    device: str = "auto"
    """Where the model computes. "auto": a GPU where there is one; "host" (or "cpu"); "cuda", "cuda:1" and so on."""
    recompute: Literal["none", "blocks", "auto"] = "none"
    """"blocks": of the model's repeated modules the engine keeps only the inputs, and backward computes the rest again,
    to the same bits (docs/activations.md). "auto" (one rank only): the planner recomputes as many blocks as make the
    step shortest, and the activations of the others move to NVMe within budget.activations. The same on all ranks."""
    partition_activations: bool = False
    """Backward computes blocks again from their inputs (`recompute`). Where all ranks of the model group have the same
    input, each rank keeps one slice of it, and the ranks exchange slices before the block is computed again
    (docs/activations.md). Only where the CPU computes, and for layers divided by tensor parallelism. All ranks set it
    alike."""
    compile: bool = False
    """The engine has torch.compile compile the model's repeated modules, once for all that are alike (docs/compile.md).
    Compiled code adds in another order, so losses differ in the last bits."""
    checkpoints_kept: Int = Field(1, ge=0, le=10**6)
    """The number of checkpoints for which the engine reserves disk space at its start."""
    train_after_save: bool = True
    """false: the engine reserves room for one copy of the states only, and makes no step after a save."""
    io_backend: Literal["auto", "io_uring", "threads"] = "auto"
    """How disks are read and written. "auto": io_uring where the kernel allows it, else threads."""
    job: Annotated[str, AfterValidator(_job)] | None = None
    """Names the files on NVMe, with the rank. null: a name of its own for every engine."""
    transport: Literal["auto", "group", "nccl"] = "auto"
    """What carries bytes between ranks. "auto": NCCL where each has a GPU of its own, else the group of
    torch.distributed."""
    bucket: Annotated[Bytes, Field(ge=0)] = 1 << 20
    """Layers that ranks gather at the same time go as one call, up to so many bytes (docs/ranks.md); 0: each goes
    alone. The same on all ranks."""
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


class Config(Section):
    """The whole configuration. `Config.read` accepts a dict, the path of a JSON file, or a Config; every key is in
    docs/configuration.md."""

    beside_unknown = "; the model's own configuration is engine.module.config"

    budget: Budget = Field(default_factory=Budget)
    """What the engine may use of each tier."""
    optimizer: Optimizer = AdamW()
    """Not used where `initialize` is given an optimizer. DeepSpeed's form {"type": ..., "params": {...}} is taken too,
    with what it means there."""
    format: Literal["exact", "compact", "8bit"] | None = None
    """How bf16 weights and their states are held (docs/update.md); fp32 and fp16 weights have fp32 states, and fp16
    weights fp32 masters. null: "exact"."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """The dtype to which `initialize` converts the weights before it takes them; buffers stay as they are. null: none
    is converted."""
    loss_scaling: LossScaling = LossScaling()
    """Whether and how the engine scales losses, so that small gradients do not become zero in fp16."""
    frozen: Frozen = Frozen()
    """Weights that do not train, such as the base of adapters."""
    scheduler: Scheduler | None = None
    """The schedule of the learning rate: an object with the keys below. null: the rate stays as it is. The engine
    ignores this key when the script gives `initialize` a scheduler."""
    seed: Int = Field(0, ge=0, lt=2**63)
    """The seed of stochastic rounding (formats "compact" and "8bit"), and of the order of `training_data` over several
    ranks."""
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
            source = read_json(source)
        try:
            return cls.model_validate(meant(source))
        except ValidationError as error:
            raise ConfigError(explained(error, cls)) from None

    def shared(self) -> dict[str, Any]:
        """What has to be the same on all ranks: all but budgets, disks and how the engine works."""
        return self.model_dump(mode="json", exclude={"budget", "engine"}) | {
            "engine.chunk_elements": self.engine.chunk_elements,
            "engine.bucket": self.engine.bucket,
        }

    def to_core(self, core: Any, rank: int | None = None, part: int | None = None, place: Any = None) -> Any:
        """The flat configuration of `overspill._core`; `rank` where there are several, `part` of a model that other
        ranks hold the rest of: files are named by both. `place` (place.py) is where the model computes; without it, for
        a plan, the device that is named."""
        flat = core.Config()
        flat.host_budget_bytes = self.budget.host
        flat.activations_bytes = self.budget.activations or 0
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
        flat.bucket_bytes = self.engine.bucket
        for name in type(self.engine).model_fields:
            if name not in (
                "job",
                "bucket",
                "rank_timeout_seconds",
                "io_deadline_seconds",
                "device",
                "transport",
                "recompute",
                "compile",
                "partition_activations",
            ):
                setattr(flat, name, getattr(self.engine, name))
        flat.device = place.name if place is not None else self._planned_device()
        if flat.device == "host" and self.engine.placement == "device":
            raise ConfigError(
                "config: engine.placement = 'device' and the model computes on the host, where there is no device's "
                "memory: name a GPU (engine.device, --device), or another placement"
            )
        if self.engine.recompute == "auto":
            self._check_choice(flat.device, alone=rank is None and part is None)
        if self.budget.process is not None:
            self._check_process(self.budget.process, flat.device)
        if self.engine.partition_activations and place is not None:
            self._check_partition(flat.device, part is not None)
        if self.budget.tile is not None:
            self._check_tile(self.budget.tile, flat.device, alone=rank is None and part is None)
        if self.budget.activations is not None:
            self._check_activations(self.budget.activations, flat.device)
        # Containers count processes by themselves: two on one disk may both be process 1.
        flat.job = self.engine.job or f"{os.getpid()}-{next(_engines)}-{secrets.token_hex(4)}"
        if rank is not None:
            flat.job += f"-rank{rank}"
        if part is not None:
            flat.job += f"-part{part}"
        return flat

    def _check_choice(self, device: str, alone: bool) -> None:
        wanted = 'config: engine.recompute = "auto"'
        blocks = 'set engine.recompute = "blocks", with which backward computes all blocks again'
        if device != "host":
            raise NotSupportedHere(f"{wanted}: not supported where the model computes on {device}: {blocks}")
        if not alone or self.vertical_accumulation:
            several = "several ranks" if not alone else "vertical_accumulation"
            raise NotSupportedHere(
                f'{wanted}: not supported with {several}: {blocks}, or "none", with which the engine moves what '
                "they save"
            )
        if self.budget.activations is None:
            raise ConfigError(
                f"{wanted}: needs budget.activations, the memory through which the engine moves what it does not "
                f'compute again: set it, "1GiB" for instance, or {blocks}'
            )

    def _check_process(self, limit: int, device: str) -> None:
        wanted = f"config: budget.process = {limit}"
        if device != "host":
            raise NotSupportedHere(
                f"{wanted}: not supported where the model computes on {device}, whose memory holds the activations: "
                'leave it out, or compute on the CPU (engine.device = "host")'
            )
        if limit <= self.budget.host:
            raise ConfigError(
                f"{wanted}: budget.host = {self.budget.host} is a part of it, and leaves nothing for activations and "
                "torch: give more, or a smaller budget.host"
            )

    def _check_partition(self, device: str, is_part: bool) -> None:
        wanted = "config: engine.partition_activations = true"
        if device != "host":
            raise NotSupportedHere(
                f"{wanted}: not supported where the model computes on {device}: leave it out, or compute on the CPU "
                '(engine.device = "host")'
            )
        if not is_part:
            raise ConfigError(
                f"{wanted}: needs ranks that hold other parts of the model: give overspill.initialize process_group "
                "and model_group (docs/torchrun.md), or leave it out"
            )
        if self.engine.recompute == "none":
            raise ConfigError(
                f"{wanted}: divides the inputs of blocks that backward computes again: set engine.recompute = "
                '"blocks", or leave it out'
            )

    def _check_tile(self, size: int, device: str, alone: bool) -> None:
        why = (
            f'where the model computes on {device}: compute on the CPU (engine.device = "host")' if device != "host"
            else "with several ranks: train in one process" if not alone
            else "with engine.compile: leave that out" if self.engine.compile
            else "with vertical_accumulation: leave that out" if self.vertical_accumulation
            else None
        )  # fmt: skip
        if why is not None:
            raise NotSupportedHere(
                f"config: budget.tile = {size}: not supported {why}, or leave budget.tile out"
            )

    def _check_activations(self, size: int, device: str) -> None:
        wanted = f"config: budget.activations = {size}"
        if device != "host":
            raise NotSupportedHere(
                f"{wanted}: not supported: the model computes on {device}, and activations move only from the CPU's "
                'memory: compute there (engine.device = "host"), or leave the key out and '
                'set engine.recompute = "blocks", or use torch.autograd.graph.save_on_cpu'
            )
        if not self.budget.nvme:
            raise ConfigError(
                f"{wanted}: what does not fit there goes to disk, and no disk is given: name a folder (budget.nvme, "
                "--nvme), or leave the key out: activations then stay in memory"
            )
        if size < LEAST_MOVED:
            raise ConfigError(
                f"{wanted}: no tensor fits, since those under {LEAST_MOVED} bytes are not moved: give at least the "
                'largest tensor that forward saves, "1GiB" for instance, or null to leave activations in memory'
            )

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


def read_deepspeeds(data: dict[str, Any], world: int | None = None) -> Config:
    """What DeepSpeed's JSON means, also where no key of it is DeepSpeed's alone. `world`: how many ranks bring data of
    their own; None: all. Raises ConfigError."""
    return Config.read(_of_deepspeeds(data, world))


def _of_deepspeeds(data: dict[str, Any], world: int | None = None) -> dict[str, Any]:
    own = set(Config.model_fields)
    try:
        translated = deepspeed_json.translate(data, own, world)
    except ValueError as error:
        kind = NotSupportedHere if ": not supported: " in str(error) else ConfigError
        raise kind(str(error)) from None
    if message := translated.message():
        warnings.warn(message, stacklevel=4)
    return translated.config
