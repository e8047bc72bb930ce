"""Going on from an older checkpoint: later ones are set aside, what is saved then stays, and a kill loses nothing."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import tiny
from checkpoint_scene import damage, whole

from overspill import retention, saves
from overspill.cli.checkpoints import Checkpoints
from overspill.retention import Keep
from overspill.saves import FolderError, disk_bytes, is_complete


@pytest.fixture(scope="module")
def straight(on_disk):
    """A run of 6 steps that saved at 2, 4 and 6."""
    from overspill.cli import main

    out = on_disk.root / "rewind-straight"
    assert main([str(a) for a in on_disk.run(out, steps=6, save_every=2, keep=4)]) == 0
    return out


@pytest.fixture
def out(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "out")
    return tmp_path / "out"


def names(out) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def resume(bench, capsys, out, *options) -> tuple[str, str]:
    code, said, err = bench.main(capsys, "train", "--out", out, *options)
    assert code == 0, err
    return said, err


def test_what_was_saved_last_stays_and_what_was_left_is_set_aside(on_disk, straight, out, capsys):
    older = out / "checkpoints/step-000002"
    damage(out / "checkpoints/step-000006")
    _, err = resume(on_disk, capsys, out, "--resume", older, "--keep", 1, "--save-every", 1, "--steps", 5)
    assert names(out) == ["step-000004.abandoned-1", "step-000005", "step-000006.abandoned-1"]
    assert whole(out / "checkpoints/step-000005")
    assert "step-000004 is of the branch that was left; it is now" in err
    assert "they hold" in err and "delete them when you need them no more" in err
    expected = {step: loss for step, loss in tiny.losses(straight).items() if step <= 5}
    assert tiny.losses(out) == expected


def test_the_step_of_an_abandoned_checkpoint_is_saved_again(on_disk, straight, out, capsys):
    """Once a save of step 6 was skipped, and the damaged checkpoint there was called the run's."""
    damage(out / "checkpoints/step-000006")
    said, _ = resume(on_disk, capsys, out, "--resume", out / "checkpoints/step-000004", "--steps", 6)
    assert f"checkpoint {out}/checkpoints/step-000006\n" in said
    assert whole(out / "checkpoints/step-000006")
    assert tiny.losses(out) == tiny.losses(straight)


def test_a_rewound_run_that_saved_nothing_goes_on_where_it_was_rewound_to(on_disk, out, capsys, monkeypatch):
    from overspill.cli.loop import Loop

    def killed(self):
        raise RuntimeError("killed")

    monkeypatch.setattr(Loop, "train_step", killed)
    older = out / "checkpoints/step-000002"
    on_disk.fails(capsys, "train", "--out", out, "--resume", older)
    monkeypatch.undo()
    said, _ = resume(on_disk, capsys, out, "--resume", "--steps", 3)
    assert f"going on from {older}, step 2" in said
    assert "step-000003" in names(out)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_rewind_that_is_cut_short_is_finished_by_the_next_resume(cut, on_disk, out, capsys, monkeypatch):
    """Cut before each of its steps but the first: two renames, run.json before and after them, what is left over."""
    from overspill.cli.run_folder import RunFolder

    done = []

    def until_the_cut(step):
        def counted(*arguments):
            if len(done) == cut:
                raise RuntimeError("killed")
            done.append(step)
            return step(*arguments)

        return counted

    older = out / "checkpoints/step-000002"
    for owner, name in ((RunFolder, "write"), (Checkpoints, "set_aside"), (Checkpoints, "remove_leftovers")):
        monkeypatch.setattr(owner, name, until_the_cut(getattr(owner, name)))
    on_disk.fails(capsys, "train", "--out", out, "--resume", older)
    assert len(done) == cut
    monkeypatch.undo()
    said, _ = resume(on_disk, capsys, out, "--resume", "--steps", 3, "--keep", 1)
    assert f"going on from {older}, step 2" in said
    said, _ = resume(on_disk, capsys, out, "--resume", "--steps", 4)
    assert f"going on from {out}/checkpoints/step-000003, step 3" in said, "the rewind is over"


def killed(self, *_):
    raise RuntimeError("killed")


def test_a_checkpoint_from_elsewhere_is_gone_on_from_until_the_first_save(
    on_disk, straight, out, capsys, monkeypatch
):
    """None of the folder's own is its ancestor for sure: all are set aside, none is deleted."""
    from overspill.cli.loop import Loop

    elsewhere = out.parent / "copied"
    shutil.copytree(out / "checkpoints/step-000004", elsewhere)
    said, _ = resume(on_disk, capsys, out, "--resume", elsewhere, "--steps", 5, "--keep", 1)
    assert f"going on from {elsewhere}, step 4" in said
    aside = [f"step-00000{step}.abandoned-1" for step in (2, 4, 6)]
    assert sorted([*aside, "step-000005"]) == names(out)
    shutil.rmtree(out / "checkpoints/step-000005")
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 6)
    assert "the run saved step 5, and" in message and str(elsewhere) in message
    said, _ = resume(on_disk, capsys, out, "--resume", elsewhere, "--steps", 6)
    assert f"going on from {elsewhere}, step 4" in said
    assert tiny.losses(out) == tiny.losses(straight)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train_step", killed)
        on_disk.fails(capsys, "train", "--out", out, "--resume", elsewhere)
    elsewhere.rename(out.parent / "moved")
    message = on_disk.fails(capsys, "train", "--out", out, "--resume")
    assert f"went on from {elsewhere}, which is gone" in message and aside[0] in message


def test_a_run_that_is_done_names_the_checkpoint_that_it_went_on_from(on_disk, out, capsys):
    before = names(out)
    older = out / "checkpoints/step-000004"
    said, _ = resume(on_disk, capsys, out, "--resume", older, "--steps", 4)
    assert "step 4 is reached already, --steps is 4: nothing is trained" in said
    assert f"checkpoint {older}\n" in said
    assert names(out) == before and len(tiny.log(out)) == 6, "nothing was begun, so nothing is set aside"


def damage_when_read_back(monkeypatch, name):
    read_back = retention.read_back

    def badly(path, progress=None):
        if path.name == name:
            damage(path)
        read_back(path, progress)

    monkeypatch.setattr(retention, "read_back", badly)


def test_a_predecessor_goes_only_after_its_successor_was_read_back(on_disk, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    damage_when_read_back(monkeypatch, "step-000002")
    code, _, err = on_disk.main(capsys, *on_disk.run(out, steps=2, save_every=1, keep=1))
    assert code == 1 and "step-000002 was read back and is damaged, and is now " in err
    assert names(out) == ["step-000001", "step-000002.damaged-1"]
    assert whole(out / "checkpoints/step-000001")
    monkeypatch.undo()
    resume(on_disk, capsys, out, "--resume")
    assert names(out) == ["step-000002", "step-000002.damaged-1"]


def refused(*arguments):
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))


def test_a_damaged_save_that_cannot_be_set_aside_ends_no_run(on_disk, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    damage_when_read_back(monkeypatch, "step-000002")
    monkeypatch.setattr(saves, "rename_aside", refused)
    code, _, err = on_disk.main(capsys, *on_disk.run(out, steps=2, save_every=1, keep=1))
    assert code == 1 and "overspill train: error: the last save failed: " in err
    assert "could not be set aside (Input/output error), so move it away" in err
    assert f"the newest checkpoint is {out}/checkpoints/step-000001" in err
    assert names(out) == ["step-000001", "step-000002"] and (out / "plot.png").exists()


def test_a_folder_of_checkpoints_that_cannot_be_listed_after_a_save_ends_no_run(
    on_disk, tmp_path, capsys, monkeypatch
):
    """Once the next error of a failing disk, after a whole save, ended what its own failure would not have."""
    out, saved = tmp_path / "out", Checkpoints.saved

    def fails_at_first(self):
        if complete := [path for _, path in saved(self)]:
            monkeypatch.setattr(Checkpoints, "saved", saved)
            refused(complete[0])
        return []

    monkeypatch.setattr(Checkpoints, "saved", fails_at_first)
    code, _, err = on_disk.main(capsys, *on_disk.run(out, steps=3, save_every=1, keep=1))
    assert code == 0, err
    assert "older checkpoints stay: " in err and "Input/output error" in err
    assert names(out) == ["step-000003"]


def test_what_overspill_writes_is_known_to_be_its_own(straight):
    """A name that is missing there would stop every resume after a kill in the middle of a save."""
    from overspill import _core
    from overspill.saves import FOLDERS

    items = {item.name for path in (straight / "checkpoints").iterdir() for item in path.iterdir()}
    assert {"manifest.json", "hf"} < items
    assert not [name for name in items if not FOLDERS.fullmatch(name) and not _core.is_file_of_a_save(name)]


@pytest.mark.parametrize("mine", ["thesis.tex", "slab-notes.txt", "extents-notes.txt"])
def test_what_overspill_did_not_write_is_not_removed(mine, on_disk, out, capsys):
    strange = out / "checkpoints/step-000007.partial"
    strange.mkdir()
    (strange / mine).write_text("mine")
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 7)
    assert f"{mine}, which Overspill did not write" in message
    assert (strange / mine).read_text() == "mine"


def made(folder, step, name="") -> Path:
    """What looks like a checkpoint of that step."""
    path = folder / f"step-{step:06d}{name}"
    (path / "hf").mkdir(parents=True)
    for file in ("resident.bin", "manifest.json", "hf/config.json"):
        (path / file).write_text(file)
    return path


@pytest.mark.parametrize(
    "mine",
    [
        "thesis.tex",
        os.fsdecode(b"caf\xe9.txt"),  # no UTF-8
        "slab-notes.txt",
        "rank0-extents-notes.txt",
        "slab-mine.bin/a",
        "hf/thesis.tex",
        "hf/thesis/a.txt",
        "rank0/mine",
        "rank0/slab-notes.txt",
    ],
)
def test_what_overspill_did_not_write_is_not_pruned_either(mine, tmp_path):
    """Once the whole folder went. All else that may go goes, and the refusal names what stays."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    first, second, third = (made(checkpoints.folder, step) for step in (1, 2, 3))
    (first / mine).parent.mkdir(exist_ok=True)
    (first / mine).write_text("mine")
    before = tiny.tree(first)
    with pytest.raises(FolderError, match=f"{first} is not removed: .*which Overspill did not write"):
        checkpoints.prune(Keep(1))
    assert tiny.tree(first) == before and third.is_dir() and not second.exists()


def test_nothing_is_removed_through_a_link(tmp_path):
    checkpoints, elsewhere = Checkpoints(tmp_path / "checkpoints"), tmp_path / "elsewhere"
    mine = made(elsewhere, 1)
    cut_short = made(elsewhere, 9)
    (cut_short / "manifest.json").unlink()
    before = tiny.tree(elsewhere)
    made(checkpoints.folder, 2)
    links = [checkpoints.folder / name for name in ("step-000001", "step-000009", "step-000010.partial")]
    for link, target in zip(links, (mine, cut_short, cut_short), strict=True):
        link.symlink_to(target)
    checkpoints.remove_leftovers()
    assert all(link.is_symlink() for link in links)
    checkpoints.prune(Keep(1))
    assert [link.is_symlink() for link in links] == [False, True, True], "the link of an old one goes"
    assert tiny.tree(elsewhere) == before
    assert (checkpoints.folder / "step-000002").is_dir(), "step 9 is no checkpoint that could replace it"


def test_training_goes_on_where_an_old_checkpoint_stays(on_disk, tmp_path, capsys):
    out = tmp_path / "out"
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    (out / "checkpoints/step-000001/thesis.tex").write_text("mine")
    _, err = resume(on_disk, capsys, out, "--resume", "--steps", 3, "--save-every", 1)
    assert "step-000001 is not removed: it holds thesis.tex" in err
    assert names(out) == ["step-000001", "step-000003"]


def test_training_goes_on_where_an_old_checkpoint_cannot_be_removed(on_disk, out, capsys, monkeypatch):
    """As where another machine has one of its files open on NFS. The other old ones go nevertheless."""
    oldest, remove = out / "checkpoints/step-000002", shutil.rmtree

    def refused(path, *arguments, **named):
        if Path(path) == oldest:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        remove(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        _, err = resume(on_disk, capsys, out, "--resume", "--steps", 7, "--keep", 1)
    assert f"older checkpoints stay: {oldest} cannot be removed: " in err and "Directory not empty" in err
    assert names(out) == ["step-000002", "step-000007"]


def test_what_cannot_be_looked_at_is_not_taken_for_absent(tmp_path):
    path = made(tmp_path, 1)
    assert is_complete(path) and not is_complete(tmp_path) and not is_complete(path / "manifest.json")
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to(path / "manifest.json")
    with pytest.raises(OSError, match=f"{path}/manifest.json"):
        is_complete(path)


def test_a_checkpoint_that_was_set_aside_is_gone_on_from_again(on_disk, out, capsys, monkeypatch):
    """It is in the run's folder, and none of the branch: without a record the next resume began at step 0."""
    from overspill.cli.loop import Loop

    for step in (2, 4, 6):
        path = out / f"checkpoints/step-00000{step}"
        path.rename(path.with_name(f"{path.name}.abandoned-1"))
    aside = out / "checkpoints/step-000004.abandoned-1"

    def killed(self):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train_step", killed)
        on_disk.fails(capsys, "train", "--out", out, "--resume", aside)
    said, _ = resume(on_disk, capsys, out, "--resume", "--steps", 5)
    assert f"going on from {aside}, step 4" in said
    said, _ = resume(on_disk, capsys, out, "--resume", "--steps", 6)
    assert f"going on from {out}/checkpoints/step-000005, step 5" in said


DAMAGE = {
    "bytes": (lambda line: b"\xff" + line, "it is no JSON"),
    "text": (lambda line: line[: len(line) // 2], "it is no JSON"),
    "deep": (lambda line: b"[" * 100_000, "it is no JSON"),
    "no object": (lambda line: b"3", "an object is expected, not int"),
    "no step": (lambda line: line.replace(b'"step"', b'"stop"'), "step = None is no number of a step"),
    "step": (lambda line: line.replace(b'"step": 2', b'"step": "2"'), "step = '2' is no number of a step"),
    "seconds": (lambda line: line.replace(b'"seconds": ', b'"seconds": null, "x": '), "seconds = None is no"),
    "number": (
        lambda line: line.replace(b'"seconds": ', b'"seconds": 1' + b"0" * 400 + b', "x": '),
        "seconds = 10000000000000000000000",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_of_the_log_is_named_and_nothing_is_changed(kind, on_disk, out, capsys):
    change, said = DAMAGE[kind]
    log = out / "log.jsonl"
    lines = log.read_bytes().splitlines()
    log.write_bytes(b"\n".join([lines[0], change(lines[1]), *lines[2:], b""]))

    def seen():
        """What a run that goes on in the checkpoints' slabs may not write to; of slabs only what is named is theirs."""
        return {
            name: data for name, data in tiny.tree(out).items() if name != "lock" and "/slab-" not in name
        }

    before = seen()
    older = out / "checkpoints/step-000002"
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", older, "--steps", 3)
    assert f"{log}:2 is damaged: {said}" in message and "delete that line" in message
    assert seen() == before
    assert all(map(whole, (out / "checkpoints").glob("step-*")))
    log.write_bytes(b"\n".join([lines[0], *lines[2:], b""]))
    resume(on_disk, capsys, out, "--resume", older, "--steps", 3)


@pytest.mark.parametrize("torn", [b'{"step": 7, "lo', b"\0" * 100, b"\xff\n"])
def test_a_last_line_that_a_crash_cut_short_is_left_out(torn, on_disk, straight, out, capsys):
    with (out / "log.jsonl").open("ab") as file:
        file.write(torn)
    resume(on_disk, capsys, out, "--resume", "--steps", 7)
    assert list(tiny.losses(out)) == list(range(1, 8))


@pytest.mark.parametrize("state, said", [({}, "no step"), ({"step": "x", "position": 1}, "step = 'x'")])
def test_a_checkpoint_of_a_script_does_not_say_where_to_go_on(state, said, on_disk, out, capsys, monkeypatch):
    from overspill.cli.loop import Loop

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "state", lambda self: state)
        on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 7)
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 8)
    assert f"{out}/checkpoints/step-000007 does not say where overspill train goes on" in message
    assert f"its client_state has {said}" in message and "merge this one" in message


def test_a_run_that_was_never_saved_begins_anew_and_keeps_its_log(on_disk, tmp_path, capsys, monkeypatch):
    from overspill.cli.session import Session

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_take", killed)
        on_disk.fails(capsys, *on_disk.run(out, steps=2))
    log = (out / "log.jsonl").read_bytes()
    said, err = resume(on_disk, capsys, out, "--resume", "--steps", 1)
    assert "no checkpoint was saved: beginning at step 0" in said
    assert f"not saved, is now {out}/log.jsonl.abandoned-1" in err
    assert (out / "log.jsonl.abandoned-1").read_bytes() == log and len(tiny.log(out)) == 1


@pytest.mark.parametrize("version", ["this", "earlier"])
def test_a_run_whose_checkpoints_cannot_be_seen_does_not_begin_anew(version, on_disk, out, capsys):
    """As where the disk of OUT/checkpoints is not mounted. Once it began at step 0 and emptied the log; with the disk
    back its old checkpoints were the newest, so each new one was deleted after its save."""
    if version == "earlier":
        run = json.loads((out / "run.json").read_text())
        assert run.pop("saved") == 6
        (out / "run.json").write_text(json.dumps(run))
    (out / "checkpoints").rename(out.parent / "unmounted")
    (out / "checkpoints").mkdir()
    before = tiny.tree(out)
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 7)
    said = {
        "this": "the run saved step 6",
        "earlier": "is of an earlier version, which did not note its saves",
    }
    assert said[version] in message and f"{out}/checkpoints holds no checkpoint; mount the disk" in message
    assert "--resume PATH, or start a new run in another --out" in message
    assert tiny.tree(out) == before
    elsewhere = out.parent / "unmounted/step-000006"
    resume(on_disk, capsys, out, "--resume", elsewhere, "--steps", 7)
    assert names(out) == ["step-000007"] and list(tiny.losses(out)) == list(range(1, 8))


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_absent(tmp_path, monkeypatch):
    def refused(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    made(checkpoints.folder, 1)
    monkeypatch.setattr(os, "listdir", refused)
    monkeypatch.setattr(Path, "is_dir", lambda self: False)  # what Python answers for EIO from 3.14 on
    with pytest.raises(OSError, match=f"{checkpoints.folder}"):
        checkpoints.latest()


def test_what_is_set_aside_may_be_deleted_while_a_run_starts(tmp_path, monkeypatch):
    """Once the start ended with an error about the file that was gone."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    made(checkpoints.folder, 1, ".abandoned-1")
    lstat = os.lstat

    def and_gone(path, **options):
        if str(path).endswith("resident.bin"):
            Path(path).unlink()
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", and_gone)
    monkeypatch.setattr(Path, "lstat", and_gone)
    assert "step-000001.abandoned-1; they hold" in checkpoints.aside_text()
    shutil.rmtree(checkpoints.folder)
    assert disk_bytes([checkpoints.folder]) == 0


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("batch", 4, "--batch 4, and this run has --batch 2"),
        ("seed", 5, "--seed 5, and this run has --seed 0"),
        ("seq_len", 16, "--seq-len 16, and this run has --seq-len 32"),
        ("data", None, "other texts"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(name, other, said, on_disk, out, capsys):
    """Its position is one in other data: some sequences would come twice. Once the run's own were set aside for it."""
    if name == "data":
        other = on_disk.root / "other-texts"
        tiny.make_texts(other, files=2)
    elsewhere = out.parent / "elsewhere"
    on_disk.ok(capsys, *on_disk.run(elsewhere, steps=1, **{name: other}))
    before = names(out)
    message = on_disk.fails(
        capsys, "train", "--out", out, "--resume", elsewhere / "checkpoints/step-000001", "--steps", 8
    )
    assert f"{elsewhere}/checkpoints/step-000001 is of another run: it was saved with {said}" in message
    assert "Go on from one of this run's own" in message and "merge that one" in message
    assert names(out) == before


def test_a_checkpoint_of_an_earlier_version_is_known_by_its_position(on_disk, out, capsys, monkeypatch):
    """It does not say how its data is ordered."""
    from overspill.cli.loop import Loop

    for position, end in ((14, 7), (99, 8)):
        with monkeypatch.context() as patch:
            patch.setattr(Loop, "state", lambda self, at=position: {"step": self.step, "position": at})
            on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", end)
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 9)
    assert "it has seen 99 sequences in 8 steps, and this run takes 2 a step" in message
