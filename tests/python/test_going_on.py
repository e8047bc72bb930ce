"""A script that goes on from its checkpoint takes its disk's room over: initialize(resume_from=...)."""

import os
import shutil
import subprocess

import pytest
import torch
from checkpoint_scene import whole

import overspill
from overspill import FolderError, going_on


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])


def step(engine):
    engine.backward(engine(torch.ones(2, 128)).square().mean())
    engine.step()


def weights(engine):
    return [engine.weight(p) for p in engine.module.parameters()]


@pytest.fixture
def begin(config, tmp_path):
    """begin(**arguments of initialize): an engine whose states lie on NVMe, and which keeps two checkpoints."""
    (tmp_path / "nvme").mkdir()
    made = []

    def initialize(job="first", **more):
        settings = config(placement="nvme", checkpoints_kept=2, chunk_elements=4096, job=job)
        settings["budget"]["nvme"] = [str(tmp_path / "nvme")]
        engine, *_ = overspill.initialize(model(), settings, **more)
        made.append(engine)
        return engine

    yield initialize
    for engine in made:
        engine.close()


@pytest.fixture
def left(begin, tmp_path):
    """(the run's folder with two checkpoints, bytes that the run had reserved, weights after the third step)"""
    run = tmp_path / "run"
    engine = begin()
    for number in (1, 2):
        step(engine)
        engine.save_checkpoint(run / f"step-{number}", keep_last=2)
    reserved = engine.stats()["nvme_reserved_bytes"]
    step(engine)
    expected = weights(engine)
    engine.close()
    return run, reserved, expected


def written_by(engine) -> int:
    return engine.stats()["nvme_written_bytes"]


def on_disk(*folders) -> int:
    files = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


@pytest.mark.parametrize("named", ["the checkpoint", "the folder"])
def test_takes_no_more_of_the_disk_and_copies_nothing(named, left, begin, tmp_path):
    run, reserved, expected = left
    engine = begin(resume_from=run / "step-2" if named == "the checkpoint" else str(run))
    assert on_disk(run, tmp_path / "nvme") < reserved + (1 << 20)
    written = written_by(engine)
    engine.load_checkpoint(run / "step-2")
    assert written_by(engine) == written
    step(engine)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), expected, strict=True))
    for number in range(4, 8):
        step(engine)
        engine.save_checkpoint(run / f"step-{number}", keep_last=2)
    assert on_disk(run, tmp_path / "nvme") < reserved + (1 << 20)
    assert sorted(path.name for path in run.iterdir()) == ["step-6", "step-7"]
    assert whole(run / "step-6") and whole(run / "step-7")


def test_with_it_an_older_one_may_be_opened(left, begin):
    run, _, expected = left
    engine = begin(resume_from=run / "step-2")
    engine.load_checkpoint(run / "step-1")
    step(engine)
    step(engine)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), expected, strict=True))
    assert whole(run / "step-2")


def test_what_an_unfinished_save_left_is_removed_and_one_under_way_is_not(left, begin, tmp_path):
    run, reserved, _ = left
    for name in ("step-3.partial", "other.partial"):
        shutil.copytree(run / "step-2", run / name, copy_function=os.link)
        (run / name / "manifest.json").unlink()
    (run / "mine.partial").mkdir()
    (run / "mine.partial" / "notes").write_text("mine")
    whole_but_for_its_name = run / "step-4.partial"
    shutil.copytree(run / "step-2", whole_but_for_its_name, copy_function=os.link)
    with pytest.warns(
        UserWarning, match=r"(step-3|other)\.partial: what a save left that was cut off is removed"
    ):
        engine = begin(resume_from=run)
    names = ["mine.partial", "step-1", "step-2", "step-4.partial"]
    assert sorted(path.name for path in run.iterdir()) == names
    shutil.rmtree(whole_but_for_its_name)
    assert on_disk(run, tmp_path / "nvme") < reserved + (1 << 20)
    engine.load_checkpoint(run / "step-2")


def test_another_runs_checkpoints_are_left_alone(left, begin, tmp_path):
    run, _, _ = left
    other = begin(job="other")
    step(other)
    other.save_checkpoint(run / "theirs-9")
    other.close()
    (run / "notes").mkdir()

    def found(path):
        settings = overspill.Config.read({"budget": {"host": "1GiB", "nvme": [str(tmp_path)]}})
        return [path.name for path in going_on.checkpoints(path, None, settings)]

    assert found(run / "step-1") == ["step-1", "step-2"]
    (run / "step-2").rename(run / "best")  # it shares slabs, whatever its name
    (run / "step-1").rename(run / "step-1.abandoned-1")
    assert found(run / "best") == ["best", "step-1.abandoned-1"]


def test_a_copy_by_links_makes_the_run_take_new_room_and_say_why(left, begin, capfd):
    run, _, expected = left
    subprocess.run(["cp", "-al", run / "step-2", run.parent / "keepsake"], check=True)
    engine = begin(resume_from=run)
    said = capfd.readouterr().err
    assert "takes new room" in said and "a copy by links" in said and str(run) in said
    assert "-samefile" in said
    engine.load_checkpoint(run / "step-2")
    step(engine)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), expected, strict=True))
    assert whole(run.parent / "keepsake")


def test_names_what_is_no_checkpoint(begin, tmp_path):
    with pytest.raises(FolderError, match=r"resume_from: .*/none: No such file"):
        begin(resume_from=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FolderError, match=r"empty has no manifest.json, and no folder in it has one"):
        begin(resume_from=tmp_path / "empty")
    with pytest.raises(FolderError, match="leave resume_from out at the first start"):
        begin(resume_from=[tmp_path / "empty"])
    with pytest.raises(TypeError, match="initialize: resume_from: 7"):
        begin(resume_from=7)
    with pytest.raises(ValueError, match="resume_from: the list is empty"):
        begin(resume_from=[])


def test_a_link_to_a_checkpoint_is_no_second_one(left, begin, tmp_path):
    """Once: 'it has 2 names, and the checkpoints account for 3'."""
    run, reserved, _ = left
    (run / "latest").symlink_to("step-2")
    for named in (run, run / "latest", [run / "step-1", run / "latest"]):
        engine = begin(resume_from=named)
        assert on_disk(run, tmp_path / "nvme") < reserved + (1 << 20)
        engine.close()


def test_a_save_that_was_cut_off_is_refused_by_name_and_stays(left, begin):
    run, _, _ = left
    (run / "step-2").rename(run / "step-2.partial")
    with pytest.raises(FolderError, match="rename it to step-2"):
        begin(resume_from=run / "step-2.partial")
    begin(resume_from=run).close()
    assert whole(run / "step-2.partial")


def test_to_name_one_is_not_to_open_it(left, begin):
    run, _, _ = left
    engine = begin(resume_from=run)
    with pytest.warns(UserWarning, match="resume_from was given, and no checkpoint was loaded"):
        step(engine)
    engine.close()


def test_with_one_copy_only_it_says_that_it_takes_nothing(left, config, tmp_path):
    run, _, _ = left
    settings = config(placement="nvme", train_after_save=False, chunk_elements=4096)
    settings["budget"]["nvme"] = [str(tmp_path / "nvme")]
    with pytest.warns(UserWarning, match="takes nothing over with engine.train_after_save = false"):
        overspill.initialize(model(), settings, resume_from=run)[0].close()
