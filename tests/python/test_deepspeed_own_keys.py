"""Keys of the JSON that deepspeed.initialize alone reads: mup's optimizers, progressive layer drop."""

import copy
import math
import sys
import types

import pytest
import torch
from torch import nn

import overspill
from overspill import deepspeed
from overspill.config import ConfigError

pytestmark = pytest.mark.usefixtures("no_group")


def settings(**more):
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {
        "train_batch_size": 2,
        "optimizer": adam,
        "gradient_clipping": 0.0,
        "overspill": {"budget": {"host": "32MiB"}},
        **more,
    }


class Dropping(nn.Sequential):
    """Notes what forward is given."""

    def forward(self, x, **given):
        self.given = given
        return super().forward(x)


def mlp(kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(nn.Linear(8, 8), nn.Linear(8, 2))


def stepped(engine, x):
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss


X = torch.linspace(-1, 1, 16).reshape(2, 8)


def test_forward_is_told_which_share_of_layers_to_keep(tmp_path):
    model = mlp(Dropping)
    drop = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    config = settings(progressive_layer_drop=drop, gradient_accumulation_steps=2, train_batch_size=4)
    engine = deepspeed.initialize(model=model, config=config)[0]
    shares = []
    for _ in range(6):
        stepped(engine, X)
        shares.append(model.given["pld_theta"])
        assert model.given["progressive_layer_drop"] is True
    kept = [1.0, *(0.5 * math.exp(-0.1 * step) + 0.5 for step in range(2))]
    assert shares == pytest.approx([kept[0], kept[0], kept[1], kept[1], kept[2], kept[2]])
    engine.eval()
    engine(X)
    assert model.given == {}, "evaluation keeps all layers"
    share = engine.get_pld_theta()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    other = deepspeed.initialize(model=mlp(Dropping), config=config)[0]
    assert other.get_pld_theta() == 1.0
    other.load_checkpoint(tmp_path)
    assert other.get_pld_theta() == share, "a run goes on with the share that it had"
    other.destroy()


@pytest.mark.parametrize("drop", [None, {"enabled": False, "theta": 0.5}])
def test_without_it_forward_is_given_nothing(drop):
    model = mlp(Dropping)
    more = {} if drop is None else {"progressive_layer_drop": drop}
    engine = deepspeed.initialize(model=model, config=settings(**more))[0]
    stepped(engine, X)
    assert model.given == {} and engine.get_pld_theta() is None
    engine.destroy()


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (True, "an object is expected"),
        ({"enabled": "yes"}, "enabled is true or false"),
        ({"enabled": True, "thta": 0.5}, "thta = 0.5: unknown key"),
        ({"enabled": True, "theta": 1.5}, "theta = 1.5: a number from 0 to 1"),
        ({"enabled": True, "theta": float("nan")}, "theta = nan: a number from 0 to 1"),
        ({"enabled": True, "gamma": -1}, "gamma = -1: a number from 0"),
        ({"enabled": True, "gamma": float("inf")}, "gamma = inf: a number from 0"),
    ],
)
def test_what_is_no_share_is_refused(drop, said):
    with pytest.raises(ConfigError, match=f"progressive_layer_drop.*{said}"):
        deepspeed.initialize(model=mlp(), config=settings(progressive_layer_drop=drop))


def test_other_ways_in_refuse_what_they_would_not_do():
    drop = {"progressive_layer_drop": {"enabled": True}}
    scaled = {"optimizer": {"type": "MuAdam", "params": {}}}
    for more in (drop, scaled):
        with pytest.raises(ConfigError, match=r"not supported: .*deepspeed\.initialize"):
            overspill.initialize(mlp(), settings(**more))


@pytest.fixture
def mup(monkeypatch):
    """A package of that name whose makers do as mup's: matrices get a group of their own, with a smaller rate."""
    package = types.ModuleType("mup")

    def make(kind):
        def maker(params, impl=kind, **given):
            groups = params if isinstance(params[0], dict) else [{"params": params}]
            made = []
            for group in groups:
                assert all(hasattr(p, "infshape") for p in group["params"]), "Did you forget set_base_shapes"
                own = {
                    "lr": given["lr"],
                    **{name: value for name, value in group.items() if name != "params"},
                }
                wide, rest = [], []
                for p in group["params"]:
                    (wide if p.infshape > 1 else rest).append(p)
                made += [
                    {**own, "lr": own["lr"] / 4, "params": wide},
                    {**own, "params": rest},
                    {**own, "params": []},
                ]
            return impl(made, **given)

        return maker

    package.MuAdam, package.MuAdamW = make(torch.optim.Adam), make(torch.optim.AdamW)
    package.MuSGD = make(torch.optim.SGD)
    monkeypatch.setitem(sys.modules, "mup", package)


def scaled(model):
    for parameter in model.parameters():
        parameter.infshape = parameter.dim()
    return model


@pytest.mark.parametrize(("name", "kind"), [("MuAdam", "Adam"), ("muadamw", "AdamW"), ("MuSGD", "SGD")])
def test_mups_groups_are_the_engines(mup, name, kind):
    model = scaled(mlp())
    plain = copy.deepcopy(model)
    config = settings(optimizer={"type": name, "params": {"lr": 0.01}})
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert type(engine.optimizer.optimizer) is getattr(torch.optim, kind)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.0025, 0.01]
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() == dim], "lr": lr}
        for dim, lr in ((2, 0.0025), (1, 0.01))
    ]
    optimizer = getattr(torch.optim, kind)(groups)
    for _ in range(3):
        loss = plain(X).square().mean()
        assert torch.equal(stepped(engine, X), loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()


def test_mup_says_what_is_wrong(mup, monkeypatch):
    def start(**section):
        deepspeed.initialize(model=mlp(), config=settings(optimizer={"type": "MuAdam", **section}))

    with pytest.raises(ConfigError, match="'MuAdam': mup: Did you forget set_base_shapes"):
        start(params={"lr": 0.1})
    with pytest.raises(ConfigError, match="params = 3: an object is expected"):
        start(params=3)
    with pytest.raises(ConfigError, match="'lr' is unknown: give type and params alone"):
        start(lr=0.1)
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(ConfigError, match="pip install mup"):
        start(params={})
