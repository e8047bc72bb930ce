"""optimizer.state_dict and load_state_dict: what a script saves by torch.save and loads again goes on bit for bit."""

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import overspill


class Net(nn.Module):
    """`spare` is never used: it has no states."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 24)).to(dtype)
        self.table = nn.Parameter(torch.randn(24, 7).to(dtype).t())
        self.spare = nn.Parameter(torch.ones(5).to(dtype))

    def forward(self, x):
        return (self.body(x) @ self.table.t()).float().square().mean()


@pytest.fixture
def start(config):
    engines = []

    def make(model, optimizer=None, lr_scheduler=None, **settings):
        engines.append(overspill.initialize(model, config(**settings), optimizer, lr_scheduler)[0])
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def train(engine, steps):
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for i in steps:
        loss = engine(torch.randn(6, 16, generator=torch.Generator().manual_seed(i)).to(dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def through_a_file(state):
    """As scripts and frameworks read it: no pickled objects."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def masters(engine):
    return [engine.weight(p, torch.float32) for p in engine.module.parameters()]


SECTIONS = {
    "AdamW": {"type": "AdamW", "lr": 1e-2},
    "Adam": {"type": "Adam", "lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"type": "Adagrad", "lr": 1e-2, "initial_accumulator_value": 0.2},
    "Lion": {"type": "Lion", "lr": 1e-3},
    "momentum": {"type": "SGD", "lr": 1e-2, "momentum": 0.9, "dampening": 0.2},
    "SGD": {"type": "SGD", "lr": 1e-2},
    "RMSprop": {"type": "RMSprop", "lr": 1e-3, "momentum": 0.9},
    "NAdam": {"type": "NAdam"},
    "Adamax": {"type": "Adamax"},
    "Adadelta": {"type": "Adadelta", "lr": 0.5},
}


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize(
    "kind, form",
    [
        (kind, form)
        for kind in SECTIONS
        for form in ("fp32", "exact", "compact", "8bit")
        if (kind, form) != ("Adamax", "8bit")  # which is refused
    ],
)
def test_the_idiom_of_scripts_goes_on_bit_for_bit(start, kind, form, placement):
    """torch.save of the three state dicts, and a new engine: losses and masters are those of going on."""
    dtype = torch.float32 if form == "fp32" else torch.bfloat16

    def fresh(job):
        return start(
            Net(dtype),
            section=SECTIONS[kind],
            format=None if form == "fp32" else form,
            placement=placement,
            job=job,
            lr_scheduler=lambda o: LambdaLR(o, lambda n: 1 / (n + 1)),
        )

    engine = fresh("first")
    train(engine, range(3))
    model, optimizer, scheduler = through_a_file(
        [engine.state_dict(), engine.optimizer.state_dict(), engine.lr_scheduler.state_dict()]
    )
    other = fresh("second")
    other.load_state_dict(model)
    other.optimizer.load_state_dict(optimizer)
    other.lr_scheduler.load_state_dict(scheduler)
    assert train(other, range(3, 7)) == train(engine, range(3, 7))
    assert all(map(torch.equal, masters(engine), masters(other)))


@pytest.mark.parametrize(
    "kind", ["AdamW", "Adam", "Adagrad", "SGD", "RMSprop", "NAdam", "Adamax", "Adadelta"]
)
def test_torchs_optimizer_takes_the_state_dict_and_gives_it_back(start, kind):
    """In fp32 the layout is torch's: the same tensors under the same numbers, in both directions."""
    arguments = {"lr": 1e-2, "weight_decay": 0.05} | ({"momentum": 0.9} if kind in ("SGD", "RMSprop") else {})
    model, plain = Net(), Net()
    engine = start(model, getattr(torch.optim, kind)(model.parameters(), **arguments))
    train(engine, range(3))
    theirs = getattr(torch.optim, kind)(plain.parameters())
    theirs.load_state_dict(through_a_file(engine.optimizer.state_dict()))
    plain.load_state_dict(engine.state_dict())
    assert theirs.param_groups[0]["lr"] == 1e-2 and theirs.param_groups[0]["weight_decay"] == 0.05
    for ours, parameter in zip(model.parameters(), plain.parameters()):
        for name, value in engine.optimizer_state(ours).items():
            if ours is not model.spare or kind == "Adagrad":
                assert torch.equal(theirs.state[parameter][name], value), name
    assert (plain.spare in theirs.state) == (kind == "Adagrad")
    for i in range(3, 6):  # torch goes on from it, and the engine from what torch then has
        plain(torch.randn(6, 16, generator=torch.Generator().manual_seed(i))).backward()
        theirs.step()
        theirs.zero_grad()
    ours = Net()
    back = start(ours, getattr(torch.optim, kind)(ours.parameters(), **arguments), job="back")
    back.load_state_dict(plain.state_dict())
    back.optimizer.load_state_dict(theirs.state_dict())
    saved = back.optimizer.state_dict()["state"][0]
    assert saved["step"] == (6 if kind != "SGD" else 3)  # torch's SGD counts none, and leaves ours as it is
    train(engine, range(3, 6))
    assert train(engine, range(6, 9)) == pytest.approx(train(back, range(6, 9)), rel=1e-4)


def test_the_users_own_optimizer_gives_and_takes_the_states_too(start):
    """A script that goes on with the object it made: that one's states are empty."""

    def fresh(job):
        model = Net()
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return start(model, own, job=job), own

    engine, own = fresh("a")
    train(engine, range(2))
    other, others = fresh("b")
    other.load_state_dict(engine.state_dict())
    others.load_state_dict(through_a_file(own.state_dict()))
    assert train(other, range(2, 5)) == train(engine, range(2, 5))


def test_groups_keep_their_numbers_and_frozen_parameters_have_no_states(start):
    model = Net()
    model.body[0].weight.requires_grad_(False)
    groups = [{"params": [model.table], "lr": 0.5}, {"params": [*model.body.parameters(), model.spare]}]
    engine = start(model, torch.optim.AdamW(groups, lr=1e-3))
    train(engine, range(1))
    state = engine.optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1, 2, 3, 4, 5]]
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 1e-3]
    assert list(state["state"]) == [0, 2, 3, 4]  # 1 is frozen, 5 was never updated
    assert state["state"][0]["exp_avg"].shape == (7, 24)
    engine.optimizer.load_state_dict(state)
    assert engine.optimizer.param_groups[0]["params"][0] is model.table


def test_a_round_trip_before_the_first_step_is_no_change(start):
    """Accelerate's prepare does it."""
    engine, other = start(Net(), job="a"), start(Net(), job="b")
    state = engine.optimizer.state_dict()
    assert state["state"] == {}
    engine.optimizer.load_state_dict(state)
    assert train(engine, range(3)) == train(other, range(3))


def test_a_parameter_without_an_entry_starts_anew(start):
    engine = start(Net(), section=SECTIONS["Adagrad"])
    train(engine, range(2))
    state = engine.optimizer.state_dict()
    del state["state"][0]
    engine.optimizer.load_state_dict(state)
    weight = engine.module.table
    assert (engine.optimizer_state(weight)["sum"] == 0.2).all()
    assert engine.optimizer.state_dict()["state"][0]["step"] == 0
    assert engine.optimizer.state_dict()["state"][2]["step"] == 2


# ---- what is refused, before anything is changed


def spoiled(state, change):
    state = copy.deepcopy(state)
    change(state)
    return state


def remove(state, *path):
    for key in path[:-1]:
        state = state[key]
    del state[path[-1]]


WRONG = {
    "nothing": (lambda s: s.clear(), "nothing, not state and param_groups: no optimizer made it"),
    "old": (lambda s: (s.clear(), s.update(groups=[])), "made by an earlier version.*engine.load_checkpoint"),
    "no states": (lambda s: s["state"].clear(), "no states, and this optimizer has made updates"),
    "a group more": (
        lambda s: s["param_groups"].append({"params": []}),
        "2 parameter groups were saved, 1 are here",
    ),
    "fewer": (lambda s: s["param_groups"][0]["params"].pop(), "5 parameters in the state dict, 6 here"),
    "another model": (lambda s: s["state"].update({77: {"step": 1}}), "states of parameter 77"),
    "another order": (
        lambda s: s["param_groups"][0]["param_names"].reverse(),
        r"has body\.2\.bias where table is here",
    ),
    "another shape": (
        lambda s: s["state"][0].update(exp_avg=torch.zeros(7)),
        r"exp_avg of table is \(7,\) in the state dict, \(7, 24\) here",
    ),
    "another optimizer": (
        lambda s: remove(s, "state", 0, "exp_avg_sq"),
        "has exp_avg of table, this optimizer has exp_avg, exp_avg_sq",
    ),
    "amsgrad": (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad=True, which"),
    "Adam": (
        lambda s: s["param_groups"][0].update(
            decoupled_weight_decay=s["param_groups"][0].pop("decoupled") is None
        ),
        "is that of Adam, this optimizer is AdamW: their weight decay differs",
    ),
    "no step": (lambda s: remove(s, "state", 0, "step"), 'no "step" of table'),
    "half a step": (lambda s: s["state"][0].update(step=1.5), "step = 1.5 of table"),
    "too many steps": (lambda s: s["state"][0].update(step=1e30), r"step = 1e\+30 of table.* below 2\*\*53"),
    "a step in words": (lambda s: s["state"][0].update(step="many"), "step = 'many' of table"),
    "a group of nothing": (
        lambda s: s.update(param_groups=[7]),
        "param_groups of this state dict: .* dicts with params",
    ),
    "no params": (
        lambda s: s["param_groups"][0].pop("params"),
        "param_groups of this state dict: .* dicts with params",
    ),
    "no groups": (
        lambda s: s.update(param_groups=None),
        "param_groups of this state dict: .* dicts with params",
    ),
    "no dict of states": (lambda s: s.update(state=[1]), "state of this state dict is a list"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_does_not_fit_is_refused_before_anything_changes(start, which):
    change, message = WRONG[which]
    engine = start(Net())
    train(engine, range(2))
    before = engine.optimizer.state_dict()
    wrong = spoiled(before, change)
    groups, states = wrong.get("param_groups"), wrong.get("state")
    for group in groups if isinstance(groups, list) and groups != [7] else []:
        group["lr"] = 7.0
    for entry in states.values() if isinstance(states, dict) else []:
        entry |= {name: value + 1 for name, value in entry.items() if name == "exp_avg_sq"}
    with pytest.raises(ValueError, match=message):
        engine.optimizer.load_state_dict(wrong)
    after = engine.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, after["state"][number][name]), (number, name)


@pytest.mark.parametrize("nothing", [None, [], "saved.pt"])
def test_what_is_no_state_dict_is_refused_by_name(start, nothing):
    with pytest.raises(
        ValueError, match=rf"load_state_dict was given a {type(nothing).__name__}: give the dict"
    ):
        start(Net()).optimizer.load_state_dict(nothing)


def test_masters_of_other_weights_are_refused(start):
    engine = start(Net(torch.bfloat16), job="a")
    train(engine, range(2))
    model, optimizer = through_a_file([engine.state_dict(), engine.optimizer.state_dict()])
    other = start(Net(torch.bfloat16), job="b")
    with pytest.raises(ValueError, match=re.escape("load the model's state_dict of the same moment first")):
        other.optimizer.load_state_dict(optimizer)
    other.load_state_dict(model)
    other.optimizer.load_state_dict(optimizer)
    assert all(map(torch.equal, masters(engine), masters(other)))


def test_the_optimizer_itself_is_not_copied(start):
    engine = start(Net())
    for act in (copy.deepcopy, lambda o: torch.save(o, io.BytesIO())):
        with pytest.raises(TypeError, match=r"states live in the engine: save optimizer\.state_dict"):
            act(engine.optimizer)


def test_of_several_ranks_it_is_refused_with_the_way_out(start):
    """Scripts call it on rank 0 alone, where a collective call would hang. The number of ranks is set by hand here."""
    engine = start(Net())
    state = engine.optimizer.state_dict()
    engine.optimizer.ranks = 2
    assert (
        engine.optimizer.state_dict()["state"] == {}
    )  # nobody has any yet: Accelerate's prepare asks for it
    engine.optimizer.load_state_dict(state)
    engine.optimizer.ranks = 1
    train(engine, range(1))
    engine.optimizer.ranks = 2
    for call in (engine.optimizer.state_dict, lambda: engine.optimizer.load_state_dict({})):
        with pytest.raises(
            overspill.RankError, match=r"2 ranks hold parts of the states.*engine\.save_checkpoint"
        ):
            call()


# ---- memory


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_large_states_lie_in_files_that_have_no_name(config, tmp_path):
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    settings = config("nvme", chunk_elements=1 << 19)
    engine = overspill.initialize(model, settings)[0]
    engine.backward(engine(torch.ones(1, 2048)).sum())
    engine.step()
    engine.synchronize()
    names = sorted(tmp_path.rglob("*"))
    before = anonymous_bytes()
    state = engine.optimizer.state_dict()
    assert sum(t.numel() * 4 for entry in state["state"].values() for t in entry.values()) > 128 << 20
    assert anonymous_bytes() - before < 24 << 20
    assert sorted(tmp_path.rglob("*")) == names
    assert torch.equal(state["state"][1]["exp_avg"], engine.optimizer_state(model[1].weight)["exp_avg"])
    engine.close()


def test_no_room_for_them_is_an_error_with_the_way_out(start, monkeypatch):
    model = nn.Sequential(nn.Linear(1024, 1024))
    engine = start(model)
    engine.backward(engine(torch.ones(1, 1024)).sum())
    engine.step()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(
        OSError, match=r"of 0\.weight \(4194304 bytes\) in a file in .*: No space left.*save_checkpoint"
    ):
        engine.optimizer.state_dict()
