"""A small model, the plain loop that its engine follows, and what may happen in the middle of an engine's call."""

import gc
import threading

import torch
from torch import nn
from torch._C import DisableTorchFunction

from overspill import leases, segments


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)


def batch(i=0):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(i))


def loss_of(model, x):
    return model(x).square().mean()


def is_released(*parameters):
    """No memory is held for any of them."""
    with DisableTorchFunction():
        return all(p.isnan().all() for p in parameters)


def follows(engine, plain, steps=2):
    """The engine trains as the plain loop does, from here on."""
    for i in range(steps):
        ours, theirs = loss_of(engine.module, batch(i)), loss_of(plain.model, batch(i))
        assert torch.equal(ours, theirs)
        ours.backward()
        plain.backward(theirs)
        engine.step()
        plain.step(engine.last_step.clip)
    assert all(torch.equal(v, plain.model.state_dict()[k]) for k, v in engine.state_dict().items())


class Strike:
    """Raises once."""

    def __init__(self, error=KeyboardInterrupt):
        self.error = error

    def __call__(self, *_):
        error, self.error = self.error, None
        if error is not None:
            raise error("on purpose")


class Meanwhile:
    """A core that has `action` run inside its call `name`, or after it."""

    def __init__(self, core, name, action, after=False):
        self.core, self.name, self.action, self.after = core, name, action, after

    def __getattr__(self, name):
        value = getattr(self.core, name)
        if name != self.name:
            return value

        def call(*arguments):
            if self.after:
                result = value(*arguments)
                self.action()
                return result
            self.action()
            return value(*arguments)

        return call


def in_thread(function):
    """Its exception, or None."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


def refused(error):
    """Whether a second thread was refused because the main one was at work."""
    return (
        isinstance(error, RuntimeError)
        and "'MainThread'" in str(error)
        and "one thread at a time" in str(error)
    )


def held():
    """Units whose weights are in memory, and how many leases outlive their calls."""
    gc.collect()
    return [u for s in segments.registry.values() if (u := s.unit).flat is not None], leases.lingering()
