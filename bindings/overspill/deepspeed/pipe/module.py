"""The layers of one stage, out of a model that is a sequence of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

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
    head. forward_fn(layer, x): what this place computes; None: layer(x). tied_weight_attr: without a meaning here: all
    parameters of the layer are tied."""

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
    """x = layer(x) for each layer, of which this rank has those of its stage. A layer is a module, a LayerSpec or a
    function; it takes what the layer before returned, a tensor or a tuple of tensors. Names of parameters begin with
    the number of their layer in the whole model, those of tied layers with "tied_modules." and their key.

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
            seed_layers, seed_fn, base_seed: before a LayerSpec is built, seed_fn(base_seed + its number) is called,
                torch.manual_seed where there is none
            partition_method: "parameters" (as many in each stage), "uniform" (as many layers), or "type:REGEX" (as many
                layers whose class matches)
            activation_checkpoint_interval: as many layers are computed again in backward in one piece; 0: none
            activation_checkpoint_func: called with a function and its arguments
            checkpointable_layers: names of classes: a piece without one of them is not computed again; None: a piece
                with parameters is
            dynamic_shape: what layers give may have another shape in each micro-batch
        """
        super().__init__()
        comm.init_distributed()
        self._specs = list(layers)
        self._topo = _topology(num_stages, topology)
        self._grid = PipelineParallelGrid(self._topo)
        self.loss_fn, self.dynamic_activation_shape = loss_fn, dynamic_shape
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn or torch.manual_seed, base_seed
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.activation_checkpoint_func, self.checkpointable_layers = (
            activation_checkpoint_func,
            checkpointable_layers,
        )
        if len(self._specs) < self.num_stages:
            raise PipelineError(
                f"overspill: PipelineModule: {len(self._specs)} layers cannot be divided into {self.num_stages} "
                "stages: give more layers or fewer stages"
            )
        self.partition_method = partition_method
        self.parts = bounds(_weights(self._specs, partition_method), self.num_stages)
        self.forward_funcs: list[Any] = []
        self.tied_modules = nn.ModuleDict()
        for number in range(*self._range()):
            self.forward_funcs.append(self._built(number, self._specs[number]))
        self.tied_stages: dict[str, list[int]] = {}  # of those that this one shares with others
        self._share_tied_weights()
        self._specs = [None] * len(self._specs)  # layers of other stages need no memory

    def _range(self) -> tuple[int, int]:
        return self.parts[self.stage_id], self.parts[self.stage_id + 1]

    def _built(self, number: int, spec: Any) -> Any:
        if isinstance(spec, PipelineModule):
            raise NotImplementedError("overspill: PipelineModule: one inside another is not supported")
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
        elif not callable(layer):
            raise TypeError(
                f"overspill: PipelineModule: layer {number} is {layer!r:.80}: a module or function is expected"
            )
        return layer

    def _tied_stages(self) -> dict[str, list[int]]:
        """By key the stages that hold the layer, where there are several."""
        found: dict[str, set[int]] = {}
        for number, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                found.setdefault(spec.key, set()).add(self.stage_owner(number))
        return {key: sorted(stages) for key, stages in found.items() if len(stages) > 1}

    def _share_tied_weights(self) -> None:
        """All stages have those of the first that holds the layer. All ranks make all groups."""
        for key, stages in self._tied_stages().items():
            for line in self._topo.get_axis_comm_lists("pipe"):
                ranks = [line[stage] for stage in stages]
                group = dist.new_group(ranks)
                if self._grid.global_rank in ranks:
                    self.tied_stages[key] = stages
                    for parameter in self.tied_modules[key].parameters():
                        dist.broadcast(parameter.detach(), ranks[0], group=group)
                    dist.destroy_process_group(group)

    def replicated(self) -> dict[str, str]:
        """Parameters of tied layers that other stages hold too, by name, as overspill.initialize takes them."""
        return {
            f"tied_modules.{key}.{name}": f"{key}.{name}"
            for key in self.tied_stages
            for name, _ in self.tied_modules[key].named_parameters()
        }

    def forward(self, forward_input: Any) -> Any:
        """Of this stage's layers."""
        piece = self.activation_checkpoint_interval or len(self.forward_funcs)
        x = forward_input
        for begin in range(0, len(self.forward_funcs), piece):
            functions = self.forward_funcs[begin : begin + piece]
            if (
                self.activation_checkpoint_interval
                and torch.is_grad_enabled()
                and self._is_checkpointable(functions)
            ):
                x = self.activation_checkpoint_func(
                    partial(_in_turn, functions, isinstance(x, tuple)), *_as_tuple(x)
                )
            else:
                x = _in_turn(functions, isinstance(x, tuple), *_as_tuple(x))
        return x

    def _is_checkpointable(self, functions: list[Any]) -> bool:
        modules = [each for each in functions if isinstance(each, nn.Module)]
        if self.checkpointable_layers is not None:
            return any(type(each).__name__ in self.checkpointable_layers for each in modules)
        return any(True for each in modules for _ in each.parameters())

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


def _in_turn(functions: Sequence[Callable[[Any], Any]], is_tuple: bool, *inputs: Any) -> Any:
    x: Any = inputs if is_tuple else inputs[0]
    for function in functions:
        x = function(x)
    return x


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
    """What `bounds` balances, a layer."""
    method = method.lower() if isinstance(method, str) else ""
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
            raise RuntimeError(f"overspill: partition_method = {method!r}: the class of no layer matches")
        return found
    raise NotImplementedError(
        f"overspill: partition_method = {method!r} is not supported: parameters, uniform or type:REGEX"
    )


def _parameters(spec: Any) -> int:
    """Trainable ones. A layer that is not there yet is built for it without memory, or, where its class cannot, "
    "whole."""
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
