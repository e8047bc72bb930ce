"""deepspeed.zero: Init, GatheredParameters, register_external_parameter."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .. import hooks, init
from ..segments import registry
from . import comm, own_keys, zero_params


def __getattr__(name: str) -> Any:
    # Not imported above: tiling.py gathers weights by this module.
    if name not in ("TiledLinear", "TiledLinearReturnBias"):
        raise AttributeError(
            f"overspill: deepspeed.zero.{name} is not supported (docs/coming-from-deepspeed.md)"
        )
    return getattr(importlib.import_module("overspill.deepspeed.tiling"), name)


class Init(AbstractContextManager[None]):
    """A model that is made inside does not have to fit in memory: its parameters lie in files, as inside
    overspill.Init, where the JSON names an NVMe folder; without one they are made as ever. Makes a process group of one
    rank where there is none, which transformers asks for its rank.

    Args:
        config_dict_or_path, config: DeepSpeed's JSON
        enabled: False: the block does nothing
        dtype: in which the model is made; None: bf16 where the JSON enables that, else torch's default
        module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory, mpu, …: without a meaning here
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **_: Any,
    ):
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._block: Any = contextlib.nullcontext()
        self._marking = _Marking() if enabled else None
        self._dtype, self._before = dtype if enabled else None, torch.get_default_dtype()
        if enabled:
            comm.init_distributed()
            if source is not None:
                settings, _ = own_keys.read(source)
                if self._dtype is None:
                    self._dtype = _HALVES.get(settings.dtype)
                if settings.budget.nvme:
                    self._block = init.Init(settings)

    def __enter__(self) -> None:
        self._block.__enter__()
        if self._marking is not None:
            self._marking.begin()
        self._before = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: Any) -> Any:
        torch.set_default_dtype(self._before)
        if self._marking is not None:
            self._marking.end()
        return self._block.__exit__(*error)


_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Marking:
    """Marks as ZeRO-3's each parameter that a module registers inside the block, and at its end those that `.to()` has
    put in their place."""

    def __init__(self) -> None:
        self._replaced = init.Replaced()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def begin(self) -> None:
        def make(register: Callable[..., Any]) -> Callable[..., Any]:
            def register_parameter(module: nn.Module, name: str, parameter: Any) -> None:
                register(module, name, parameter)
                zero_params.mark([module._parameters.get(name)])
                self._modules.add(module)

            return register_parameter

        self._replaced.put(nn.Module, "register_parameter", make)

    def end(self) -> None:
        self._replaced.restore()
        for module in self._modules:
            zero_params.mark(module._parameters.values())
        self._modules.clear()


class GatheredParameters(AbstractContextManager[None]):
    """Whole weights in the parameters while the block runs; what it writes into them becomes the weight. Parameters
    that no engine has taken yet are whole anyway; what the modifier writes into one that zero.Init has made reaches all
    ranks.

    Args:
        params: one parameter, or several
        modifier_rank: the rank whose writes count, by the default group's numbers; None: nobody writes
        fwd_module: without a meaning here
        enabled: False: the block does nothing
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._given = [each for each in given if enabled and zero_params.is_zero_param(each)]
        segments = [registry[id(each)] for each in given if id(each) in registry] if enabled else []
        units = list({id(segment.unit): segment.unit for segment in segments}.values())
        self._block: Any = hooks.Gathered(units) if units else contextlib.nullcontext()
        sent = {id(each): each for each in [*(segment.parameter for segment in segments), *self._given]}
        self._sent = list(sent.values()) if sent and comm.get_world_size() > 1 else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        self._block.__enter__()
        zero_params.gather(self._given, 1)

    def __exit__(self, *error: Any) -> Any:
        zero_params.gather(self._given, -1)
        if self._modifier is not None and error[0] is None:
            self._send()
        return self._block.__exit__(*error)

    def _send(self) -> None:
        """What the modifier has written, to the other ranks: the engine takes what each rank has."""
        with torch.no_grad():
            for parameter in self._sent:
                written = parameter.detach().clone(memory_format=torch.contiguous_format)
                torch.distributed.broadcast(written.view(-1).view(torch.uint8), self._modifier)
                parameter.copy_(written)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing has to be done: a parameter that another module's forward uses is gathered when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing has to be done."""
