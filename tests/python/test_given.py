"""What the calls are given: arguments mean what they mean in torch, and what is none of them is refused by name, with
what to give instead, before anything is changed."""

import copy

import pytest
import torch
from scene import batch, mlp
from torch import nn

import overspill
from overspill import place


def loss_of(model, i=0):
    return model(batch(i)).square().mean()


def train(engine, steps=1):
    for i in range(steps):
        engine.backward(loss_of(engine, i))
        engine.step()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- clipping


@pytest.mark.parametrize("by", ["engine", "torch"])
def test_clipping_to_nothing_and_to_what_is_no_limit(start, by):
    engine = start(mlp())

    def clip(limit):
        if by == "engine":
            return engine.clip_grad_norm_(limit)
        return nn.utils.clip_grad_norm_(engine.module.parameters(), limit)

    engine.backward(loss_of(engine))
    for wrong in (-1, float("nan"), "x"):
        with pytest.raises(ValueError, match=rf"overspill: max_norm = {wrong!r}: .* from 0 on"):
            clip(wrong)
    norm = clip(0)
    assert norm > 0 and engine.last_step is None
    assert all((engine.grad(p) == 0).all() for p in engine.module.parameters())
    assert clip(float("inf")) == 0
    engine.step()
    assert not engine.last_step.skipped and engine.last_step.clip < 1e-300
    assert all((engine.optimizer_state(p)["exp_avg"] == 0).all() for p in engine.module.parameters())


# ---- the device


def test_cpu_is_the_host(start):
    engine = start(mlp(), device="cpu")
    assert engine.device == torch.device("cpu") and engine.config.engine.device == "host"
    train(engine)
    assert place.find("cpu", None) is place.HOST


# ---- what is no parameter


def test_what_is_no_parameter_is_told_what_to_give(start, config):
    engine = start(mlp())
    train(engine)
    for call in (engine.weight, engine.grad, engine.optimizer_state, engine.gathered):
        with pytest.raises(
            TypeError, match=r"'0\.weight' is a str: give .*engine\.module\.get_parameter\('0\.weight'\)"
        ):
            call("0.weight")
        with pytest.raises(TypeError, match=r"is a Sequential: give .*parameters\(\)"):
            call(engine.module)
        with pytest.raises(TypeError, match=r"None is a NoneType: give a parameter"):
            call(None)
    with pytest.raises(TypeError, match=r"'0\.weight' is a str"):
        engine.gathered(["0.weight"])
    with engine.gathered(engine.module.named_parameters()):
        assert engine.module[0].weight.isfinite().all()
    for wrong in (1.0, None, [torch.ones(1)]):
        with pytest.raises(
            TypeError, match=rf"backward: the loss is a {type(wrong).__name__}: give a tensor"
        ):
            engine.backward(wrong)
    for wrong in ("1 pound", -1, None):
        with pytest.raises(ValueError, match=rf"predict: budgets has {wrong!r}: "):
            engine.predict([wrong])
    with pytest.raises(TypeError, match="predict: budgets is an int: give a list"):
        engine.predict(5)
    assert engine.predict(["1GiB"]) == engine.predict([1 << 30])
    with pytest.raises(TypeError, match=r"model is a str: give an nn\.Module; a folder .* checkpoint="):
        overspill.initialize("folder", config())
    train(engine)


# ---- paths

WRONG_PATHS = {
    "None": (None, TypeError, "None is a NoneType"),
    "a number": (5, TypeError, "5 is an int"),
    "bytes": (b"by", TypeError, "b'by' is a bytes"),
    "empty": ("", ValueError, "the path is empty"),
    "null": ("x\0y", ValueError, r"'x\\x00y' has characters that no file can have"),
    "surrogate": ("x\ud800", ValueError, r"'x\\ud800' has characters that no file can have"),
    "home": ("~/saved", ValueError, r"'~/saved': Python does not take ~ for your home.*expanduser"),
}


@pytest.mark.parametrize("which", WRONG_PATHS)
def test_what_is_no_path_is_refused_by_name(which, start, tmp_path, monkeypatch):
    """save_checkpoint(None) wrote a folder "None"."""
    monkeypatch.chdir(tmp_path)
    value, error, message = WRONG_PATHS[which]
    engine = start(mlp())
    for name in ("save_checkpoint", "load_checkpoint", "trace", "timeline"):
        with pytest.raises(error, match=rf"overspill: {name}: .*{message}"):
            called = getattr(engine, name)(value)
            if name in ("trace", "timeline"):
                called.__enter__()
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint("saved")
    engine.load_checkpoint(tmp_path / "saved")


def test_a_trace_is_refused_before_its_steps(start, tmp_path):
    engine = start(mlp())
    for path, message in {tmp_path / "none/x.json": "none does not exist", tmp_path: "is a folder"}.items():
        with pytest.raises(OSError, match=f"trace: .*{message}"), engine.trace(path):
            pytest.fail("the block ran")
    with engine.trace(tmp_path / "x.json"):
        train(engine)
    assert (tmp_path / "x.json").stat().st_size


# ---- data and schedulers

WRONG_DATA = {
    "a path": ("/data/x.txt", TypeError, "training_data = '/data/x.txt' is a str, no data set"),
    "a loader": (
        torch.utils.data.DataLoader([1]),
        TypeError,
        r"is a DataLoader.*give its dataset, or .*train_batch\(iter\(loader\)\)",
    ),
    "a number": (5, TypeError, "is an int, no data set"),
    "a generator": ((x for x in [1]), TypeError, "is a generator, no data set"),
    "splits": ({"train": [1]}, TypeError, "is a dict, no data set"),
    "nothing": ([], ValueError, "training_data is empty"),
}


@pytest.mark.parametrize("which", WRONG_DATA)
def test_what_is_no_data_set_is_refused_before_the_model_is_taken(which, config):
    data, error, message = WRONG_DATA[which]
    model, settings = mlp(), {**config(), "train_micro_batch_size_per_gpu": 2}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        overspill.initialize(model, settings, training_data=data)
    with pytest.raises(ValueError, match=r"collate_fn .* training_data"):
        overspill.initialize(model, settings, collate_fn=list)
    assert same(model.state_dict(), before)
    engine, _, loader, _ = overspill.initialize(model, settings, training_data=[torch.ones(2)] * 3)
    assert len(loader) == 2
    engine.close()


@pytest.mark.parametrize("scheduler", ["cosine", {"type": "WarmupLR"}, 5])
def test_what_is_no_scheduler_is_refused_before_the_model_is_taken(scheduler, config):
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=rf"lr_scheduler is an? {type(scheduler).__name__}: give "):
        overspill.initialize(model, config(), lr_scheduler=scheduler)
    assert same(model.state_dict(), before)


def test_a_factory_that_gives_no_scheduler_is_refused(config):
    with pytest.raises(TypeError, match="lr_scheduler returned a NoneType, no scheduler"):
        overspill.initialize(mlp(), config(), lr_scheduler=lambda optimizer: None)
