"""Vertical accumulation: the micro-batches of a step pass each unit one after another, so that weights move once
a step and not once a micro-batch.

Each micro-batch is a thread with its own forward, then its own backward, of any model. One of them runs at a time.
Where it comes to another unit, it hands the turn over to the others until they have caught up; so all of them pass
unit k, then all pass unit k + 1. A thread never waits for another one to come anywhere: micro-batches whose
control flow differs lose traffic, not progress. Where all take the same way, a unit's gradients arrive in the order
of the micro-batches, as they do one micro-batch after another, and every bit is the same.

On an accelerator autograd has one thread for all backward passes, which nobody may keep waiting: there micro-batches
pass forward together, and backward one after another.

What differs: activations of all micro-batches are alive at once (checkpoint them), and each micro-batch draws its
random numbers from a state of its own, seeded from torch's at the start.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import calls
from .draws import Draws
from .place import HOST, Place
from .segments import Unit

_LOOK_SECONDS = 0.001


class _Stopped(BaseException):
    """Raised where a micro-batch waits, when another one failed."""


class _Runner:
    """One micro-batch. `unit`: the one it passes. `needs`: the one it waits for; None: it has not begun its phase.
    `passed`: how often it came to each unit in this phase. `at_work`: it has begun, and not ended."""

    def __init__(self, number: int, draws: Draws):
        self.number, self.draws = number, draws
        self.unit: Unit | None = None
        self.needs: Unit | None = None
        self.passed: Counter[Unit | None] = Counter()
        self.waits = self.at_end = self.at_work = False


class _Turns:
    """Who of the runners has the turn. `unit`: the one being passed. `direction`: of units, by index, in this phase."""

    def __init__(self, runners: Sequence[_Runner]):
        self.runners, self.unit, self.running, self.direction = runners, None, None, 1
        self.changed = threading.Condition()
        self.failure: BaseException | None = None

    def begin_phase(self, runner: _Runner) -> None:
        """Until it is the runner's turn to begin."""
        with self.changed:
            self._wait(runner, None)

    def come_to(self, runner: _Runner, unit: Unit) -> None:
        """Until it is the runner's turn to pass `unit`."""
        with self.changed:
            if unit is not self.unit:
                self._wait(runner, unit)
                self.unit = unit
            runner.unit = unit
            runner.passed[unit] += 1

    def _wait(self, runner: _Runner, unit: Unit | None) -> None:
        """The turn, if it had it, goes to who is due."""
        self._leave(runner)
        runner.needs, runner.waits = unit, True
        self._pass_on()
        self.changed.wait_for(lambda: self.running is runner or self.failure is not None)
        runner.waits = False
        if self.failure is not None:
            raise _Stopped
        runner.draws.restore()

    def end_phase(self, runner: _Runner) -> None:
        """Until every runner is here."""
        with self.changed:
            self._leave(runner)
            runner.at_end = True
            if all(each.at_end for each in self.runners):
                for each in self.runners:
                    each.at_end, each.unit = False, None
                    each.passed.clear()
                self.unit, self.direction = None, -self.direction
                self.changed.notify_all()
            else:
                self._pass_on()
                self.changed.wait_for(lambda: not runner.at_end or self.failure is not None)
            if self.failure is not None:
                raise _Stopped

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def take_back(self) -> None:
        """Gives back the lock of `changed`, which a thread keeps where Ctrl-C strikes between taking it and the body of
        its `with`: Condition.__enter__ is Python."""
        with contextlib.suppress(RuntimeError):  # this thread does not have it, or no longer
            while True:
                self.changed.release()

    def _leave(self, runner: _Runner) -> None:
        if self.running is runner:
            runner.draws, self.running = Draws(runner.draws.where), None

    def _pass_on(self) -> None:
        """Once everybody waits: first pass those who need the unit at hand; then another one: that which was come to
        least often, the first of these in the model (in backward the last). Always in order of number."""
        waiting = [r for r in self.runners if r.waits]
        if self.running is not None or not all(r.waits or r.at_end for r in self.runners) or not waiting:
            return
        due = [r for r in waiting if r.needs is not None and r.needs is self.unit]
        if not due:
            unit = min(waiting, key=self._place_of).needs
            due = [r for r in waiting if r.needs is unit]
        self.running = due[0]
        self.changed.notify_all()

    def _place_of(self, runner: _Runner) -> tuple[int, float]:
        unit = runner.needs
        return runner.passed[unit], -math.inf if unit is None else self.direction * unit.index


def _stop(turns: _Turns, error: BaseException) -> None:
    """Returns when no micro-batch is at work: one in backward would give its gradient to the next step. May be called
    again where Ctrl-C broke it off. Threads are not joined, since Python 3.11 takes one for ended when Ctrl-C breaks
    off its join."""
    turns.take_back()
    turns.fail(error)
    while any(runner.at_work for runner in turns.runners):
        time.sleep(_LOOK_SECONDS)


_place = threading.local()  # of a micro-batch's thread: its turns and its runner


def before(unit: Unit) -> None:
    """Called where a unit is about to be acquired: here the turn changes hands."""
    place = getattr(_place, "turns", None)
    if place is not None and place[1].unit is not unit:
        with DisableTorchFunction():
            place[0].come_to(place[1], unit)


class _Setting:
    """How torch computes in the thread that makes it, for the threads of so many micro-batches."""

    def __init__(self, where: Place, micro_batches: int):
        self._autocasts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", where.autocast}
        ]
        self.entered = [where.entered() for _ in range(micro_batches)]
        self.threads = torch.get_num_threads()

    def autocast(self) -> contextlib.ExitStack:
        """Entered, to be left in the same thread."""
        casting = contextlib.ExitStack()
        for kind, enabled, dtype in self._autocasts:
            casting.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        return casting


def _work(
    runner: _Runner,
    turns: _Turns,
    setting: _Setting,
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    results: list[Any],
) -> None:
    """One micro-batch, in a thread of its own."""
    runner.at_work = True
    _place.turns = turns, runner
    calls.here.stack.exempt = True
    torch.set_num_threads(setting.threads)  # torch keeps it for each thread
    try:
        turns.begin_phase(runner)
        with setting.entered[runner.number]:
            with setting.autocast():
                results[runner.number] = forward()
            turns.end_phase(runner)
            turns.begin_phase(runner)
            backward(results[runner.number])
            turns.end_phase(runner)
    except _Stopped:
        pass
    except BaseException as error:
        turns.fail(error)
    finally:
        runner.at_work = False


def run(
    forwards: Sequence[Callable[[], Any]], backward: Callable[[Any], Any], where: Place = HOST
) -> list[Any]:
    """Calls each of `forwards`, then `backward` with what it returned, as one micro-batch each. Returns what the
    forwards returned. The first exception of any of them is raised again when all have ended.
    """
    setting = _Setting(where, len(forwards))
    seeds = torch.randint(2**62, (len(forwards),), dtype=torch.int64).tolist()
    runners = [_Runner(i, Draws(where, seed)) for i, seed in enumerate(seeds)]
    afterwards = Draws(where)
    turns, results = _Turns(runners), [None] * len(forwards)
    threads = [
        threading.Thread(
            target=_work,
            args=(runner, turns, setting, forward, backward, results),
            name=f"micro-batch {runner.number}",
        )
        for runner, forward in zip(runners, forwards, strict=True)
    ]
    python = sys._getframe()
    stack = calls.work(python)
    call = calls.Call(stack, python)
    calls.begin(call, stack)
    calls.books.open = False
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        # Until it has returned, however often Ctrl-C strikes, of which `error` is raised. Python looks for signals at a
        # loop's jump back too, which is outside the `try` inside the loop: that of the inner loop is inside the outer
        # one's, and the outer one's follows it at once. No function does this: one looks for signals as it is entered.
        while True:
            try:
                while True:
                    try:
                        _stop(turns, error)
                        break
                    except KeyboardInterrupt:
                        pass
                break
            except KeyboardInterrupt:
                pass
    finally:
        afterwards.restore()
    if turns.failure is not None:
        calls.settle(python, ended=call)
        raise turns.failure
    calls.work(python)
    calls.end(call, stack)
    calls.books.open = False
    return results
