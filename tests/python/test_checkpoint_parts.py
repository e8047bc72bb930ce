"""Checkpoints of runs with several NVMe paths: a part lies on each path's file system, and the tools know it."""

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint_scene import fails, ok, whole

import overspill
from overspill import CheckpointError, _core, copying, overwriting, saves

MEMORY = Path("/dev/shm")


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another file system than tmp_path."""
    if not MEMORY.is_dir() or os.stat(MEMORY).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    folder = MEMORY / f"test-of-overspill-parts-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])


def step(engine):
    engine.backward(engine(torch.ones(2, 128)).square().mean())
    engine.step()


@pytest.fixture
def saved(config, tmp_path, elsewhere):
    """(engine, checkpoint, part)"""
    (tmp_path / "nvme").mkdir()
    settings = config(placement="nvme", checkpoints_kept=4, chunk_elements=4096)
    settings["budget"]["nvme"] = [str(tmp_path / "nvme"), str(elsewhere)]
    engine, *_ = overspill.initialize(model(), settings)
    step(engine)
    engine.save_checkpoint(tmp_path / "step-1")
    (part,) = _core.parts_of(tmp_path / "step-1")
    assert part.parent == elsewhere
    yield engine, tmp_path / "step-1", part
    engine.close()


def test_nothing_is_copied(saved):
    _, checkpoint, part = saved
    assert whole(checkpoint)
    assert not list(checkpoint.glob("extents-*")) and not list(checkpoint.glob("resident*"))
    assert list(checkpoint.glob("slab-*")) and list(part.glob("slab-*"))


def test_mv_rm_cp_and_ls_know_it(saved, tmp_path, capsys):
    engine, checkpoint, part = saved
    before = engine.weight(engine.module[0].weight)
    ok(capsys, "mv", checkpoint, tmp_path / "moved")
    assert str(tmp_path / "moved") in (part / "overspill-part.txt").read_text()
    assert whole(tmp_path / "moved")
    ok(capsys, "cp", tmp_path / "moved", tmp_path / "copy")
    assert not _core.parts_of(tmp_path / "copy") and whole(tmp_path / "copy")
    use = saves.disk_use(tmp_path / "moved")
    assert (
        use.alone + use.shared
        >= sum(
            file.stat().st_blocks * 512 for folder in (tmp_path / "moved", part) for file in folder.iterdir()
        )
        - 4096
    )
    step(engine)
    ok(capsys, "rm", tmp_path / "moved")
    assert not part.exists() and not (tmp_path / "moved").exists()
    engine.load_checkpoint(tmp_path / "copy")
    assert torch.equal(engine.weight(engine.module[0].weight), before)


def test_a_cut_off_save_of_a_rank_takes_its_part_along(saved, tmp_path, capsys):
    """Until a save is whole, each rank's files lie in a folder of its own."""
    _, checkpoint, part = saved
    cut_off = tmp_path / "step-2.partial"
    (cut_off / "rank1").mkdir(parents=True)
    shutil.move(checkpoint / f"part-{part.name[11:27]}.txt", cut_off / "rank1")
    ok(capsys, "rm", cut_off)
    assert not part.exists()


def test_one_that_takes_the_place_of_another_keeps_its_part_and_removes_the_others(saved, tmp_path):
    engine, checkpoint, part = saved
    step(engine)
    overwriting.save(engine, checkpoint, {})
    (new,) = _core.parts_of(checkpoint)
    assert new != part and not part.exists() and whole(checkpoint)
    assert (new / "overspill-part.txt").read_text().splitlines()[1] == str(checkpoint)


def test_a_move_to_another_disk_takes_it_along(saved, elsewhere, capsys):
    _, checkpoint, part = saved
    ok(capsys, "mv", checkpoint, elsewhere / "moved")
    assert whole(elsewhere / "moved") and not part.exists() and not checkpoint.exists()


def test_older_ones_go_with_their_parts(saved, tmp_path, elsewhere):
    engine, _, part = saved
    for number in (2, 3):
        step(engine)
        engine.save_checkpoint(tmp_path / f"step-{number}", keep_last=1, blocking=number == 2)
    engine.wait_for_save()
    assert not part.exists() and not (tmp_path / "step-1").exists()
    assert [path for path in elsewhere.iterdir() if path.name.startswith("checkpoint-")] == _core.parts_of(
        tmp_path / "step-3"
    )


def test_a_file_of_others_in_a_part_stays(saved, capsys):
    _, checkpoint, part = saved
    (part / "notes.txt").write_text("mine")
    assert str(part) in fails(capsys, "rm", "--force", checkpoint)
    assert (part / "notes.txt").read_text() == "mine" and not (checkpoint / "manifest.json").exists()
    (part / "notes.txt").unlink()
    ok(capsys, "rm", "--force", checkpoint)
    assert not part.exists()


def test_a_path_that_leads_to_something_else_is_not_removed(saved, tmp_path, capsys):
    _, checkpoint, part = saved
    (name,) = checkpoint.glob("part-*.txt")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "slab-1.bin").write_text("mine")
    (victim / "overspill-part.txt").write_text("0123456789abcdef\n/elsewhere\n")
    name.write_text(f"{victim}\n")
    with pytest.raises(CheckpointError, match="a part of the checkpoint"):
        _core.verify(str(checkpoint), None)
    ok(capsys, "rm", "--force", checkpoint)
    assert (victim / "slab-1.bin").read_text() == "mine" and part.exists()


def test_a_part_that_a_copy_with_links_has_too_stays(saved, tmp_path, capsys):
    _, checkpoint, part = saved
    subprocess.run(["cp", "-al", checkpoint, tmp_path / "best"], check=True)
    ok(capsys, "rm", "--force", checkpoint)
    assert whole(tmp_path / "best") and part.exists()
    ok(capsys, "rm", "--force", tmp_path / "best")
    assert not part.exists()


def test_a_plain_copy_does_not_take_the_part_of_its_original_along(saved, tmp_path, capsys):
    _, checkpoint, part = saved
    shutil.copytree(checkpoint, tmp_path / "copy")
    ok(capsys, "rm", "--force", tmp_path / "copy")
    assert whole(checkpoint) and part.exists()


def test_falling_back_leaves_one_whose_disk_is_not_mounted_its_name(saved, tmp_path):
    engine, checkpoint, part = saved
    step(engine)
    ok_before = tmp_path / "step-0"
    copying.copy(checkpoint, ok_before)
    part.rename(part.with_name("not mounted"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.load_checkpoint(tmp_path, fall_back=True)
    assert any("a part of it is not here" in str(each.message) for each in said)
    assert checkpoint.exists() and engine.global_steps == 1
