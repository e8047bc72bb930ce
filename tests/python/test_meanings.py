"""What a call accepts means what it says, as in torch or DeepSpeed; all else is refused by name, with the way out."""

import copy
import gc
import io
import json
import warnings
import weakref

import pytest
import torch
from torch import nn

import overspill
from overspill import segments
from plain import Plain


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def loss_of(model, i=0):
    return model(torch.randn(6, 16, generator=torch.Generator().manual_seed(i))).square().mean()


@pytest.fixture
def start(config):
    engines = []

    def make(model, **settings):
        engines.append(overspill.initialize(model, config(**settings))[0])
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# ---- clipping


def test_clipping_twice_scales_twice(start):
    """As torch's: an infinite limit changes nothing, a second call sees what the first one left."""
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    for i in range(2):
        engine.backward(loss_of(engine, i))
        plain.backward(loss_of(plain.model, i))
        norm = plain.norm()
        first = nn.utils.clip_grad_norm_(model.parameters(), norm / 4)
        again = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        third = engine.clip_grad_norm_(norm / 8)
        assert (first, again, third) == pytest.approx((norm, norm / 4, norm / 4), rel=1e-5)
        engine.step()
        assert engine.last_step.clip == pytest.approx(1 / 8, rel=1e-4)
        plain.step(engine.last_step.clip)
    assert all(torch.equal(v, plain.model.state_dict()[k]) for k, v in engine.state_dict().items())


def test_looking_at_the_norm_leaves_the_configured_clipping_alone(start):
    engine, other = start(mlp(), clipping=0.01), start(mlp(), clipping=0.01, job="other")
    for e in (engine, other):
        e.backward(loss_of(e))
    nn.utils.clip_grad_norm_(engine.module.parameters(), float("inf"))
    engine.step()
    other.step()
    assert engine.last_step.clip == other.last_step.clip < 1


def test_a_backward_after_a_clip_adds_to_what_was_clipped(start):
    engine = start(mlp())
    engine.backward(loss_of(engine))
    whole = engine.grad(engine.module[0].weight)
    engine.clip_grad_norm_(1e-3)
    clipped = engine.grad(engine.module[0].weight)
    engine.backward(loss_of(engine))
    assert torch.allclose(engine.grad(engine.module[0].weight), clipped + whole)
    engine.step()
    assert engine.last_step.clip == 1
    engine.backward(loss_of(engine))
    engine.clip_grad_norm_(1e-3)
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.last_step.clip == 1  # what was clipped is gone


def test_a_step_that_was_left_in_the_middle_begins_anew(start):
    """Ctrl-C between two micro-batches: once the next update came after fewer of them."""
    left, whole = start(mlp(), accumulation=3), start(mlp(), accumulation=3, job="whole")

    def train(engine, *batches):
        for i in batches:
            engine.backward(loss_of(engine, i))
            engine.step()

    train(left, 0, 1, 2, 3, 4)
    with pytest.warns(UserWarning, match="2 of 3 micro-batches were ended by engine.step"):
        left.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left.zero_grad()  # between two steps there is nothing to say
    train(left, 3, 4, 5)
    train(whole, 0, 1, 2, 3, 4, 5)
    assert left.micro_steps == 6 and left.global_steps == 2
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in left.state_dict().items())


def test_a_gradient_read_after_a_clip_is_scaled(start):
    engine = start(mlp())
    engine.backward(loss_of(engine))
    weight = engine.module[0].weight
    before = engine.grad(weight)
    norm = engine.clip_grad_norm_(1e-3)
    assert torch.allclose(engine.grad(weight), before * (1e-3 / (norm + 1e-6)), rtol=1e-6)


def test_a_skipped_step_is_told_once_and_names_the_parameter(start):
    engine = start(mlp())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.backward(loss_of(engine) * float("nan"))
            engine.step()
    texts = [str(w.message) for w in told if "skipped" in str(w.message)]
    assert len(texts) == 1 and "the gradient of 0.weight has an inf or a NaN" in texts[0]
    assert engine.stats()["skipped_steps"] == 2


# ---- parameters that come later


def lora(model):
    model[0].register_parameter("lora_a", nn.Parameter(torch.ones(3)))


def new_head(model):
    model[2] = nn.Linear(32, 4)


@pytest.mark.parametrize(
    ("change", "names"), [(lora, r"0\.lora_a"), (new_head, r"2\.weight, 2\.bias")], ids=["adapter", "head"]
)
@pytest.mark.parametrize("by", ["engine", "optimizer"])
def test_parameters_that_came_after_initialize_stop_the_step(start, change, names, by):
    engine = start(mlp())
    engine.backward(loss_of(engine))
    engine.step()
    change(engine.module)
    engine.backward(loss_of(engine))
    before = engine.weight(engine.module[0].weight)
    with pytest.raises(RuntimeError, match=f"{names}: trainable, but came into the model after"):
        (engine if by == "engine" else engine.optimizer).step()
    assert torch.equal(engine.weight(engine.module[0].weight), before)
    for parameter in engine.module.parameters():
        if id(parameter) not in segments.registry:
            parameter.requires_grad_(False)
    engine.step()
    assert not torch.equal(engine.weight(engine.module[0].weight), before)


class Prompted(nn.Module):
    """As PEFT's prompt tuning: what it trains lies around the model, which it freezes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.prompt = inner.requires_grad_(False), nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.inner(x + self.prompt)


@pytest.mark.parametrize("by", ["engine", "optimizer", "train_batch"])
def test_a_wrapper_that_came_after_initialize_stops_the_step(start, by):
    """Its parameters are not in the engine's module; the step was made, and trained nothing."""
    engine = start(mlp())
    wrapped = Prompted(engine.module)
    with pytest.raises(RuntimeError, match=r"none of .* requires a gradient any more.*wrapper first, then"):
        if by == "train_batch":
            engine.train_batch([0], lambda i: loss_of(wrapped, i))
        engine.backward(loss_of(wrapped))
        (engine if by == "engine" else engine.optimizer).step()
    assert wrapped.prompt.grad is not None and engine.stats()["step"] == engine.global_steps == 0


def test_what_is_frozen_for_a_while_is_trained_before_and_after(start):
    """A GAN: the critic is frozen while the generator learns, here before its own step too."""
    plain = [Plain(nn.Sequential(nn.Linear(16, 16), nn.Tanh())), Plain(mlp())]
    engines = [start(copy.deepcopy(each.model), job=f"gan{i}") for i, each in enumerate(plain)]

    def play(generator, critic, backward, step):
        for i in range(3):
            backward[1](loss_of(critic, i))
            critic.requires_grad_(False)
            step[1]()  # it has gradients
            backward[0](loss_of(nn.Sequential(generator, critic), i + 10))
            step[0]()
            critic.requires_grad_(True)

    play(*(e.model for e in plain), [e.backward for e in plain], [lambda e=e: e.step(1.0) for e in plain])
    play(*(e.module for e in engines), [e.backward for e in engines], [e.step for e in engines])
    for expected, engine in zip(plain, engines, strict=True):
        assert engine.stats()["step"] == 3
        assert all(torch.equal(v, expected.model.state_dict()[k]) for k, v in engine.state_dict().items())


# ---- steps that are refused


def gathered(engine):
    with engine.gathered(engine.module[0].weight):
        yield


def newcomer(engine):
    lora(engine.module)
    yield
    engine.module[0].lora_a.requires_grad_(False)


@pytest.mark.parametrize("way", [gathered, newcomer])
def test_a_refused_train_batch_leaves_no_gradient_and_counts_no_micro_batch(start, way):
    refused, plain = start(mlp(), accumulation=2), start(mlp(), accumulation=2, job="plain")
    data = [torch.randn(6, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def train(engine, i):
        engine.train_batch(data[i : i + 2], lambda x: engine(x).square().mean())

    train(refused, 0)
    train(plain, 0)
    reason = way(refused)
    next(reason)
    with pytest.raises(RuntimeError, match=r"inside `with engine\.gathered|came into the model after"):
        train(refused, 2)
    next(reason, None)
    assert refused.grad(refused.module[0].weight) is None
    assert (refused.micro_steps, refused.global_steps) == (2, 1)
    train(refused, 4)
    train(plain, 4)
    assert refused.last_step.norm == plain.last_step.norm
    assert (refused.micro_steps, refused.global_steps) == (plain.micro_steps, plain.global_steps) == (4, 2)
    assert all(torch.equal(v, refused.state_dict()[k]) for k, v in plain.state_dict().items())


@pytest.mark.parametrize("way", [gathered, newcomer])
def test_a_refused_step_is_made_by_the_next_call(start, way):
    """It ended no micro-batch: once the next call was taken for the first of another step, and did nothing."""
    refused, plain = start(mlp(), accumulation=2), start(mlp(), accumulation=2, job="plain")
    for engine in (refused, plain):
        for i in range(2):
            engine.backward(loss_of(engine, i))
            if engine is refused and i == 1:
                reason = way(refused)
                next(reason)
                with pytest.raises(RuntimeError, match="overspill"):
                    engine.step()
                next(reason, None)
                assert engine.micro_steps == 1
            engine.step()
    assert refused.stats()["step"] == refused.global_steps == 1 and refused.micro_steps == 2
    assert all(torch.equal(v, refused.state_dict()[k]) for k, v in plain.state_dict().items())


# ---- checkpoints


def test_a_tag_is_no_client_state(start, tmp_path):
    engine = start(mlp())
    with pytest.raises(
        TypeError, match=r"client_state = 'my-tag' is a str, a dict is expected\. There are no tags"
    ):
        engine.save_checkpoint(tmp_path / "saved", "my-tag")
    with pytest.raises(
        TypeError, match="no argument 'tag': there are no tags: give each checkpoint a folder"
    ):
        engine.save_checkpoint(tmp_path / "saved", tag="my-tag")
    with pytest.raises(TypeError, match="no argument 'save_latest'"):
        engine.save_checkpoint(tmp_path / "saved", save_latest=False)
    with pytest.raises(TypeError, match="no argument 'load_module_only': for the weights alone"):
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    with pytest.raises(TypeError, match=r"no argument 'nonsense'$"):
        engine.load_checkpoint(tmp_path / "saved", nonsense=True)
    assert not (tmp_path / "saved").exists()


def test_the_client_state_is_a_dict_that_does_not_unpack_into_its_keys(start, tmp_path):
    engine = start(mlp())
    engine.save_checkpoint(tmp_path / "saved", {"epoch": 1, "best": 2.5})
    found = engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(
        TypeError, match=r"returns the client state, a dict, not the pair \(path, client_state\)"
    ):
        _path, _state = found
    assert found == {"epoch": 1, "best": 2.5} and found["epoch"] == 1 and "best" in found and len(found) == 2
    assert (
        dict(found)
        == {**found}
        == dict(found.items())
        == copy.deepcopy(found)
        == json.loads(json.dumps(found))
    )
    engine.save_checkpoint(tmp_path / "again", found)
    assert engine.load_checkpoint(tmp_path / "again") == found


def test_a_save_in_the_middle_of_a_step_is_refused(start, tmp_path):
    """Its gradients would be lost, and half a batch with them."""
    engine = start(mlp(), accumulation=3)
    for i in range(3):
        engine.backward(loss_of(engine, i))
        engine.step()
        if i < 2:
            with pytest.raises(
                RuntimeError, match=f"in the middle of a step: {i + 1} of 3 micro-batches were ended"
            ):
                engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    engine.save_checkpoint(tmp_path / "saved")


# ---- who keeps what alive


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("kept", ["engine", "optimizer", "model"])
def test_a_script_may_keep_any_of_them(config, kept, speculate):
    """The others may go; all of it ends when the last one goes, without the garbage collector."""
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    settings = config("nvme", speculate=speculate)

    def keep(model):
        engine, optimizer, *_ = overspill.initialize(model, settings)
        return {"engine": engine, "optimizer": optimizer, "model": optimizer}[kept], weakref.ref(
            engine._residency
        )

    held, alive = keep(model)
    for i in range(2):
        loss_of(model, i).backward()
        plain.backward(loss_of(plain.model, i))
        held.step()
        if kept != "engine":
            held.zero_grad()
        plain.step(1.0)
    if kept == "model":
        held = None
    gc.collect()
    assert all(torch.equal(v, plain.model.state_dict()[k]) for k, v in model.state_dict().items())
    gc.disable()
    try:
        del model, held
        assert alive() is None or alive().closed
    finally:
        gc.enable()
    assert not segments.registry


def test_a_model_whose_engine_was_closed_is_not_taken_again(config):
    """Its parameters are NaN. A copy that was made before has weights of its own."""
    model = mlp()
    engine, *_ = overspill.initialize(model, config())
    copied = copy.deepcopy(model)
    engine.close()
    with pytest.raises(
        ValueError, match="the engine of Sequential was closed, and its weights are gone: make"
    ):
        overspill.initialize(model, config())
    overspill.initialize(copied, config())[0].close()


def test_a_model_whose_engine_was_closed_is_not_copied_or_saved(config):
    """The copy and the file once held NaN. The model as a whole, a module of it, and each kind of hook."""
    model = mlp()
    engine, *_ = overspill.initialize(model, config())
    copied = copy.deepcopy(model)
    engine.close()
    hooks = model[0]._state_dict_hooks, model._forward_pre_hooks
    for what in (model, model[0], *hooks):
        for act in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(RuntimeError, match=r"overspill: the engine .*closed"):
                act(what)
    torch.save(copy.deepcopy(copied), io.BytesIO())


# ---- what initialize is given


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.GELU()), nn.Linear(3, 0, bias=False)], ids=["none", "empty"]
)
def test_a_model_without_parameters_is_refused_by_name(config, model):
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no parameters with elements"):
        overspill.initialize(model, config())


def test_two_optimizers_are_told_which_one_counts(config):
    model = mlp()
    section = {"type": "Lion", "lr": 1e-4}
    with pytest.warns(UserWarning, match=r"optimizer \(Lion\) is not used: optimizer = SGD is given"):
        engine, *_ = overspill.initialize(
            model, config(section=section), torch.optim.SGD(model.parameters(), lr=0.1)
        )
    assert engine.optimizer.param_groups[0]["lr"] == 0.1
    engine.close()
    settings = config()
    del settings["optimizer"]
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overspill.initialize(model, settings, torch.optim.SGD(model.parameters(), lr=0.1))[0].close()
