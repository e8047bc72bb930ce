"""What a run takes of the disks beside its states is said, with numbers, before anything is trained."""

import json
import re
import shutil

import disks
import pytest
import tiny

from overspill.cli import parser
from overspill.cli.train import train

MIB = 1 << 20


def plan(on_disk, nvme, *options) -> list:
    paths = [argument for path in nvme for argument in ("--nvme", path)]
    model = ["plan", "--model", on_disk.model, "--host-budget", "64MiB", "--config", on_disk.config]
    return [*model, *paths, *options]


def test_plan_counts_the_checkpoints_that_are_kept(on_disk, tmp_path, capsys):
    """One copy of the states is 1.6 MB; each kept one takes that more, the resume all of it again."""
    reserved = {}
    for keep in (1, 5):
        said = on_disk.ok(capsys, *plan(on_disk, [tmp_path], "--keep", keep))
        line = next(line for line in said.splitlines() if "going on with --resume" in line)
        reserved[keep] = float(line.split("reserves ")[1].split(" MiB")[0])
    assert reserved[5] - reserved[1] == pytest.approx(4 * 1.6, abs=0.2)


def test_a_run_that_could_not_be_resumed_is_told_so_before_it_trains(on_disk, tmp_path, capsys):
    with disks.small(tmp_path / "disk", "12m") as disk:
        said = on_disk.ok(capsys, *plan(on_disk, [disk]))
        assert "WARNING: going on with --resume reserves 6.0 MiB again" in said
        out = disk / "out"
        said = on_disk.ok(capsys, *on_disk.run(out, steps=2, nvme=disk))
        before, after = said.split("step 1/2")
        assert "so the run could not be resumed; free" in before and "so the run" not in after
        message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 3)
        checkpoint = out / "checkpoints/step-000002"
        assert f"reserves its states anew beside {checkpoint}" in message
        assert "Move that checkpoint to another file system" in message and "train_after_save" in message

        # Both ways out.
        finish = tmp_path / "finish.json"
        values = json.loads(on_disk.config.read_text())
        values["engine"]["train_after_save"] = False
        finish.write_text(json.dumps(values))
        on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 3, "--config", finish)
        shutil.move(out / "checkpoints/step-000003", tmp_path / "moved")
        on_disk.ok(
            capsys,
            "train",
            "--out",
            out,
            "--resume",
            tmp_path / "moved",
            "--steps",
            4,
            "--config",
            on_disk.config,
        )
        assert sorted(tiny.losses(out)) == [1, 2, 3, 4]


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
    reserves = re.search(f"going on with --resume reserves {mib} again", said)
    return tuple(float(found or 0) for found in (*writes.groups(), reserves[1]))


@pytest.mark.parametrize("command", ["plan", "train"])
def test_of_two_disks_the_one_with_the_checkpoints_links_and_the_other_ones_states_are_written(
    command, on_disk, tmp_path, capsys
):
    """A plan takes each for a half, a run knows what share each has: as they carry, which is about a half."""
    shares = {}

    def note(loop) -> None:
        paths = {path["path"]: path["reserved_bytes"] for path in loop.engine.stats()["paths"]}
        shares.update({path: count / sum(paths.values()) for path, count in paths.items()})

    def start(out, *nvme) -> tuple[float, ...]:
        if command == "plan":
            shares.update({str(path): 1 / len(nvme) for path in nvme})
            return told(on_disk.ok(capsys, *plan(on_disk, nvme, "--out", out)))
        first, *others = nvme
        more = [argument for path in others for argument in ("--nvme", str(path))]
        arguments = [*on_disk.run(out, steps=1, nvme=first), *more]
        capsys.readouterr()
        train(parser().parse_args(arguments), note)
        return told(capsys.readouterr().out.split("step 1/1")[0])

    with disks.small(tmp_path / "a", "40m") as a, disks.small(tmp_path / "b", "40m") as b:
        written, linked, reserved = start(a / "linked", a)
        assert linked == reserved > 4
        all_written, none_linked, _ = start(tmp_path / "written", a)
        assert none_linked == 0 and all_written - written > 1
        some_written, some_linked, reserved = start(a / "both", a, b)
        share = shares[str(a)]
        assert 0.1 < share < 0.9
        assert some_linked == pytest.approx(reserved * share, abs=0.15)
        assert some_written == pytest.approx(written + (1 - share) * (all_written - written), abs=0.15)


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
