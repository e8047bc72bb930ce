"""save_checkpoint(blocking=False): the checkpoint has the states of the call, training goes on as without it, and what
went wrong is raised."""

import os
import subprocess
import sys

import pytest
import torch
from checkpoint_scene import whole

from overspill import CheckpointError, _core, retention, saves

STEPS = 6


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))


def step(engine, number):
    torch.manual_seed(100 + number)
    loss = engine(torch.randn(4, 32)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_it_has_the_states_of_the_call_and_training_is_what_it_was(start, tmp_path, placement):
    plain = start(model(), placement=placement)
    losses = [step(plain, number) for number in range(STEPS)]
    engine = start(model(), placement=placement, checkpoints_kept=STEPS)
    for number in range(STEPS):
        assert step(engine, number) == losses[number]
        engine.save_checkpoint(tmp_path / f"step-{number + 1}", {"number": number}, blocking=False)
    engine.wait_for_save()
    progress = engine.save_progress()
    assert not progress.under_way and progress.done_bytes == progress.bytes > 0
    assert progress.folder == tmp_path / f"step-{STEPS}"
    for number in range(STEPS):
        again = start(model())
        assert again.load_checkpoint(tmp_path / f"step-{number + 1}") == {"number": number}
        assert [step(again, later) for later in range(number + 1, STEPS)] == losses[number + 1 :]


def test_older_ones_go_when_it_was_read_back(start, tmp_path):
    engine = start(model())
    for number in range(5):
        step(engine, number)
        engine.save_checkpoint(tmp_path / f"step-{number + 1}", keep_last=2, keep_every=3, blocking=False)
    engine.wait_for_save()
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4", "step-5"]
    assert saves.verified_at(tmp_path / "step-5") or not can_note(tmp_path / "step-5")


def test_the_current_folder_may_change_meanwhile(start, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = start(model())
    engine.save_checkpoint("step-0", keep_last=1, blocking=False)
    os.chdir(tmp_path / "elsewhere")
    engine.save_checkpoint("../step-1", keep_last=1, blocking=False)
    os.chdir(tmp_path)
    engine.wait_for_save()
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step-1"] and not os.listdir(tmp_path / "elsewhere")


def can_note(path):
    try:
        os.setxattr(path / "manifest.json", "user.test", b"1")
    except OSError:
        return False
    return True


def test_one_that_is_damaged_is_raised_by_the_next_call_and_the_older_stay(start, tmp_path, monkeypatch):
    engine = start(model())
    engine.save_checkpoint(tmp_path / "step-0", keep_last=1, blocking=False)
    engine.wait_for_save()
    read_back = retention.read_back

    def damaged(path, progress=None):
        data = path / "resident.bin"
        data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
        read_back(path, progress)

    monkeypatch.setattr(retention, "read_back", damaged)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "step-1", keep_last=1, blocking=False)
    with pytest.raises(CheckpointError, match=r"step-1 was read back and is damaged"):
        engine.save_checkpoint(tmp_path / "step-2")
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1.damaged-1"]
    engine.save_checkpoint(tmp_path / "step-2")


def fill(path):
    """Something that keeps rank 0 from giving the folder its name."""
    path.mkdir()
    (path / "in the way").write_text("")


@pytest.mark.parametrize("call", ["wait_for_save", "save_checkpoint", "load_checkpoint", "close"])
def test_what_went_wrong_is_raised_once(start, tmp_path, call, capfd, monkeypatch):
    engine = start(model())
    engine.save_checkpoint(tmp_path / "good")
    fill_at = tmp_path / "bad"
    begin = _core.Engine.save_in_background

    def and_fill(core, folder, write_beside):
        def beside(unfinished):
            fill(fill_at)
            return write_beside(unfinished)

        begin(core, folder, beside)

    monkeypatch.setattr(_core.Engine, "save_in_background", and_fill)
    engine.save_checkpoint(fill_at, blocking=False)
    acts = {
        "wait_for_save": engine.wait_for_save,
        "save_checkpoint": lambda: engine.save_checkpoint(tmp_path / "next"),
        "load_checkpoint": lambda: engine.load_checkpoint(tmp_path / "good"),
        "close": engine.close,
    }
    with pytest.raises(CheckpointError, match="bad"):
        acts[call]()
    assert "bad could not be saved" in capfd.readouterr().err
    assert not (tmp_path / "bad.partial").exists()
    if call != "close":
        acts[call]()


def test_edits_of_the_script_come_after(start, tmp_path):
    engine = start(model())
    step(engine, 0)
    before = engine.weight(engine.module[0].weight)
    engine.save_checkpoint(tmp_path / "saved", blocking=False)
    with engine.gathered(engine.module[0].weight), torch.no_grad():
        engine.module[0].weight.mul_(2)
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(engine.weight(engine.module[0].weight), before)


class Doubling(torch.nn.Module):
    """Changes its weight in forward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(1.0625)
        return self.linear(x)


def test_weights_that_forward_changes_are_saved_at_once_or_the_save_fails(start, tmp_path):
    engine = start(Doubling())

    def one():
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()

    one()
    before = engine.weight(engine.module.linear.weight)
    engine.save_checkpoint(tmp_path / "saved", blocking=False)
    one()
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(engine.weight(engine.module.linear.weight), before)


def test_what_is_no_switch_is_refused(start, tmp_path):
    with pytest.raises(TypeError, match="blocking = 0: True or False is expected"):
        start(model()).save_checkpoint(tmp_path / "saved", blocking=0)


ENDS = """
import sys, torch, overspill
engine, *_ = overspill.initialize(torch.nn.Linear(512, 512), {"optimizer": {"type": "AdamW"},
    "budget": {"host": "64MiB"}})
engine.save_checkpoint(sys.argv[1], blocking=False)
"""


def test_the_end_of_the_process_waits_for_it(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path / "saved")], check=True, timeout=120)
    assert whole(tmp_path / "saved")
