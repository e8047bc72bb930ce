"""The accelerator that on_accelerator*.py test PyTorch on, what they train there, and their fixtures."""

import gc
import os

import pytest
import torch
from torch import nn

DEVICE = os.environ.get("OVERSPILL_DEVICE", "simulated")
ON_TESTS_OWN = DEVICE == "simulated"
ON_THE_DEVICE = ("units", "gather", "accumulators", "squares", "sums")  # what a plan puts there
if ON_TESTS_OWN:
    import accelerator


@pytest.fixture(autouse=True)
def nothing_is_written_after_it_was_freed():
    if not ON_TESTS_OWN and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    torch.use_deterministic_algorithms(not ON_TESTS_OWN, warn_only=True)
    if (
        not ON_TESTS_OWN
    ):  # cuBLASLt may choose by alignment, which differs between the engine's weights and torch's
        torch.backends.cuda.preferred_blas_library("cublas")
    yield
    gc.collect()
    if ON_TESTS_OWN:
        accelerator.core.verify_freed_memory()


@pytest.fixture
def on_device(config):
    """config(...) with the device, and a budget of `device` bytes there."""

    def make(placement="host", device=None, **options):
        made = config(placement, **options)
        made["engine"].device = DEVICE
        made["budget"]["device"] = device
        return made

    return make


def small_net(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 1))


def inputs(i, width=32):
    torch.manual_seed(100 + i)
    return torch.randn(8, width)


def square_loss(model, x):
    return model(x).square().mean()


def train(engine, steps, first=0, width=32):
    losses = []
    for i in range(first, first + steps):
        loss = square_loss(engine, inputs(i, width))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def expect_on_device(engine):
    assert engine.device.type == DEVICE
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    assert {t.device for t in tensors} == {engine.device}
