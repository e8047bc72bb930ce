"""safe_set_full_grad on one rank."""

import pytest
import torch
from deepspeed_scene import made

from overspill.deepspeed import fragments

pytestmark = pytest.mark.usefixtures("no_group")


def test_a_gradient_of_several_micro_batches_is_set_in_fp32():
    """Where the engine holds their sum in fp32, setting what was read changes no bit."""
    engine = made(bf16={"enabled": True}, gradient_accumulation_steps=3, train_batch_size=6)
    weight = engine.module[0].weight
    for number in range(3):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        engine.backward(engine(x).float().square().mean())
        if number < 2:
            engine.step()
    before = fragments.safe_get_full_grad(weight)
    assert not torch.equal(before, before.bfloat16().float()), "it has bits that bf16 lacks"
    fragments.safe_set_full_grad(weight, before)
    assert torch.equal(fragments.safe_get_full_grad(weight), before)
    engine.destroy()
