"""The plain loop: the same model without an engine, everything in memory, updated by the scalar reference of
the C++ tests.

Weights are the model's own tensors. A bf16 weight is the upper part of an exact fp32 master, whose lower
part is kept here
(DESIGN 3). The only thing taken from the engine is the clip factor: its sum of squares is a tree over
chunks; the norm
itself is compared by `norm`.
"""

import ctypes
import os
from pathlib import Path

import torch

_POINTER, _INT, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_HYPER = [_DOUBLE] * 5 + [_INT, _INT64, _DOUBLE]


def _load():
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("OVERSPILL_REFERENCE", root / "build/release/tests/reference"))
    library = ctypes.CDLL(str(folder / "liboverspill_reference_c.so" if folder.is_dir() else folder))
    library.reference_adam_split.argtypes = [_POINTER] * 5 + [_INT, _INT64] + _HYPER
    library.reference_adam_fp32.argtypes = [_POINTER] * 4 + [_INT64] + _HYPER
    library.reference_adam_split.restype = library.reference_adam_fp32.restype = None
    return library


reference = _load()
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


class State:
    """Of one parameter: the lower half of a bf16 master, moments, its own step count, all in the parameter's
    memory order."""

    def __init__(self, parameter, group):
        self.parameter, self.group, self.steps = parameter, group, 0
        self.m, self.v = torch.zeros(parameter.numel()), torch.zeros(parameter.numel())
        self.lo = (
            torch.zeros(parameter.numel(), dtype=torch.int16) if parameter.dtype is torch.bfloat16 else None
        )
        self.gradient, self.version, self.weight = None, parameter._version, parameter.detach().clone()

    def master(self):
        """fp32, in the parameter's shape."""
        if self.lo is None:
            return self.parameter.detach().clone().cpu()
        hi = memory(self.parameter).cpu().view(torch.int16).to(torch.int64)
        bits = ((hi << 16) + self.lo.to(torch.int64)).to(torch.int32).view(torch.float32)
        return bits.as_strided(self.parameter.shape, self.parameter.stride())

    def notice_edits(self):
        """A weight edited in place in forward is the new weight: what was below bf16 is gone."""
        changed = self.parameter._version != self.version or not torch.equal(self.parameter, self.weight)
        if changed and self.lo is not None:
            self.lo.zero_()

    def update(self, clip):
        g = self.group
        factor = ctypes.c_float(clip).value
        self.steps += 1
        hyper = (g["lr"], *g["betas"], g["eps"], g["weight_decay"], int(g["decoupled"]), self.steps, factor)
        p, m, v, n = memory(self.parameter).cpu(), self.m, self.v, self.m.numel()
        gradient = torch.empty_strided(
            self.parameter.shape, self.parameter.stride(), dtype=self.gradient.dtype
        )
        gradient.copy_(self.gradient)
        if self.lo is None:
            reference.reference_adam_fp32(
                p.data_ptr(), m.data_ptr(), v.data_ptr(), gradient.data_ptr(), n, *hyper
            )
        else:
            reference.reference_adam_split(
                p.data_ptr(),
                self.lo.data_ptr(),
                m.data_ptr(),
                v.data_ptr(),
                gradient.data_ptr(),
                int(gradient.dtype is torch.bfloat16),
                n,
                *hyper,
            )
        if not self.parameter.is_cpu:
            memory(self.parameter).copy_(p)

    def rest(self):
        self.gradient, self.version, self.weight = (
            None,
            self.parameter._version,
            self.parameter.detach().clone(),
        )


def memory(tensor):
    """A dense tensor's elements as they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Plain:
    def __init__(self, model, groups=None, accumulation=1):
        """groups: as torch.optim's, each with all of ADAMW's keys."""
        self.model, self.accumulation = model, accumulation
        groups = groups or [{"params": list(model.parameters()), **ADAMW}]
        self.states = [State(p, g) for g in groups for p in g["params"] if p.requires_grad]

    def backward(self, loss):
        for state in self.states:
            state.notice_edits()
        (loss / self.accumulation if self.accumulation > 1 else loss).backward()
        for state in self.states:
            gradient, state.parameter.grad = state.parameter.grad, None
            if gradient is None:
                continue
            if self.accumulation > 1:
                gradient = gradient.float()
            state.gradient = gradient if state.gradient is None else state.gradient + gradient

    def norm(self):
        squares = [s.gradient.double().square().sum() for s in self.states if s.gradient is not None]
        return torch.stack(squares).sum().sqrt().item()

    def step(self, clip):
        for state in self.states:
            if state.gradient is not None:
                state.update(clip)
            state.rest()
