"""Blocks that torch.compile compiles (`engine.compile`): of each block that the model repeats the engine compiles the
call as a function of its weights, buffers and arguments, once for all blocks that are alike.

What is compiled is the forward of a twin: modules of the same classes, without hooks, to which
torch.func.functional_call gives parameters and buffers. So no hook of the engine breaks the graph, and weights may lie
elsewhere at each call. Before a call of the block all of its weights are shown (hooks.py). The twin has the attributes
that the block has at that moment, and the block gets those that the call sets.

A call that cannot be compiled so is made as without the key, and a warning says why: arguments that may hold more than
tensors and numbers, hooks that the script has put on a module inside, a forward of its own, DTensors."""

from __future__ import annotations

import inspect
import os
import types
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from . import recompute
from .calls import here
from .divided import is_divided
from .guard import guard

BACKEND = "inductor"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) | {
    "forward"
}  # what each module has: the twin has its own of these
_ABSENT = object()
_COMPILER = os.path.join(
    os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py"
)  # it calls what was compiled


class Compiler:
    """Of one engine: what it compiles, and what became of that. `names`: of the blocks."""

    def __init__(self, names: dict[nn.Module, str]):
        self.names = names
        self.plain_calls = 0  # of blocks, that were made as without the key
        self._regions: dict[Any, Region] = {}
        self._told: set[str] = set()

    def block(self, module: nn.Module) -> Block:
        its = recompute.look(module), tuple((name, type(part)) for name, part in module.named_modules())
        if its not in self._regions:
            self._regions[its] = Region(module)
        return Block(self.names[module], module, self, self._regions[its])

    def tell(self, why: str) -> None:
        """Counts a call that is made as without the key, and warns of each reason once."""
        self.plain_calls += 1
        if why not in self._told:
            self._told.add(why)
            warnings.warn(
                f"overspill: engine.compile: {why}: such calls run without torch.compile", stacklevel=4
            )

    def as_dict(self) -> dict[str, int]:
        regions = self._regions.values()
        return {
            "blocks": len(self.names),
            "kinds": len(regions),
            "graphs": sum(region.graphs for region in regions),
            "graph_breaks": sum(region.breaks for region in regions),
            "calls": sum(region.calls for region in regions),
            "plain_calls": self.plain_calls,
        }

    def __str__(self) -> str:
        d = self.as_dict()
        kinds = "kind" if d["kinds"] == 1 else "kinds"
        so_far = f"{d['graphs']} graphs and {d['graph_breaks']} graph breaks so far"
        plain = f", {d['plain_calls']} calls run without it" if d["plain_calls"] else ""
        return f"{d['blocks']} blocks of {d['kinds']} {kinds}, {so_far}{plain}"


class Region:
    """The compiled function of blocks that are alike, with its twin. `graphs`, `breaks`: what torch.compile has made of
    it so far. `given_up`: why it is used no more."""

    def __init__(self, module: nn.Module):
        self.twin = _twin(module, {})
        self.parts = list(self.twin.modules())
        self.graphs = self.breaks = self.calls = 0
        self.given_up: str | None = None
        self._compiled: Callable | None = None

    def __call__(self, tensors: dict[str, torch.Tensor], args: tuple, kwargs: dict) -> Any:
        from torch._dynamo import config, exc, utils  # an engine without the key does not need their seconds

        if self._compiled is None:
            self._compiled = torch.compile(_function_of(self.twin), backend=self._backend)
        breaks = utils.counters["graph_break"]
        before = sum(breaks.values())
        self.calls += 1
        try:
            with config.patch(fail_on_recompile_limit_hit=True):
                return self._compiled(tensors, args, kwargs)
        except exc.FailOnRecompileLimitHit:
            self.given_up = (
                f"torch.compile has made {self.graphs} graphs of {type(self.twin).__name__}, each for other shapes or "
                "attributes, and would have to make one more (torch._dynamo.config.recompile_limit)"
            )
            raise
        finally:  # a call in backward is broken off once autograd has what it wants
            self.breaks += sum(breaks.values()) - before

    def _backend(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        if BACKEND != "inductor":
            return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        from torch._inductor.compile_fx import compile_fx

        # Random numbers are those that the block draws without the key.
        return compile_fx(graph, inputs, config_patches={"fallback_random": True})


class Block:
    """Stands in a block's `__dict__` for its forward."""

    def __init__(self, name: str, module: nn.Module, compiler: Compiler, region: Region):
        self.name, self.compiler, self.region = name, compiler, region
        self.module = weakref.ref(module)
        self.replaced = module.__dict__.get("forward")  # by the script, before
        self.__signature__ = inspect.signature(module.forward)
        self._parts = [weakref.ref(part) for part in module.modules()]
        self._holders = [
            (path + name, held, name)
            for path, part in _paths(module)
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._kind = f"a block of class {type(module).__name__}"
        self._looked_at: list[Any] | None = None  # what `_inside` was said of
        self._why: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        plain = self.replaced or types.MethodType(type(module).forward, module)
        if torch.compiler.is_compiling() or _in_transform() or here.is_on_copies():
            return plain(*args, **kwargs)
        parts = list(module.modules())
        why = self.region.given_up or self._inside(parts) or self._of(args, kwargs)
        if why is None:
            try:
                return self._compiled(parts, args, kwargs)
            except _failures() as error:
                why = self.region.given_up
                if why is None:
                    raise RuntimeError(
                        f"overspill: engine.compile: torch.compile failed at the block {self.name}: "
                        f"{str(error).strip()[:2000]}\nLeave engine.compile out, or compile without it what fails there"
                    ) from error
        self.compiler.tell(why)
        return plain(*args, **kwargs)

    def _compiled(self, parts: list[nn.Module], args: tuple, kwargs: dict) -> Any:
        tensors = {path: held[name] for path, held, name in self._holders}
        given = dict(tensors)
        for twin, part in zip(self.region.parts, parts, strict=True):
            _dress(twin, part)
        try:
            with guard.outside():
                return self.region(given, args, kwargs)
        finally:
            for twin, part in zip(self.region.parts, parts, strict=True):
                _give(twin, part)
            for path, held, name in self._holders:
                if given.get(path) is not tensors[path]:
                    held[name] = given.get(path)

    def _inside(self, parts: list[nn.Module]) -> str | None:
        """Why nothing of the block's calls can be compiled as its modules are now."""
        now = [*map(id, parts), *(len(getattr(part, name)) for part in parts[1:] for name in _HOOKS)]
        if now != self._looked_at:
            self._looked_at, self._why = now, self._why_not(parts)
        return self._why

    def _why_not(self, parts: list[nn.Module]) -> str | None:
        if len(parts) != len(self._parts) or any(
            ref() is not part for ref, part in zip(self._parts, parts, strict=True)
        ):
            return f"modules inside {self._kind} were replaced since overspill.initialize"
        if self.replaced is not None:
            return f"the forward of {self._kind} was replaced by the script"
        for part in parts[1:]:
            kind = type(part).__name__
            if "forward" in part.__dict__ or part._compiled_call_impl is not None:
                return f"the call of a {kind} in {self._kind} was replaced, or compiled, by the script"
            if any(not _is_engines(hook) for name in _HOOKS for hook in getattr(part, name).values()):
                return f"a {kind} in {self._kind} has a hook of the script's, which would not be called"
        if any(is_divided(held[name]) for _, held, name in self._holders):
            return f"{self._kind} has DTensors"
        return None

    def _of(self, args: tuple, kwargs: dict) -> str | None:
        leaves = _pytree.tree_leaves((args, kwargs), lambda value: type(value) not in recompute.CONTAINERS)
        unknown = next((value for value in leaves if type(value) not in recompute.FIXED), None)
        if unknown is None:
            return None
        return (
            f"{self._kind} gets an argument of class {type(unknown).__name__} (if it is a cache of keys and "
            "values, set engine.module.config.use_cache = False)"
        )


def _paths(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{path}." if path else "", part) for path, part in module.named_modules()]


def _is_engines(hook: Any) -> bool:
    return type(hook).__module__.partition(".")[0] == __package__


def _failures() -> tuple[type[Exception], ...]:
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def _in_transform() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _function_of(twin: nn.Module) -> Callable:
    """With code of its own: torch.compile keeps what it makes, and counts it, by the code object."""

    def call(tensors: dict[str, torch.Tensor], args: tuple, kwargs: dict) -> Any:
        return torch.func.functional_call(twin, tensors, args, kwargs)

    code = call.__code__.replace(co_name=f"call_of_{type(twin).__name__}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def look_for_the_scripts(owner: Any, frame: FrameType | None) -> None:
    """Warns once where a call of the engine's model comes from code that the script has compiled. `frame`: that makes
    the call."""
    while frame is not None and frame.f_code.co_filename != _COMPILER:
        frame = frame.f_back
    if frame is None:
        return
    owner.told_of_compiler = True
    warnings.warn(
        "overspill: the script has compiled what calls the engine's model. It is right, and gains nothing inside the "
        "model, since the graph breaks at each module that the engine has hooks on: leave torch.compile out, and give "
        "engine.compile = true, with which the engine compiles the model's blocks (docs/compile.md)",
        stacklevel=2,
    )


# ---- the twin of a module


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """`made`: by the id of the module that each is the twin of."""
    if id(module) in made:
        return made[id(module)]
    twin = made[id(module)] = type(module).__new__(type(module))
    nn.Module.__init__(twin)
    for name, parameter in module._parameters.items():
        blank = None if parameter is None else nn.Parameter(_blank(parameter), parameter.requires_grad)
        twin._parameters[name] = blank
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else _blank(buffer)
    twin._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child, made)
    return twin


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _dress(twin: nn.Module, module: nn.Module) -> None:
    """Gives the twin the module's attributes. torch.compile looks again at those that the forward has read."""
    theirs, its = twin.__dict__, module.__dict__
    for name in [name for name in theirs if name not in its and name not in _OF_MODULES]:
        del theirs[name]
    for name, value in its.items():
        if name not in _OF_MODULES and theirs.get(name, _ABSENT) is not value:
            theirs[name] = value
    if twin.training != module.training:
        twin.training = module.training


def _give(twin: nn.Module, module: nn.Module) -> None:
    """Gives the module the attributes that the call has set."""
    its = module.__dict__
    for name, value in twin.__dict__.items():
        if name not in _OF_MODULES and its.get(name, _ABSENT) is not value:
            its[name] = value
