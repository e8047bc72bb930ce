"""overspill train saves while it trains: what it says of a save, and which checkpoints stay."""

import os
import signal
import time

import tiny
from checkpoint_scene import whole

from overspill import Engine, _core, retention
from overspill.cli.save_orders import SaveOrders
from overspill.cli.session import Session


def names(out) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def hooked(monkeypatch, hook) -> None:
    """A hook of train, called after each step."""
    train = Session.train
    monkeypatch.setattr(Session, "train", lambda self, _: train(self, hook))


def test_training_stands_still_for_the_last_save_alone(on_disk, tmp_path, capsys, monkeypatch):
    saved, save = [], Engine.save_checkpoint

    def watched(self, folder, *given, blocking=True, **named):
        saved.append((os.path.basename(folder), blocking))
        save(self, folder, *given, blocking=blocking, **named)

    monkeypatch.setattr(Engine, "save_checkpoint", watched)
    on_disk.ok(capsys, *on_disk.run(tmp_path / "behind", steps=3, save_every=1))
    assert saved == [("step-000001", False), ("step-000002", False), ("step-000003", True)]
    saved.clear()
    on_disk.ok(capsys, *on_disk.run(tmp_path / "blocking", steps=2, save_every=1, blocking_saves=True))
    assert saved == [("step-000001", True), ("step-000002", True)]
    assert tiny.losses(tmp_path / "blocking").items() < tiny.losses(tmp_path / "behind").items()


def test_the_log_has_how_long_a_save_kept_training(on_disk, tmp_path, capsys):
    on_disk.ok(capsys, *on_disk.run(tmp_path / "out", steps=4, save_every=2, blocking_saves=True))
    spent = [record["save_seconds"] for record in tiny.log(tmp_path / "out")]
    assert spent[:2] == [0, 0] and spent[2] > 0 and spent[3] == 0


def test_a_save_is_told_once_it_is_whole(on_disk, tmp_path, capsys, monkeypatch):
    from overspill.cli.display import Display

    out, told, say = tmp_path / "out", [], Display.say

    def watched(self, text):
        if text.startswith("saved "):
            path = out / "checkpoints" / text.removeprefix("saved ")
            told.append((path.name, whole(path), (path / "hf").is_dir(), names(out)))
        say(self, text)

    monkeypatch.setattr(Display, "say", watched)
    said = on_disk.ok(capsys, *on_disk.run(out, steps=4, save_every=2, keep=1))
    first, last = "step-000002", "step-000004"
    assert told == [(first, True, True, [first]), (last, True, True, [last])]
    assert f"saved {first}\n" in said and f"saved {last}\n" in said


def test_every_so_many_steps_one_stays(on_disk, tmp_path, capsys):
    out = tmp_path / "out"
    said = on_disk.ok(capsys, *on_disk.run(out, steps=6, save_every=1, keep=2, keep_every=2))
    assert names(out) == ["step-000002", "step-000004", "step-000005", "step-000006"]
    assert "at the end; keeps 2 and those of every 2 steps" in said
    on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 7, "--keep-every", 4)
    assert names(out) == ["step-000004", "step-000006", "step-000007"]


def test_a_save_that_fails_behind_training_is_told_by_name(on_disk, tmp_path, capsys, monkeypatch):
    out, begin = tmp_path / "out", _core.Engine.save_in_background

    def and_fill(core, folder, write_beside):
        def beside(unfinished):
            if folder.endswith("step-000001"):
                os.mkdir(folder)
                (out / "checkpoints/step-000001/in the way").touch()
            return write_beside(unfinished)

        begin(core, folder, beside)

    monkeypatch.setattr(_core.Engine, "save_in_background", and_fill)
    code, said, err = on_disk.main(capsys, *on_disk.run(out, steps=3, save_every=1, keep=9))
    assert code == 0, err
    assert f"the save at step 1 failed: {out}/checkpoints/step-000001: cannot be put in place" in err
    assert "there is no checkpoint yet" in err and "saved step-000001" not in said
    assert "saved step-000002\n" in said and "saved step-000003\n" in said


def test_a_run_that_is_stopped_does_not_read_back_what_is_under_way(on_disk, tmp_path, capsys, monkeypatch):
    def without_end(_path, progress):
        while True:
            progress(0, 1)
            time.sleep(0.01)

    def stop(loop):
        if loop.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(retention, "read_back", without_end)
    hooked(monkeypatch, stop)
    out = tmp_path / "out"
    code, said, err = on_disk.main(capsys, *on_disk.run(out, steps=9, save_every=1, keep=1))
    assert code == 128 + signal.SIGTERM
    assert f"stopped at step 2; saved {out}/checkpoints/step-000002; go on with" in err
    assert names(out) == ["step-000001", "step-000002"] and "saved step-000002" in said
    assert all(whole(path) for path in (out / "checkpoints").iterdir())


def test_an_error_of_a_step_names_the_save_that_was_under_way(on_disk, tmp_path, capsys, monkeypatch):
    def fails(loop):
        if loop.step == 3:
            raise RuntimeError("a GPU fell off the bus")

    is_under_way = SaveOrders.is_under_way
    monkeypatch.setattr(SaveOrders, "is_under_way", lambda self: True)
    wait = SaveOrders._wait

    def really(self):
        with monkeypatch.context() as patch:
            patch.setattr(SaveOrders, "is_under_way", is_under_way)
            wait(self)

    monkeypatch.setattr(SaveOrders, "_wait", really)
    hooked(monkeypatch, fails)
    out = tmp_path / "out"
    err = on_disk.fails(capsys, *on_disk.run(out, steps=5, save_every=1, keep=9))
    assert "a GPU fell off the bus" in err
    last = f"the last good checkpoint is {out}/checkpoints/step-000002; the save at step 3 was under way, go on with"
    assert last in err
