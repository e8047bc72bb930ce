"""What must be on in a thread while modules run or autograd does: a mode that finds weights used outside their module,
and the hooks of saved tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from . import calls, leases, saved, showing, vertical
from .calls import Call, Stack, books, here, in_backward, opaque
from .segments import Segment, Unit, registry

_METADATA_NAMES = (
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "ndim",
    "layout",
    "is_cuda",
    "is_meta",
    "is_cpu",
    "names",
    "is_sparse",
    "is_nested",
    "is_quantized",
    "is_mkldnn",
    "is_mps",
    "is_xpu",
    "_backward_hooks",
    "retains_grad",
    "_version",
    "itemsize",
    "nbytes",
    "output_nr",
    "_base",
    "_grad",
    "_post_accumulate_grad_hooks",
    "is_sparse_csr",
    "is_mtia",
    "is_ipu",
    "is_maia",
    "is_vulkan",
    "is_xla",
    "name",
)
METADATA_FUNCTIONS = (
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.stride,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.Tensor.requires_grad_,
        torch.Tensor.element_size,
        torch.Tensor.__hash__,
        torch.Tensor.__len__,
        torch.Tensor.get_device,
        torch.Tensor.is_contiguous,
        torch.Tensor.nelement,
        torch.Tensor.ndimension,
        torch.Tensor.register_hook,
        torch.Tensor.new_zeros,
        torch.Tensor.new_empty,
        torch.zeros_like,
        torch.empty_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
        torch.Tensor.new_ones,
        torch.Tensor.storage_offset,
        torch.Tensor.retain_grad,
        torch.Tensor.is_pinned,
        torch.Tensor.is_shared,
        torch.Tensor.is_inference,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.is_inference,
        torch.is_same_size,
        torch.result_type,
        torch.autograd.grad,  # patches.run_backward looks after gradients that are parameters
        torch.autograd.backward,
    }
    | {
        attribute.__get__
        for name in _METADATA_NAMES
        if hasattr(attribute := getattr(torch.Tensor, name, None), "__get__")
    }
    | {getattr(torch.Tensor, name).__set__ for name in ("grad", "_grad", "requires_grad", "_backward_hooks")}
)  # these need no weights


# Autograd saves a tensor of theirs before they write into it: its bytes are not yet those that backward wants.
FILLS_WHAT_IT_SAVES = {torch.nn.functional.rrelu, torch.rrelu, torch.rrelu_}


class TouchMode(TorchFunctionMode):
    """The safety net: a released parameter given to any torch function is acquired first (weights used
    outside their module)."""

    @opaque
    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func not in METADATA_FUNCTIONS and (needed := collect(args, kwargs)):
            touch(units_of(needed))
        if func in FILLS_WHAT_IT_SAVES:
            here.stack.leaves = True
            try:
                result = func(*args, **(kwargs or {}))
                if torch.is_grad_enabled():
                    # Saved last, and at once forgotten: a checkpoint that computes this again breaks off when it has
                    # what it wants, and has all of it before the function has filled it.
                    torch.ones((), requires_grad=True).exp()
                return result
            finally:
                here.stack.leaves = False
        return func(*args, **kwargs) if kwargs else func(*args)


def collect(args: tuple, kwargs: dict | None) -> list[Segment]:
    """The parameters of engines among the arguments of a torch function."""
    needed = []
    for argument in (*args, *kwargs.values()) if kwargs else args:
        kind = type(argument)
        if kind is tuple or kind is list:
            for item in argument:
                segment = registry.get(id(item))
                if segment is not None:
                    needed.append(segment)
        else:
            segment = registry.get(id(argument))
            if segment is not None:
                needed.append(segment)
    return needed


def units_of(segments: Iterable[Segment]) -> list[Unit]:
    return list({id(s.unit): s.unit for s in segments}.values())


def touch(needed: list[Unit]) -> None:
    """Shows units met outside a call that pins them. They stay among the recent ones: a forward that uses the
    weights of many modules without calling them must not gather the whole model."""
    with DisableTorchFunction():
        for unit in needed:
            vertical.before(unit)
            calls.work(sys._getframe())
            if not unit.pins:
                showing.remember(unit, needed)
            if not unit.shown:
                showing.show(unit)
            elif unit.lease is not None:
                leases.use(unit)
            books.open = False


class Guard:
    """Begins and ends the calls of a thread. The modes are on for the outermost one; re-entrant, and each thread's own,
    as torch's modes and hooks are.

    Of an accelerator autograd runs backward on a thread of its own, with the modes and hooks of the thread that called
    it: there they are on already, and stay."""

    def __init__(self) -> None:
        self.mode = TouchMode()

    @property
    def frames(self) -> list[Call]:
        """Calls under way in this thread, of all engines, outermost first."""
        return here.stack.calls

    def on(self) -> bool:
        """Whether this thread is inside a call."""
        return any(call.is_on(sys._getframe()) for call in here.stack.calls[:1]) or in_backward()

    def begin_module(self, call: Call) -> None:
        """Leaves the books open."""
        before = here.stack.calls
        if before and not before[-1].is_on(call.python):  # broken off: `work` claims, then ends it
            books.open = True
        self._begin(call, calls.work(call.python))

    def begin_backward(self, python: FrameType) -> Call:
        """Touches no engine: most models have none."""
        self.forget_broken(python)
        call = Call(here.stack, python)
        self._begin(call, here.stack)
        return call

    def _begin(self, call: Call, stack: Stack) -> None:
        if not stack.calls:
            stack.without_modes()
            call.guards = not in_backward()
        calls.begin(call, stack)
        if call.guards:
            stack.remove_modes = self.remove_modes
            saved.push_hooks()
            torch._C._push_on_torch_function_stack(self.mode)

    def forget_broken(self, python: FrameType) -> None:
        """Ends the calls of this thread that were broken off. `python`: the frame on top of its stack."""
        stack = here.stack
        if not stack.calls:
            stack.without_modes()  # Ctrl-C struck between the end of the last call and of its modes
        elif not stack.calls[-1].is_on(python):
            calls.settle(python)

    def end_backward(self, call: Call) -> None:
        stack = here.stack
        with DisableTorchFunction():
            if books.owner.get(0) is stack or stack.exempt:
                calls.work(sys._getframe(1))
                self.end(call, stack)
                books.open = False
            else:
                self.end(call, stack)

    def abandon_backward(self, call: Call) -> None:
        """An exception left it, maybe one that left more behind."""
        stack = here.stack
        with DisableTorchFunction():
            if books.owner.get(0) is stack and not stack.exempt:
                calls.settle(sys._getframe(1), ended=call)
            else:
                self.end_backward(call)

    def end(self, call: Call, stack: Stack) -> None:
        """The books are open."""
        calls.end(call, stack)
        if call.guards:
            saved.put_back(stack.without_modes())

    def unwind(self, stack: Stack, python: FrameType) -> None:
        """Ends the calls that an exception ended, with a frame of this thread on top of the stack. The books are open;
        a backward among them may have left more than calls."""
        while stack.calls and not stack.calls[-1].is_on(python):
            if stack.calls[-1].owner is None:
                calls.settle(python)
                books.open = True
            else:
                call = stack.calls[-1]
                calls.end(call, stack)
                if call.guards:
                    stack.without_modes()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """A `with` block in which the mode is off in this thread: what runs there is given weights that are shown, and
        is no function of torch's that the mode could see. Other modes stay on."""
        above: list[Any] = []
        while torch._C._len_torch_function_stack() > 0:
            mode = torch._C._pop_torch_function_stack()
            above.append(mode)
            if mode is self.mode:
                break
        found = bool(above) and above[-1] is self.mode
        for mode in reversed(above[:-1] if found else above):
            torch._C._push_on_torch_function_stack(mode)
        try:
            yield
        finally:
            if found:
                for _ in above[:-1]:
                    torch._C._pop_torch_function_stack()
                for mode in reversed(above):
                    torch._C._push_on_torch_function_stack(mode)

    def remove_modes(self) -> list[tuple[Any, Any]]:
        """Other modes stay on. Returns the hooks that lay above the engine's, innermost first; they are gone, too."""
        above = []
        for place in reversed(range(torch._C._len_torch_function_stack())):
            if torch._C._get_function_stack_at(place) is self.mode:
                for _ in above:
                    torch._C._pop_torch_function_stack()
                torch._C._pop_torch_function_stack()
                for mode in reversed(above):
                    torch._C._push_on_torch_function_stack(mode)
                break
            above.append(torch._C._get_function_stack_at(place))
        return saved.pop_hooks()


guard = Guard()
