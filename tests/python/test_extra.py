"""What a checkpoint says beside weights: whatever it is, it is taken whole, or refused by name with nothing changed."""

import contextlib
import json
import random

import mutations
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import overspill
from overspill import CheckpointError, _core, state


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x):
        return self.body(x).square().mean()


@pytest.fixture
def engine(config, tmp_path):
    """After three steps, saved after two to tmp_path/saved."""
    engine, *_ = overspill.initialize(
        Net(), config("host"), lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1))
    )
    for step in range(3):
        if step == 2:
            engine.save_checkpoint(tmp_path / "saved", {"seen": {1: (2, float("inf"))}})
        engine.backward(engine(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))))
        engine.step()
    yield engine
    engine.close()


def all_of(engine) -> list:
    """Everything that load_checkpoint may change, as values that compare."""
    tensors = {**engine.state_dict(), "random": torch.get_rng_state()}
    numpy = np.random.get_state()
    return [
        {name: tensor.tolist() for name, tensor in tensors.items()},
        [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        json.dumps(engine.lr_scheduler.state_dict(), default=str),
        engine.global_steps,
        engine.micro_steps,
        random.getstate(),
        [numpy[0], numpy[1].tolist(), *numpy[2:]],
    ]


def pretend(monkeypatch, folder, text):
    """The checkpoint says `text`, as if it had been written so."""
    manifest = {**_core.manifest(str(folder)), "extra_json": text}
    monkeypatch.setattr(_core, "manifest", lambda _: manifest)
    load = _core.Engine.load
    monkeypatch.setattr(_core.Engine, "load", lambda self, folder: load(self, folder) and text)


def test_any_damage_is_refused_by_name_with_nothing_changed(engine, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    whole = _core.manifest(str(folder))["extra_json"]
    before = all_of(engine)
    refused = 0
    for number, text in mutations.of_json(json.loads(whole), seed=1):
        with monkeypatch.context() as patch:
            pretend(patch, folder, text)
            try:
                engine.load_checkpoint(folder)
            except CheckpointError as error:
                refused += 1
                assert str(folder) in str(error), (number, str(error))
                assert all_of(engine) == before, number
                continue
            except Exception as error:
                raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}") from error
        engine.load_checkpoint(folder)  # what was taken may be anything that is whole
        before = all_of(engine)
    assert mutations.COUNT // 2 < refused < mutations.COUNT
    assert engine.load_checkpoint(folder) == {"seen": {1: (2, float("inf"))}}
    assert engine.global_steps == 2 and torch.isfinite(engine(torch.ones(6, 4)))


NAN = {"__kind__": "float", "value": "nan"}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda e: e.pop("buffers"), "has no buffers"),
        (lambda e: e.pop("client_state"), "has no client_state"),
        (lambda e: e.update(client_state=None), "client_state cannot be read"),
        (lambda e: e.update(client_state=[["seen", 1]]), "client_state cannot be read"),
        (
            lambda e: e["buffers"]["body.1.running_mean"].update(data="AAAA"),
            "3 bytes are not those of float32",
        ),
        (lambda e: e["buffers"].pop("body.1.running_var"), "buffer body.1.running_var is"),
        (lambda e: e["optimizer"]["groups"][0].update(lr="fast"), "parameter group 0 has lr = 'fast'"),
        (lambda e: e["optimizer"]["groups"][0].update(params=[]), "optimizer cannot be read"),
        (lambda e: e["optimizer"]["groups"][0].update(lr=NAN), "group 0 has lr = nan in the checkpoint"),
        (lambda e: e["optimizer"]["groups"][0].update(lr=10**400), "group 0 has lr = 1000"),
        (lambda e: e["optimizer"]["groups"][0].update(initial_lr=NAN), "group 0 has initial_lr = nan"),
        (lambda e: e["optimizer"]["groups"][0].update(betas=[2.0, 3.0]), "group 0 has betas = [2.0, 3.0]"),
        (lambda e: e["optimizer"]["groups"][0].update(eps=-1), "greater than or equal to 0"),
        (lambda e: e["optimizer"]["groups"].append({}), "2 parameter groups in the checkpoint"),
        (lambda e: e.update(lr_scheduler=None), "has no scheduler"),
        (lambda e: e["lr_scheduler"].update(step=3), "lr_scheduler cannot be read"),
        (lambda e: e["lr_scheduler"].pop("lr_lambdas"), "lr_scheduler cannot be read"),
        (lambda e: e["lr_scheduler"].update(x="", lr_lambdas=[[""]]), "lr_scheduler cannot be read"),
        (lambda e: e["lr_scheduler"].update(last_epoch="x"), "last_epoch = 'x' is no number"),
        (lambda e: e["lr_scheduler"].update(last_epoch=NAN), "last_epoch = nan is no number"),
        (lambda e: e["lr_scheduler"].update(_step_count=None), "_step_count = None is no number"),
        (lambda e: e["lr_scheduler"].update(base_lrs=[]), "base_lrs = [] is no number for each of 1"),
        (lambda e: e["lr_scheduler"].update(_last_lr=[NAN]), "_last_lr = [nan] is no number for each"),
        (lambda e: e["lr_scheduler"].update(base_lrs="x"), "base_lrs = 'x' is of another kind than [0.0"),
        (lambda e: e.update(random_of_ranks=[]), "random_of_ranks cannot be read (ValueError: [] is no list"),
        (lambda e: e.update(random_of_ranks={}), "random_of_ranks cannot be read (ValueError: {} is no list"),
        (lambda e: e["random"]["numpy"].__setitem__(2, 10**6), "random cannot be read"),
        (lambda e: e["random"]["torch"].update(data="", shape=[0]), "random cannot be read"),
        (lambda e: e.update(micro_steps=True), "micro_steps cannot be read"),
    ],
)
def test_what_is_wrong_is_named(change, said, engine, tmp_path, monkeypatch):
    extra = json.loads(_core.manifest(str(tmp_path / "saved"))["extra_json"])
    change(extra)
    pretend(monkeypatch, tmp_path / "saved", json.dumps(extra))
    before = all_of(engine)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(tmp_path / "saved")
    assert said in str(error.value)
    assert all_of(engine) == before


class Own(StepLR):
    """A scheduler of the user's, with values that come and go."""

    best, seen = None, ()

    def step(self, *metrics):
        super().step()
        if metrics:
            self.best, self.seen = float(metrics[0]), [*self.seen, metrics[0]]


SCHEDULERS = [
    lambda o: ReduceLROnPlateau(o, patience=0),
    lambda o: OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2)], [2]),
    lambda o: MultiStepLR(o, [1, 2, 2]),
    lambda o: CosineAnnealingWarmRestarts(o, 2),
    lambda o: LambdaLR(o, lambda step: 1 - 0.7 * step),  # below zero at the end
    lambda o: Own(o, 2),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_what_was_saved_loads_into_a_scheduler_that_is_new_or_has_gone_on(make, config, tmp_path):
    def one_step(engine):
        engine.backward(engine(torch.ones(6, 4)))
        engine.optimizer.step()
        metrics = (float("nan"),) if isinstance(engine.lr_scheduler, (ReduceLROnPlateau, Own)) else ()
        engine.lr_scheduler.step(*metrics)

    def state_of(engine):
        return repr(engine.lr_scheduler.state_dict()), repr(engine.optimizer.hyper_parameters())

    with contextlib.ExitStack() as stack:
        first, second = (overspill.initialize(Net(), config("host"))[0] for _ in range(2))
        for engine in (first, second):
            stack.callback(engine.close)
            engine.lr_scheduler = make(engine.optimizer)
        states = []
        for step in range(4):
            first.save_checkpoint(tmp_path / str(step))
            states.append(state_of(first))
            one_step(first)
        for step in (3, 0, 2):  # on, back, on
            second.load_checkpoint(tmp_path / str(step))
            assert state_of(second)[1] == states[step][1]
            one_step(second)
        first.load_checkpoint(tmp_path / "0")


def test_weights_that_do_not_load_leave_the_scheduler_as_it_was(engine, tmp_path):
    before = all_of(engine)
    data = tmp_path / "saved/resident.bin"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path / "saved")
    assert all_of(engine) == before


def after(read, act):
    """`read`, and then something happens on the disk."""

    def patched(folder):
        found = read(folder)
        act()
        return found

    return patched


def test_a_link_that_moves_meanwhile_gives_the_whole_of_one_checkpoint(engine, tmp_path, monkeypatch):
    """As a running job's `latest`. Once counts and scheduler were of the one, and the weights of the other."""
    latest, next_one = tmp_path / "latest", tmp_path / "next"
    engine.save_checkpoint(tmp_path / "newer")
    latest.symlink_to("saved")
    next_one.symlink_to("newer")
    monkeypatch.setattr(_core, "manifest", after(_core.manifest, lambda: next_one.rename(latest)))
    engine.load_checkpoint(latest)
    monkeypatch.undo()
    loaded = all_of(engine)
    engine.load_checkpoint(tmp_path / "saved")
    assert latest.resolve() == tmp_path / "newer" and all_of(engine) == loaded and engine.global_steps == 2


def test_a_folder_that_is_replaced_meanwhile_is_refused_by_name(engine, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    engine.save_checkpoint(tmp_path / "newer")
    _, _, scheduler, *counts = all_of(engine)[:5]

    def replace():
        folder.rename(tmp_path / "older")
        (tmp_path / "newer").rename(folder)

    monkeypatch.setattr(_core, "manifest", after(_core.manifest, replace))
    with pytest.raises(CheckpointError, match=f"{folder} was replaced while it was read"):
        engine.load_checkpoint(folder)
    monkeypatch.undo()
    assert all_of(engine)[2:5] == [scheduler, *counts]
    engine.load_checkpoint(folder)


def test_a_checkpoint_of_another_program_is_refused(engine, tmp_path):
    engine._core.save(str(tmp_path / "other"), "{}")
    before = all_of(engine)
    with pytest.raises(CheckpointError, match="another program wrote it"):
        engine.load_checkpoint(tmp_path / "other")
    assert all_of(engine) == before


def test_states_of_more_gpus_than_there_are_here_are_restored_for_those(monkeypatch):
    saved = state.random_states()
    mine, theirs = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8) * 4
    saved["cuda"] = [state.tensor_to_json(mine), state.tensor_to_json(theirs)]
    state.check_random_states(saved)
    given = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    state.restore_random_states(saved)
    assert len(given) == 1 and len(given[0]) == 1 and torch.equal(given[0][0], mine)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (torch.zeros(15, dtype=torch.uint8), "16 bytes"),
        (torch.zeros(4, 4, dtype=torch.uint8), "16 bytes"),
        (torch.zeros(2, dtype=torch.int64), "16 bytes"),
        (torch.tensor([7, 3]).view(torch.uint8), "no multiple of 4"),
    ],
)
def test_a_state_that_no_gpu_takes_is_refused_before_anything_is_changed(raw, why):
    saved = {**state.random_states(), "cuda": [state.tensor_to_json(raw)]}
    with pytest.raises(ValueError, match=why):
        state.check_random_states(saved)
