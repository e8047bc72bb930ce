"""`deepspeed.initialize`: from the JSON and the script's objects to an engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .. import giving
from ..config import Config
from ..start import Initialized, begin
from . import comm, layer_drop, leaves, mup, own_keys, zero_params
from .engine import DeepSpeedEngine
from .living import engines
from .pipe import starting as pipelines

_IN_ARGS = "deepspeed_config", "deepscale_config"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized[Any]:
    """As DeepSpeed's: returns (engine, optimizer, dataloader, lr_scheduler).

    Args:
        args: may have deepspeed_config, the path of the JSON, or deepscale_config, its old name
        model: as of overspill.initialize, and so is what is not named here
        config: the JSON, a dict or a path
        config_params: its old name
        distributed_port: without a meaning here: torchrun says where ranks meet
        dist_init_required: without a meaning here, for the same reason
        mpu: refused; docs/ranks.md has tensor parallelism
        mesh_param: refused, for the same reason

    Raises: what overspill.initialize raises.
    """
    if mpu is not None or mesh_param is not None:
        raise TypeError(
            "overspill: mpu and mesh_param: divide the model with torch's parallelize_module (docs/ranks.md)"
        )
    source = _the_json(args, config, config_params)
    if model is None:
        raise AssertionError("overspill: deepspeed.initialize: model is missing: give the model to train")
    comm.init_distributed()  # as there: what calls it asks torch.distributed for its rank
    pipeline = pipelines.of(model)
    settings, data = own_keys.read(source, pipeline and pipeline.ranks)
    _check_zero(settings, data)
    drop = layer_drop.of(data)
    pipelines.check(pipeline, data, drop is not None)
    optimizer, model_parameters = _updated(model, optimizer, model_parameters, data)
    _leave_out(model, optimizer, model_parameters)
    zero = data.get("zero_optimization")
    leaves.mark(model, zero.get("leaf_module") if isinstance(zero, dict) else None)
    _let_go(model)
    elsewhere = isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is not optimizer
    made = begin(
        DeepSpeedEngine if pipeline is None else pipeline.engine,
        model,
        settings.model_copy(update={"scheduler": None}) if elsewhere else settings,
        optimizer,
        None if elsewhere else lr_scheduler,
        training_data if pipeline is None else None,
        collate_fn,
        model_parameters,
        **({} if pipeline is None else pipeline.groups()),
    )
    if pipeline is not None:
        made = pipeline.connected(made, training_data, collate_fn)
    if elsewhere:
        made = _with_scheduler_of_another(made, lr_scheduler)
    if made.engine.zero_optimization_stage() == 3:
        zero_params.mark(model.parameters())
    made.engine._json = data
    made.engine.progressive_layer_drop = drop
    made.engine._for_inference = optimizer is None and "optimizer" not in settings.model_fields_set
    engines.add(made.engine)
    return made


def _the_json(args: Any, config: Any, config_params: Any) -> Any:
    """A dict or a path; None where nobody gave one. Raises ValueError where it is given twice."""
    in_args = next((each for name in _IN_ARGS if (each := getattr(args, name, None)) is not None), None)
    given_as = [each for each in (config, config_params, in_args) if each is not None]
    if in_args is not None and len(given_as) > 1:
        raise ValueError(
            "overspill: the JSON is given twice, as config and as args.deepspeed_config: leave one out"
        )
    return given_as[0] if given_as else None


def _updated(model: nn.Module, optimizer: Any, parameters: Any, data: dict[str, Any]) -> tuple[Any, Any]:
    """The optimizer, and the parameters for the one that the JSON names: one of the two at most."""
    of_json = model.parameters() if parameters is None else parameters
    if optimizer is None and (scaled := mup.section_of(data)) is not None:
        return mup.make(scaled, of_json), None
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        return optimizer(of_json), None
    if optimizer is not None:
        return optimizer, None  # as there: the optimizer has them
    if parameters is not None and not isinstance(parameters, torch.Tensor):
        return None, list(parameters)
    return None, parameters


def _let_go(model: nn.Module) -> None:
    """As there, where a model may be given again: Trainer's evaluate() before train()."""
    for known in list(engines):
        if known.module is model and not known._end.over and giving.is_possible(known):
            known.give_back()


def _check_zero(settings: Config, data: dict[str, Any]) -> None:
    """What DeepSpeed asserts of keys that have no meaning here."""
    zero, stage = data.get("zero_optimization"), settings.zero_optimization.stage
    zero = zero if isinstance(zero, dict) else {}
    if zero.get("overlap_comm") is True and not settings.managed_gradient_accumulation and stage < 2:
        raise AssertionError(
            "overspill: managed_gradient_accumulation=False supports ZeRO overlap_comm only with ZeRO stage 2, as in "
            "DeepSpeed: leave overlap_comm out"
        )
    size = zero.get("allgather_bucket_size")
    if isinstance(size, int) and size % 2 and stage in (1, 2):
        raise AssertionError(
            f"overspill: allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2, and is {size}, as "
            "in DeepSpeed: leave it out"
        )


def _with_scheduler_of_another(made: Initialized[Any], scheduler: LRScheduler) -> Initialized[Any]:
    """As there, where it is stepped along."""
    warnings.warn(
        "overspill: deepspeed.initialize: lr_scheduler was made on another optimizer than the engine's: as in "
        "DeepSpeed it is stepped, and changes that optimizer's rates alone. Give that optimizer to initialize, or a "
        "callable that takes the engine's",
        stacklevel=3,
    )
    made.engine.lr_scheduler = scheduler
    return made._replace(lr_scheduler=scheduler)


def _leave_out(model: nn.Module, optimizer: Any, parameters: Any) -> None:
    """As there: what no group has is not updated. Several optimizers are looked at by `begin`."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: list[Any] = optimizer.param_groups
    elif optimizer is None and isinstance(parameters, list):
        groups = parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    else:
        return
    if not all(isinstance(group, dict) for group in groups):
        return  # an error that `begin` names
    lists = [group.get("params", ()) for group in groups]
    each = [p for params in lists for p in ([params] if isinstance(params, torch.Tensor) else list(params))]
    trained = {id(p[1] if isinstance(p, tuple) and len(p) == 2 else p) for p in each}
    left = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained}
    if not left:
        return
    warnings.warn(
        f"overspill: {', '.join(list(left)[:3])}{', ...' if len(left) > 3 else ''}: in no parameter group: as in "
        "DeepSpeed nothing updates them; they have requires_grad = False from here on",
        stacklevel=3,
    )
    for parameter in left.values():
        parameter.requires_grad_(False)
