"""The hooks that a model carries while an engine has it: around module calls, after gradients, around state
dictionaries."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from . import _core, calls, gradients, leases, lending, reading, residency, showing, vertical
from .activations import recompute
from .calls import Call, books, here, in_backward, opaque
from .divided import is_sharded
from .guard import guard, units_of
from .layers import compiled, logits, tiled_layers
from .layers.instead import Instead
from .memory import human
from .residency import Residency
from .segments import Segment, Unit, registry
from .units import UnitSpec

_CALL_IMPL = nn.Module._call_impl.__code__


class ModuleHooks:
    """Of one module: called before its forward, and around its load_state_dict. `units`: what its call needs.
    `segments`: its own parameters, by local name. `life`: the engine's, kept while the module lives. Torch has the
    object itself, no bound method: a copy of that would keep the opaque function."""

    def __init__(
        self, owner: Residency | None, units: list[Unit], segments: dict[str, Segment], life: Any = None
    ):
        self.owner, self.units, self.segments, self.life = owner, units, segments, life
        self.kind: type | None = None  # the module's class, once its call has been looked at

    def __reduce__(self) -> Any:
        _refuse_copy(self.owner)
        return CopiedHooks, (None, [], {})

    @opaque
    def __call__(self, module: nn.Module, args: Any) -> None:
        owner = self.owner
        if owner is None or here.is_on_copies():
            return
        if owner.closed or owner.leaving:
            raise RuntimeError(f"overspill: {owner.closed or residency.BROKEN_OFF}")
        if type(module) is not self.kind:
            self._look_at(module)
        if not owner.calls and (torch.compiler.is_exporting() or torch._C._get_tracing_state()):
            _refuse_tracing(owner)
        if owner.watch is not None and type(module) is nn.Linear and not in_backward():
            owner.watch.before(module, args)
        with DisableTorchFunction():
            stack = here.stack
            call = Call(stack, sys._getframe(1), owner, module)
            guard.begin_module(call)
            if not owner.current:
                owner.refresh()
            if owner.calls == 1 and not in_backward():
                calls.clear_spoiled(owner)
                showing.go_on(owner)
                if not owner.told_of_compiler:
                    compiled.look_for_the_scripts(owner, call.python)
                owner.core.begin_pass(module.training, torch.is_grad_enabled())
                if owner.watch is not None:
                    owner.watch.begin_pass()
                if owner.planner is not None and torch.is_grad_enabled():
                    owner.planner.begin_pass()
                if owner.expect_step is not None and module.training and torch.is_grad_enabled():
                    owner.expect_step()
            for unit in self.units:
                if stack.exempt:  # others change the books while this one waits
                    books.open = False
                    vertical.before(unit)
                    books.open = True
                calls.hold(call, unit)
            books.open = False

    def _look_at(self, module: nn.Module) -> None:
        """What shards or parametrizes a module gives it another class."""
        if is_sharded(module):
            raise RuntimeError(
                f"overspill: {type(module).__name__} was sharded by fully_shard after overspill.initialize, and the "
                "engine's weights are no longer the module's: leave fully_shard out and give process_group, the engine "
                "shards over its ranks"
            )
        self.kind = type(module)

    def before_load(self, module: nn.Module, state: dict, prefix: str, metadata: dict, *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "overspill: load_state_dict(assign=True) would replace the engine's parameters: use "
                "assign=False"
            )
        python = sys._getframe(1)
        while python.f_code.co_name == "_load_from_state_dict" and python.f_back is not None:
            python = python.f_back  # to load_state_dict's, which calls after_load too
        _hold_block(Call(here.stack, python, module=module), units_of(self.segments.values()))

    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        for call in [each for each in books.blocks if each.module is module]:
            _release_block(call)


class AfterHook:
    """Called after a module's forward."""

    def __init__(self, owner: Residency):
        self.owner = owner

    def __reduce__(self) -> Any:
        _refuse_copy(self.owner)
        return CopiedHooks, (None, [], {})

    @opaque
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also called, by _call_impl, when forward raised; then the frame that made the call is gone."""
        stack, python = here.stack, sys._getframe(1)
        if not stack.calls or here.is_on_copies():
            return
        with DisableTorchFunction():
            calls.work(python)
            call = stack.calls[-1] if stack.calls else None
            if call is not None and call.python is not python:
                guard.unwind(stack, python)
                call = stack.calls[-1] if stack.calls and python.f_code is not _CALL_IMPL else None
            if call is not None and call.module is module:
                guard.end(call, stack)
                planner = self.owner.planner
                if (
                    planner is not None
                    and self.owner.calls == 0
                    and torch.is_grad_enabled()
                    and not in_backward()
                ):
                    planner.end_forward()
            books.open = False


class CopiedHooks(ModuleHooks):
    """What copies of a module carry. They do nothing, and torch.compile and torch.export may look inside."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        return None


class StateDictHook:
    """Puts real weights in place of released ones; tied weights stay one tensor. `keep_vars` keeps the
    parameters as they are. A parameter that replaced the engine's is the module's, and stays too."""

    def __init__(self, segments: dict[str, Segment]):
        self.segments = segments

    def __reduce__(self) -> Any:
        _refuse_copy(next((s.unit.residency for s in self.segments.values()), None))
        return StateDictHook, ({},)

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        for local, s in self.segments.items():
            value = state.get(prefix + local)
            if (
                value is None
                or isinstance(value, nn.Parameter)
                or module._parameters.get(local) is not s.parameter
            ):
                continue
            given = lending.copy_of(s)  # by the last name of it, in this dict or another
            if given is None or not any(state.get(name) is given for name in s.names):
                given = reading.copy(s)
                lending.give(s, given)
            state[prefix + local] = given


class GradientHook:
    """Hands a gradient to the engine. It may fire more than once a step (reentrant checkpointing, several
    backwards): gradients add."""

    def __init__(self, segment: Segment | None):
        self.segment = segment

    def __reduce__(self) -> Any:
        return GradientHook, (None,)

    def __call__(self, parameter: nn.Parameter) -> None:
        s = self.segment
        if s is None or s.unit.residency.closed:
            return
        with DisableTorchFunction():
            gradients.take_in(s)


class Gathered:
    """Real weights in the parameters of `units` while a `with` runs; what it writes into them becomes the weight.
    `take`: as of leases.hold."""

    def __init__(self, units: Iterable[Unit], take: leases.Take | None = None):
        self.units, self.take, self.left = list(units), take, False
        self._call: Call | None = None

    def __enter__(self) -> None:
        if self._call is not None and not self.left:
            raise RuntimeError(
                "overspill: this `gathered` block is entered already: call engine.gathered(...) for each `with`"
            )
        self.left, self._call = False, Call(here.stack, None, block=self)
        try:
            _hold_block(self._call, self.units, self.take)
        except BaseException as error:
            self.left = True
            if isinstance(error, _core.BudgetError):
                self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        total = sum(s.bytes for unit in self.units for s in unit.segments)
        error.add_note(
            f"overspill: this `gathered` block needs {human(total)} of weights at once, where the engine's memory for "
            "gathered weights is planned for a pass; beyond_budget=True takes memory beside the budget"
        )

    __exit__ = _core.leave_block  # sets `left`, whatever strikes, and calls release()

    def release(self) -> None:
        assert self._call is not None
        _release_block(self._call)


def _refuse_copy(owner: Residency | None) -> None:
    """A copy or a pickle of a module would keep the NaN that a closed engine has left of its weights."""
    if owner is not None and owner.closed:
        raise RuntimeError(f"overspill: {owner.closed}")


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def without_hooks(state: dict) -> dict:
    """Of a module's state, for a copy or a pickle: all but the engine's hooks, so that whoever opens it needs no
    overspill. RuntimeError where the engine is closed."""
    state = dict(state)
    mine = set()
    for name in _HOOKS:
        if name in state:
            found = {key for key, hook in state[name].items() if _is_engines(hook)}
            mine |= found
            state[name] = type(state[name])((k, v) for k, v in state[name].items() if k not in found)
    for name in _OPTIONS:
        if name in state:
            state[name] = type(state[name])((k, v) for k, v in state[name].items() if k not in mine)
    _take_out_block(state)
    return state


def _take_out_block(state: dict) -> None:
    """The module's forward is what it was."""
    while isinstance(block := state.get("forward"), Instead):
        del state["forward"]
        if block.replaced is not None:
            state["forward"] = block.replaced


def _is_engines(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    hook = getattr(hook, "__self__", hook)
    if isinstance(hook, (ModuleHooks, AfterHook)):
        _refuse_copy(hook.owner)
    return isinstance(hook, (ModuleHooks, AfterHook, StateDictHook))


def _refuse_tracing(owner: Residency) -> None:
    """While a tracer runs: RuntimeError, since a trace would keep parameters that read as NaN after the call."""
    absent = next((unit for unit in owner.units if not unit.pins), None)
    if absent is not None:
        raise RuntimeError(
            f"overspill: torch.export, torch.onnx and torch.jit.trace would keep {absent.segments[0].name} as NaN, "
            "because the engine releases its memory after this call: export copy.deepcopy(model), or export and save "
            "inside `with engine.gathered(model.parameters()):`"
        )


def _hold_block(call: Call, units: list[Unit], take: leases.Take | None = None) -> None:
    with DisableTorchFunction(), calls.Alone():
        calls.hold_block(call, units, take)


def _release_block(call: Call) -> None:
    """Outside forward: of what was edited, whatever autograd saved before is out of date. While another thread works,
    the block stays listed, and is released by whatever works next: a block that has begun ends without an error."""
    with contextlib.suppress(calls.ThreadError), DisableTorchFunction(), calls.Alone():
        calls.work(sys._getframe(), ending=call)
        if call in books.blocks:  # else `work` has put right what was broken off, this block with it
            calls.end_block(call)
        books.open = False


def attach(
    model: nn.Module,
    owner: Residency,
    specs: list[UnitSpec],
    life: Any,
    recomputed: dict[nn.Module, str],
    logits_bytes: int = 0,
) -> None:
    """Registers all hooks. Those of modules stay when the engine is closed, and then refuse forward. `recomputed`:
    blocks that backward computes again, with their names. The blocks of `owner.compiler` are compiled: a call needs all
    of their weights at once. `logits_bytes`: above which logits are made in tiles; 0: never."""
    blocks: dict[nn.Module, list[Unit]] = {}
    alike: dict[Any, dict] = {}
    heads = logits.layers_of(model) if logits_bytes or owner.watch is not None else {}
    tiled = heads if logits_bytes else {}
    if owner.watch is not None:
        owner.watch.heads = frozenset(map(id, heads))
    if logits_bytes:
        owner.tiled = logits.said(model, tiled, logits_bytes)
    in_tiles = tiled_layers.layers_of(model)
    owner.tiled_layers = tiled_layers.said(in_tiles)
    for spec, unit in zip(specs, owner.units, strict=True):
        if spec.block is not None:
            blocks.setdefault(spec.block, []).append(unit)
    for module in model.modules():
        if not any(id(p) in registry for p in module.parameters()):
            continue
        segments = {name: registry[id(p)] for name, p in module._parameters.items() if id(p) in registry}
        owner.hooked.append(weakref.ref(module))
        compiler = owner.compiler if owner.compiler is not None and module in owner.compiler.names else None
        needed = _needed(module, blocks) if compiler is None else units_of(_segments_of(module))
        hooks = ModuleHooks(owner, needed, segments, life)
        module.register_forward_pre_hook(hooks, prepend=True)
        after = AfterHook(owner)
        module.register_forward_hook(after, always_call=True)
        if compiler is not None:
            module.__dict__["forward"] = compiler.block(module)
        if module in in_tiles:
            module.__dict__["forward"] = tiled_layers.Layer(in_tiles[module], module)
        if module in tiled:
            module.__dict__["forward"] = logits.Layer(tiled[module], module, owner, logits_bytes)
        if module in recomputed:
            changes = alike.setdefault(recompute.look(module), {})
            module.__dict__["forward"] = recompute.Block(
                recomputed[module], module, owner, hooks, after, changes
            )
        if segments:
            module.register_state_dict_post_hook(StateDictHook(segments))
            module.register_load_state_dict_pre_hook(hooks.before_load)
            module.register_load_state_dict_post_hook(hooks.after_load)
    for segment in owner.segments:
        if segment.unit.trainable:
            hook = segment.parameter.register_post_accumulate_grad_hook(GradientHook(segment))
            owner.gradient_hooks.append(hook)


def detach(owner: Residency) -> None:
    """What `attach` put on the modules is gone, also on those that have left the model; hooks of others stay."""
    for module in [module for each in owner.hooked if (module := each()) is not None]:
        mine = {
            key for name in _HOOKS for key, hook in getattr(module, name, {}).items() if _is_engines(hook)
        }
        for name in (*_HOOKS, *_OPTIONS):
            for key in mine & getattr(module, name, {}).keys():
                del getattr(module, name)[key]
        _take_out_block(module.__dict__)


def closed_part(model: nn.Module) -> str | None:
    """The name of a module whose engine was closed: its weights are gone."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, ModuleHooks) and hook.owner is not None and hook.owner.closed:
                return name or type(module).__name__
    return None


def _segments_of(module: nn.Module) -> list[Segment]:
    return [registry[id(p)] for p in module.parameters() if id(p) in registry]


def _needed(module: nn.Module, blocks: dict[nn.Module, list[Unit]]) -> list[Unit]:
    """Units of the module's own parameters (lists of parameters count as its own: they are never called),
    and of its block; not those that its forward reads in tiles."""
    holders = [
        module,
        *(c for c in module._modules.values() if isinstance(c, (nn.ParameterList, nn.ParameterDict))),
    ]
    own = [
        registry[id(p)].unit for holder in holders for p in holder._parameters.values() if id(p) in registry
    ]
    return list({id(u): u for u in (*blocks.get(module, ()), *own) if not u.part_bytes}.values())
