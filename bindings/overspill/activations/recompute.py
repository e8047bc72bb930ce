"""Blocks whose activations are not kept but computed again in backward (`engine.recompute`). The model's own repetition
says which modules are blocks, and torch's non-reentrant checkpoint does the work.

In backward a block's forward runs once more, with the random numbers, the buffers and the arithmetic (autocast) that it
had. What it computes is the same to the bit, if it is a function of its arguments, weights, buffers and random numbers:

- A call with an argument that may change during the call, such as a cache of keys and values, is made as without the
  key, and a warning says so once.
- The first call of one of several blocks that are alike is made as without the key, to find out whether it changes
  buffers or weights, as BatchNorm does. If it does, all calls of those blocks are, and a warning says so once.
- The lists and dicts among its arguments are given to it again as they were when the call began, and its modules have
  the `training` of then, and the buffers, where the script has put others in their place.
- What would be other than in forward is refused: weights and buffers that have changed since, arguments, buffers and
  weights that a later call changes, and tensors that a block changes after autograd has saved them."""

from __future__ import annotations

import types
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction, _autograd
from torch.utils import _pytree
from torch.utils import checkpoint as checkpoints

from .. import saved, showing
from ..calls import here, in_backward
from ..config.section import ConfigError
from ..divided import is_divided
from ..draws import Draws
from ..layers.instead import Instead
from ..segments import registry
from .recompute_plan import Planner

_BY_HAND = {
    "engine.recompute": "call the parts that save the most through torch.utils.checkpoint.checkpoint(part, x, "
    "use_reentrant=False)",
    "engine.compile": "use torch.compile on functions of the model that use no weights",
}
Modes = tuple[bool, ...]  # `training` of a block's modules

_BREAKS_OFF = getattr(checkpoints, "_StopRecomputationError", ())
CONTAINERS = (tuple, list, dict)
FIXED = (
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


def blocks_of(model: nn.Module, is_part: bool = False, key: str = "engine.recompute") -> dict[nn.Module, str]:
    """The modules that the model repeats, with their names, outermost ones only: children of one module, of one class
    and with parameters of the same names and shapes; of a list also those of other shapes that repeat nothing. A module
    without submodules is none, since what it saves is mostly what it is given. Raises ConfigError, which names the
    `key` that asks for them, where there is none, unless this is a part of a model, of which other parts may have
    them."""
    found: dict[nn.Module, str] = {}
    _find(model, "", found, set())
    if not found and not is_part:
        raise ConfigError(
            f"config: {key}: {type(model).__name__} has no blocks: no module has two children of one class whose "
            f"parameters have the same shapes and which have submodules. Leave {key} out, and {_BY_HAND[key]}"
        )
    return found


def check_parts(model: nn.Module, group: Any) -> None:
    """Raises ConfigError where no layer is divided among the ranks of a group, RankError where they have other blocks
    than one another: as stages of a pipeline, which with engine.partition_activations would wait for one another for
    ever. Collective."""
    kinds: dict[Any, int] = {}  # of each the first call is not computed again
    blocks = blocks_of(model, is_part=True)
    found = [f"{name} {kinds.setdefault(look(block), len(kinds))}" for block, name in blocks.items()]
    found += [name for name, _ in model.named_parameters()]
    digest = zlib.crc32("\n".join(found).encode())
    has_divided = any(is_divided(p) for p in model.parameters())
    group.check_alike(
        {
            "engine.partition_activations: whether the model has DTensors": has_divided,
            "engine.partition_activations: the names of blocks and parameters (a digest)": digest,
        }
    )
    if not has_divided:
        raise ConfigError(
            f"config: engine.partition_activations = true: {type(model).__name__} has no DTensors, so no layer is "
            "divided among the ranks of model_group, and they have no input in common: leave it out, or divide layers "
            "by torch's parallelize_module (docs/torchrun.md)"
        )


def _in_order(model: nn.Module) -> list[Block]:
    found = (module.__dict__.get("forward") for module in model.modules())
    return [block for block in found if isinstance(block, Block)]


def _find(module: nn.Module, prefix: str, found: dict[nn.Module, str], seen: set[nn.Module]) -> None:
    children = [(prefix + name, child, look(child)) for name, child in module.named_children()]
    alike = Counter(its for _, _, its in children)
    of_a_class = Counter(type(child) for _, child, _ in children)
    for name, child, its in children:
        if child in seen:
            continue
        seen.add(child)
        if alike[its] > 1 and _is_block(child):
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


def look(module: nn.Module) -> Any:
    """Equal for blocks that are alike."""
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)):
        return False  # never called, or not by Python
    return "_orig_mod" not in module._modules and next(module.children(), None) is not None  # compiled


class Block(Instead):
    """`begin` and `end`: the engine's hooks around a call of the module
    (hooks.py), which a call in backward needs, too; hooks of the script's run in forward alone. `changes`: whether a
    call changes buffers or weights, by `training` of all its modules; of all blocks that are alike."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        owner: Any,
        begin: Callable,
        end: Callable,
        changes: dict[Modes, bool],
    ):
        super().__init__(name, module)
        self.owner, self.begin, self.end, self.changes = owner, begin, end, changes
        self.chosen = True  # to be computed again
        self.calls_again = 0
        self.units = list({id(u): u for p in module.parameters() if (u := _unit_of(p)) is not None}.values())
        self._parameters = [
            (part._parameters, name, p) for part in module.modules() for name, p in part._parameters.items()
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        modes = _modes(module)
        if not self._applies(module) or self.changes.get(modes, False):
            return self.forward(module)(*args, **kwargs)
        leaves, form = _pytree.tree_flatten((args, kwargs), lambda value: type(value) not in CONTAINERS)
        unknown = next((value for value in leaves if type(value) not in FIXED), None)
        if unknown is not None:
            self._tell_of(unknown)
            return self.forward(module)(*args, **kwargs)
        if not self.chosen:
            return self._keep(module, modes, leaves, args, kwargs)
        if modes not in self.changes:
            return self._learn(module, modes, leaves, args, kwargs)
        once = _Call(self, module, modes, (args, kwargs), form)
        del args, kwargs
        stack, partitioning = here.stack, self.owner.partitioning
        stack.alike = partitioning.alike(leaves) if partitioning is not None else None
        try:
            return checkpoints.checkpoint(once, *leaves, use_reentrant=False, preserve_rng_state=False)
        finally:
            stack.alike = None

    def _keep(self, module: nn.Module, modes: Modes, leaves: list, args: tuple, kwargs: dict) -> Any:
        """As without the key; measured for the planner, if the block could be computed again."""
        planner, moving = self.owner.planner, self.owner.moving
        if planner is None:
            return self.forward(module)(*args, **kwargs)
        begin, kept = planner.clock(), moving.kept_bytes
        result = self._learn(module, modes, leaves, args, kwargs)
        if not self.changes[modes]:
            inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values()
            planner.called(self, begin, moving.kept_bytes - kept - moving.kept_since(inputs, kept))
        return result

    def _learn(self, module: nn.Module, modes: Modes, leaves: list, args: tuple, kwargs: dict) -> Any:
        """As without the key, and finds out whether the call changes what it computes from."""
        if modes in self.changes:
            return self.forward(module)(*args, **kwargs)
        before, weights, given = _Buffers(module, with_bytes=True), self.weights(), _versions(leaves)
        result = self.forward(module)(*args, **kwargs)
        changed = before.changed() or ("its weights" if self.weights() != weights else _written(given))
        self.changes[modes] = changed is not None
        if changed is not None:
            self._tell(
                f"a call of the block {self.name} changes {changed}, so the engine does not compute calls of such "
                "blocks again"
            )
        return result

    def weights(self) -> list[Any]:
        """What is another when something has changed a weight. (Of a unit that is shown an edit counts as a change once
        it is hidden.)"""
        with DisableTorchFunction():
            of_units = [(unit.core.generation(unit.index), showing.edited(unit)) for unit in self.units]
            return [*of_units, *(p._version for _, _, p in self._parameters if p is not None)]

    def _applies(self, module: nn.Module) -> bool:
        """Not where nothing is saved, nor where the script itself says what becomes of what is saved, nor on other
        weights than the engine's."""
        if not torch.is_grad_enabled() or self.owner.closed or in_backward() or here.is_on_copies():
            return False
        if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
            return False
        its_own = getattr(module, "gradient_checkpointing", False)  # in its forward, as transformers has it
        if its_own and module.training:
            return False
        if any(held.get(name) is not parameter for held, name, parameter in self._parameters):
            return False
        top = _autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is saved.pack

    def _tell_of(self, value: Any) -> None:
        self._tell(
            f"the block {self.name} gets an argument of class {type(value).__name__}, which could change before "
            "backward, so the engine does not compute such calls again, in any block. If it is a cache of keys and "
            "values, set engine.module.config.use_cache = False"
        )

    def _tell(self, what: str) -> None:
        if not self.owner.told_what_is_kept:
            self.owner.told_what_is_kept = True
            warnings.warn(f"overspill: engine.recompute: {what}", stacklevel=3)


class _Call:
    """One call of a block: torch makes it in forward, and again in backward as often as that asks for what was saved,
    each time with the leaves of its arguments. The graph has it, so it keeps neither module nor engine alive."""

    def __init__(
        self, block: Block, module: nn.Module, modes: Modes, arguments: tuple[tuple, dict], form: Any
    ):
        self.block, self.module, self.owner = weakref.ref(block), weakref.ref(module), block.owner
        self.modes, self.form = modes, form
        self.arguments: tuple[tuple, dict] | None = arguments  # of forward: the script's own lists and dicts
        self.draws = Draws(block.owner.place)
        self.buffers = _Buffers(module, with_bytes=False)
        self.compiled: bool | None = None  # whether forward was (compiled.py): so is what is computed again
        self.generations = [unit.generation for unit in block.units]

    def __call__(self, *leaves: Any) -> Any:
        block, module = self.block(), self.module()
        if block is None or module is None:
            raise RuntimeError(f"overspill: {self.owner.why_closed}")
        if self.arguments is None:
            return self._again(block, module, *_pytree.tree_unflatten(leaves, self.form))
        here.stack.alike = None  # autograd has the inputs
        (args, kwargs), self.arguments = self.arguments, None
        given, weights = _versions(leaves), block.weights()
        result = block.forward(module)(*args, **kwargs)
        self.compiled = getattr(block.replaced, "compiled", None)
        what = self.buffers.changed() or ("its weights" if block.weights() != weights else _written(given))
        if what is not None:
            raise _refusal(block, f"changed {what}, which the first call of such a block did not")
        self.draws.forget_unmoved()
        return result

    def _again(self, block: Block, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if (written := self.buffers.written()) is not None:
            raise _refusal(block, f"was followed by a change of {written}")
        block.calls_again += 1
        stack = here.stack
        saves, modes, now, others = stack.saves, _modes(module), self.draws.now(), self.buffers.replaced()
        mine: list[tuple[torch.Tensor, int]] = []
        whole = True
        try:
            self.buffers.put()
            self.draws.restore()
            _set_modes(module, self.modes)
            stack.saves = mine
            block.begin(module, args)
            if [unit.generation for unit in block.units] != self.generations:
                raise _refusal(
                    block,
                    "was followed by a change of its weights (engine.step, a loaded checkpoint)",
                    "run backward before, or forward again",
                )
            stand_in = block.replaced if self.compiled is not None else None
            if stand_in is not None:
                stand_in.again = self.compiled
            try:
                return block.forward(module)(*args, **kwargs)
            finally:
                if stand_in is not None:
                    stand_in.again = None
                block.end(module, args, None)
        except BaseException as error:
            whole = isinstance(error, _BREAKS_OFF)  # torch has what it wants
            raise
        finally:
            stack.saves = saves
            try:
                now.restore()
            finally:
                _set_modes(module, modes)
                for held, name, buffer in others:
                    held[name] = buffer
            if whole:
                _require_unchanged(mine)
            mine.clear()


class _Buffers:
    """All of a block's, as they were when this was made. `with_bytes`: with copies of those that are of the usual kind;
    else only what counts versions is noticed."""

    def __init__(self, module: nn.Module, with_bytes: bool):
        with DisableTorchFunction(), torch.no_grad():
            self._all = [
                (
                    part._buffers,
                    name,
                    f"its buffer {path}.{name}" if path else f"its buffer {name}",
                    buffer,
                    buffer._version,
                    buffer.clone() if with_bytes and _is_usual(buffer) else None,
                )
                for path, part in module.named_modules()
                for name, buffer in part._buffers.items()
                if buffer is not None
            ]

    def changed(self) -> str | None:
        """The first that is another, or has other bytes, in words. BatchNorm counts no version of its means."""
        with DisableTorchFunction(), torch.no_grad():
            for held, name, words, buffer, version, copy in self._all:
                if held.get(name) is not buffer or buffer._version != version:
                    return words
                if copy is not None and not _same_bytes(buffer, copy):
                    return words
        return None

    def written(self) -> str | None:
        """The first into which something has written, in words."""
        return next(
            (words for _, _, words, buffer, version, _ in self._all if buffer._version != version), None
        )

    def replaced(self) -> list[tuple[dict, str, Any]]:
        """What is in the place of some now."""
        return [
            (held, name, held.get(name))
            for held, name, _, buffer, *_ in self._all
            if held.get(name) is not buffer
        ]

    def put(self) -> None:
        """Each is in its place."""
        for held, name, _, buffer, *_ in self._all:
            held[name] = buffer


def _is_usual(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_quantized and tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _versions(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _written(given: list[tuple[torch.Tensor, int]]) -> str | None:
    """The first of these arguments that was changed in place, in words."""
    changed = next((leaf for leaf, version in given if leaf._version != version), None)
    return None if changed is None else f"its argument of shape {list(changed.shape)}"


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
