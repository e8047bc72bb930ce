"""Scripts as people write them who come from torch: what a call takes means what it says there, and what it does not
take is refused by name, with the way out, before anything is changed."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from scene import batch, mlp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import overspill


def loss_of(model, i=0):
    return model(batch(i)).square().mean()


def train(engine, steps=1):
    for i in range(steps):
        engine.backward(loss_of(engine, i))
        engine.step()


def weights(engine):
    return {name: value.clone() for name, value in engine.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- train_batch


def seen_by(engine, batches, calls=1):
    seen = []

    def loss(x):
        seen.append(x)
        return engine(x).square().mean()

    for _ in range(calls):
        engine.train_batch(batches, loss)
    return seen


def test_train_batch_takes_the_next_micro_batches(start):
    engine = start(mlp(), accumulation=2)
    data = [batch(i) for i in range(4)]
    for batches in (iter(data), (x for x in data), iter(torch.utils.data.DataLoader(data, batch_size=None))):
        seen = seen_by(engine, batches, calls=2)
        assert len(seen) == 4 and all(map(torch.equal, seen, data))
    assert len(seen_by(engine, data[:2])) == len(seen_by(engine, tuple(data[:2]))) == 2
    with pytest.raises(ValueError, match=r"= 2 micro-batches, there are 1$"):
        engine.train_batch(iter(data[:1]))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([batch()] * 4)


WRONG_BATCHES = {
    "one batch": (batch(), TypeError, r"is one micro-batch, a Tensor: give a list of them, or an iterator"),
    "one mapping": ({"input": batch()}, TypeError, r"is one micro-batch, a dict"),
    "a text": ("ab", TypeError, r"is one micro-batch, a str"),
    "a number": (5, TypeError, r"batches is an int: give"),
    "too many": ([batch()] * 3, ValueError, r"= 2 micro-batches, there are 3: .* batches = iter\(batches\)"),
    "too few": ([batch()], ValueError, r"= 2 micro-batches, there are 1$"),
    "a loader": (
        torch.utils.data.DataLoader([batch()] * 2),
        ValueError,
        r"a DataLoader begins anew at each call.*iter\(batches\)",
    ),
    "a stream": (Stream(), ValueError, r"a Stream begins anew at each call"),
}


@pytest.mark.parametrize("which", WRONG_BATCHES)
def test_train_batch_refuses_what_would_begin_anew_or_be_cut_off(which, start):
    """A loader gave every step the same first micro-batches, and what a list had too many was dropped."""
    batches, error, message = WRONG_BATCHES[which]
    engine = start(mlp(), accumulation=2)
    before = weights(engine)
    with pytest.raises(error, match=message):
        engine.train_batch(batches, lambda x: engine(x).square().mean())
    assert same(weights(engine), before) and engine.micro_steps == 0


# ---- groups after initialize


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_groups_are_those_of_initialize(start, tmp_path, kind):
    """A group that came later was trained by nobody, and the checkpoints after it opened nowhere."""
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    engine = start(model, optimizer)
    train(engine)
    new = {"params": [nn.Parameter(torch.ones(3))], "lr": 5.0}
    with pytest.raises(RuntimeError, match="groups are fixed at overspill"):
        optimizer.add_param_group(dict(new))
    assert len(optimizer.param_groups) == 1

    def refused(message):
        for act in (
            engine.step,
            engine.optimizer.state_dict,
            lambda: engine.save_checkpoint(tmp_path / "saved"),
        ):
            with pytest.raises(RuntimeError, match=message):
                act()
        assert not (tmp_path / "saved").exists()

    engine.backward(loss_of(engine))
    optimizer.param_groups.append(new)
    refused("parameter group 1 was not there at overspill.initialize.*give it to initialize")
    optimizer.param_groups.remove(new)
    group = optimizer.param_groups[0]
    group["params"].append(new["params"][0])
    refused("parameter group 0 has other parameters than at overspill.initialize")
    group["params"].pop()
    optimizer.param_groups.clear()
    refused("parameter group 0 of overspill.initialize is no longer there")
    optimizer.param_groups.append(group)
    engine.step()
    assert engine.global_steps == 2


# ---- parameters that are replaced


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 8, bias=False)
        self.table = nn.Embedding(8, 16)
        self.table.weight = self.head.weight

    def forward(self, x):
        return self.head(x)


def replace_weight(model):
    model[0].weight = nn.Parameter(torch.zeros(32, 16), requires_grad=False)


def replace_module(model):
    model[0] = nn.Linear(16, 32).requires_grad_(False)


def append(model):
    model.append(nn.Linear(4, 4).requires_grad_(False))


def append_trainable(model):
    model.append(nn.Linear(4, 4))


def remove_module(model):
    del model[2]


CHANGES = {
    replace_weight: r"0\.weight.* came into the model after overspill.initialize, and a checkpoint would not have",
    replace_module: r"0\.weight, 0\.bias.* came into the model after",
    append: r"3\.weight, 3\.bias.* came into the model after",
    append_trainable: r"3\.weight, 3\.bias.* came into the model after",
    remove_module: r"2\.weight, 2\.bias.* left the model after overspill.initialize, and a checkpoint would keep",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_is_of_the_parameters_that_the_model_has(start, tmp_path, change):
    """A replaced weight was saved as it was before, and what was new was not saved at all."""
    engine = start(mlp())
    train(engine)
    change(engine.module)
    with pytest.raises(RuntimeError, match=CHANGES[change]):
        engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_state_dict_has_the_weight_that_a_module_has(start):
    engine = start(mlp())
    train(engine)
    replace_weight(engine.module)
    found = engine.state_dict()
    assert torch.equal(found["0.weight"], torch.zeros(32, 16))
    assert torch.equal(found["2.weight"], engine.weight(engine.module[2].weight))
    engine.step()
    engine.load_state_dict({**found, "0.weight": torch.ones(32, 16)})
    assert torch.equal(engine.state_dict()["0.weight"], torch.ones(32, 16))
    tied = start(Tied())
    train(tied)
    trained = tied.state_dict()
    assert trained["head.weight"] is trained["table.weight"]
    tied.module.head.weight = nn.Parameter(torch.zeros(8, 16), requires_grad=False)
    found = tied.state_dict()
    assert torch.equal(found["head.weight"], torch.zeros(8, 16))
    assert torch.equal(found["table.weight"], trained["table.weight"])


def test_one_who_replaced_a_parameter_is_not_told_to_freeze_it(start):
    engine = start(mlp())
    engine.module[0].weight = nn.Parameter(torch.zeros(32, 16))
    with pytest.raises(RuntimeError, match=r"0\.weight: trainable, but came into the model after") as error:
        engine.step()
    assert "freeze" not in str(error.value)
    append_trainable(engine.module)
    engine.module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="or freeze what is new"):
        engine.step()


# ---- an optimizer of one's own


def test_the_users_own_optimizer_means_the_engines(start):
    """Its step() ended in an error about gradients, or did nothing."""
    model, other = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda n: 1 / (n + 1))
    start(model, optimizer)
    engine = start(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    theirs = LambdaLR(engine.optimizer.user, lambda n: 1 / (n + 1))  # made after, too
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            scheduler.step()
            engine.backward(loss_of(engine, i))
            engine.step()
            theirs.step()
    assert same(model.state_dict(), other.state_dict())
    assert optimizer.step(lambda: loss_of(model)).item() > 0
    engine.close()
    for call in (engine.optimizer.user.step, engine.optimizer.user.zero_grad):
        with pytest.raises((RuntimeError, ValueError), match="closed"):
            call()


# ---- clearing gradients


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("by", ["optimizer", "model", "engine", "the user's optimizer"])
def test_gradients_cleared_between_micro_batches_are_told(start, by, own):
    """The loop of torch's tutorials: all but the last micro-batch went without a word."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = start(model, optimizer if own else None, accumulation=4)
    if by == "the user's optimizer" and not own:
        return
    clear = {"optimizer": engine.optimizer, "model": model, "engine": engine}.get(by, optimizer).zero_grad
    clear()  # nothing has begun
    for i in range(2):
        engine.backward(loss_of(engine, i))
        engine.step()
    with pytest.warns(
        UserWarning, match=r"zero_grad\(\) in the middle of a step: 2 of 4 micro-batches"
    ) as told:
        clear()
    assert Path(told[0].filename) == Path(__file__)
    assert engine.micro_steps == 0 and engine.grad(model[0].weight) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clear()
        for i in range(4):
            engine.backward(loss_of(engine, i))
            engine.step()
        clear()
    assert engine.global_steps == 1


def test_an_optimizer_that_outlives_its_engine_clears_gradients(config):
    model = mlp()
    optimizer = overspill.initialize(model, config())[1]
    loss_of(model).backward()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    assert same(model.state_dict(), before)


# ---- hyper-parameters of groups


def group_with(**options):
    return lambda parameters: [{"params": parameters, **options}]


NUMBERS = {
    "nan": (group_with(lr=float("nan")), ValueError, "parameter group 0 has lr = nan: "),
    "negative": (group_with(lr=-1.0), ValueError, "group 0 has lr = -1.0: .* greater than or equal to 0"),
    "a truth value": (group_with(lr=True), ValueError, "group 0 has lr = True: .* number"),
    "huge": (group_with(lr=10**400), ValueError, "group 0 has lr = 1000.*: the number is too large"),
    "a text": (group_with(lr="1e-3"), ValueError, "group 0 has lr = '1e-3': .* number"),
    "none": (group_with(lr=None), ValueError, "group 0 has lr = None: .* number"),
    "betas": (
        group_with(betas=(1.5, 0.9)),
        ValueError,
        r"group 0 has betas = \(1\.5, 0\.9\): .* less than 1",
    ),
    "one beta": (group_with(betas=0.9), ValueError, r"group 0 has betas = 0\.9: "),
    "eps": (group_with(eps=-1), ValueError, "group 0 has eps = -1: "),
    "decay": (group_with(weight_decay=float("inf")), ValueError, "group 0 has weight_decay = inf: "),
    "no params": (
        lambda parameters: [{"lr": 1}],
        ValueError,
        r"group 0 of model_parameters has no params: .*lr",
    ),
    "both": (
        lambda parameters: [{"params": parameters[:1]}, *parameters[1:]],
        TypeError,
        r"(?s)model_parameters has .* at place 1, a Parameter, among groups",
    ),
}


@pytest.mark.parametrize("which", NUMBERS)
def test_a_group_takes_the_numbers_that_a_configuration_takes(which, start):
    """A rate that was NaN made all weights NaN, without a skipped step."""
    make, error, message = NUMBERS[which]
    model = mlp()
    with pytest.raises(error, match=message):
        start(model, model_parameters=make(list(model.parameters())))
    start(model, model_parameters=group_with(lr=1, eps=0)(list(model.parameters())))


@pytest.mark.parametrize("speculate", [False, True])
def test_a_number_that_no_update_can_use_changes_nothing(start, speculate):
    engine = start(mlp(), speculate=speculate)
    train(engine)
    group = engine.optimizer.param_groups[0]
    good, before = dict(group), weights(engine)
    for name, value in {
        "lr": float("nan"),
        "eps": "x",
        "betas": (2.0, 2.0),
        "weight_decay": torch.tensor(-1.0),
    }.items():
        group[name] = value
        engine.backward(loss_of(engine))  # with speculate, it has nothing to guess by
        with pytest.raises(ValueError, match=f"parameter group 0 has {name} = "):
            engine.step()
        group[name] = good[name]
        engine.zero_grad()
        assert same(weights(engine), before) and engine.global_steps == 1
    group["lr"] = -1e-3  # where a schedule may end
    train(engine)
    group["lr"] = torch.tensor(0.5)
    train(engine)
    assert engine.global_steps == 3


def test_a_schedule_that_gives_nan_is_stopped_by_the_next_step(start):
    engine = start(mlp(), lr_scheduler=lambda o: LambdaLR(o, lambda n: float("nan") if n else 1.0))
    train(engine)
    before = weights(engine)
    with pytest.raises(ValueError, match="parameter group 0 has lr = nan"):
        train(engine)
    assert same(weights(engine), before)


def test_a_state_dict_with_numbers_that_no_update_can_use_is_refused(start):
    engine = start(mlp())
    train(engine)
    for name, value in {"betas": (2.0, 2.0), "eps": -1.0}.items():
        saved = copy.deepcopy(engine.optimizer.state_dict())
        saved["param_groups"][0][name] = value
        with pytest.raises(ValueError, match=f"parameter group 0 has {name} = "):
            engine.optimizer.load_state_dict(saved)
    train(engine)
