"""Ctrl-C at a chosen moment: KeyboardInterrupt at the n-th place where CPython could deliver it.

A signal's handler runs when a function is entered, at a jump backwards, and when a call of C returns (its result is
lost). Those places are counted in the files of chosen folders; the places inside C are none, as the GIL is not held
there: a wait of the engine ends first.
"""

import contextlib
import dis
import gc
import sys
from pathlib import Path

import torch

import overspill

OVERSPILL = str(Path(overspill.__file__).parent)
MODULES = str(Path(torch.nn.modules.__file__).parent)
TENSORS = str(Path(torch.autograd.__file__).parent / "graph.py")
_AFTER = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX") if name in dis.opmap}
_AT = {dis.opmap[name] for name in ("JUMP_BACKWARD",) if name in dis.opmap}


class Interrupter:
    """`count`: places passed so far. `place`: where it struck."""

    def __init__(self, at=None, folders=(OVERSPILL, MODULES, TENSORS)):
        self.at, self.folders, self.count, self.place = at, folders, 0, None
        self._codes = {}

    @contextlib.contextmanager
    def armed(self):
        gc.disable()  # it would run finalizers, at moments that differ, and one of them would be struck
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            gc.enable()

    def _strike(self, frame):
        self.count += 1
        if self.count - 1 == self.at:
            self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt(self.place)

    def _enter(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.folders):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._strike(frame)
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code, _handlers(frame.f_code)
        before = None

        def each(frame, event, arg):
            nonlocal before
            if event == "opcode":
                last, before = before, frame.f_lasti
                opcodes, handlers = code
                called = last is not None and opcodes[last] in _AFTER and handlers(last) == handlers(before)
                if called or opcodes[before] in _AT:
                    self._strike(frame)
            return each

        return each


def _handlers(code):
    """offset -> where an exception raised there is handled."""
    entries = list(dis._parse_exception_table(code))
    return lambda offset: next((e.target for e in entries if e.start <= offset < e.end), None)
