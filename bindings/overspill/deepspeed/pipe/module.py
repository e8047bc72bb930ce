"""The layers of one stage, out of a model that is a sequence of layers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .. import checkpointing, comm
from .links import PipelineError
from .topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology


class LayerSpec:
    """A layer that is made only on the ranks of its stage: its class and the arguments of that."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(
                f"overspill: LayerSpec only supports torch.nn.Module types, and was given {typename!r:.80}"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        given = [
            *map(repr, self.module_args),
            *(f"{name}={value!r}" for name, value in self.module_kwargs.items()),
        ]
        return f"{self.typename.__name__}({', '.join(given)})"

    def build(self, log: bool = False) -> nn.Module:
        """log: without a meaning here."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer of which every place with the same `key` has the same weights, such as an embedding and the output's
    head. forward_fn(layer, x): what this place computes; None: layer(x). tied_weight_attr: the names of the parameters
    that are the same in all places; where two stages hold the layer, each has its own copy of its other parameters."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


class PipelineModule(nn.Module):
    """x = layer(x) for each layer of a model. This rank holds the layers of its stage alone. A layer is a module, a
    LayerSpec or a function; it takes what the layer before returned, a tensor or a tuple of tensors. Names of
    parameters begin with the number of their layer in the whole model, those of tied layers with "tied_modules." and
    their key.

    All ranks make it, alike. torch.distributed is set up here where nobody has.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ):
        """
        Args:
            layers: such as a torch.nn.Sequential
            num_stages, topology: one of the two; the number of ranks is a multiple of the stages
            loss_fn: loss_fn(output, labels) on the last stage; None: the last layer returns the loss
            seed_layers: generators of random numbers are seeded before each layer: with base_seed + its number where a
                LayerSpec is built, with base_seed * (forward passes so far) + its number before each of its forwards,
                so that dropout does not depend on the number of stages
            seed_fn: called with the seed; None: seeds Python's, numpy's and torch's generators
            partition_method: "parameters" balances the number of trainable parameters, "uniform" the number of layers,
                "type:REGEX" the number of layers whose class matches
            activation_checkpoint_interval: layers per segment that backward computes again; 0: none
            activation_checkpoint_func: called with a function and its arguments
            checkpointable_layers: a list of names of classes: only segments of such layers alone are computed again.
                None: every segment that has parameters
            dynamic_shape: what layers give may have another shape in each micro-batch
        """
        super().__init__()
        comm.init_distributed()
        self._specs = list(layers)
        self._topo = _topology(num_stages, topology)
        self._grid = PipelineParallelGrid(self._topo)
        self.loss_fn, self.dynamic_activation_shape = loss_fn, dynamic_shape
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn or _seed, base_seed
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.activation_checkpoint_func, self.checkpointable_layers = (
            activation_checkpoint_func,
            checkpointable_layers,
        )
        if isinstance(checkpointable_layers, str):
            raise TypeError(
                f"overspill: checkpointable_layers = {checkpointable_layers!r}: a list of names of classes is expected"
            )
        if hasattr(self, "get_additional_losses"):
            raise NotImplementedError(
                f"overspill: {type(self).__name__}.get_additional_losses is not supported: add such losses in loss_fn"
            )
        self._check_layers()
        if len(self._specs) < self.num_stages:
            raise PipelineError(
                f"overspill: PipelineModule: {len(self._specs)} layers cannot be divided into {self.num_stages} "
                "stages: give more layers or fewer stages"
            )
        self.parts = bounds(_weights(self._specs, partition_method), self.num_stages)
        self._refuse_shared()
        self.forward_funcs: list[Any] = []
        self.tied_modules = nn.ModuleDict()
        self._tied_names = {s.key: s.tied_weight_attr for s in self._specs if isinstance(s, TiedLayerSpec)}
        self._passes = 0  # of forward
        for number in range(*self._range()):
            self.forward_funcs.append(self._built(number, self._specs[number]))
        self.tied_stages: dict[str, list[int]] = {}  # of those that this one shares with others
        self._share_tied_weights()
        self._specs = [None] * len(self._specs)  # layers of other stages need no memory

    def _check_layers(self) -> None:
        """Of all stages, so that all ranks raise."""
        for number, spec in enumerate(self._specs):
            if isinstance(spec, PipelineModule):
                raise NotImplementedError("overspill: PipelineModule: one inside another is not supported")
            if not isinstance(spec, LayerSpec) and not callable(spec):
                raise TypeError(
                    f"overspill: PipelineModule: layer {number} is {spec!r:.80}: a module, a LayerSpec or a function "
                    "is expected"
                )

    def _refuse_shared(self) -> None:
        """What two stages would each have a copy of, which nothing keeps equal."""
        owners: dict[int, int] = {}
        for number, spec in enumerate(self._specs):
            for parameter in spec.parameters() if isinstance(spec, nn.Module) else ():
                if owners.setdefault(id(parameter), self.stage_owner(number)) != self.stage_owner(number):
                    raise PipelineError(
                        f"overspill: PipelineModule: layer {number} has a parameter of a layer of another stage: give "
                        "a TiedLayerSpec in both places"
                    )

    def _range(self) -> tuple[int, int]:
        return self.parts[self.stage_id], self.parts[self.stage_id + 1]

    def _built(self, number: int, spec: Any) -> Any:
        if isinstance(spec, LayerSpec) and self.seed_layers:
            self.seed_fn(self.base_seed + number)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
            tied = self.tied_modules[spec.key]
            return tied if spec.forward_fn is None else partial(spec.forward_fn, tied)
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(number), layer)
        return layer

    def _tied_stages(self) -> dict[str, list[int]]:
        """Maps each key to the stages that hold its layer, if more than one."""
        found: dict[str, set[int]] = {}
        for number, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                found.setdefault(spec.key, set()).add(self.stage_owner(number))
        return {key: sorted(stages) for key, stages in found.items() if len(stages) > 1}

    def _share_tied_weights(self) -> None:
        """Copies each tied weight from the first stage that holds it to the others. All ranks make all groups."""
        for key, stages in self._tied_stages().items():
            for line in self._topo.get_axis_comm_lists("pipe"):
                ranks = [line[stage] for stage in stages]
                group = dist.new_group(ranks)
                if self._grid.global_rank in ranks:
                    self.tied_stages[key] = stages
                    for parameter in self.tied_parameters(key).values():
                        dist.broadcast(parameter.detach(), ranks[0], group=group)
                    dist.destroy_process_group(group)

    def replicated(self) -> dict[str, str]:
        """Parameters of tied layers that other stages hold too, by name, as overspill.initialize takes them."""
        return {
            f"tied_modules.{key}.{name}": f"{key}.{name}"
            for key in self.tied_stages
            for name in self.tied_parameters(key)
        }

    def tied_parameters(self, key: str) -> dict[str, nn.Parameter]:
        """Those of the layer that tied_weight_attr names, by name. Raises ValueError where one is not there."""
        there = dict(self.tied_modules[key].named_parameters())
        for name in self._tied_names[key]:
            if name not in there:
                raise ValueError(
                    f"overspill: TiedLayerSpec {key!r}: tied_weight_attr has {name!r}, which is no parameter of the "
                    f"layer: it has {', '.join(there) or 'none'}"
                )
        return {name: there[name] for name in self._tied_names[key]}

    def forward(self, forward_input: Any) -> Any:
        """Runs this stage's layers."""
        self._passes += 1
        first, last = self._range()
        length = self.activation_checkpoint_interval or len(self.forward_funcs)
        x = forward_input
        for begin in range(first, last, length):
            numbers = range(begin, min(begin + length, last))
            run = partial(self._in_turn, numbers, self._passes, isinstance(x, tuple))
            if (
                self.activation_checkpoint_interval
                and torch.is_grad_enabled()
                and self._is_checkpointable(numbers)
            ):
                x = self.activation_checkpoint_func(run, *_as_tuple(x))
            else:
                x = run(*_as_tuple(x))
        return x

    def _in_turn(self, numbers: range, passes: int, is_tuple: bool, *inputs: Any) -> Any:
        x: Any = inputs if is_tuple else inputs[0]
        for number in numbers:
            if self.seed_layers:
                self.seed_fn(self.base_seed * passes + number)
            x = self.forward_funcs[number - self._range()[0]](x)
        return x

    def _is_checkpointable(self, numbers: range) -> bool:
        layers = [self.forward_funcs[number - self._range()[0]] for number in numbers]
        if self.checkpointable_layers is not None:
            return all(type(each).__name__ in self.checkpointable_layers for each in layers)
        return any(True for each in layers if isinstance(each, nn.Module) for _ in each.parameters())

    def set_checkpoint_interval(self, interval: int) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise ValueError(
                f"overspill: activation_checkpoint_interval = {interval!r}: a number of layers from 0 is expected"
            )
        self.activation_checkpoint_interval = interval

    def stage_owner(self, layer_idx: int) -> int:
        """The stage of a layer of the whole model."""
        if not 0 <= layer_idx < self.parts[-1]:
            raise ValueError(
                f"overspill: stage_owner: layer {layer_idx}: the model has {self.parts[-1]} layers"
            )
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _topology(stages: int | None, given: ProcessTopology | None) -> ProcessTopology:
    if given is not None:
        if stages is not None and stages != given.get_dim("pipe"):
            raise RuntimeError(
                f"overspill: num_stages = {stages}, and the topology has {given.get_dim('pipe')}: give one"
            )
        if given.get_dim("model") > 1:
            raise NotImplementedError(
                "overspill: PipelineModule: a topology with slices of layers (axis model) is not supported: take "
                "stages and data alone"
            )
        return given
    if stages is None:
        raise RuntimeError("overspill: PipelineModule: must provide num_stages or topology")
    world = dist.get_world_size()
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1 or world % stages:
        raise RuntimeError(
            f"overspill: num_stages = {stages!r}: {world} ranks cannot be divided into so many stages: give a divisor"
        )
    return PipeDataParallelTopology(stages, world // stages)


def _weights(specs: Sequence[Any], method: str) -> list[int]:
    """The cost of each layer, which `bounds` balances."""
    given, method = method, method.lower() if isinstance(method, str) else ""
    if method == "uniform":
        return [1] * len(specs)
    if method == "parameters":
        return [_parameters(spec) for spec in specs]
    if method.startswith("type:"):
        kinds = [spec.typename if isinstance(spec, LayerSpec) else type(spec) for spec in specs]
        found = [
            int(bool(re.search(method.removeprefix("type:"), kind.__name__, re.IGNORECASE))) for kind in kinds
        ]
        if not any(found):
            names = ", ".join(sorted({kind.__name__ for kind in kinds}))
            raise RuntimeError(
                f"overspill: partition_method = {given!r}: no layer's class matches: they are {names}"
            )
        return found
    raise NotImplementedError(
        f"overspill: partition_method = {given!r} is not supported: parameters, uniform or type:REGEX"
    )


def _parameters(spec: Any) -> int:
    """How many trainable ones a layer has. A LayerSpec is built for it without memory, or, where its class cannot,
    whole."""
    if isinstance(spec, LayerSpec):
        state = torch.get_rng_state()
        try:
            with torch.device("meta"):
                spec = spec.build()
        except (NotImplementedError, RuntimeError):
            spec = spec.build()
        torch.set_rng_state(state)
    return sum(p.numel() for p in spec.parameters() if p.requires_grad) if isinstance(spec, nn.Module) else 0


def bounds(weights: Sequence[int], stages: int) -> list[int]:
    """Where stages begin, and where the last one ends, so that the heaviest one is as light as can be and none is
    empty. There are at least as many weights as stages."""
    low, high = max(weights, default=0), sum(weights)
    while low < high:  # the lightest load of which as many stages are enough
        middle = (low + high) // 2
        low, high = (
            (low, middle) if len(_filled(weights, stages, middle)) - 1 <= stages else (middle + 1, high)
        )
    return _filled(weights, stages, low)


def _filled(weights: Sequence[int], stages: int, most: int) -> list[int]:
    """Each stage takes layers until `most`, and leaves one for each stage that comes after it."""
    found, load = [0], 0
    for number, weight in enumerate(weights):
        left, to_come = len(weights) - number, stages - len(found)
        if number > found[-1] and (load + weight > most or left == to_come):
            found.append(number)
            load = 0
        load += weight
    return [*found, len(weights)]
