"""From a script's model and optimizer to what the core is given, and what is refused on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn

from . import _core, given, hooks, packed, place, pretrained, ranks
from .activations import recompute
from .config import Config
from .foreign import of_torch
from .groups import Groups, choose_format, group_indices, has_float64, make_groups, unit_format
from .layers import logits, tiled_layers
from .parts import by_parameter, number
from .segments import get_data, registry, set_data
from .takeover import take_over
from .units import DTYPES, ParameterSpec, UnitSpec, memory_order, partition


def check(model: nn.Module, alone: bool) -> None:
    """Raises ValueError for a model that no engine can take. `alone`: it is of one rank."""
    taken = [name for name, p in model.named_parameters() if id(p) in registry]
    if taken:
        raise ValueError(
            f"overspill: {taken[0]} belongs to another engine: go on with that one, call its give_back() first, or "
            "make the model anew (copy.deepcopy(model) is a model of its own)"
        )
    closed = hooks.closed_part(model)
    if closed is not None:
        raise ValueError(
            f"overspill: the engine of {closed} was closed, and its weights are gone: make the model anew"
        )
    grown = {name: p for name, p in model.named_parameters() if p.grad is not None}
    frozen = next((name for name, p in grown.items() if not p.requires_grad), None)
    if frozen is not None:
        raise ValueError(
            f"overspill: {frozen} is frozen, and has a gradient already, with which torch would train it: call "
            "model.zero_grad() before overspill.initialize"
        )
    if grown and not alone:
        raise ValueError(
            f"overspill: {next(iter(grown))} has a gradient already, and no rank of several has whole ones: call "
            "model.zero_grad() before overspill.initialize"
        )
    shared = given.in_shared_memory(model)
    if shared is not None:
        raise ValueError(
            f"overspill: {shared} is in shared memory (share_memory()), and other processes would not see "
            "what the engine trains: leave share_memory out, and send model.state_dict() to them"
        )


def source(model: nn.Module, checkpoint: Any) -> pretrained.Folder | None:
    """The checkpoint, checked against the model. Without one every parameter must have a value."""
    if checkpoint is not None:
        found = pretrained.Folder(checkpoint)
        found.check(model)
        return found
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"overspill: {name} is on the meta device and has no value: give initialize(checkpoint=DIR), or "
                "build the model inside `with overspill.Init(config):`"
            )
    return None


def groups(
    model: nn.Module, config: Config, optimizer: Any, parameters: Iterable[Any] | None, alone: bool
) -> list[tuple[Groups, Any]]:
    """The parameter groups, and the optimizer that they are of: the script's own, torch's where that has to make the
    steps, or None. Of a list of optimizers, those of each."""
    if isinstance(optimizer, (list, tuple)):
        return _of_several(optimizer, alone)
    if optimizer is None:
        found = make_groups(config.optimizer, model.parameters() if parameters is None else parameters)
        if has_float64(found.groups):
            optimizer = of_torch(found)
    if optimizer is not None:
        found = take_over(optimizer)
    _check_foreign(found, alone)
    if found.taken is not None and not alone:
        raise ranks.RankError(
            f"overspill: the {found.kind} has made steps already, and several ranks would each hold a part of its own "
            "states: give a new optimizer and call engine.load_checkpoint, on all ranks, or call "
            "optimizer.state.clear() to start without states"
        )
    return [(found, optimizer)]


def _of_several(optimizers: Sequence[Any], alone: bool) -> list[tuple[Groups, Any]]:
    if not optimizers:
        raise ValueError(
            "overspill: optimizer is an empty list: give the optimizers, or leave it out for the configuration's"
        )
    if not alone:
        raise ranks.RankError(
            "overspill: several optimizers over one model train on one rank: give one optimizer with a group for each, "
            "or make an engine for each part of the model"
        )
    if len({id(each) for each in optimizers}) < len(optimizers):
        raise ValueError("overspill: optimizer has the same optimizer twice: give each once")
    found = [take_over(each) for each in optimizers]
    seeds = {each.seed for each in found if each.seed is not None}
    if len(seeds) > 1:
        raise ValueError(f"overspill: the optimizers differ in seed: {sorted(seeds)}; an engine has one")
    number(found)
    return list(zip(found, optimizers, strict=True))


def _check_foreign(found: Groups, alone: bool) -> None:
    if found.foreign and not alone:
        raise ranks.RankError(
            f"overspill: the engine has no update of {found.foreign}, and {found.kind}'s own code cannot step "
            "what several ranks hold in parts: give torch.optim.AdamW, or another of the engine's (docs/scripts.md, "
            "Optimizers), over bf16 or float32, or train on one rank"
        )


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of before, dense, by the names of their parameters, which have none any more."""
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradients[name] = p.grad if p.grad.layout is torch.strided else p.grad.to_dense()
            p.grad = None
    return gradients


def units(model: nn.Module, config: Config, where: place.Place, taken: Sequence[Groups]) -> list[UnitSpec]:
    """The model's units. `taken`: of each optimizer. Raises ValueError where there are none."""
    packings = packed.chosen(model, config.frozen.format, where.on_host)
    found = partition(model, where.device, by_parameter(taken), packings)
    if not found:
        raise ValueError(
            f"overspill: {type(model).__name__} has no parameters with elements, so there is nothing for an engine to "
            "hold"
        )
    mark_tiles(model, config, found)
    return found


def mark_tiles(model: nn.Module, config: Config, specs: list[UnitSpec]) -> None:
    """Which units are read in tiles. A layer whose logits are made in tiles has its weights whole."""
    whole = logits.layers_of(model) if config.budget.logits is not None else ()
    tiled_layers.mark(model, specs, config.budget.tile, whole)


def core_units(
    model: nn.Module,
    config: Config,
    specs: Sequence[UnitSpec],
    taken: Sequence[Groups],
    counted_elsewhere: Set[int] = frozenset(),
) -> list[Any]:
    """As the core takes them. `taken`: of each optimizer; `counted_elsewhere`: the ids of parameters that another
    rank's norm counts. Raises ValueError where groups or formats do not fit the model."""
    formats = [spec.format for spec in specs]
    updates = [(each.core, choose_format(config.format, each, formats)) for each in taken]
    groups = group_indices([group for each in taken for group in each.groups], model)
    together = _together(model) if config.engine.compile else {}
    return [
        _core.Unit(
            spec.name,
            unit_format(spec.format, updates[spec.part][1]),
            DTYPES[spec.dtype if spec.packing is None else torch.uint8],
            [
                _core.Segment(
                    p.name,
                    _core_shape(spec, p),
                    groups.get(id(p.parameter), 0),
                    p.aliases,
                    list(memory_order(p.memory)) if spec.packing is None else [],
                    id(p.parameter) not in counted_elsewhere,
                    0 if spec.packing is None else p.memory.numel(),
                )
                for p in spec.parameters
            ],
            updates[spec.part][0],
            spec.packing or "",
            together.get(id(spec.parameters[0].parameter), -1),
            spec.part_bytes,
        )
        for spec in specs
    ]


def _together(model: nn.Module) -> dict[int, int]:
    """The number of the compiled block that a parameter is in, by its id; WITH_EACH_BLOCK where it is in several."""
    found: dict[int, int] = {}
    for at, block in enumerate(recompute.blocks_of(model, is_part=True)):
        for p in block.parameters():
            found[id(p)] = at if found.get(id(p), at) == at else _core.WITH_EACH_BLOCK
    return found


def core_settings(
    config: Config, where: place.Place, taken: Sequence[Groups], of: Sequence[ranks.Group | None]
) -> Any:
    """As the core takes them. `of`: the ranks that share the model's weights, and those that hold its other parts."""
    found = config.to_core(_core, *[None if each is None else each.rank for each in of], where)
    if seed := next((each.seed for each in taken if each.seed), None):
        found.rounding_seed = seed
    return found


def place_rest(model: nn.Module, where: place.Place) -> None:
    """Moves what no unit holds there: buffers, and parameters without elements."""
    if where.on_host:
        return
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), where.put(buffer))
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in registry:
                set_data(parameter, where.put(get_data(parameter)))


def _core_shape(spec: UnitSpec, parameter: ParameterSpec) -> list[int]:
    if spec.packing is None:
        return list(parameter.memory.shape)
    return [packed.size(spec.packing, spec.dtype, parameter.memory.numel())]


def check_ranks(
    group: ranks.Group, config: Config, specs: list[UnitSpec], groups: Groups, counted_elsewhere: Set[int]
) -> None:
    """Raises RankError on every rank where models, optimizers or configurations differ."""
    parameters = {
        f"parameter {p.name}": (
            spec.name,
            str(spec.dtype),
            list(p.memory.shape),
            p.parameter.requires_grad,
            id(p.parameter) in counted_elsewhere,
        )
        for spec in specs
        for p in spec.parameters
    }
    options = {
        f"param_groups[{i}].{name}": value
        for i, given in enumerate(groups.groups)
        for name, value in given.items()
        if name != "params"
    }
    alike = {"the optimizer": groups.kind, "engine.recompute": config.engine.recompute}
    group.check_alike(alike | config.shared() | options | parameters)
