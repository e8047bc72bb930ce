"""load_checkpoint into an engine that is not the one which saved: another format or optimizer, other names, a part."""

import itertools

import launch
import pytest
import torch
from checkpoint_scene import damage
from torch import nn

from overspill import CheckpointError
from overspill.segments import registry

HIDDEN = 32
FORMATS = ("exact", "compact", "8bit", "fp32")
OTHER_RATE = {"type": "AdamW", "lr": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore:overspill. load_checkpoint")


class Net(nn.Module):
    """An encoder and a head, and a buffer of either."""

    def __init__(self, classes: int = 8, encoder: str = "encoder"):
        super().__init__()
        torch.manual_seed(classes)
        setattr(self, encoder, nn.Sequential(nn.Linear(16, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)))
        self.name, self.head = encoder, nn.Linear(HIDDEN, classes)
        self.register_buffer("scale", torch.full((classes,), float(classes)))
        getattr(self, encoder).register_buffer("mean", torch.full((2,), float(classes)))

    def forward(self, x):
        return self.head(getattr(self, self.name)(x)) * self.scale.to(x.dtype)


def step(engine, number: int) -> float:
    dtype = next(engine.module.parameters()).dtype
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def held(engine) -> dict[str, torch.Tensor]:
    """Exact weights, states, how often each was updated, and buffers."""
    found = {name: buffer.float() for name, buffer in engine.module.named_buffers()}
    for name, p in engine.module.named_parameters():
        found[name] = engine.weight(p, torch.float32 if p.requires_grad else None)
        if p.requires_grad:
            found |= {f"{state} of {name}": value for state, value in engine.optimizer_state(p).items()}
            segment = registry[id(p)]
            updates = engine._core.updates_of(segment.unit.index, segment.index)
            found[f"updates of {name}"] = torch.tensor(updates)
    return found


def same(one: dict, other: dict, *keys: str) -> bool:
    return all(torch.equal(one[k], other[k]) for k in keys or one)


@pytest.fixture
def begin(start):
    """begin(format, model) makes an engine; fp32 is a format of other weights."""

    def make(format=None, model=None, **settings):
        model = Net() if model is None else model
        model = model if format == "fp32" else model.bfloat16()
        return start(model, format=None if format == "fp32" else format, **settings)

    return make


@pytest.fixture
def saved(begin, tmp_path):
    """saved(format, steps=3, ...) -> the engine, and its checkpoint."""

    def make(format=None, steps=3, model=None, **settings):
        engine = begin(format, model, **settings)
        for number in range(steps):
            step(engine, number)
        path = tmp_path / f"saved-{len(list(tmp_path.glob('saved-*')))}"
        engine.save_checkpoint(path, {"said": "hello"})
        return engine, path

    return make


def refused(engine, path, words: str, **arguments) -> None:
    """By a CheckpointError with these words, and nothing has changed."""
    before, counts = (
        held(engine),
        (engine.global_steps, engine.micro_steps, engine.optimizer.param_groups[0]["lr"]),
    )
    with pytest.raises(CheckpointError, match=words):
        engine.load_checkpoint(path, **arguments)
    assert same(before, held(engine))
    assert counts == (engine.global_steps, engine.micro_steps, engine.optimizer.param_groups[0]["lr"])


def as_held_in(format: str, state: torch.Tensor) -> torch.Tensor:
    return state.bfloat16().float() if format == "compact" else state


@pytest.mark.filterwarnings("default:overspill")
@pytest.mark.parametrize(("there", "here"), [*itertools.permutations(FORMATS, 2)])
def test_another_format(begin, saved, there, here):
    """Exactly what the format here can hold; the strict load refuses it, and names the argument."""
    before, path = saved(there)
    engine = begin(here, section=OTHER_RATE)
    refused(engine, path, r"or convert it: load_checkpoint\(folder, states='converted'\)")
    refused(
        engine,
        path,
        f"in the format {there} there, {here} here: states='converted' converts them",
        only=["*"],
    )
    with pytest.warns(UserWarning, match=f"states are converted from the format {there} to {here}, ") as told:
        assert dict(engine.load_checkpoint(path, states="converted").items()) == {"said": "hello"}
    rounds = here == "8bit" or (here == "compact" and there != "compact")
    assert len(told) == 1 and ("which rounds" in str(told[0].message)) == rounds
    assert engine.global_steps == 3 and engine.optimizer.param_groups[0]["lr"] == 1e-2
    old, new = held(before), held(engine)
    for name, value in old.items():
        if here != "8bit":
            expected = as_held_in(here, value) if name.startswith("exp_avg") else value
            assert same({name: expected}, new, name), name
        elif "exp_avg" in name:  # 8 bits and a scale
            assert (new[name] - value).abs().max() <= value.abs().max() / 16
        else:
            assert torch.allclose(new[name], value, rtol=2**-16)
    assert step(engine, 3) == pytest.approx(step(before, 3), rel=0.02)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_of_the_same_format_goes_on_bit_for_bit(begin, saved, format):
    """By the way that reads parameters one by one."""
    before, path = saved(format)
    engine = begin(format)
    engine.load_checkpoint(path, states="converted")
    assert same(held(before), held(engine))
    if format != "compact":  # which rounds by the engine's own count of steps
        assert [step(engine, n) for n in (3, 4)] == [step(before, n) for n in (3, 4)]


def test_the_weights_alone(begin, saved):
    before, path = saved()
    engine = begin(section=OTHER_RATE)
    step(engine, 9)
    with pytest.warns(UserWarning, match="the optimizer's states of what is loaded begin anew"):
        client_state = engine.load_checkpoint(path, weights_only=True)
    assert dict(client_state.items()) == {"said": "hello"}
    old, new = held(before), held(engine)
    assert same(old, new, *dict(engine.module.named_parameters()), *dict(engine.module.named_buffers()))
    for name in dict(engine.module.named_parameters()):
        assert new[f"updates of {name}"] == 0 and not any(
            new[f"{state} of {name}"].any() for state in ("exp_avg", "exp_avg_sq")
        )
    assert engine.global_steps == 1 and engine.optimizer.param_groups[0]["lr"] == 0.5


def test_the_scheduler_is_of_the_run_that_goes_on(saved, start):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    _, path = saved(lr_scheduler=scheduler)
    for arguments, steps in (
        ({"weights_only": True}, 0),
        ({"only": ["head.*"]}, 0),
        ({"states": "converted"}, 3),
    ):
        engine = start(Net().bfloat16(), lr_scheduler=scheduler)
        engine.load_checkpoint(path, **arguments)
        assert engine.lr_scheduler.last_epoch == steps
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**steps


def test_random_states_are_of_the_run_that_goes_on(begin, saved):
    _, path = saved()
    drawn = torch.rand(1)
    for arguments, alike in (
        ({"weights_only": True}, False),
        ({"states": "new"}, True),
        ({"only": ["*"]}, False),
    ):
        engine = begin()
        torch.manual_seed(77)
        engine.load_checkpoint(path, **arguments)
        assert torch.equal(torch.rand(1), drawn) == alike


def test_another_optimizer(begin, saved):
    before, path = saved()
    engine = begin(section={"type": "Lion", "lr": 1e-4})
    refused(engine, path, r"begin the states anew: load_checkpoint\(folder, states='new'\)")
    for states in ("same", "converted"):
        refused(
            engine, path, "was trained by adam, and here by lion: .* states='new'", states=states, only=["*"]
        )
    with pytest.warns(UserWarning, match="states of what is loaded begin anew"):
        engine.load_checkpoint(path, states="new")
    new = held(engine)
    for name in dict(engine.module.named_parameters()):
        assert same(held(before), new, name) and not new[f"exp_avg of {name}"].any()
    assert engine.global_steps == 3 and engine.optimizer.param_groups[0]["lr"] == 1e-4
    step(engine, 3)


def test_adagrad_begins_with_its_sums(begin, saved):
    _, path = saved()
    engine = begin(section={"type": "Adagrad", "lr": 1e-2, "initial_accumulator_value": 0.25})
    step(engine, 9)
    engine.load_checkpoint(path, states="new")
    assert (held(engine)["sum of head.weight"] == 0.25).all()


def test_a_part_under_a_new_head(begin, saved):
    before, path = saved()
    engine = begin(model=Net(classes=3))
    step(engine, 9)
    mine, theirs = held(engine), held(before)
    refused(engine, path, r"or load what both models have: load_checkpoint\(folder, only=\[names\]\)")
    refused(
        engine,
        path,
        r"head.weight has shape \(8, 32\) there, \(3, 32\) here: leave it out",
        weights_only=True,
    )
    refused(
        engine, path, "only has 'encoder', and this model has no such parameter or buffer", only=["encoder"]
    )
    refused(engine, path, r"buffer scale has shape \(8,\) there, \(3,\) here", only=["encoder.*", "scale"])
    with pytest.warns(
        UserWarning, match="5 of 8 parameters and buffers are loaded, the others stay as they are"
    ):
        engine.load_checkpoint(path, only=["encoder.*"])
    new = held(engine)
    for name in new:
        assert same(theirs if "encoder" in name else mine, new, name), name
    assert engine.global_steps == 1
    step(engine, 10)


def test_a_gradient_of_before_is_not_for_the_weights_that_came(begin, saved):
    _, path = saved()
    engines = [begin(accumulation=2) for _ in range(2)]
    step(engines[0], 9)
    for engine in engines:
        engine.load_checkpoint(path, weights_only=True, only=["*"])
        assert engine.micro_steps % 2 == 0
        for number in (1, 2):
            step(engine, number)
    assert same(held(engines[0]), held(engines[1]))


@pytest.mark.parametrize(
    "rename",
    [
        {"encoder": "body"},
        {"encoder.": "body."},
        {"encoder": "body", "encoder.0": "body.0"},
        lambda name: name.replace("encoder", "body"),
    ],
    ids=["prefix", "dots", "longest", "function"],
)
def test_a_model_that_was_renamed(begin, saved, rename):
    before, path = saved()
    engine = begin(model=Net(encoder="body"))
    refused(engine, path, r"rename=\{there: here\} finds what has another name there")
    engine.load_checkpoint(path, rename=rename)
    new = {name.replace("body", "encoder"): value for name, value in held(engine).items()}
    assert new.keys() == held(before).keys() and same(held(before), new)
    assert [step(engine, n) for n in (3, 4)] == [step(before, n) for n in (3, 4)]


def test_a_prefix_comes_and_goes(begin, saved):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x)

    before, path = saved()
    engine = begin(model=Wrapped())
    engine.load_checkpoint(path, rename={"": "net"})
    assert same(held(before), {name.replace("net.", ""): value for name, value in held(engine).items()})
    engine.save_checkpoint(path.with_name("wrapped"))
    again = begin()
    again.load_checkpoint(path.with_name("wrapped"), rename={"net": ""})
    assert same(held(before), held(again))


def test_names_that_do_not_fit(begin, saved):
    _, path = saved()
    engine = begin()
    refused(
        engine,
        path,
        "rename has the prefix 'body', and no name of .* begins with it",
        rename={"body": "encoder"},
    )
    refused(
        engine,
        path,
        "rename gives encoder.0.weight and encoder.0.bias of .* one name, x",
        rename=lambda _: "x",
    )
    refused(engine, path, "it lacks head.weight, which this model has", rename={"head": "other"})
    part = begin(model=Net().encoder)
    refused(
        part, path, "it has head.bias, head.weight, scale, and this model has not", rename={"encoder": ""}
    )
    part.load_checkpoint(path, rename={"encoder": ""}, only=["*"])


def test_what_is_one_parameter_here_and_was_two(begin, saved):
    class Both(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            if tied:
                self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    _, path = saved(model=Both(tied=False))
    tied = begin(model=Both(tied=True))
    refused(tied, path, "a.weight and b.weight are one parameter here, and two there", weights_only=True)
    before, path = saved(model=Both(tied=True))
    engine = begin(model=Both(tied=False))
    engine.load_checkpoint(path, states="converted")
    for p in (engine.module.a.weight, engine.module.b.weight):
        assert torch.equal(
            engine.weight(p, torch.float32), before.weight(before.module.a.weight, torch.float32)
        )


def test_what_is_damaged_changes_nothing(begin, saved):
    _, path = saved()
    damage(path)
    refused(begin(), path, "corrupt", weights_only=True)


def frozen(model: Net) -> Net:
    model.encoder.requires_grad_(False)
    return model


def test_what_is_frozen_here_or_was(begin, saved):
    """A weight that is frozen now is the one that forward used."""
    before, path = saved()
    engine = begin(model=frozen(Net()))
    refused(engine, path, "or convert it")
    engine.load_checkpoint(path, states="converted")
    weight = engine.module.encoder[0].weight
    assert torch.equal(engine.weight(weight), before.weight(before.module.encoder[0].weight))
    assert same(held(before), held(engine), "exp_avg of head.weight", "updates of head.bias")
    _, path = saved(model=frozen(Net()))
    engine = begin()
    refused(engine, path, "no states of encoder.0.weight, which was frozen there", states="converted")
    engine.load_checkpoint(path, states="new")


def test_weights_in_4_bits(begin, saved):
    before, path = saved(model=frozen(Net()), frozen={"format": "nf4"})
    engine = begin("compact", model=frozen(Net()), frozen={"format": "nf4"})
    engine.load_checkpoint(path, states="converted")
    for one, other in zip(before.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(before.weight(one), engine.weight(other))
    whole = begin("compact", model=frozen(Net()))
    refused(
        whole,
        path,
        r"encoder.0.weight is held in nf4 there, whole here: .* or leave it out",
        states="converted",
    )
    whole.load_checkpoint(path, states="converted", only=["head.*"])
    eight = begin(model=frozen(Net()), frozen={"format": "int8"})
    refused(eight, path, "is held in nf4 there, in int8 here", weights_only=True)


@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_an_optimizer_that_runs_its_own_code(begin, saved):
    before, path = saved()
    model = Net().bfloat16()
    engine = begin(model=model, optimizer=torch.optim.RAdam(model.parameters()))
    for arguments in ({"states": "converted"}, {"only": ["head.*"]}):
        with pytest.raises(CheckpointError, match=r"RAdam, runs its own code and keeps its own states"):
            engine.load_checkpoint(path, **arguments)
    engine.load_checkpoint(path, weights_only=True)
    weights = zip(before.module.parameters(), engine.module.parameters(), strict=True)
    assert all(torch.equal(before.weight(one), engine.weight(other)) for one, other in weights)
    step(engine, 3)
    with pytest.raises(CheckpointError, match="an engine that has made no step"):
        engine.load_checkpoint(path, weights_only=True)
    engine.save_checkpoint(path.with_name("foreign"))
    refused(
        begin(),
        path.with_name("foreign"),
        "an optimizer that runs its own code, and here by adam",
        only=["*"],
    )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"states": "exact"}, ValueError, "states = 'exact': give one of 'same', 'converted', 'new'"),
        ({"weights_only": 1}, TypeError, "weights_only = 1: True or False"),
        ({"weights_only": True, "states": "new"}, ValueError, "weights_only = True loads no states"),
        ({"only": "encoder.*"}, TypeError, "only = 'encoder.*': give a list of names"),
        ({"only": []}, ValueError, "it would load nothing"),
        ({"rename": "encoder"}, TypeError, "rename is a str: give a dict of prefixes"),
        ({"rename": {"encoder": None}}, TypeError, "prefixes that are no texts"),
        ({"rename": lambda _: None}, TypeError, "rename gives None for encoder.0.weight"),
    ],
)
def test_wrong_arguments(begin, saved, arguments, error, words):
    engine, path = saved(steps=0)
    with pytest.raises(error, match=words):
        engine.load_checkpoint(path, **arguments)


def test_parts_take_no_such_argument(begin, saved):
    engine, path = saved(steps=0)
    with pytest.raises(TypeError, match="the parts of a model takes all of it"):
        engine.load_checkpoint([path, path], weights_only=True)


def test_several_ranks(tmp_path):
    """Each has a part of all; what one of them finds wrong, all raise."""
    launch.run(2, "transfer_job.py", tmp_path)
