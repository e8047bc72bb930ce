"""torch.func's transforms of an engine: values, and training through them, as of plain torch."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import overspill


def mlp():
    torch.manual_seed(3)
    first = nn.Linear(8, 8)
    return nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(8).eval(), first, nn.Tanh(), nn.Linear(8, 2))


def closing(model, folder):
    return contextlib.closing(overspill.initialize(model=model, config=settings(folder)).engine)


def settings(folder):
    sgd = {"type": "SGD", "params": {"lr": 1e-2}}  # an error of rounding stays one
    return {"optimizer": sgd, "budget": {"host": "48MiB", "nvme": [str(folder)]}}


X = torch.linspace(-1, 1, 40).reshape(5, 8)
ROW = X[:1]
OF = {
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "grad_and_value": lambda model: grad_and_value(lambda x: model(x).sum())(X),
    "vjp": lambda model: vjp(model, X)[1](torch.ones(5, 2)),
    "jvp": lambda model: jvp(model, (X,), (torch.ones_like(X),)),
    "jacrev": lambda model: jacrev(model)(ROW),
    "jacfwd": lambda model: jacfwd(model)(ROW),
    "hessian": lambda model: hessian(lambda x: model(x).sum())(ROW),
    "vmap(grad)": lambda model: vmap(grad(lambda x: model(x[None]).sum()))(X),
}


@pytest.mark.parametrize("name", OF)
def test_values_are_plain_torchs(name, tmp_path):
    model = mlp()
    plain = copy.deepcopy(model)
    with closing(model, tmp_path) as engine:
        for _ in range(2):
            torch.testing.assert_close(OF[name](engine), OF[name](plain), rtol=0, atol=0)
        loss = engine(X).square().sum()
        engine.backward(loss)
        engine.step()
        assert torch.equal(loss, plain(X).square().sum())


def penalised(model):
    """A loss of the gradient by the input, as of a physics-informed network."""
    slope = vmap(grad(lambda x: model(x[None]).sum()))(X)
    return slope.square().mean() + model(X).square().mean()


def test_a_loss_of_gradients_trains_the_model(tmp_path):
    model = mlp()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    with closing(model, tmp_path) as engine:
        for _ in range(4):
            loss, wanted = penalised(engine), penalised(plain)
            torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-8)
            engine.backward(loss)
            engine.step()
            wanted.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_without_gradients_no_graph_is_kept(tmp_path):
    with closing(mlp(), tmp_path) as engine, torch.no_grad():
        assert not OF["grad"](engine).requires_grad


def test_a_call_that_fails_inside_leaves_the_engine_usable(tmp_path):
    class Fails(nn.Sequential):
        def forward(self, x, fail=False):
            y = super().forward(x)
            if fail:
                raise KeyError("here")
            return y

    model = Fails(*mlp())
    plain = copy.deepcopy(model)
    with closing(model, tmp_path) as engine:
        with pytest.raises(KeyError, match="here"):
            grad(lambda x: engine(x, fail=True).sum())(X)
        assert torch.equal(engine(X), plain(X))
        with pytest.raises(
            RuntimeError, match="call the engine inside them"
        ):  # the copies ended with that call
            grad(lambda x: model(x).sum())(X)


def test_edits_and_updates_are_seen(tmp_path):
    model = mlp()
    plain = copy.deepcopy(model)
    with closing(model, tmp_path) as engine:
        with torch.no_grad(), engine.gathered(model.parameters()):
            model[5].weight.mul_(2)
        with torch.no_grad():
            plain[5].weight.mul_(2)
        assert torch.equal(OF["grad"](engine), OF["grad"](plain))
        engine.backward(engine(X).sum())
        engine.step()
        plain.load_state_dict(engine.state_dict())
        assert torch.equal(OF["grad"](engine), OF["grad"](plain))


def test_the_engines_own_parameters_given_to_functional_call_are_refused(tmp_path):
    """They have no memory there, and a copy would be no part of the transform."""
    model = mlp()
    plain = copy.deepcopy(model)
    with closing(model, tmp_path) as engine:
        own = dict(engine.named_parameters())
        for of in (grad, lambda f: vmap(grad(f), (0, None))):
            with pytest.raises(
                RuntimeError, match=r"own weight, which is not in memory now: call engine\(x\)"
            ):
                of(lambda x, p: functional_call(engine, p, (x.reshape(-1, 8),), tie_weights=False).sum())(
                    X, own
                )
        copies = {name: p.detach().clone() for name, p in engine.named_parameters()}
        given, wanted = (
            grad(lambda p, at=at: functional_call(at, p, (X,), tie_weights=False).sum())(copies)["5.bias"]
            for at in (engine, plain)
        )
        assert torch.equal(given, wanted)
        assert torch.equal(engine(X), plain(X))


def test_parameters_are_put_back_where_a_signal_struck_while_they_were(tmp_path, monkeypatch):
    def call(module, weights, args, kwargs, tie_weights):
        for name, weight in weights.items():
            part, _, local = name.rpartition(".")
            module.get_submodule(part)._parameters[local] = weight
        raise KeyboardInterrupt

    model = mlp()
    plain = copy.deepcopy(model)
    with closing(model, tmp_path) as engine:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(torch.func, "functional_call", call)
            OF["grad"](engine)
        assert torch.equal(engine(X), plain(X))
        engine.backward(engine(X).sum())
        engine.step()
        assert engine.global_steps == 1
