"""load_checkpoint before the first step reads each byte once. One that meets damage leaves an engine which says so,
until another checkpoint comes through."""

import contextlib

import pytest
import torch
from checkpoint_scene import damage
from torch import nn

import overspill
from overspill import checkpointing

CONFIG = {"budget": {"host": "256MiB"}, "optimizer": {"type": "AdamW", "lr": 1e-2}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def started():
    return contextlib.closing(overspill.initialize(model(), CONFIG)[0])


def trained(engine, steps: int) -> None:
    for step in range(steps):
        batch = torch.full((2, 64), 0.1 * (1 + step))
        engine.backward(engine(batch).square().mean())
        engine.step()


def weights(engine) -> list[torch.Tensor]:
    return [value.clone() for value in engine.state_dict().values()]


@pytest.fixture
def saved(tmp_path):
    """step-1 is whole, step-2 is not. Returns the weights of step-1."""
    with started() as engine:
        trained(engine, 1)
        engine.save_checkpoint(tmp_path / "step-1")
        first = weights(engine)
        trained(engine, 1)
        engine.save_checkpoint(tmp_path / "step-2")
    damage(tmp_path / "step-2")
    return first


def test_an_engine_that_holds_parts_of_two_models_says_so(saved, tmp_path):
    with started() as engine:
        with pytest.raises(overspill.CheckpointError, match="corrupt"):
            engine.load_checkpoint(tmp_path / "step-2")
        for call in (
            lambda: engine(torch.zeros(2, 64)),
            engine.state_dict,
            lambda: engine.save_checkpoint(tmp_path / "step-3"),
            engine.step,
        ):
            with pytest.raises(
                overspill.CheckpointError, match="step-2 was loaded before damage was found in it"
            ):
                call()
        assert not (tmp_path / "step-3").exists()
        engine.load_checkpoint(tmp_path / "step-1")
        assert all(map(torch.equal, weights(engine), saved))
        trained(engine, 1)
        engine.save_checkpoint(tmp_path / "step-3")


def test_an_interrupted_train_batch_is_in_no_way_of_the_next_load(saved, tmp_path):
    with started() as engine:
        with pytest.raises(overspill.CheckpointError, match="corrupt"):
            engine.load_checkpoint(tmp_path / "step-2")
        with pytest.raises(overspill.CheckpointError, match="step-2 was loaded before"):
            engine.train_batch([torch.zeros(2, 64)], lambda batch: engine(batch).square().mean())
        engine.load_checkpoint(tmp_path / "step-1")
        assert all(map(torch.equal, weights(engine), saved))
        trained(engine, 1)


def test_a_part_of_another_checkpoint_is_refused_and_all_of_it_is_not(saved, tmp_path):
    with started() as engine:
        with pytest.raises(overspill.CheckpointError, match="corrupt"):
            engine.load_checkpoint(tmp_path / "step-2")
        with pytest.raises(overspill.CheckpointError, match="Load all of another checkpoint"):
            engine.load_checkpoint(tmp_path / "step-1", weights_only=True)
        engine.load_checkpoint(tmp_path / "step-1")
        assert all(map(torch.equal, weights(engine), saved))


def test_weights_that_were_given_since_are_not_lost(saved, tmp_path):
    with started() as engine:
        engine.load_state_dict({name: value + 1 for name, value in engine.state_dict().items()})
        before = weights(engine)
        with pytest.raises(overspill.CheckpointError, match="corrupt"):
            engine.load_checkpoint(tmp_path / "step-2")
        assert all(map(torch.equal, weights(engine), before))


def test_ctrl_c_during_a_load_comes_when_all_is_restored(saved, tmp_path, monkeypatch):
    def interrupted(results, function, *arguments):
        results.append(function(*arguments))
        raise KeyboardInterrupt

    with started() as engine:
        monkeypatch.setattr(checkpointing, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(tmp_path / "step-1")
        assert engine.global_steps == 1
        assert all(map(torch.equal, weights(engine), saved))


def test_it_can_be_closed(saved, tmp_path):
    engine = overspill.initialize(model(), CONFIG)[0]
    with pytest.raises(overspill.CheckpointError, match="corrupt"):
        engine.load_checkpoint(tmp_path / "step-2")
    engine.close()


def test_fall_back_goes_past_it(saved, tmp_path):
    with started() as engine:
        with pytest.raises(overspill.CheckpointError, match="corrupt"):
            engine.load_checkpoint(tmp_path / "step-2")
        with pytest.warns(UserWarning, match="skipped .*step-2"):
            engine.load_checkpoint(tmp_path, fall_back=True)
        assert all(map(torch.equal, weights(engine), saved))


def test_steps_are_not_lost_to_a_damaged_checkpoint(saved, tmp_path):
    with started() as engine:
        trained(engine, 1)
        with pytest.raises(overspill.CheckpointError, match="corrupt"):
            engine.load_checkpoint(tmp_path / "step-2")
        assert all(map(torch.equal, weights(engine), saved))
        trained(engine, 1)
