"""`initialize`: looks at what a script gives, and makes the engine of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from . import checkpointing, divided, given, parts, pretrained, ranks
from .config import Config
from .config.section import ConfigError
from .deepspeed import lr_schedules
from .engine import Engine
from .optimizer import OverspillOptimizer

ConfigSource = Config | dict[str, Any] | str | os.PathLike[str]
Data = Dataset[Any] | torch.Tensor | Sequence[Any]
OptimizerT = TypeVar("OptimizerT", OverspillOptimizer, parts.Several)


class Initialized(NamedTuple, Generic[OptimizerT]):
    """What `initialize` returns. It unpacks: `engine, optimizer, dataloader, lr_scheduler = initialize(...)`.

    Attributes:
        engine: the model, as an nn.Module, with the calls that train and save it
        optimizer: steps the engine; of a list of optimizers a sequence in the same order
        dataloader: over `training_data`, in micro-batches of this rank; None without it
        lr_scheduler: the one that `engine.step` steps; None without one
    """

    engine: Engine
    optimizer: OptimizerT
    dataloader: Any  # DataLoader | None: a script knows which
    lr_scheduler: Any


@overload
def initialize(
    model: nn.Module | None = ...,
    config: ConfigSource | None = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    lr_scheduler: LRScheduler | Callable[[OverspillOptimizer], Any] | None = ...,
    training_data: Data | None = ...,
    collate_fn: Callable[[list[Any]], Any] | None = ...,
    model_parameters: Iterable[Any] | None = ...,
    checkpoint: str | os.PathLike[str] | None = ...,
    process_group: Any = ...,
    model_group: Any = ...,
    replicated: Iterable[Any] | Mapping[Any, str] = ...,
    resume_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = ...,
) -> Initialized[OverspillOptimizer]: ...


@overload
def initialize(
    model: nn.Module | None,
    config: ConfigSource | None,
    optimizer: Sequence[torch.optim.Optimizer],
    lr_scheduler: None = ...,
    training_data: Data | None = ...,
    collate_fn: Callable[[list[Any]], Any] | None = ...,
    model_parameters: Iterable[Any] | None = ...,
    checkpoint: str | os.PathLike[str] | None = ...,
    process_group: Any = ...,
    model_group: Any = ...,
    replicated: Iterable[Any] | Mapping[Any, str] = ...,
    resume_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = ...,
) -> Initialized[parts.Several]: ...


def initialize(
    model: nn.Module | None = None,
    config: ConfigSource | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    lr_scheduler: Any = None,
    training_data: Data | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    model_parameters: Iterable[Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    model_group: Any = None,
    replicated: Iterable[Any] | Mapping[Any, str] = (),
    resume_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> Initialized[Any]:
    """Hands `model` over to an engine. Returns the named tuple (engine, optimizer, dataloader or None, lr_scheduler or
    None).

    Args:
        model: on the CPU or on the GPU that computes, weights in bf16, fp32 or float64. The engine owns its weights
            from here on. None: the causal language model of `checkpoint`, in the dtype of its config.json
        config: a dict, the path of a JSON file, or a Config (docs/configuration.md); DeepSpeed's JSON too
            (docs/coming-from-deepspeed.md)
        optimizer: an optimizer of torch.optim, overspill.optim or the script's own, over all trainable parameters
            (docs/scripts.md); or a list of optimizers, each over other parameters, which comes back as a sequence in
            the same order; None: the configuration's
        lr_scheduler: stepped by `engine.step` at every update that is not skipped; one made on `optimizer`, or a
            callable optimizer -> scheduler; not with a list of optimizers
        training_data: a data set of torch.utils.data, a tensor or a list of samples, the first dimension samples;
            needs train_micro_batch_size_per_gpu in the configuration
        collate_fn: the loader's, from a list of samples to a micro-batch; None: torch's
        model_parameters: parameters or groups for the configuration's optimizer; None: all trainable ones
        checkpoint: a Hugging Face folder of safetensors with the weights, read one by one straight into the engine;
            the model may be made inside `Init(empty=True)`
        process_group: a torch.distributed group, the ranks that share the model and each bring data of their own;
            None: the default group, made here under torchrun (docs/torchrun.md). All of its ranks call `initialize`;
            rank 0's weights and buffers count
        model_group: a torch.distributed group, the ranks that hold the parts of a model divided by tensor or pipeline
            parallelism, this one among them, for the same data: gradient norms span it. Give `process_group` too, the
            ranks that hold the same part as this one
        replicated: parameters, or their names, of which other ranks of `model_group` hold copies: the norm counts each
            once. Where a copy has another name elsewhere, a mapping to a name that is the same everywhere. Of a model
            with DTensors (parallelize_module), what their mesh holds whole is known without it
        resume_from: the checkpoint that `load_checkpoint` will open, the folder that has it and others of the run, or a
            list of them: the engine goes on in the slabs that they left on its disks, so it needs no more room there
            than the run before, and loading copies nothing (docs/store.md). None: it takes new room

    Raises:
        ConfigError: a key or a value of the configuration is wrong
        BudgetError: a budget is too small; the message has the sum and the smallest one that would do
        CheckpointError: names or shapes of `checkpoint` do not fit the model; nothing is changed
        StoreError: a folder of `budget.nvme` cannot be used
        FolderError: `resume_from` has no checkpoint
        RankError, EngineFailed: ranks differ, or one of them is lost
        ValueError, TypeError: a wrong argument
    """
    return begin(
        Engine,
        model,
        config,
        optimizer,
        lr_scheduler,
        training_data,
        collate_fn,
        model_parameters,
        checkpoint,
        process_group,
        model_group,
        replicated,
        resume_from,
    )


def begin(
    kind: type[Engine],
    model: nn.Module | None,
    config: ConfigSource | None,
    optimizer: Any,
    lr_scheduler: Any,
    training_data: Any,
    collate_fn: Any,
    model_parameters: Iterable[Any] | None,
    checkpoint: Any = None,
    process_group: Any = None,
    model_group: Any = None,
    replicated: Iterable[Any] | Mapping[Any, str] = (),
    resume_from: Any = None,
) -> Initialized[Any]:
    """`initialize`, for an engine of that class."""
    with ranks.Joining(process_group, model_group if process_group is not None else None) as joining:
        _check_groups(process_group, model_group, replicated)
        settings = Config.read(config)  # type: ignore[arg-type]  # None is an error that it names
        group, rest = joining.join(settings.engine.rank_timeout_seconds)
        # Beyond this point a rank that is killed is noticed too: the others wait on its connections.
        if optimizer is not None and model_parameters is not None:
            raise ValueError("overspill: give optimizer or model_parameters, not both")
        if optimizer is not None and "optimizer" in settings.model_fields_set:
            warnings.warn(
                f"overspill: the configuration's optimizer ({settings.optimizer.type}) is not used: optimizer = "
                f"{type(optimizer).__name__} is given to initialize. Leave one of the two out",
                stacklevel=3,
            )
        if lr_scheduler is not None and settings.scheduler is not None:
            warnings.warn(
                f"overspill: the configuration's scheduler ({settings.scheduler.type}) is not used: lr_scheduler is "
                "given to initialize. Leave one of the two out",
                stacklevel=3,
            )
        given.model(model)
        given.training_data(training_data, collate_fn)
        if isinstance(optimizer, (list, tuple)):
            parts.check(settings, lr_scheduler or settings.scheduler)
        given.lr_scheduler(lr_scheduler)
        if model is None:
            if checkpoint is None:
                raise ValueError("overspill: give model, or checkpoint, or both")
            model, checkpoint = pretrained.causal_lm(checkpoint, settings)
        given.dtype(model, settings.dtype)
        divided.check(model, model_group, checkpoint)
        counted_elsewhere = ranks.counted_elsewhere(rest, model, replicated, divided.copies(model))
        engine = kind(
            model,
            settings,
            optimizer,
            model_parameters,
            checkpoint,
            group,
            rest,
            counted_elsewhere,
            resume_from,
        )
        try:
            engine.lr_scheduler = _scheduler(lr_scheduler or _configured(settings), engine.optimizer)
            loader = _loader(training_data, settings, collate_fn, group)
        except BaseException as error:
            engine._end.give_up(error)
            raise
        return Initialized(engine, engine.optimizer, loader, engine.lr_scheduler)


def _check_groups(process_group: Any, model_group: Any, replicated: Any) -> None:
    if model_group is not None and process_group is None:
        raise ValueError(
            "overspill: model_group needs process_group too, the ranks that hold the same part of the model"
        )
    if replicated and model_group is None:
        raise ValueError("overspill: replicated says what other ranks of model_group hold: give model_group")


def _configured(settings: Config) -> Callable[[Any], Any] | None:
    """The configuration's scheduler, to be made on an optimizer."""
    chosen = settings.scheduler
    if chosen is None:
        return None

    def make(optimizer: Any) -> Any:
        try:
            return lr_schedules.find(chosen.type)(optimizer, **chosen.params)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config: scheduler = {chosen.type}: {error}") from None

    return make


def _scheduler(scheduler: Any, optimizer: OverspillOptimizer) -> Any:
    if isinstance(scheduler, type) or (scheduler is not None and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
        if not hasattr(scheduler, "step"):
            raise TypeError(
                f"overspill: lr_scheduler returned {given.kind_of(scheduler)}, no scheduler: return the one that it "
                "makes"
            )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "overspill: ReduceLROnPlateau needs a metric: make it on the optimizer that initialize "
            "returns, and step it"
        )
    bound = getattr(scheduler, "optimizer", optimizer)
    if bound is not optimizer and bound is not optimizer.user:
        raise ValueError("overspill: lr_scheduler was made on another optimizer than the one given")
    if scheduler is not None:
        try:
            checkpointing.check_scheduler(scheduler)
        except TypeError as error:
            warnings.warn(f"{error}. engine.save_checkpoint is refused until then", stacklevel=4)
    return scheduler


def _loader(
    data: Any,
    settings: Config,
    collate_fn: Callable[[list[Any]], Any] | None,
    group: ranks.Group | None = None,
) -> DataLoader[Any] | None:
    if data is None:
        return None
    mapped = not isinstance(data, IterableDataset)
    part = ranks.sampler(data, group.world, group.rank, settings.seed) if group and mapped else None
    return loader(data, settings, collate_fn, part, settings.dataloader_drop_last)


def loader(
    data: Any,
    settings: Config,
    collate_fn: Callable[[list[Any]], Any] | None,
    part: Sampler[int] | None,
    drop_last: bool,
) -> DataLoader[Any]:
    """Over micro-batches: of `part`; else of all, shuffled unless the data is an iterable one. Raises ValueError where
    the configuration has no size of a micro-batch."""
    size = settings.train_micro_batch_size_per_gpu
    if size is None:
        raise ValueError("overspill: training_data needs train_micro_batch_size_per_gpu in the configuration")
    shuffle = part is None and not isinstance(data, IterableDataset)
    return DataLoader(data, size, shuffle=shuffle, sampler=part, collate_fn=collate_fn, drop_last=drop_last)
