"""Blocks that torch.compile compiles (`engine.compile`): of each block that the model repeats the engine compiles the
call as a function of its weights, buffers and arguments, once for all blocks that are alike.

What is compiled is the forward of a twin: modules of the same classes, without hooks, to which
torch.func.functional_call gives parameters and buffers. So no hook of the engine breaks the graph, and weights may lie
elsewhere at each call. Before a call of the block all of its weights are shown (hooks.py). The twin has the attributes
that the block has at that moment, and the block gets those that the call sets.

Where a call cannot be compiled this way, the engine runs the block as if the key were not set, and a warning says why:
arguments that may hold more than tensors and numbers, hooks that the script has put on a module inside, a forward of
its own, DTensors."""

from __future__ import annotations

import functools
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

from .. import given
from ..activations import recompute
from ..calls import here, is_traced
from ..divided import is_divided
from ..guard import guard
from .instead import Instead

BACKEND = "inductor"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}  # what each module has, and the twin its own of
_ABSENT = object()
_COMPILED_CALL = "compile_wrapper", os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")


class Compiler:
    """What one engine compiles, and counts of it. `names`: the blocks' names. `recomputes`: backward computes blocks
    again."""

    def __init__(self, names: dict[nn.Module, str], recomputes: bool):
        # Weak: a block's hooks keep the engine alive.
        self.names = weakref.WeakKeyDictionary(names)
        self.recomputes = recomputes
        self.plain_calls = 0  # calls of blocks that ran without torch.compile
        self._regions: dict[Any, Region] = {}
        self._told: set[str] = set()

    def block(self, module: nn.Module) -> Block:
        its = recompute.look(module), tuple((name, type(part)) for name, part in module.named_modules())
        if its not in self._regions:
            self._regions[its] = Region(module, self.recomputes)
        return Block(self.names[module], module, self, self._regions[its])

    def tell(self, why: str) -> None:
        """Counts a call that runs without torch.compile, and warns once for each reason."""
        self.plain_calls += 1
        if why not in self._told:
            self._told.add(why)
            warnings.warn(
                f"overspill: engine.compile: {why}. Calls of such blocks run without torch.compile",
                stacklevel=given.script_level(),
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
    it so far. `given_up`: why no new call uses it."""

    def __init__(self, module: nn.Module, recomputes: bool):
        self.twin = _twin(module, {})
        self.parts = list(self.twin.modules())
        self.graphs = self.breaks = self.calls = 0
        self.given_up: str | None = None
        self._recomputes = recomputes
        self._compiled: Callable | None = None

    def __call__(self, tensors: dict[str, torch.Tensor], args: tuple, kwargs: dict) -> Any:
        from torch._dynamo import config, exc, utils  # an engine without the key does not need their seconds

        if self._compiled is None:
            self._compiled = torch.compile(_function_of(self.twin), backend=_backend_of(self))
        breaks = utils.counters["graph_break"]
        before = sum(breaks.values())
        self.calls += 1
        options = {
            # After a break some of the block has run, and torch goes on by itself.
            "fail_on_recompile_limit_hit": self.breaks == 0,
            # A graph for all lengths, made later, would take the place of the one that forward has used.
            "automatic_dynamic_shapes": config.automatic_dynamic_shapes and not self._recomputes,
        }
        try:
            with config.patch(options):
                return self._compiled(tensors, args, kwargs)
        except exc.FailOnRecompileLimitHit:
            self.given_up = (
                f"torch.compile has made {self.graphs} graphs of {type(self.twin).__name__}, for calls with different "
                f"shapes or attributes, and torch._dynamo.config.recompile_limit = {config.recompile_limit} allows no "
                "more: pad inputs to few lengths, or raise the limit"
            )
            raise
        finally:  # a call in backward is broken off once autograd has what it wants
            self.breaks += sum(breaks.values()) - before


def _backend_of(region: Region) -> Callable:
    """Torch keeps each backend for ever, so this one does not keep the region."""
    reference = weakref.ref(region)

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config

        if (alive := reference()) is not None:
            alive.graphs += 1
        with config.patch(donated_buffer=False):  # else backward(retain_graph=True) is an error
            if BACKEND != "inductor":
                return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
            from torch._inductor.compile_fx import compile_fx

            # Random numbers are those that the block draws without the key.
            return compile_fx(graph, inputs, config_patches={"fallback_random": True})

    return backend


class Block(Instead):
    """Its forward is the region's, where that can be."""

    def __init__(self, name: str, module: nn.Module, compiler: Compiler, region: Region):
        super().__init__(name, module)
        self.compiler, self.region = compiler, region
        self._parts = [weakref.ref(part) for part in module.modules()]
        self._kind = f"a block of class {type(module).__name__}"
        self._looked_at: list[Any] | None = None  # what `_inside` was said of
        self._why: str | None = None
        self.compiled = False  # the last call was
        self.again: bool | None = None  # whether the call that is made again was

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        plain = self.forward(module)
        self.compiled = False
        if self.again is False or is_traced() or here.is_on_copies():
            return plain(*args, **kwargs)
        parts = list(module.modules())
        why = None if self.again else self.region.given_up or self._inside(parts) or self._of(args, kwargs)
        if why is None:
            self.compiled = True
            try:
                return self._compiled(parts, args, kwargs)
            except _failures() as error:
                why = self.region.given_up
                if why is None or self.again:
                    raise RuntimeError(
                        f"overspill: engine.compile: torch.compile failed at the block {self.name}: "
                        f"{str(error).strip()[:2000]}\nLeave engine.compile out, or mark the function that fails with "
                        "@torch.compiler.disable. On a CPU torch.compile needs a C++ compiler (Debian: g++ and "
                        "python3-dev)"
                    ) from error
                self.compiled = False
        self.compiler.tell(why)
        return plain(*args, **kwargs)

    def _compiled(self, parts: list[nn.Module], args: tuple, kwargs: dict) -> Any:
        dressed = [_dress(twin, part) for twin, part in zip(self.region.parts, parts, strict=True)]
        holders = _holders(parts[0])
        tensors = {path: held[name] for path, held, name in holders}
        given = dict(tensors)
        try:
            with guard.outside():
                return self.region(given, args, kwargs)
        finally:
            for twin, part, before in zip(self.region.parts, parts, dressed, strict=True):
                _give(twin, part, before)
            for path, held, name in holders:
                if given.get(path) is not tensors[path]:
                    held[name] = given.get(path)

    def _inside(self, parts: list[nn.Module]) -> str | None:
        """Why nothing of the block's calls can be compiled as its modules are now."""
        now: list[Any] = list(map(id, parts))
        for part in parts[1:]:
            now += ["forward" in part.__dict__, part._compiled_call_impl is None]
            now += [len(getattr(part, name)) for name in _HOOKS]
        if now != self._looked_at:
            self._looked_at, self._why = now, self._why_not(parts)
        return self._why

    def _why_not(self, parts: list[nn.Module]) -> str | None:
        if len(parts) != len(self._parts) or any(
            ref() is not part for ref, part in zip(self._parts, parts, strict=True)
        ):
            return (
                f"modules inside {self._kind} were replaced after overspill.initialize: replace them before"
            )
        if self.replaced is not None:
            return f"the script has replaced the forward of {self._kind}: take that out"
        for part in parts[1:]:
            kind = type(part).__name__
            if "forward" in part.__dict__ or part._compiled_call_impl is not None:
                return f"the script has replaced, or compiled, the call of a {kind} in {self._kind}: take that out"
            if any(not _is_engines(hook) for name in _HOOKS for hook in getattr(part, name).values()):
                return (
                    f"the script has put a hook on a {kind} in {self._kind}, which compiled code would not call: "
                    "remove it, or put it on the block itself"
                )
        attributes = (
            value for part in parts for name, value in part.__dict__.items() if name not in _OF_MODULES
        )
        if any(_refers_to(value, parts) for value in attributes):
            return f"{self._kind} has an attribute that holds a method, or a list, of its own modules: take that out"
        if any(is_divided(held[name]) for _, held, name in _holders(parts[0])):
            return f"{self._kind} has DTensors, which the engine does not compile"
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


def _holders(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Where the parameters and buffers are that functional_call is to give: path, dict, name."""
    return [
        (f"{path}.{name}" if path else name, held, name)
        for path, part in module.named_modules(prefix=_Caller.NAME)
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


def _refers_to(value: Any, parts: list[nn.Module]) -> bool:
    """A method of a module of the block would run that module, and not its twin."""
    if isinstance(value, functools.partial):
        return _refers_to(value.func, parts)
    if isinstance(value, types.MethodType):
        return any(value.__self__ is part for part in parts)
    if isinstance(value, dict):
        return any(_refers_to(each, parts) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_refers_to(each, parts) for each in value)
    return any(value is part for part in parts)


def _is_engines(hook: Any) -> bool:
    return type(hook).__module__.partition(".")[0] == __package__.partition(".")[0]


def _failures() -> tuple[type[Exception], ...]:
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


class _Caller(nn.Module):
    """Calls the twin's forward, since the block's own call, with what its class has put around it, is under way."""

    NAME = "twin"

    def __init__(self, twin: nn.Module):
        super().__init__()
        self.twin = twin

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.twin).forward(self.twin, *args, **kwargs)


def _function_of(twin: nn.Module) -> Callable:
    """With code of its own: torch.compile keeps what it makes, and counts it, by the code object."""

    caller = _Caller(twin)

    def call(tensors: dict[str, torch.Tensor], args: tuple, kwargs: dict) -> Any:
        return torch.func.functional_call(caller, tensors, args, kwargs)

    code = call.__code__.replace(co_name=f"call_of_{type(twin).__name__}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def look_for_the_scripts(owner: Any, frame: FrameType | None) -> None:
    """Warns once where a call of the engine's model comes from code that the script has compiled. `frame`: that makes
    the call."""
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != _COMPILED_CALL:
        frame = frame.f_back
    if frame is None:
        return
    owner.told_of_compiler = True
    warnings.warn(
        "overspill: the script calls the engine's model from code that torch.compile has compiled. Results are right, "
        "but the model is no faster, because the graph breaks at each module that has the engine's hooks. Take "
        'torch.compile out of the script, and set {"engine": {"compile": true}} in the configuration: the engine then '
        "compiles the model's blocks (docs/compile.md)",
        stacklevel=given.script_level(),
    )


# ---- the twin of a module


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """`made`: by the id of the module that each is the twin of."""
    if id(module) in made:
        return made[id(module)]
    twin = made[id(module)] = object.__new__(type(module))
    nn.Module.__init__(twin)
    twin._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child, made)
    return twin


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Where functional_call puts the tensor itself."""
    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def _dress(twin: nn.Module, module: nn.Module) -> dict[str, Any]:
    """Gives the twin the module's attributes, which are returned, and blanks for its tensors. torch.compile looks again
    at those that the forward has read."""
    before = {name: value for name, value in module.__dict__.items() if name not in _OF_MODULES}
    twin.__dict__.update(before)
    twin.training = module.training
    for its, theirs in ((module._parameters, twin._parameters), (module._buffers, twin._buffers)):
        if theirs.keys() != its.keys() or any((its[name] is None) != (theirs[name] is None) for name in its):
            theirs.clear()
            theirs.update({name: None if tensor is None else _blank(tensor) for name, tensor in its.items()})
    return before


def _give(twin: nn.Module, module: nn.Module, before: dict[str, Any]) -> None:
    """Gives the module what the call has set, and takes the twin's attributes away, which could keep an engine."""
    theirs = twin.__dict__
    for name in [name for name in theirs if name not in _OF_MODULES]:
        value = theirs.pop(name)
        if before.get(name, _ABSENT) is not value:
            module.__dict__[name] = value
    for name, buffer in list(twin._buffers.items()):
        if buffer is not None and buffer.device.type != "meta" and module._buffers.get(name) is None:
            module._buffers[name] = buffer
            twin._buffers[name] = None
