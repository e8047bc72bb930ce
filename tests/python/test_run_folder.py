"""A run's folder: one process at a time, saves that find no room, saves by time."""

import errno
import json
import os
import re
import shutil
import socket

import disks
import pytest
import tiny

from overspill.cli import parser, run_lock
from overspill.cli.chosen import choose
from overspill.cli.common import CliError
from overspill.cli.run_folder import RunFolder
from overspill.cli.run_lock import RunLock


def test_a_second_process_is_refused_by_name(on_disk, tmp_path, capsys):
    out = tmp_path / "out"
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    before = tiny.tree(out)
    held = RunLock(out)
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 2)
    assert f"--out {out} is in use by process {os.getpid()} on {socket.gethostname()}" in message
    held.close()
    assert tiny.tree(out) == before
    on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 2)


def test_of_two_that_start_one_run_the_later_is_refused(on_disk, tmp_path, capsys, monkeypatch):
    """Both found the folder free; the other was faster with its model."""
    out = tmp_path / "out"
    out.mkdir()
    held = RunLock(out)
    assert "is in use by process" in on_disk.fails(capsys, *on_disk.run(out, steps=1))
    held.close()
    begin = RunFolder.begin

    def after_the_other(self):
        on_disk.ok(capsys, *on_disk.run(out, steps=1, seed=7))
        begin(self)

    monkeypatch.setattr(RunFolder, "begin", lambda self: (monkeypatch.undo(), after_the_other(self)))
    assert "holds a run; add --resume" in on_disk.fails(capsys, *on_disk.run(out, steps=1))
    assert len(tiny.log(out)) == 1


def lay_link(out):
    (out.parent / "notes").write_text("mine")
    (out / "lock").symlink_to(out.parent / "notes")


def lay_dangling(out):
    (out / "lock").symlink_to(out.parent / "nowhere")


def lay_second_name(out):
    (out.parent / "notes").write_text("")
    os.link(out.parent / "notes", out / "lock")


@pytest.mark.parametrize(
    "lay, said",
    [
        (lambda out: (out / "lock").write_text("my thesis"), "holds something that Overspill did not write"),
        (lambda out: (out / "lock").write_bytes(b"\xff\xfe"), "holds something that Overspill did not write"),
        (lay_link, "is a symbolic link"),
        (lay_dangling, "is a symbolic link"),
        (lay_second_name, "has 2 names"),
        (lambda out: os.mkfifo(out / "lock"), "is no file"),
        (lambda out: (out / "lock").mkdir(), "is no file"),
    ],
)
def test_what_has_the_name_of_the_lock_and_is_none_stays_as_it_is(lay, said, tmp_path):
    (tmp_path / "out").mkdir()
    lay(tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(CliError, match=said) as error:
        RunLock(tmp_path / "out")
    assert f"{tmp_path}/out/lock" in str(error.value) and "--out" in str(error.value)
    assert tree(tmp_path) == before


def tree(folder) -> dict:
    """Names below a folder, with what is under them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else os.readlink(path) if path.is_symlink() else None
        found[path] = (status.st_mode, status.st_mtime_ns, content)
    return found


ELSEWHERE = "process 7 on node-b\n00000000-0000-0000-0000-000000000000\n"


def test_a_lock_that_a_process_of_another_machine_wrote_is_taken_for_held(tmp_path, monkeypatch):
    """Where locks end at a machine's border: NFS with local locks, some of FUSE."""
    lock = tmp_path / "lock"
    lock.write_text(ELSEWHERE)
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "OF_ONE_MACHINE", frozenset())
        with pytest.raises(CliError, match=f"taken by process 7 on node-b; .*remove {lock}"):
            RunLock(tmp_path)
        assert lock.read_text() == ELSEWHERE
        lock.unlink()
        held = RunLock(tmp_path)
        written = lock.read_text()
        held.close()
        assert lock.read_text() == "", "released"
        RunLock(tmp_path).close()
        lock.write_text(written)  # killed, on this machine: its lock says enough
        RunLock(tmp_path).close()
    lock.write_text(ELSEWHERE)
    with lock.open() as file:
        if not run_lock.is_of_one_machine(file.fileno()):
            pytest.skip(
                "what the file system here is cannot be known: a root folder of chroot has no mount of its own"
            )
    RunLock(tmp_path).close()  # on a disk of this machine a free lock is free


def test_a_picture_of_the_run_is_not_written_through_a_link(on_disk, tmp_path, capsys):
    out, photo = tmp_path / "out", tmp_path / "photo.png"
    photo.write_text("mine")
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    (out / "plot.png").unlink()
    (out / "plot.png").symlink_to(photo)
    on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 2)
    assert photo.read_text() == "mine"
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG") and not (out / "plot.png").is_symlink()


@pytest.mark.parametrize("option", ["cache", "nvme"])
def test_what_a_run_keeps_in_its_own_folder_is_not_something_else(
    option, on_disk, tmp_path, capsys, monkeypatch
):
    """Once what the start itself had made there was an error, then what one had made that was broken off."""
    out = tmp_path / "out"
    out.mkdir()
    started = on_disk.run(out, steps=1, **{option: out / "cache" if option == "cache" else out})
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "begin", interrupted)
        assert on_disk.main(capsys, *started)[0] == 130
    (out / ("cache/begun" if option == "cache" else "overspill-left-by-a-kill")).mkdir()
    on_disk.ok(capsys, *started)


@pytest.mark.parametrize("named", ["in place", "through a link", "as a link", "by --config"])
def test_a_runs_own_folders_are_known_however_they_are_named(named, on_disk, tmp_path, capsys, monkeypatch):
    real = tmp_path / "real"
    for name in ("run/nvme", "disk"):
        (real / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    out = (tmp_path / "link" if named == "through a link" else real) / "run"
    if named == "as a link":
        (real / "run/nvme").rmdir()
        (real / "run/nvme").symlink_to(real / "disk")
    options = {"steps": 1, "nvme": out / "nvme"}
    if named == "by --config":
        values = json.loads(on_disk.config.read_text())
        values["budget"] = values.get("budget", {}) | {"nvme": [str(out / "nvme")]}
        (tmp_path / "own.json").write_text(json.dumps(values))
        options |= {"nvme": None, "config": tmp_path / "own.json"}
    monkeypatch.setattr(RunFolder, "begin", interrupted)
    assert on_disk.main(capsys, *on_disk.run(out, **options))[0] == 130  # so it came as far as that
    (out / "letters").symlink_to("letters")  # to itself
    message = on_disk.fails(capsys, *on_disk.run(out, **options))
    assert f"--out {out} holds something else (letters)" in message


def interrupted(self):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda run: [], "an object is expected, not a list"),
        (lambda run: {}, "settings is missing"),
        (lambda run: run | {"heldout": 3}, "heldout is a number"),
        (lambda run: run | {"heldout": {"0": "low"}}, "heldout.0 = 'low' is no loss at a step"),
        (lambda run: run | {"heldout": {"-1": 2.0}}, "heldout.-1 = 2.0 is no loss"),
        (
            lambda run: run | {"settings": run["settings"] | {"seq_len": "long"}},
            "settings.seq_len = 'long' is a text",
        ),
        (lambda run: run | {"typed": {"batch": True}}, "typed.batch = True is a truth value"),
        (
            lambda run: run | {"config": {"path": "a"}},
            "config = {'path': 'a'} is no object with just these values: path, values, folder",
        ),
        (lambda run: run | {"went_on_from": {"checkpoint": 1, "others_set_aside": True}}, "went_on_from = "),
        (lambda run: run | {"data_digest": None}, "data_digest is null"),
        (lambda run: run | {"saved": True}, "saved = True is no step that was saved"),
        (lambda run: run | {"saved": "2"}, "saved is a text"),
    ],
)
def test_a_damaged_record_of_a_run_is_named(change, said, on_disk, tmp_path, capsys):
    """Once an error that named nothing: a key, or a type."""
    out = tmp_path / "out"
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    file = out / "run.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    before = tiny.tree(out)
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 2)
    assert f"{file} is damaged: {said}" in message and "start a new run in another --out" in message
    assert tiny.tree(out) == before


def both(**changed):
    """A damage to a setting where it is typed and where it counts."""
    return lambda run: run | {part: run[part] | changed for part in ("settings", "typed")}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda run: run | {"typed": None}, "typed is null"),
        (lambda run: run | {"numbers": None}, "numbers is null"),
        (lambda run: run | {"went_on_from": None}, "went_on_from is null"),
        (lambda run: run | {"heldout": {"9" * 5000: 2.0}}, "heldout.99999999999999999999 = 2.0 is no loss"),
        (both(optimizer="foo"), "settings.optimizer = 'foo' is none of adamw, adam, "),
        (both(dtype="bf61"), "settings.dtype = 'bf61' is none of bf16, fp32"),
        (both(seq_len=0), "settings.seq_len = 0 is less than 2"),
        (both(warmup=-5), "settings.warmup = -5 is less than 0"),
        (both(save_minutes=float("nan")), "settings.save_minutes = nan is no number"),
        (both(batch=None), "settings.batch = None is null"),
        (both(nvme=[1]), "settings.nvme = [1] is a list"),
        (
            both(config="a\0b"),
            "settings.config = 'a\\x00b' is a text with characters that no file name can have",
        ),
        (
            lambda run: run | {"typed": run["typed"] | {"seq_len": 128}},
            "typed.seq_len = 128, and settings.seq_len = 32",
        ),
        (
            lambda run: run | {"went_on_from": {"checkpoint": "a\0b", "others_set_aside": True}},
            "went_on_from = {'checkpoint': 'a\\x00b'",
        ),
    ],
)
def test_a_damaged_value_of_a_record_is_named(change, said, tmp_path):
    """Once taken, or an error that named nothing, of what uses the value."""
    typed = {"model": "/m", "data": "/d", "host_budget": 1 << 30, "seq_len": 32}
    record = {"heldout": {"0": 2.0}, "data_digest": "x", **choose(typed).stored()}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(record))
    assert RunFolder(tmp_path).stored() == record
    file.write_text(json.dumps(change(record)))
    with pytest.raises(CliError, match=f"^{re.escape(f'{file} is damaged: {said}')}"):
        RunFolder(tmp_path).stored()


@pytest.mark.parametrize("text", [b"\xff", b"[" * 100_000, b""])
def test_a_record_of_a_run_that_is_no_json_is_named(text, tmp_path, capsys, on_disk):
    (tmp_path / "run.json").write_bytes(text)
    message = on_disk.fails(capsys, "train", "--out", tmp_path, "--resume")
    assert "run.json is damaged: it is no JSON" in message


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.json", b'[{"text": "the river waits"}]', "texts changed since the run began, or the run is"),
        ("a.txt", b"caf\xe9", "is no UTF-8: byte 3 is 0xe9"),
    ],
)
def test_a_run_of_a_version_that_read_data_otherwise_is_told_so(
    name, content, said, on_disk, tmp_path, capsys
):
    """Once the reason was said to be that the texts had changed, or that the data had to be converted."""
    out, texts = tmp_path / "out", tmp_path / "texts"
    shutil.copytree(on_disk.texts, texts)
    on_disk.ok(capsys, *on_disk.run(out, steps=1, data=texts))
    (texts / name).write_bytes(content)
    resume = ("train", "--out", out, "--resume", "--steps", 2)
    message = on_disk.fails(capsys, *resume)
    assert "earlier version" not in message
    run = json.loads((out / "run.json").read_text())
    del run["typed"]
    (out / "run.json").write_text(json.dumps(run))
    message = on_disk.fails(capsys, *resume)
    assert said in message and "earlier version, which took .ndjson and .json files for text" in message
    assert "start a new run" in message


def test_a_start_that_was_killed_does_not_stand_in_the_next_ones_way(on_disk, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"

    replace = type(out).replace

    def killed(self, path):
        if path == out / "run.json":
            raise RuntimeError("killed")
        return replace(self, path)  # of the token cache, where this test is the first that needs it

    monkeypatch.setattr(type(out), "replace", killed)
    on_disk.fails(capsys, *on_disk.run(out, steps=1))
    monkeypatch.undo()
    (out / "run.json.part-0123abcd").touch()
    (out / "plot.png.part-0123abcd").touch()
    assert {"checkpoints", "lock"} < {p.name for p in out.iterdir()}
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    assert not list(out.glob("*.part*"))


def test_where_nothing_can_be_locked_it_is_said(on_disk, tmp_path, capsys, monkeypatch):
    import fcntl

    def refused(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    code, _, err = on_disk.main(capsys, *on_disk.run(tmp_path / "out", steps=1))
    assert code == 0
    assert "cannot be locked (No locks available)" in err and "start only one" in err


class Filling:
    """A hook of train: from one step to another the disk has no room."""

    def __init__(self, folder, first: int, last: int):
        self.ballast, self.first, self.last = folder / "ballast", first, last

    def __call__(self, loop) -> None:
        if loop.step == self.first:
            disks.fill(self.ballast)
        if loop.step == self.last:
            self.ballast.unlink()


def train(on_disk, capsys, out, hook, **options) -> tuple[int, str]:
    """Exit code and stderr of a command with a hook."""
    from overspill.cli.train import train

    arguments = [str(a) for a in on_disk.run(out, **options)]
    capsys.readouterr()
    try:
        code = train(parser().parse_args(arguments), hook)[0]
    except CliError as error:
        return 1, f"{capsys.readouterr().err}{error}"
    return code, capsys.readouterr().err


def test_training_goes_on_when_a_save_finds_no_room(on_disk, tmp_path, capsys):
    straight = tmp_path / "straight"
    on_disk.ok(capsys, *on_disk.run(straight, steps=5))
    with disks.small(tmp_path / "disk", "8m") as disk:
        hook = Filling(disk, first=2, last=4)
        code, err = train(on_disk, capsys, disk / "out", hook, steps=5, save_every=1, blocking_saves=True)
        assert code == 0, err
        assert "the save at step 3 failed: " in err and "space" in err
        assert f"the last good checkpoint is {disk}/out/checkpoints/step-000002" in err
        assert tiny.losses(disk / "out") == tiny.losses(straight), "lines of the log were lost"
        assert [p.name for p in (disk / "out/checkpoints").iterdir()] == ["step-000005"]


def test_a_run_whose_last_save_failed_says_so_with_its_exit_code(on_disk, tmp_path, capsys):
    with disks.small(tmp_path / "disk", "8m") as disk:
        code, err = train(
            on_disk, capsys, disk / "out", Filling(disk, 2, 99), steps=4, save_every=2, blocking_saves=True
        )
        assert code == 1
        assert "the last save failed: " in err
        assert f"make room and go on with: overspill train --out {disk}/out --resume (" in err
        assert "going on with --resume reserves " in err.rpartition("--resume (")[2]
        assert [p.name for p in (disk / "out/checkpoints").iterdir()] == ["step-000002"]
        (disk / "ballast").unlink()
        on_disk.ok(capsys, "train", "--out", disk / "out", "--resume")
        assert [p.name for p in (disk / "out/checkpoints").iterdir()] == ["step-000004"]


def test_a_run_that_an_error_ends_says_what_going_on_needs(on_disk, tmp_path, capsys):
    def fails(loop):
        if loop.step == 2:
            raise RuntimeError("a GPU fell off the bus")

    out = tmp_path / "out"
    code, err = train(on_disk, capsys, out, fails, steps=3, save_every=1, blocking_saves=True)
    assert code == 1 and "a GPU fell off the bus" in err
    assert f"the last good checkpoint is {out}/checkpoints/step-000002, go on with: overspill train" in err
    assert "going on with --resume needs no more of the disk" in err.rpartition("--resume (")[2]


def test_a_run_saves_by_time_unless_told_otherwise(on_disk, tmp_path, capsys):
    assert parser().parse_args(["train", "--out", "x"]).save_minutes is None
    said = on_disk.ok(capsys, *on_disk.run(tmp_path / "often", steps=3, save_minutes=1e-9, keep=9))
    assert "saves every 1e-09 minutes, at the end; keeps 9" in said
    assert len(list((tmp_path / "often/checkpoints").iterdir())) == 3
    said = on_disk.ok(capsys, *on_disk.run(tmp_path / "default", steps=3, keep=9))
    assert "saves every 30 minutes, at the end; keeps 9" in said
    assert len(list((tmp_path / "default/checkpoints").iterdir())) == 1


def test_no_save_on_the_way_where_no_step_can_follow_it(on_disk, tmp_path, capsys):
    values = json.loads(on_disk.config.read_text())
    values["engine"]["train_after_save"] = False
    (tmp_path / "once.json").write_text(json.dumps(values))
    options = {"config": tmp_path / "once.json", "steps": 2}
    message = on_disk.fails(capsys, *on_disk.run(tmp_path / "out", save_every=1, **options))
    assert "--save-every 1 (typed" in message and "= false" in message and "add --save-every 0" in message
    options |= {"save_every": 0}
    message = on_disk.fails(capsys, *on_disk.run(tmp_path / "out", save_minutes=5, **options))
    assert "--save-minutes 5 (typed" in message and "--save-every" not in message
    said = on_disk.ok(capsys, *on_disk.run(tmp_path / "out", **options))
    assert "saves at the end; keeps 1" in said


def test_what_must_be_durable_is_synced(on_disk, tmp_path, capsys, monkeypatch):
    """Names too: a file in a folder that was not synced is gone after a power cut."""
    synced, fsync = set(), os.fsync

    def watched(handle):
        # A file that is not finished has a random name.
        synced.add(re.sub(r"\.part-[0-9a-f]{8}$", "", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    out = tmp_path / "out"
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    assert {str(tmp_path), str(out), str(out / "log.jsonl"), str(out / "run.json")} <= synced
    checkpoint = out / "checkpoints/step-000001"
    assert {str(checkpoint), str(checkpoint / "hf.part")} <= synced
    assert {str(checkpoint / "hf.part" / p.name) for p in (checkpoint / "hf").iterdir()} <= synced


def test_what_ended_a_run_is_not_hidden_by_the_disk_of_its_folder(on_disk, tmp_path, capsys, monkeypatch):
    """One disk has failed, and with it the engine. Once the folder's error came in place of the engine's."""
    from overspill.cli.loop import Loop

    out, step = tmp_path / "out", Loop.train_step

    def refused(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(out))

    def fails(self):
        if self.step == 1:
            monkeypatch.setattr(os, "ftruncate", refused)
            monkeypatch.setattr(os, "listdir", refused)
            monkeypatch.setattr(type(out), "iterdir", refused)
            raise RuntimeError("the engine has failed")
        return step(self)

    monkeypatch.setattr(Loop, "train_step", fails)
    message = on_disk.fails(capsys, *on_disk.run(out, steps=2, save_every=1, blocking_saves=True))
    monkeypatch.undo()
    assert "the engine has failed" in message and "Input/output error" not in message
    assert f"the last good checkpoint is {out}/checkpoints/step-000001, go on with: " in message


def test_a_run_that_went_well_ends_well_whatever_became_of_its_log(on_disk, tmp_path, capsys, monkeypatch):
    """Once its end read the log for a summary that the command does not print."""
    from overspill.cli.session import Session

    out, take = tmp_path / "out", Session._take

    def and_harm(self, path, blocking):
        take(self, path, blocking)
        log = out / "log.jsonl"
        log.write_bytes(b"\xff\n" + log.read_bytes())

    monkeypatch.setattr(Session, "_take", and_harm)
    code, said, err = on_disk.main(capsys, *on_disk.run(out, steps=2))
    assert code == 0, err
    assert f"checkpoint {out}/checkpoints/step-000002" in said
    assert "plot.png was not written" in err and "log.jsonl:1 is damaged" in err
