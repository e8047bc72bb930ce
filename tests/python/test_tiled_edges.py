"""budget.tile: what scripts do with layers that are computed in tiles, beside whole ones; and what is refused."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from tiled_scene import INNER, ROWS, STEPS, WIDTH, Model, ids_of, made, same, started, train
from torch import nn

import overspill


def test_what_uses_a_weight_elsewhere_gets_it_whole(config):
    """Tied by hand, and weight decay of the script's own."""

    class ByHand(Model):
        def forward(self, ids):
            y = F.linear(self.block(self.embedding(ids)), self.embedding.weight)
            return F.cross_entropy(y.flatten(0, 1), ids.flatten()) + 1e-3 * self.up.weight.square().sum()

    found = []
    for tile in (None, "100KiB"):
        torch.manual_seed(0)
        engine = started(config, ByHand(), tile)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses = []
            for i in range(STEPS):
                losses.append(engine(ids_of(i)))
                engine.backward(losses[-1])
                if i == 0:
                    names = ("embedding.weight", "up.weight", "down.bias")
                    gradients = {n: engine.grad(engine.module.get_parameter(n)).clone() for n in names}
                engine.step()
        told = [str(each.message) for each in told if "budget.tile" in str(each.message)]
        found.append(([loss.item() for loss in losses], gradients, {}))
        engine.close()
    assert len(told) == 2 and all("gets it whole" in each for each in told)
    assert {re.search(r"uses (\S+),", each)[1] for each in told} == {"embedding.weight", "up.weight"}
    same(found[1], found[0])


@pytest.mark.filterwarnings("ignore:overspill. budget.tile. something other")
def test_edits_outside_forward_count(config):
    found = []
    for tile in (None, "100KiB"):
        engine = started(config, made(), tile)
        model = engine.module
        losses = [engine(ids_of(0)).item()]
        with torch.no_grad():
            model.up.weight.mul_(0.5)
            model.down.bias.add_(1.0)
        losses.append(engine(ids_of(0)).item())
        with engine.gathered([model.head.weight]):
            model.head.weight.data[3] = 7.0
        losses.append(engine(ids_of(0)).item())
        model.load_state_dict({n: torch.full_like(v, 0.01) for n, v in engine.state_dict().items()})
        losses.append(engine(ids_of(0)).item())
        found.append(losses)
        engine.close()
    assert len(set(found[0])) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_backward_after_an_update_is_refused(config):
    engine = started(config, made(), "100KiB")
    loss = engine(ids_of(0))
    engine.backward(engine(ids_of(1)))
    engine.step()
    with pytest.raises(RuntimeError, match=r"weight was used in forward and has been updated since"):
        loss.backward()
    engine.close()


def test_a_backward_that_breaks_off_leaves_no_half_gradient(config, monkeypatch):
    """The weight's gradient is absent, and the next backward is as if nothing had been."""
    engine = started(config, made(), "100KiB")
    plain = copy.deepcopy(engine.module)
    add, calls = overspill.gradients.InParts.add, []

    def breaks(self, part):
        calls.append(part)
        if len(calls) == 5:
            raise KeyboardInterrupt
        add(self, part)

    monkeypatch.setattr(overspill.gradients.InParts, "add", breaks)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine(ids_of(0)))
    monkeypatch.undo()
    assert engine.module.head.weight.grad is None
    engine.zero_grad()
    engine.backward(engine(ids_of(0)))
    plain(ids_of(0)).backward()
    for name, p in engine.module.named_parameters():
        found, expected = engine.grad(p), plain.get_parameter(name).grad
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7), name
    engine.close()


def test_a_broken_backward_of_a_later_micro_batch_is_not_stepped_with(config, monkeypatch):
    """The sum of two is lost: torch, too, would leave something in between, but says nothing."""
    said = config("nvme", job="broken") | {"gradient_accumulation_steps": 2}
    said["budget"] |= {"tile": "100KiB", "host": "128MiB"}
    engine = overspill.initialize(made(), said)[0]
    engine.backward(engine(ids_of(0)))
    engine.step()
    add, calls = overspill.gradients.InParts.add, []

    def breaks(self, part):
        calls.append(part)
        add(self, part)
        if len(calls) == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(overspill.gradients.InParts, "add", breaks)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine(ids_of(1)))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"a backward broke off while the gradient of head.weight was added"):
        engine.step()
    engine.zero_grad()
    engine.close()


def test_an_error_before_the_first_part_takes_nothing_away(config):
    """A graph of before an update, whose backward is refused."""
    engine = started(config, made(), "100KiB")
    old = engine(ids_of(0))
    engine.backward(engine(ids_of(1)))
    engine.step()
    engine.backward(engine(ids_of(2)))
    before = engine.grad(engine.module.head.weight).clone()
    with pytest.raises(RuntimeError, match="has been updated since"):
        old.backward()
    assert torch.equal(engine.grad(engine.module.head.weight), before)
    engine.close()


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_of_inputs_alone_add_nothing_to_weights(way, config):
    """Saliency, adversarial examples: torch.autograd.grad, and backward(inputs=...)."""
    torch.manual_seed(0)
    engine = started(
        config, nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)), "100KiB"
    )
    plain = copy.deepcopy(engine.module)
    x = torch.randn(3, WIDTH, requires_grad=True)
    if way == "grad":
        (found,) = torch.autograd.grad(engine(x).square().sum(), x)
    else:
        engine(x).square().sum().backward(inputs=[x])
        found = x.grad
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in engine.module.parameters())
    engine.close()


def test_gradients_of_gradients_are_refused_and_not_lost(config):
    """The gradient of a sum is a constant: torch's own refusal does not see it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, INNER))
    engine = started(config, net, "100KiB")
    x = torch.randn(3, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()
    engine.close()


def test_a_weight_that_is_switched_off_after_forward_gets_no_gradient(config):
    """The critic of a GAN, while the generator learns."""
    for tile in (None, "100KiB"):
        engine = started(config, made(), tile)
        loss = engine(ids_of(0))
        engine.module.head.requires_grad_(False)
        engine.module.embedding.requires_grad_(False)
        engine.backward(loss)
        for p in (*engine.module.head.parameters(), engine.module.embedding.weight):
            assert p.grad is None
        assert engine.module.up.weight.grad is not None
        engine.close()


def test_naming_a_weight_in_tiles_is_refused(config):
    engine = started(config, made(), "100KiB")
    weight = engine.module.up.weight
    with pytest.raises(RuntimeError, match=r"budget.tile: up.weight is computed in tiles"):
        engine(ids_of(0)).backward(inputs=[weight])
    for unused in (False, True):
        with pytest.raises(RuntimeError, match=r"budget.tile: up.weight is computed in tiles"):
            torch.autograd.grad(engine(ids_of(0)), weight, allow_unused=unused)
    engine.close()


def test_results_may_be_written_in_place(config):
    """ReLU(inplace=True), as VGG has it, and an embedding that is scaled."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(ROWS, WIDTH)
            self.stack = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(inplace=True), nn.Linear(INNER, 8))

        def forward(self, ids):
            x = self.embedding(ids)
            x *= WIDTH**0.5
            return self.stack(x).square().mean()

    found = []
    for tile in (None, "100KiB"):
        torch.manual_seed(0)
        engine = started(config, InPlace(), tile)
        found.append(train(engine))
        engine.close()
    same(found[1], found[0], tolerance=2e-6)


@pytest.mark.filterwarnings("ignore:overspill. budget.tile. something other")
def test_edits_inside_forward_and_in_a_block_count(config):
    class Edits(Model):
        def block(self, x):
            with torch.no_grad():
                self.up.weight.copy_(F.normalize(self.up.weight, dim=1))
            return super().block(x)

    found = []
    for tile in (None, "100KiB"):
        torch.manual_seed(0)
        engine = started(config, Edits(), tile)
        losses = [engine(ids_of(0)).item()]
        with engine.gathered([engine.module.down.weight]):
            with torch.no_grad():
                engine.module.down.weight.mul_(2)
            losses.append(engine(ids_of(0)).item())
        engine.backward(engine(ids_of(1)))
        engine.step()
        losses.append(engine(ids_of(0)).item())
        found.append(losses)
        engine.close()
    assert len({round(loss, 6) for loss in found[0]}) == 3
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.filterwarnings("ignore:overspill. budget.tile. something other")
def test_a_weight_that_is_edited_behind_its_layer_is_refused_in_backward(config):
    class Late(Model):
        def forward(self, ids):
            loss = super().forward(ids)
            with torch.no_grad():
                self.up.weight.mul_(0.5)
            return loss

    for tile in (None, "100KiB"):
        torch.manual_seed(0)
        engine = started(config, Late(), tile)
        loss = engine(ids_of(0))
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been updated since"):
            loss.backward()
        engine.zero_grad()
        engine.close()


def test_what_is_frozen_and_thawed(config):
    engine = started(config, made(frozen=True), "100KiB")
    engine.module.up.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"frozen at overspill.initialize, but requires_grad is True now"):
        engine(ids_of(0))
    engine.module.up.weight.requires_grad_(False)
    engine.module.head.weight.requires_grad_(False)  # the bias beside it trains on
    engine.backward(engine(ids_of(0)))
    assert engine.module.head.weight.grad is None and engine.module.head.bias.grad is not None
    engine.close()


def test_a_second_gradient_with_a_graph_is_refused_as_for_whole_weights(config):
    engine = started(config, made(), "100KiB")
    engine(ids_of(0)).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"made a gradient of up.weight with a graph"):
        engine.module.up.weight.grad  # noqa: B018
    engine.zero_grad()
    engine.close()


def test_numbers_of_another_dtype_are_refused(config):
    engine = started(config, made(), "100KiB")
    with pytest.raises(TypeError, match=r"an embedding was given torch.float32: give int64 or int32"):
        engine.module.embedding(torch.zeros(3))
    engine.module.embedding(torch.zeros(3, dtype=torch.int32))
    engine.close()


def test_a_graph_that_is_kept_and_a_layer_that_is_called_twice(config):
    class Twice(Model):
        def block(self, x):
            return super().block(super().block(x))

    found = []
    for tile in (None, "100KiB"):
        torch.manual_seed(0)
        engine = started(config, Twice(), tile)
        loss = engine(ids_of(0))
        loss.backward(retain_graph=True)
        loss.backward()
        gradients = {n: engine.grad(p).clone() for n, p in engine.module.named_parameters()}
        found.append(([loss.item()], gradients, {}))
        engine.close()
    same(found[1], found[0], tolerance=2e-6)


def test_copies_of_the_model_have_no_tiles(config):
    engine = started(config, made(), "100KiB")
    other = copy.deepcopy(engine.module)
    assert "forward" not in vars(other.up)
    assert other(ids_of(0)).item() == pytest.approx(engine(ids_of(0)).item(), rel=1e-6)
    engine.close()


def test_the_scripts_torch_compile_stays_right(config):
    engine = started(config, made(), "100KiB")
    plain = made()
    compiled = torch.compile(engine.module, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compiled(ids_of(0)).item() == pytest.approx(plain(ids_of(0)).item(), rel=1e-6)
    engine.close()


def test_parametrized_layers_stay_whole(config):
    model, plain = made(), made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.up)
        nn.utils.weight_norm(plain.up)
    with pytest.warns(UserWarning, match=r"larger weights that stay whole: up.weight_v\."):
        engine = started(config, model, "100KiB")
    assert engine(ids_of(0)).item() == pytest.approx(plain(ids_of(0)).item(), rel=1e-6)
    engine.close()


def test_gradients_as_scripts_have_them(config):
    """p.grad, its edits, accumulation after step(), and torch's clip."""
    found = []
    for tile in (None, "100KiB"):
        said = config("nvme", job=f"tile{tile}")
        said["budget"] |= {"tile": tile, "host": "128MiB"}
        engine, optimizer, *_ = overspill.initialize(made(), said)
        model = engine.module
        model(ids_of(0)).backward()
        seen = {"first": model.up.weight.grad.clone()}
        model.up.weight.grad.mul_(2)
        model(ids_of(1)).backward()
        seen["added"] = model.up.weight.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        model(ids_of(2)).backward()
        seen["kept"] = model.head.weight.grad.clone()
        optimizer.zero_grad()
        assert model.up.weight.grad is None
        found.append(([norm.item()], seen, {}))
        engine.close()
    same(found[1], found[0], tolerance=1e-5)  # after an update


def test_loss_scaling_divides_its_gradients(config):
    found = []
    for tile in (None, "100KiB"):
        said = config("nvme", job=f"tile{tile}") | {"loss_scaling": {"enabled": True, "loss_scale": 256.0}}
        said["budget"] |= {"tile": tile, "host": "128MiB"}
        engine = overspill.initialize(made(torch.float16), said)[0]
        found.append(train(engine))
        with pytest.raises(RuntimeError, match=r"is not engine.backward"):
            engine(ids_of(0)).backward()
        engine.close()
    same(found[1], found[0], tolerance=0.02)


@pytest.mark.parametrize("to", [None, "100KiB"])
def test_checkpoints_open_with_the_key_and_without(to, config, tmp_path):
    first = started(config, made(), "100KiB" if to is None else None)
    train(first)
    first.save_checkpoint(tmp_path / "saved")
    expected = {n: v.clone() for n, v in first.state_dict().items()}
    first.close()
    second = started(config, made(), to)
    second.load_checkpoint(tmp_path / "saved")
    for name, value in second.state_dict().items():
        assert torch.equal(value, expected[name]), name
    second.backward(second(ids_of(9)))
    second.step()
    second.close()


def test_give_back_leaves_a_model_without_tiles(config):
    engine = started(config, made(), "100KiB")
    model = engine.module
    loss = engine(ids_of(0)).item()
    engine.give_back()
    assert "forward" not in vars(model.up)
    assert model(ids_of(0)).item() == pytest.approx(loss, rel=1e-6)


def test_a_hook_on_the_gradient_is_refused(config):
    engine = started(config, made(), "100KiB")
    handle = engine.module.up.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(RuntimeError, match=r"budget.tile: a hook on the gradient of up.weight would not be"):
        engine(ids_of(0))
    handle.remove()
    engine(ids_of(0))
    engine.module.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=r"a hook on the gradient of up.weight"):
        engine(ids_of(0))
    engine.close()


def test_what_cannot_be_tiled_stays_whole_and_is_named(config):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse = nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)
            self.mixed = nn.Bilinear(WIDTH, 4, WIDTH)
            self.usual = nn.Linear(WIDTH, ROWS)

        def forward(self, ids):
            x = self.sparse(ids).flatten(0, 1)
            return self.usual(self.mixed(x, x[:, :4])).square().mean()

    torch.manual_seed(0)
    with pytest.warns(
        UserWarning, match=r"100.0 KiB: larger weights that stay whole: sparse.weight, mixed.weight\."
    ):
        engine = started(config, Odd(), "100KiB")
    assert "layers in tiles: usual, of" in engine.plan_text
    plain = copy.deepcopy(engine.module)
    assert engine(ids_of(0)).item() == pytest.approx(plain(ids_of(0)).item(), rel=1e-6)
    engine.close()


def test_a_key_without_an_effect_is_told(config):
    with pytest.warns(
        UserWarning, match=r"budget.tile = 64.0 MiB has no effect: no weight of Model is larger"
    ):
        engine = started(config, made(), "64MiB")
    engine.close()


def test_what_it_does_not_go_with(config):
    for key in ("compile", "vertical"):
        settings = config("nvme", compile=True) if key == "compile" else config("nvme")
        settings["vertical_accumulation"] = key == "vertical"
        settings["budget"]["tile"] = "100KiB"
        with pytest.raises(overspill.ConfigError, match=f"budget.tile = 102400: not supported with .*{key}"):
            overspill.initialize(made(), settings)
