"""What changes between a block's forward and backward (`engine.recompute`): it is as it was, or there is an error."""

import copy

import pytest
import torch
from recompute_scene import Part, Repeats, blocks, calls_again, plainly
from test_zoo import bits
from torch import nn

pytest_plugins = "recompute_scene"


def test_backward_in_another_mode_has_that_of_forward(again):
    def work(part, x):
        return nn.functional.dropout(x * 0.9, 0.3) if part.training else x

    plain, model = Repeats(work), Repeats(work)
    engine = again(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for net in plain, engine:
        torch.manual_seed(4)
        loss = net(torch.randn(16, 32))
        net.eval()
        loss.backward()
    assert calls_again(engine) == 2 and not any(part.training for part in model.modules())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


def test_a_buffer_that_the_script_writes_into_between_is_refused(again):
    engine = again(Repeats(lambda part, x: x * part.seen))
    loss = engine(torch.randn(4, 32))
    engine.module.parts[1].seen.add_(1)
    with pytest.raises(RuntimeError, match=r"a call of parts\.1 was followed by a change of its buffer seen"):
        loss.backward()


def test_a_buffer_that_the_script_puts_in_between_is_that_of_the_next_call(again):
    plain, model = (Repeats(lambda part, x: x * part.seen) for _ in range(2))
    engine = again(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    x, other = torch.randn(4, 32), torch.full((32,), 3.0)
    for net, module in ((plain, plain), (engine, model)):
        for part in module.parts:
            part.seen = torch.ones(32)
        loss = net(x)
        for part in module.parts:
            part.seen = other
        (loss + net(x)).backward()
    assert calls_again(engine) == 5 and all(part.seen is other for part in model.parts)
    for one, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(ours.grad))


def test_weights_that_a_step_changes_between_are_refused(again):
    """Autocast's copies of weights are no weights, and say nothing."""
    engine = again(Repeats(plainly))
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = engine(x), engine(x)
    engine.backward(first)
    engine.step()
    with pytest.raises(RuntimeError, match=r"change of its weights|has been updated since"):
        second.backward()


def test_other_weights_for_one_call(again):
    """torch.func.functional_call: what it puts in is kept, not computed again on the engine's."""
    model = Repeats(plainly)
    engine = again(model)
    others = {name: torch.randn_like(p).requires_grad_() for name, p in Repeats(plainly).named_parameters()}
    torch.func.functional_call(model, others, (torch.randn(4, 32),)).backward()
    assert not blocks(engine)[0].changes and all(other.grad is not None for other in others.values())


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + self.norm(self.convolution(x)).relu()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_change_once(norm, again):
    def model():
        torch.manual_seed(3)
        net = nn.Sequential(*(Norm() for _ in range(3)))
        for part in net:
            part.norm = norm(4, affine=True, track_running_stats=True)
        return net

    plain, mine = model(), model()
    engine = again(mine, optimizer=torch.optim.SGD(mine.parameters(), lr=0.0))
    for i in range(3):
        torch.manual_seed(i)
        x = torch.randn(2, 4, 8, 8)
        for net in plain, engine:
            net(x).square().mean().backward()
    assert calls_again(engine) == 0
    for (name, one), other in zip(plain.named_buffers(), mine.buffers(), strict=True):
        assert torch.equal(one, other), name
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


def test_a_buffer_that_changes_later_is_refused(again):
    later = []

    def work(part, x):
        if later:
            part.seen += 1
        return x * (1 + part.seen)

    model = Repeats(work)
    engine = again(model)
    engine(torch.randn(4, 32)).backward()
    later.append(True)
    with pytest.raises(
        RuntimeError, match=r"a call of parts\.0 changed its buffer seen, which the first call of such"
    ):
        engine(torch.randn(4, 32))


def test_blocks_that_change_an_argument_in_place(again):
    """All do: they are left alone. One begins later to do so: it is refused."""
    changing = []

    class Changes(Part):
        def forward(self, x):
            return self.second(x.mul_(2) if not changing or changing[0] is self else x)

    model = Repeats(plainly)
    model.parts = nn.ModuleList(Changes(plainly) for _ in range(3))
    with pytest.warns(UserWarning, match=r"parts\.0 changes its argument of shape \[4, 32\], so"):
        again(model)(torch.randn(4, 32)).backward()
    other = copy.deepcopy(model)
    changing.append(other.parts[1])
    with pytest.raises(
        RuntimeError, match=r"a call of parts\.1 changed its argument of shape \[4, 32\], which"
    ):
        again(other)(torch.randn(4, 32))
