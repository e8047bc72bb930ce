"""Checkpoints of optimizers that run their own code, where something comes in between: a handler of a signal, Ctrl-C, a
class of one's own ways, a pipe in the file's place."""

import os
import stat

import pytest
import torch
from own_states_scene import FILE, Odd, alike, groups_of, made, net, train, weights_of

import overspill
from overspill import _core, checkpointing, tensor_file

pytestmark = pytest.mark.filterwarnings("ignore:overspill. the engine has no update")


class Simple(torch.optim.Optimizer):
    """One average of each weight, in fp32."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group["lr"])

    def update(self, p, state, lr):
        average = state.setdefault("average", torch.zeros(p.shape))
        average.mul_(0.9).add_(p.grad.float())
        p.add_(average.to(p.dtype), alpha=-lr)


class Bare(Simple):
    """Its state is a tensor, and no dict of such."""

    def update(self, p, state, lr):
        self.state[p] = p.grad.clone()


class InPlace(Simple):
    """Loads into the tensors that it has."""

    def load_state_dict(self, state_dict):
        for p, entry in zip(self.param_groups[0]["params"], state_dict["state"].values(), strict=False):
            self.state[p]["average"].copy_(entry["average"])


class Copied(Simple):
    """Gives copies of its dicts."""

    def state_dict(self):
        given = super().state_dict()
        return given | {"state": {number: dict(entry) for number, entry in given["state"].items()}}


def of(start, kind, dtype=torch.float32, **settings):
    return made(start, kind, dtype, **settings)


def states(engine):
    return engine.optimizer.state_dict()["state"]


def test_what_could_not_be_loaded_is_not_saved(start, tmp_path):
    engine = of(start, Bare)
    train(engine, range(1))
    with pytest.raises(
        TypeError, match=r"Bare's state_dict is not as torch's optimizers give it \(.*no dict\)"
    ):
        engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("call", ["step", "save", "load", "give_back"])
def test_a_handler_that_calls_the_engine_inside_a_save_is_refused(start, tmp_path, monkeypatch, call):
    engine = of(start, Odd)
    train(engine, range(2))
    before = weights_of(engine)
    engine.save_checkpoint(tmp_path / "first")
    calls = {
        "step": lambda: engine.step(),
        "save": lambda: engine.save_checkpoint(tmp_path / "inner"),
        "load": lambda: engine.load_checkpoint(tmp_path / "first"),
        "give_back": lambda: engine.give_back(),
    }
    write, said = tensor_file.write, []

    def struck(*arguments):
        with pytest.raises(RuntimeError) as error:
            calls[call]()
        said.append(str(error.value))
        return write(*arguments)

    monkeypatch.setattr(tensor_file, "write", struck)
    engine.save_checkpoint(tmp_path / "saved")
    assert len(said) == 1 and "save_checkpoint is under way" in said[0]
    assert alike(weights_of(engine), before)
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path / "again")  # and nothing is refused from here on
    fresh = of(start, Odd)
    fresh.load_checkpoint(tmp_path / "saved")
    assert alike(states(fresh), states(engine))


def test_a_save_that_was_broken_off_refuses_nothing_later(start, tmp_path, monkeypatch):
    engine = of(start, Odd)
    train(engine, range(1))

    def struck(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_file, "write", struck)
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(tmp_path / "saved")
    monkeypatch.undo()
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")


def test_ctrl_c_right_after_the_weights_leaves_the_states_with_them(start, tmp_path, monkeypatch):
    engine = of(start, Simple)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    weights, kept = weights_of(engine), {k: dict(v) for k, v in states(engine).items()}
    kept = {k: {n: t.clone() for n, t in v.items()} for k, v in kept.items()}
    train(engine, range(2, 4))
    load = checkpointing._load_weights

    def struck(*arguments):
        load(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpointing, "_load_weights", struck)
    with pytest.raises(KeyboardInterrupt):
        engine.load_checkpoint(tmp_path / "saved")
    assert alike(weights_of(engine), weights) and alike(states(engine), kept)


def test_damaged_weights_change_nothing_of_a_class_that_loads_in_place(start, tmp_path):
    engine = of(start, InPlace)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    train(engine, range(2, 4))
    kept = {k: {n: t.clone() for n, t in v.items()} for k, v in states(engine).items()}
    path = tmp_path / "saved/resident.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(overspill.CheckpointError):
        engine.load_checkpoint(tmp_path / "saved")
    assert alike(states(engine), kept)


@pytest.mark.parametrize("kind", [Simple, Copied])
def test_states_keep_their_dtype_beside_narrower_weights(start, tmp_path, kind):
    engine = of(start, kind, torch.bfloat16)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    fresh = of(start, kind, torch.bfloat16)
    fresh.load_checkpoint(tmp_path / "saved")
    assert all(entry["average"].dtype is torch.float32 for entry in states(fresh).values())
    assert alike(states(fresh), states(engine))


@pytest.mark.parametrize("of_user", [True, False])
def test_what_a_hook_makes_of_a_state_stays(start, tmp_path, of_user):
    engine = of(start, Simple)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    model = net()
    user = Simple(groups_of(model, Simple))
    fresh = start(model, user)

    def zeroed(_, state_dict):
        made = {k: {n: torch.zeros_like(t) for n, t in v.items()} for k, v in state_dict["state"].items()}
        return state_dict | {"state": made}

    (user if of_user else fresh.optimizer).register_load_state_dict_pre_hook(zeroed)
    fresh.load_checkpoint(tmp_path / "saved")
    assert all(not entry["average"].any() for entry in states(fresh).values())


def test_a_pipe_or_a_folder_in_the_files_place_is_refused(start, tmp_path):
    engine = of(start, Simple)
    train(engine, range(1))
    for number, put in enumerate((os.mkfifo, os.mkdir)):
        folder = tmp_path / str(number)
        engine.save_checkpoint(folder)
        (folder / FILE).unlink()
        put(folder / FILE)
        for call in (engine.load_checkpoint, tensor_file.verify):
            with pytest.raises(_core.CheckpointError, match="it is no regular file"):
                call(folder)


def test_the_file_is_as_private_as_the_rest(start, tmp_path):
    engine = of(start, Simple)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").iterdir()}
    assert modes[FILE] == modes["manifest.json"]


def test_a_tensor_and_its_conjugate_are_two(start, tmp_path):
    class Complex(Simple):
        def update(self, p, state, lr):
            super().update(p, state, lr)
            state["c"] = torch.complex(state["average"], 2 * state["average"])
            state["conj"] = state["c"].clone().conj()

    engine = of(start, Complex)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    fresh = of(start, Complex)
    fresh.load_checkpoint(tmp_path / "saved")
    for entry in states(fresh).values():
        assert torch.equal(entry["conj"].resolve_conj(), entry["c"].conj().resolve_conj())
        assert entry["c"].imag.any()
