"""What a run takes of the disks beside its states is said, with numbers, before anything is trained."""

import json
import re
import shutil
import subprocess

import disks
import pytest
import tiny

MIB = 1 << 20


def plan(on_disk, nvme, *options) -> list:
    paths = [argument for path in nvme for argument in ("--nvme", path)]
    model = ["plan", "--model", on_disk.model, "--host-budget", "64MiB", "--config", on_disk.config]
    return [*model, *paths, *options]


def test_plan_counts_the_checkpoints_that_are_kept(on_disk, tmp_path, capsys):
    """One copy of the states is 1.6 MB; each kept one takes that more."""
    reserved = {}
    for keep in (1, 5):
        said = on_disk.ok(capsys, *plan(on_disk, [tmp_path], "--keep", keep))
        line = next(line for line in said.splitlines() if "going on with --resume" in line)
        assert "needs no more of the disk" in line
        reserved[keep] = float(line.split("in the ")[1].split(" MiB")[0])
    assert reserved[5] - reserved[1] == pytest.approx(4 * 1.6, abs=0.2)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_run_that_just_fits_is_resumed_on_its_disk(keep, on_disk, tmp_path, capsys):
    """Once a run that went on reserved everything again beside its checkpoint: 4.1 to 4.6 copies in all."""
    with disks.small(tmp_path / "disk", {1: "8400k", 3: "13700k"}[keep]) as disk:
        said = on_disk.ok(capsys, *plan(on_disk, [disk], "--keep", keep))
        assert "WARNING" not in said and "going on with --resume needs no more of the disk" in said
        out = disk / "out"
        options = ("--save-every", 1, "--keep", keep)
        on_disk.ok(capsys, *on_disk.run(out, steps=5, nvme=disk), *options)
        for steps in (7, 8, 12):
            on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", steps)
            assert len(list((out / "checkpoints").iterdir())) == keep
        whole = tmp_path / "whole"
        on_disk.ok(capsys, *on_disk.run(whole, steps=12, nvme=tmp_path))
        assert tiny.losses(out) == tiny.losses(whole)


def test_a_run_whose_slabs_another_folder_has_is_told_why_it_cannot_be_resumed(on_disk, tmp_path, capfd):
    with disks.small(tmp_path / "disk", "9m") as disk:
        out = disk / "out"
        on_disk.ok(capfd, *on_disk.run(out, steps=2, nvme=disk))
        checkpoint = out / "checkpoints/step-000002"
        subprocess.run(["cp", "-al", checkpoint, disk / "keepsake"], check=True)
        message = on_disk.fails(capfd, "train", "--out", out, "--resume", "--steps", 3)
        assert "a copy by links" in message and f"{checkpoint} and the checkpoints beside it hold" in message
        assert "move that checkpoint to another file system" in message and "train_after_save" in message
        shutil.rmtree(disk / "keepsake")
        on_disk.ok(capfd, "train", "--out", out, "--resume", "--steps", 3)


def test_a_run_that_reserves_one_copy_is_told_when_it_could_not_be_resumed(on_disk, tmp_path, capsys):
    finish = tmp_path / "finish.json"
    values = json.loads(on_disk.config.read_text())
    values["engine"]["train_after_save"] = False
    finish.write_text(json.dumps(values))
    with disks.small(tmp_path / "disk", "4m") as disk:
        out = disk / "out"
        said = on_disk.ok(capsys, *on_disk.run(out, steps=2, nvme=disk), "--config", finish)
        before, after = said.split("step 1/2")
        assert "so the run could not be resumed; free" in before and "so the run" not in after
        message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 3)
        assert "name it with --resume PATH" in message and "train_after_save" not in message
        shutil.move(out / "checkpoints/step-000002", tmp_path / "moved")
        on_disk.ok(capsys, "train", "--out", out, "--resume", tmp_path / "moved", "--steps", 3)
        assert sorted(tiny.losses(out)) == [1, 2, 3]


@pytest.mark.parametrize("out", ["elsewhere", "there"])
def test_a_run_whose_states_have_no_room_is_refused_by_plan(out, on_disk, tmp_path, capsys):
    """It could not start. Once plan's exit code was 0, or --out was blamed."""
    with disks.small(tmp_path / "disk", "4m") as disk:
        where = disk / "out" if out == "there" else tmp_path / "out"
        code, said, message = on_disk.main(capsys, *plan(on_disk, [disk], "--out", where))
    assert code == 1 and "--nvme: the run reserves 6.0 MiB in its folders" in message
    assert "4.0 MiB are free there; free space there, add a folder" in message
    assert "-" not in [word[0] for word in said.split() if word[1:2].isdigit()]  # of a negative size


def test_checkpoints_on_another_disk_cost_no_second_reserve(on_disk, tmp_path, capsys):
    with disks.small(tmp_path / "disk", "8m") as disk:
        said = on_disk.ok(capsys, *plan(on_disk, [disk], "--out", tmp_path / "out"))
        assert "WARNING" not in said and "links slabs" not in said
        on_disk.ok(capsys, *on_disk.run(tmp_path / "out", steps=1, nvme=disk))
        on_disk.ok(capsys, "train", "--out", tmp_path / "out", "--resume", "--steps", 2)


def test_states_of_other_disks_are_copied_and_counted(on_disk, tmp_path, capsys):
    """Two disks, the run's folder on the smaller one: once plan and start passed and the second save failed."""
    with disks.small(tmp_path / "a", "3m") as small, disks.small(tmp_path / "b", "30m") as large:
        arguments = plan(on_disk, [large], "--out", small / "out", "--keep", 1)
        assert "WARNING: with --keep 1 checkpoints need " in on_disk.ok(capsys, *arguments)
        (small / "ballast").write_bytes(bytes(MIB))
        message = on_disk.fails(capsys, *arguments)
        assert f"--out {small}/out: no space for a checkpoint: it writes 2." in message
        message = on_disk.fails(capsys, *on_disk.run(small / "out", steps=2, nvme=large))
        assert "no space for a checkpoint" in message and not (small / "out").exists()


def told(said: str) -> tuple[float, ...]:
    """MiB: what a checkpoint writes and what it links, and what going on reserves."""
    mib = r"([\d.]+) MiB"
    writes = re.search(
        f"a checkpoint writes {mib} to [^,\n]+(?:, and links slabs .*?, which keep up to {mib})?", said
    )
    reserves = re.search(f"going on with --resume (?:reserves|needs no .* goes on in the) {mib}", said)
    return tuple(float(found or 0) for found in (*writes.groups(), reserves[1]))


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_checkpoint_beside_one_of_two_disks_links_both(command, on_disk, tmp_path, capsys):
    """Once the states on the other disk were said to be copied, when parts had come."""

    def start(out, *nvme) -> tuple[float, ...]:
        if command == "plan":
            return told(on_disk.ok(capsys, *plan(on_disk, nvme, "--out", out)))
        first, *others = nvme
        more = [argument for path in others for argument in ("--nvme", str(path))]
        arguments = [*on_disk.run(out, steps=1, nvme=first), *more]
        return told(on_disk.ok(capsys, *arguments).split("step 1/1")[0])

    with disks.small(tmp_path / "a", "40m") as a, disks.small(tmp_path / "b", "40m") as b:
        written, linked, reserved = start(a / "linked", a)
        assert linked == reserved > 4
        all_written, none_linked, _ = start(tmp_path / "written", a)
        assert none_linked == 0 and all_written - written > 1
        still_written, linked, reserved = start(a / "both", a, b)
        assert linked == reserved and still_written == pytest.approx(written, abs=0.15)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_link_to_nowhere_in_the_models_folder_is_no_file_of_the_model(command, on_disk, tmp_path, capsys):
    """Once: 'vocab.txt: No such file or directory', of a file that nobody needs. A cache that was cleared has them."""
    model = tmp_path / "model"
    shutil.copytree(on_disk.model, model)
    (model / "vocab.txt").symlink_to("nowhere")
    (model / "vocab").mkdir()
    arguments = ["plan", "--model", model, "--host-budget", "64MiB"]
    if command == "train":
        arguments = on_disk.run(tmp_path / "out", steps=1, model=model)
    assert "a checkpoint writes" in on_disk.ok(capsys, *arguments)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_states_in_memory_need_room_for_checkpoints_too(command, on_disk, tmp_path, capsys):
    with disks.small(tmp_path / "disk", "3m") as disk:
        arguments = on_disk.run(disk / "out", steps=1, nvme=None, config=None)
        if command == "plan":
            arguments = ["plan", "--model", on_disk.model, "--host-budget", "64MiB", "--out", disk / "out"]
        assert "WARNING: with --keep 5 checkpoints need " in on_disk.ok(capsys, *arguments, "--keep", 5)
        shutil.rmtree(disk / "out", ignore_errors=True)
        (disk / "ballast").write_bytes(bytes(2 * MIB))
        assert "no space for a checkpoint" in on_disk.fails(capsys, *arguments)
