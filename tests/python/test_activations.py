"""Activations that the engine keeps (`budget.activations`): gradients are plain torch's to the bit, wherever the bytes
lay meanwhile, or there is an error with a name."""

import gc

import disks
import pytest
import torch
from recompute_scene import ARENA
from test_zoo import assert_same, bits, compare, step_beside
from torch import nn
from zoo import ZOO, build

import overspill
from overspill import _core, memory
from overspill.activations import moving
from overspill.config import Config
from plain import Plain

pytest_plugins = "recompute_scene"


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(moving, "FROM", 1)


@pytest.fixture
def keeps(again):
    """Makes engines with an arena of some KiB: most of what forward saves goes to the disk."""

    def make(model, placement="nvme", arena=ARENA, optimizer=None, recompute="none", **options):
        return again(model, placement, arena, optimizer, recompute, **options)

    return make


def nothing_is_kept(engine):
    gc.collect()
    return not engine._residency.moving._kept


@pytest.mark.parametrize("arena", [ARENA, 8 << 20], ids=["on_disk", "in_memory"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal_to_plain(name, arena, keeps):
    model, batch = build(name, torch.bfloat16)
    plain = Plain(build(name, torch.bfloat16)[0])
    engine = keeps(model, "half", arena, clipping=0.5)
    for i in range(3):
        step_beside(engine, plain, i, batch(i))
    compare(engine, plain)
    stats = engine.stats()
    assert stats["activations_kept_bytes"] > 0
    if arena > ARENA:
        assert stats["activations_written_bytes"] == 0, "all of it has room in the arena"
    assert nothing_is_kept(engine)


class Saves(nn.Module):
    """Calls `work(x)`, of a linear layer's result."""

    def __init__(self, work, width=32):
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.work = nn.Linear(width, width), work

    def forward(self, x):
        return self.work(self.linear(x))


def gradient_of(work, keeps=None, passes=1, rows=256, arena=ARENA):
    """Of the layer's weight; of an engine that keeps activations, where `keeps` makes one."""
    model = Saves(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = None if keeps is None else keeps(model, arena=arena, optimizer=optimizer)
    torch.manual_seed(4)
    loss = (engine or model)(torch.randn(rows, 32))
    for left in reversed(range(passes)):
        loss.backward(retain_graph=left > 0)
    if engine is None:
        return model.linear.weight.grad
    kept = engine.stats()["activations_kept_bytes"]
    assert kept > 0
    return model.linear.weight.grad


def chain(x):
    for _ in range(6):
        x = torch.tanh(x) + torch.sin(x)
    return x.square().sum()


def parts_of_one(x):
    q, k, v = (x @ torch.eye(32).repeat(1, 3)).chunk(3, dim=-1)
    return (q * k).tanh().mul(v).sum() + (q.t() @ v).square().mean()


def half_of_it(x):
    return (x.tanh()[:, 5:].exp() * x[:, :27]).sum()


def expanded(x):
    return (x[:1].expand(64, 32) * x[:64].sin()).sum() + x.as_strided((8, 8), (1, 1)).square().sum()


def changed_between(x):
    """The same storage is saved, changed, and saved again."""
    y = x.tanh()
    first = (y.clone() * x).sum()
    y = y + 0
    saved = y * x  # saves y
    with torch.no_grad():
        z = y.detach().clone()
    z.add_(1)
    return first + saved.sum() + (z * x).sum()


@pytest.mark.parametrize("passes", [1, 3], ids=["once", "three_times"])
@pytest.mark.parametrize(
    "work", [chain, parts_of_one, half_of_it, expanded, changed_between], ids=lambda work: work.__name__
)
def test_views_and_changes(work, passes, keeps):
    assert torch.equal(bits(gradient_of(work, keeps, passes)), bits(gradient_of(work, None, passes)))


def test_what_is_saved_after_an_uncounted_change_has_the_bytes_of_then(keeps):
    """`.data` counts no versions: only the bytes tell that the storage is another."""

    def saves_twice(x):
        y = x.detach() + 1
        first = x * y
        y.data.mul_(3)
        return (first + x * y).sum()

    def meant(x):
        y = x.detach() + 1
        return (x * y + x * (y * 3)).sum()

    assert torch.equal(bits(gradient_of(saves_twice, keeps)), bits(gradient_of(meant)))


def test_a_change_in_place_after_it_was_saved_does_not_reach_the_gradient(keeps):
    """Plain torch refuses it; here the gradient has what forward saved."""

    def changes(x):
        y = x.exp()
        loss = y.sum()
        with torch.no_grad():
            y.mul_(7)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient_of(changes)
    assert torch.equal(bits(gradient_of(changes, keeps)), bits(gradient_of(lambda x: x.exp().sum())))


def test_one_storage_is_kept_once(keeps):
    model = Saves(lambda x: sum((x * i).mul(x).sum() for i in range(1, 9)), width=64)
    engine = keeps(model, arena=1 << 20)
    loss = engine(torch.randn(64, 64))
    kept = engine.stats()["activations_kept_bytes"]
    # the input, the layer's result, and its products by 1 to 8
    assert kept == 10 * 64 * 64 * 4
    loss.backward()


def test_a_fused_projection_is_kept_once_and_moved(keeps):
    """Query, key and value are parts of one storage, as many models have them."""

    def attends(x):
        q, k, v = (x @ mixed).view(1, 256, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().sum()

    mixed = torch.randn(32, 96, generator=torch.Generator().manual_seed(6))
    model = Saves(attends)
    torch.manual_seed(4)
    x = torch.randn(256, 32)
    engine = keeps(model, arena=1 << 20, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    loss = engine(x)
    assert engine.stats()["activations_kept_bytes"] >= 256 * 96 * 4 + 256 * 32 * 4
    assert engine.stats()["activations_kept_bytes"] < 3 * 256 * 96 * 4
    loss.backward()
    assert torch.equal(bits(model.linear.weight.grad), bits(gradient_of(attends)))


def test_what_is_larger_than_the_arena_stays_and_is_told_of_once(keeps):
    model = Saves(chain)
    engine = keeps(model, arena=64 << 10)
    with pytest.warns(
        UserWarning, match=r"a tensor of 131072 bytes .* budget\.activations, which is 65536"
    ) as told:
        engine(torch.randn(1024, 32)).backward()
    assert len([each for each in told if "budget.activations" in str(each.message)]) == 1


@pytest.mark.parametrize("inplace", [False, True])
def test_a_function_that_fills_what_autograd_has_saved(keeps, inplace):
    def noisy(x):
        torch.manual_seed(7)
        return nn.functional.rrelu(x.sin(), training=True, inplace=inplace).square().sum()

    assert torch.equal(bits(gradient_of(noisy, keeps)), bits(gradient_of(noisy)))


def test_a_users_own_hooks_come_first(keeps):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    model = Saves(chain)
    engine = keeps(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(torch.randn(8, 32))
    assert packed and engine.stats()["activations_kept_bytes"] == 0
    loss.backward()


def test_nothing_is_kept_without_gradients(keeps):
    engine = keeps(Saves(chain))
    with torch.no_grad():
        engine(torch.randn(8, 32))
    assert engine.stats()["activations_kept_bytes"] == 0


def test_gradients_of_gradients_need_no_larger_arena(keeps):
    def penalty(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        slope.square().sum().backward()

    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(5))
    plain = Saves(chain)
    penalty(plain, x)
    model = Saves(chain)
    engine = keeps(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    penalty(engine, x)
    assert engine.stats()["activations_written_bytes"] > ARENA
    assert torch.equal(bits(model.linear.weight.grad), bits(plain.linear.weight.grad))


def test_one_node_may_save_more_than_the_arena_has(keeps):
    """Each of them fits; together, as backward needs them, they do not."""

    def attends(x):
        q, k, v = (x * factor for factor in (1.0, 0.5, 2.0))
        return nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None]).sum()

    rows = 512  # 64 KiB each
    kept = gradient_of(attends, keeps, rows=rows, arena=64 << 10)
    assert torch.equal(bits(kept), bits(gradient_of(attends, rows=rows)))


class EndsInPlace(torch.autograd.Function):
    """Its backward writes into what it saved, and gives that as the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(gradient)


def test_a_backward_that_writes_into_what_it_gets_changes_nothing_else(keeps):
    def twice(x):
        y = x + 1
        return (EndsInPlace.apply(y) + y * y).sum()  # `y * y` saved the same storage

    meant = gradient_of(lambda x: ((x + 1).sin() + (x + 1).square()).sum())
    torch.testing.assert_close(gradient_of(twice, keeps), meant)


def test_what_is_in_no_memory_of_the_cpu_is_left_alone(keeps):
    def saves_meta(x):
        empty = torch.empty(64, 64, device="meta", requires_grad=True)
        kept.append((empty * empty).sum())
        return x.square().sum()

    kept = []
    gradient_of(saves_meta, keeps)


def test_a_graph_that_is_let_go_gives_its_bytes_back(keeps):
    engine = keeps(Saves(chain), placement="half")
    before = None
    for _ in range(20):
        loss = engine(torch.randn(512, 32))
        del loss
        gc.collect()
        engine._residency.core.synchronize()
        now = engine.stats()["nvme_allocated_bytes"]
        before = now if before is None else before
    assert nothing_is_kept(engine) and now <= before
    assert engine.stats()["activations_written_bytes"] > 0


def test_steps_leave_no_byte_behind(keeps):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    engine = keeps(model)
    allocated = set()
    for _ in range(30):
        loss = engine(torch.randn(64, 64)).square().mean()
        engine.backward(loss)
        engine.step()
        del loss
        engine._residency.core.synchronize()
        allocated.add(engine.stats()["nvme_allocated_bytes"])
    assert len(allocated) == 1, allocated
    assert engine.stats()["activations_written_bytes"] > 30 * 8 * 64 * 64 * 4


def test_tensors_outlive_the_engine_and_its_activations(keeps):
    held = []

    class Holds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            held.append(ctx.saved_tensors[0])
            return gradient

    model = Saves(lambda x: Holds.apply(x).sum())
    wanted = model.linear(torch.ones(4, 32)).detach().clone()
    engine = keeps(model)
    engine(torch.ones(4, 32)).backward()
    engine.close()
    assert torch.equal(held[0], wanted)


def test_backward_after_close_says_so(keeps):
    engine = keeps(Saves(chain))
    loss = engine(torch.randn(8, 32))
    engine.close()
    with pytest.raises((RuntimeError, ValueError), match="closed"):
        loss.backward()


def test_a_full_disk_is_told_by_name_and_nothing_is_lost(config, tmp_path):
    model = Saves(chain, width=64)
    weights = model.linear.weight.detach().clone()
    with disks.small(tmp_path / "small", "8m") as disk:
        settings = config("nvme")
        settings["budget"] |= {"nvme": [str(disk)], "activations": ARENA}
        engine, *_ = overspill.initialize(model, settings)
        try:
            disks.fill(disk / "ballast")
            with pytest.raises(overspill.OverspillError, match=str(disk)):
                engine(torch.randn(64, 64)).backward()
            (disk / "ballast").unlink()
            engine(torch.randn(64, 64)).backward()
            assert torch.equal(model.linear.weight.detach(), weights)
        finally:
            engine.close()


def test_what_the_budget_refuses(config):
    without = config("host")
    without["budget"]["activations"] = "1MiB"
    with pytest.raises(overspill.ConfigError, match=r"budget\.activations = 1048576: .*no disk is given"):
        overspill.initialize(nn.Linear(4, 4), without)
    more = config("nvme")
    more["budget"]["activations"] = "300MiB"
    with pytest.raises(overspill.BudgetError, match="host budget too small"):
        overspill.initialize(nn.Linear(4, 4), more)
    for size in (0, 1):
        small = config("nvme")
        small["budget"]["activations"] = size
        with pytest.raises(overspill.ConfigError, match=rf"budget\.activations = {size}: no tensor fits"):
            overspill.initialize(nn.Linear(4, 4), small)
    elsewhere = config("nvme", device="cuda")
    elsewhere["budget"]["activations"] = "1MiB"
    refused = r"budget\.activations = 1048576: not supported: the model computes on cuda"
    with pytest.raises(NotImplementedError, match=refused):
        Config.read(elsewhere).to_core(_core)


def test_losses_of_an_engine_without_it(keeps, config):
    """On the same steps, fp32: nothing but the place of what is saved differs."""
    found = []
    for arena in (None, ARENA):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64))
        engine = keeps(model, arena=arena)
        torch.manual_seed(1)
        losses = []
        for _ in range(4):
            loss = engine(torch.randn(32, 64)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        found.append((torch.stack(losses), engine.state_dict()))
    assert_same("losses", found[0][0], found[1][0])
    for name, value in found[0][1].items():
        assert_same(name, value, found[1][1][name])


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_thousand_steps_of_changing_size_grow_nothing(recompute, keeps):
    """Neither the process nor what the store holds."""

    class Part(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    engine = keeps(nn.Sequential(*(Part() for _ in range(3))), arena=256 << 10, recompute=recompute)
    generator = torch.Generator().manual_seed(1)

    def step():
        rows = int(torch.randint(1, 900, (1,), generator=generator))
        engine.backward(engine(torch.randn(rows, 64, generator=generator)).square().mean())
        engine.step()

    def held():
        engine.synchronize()
        stats = engine.stats()
        return {
            name: stats[name] for name in ("nvme_reserved_bytes", "nvme_allocated_bytes", "host_used_bytes")
        }

    for _ in range(300):
        step()
    before, rss = held(), memory.rss_bytes()
    for _ in range(700):
        step()
    gc.collect()
    assert engine.stats()["activations_written_bytes"] > 100 << 20
    assert held() == before
    assert memory.rss_bytes() - rss < 8 << 20
    assert nothing_is_kept(engine)
