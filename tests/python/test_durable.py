"""Files that a power cut leaves whole: what is asked of the kernel, in which order, and what an error leaves."""

import errno
import os
from pathlib import Path

import pytest

from overspill import durable


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The fsyncs and renames since, by names below `tmp_path`; random digits are left out."""
    made: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def name(path) -> str:
        relative = os.path.relpath(path, tmp_path)
        head, part, _ = relative.partition(".part-")
        return head + (".part" if part else "")

    def record(call, word):
        def recorded(source, target):
            made.append(f"{word} {name(source)} {name(target)}")
            return call(source, target)

        return recorded

    def synced(file):
        made.append(f"fsync {name(os.readlink(f'/proc/self/fd/{file}'))}")
        return fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", record(rename, "rename"))
    monkeypatch.setattr(os, "replace", record(replace, "rename"))
    return made


def test_a_file_is_durable_before_it_has_its_name(calls, tmp_path):
    durable.write_text(tmp_path / "run.json", "ü")
    assert calls == ["fsync run.json.part", "rename run.json.part run.json", "fsync ."]
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == "ü"


def test_a_folder_is_durable_before_it_has_its_name(calls, tmp_path):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out").mkdir()
    durable.rename_folder(tmp_path / "out.part", tmp_path / "out")
    assert calls == ["fsync out.part", "rename out.part out", "fsync ."]


def test_folders_above_are_durable_too(calls, tmp_path):
    durable.make_folders(tmp_path / "a/b")
    assert calls == ["fsync .", "fsync a"]
    durable.make_folders(tmp_path / "a/b")
    assert len(calls) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_leaves_what_was_there(error, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("before")
    (tmp_path / "run.json.part").write_text("somebody else's")
    with pytest.raises(error), durable.new_file(path) as file:
        file.write(b"half")
        raise error
    assert path.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "run.json.part"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    monkeypatch.setattr(durable, "part_of", lambda target: tmp_path / "part")
    (tmp_path / "part").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "open", lambda self, mode: open("/dev/full", "wb"))  # noqa: PTH123, SIM115
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.json'"):
        durable.write_text(path, "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("was_there", [False, True])
def test_a_folder_whose_name_cannot_be_made_durable_loses_it_again(was_there, tmp_path, monkeypatch):
    """Once the error said failure, and the folder was there: the next attempt refused it as not empty."""
    part, target = tmp_path / "out.part", tmp_path / "out"
    part.mkdir()
    (part / "file").write_text("whole")
    if was_there:
        target.mkdir()
    sync, rename = os.fsync, os.rename

    def fails(file):
        if os.readlink(f"/proc/self/fd/{file}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        durable.rename_folder(part, target)
    assert (part / "file").read_text() == "whole"
    assert list(target.iterdir()) == [] if was_there else not target.exists()

    def once(source, to):
        if Path(source) == target:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source))
        rename(source, to)

    monkeypatch.setattr(os, "rename", once)
    with pytest.raises(OSError, match=f"Input/output error; {target} is there and whole") as error:
        durable.rename_folder(part, target)
    assert error.value.errno == errno.EIO and (target / "file").exists()
