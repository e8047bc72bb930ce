"""Blocks whose activations are not kept but computed again in backward (`engine.recompute`). The model's own repetition
says which modules are blocks, and torch's non-reentrant checkpoint does the work.

In backward a block's forward runs once more, with the random numbers, the buffers and the arithmetic (autocast) that it
had. What it computes is the same to the bit, if it is a function of its arguments, weights, buffers and random numbers:

- A call with an argument that may change during the call, such as a cache of keys and values, is made as without the
  key, and a warning says so once.
- A block that changes a buffer, as BatchNorm does, changes it once: backward gives it the buffer as it was, and puts
  back what was there. Its later calls are made as without the key.
- The lists and dicts among its arguments are given to it again as they were when the call began, and its modules have
  the `training` of then.
- What would be other than in forward is refused: weights and buffers that have changed since, arguments that the block
  changes itself, and tensors that it changes after autograd has saved them."""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction, _autograd
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from . import saved
from .calls import here, in_backward
from .config.section import ConfigError
from .draws import Draws
from .recompute_plan import Planner
from .segments import registry

Modes = tuple[bool, ...]  # `training` of a block's modules

_CONTAINERS = (tuple, list, dict)
_FIXED = (
    torch.Tensor, nn.Parameter, type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


def plan(model: nn.Module, owner: Any, mode: str) -> None:
    """Sets what `engine.plan_text` says and, with "auto", makes the Planner."""
    blocks = _in_order(model)
    if mode == "auto":
        owner.planner = Planner(owner, blocks)
        owner.recomputes = (
            f"not chosen yet, of {len(blocks)} blocks: the engine chooses after the second pass"
        )
    elif mode == "blocks":
        owner.recomputes = f"up to {len(blocks)} blocks"


def blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that the model repeats, with their names, outermost ones only: children of one module, of one class
    and with parameters of the same names and shapes; of a list also those of other shapes that repeat nothing. A module
    without submodules is none, since what it saves is mostly what it is given. Raises ConfigError where there is none.
    """
    found: dict[nn.Module, str] = {}
    _find(model, "", found, set())
    if not found:
        raise ConfigError(
            f"config: engine.recompute: {type(model).__name__} has no blocks: none of its modules has two children of "
            "one class, with parameters of the same shapes and with submodules. Leave engine.recompute out, and call "
            "the parts that save the most through torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)"
        )
    return found


def _in_order(model: nn.Module) -> list[Block]:
    found = (module.__dict__.get("forward") for module in model.modules())
    return [block for block in found if isinstance(block, Block)]


def _find(module: nn.Module, prefix: str, found: dict[nn.Module, str], seen: set[nn.Module]) -> None:
    children = [(prefix + name, child, _look(child)) for name, child in module.named_children()]
    alike = Counter(look for _, _, look in children)
    of_a_class = Counter(type(child) for _, child, _ in children)
    for name, child, look in children:
        if child in seen:
            continue
        seen.add(child)
        if alike[look] > 1 and _is_block(child):
            found[child] = name
            continue
        inside: dict[nn.Module, str] = {}
        _find(child, name + ".", inside, seen)
        # The first of a list may have more than the others, as T5's has; stages, which repeat blocks, differ in shape.
        if (
            not inside
            and isinstance(module, nn.ModuleList)
            and of_a_class[type(child)] > 1
            and _is_block(child)
        ):
            found[child] = name
        found |= inside


def _look(module: nn.Module) -> Any:
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)):
        return False  # never called, or not by Python
    return "_orig_mod" not in module._modules and next(module.children(), None) is not None  # compiled


class Block:
    """Stands in a block's `__dict__` for its forward. `begin` and `end`: the engine's hooks around a call of the module
    (hooks.py), which a call in backward needs, too; hooks of the script's run in forward alone."""

    def __init__(self, name: str, module: nn.Module, owner: Any, begin: Callable, end: Callable):
        self.name, self.owner, self.begin, self.end = name, owner, begin, end
        self.module = weakref.ref(module)
        self.replaced = module.__dict__.get("forward")  # by the script, before
        self.__signature__ = inspect.signature(module.forward)
        self.chosen = True  # to be computed again
        self.changes: dict[
            Modes, bool
        ] = {}  # whether a call changes buffers; by `training` of all its modules
        self.calls_again = 0
        self.units = list({id(u): u for p in module.parameters() if (u := _unit_of(p)) is not None}.values())
        self._parameters = [
            (part._parameters, name, p) for part in module.modules() for name, p in part._parameters.items()
        ]
        self._told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        if not self._applies(module):
            return self.forward(module)(*args, **kwargs)
        leaves, form = _pytree.tree_flatten((args, kwargs), lambda value: type(value) not in _CONTAINERS)
        unknown = next((value for value in leaves if type(value) not in _FIXED), None)
        if unknown is not None:
            self._tell_of(unknown)
            return self.forward(module)(*args, **kwargs)
        if not self.chosen:
            return self._keep(module, leaves, args, kwargs)
        # Micro-batches that take turns are all inside at once: whose buffers are those of before?
        if here.stack.exempt and _modes(module) not in self.changes:
            return self._learn(module, args, kwargs)
        once = _Call(self, module, (args, kwargs), form)
        del args, kwargs
        return checkpoint(once, *leaves, use_reentrant=False, preserve_rng_state=False)

    def _keep(self, module: nn.Module, leaves: list, args: tuple, kwargs: dict) -> Any:
        """As without the key; measured for the planner, if the block could be computed again."""
        planner, moving = self.owner.planner, self.owner.moving
        if planner is None:
            return self.forward(module)(*args, **kwargs)
        begin, kept = planner.clock(), moving.kept_bytes
        result = self._learn(module, args, kwargs)
        if not self.changes[_modes(module)]:
            inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values()
            planner.called(self, begin, moving.kept_bytes - kept - moving.kept_since(inputs, kept))
        return result

    def _learn(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """As without the key, and finds out whether the call changes buffers."""
        modes = _modes(module)
        before = _Buffers(module, with_bytes=modes not in self.changes)
        result = self.forward(module)(*args, **kwargs)
        self.changes.setdefault(modes, bool(before.changed()))
        return result

    def forward(self, module: nn.Module) -> Callable:
        return self.replaced or types.MethodType(type(module).forward, module)

    def _applies(self, module: nn.Module) -> bool:
        """Not where nothing is saved, nor where the script itself says what becomes of what is saved, nor on other
        weights than the engine's."""
        if not torch.is_grad_enabled() or self.owner.closed or in_backward() or here.is_on_copies():
            return False
        if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
            return False
        if self.changes and self.changes.get(_modes(module), False):
            return False
        if module.training and getattr(
            module, "gradient_checkpointing", False
        ):  # transformers does it, in its forward
            return False
        if any(held.get(name) is not parameter for held, name, parameter in self._parameters):
            return False
        top = _autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is saved.pack

    def _tell_of(self, value: Any) -> None:
        if self._told or self.owner.told_of_arguments:
            return
        self._told = self.owner.told_of_arguments = True
        warnings.warn(
            f"overspill: engine.recompute: the block {self.name} gets an argument of class {type(value).__name__}, "
            "which could change before backward, so the engine does not compute such calls again, in any block. If it "
            "is a cache of keys and values, set engine.module.config.use_cache = False",
            stacklevel=2,
        )


class _Call:
    """One call of a block: torch makes it in forward, and again in backward as often as that asks for what was saved,
    each time with the leaves of its arguments. The graph has it, so it keeps neither module nor engine alive."""

    def __init__(self, block: Block, module: nn.Module, arguments: tuple[tuple, dict], form: Any):
        self.block, self.module, self.owner = weakref.ref(block), weakref.ref(module), block.owner
        self.form = form
        self.arguments: tuple[tuple, dict] | None = arguments  # of forward: the script's own lists and dicts
        self.draws = Draws(block.owner.place)
        self.modes = _modes(module)
        self.generations: list[int] = []  # of the block's units, as forward used them
        self.buffers: _Buffers | None = None  # as forward left them
        self.changed: list[_Buffer] = []  # by forward: as they were before

    def __call__(self, *leaves: Any) -> Any:
        block, module = self.block(), self.module()
        if block is None or module is None:
            raise RuntimeError(f"overspill: {self.owner.why_closed}")
        if self.arguments is None:
            return self._again(block, module, *_pytree.tree_unflatten(leaves, self.form))
        (args, kwargs), self.arguments = self.arguments, None
        given = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        learns = self.modes not in block.changes
        before = _Buffers(module, with_bytes=learns)
        result = block.forward(module)(*args, **kwargs)
        changed = next((leaf for leaf, version in given if leaf._version != version), None)
        if changed is not None:
            raise _refusal(block, f"changed its argument of shape {list(changed.shape)} in place")
        self.changed = before.changed()
        if self.changed and not learns:
            name = self.changed[0].name
            raise _refusal(block, f"changed its buffer {name}, which its first call did not")
        if any(each.bytes is None for each in self.changed):
            raise _refusal(block, f"changed its buffer {self.changed[0].name}, of which no copy can be made")
        block.changes.setdefault(self.modes, bool(self.changed))
        self.draws.forget_unmoved()
        self.buffers = _Buffers(module, with_bytes=False)
        self.generations = [unit.generation for unit in block.units]
        return result

    def _again(self, block: Block, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        assert self.buffers is not None
        known = {each.key for each in self.changed}
        since = next((each for each in self.buffers.changed() if each.key not in known), None)
        if since is not None:
            raise _refusal(block, f"was followed by a change of its buffer {since.name}")
        block.calls_again += 1
        saves = here.stack.saves
        modes, now, after = _modes(module), self.draws.now(), [each.as_it_is() for each in self.changed]
        mine: list[tuple[torch.Tensor, int]] = []
        try:
            for each in self.changed:
                each.put()
            self.draws.restore()
            _set_modes(module, self.modes)
            here.stack.saves = mine
            block.begin(module, args)
            if [unit.generation for unit in block.units] != self.generations:
                raise _refusal(
                    block,
                    "was followed by a change of its weights (engine.step, a loaded checkpoint)",
                    "run backward before, or forward again",
                )
            try:
                return block.forward(module)(*args, **kwargs)
            finally:  # also when torch has what it wants, and breaks off
                block.end(module, args, None)
        finally:
            try:
                for each in after:
                    each.put()
            finally:
                here.stack.saves = saves
                _set_modes(module, modes)
                now.restore()
            _require_unchanged(mine)


class _Buffer:
    """A buffer of one of a block's modules, as it was when this was made. `bytes`: a copy, where one was asked for and
    the tensor is of the usual kind."""

    def __init__(self, held: dict, name: str, buffer: torch.Tensor | None, with_bytes: bool):
        self.held, self.name, self.buffer = held, name, buffer
        self.version = 0 if buffer is None else buffer._version
        self.bytes = (
            buffer.detach().clone() if with_bytes and buffer is not None and _is_usual(buffer) else None
        )

    @property
    def key(self) -> tuple[int, str]:
        return id(self.held), self.name

    def has_changed(self) -> bool:
        """BatchNorm counts no version of its means: only the bytes tell."""
        if self.buffer is None or self.held.get(self._local) is not self.buffer:
            return True
        return self.buffer._version != self.version or (
            self.bytes is not None and not _same_bytes(self.buffer, self.bytes)
        )

    def as_it_is(self) -> _Buffer:
        return _Buffer(self.held, self.name, self.held.get(self._local), with_bytes=True)

    def put(self) -> None:
        """By `data`, which counts no version: for autograd nothing has changed when all is put back."""
        self.held[self._local] = self.buffer
        if self.buffer is not None and self.bytes is not None:
            with DisableTorchFunction(), torch.no_grad():
                self.buffer.data.copy_(self.bytes)

    @property
    def _local(self) -> str:
        return self.name.rpartition(".")[2]


class _Buffers:
    """All of a block's, as they were when this was made."""

    def __init__(self, module: nn.Module, with_bytes: bool):
        with DisableTorchFunction(), torch.no_grad():
            self._all = [
                _Buffer(part._buffers, f"{path}.{name}" if path else name, buffer, with_bytes)
                for path, part in module.named_modules()
                for name, buffer in part._buffers.items()
                if buffer is not None
            ]

    def changed(self) -> list[_Buffer]:
        with DisableTorchFunction(), torch.no_grad():
            return [each for each in self._all if each.has_changed()]


def _is_usual(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_quantized and tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _modes(module: nn.Module) -> Modes:
    return tuple(part.training for part in module.modules())


def _set_modes(module: nn.Module, modes: Modes) -> None:
    for part, training in zip(module.modules(), modes, strict=False):
        if part.training != training:
            part.training = training


def _unit_of(parameter: torch.Tensor) -> Any:
    segment = registry.get(id(parameter))
    return None if segment is None else segment.unit


def _require_unchanged(saves: list[tuple[torch.Tensor, int]]) -> None:
    """As torch looks at what it saves itself."""
    for tensor, version in saves:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}, expected {version}"
            )


def _refusal(block: Block, what: str, way_out: str = "leave engine.recompute out") -> RuntimeError:
    return RuntimeError(
        f"overspill: engine.recompute: a call of {block.name} {what}, so backward cannot compute it again: {way_out}"
    )
