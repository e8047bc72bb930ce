"""Tracks what is under way and which units it holds: calls of modules, backward passes, `gathered` blocks.

Ctrl-C may strike between any two lines of Python, so nothing here trusts that a `finally` or a hook of torch has run.
Three rules take their place:

- A call is known by the Python frame that makes it. It is under way while that frame is on its thread's stack; a
  listed call whose frame has gone was interrupted, and the next call ends it.
- A unit is listed as held before it is pinned. So the lists are the truth and the pins can be counted again from them.
- `books.open` is set while anything is changed. A call that finds it set knows that another was interrupted, and
  calls `put_right`, which releases every unit that no call under way holds.

One thread at a time works with the memory of engines, from its first use to the end of its outermost call, and while it
steps, loads, saves, reads or clears (`Alone`); another one meanwhile gets an error. Micro-batches that pass units
together (vertical.py) and autograd's own threads are excepted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from . import _core, leases, lending, residency, showing
from ._core import OverspillError
from .residency import Residency
from .segments import Segment, Unit


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether torch.compile, a tracer or one of torch.func's transforms looks at what runs."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return torch._C._functorch.maybe_current_level() is not None


def opaque(function: Callable) -> Callable:
    """Makes torch.compile run the function, and all that it calls, as it is. If traced, its effects on the engine would
    happen only once, while compiling. Unlike torch.compiler.disable it imports no compiler and adds no frame."""
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "overspill moves weights here; export copy.deepcopy(model)"  # type: ignore[attr-defined]
    return function


class Call:
    """Under way while `python` is on the stack of its thread, or, of a `gathered` block, while `block` lives. `units`:
    what it holds. `guards`: the modes of its thread are on for its sake."""

    __slots__ = ("block", "guards", "module", "owner", "python", "stack", "units")

    def __init__(
        self,
        stack: Stack,
        python: FrameType | None,
        owner: Residency | None = None,
        module: Any = None,
        block: Any = None,
    ):
        self.stack, self.python, self.owner, self.module = stack, python, owner, module
        self.block = None if block is None else weakref.ref(block)
        self.units: list[Unit] = []
        self.guards = False

    def is_on(self, python: FrameType | None) -> bool:
        """Whether the call is under way on the stack of this thread, which has `python` on top."""
        mine = self.python
        while python is not None and python is not mine:
            python = python.f_back
        return python is not None

    def is_under_way(self, python: FrameType | None) -> bool:
        """`python`: on top of this thread's stack."""
        if self.block is not None:
            block = self.block()
            return block is not None and not block.left
        if self.stack is here.stack:
            return self.is_on(python)
        return self.python in self.stack.frames([self.python])


class Stack:
    """The calls under way in one thread, outermost first. `claimed`: the frame in which the thread began to work,
    dropped when the work ends, since a frame keeps alive all that it and its callers refer to. `alone`: the frame of
    the outermost `Alone`, which outlasts the calls inside. `remove_modes`: removes all or some of the modes that were
    set for these calls, and the hooks above; None: none were. `exempt`: the thread takes turns with others. `refuses`:
    name and frame of the call in the middle of which no engine works (`NothingElse`). `leaves`: what autograd saves now
    stays with torch. `saves`: of a block that is computed again, the tensors that autograd saves, and their
    versions. `alike`: while autograd keeps the inputs of a block that will be computed again, those that are the same
    on all ranks (partitioned.py)."""

    __slots__ = (
        "alike",
        "alone",
        "calls",
        "claimed",
        "exempt",
        "ident",
        "leaves",
        "refuses",
        "remove_modes",
        "saves",
    )

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.ident, self.exempt = threading.get_ident(), False
        self.leaves = False
        self.alike: Any = None
        self.saves: list[tuple[torch.Tensor, int]] | None = None
        self.claimed: FrameType | None = None
        self.alone: FrameType | None = None
        self.refuses: tuple[str, FrameType] | None = None
        self.remove_modes: Callable[[], list[tuple[Any, Any]]] | None = None

    def is_left(self) -> bool:
        """Of another thread: whether it went and left calls that were broken off."""
        wanted = [call.python for call in self.calls]
        return bool(wanted) and not self.frames(wanted)

    def thread(self) -> str:
        """Its name, or its number where it has none."""
        return next((t.name for t in threading.enumerate() if t.ident == self.ident), str(self.ident))

    def without_modes(self) -> list[tuple[Any, Any]]:
        """Returns the pairs of hooks that lay above the engine's, innermost first. Where the calls were broken off they
        are left-overs: a `with` in the model's forward was struck before it could take its own away."""
        if self.remove_modes is None:
            return []
        above = self.remove_modes()
        self.remove_modes = None
        return above

    def frames(self, wanted: list[FrameType | None]) -> list[FrameType | None]:
        """Those of `wanted` that are on the stack of this thread."""
        return _core.frames_on_stack(self.ident, wanted)

    def works(self) -> bool:
        """Whether its thread is inside a call that works with engines' memory. `Tensor.backward` alone need not."""
        calls = list(self.calls)
        if books.owner.get(0) is not self:
            calls = [call for call in calls if call.owner is not None]
        wanted = [call.python for call in calls]
        if books.owner.get(0) is self and self.claimed is not None:
            wanted.append(self.claimed)
        return bool(wanted) and bool(self.frames(wanted))


class Books:
    """Of the process. `open`: a change is being made, or was broken off. `stacks`: those with calls. `blocks`: calls
    that need not end in the order of a stack. `owner`, at 0: the stack of the thread that works; a dict, because its
    `setdefault` lets one of two threads win. `succession`: taken to follow an owner that left without a word, and to
    leave; re-entrant, because a garbage collection inside may close an engine, which takes it too. `edited`: units that
    ended blocks have edited, until what autograd saved of them before is out of date."""

    __slots__ = ("blocks", "edited", "open", "owner", "stacks", "succession")

    def __init__(self) -> None:
        self.open = False
        self.stacks: list[Stack] = []
        self.blocks: list[Call] = []
        self.owner: dict[int, Stack] = {}
        self.succession = threading.RLock()
        self.edited: list[Unit] = []


class _Here(threading.local):
    """Of a thread. on_copies: its call on copies of weights (transformed.py), which needs none of the engine's."""

    def __init__(self) -> None:
        self.stack = Stack()
        self.on_copies: Call | None = None

    def is_on_copies(self) -> bool:
        return self.on_copies is not None and self.on_copies.is_on(sys._getframe())


books = Books()
here = _Here()


def work(python: FrameType | None, ending: Call | None = None) -> Stack:
    """Opens the books for a change by this thread; the caller sets `books.open = False` when the change is complete,
    and only then. `ending`: a block that the caller is about to end. Raises RuntimeError while another thread is at
    work."""
    stack = here.stack
    if books.open or not stack.calls or books.owner.get(0) is not stack:
        claim(stack, python)
        if books.open or not all(call is ending or call.is_under_way(python) for call in books.blocks):
            put_right(python)
    books.open = True
    return stack


def claim(stack: Stack, python: FrameType | None) -> None:
    if stack.exempt:
        return
    if residency.accelerators and in_backward() and not (stack.calls and stack.calls[0].guards):
        backward = [each for each in tuple(books.stacks) if any(call.owner is None for call in each.calls)]
        if backward:  # autograd's own thread works for the one that called it
            books.owner.setdefault(0, backward[0])
        return
    for other in tuple(books.stacks):
        if other is not stack and other.works():
            _refuse_thread(other)
    if books.owner.get(0) is not stack or not stack.works():  # else what it works in ends later than `python`
        stack.claimed = python
    if books.owner.setdefault(0, stack) is not stack:
        with books.succession:
            winner = books.owner.setdefault(0, stack)
            if winner is not stack:
                if winner.works():
                    stack.claimed = None
                    _refuse_thread(winner)
                books.owner[0] = stack
    if any(other is not stack and other.is_left() for other in tuple(books.stacks)):
        books.open = True


def unclaim(stack: Stack) -> None:
    """This thread's work has ended, unless it goes on in an `Alone`. It stays the owner until no call of its is
    listed."""
    if stack.alone is not None:
        python: FrameType | None = sys._getframe()
        while python is not None and python is not stack.alone:
            python = python.f_back
        if python is not None:
            return
        stack.alone = None  # Ctrl-C kept `Alone` from it
    with books.succession:  # else it might take away what a successor was given meanwhile
        if books.owner.get(0) is stack and not stack.calls:
            books.owner.pop(0, None)
    stack.claimed = None


class Alone:
    """A `with` block that no call of another thread may overlap. Such a call raises RuntimeError until the block ends,
    and so does the block if such a call is under way. Inside a call or another such block of this thread it does
    nothing."""

    __slots__ = ("stack",)

    def __enter__(self) -> None:
        stack, self.stack = here.stack, None
        if stack.refuses is not None:
            _refuse_inside(stack)
        if books.owner.get(0) is not stack or not stack.works():
            python = sys._getframe(1)
            claim(stack, python)
            self.stack, stack.alone = stack, python

    def __exit__(self, *_: Any) -> None:
        if self.stack is not None:
            self.stack.alone = None
            unclaim(self.stack)


def _refuse_inside(stack: Stack) -> None:
    """Raises RuntimeError inside the call that `stack.refuses` names. Ctrl-C may have kept NothingElse from ending."""
    assert stack.refuses is not None
    call, frame = stack.refuses
    if not stack.frames([frame]):
        stack.refuses = None
        return
    raise RuntimeError(
        f"overspill: {call} is under way, and a handler of a signal called an engine inside it: let the handler set a "
        "flag, and look at it between two steps"
    )


class NothingElse:
    """A `with` block, inside `Alone`, around a call of the core that runs Python: a signal handler that calls an engine
    in the middle of it gets RuntimeError. `call`: the call's name."""

    __slots__ = ("call",)

    def __init__(self, call: str):
        self.call = call

    def __enter__(self) -> None:
        here.stack.refuses = self.call, sys._getframe(1)

    def __exit__(self, *_: Any) -> None:
        here.stack.refuses = None


class ThreadError(OverspillError):
    """Raised for a call that another thread's call in progress excludes."""


def _refuse_thread(other: Stack) -> None:
    raise ThreadError(
        f"overspill: thread {other.thread()!r} is inside a forward, backward, step, load, save or read of an engine's "
        f"weights, and {threading.current_thread().name!r} called an engine too: the engines of a process work in one "
        "thread at a time; let the threads take turns (a lock around each use; engine.stats() needs none)"
    )


def begin(call: Call, stack: Stack) -> None:
    """The books are open."""
    if stack not in books.stacks:
        books.stacks.append(stack)
    stack.calls.append(call)
    if call.owner is not None:
        call.owner.calls += 1


def hold(call: Call, unit: Unit, take: leases.Take | None = None) -> None:
    """The books are open. `take`: as of leases.hold."""
    call.units.append(unit)
    showing.pin(unit, take)


def end(call: Call, stack: Stack) -> None:
    """With the books open: unpins the call's units; in backward (recomputation) they stay among the recent units."""
    if not stack.calls or stack.calls[-1] is not call:
        return  # settled meanwhile
    stack.calls.pop()
    if call.owner is not None:
        call.owner.calls -= 1
    if call.units:
        keep = in_backward()
        for unit in call.units:
            showing.unpin(unit, keep)
    if not stack.calls:
        _leave(stack)


def hold_block(call: Call, units: list[Unit], take: leases.Take | None = None) -> None:
    """Begins a block, or a function outside forward, in which `units` are shown. `take`: as of leases.hold; None:
    memory that may be edited."""
    work(sys._getframe())
    books.blocks.append(call)
    for owner in {unit.residency for unit in units}:
        if not owner.current:
            owner.refresh()
    for unit in units:
        hold(call, unit, take or leases.acquire_to_edit)
    books.open = False


def end_block(call: Call) -> None:
    """With the books open: edits in the block become the weight."""
    books.edited += filter(showing.edited, call.units)
    books.blocks.remove(call)
    for unit in call.units:
        showing.unpin(unit, False)
    _outdate_edited()


def end_function(call: Call, touched: list[Segment]) -> None:
    """As `end_block`, of a function outside forward that `touched` these parameters, and may have returned views."""
    books.edited += filter(showing.edited, call.units)
    books.blocks.remove(call)
    for unit in call.units:
        unit.pins -= 1
    showing.put_back(call.units, touched)
    _outdate_edited()


def _outdate_edited() -> None:
    for unit in books.edited:
        lending.outdate(unit)
    books.edited.clear()


def _leave(stack: Stack) -> None:
    """Called when the thread's outermost call has ended."""
    if stack in books.stacks:
        books.stacks.remove(stack)
    if books.owner.get(0) is stack or stack.exempt:
        showing.forget()
        if not stack.exempt:
            unclaim(stack)


def check(python: FrameType | None) -> None:
    """For a call that begins, made by the frame `python`: ends calls that were interrupted before it."""
    with Alone():
        if books.open or not all(call.is_under_way(python) for call in (*here.stack.calls, *books.blocks)):
            put_right(python)


def settle(python: FrameType | None, ended: Call | None = None) -> None:
    """As `put_right`, for code that begins no call: the thread's work ends, unless it has a call under way."""
    put_right(python, ended)
    if not here.stack.calls:
        unclaim(here.stack)


def put_right(python: FrameType | None, ended: Call | None = None) -> None:
    """Makes the books true again: forgets calls that are not under way (and `ended`), counts the pins from those that
    are, and releases everything else; what was edited in a block becomes the weight. `python`: a frame of this thread
    that is on its stack. Who owns the memory stays as it is: the thread that asks may have claimed it for the call that
    it is about to begin."""
    books.open = True
    stack = here.stack
    for each in (stack, *(s for s in books.stacks if s is not stack)):
        each.calls[:] = [call for call in each.calls if call is not ended and call.is_under_way(python)]
    books.stacks[:] = [each for each in books.stacks if each.calls]
    blocks = [call for call in books.blocks if call is not ended and call.is_under_way(python)]
    left = [unit for call in books.blocks if call not in blocks for unit in call.units]
    books.edited += filter(showing.edited, left)
    books.blocks[:] = blocks
    if not stack.calls:
        stack.without_modes()
        stack.saves, stack.leaves, stack.alike = None, False, None
    try:
        residency.recount([call for each in books.stacks for call in each.calls] + blocks)
    except Exception as error:
        if left:
            names = ", ".join(s.name for unit in left for s in unit.segments)
            error.add_note(
                f"overspill: a `gathered` block that has ended since had edited some of these: {names}"
            )
        raise
    _outdate_edited()
    books.open = False


def leave_torch(python: FrameType) -> None:
    """When no engine is left: removes the modes that an interrupted call of this thread left on."""
    stack = here.stack
    if not any(call.is_on(python) for call in stack.calls):
        settle(python)
        stack.without_modes()


def refuse_inside(owner: Residency, what: str) -> None:
    """For a call named `what` that changes weights: raises RuntimeError while a call under way holds weights of
    `owner`."""
    for call in [call for each in (*books.stacks, here.stack) for call in each.calls] + books.blocks:
        if call.owner is owner or any(unit.residency is owner for unit in call.units):
            where = "`with engine.gathered(...)`" if call.block is not None else "a call of the model"
            mine = call.stack is here.stack
            place = f"inside {where}" if mine else f"while thread {call.stack.thread()!r} is inside {where}"
            way_out = f"leave {where} first" if mine else "let that end first"
            raise RuntimeError(
                f"overspill: {what} {place} is refused, because it would change weights that are in use there: "
                f"{way_out}"
            )


def clear_spoiled(owner: Residency) -> None:
    """Clears gradients that an interrupted train_batch left and could not clear (a second Ctrl-C, another thread at
    work). The next pass, update or read of gradients calls it first. A micro-batch that is still being stopped clears
    nothing."""
    if owner.spoiled and not here.stack.exempt:
        with Alone():
            # A load may have left the engine with parts of two models: then it has no gradients.
            with torch._C.DisableTorchFunction(), contextlib.suppress(_core.CheckpointError):
                owner.gradients.clear()
            owner.spoiled = False


def refuse_update(owner: Residency, what: str) -> None:
    """Inside `Alone`: RuntimeError where the weights of `owner` cannot change now, by the call named `what`."""
    if owner.closed:
        raise RuntimeError(f"overspill: {owner.closed}")
    if owner.leaving and what != "engine.give_back":
        raise RuntimeError(f"overspill: {residency.BROKEN_OFF}")
    check(sys._getframe())
    refuse_inside(owner, what)


def start_update(owner: Residency, what: str) -> None:
    """Inside `Alone`, before the weights of `owner` change, by the call named `what`: nothing is shown or held that
    would be of before, else RuntimeError."""
    refuse_update(owner, what)
    clear_spoiled(owner)
    work(sys._getframe())
    showing.forget()
    showing.go_on(owner)
    owner.current = False
    books.open = False


def _after_fork() -> None:
    """In a child: its one thread has no call that counts, and no other thread is there to give back a lock."""
    books.open, books.succession = False, threading.RLock()
    here.stack.claimed = here.stack.alone = None
    for entries in (books.stacks, books.blocks, books.edited, books.owner, here.stack.calls):
        entries.clear()


os.register_at_fork(after_in_child=_after_fork)
