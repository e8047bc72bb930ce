"""`overspill checkpoint`: what it lists, removes and compares, and what it refuses."""

import errno
import fcntl
import json
import os
import shutil

import pytest
import torch
from checkpoint_scene import damage, fails, ok, ran, whole

from overspill import copying, saves
from overspill.cli import main
from overspill.cli.checkpoint_list import age, rows_of
from overspill.cli.progress import Bar

# --- ls ---------------------------------------------------------------------------------------------------------------


def test_a_list_tells_what_is_shared_with_a_run_that_lives(saved, capsys):
    rows = rows_of(saved)
    assert [row.step for row in rows] == [1, 2, 3]
    assert all(row.state == "complete" and row.verified_at is None for row in rows)
    slabs = sum(p.stat().st_blocks * 512 for p in (saved / "step-000003").glob("slab-*"))
    mark = sum(p.stat().st_blocks * 512 for p in (saved / "step-000003").glob("shared-*"))
    assert slabs > 0 and rows[2].shared_bytes == slabs + mark, "the run has another name of each slab"
    shutil.copytree(saved / "step-000003", saved / "step-000004")
    copied = rows_of(saved)[3]
    assert copied.shared_bytes == 0 and copied.alone_bytes == saves.disk_bytes([saved / "step-000004"])
    listed = ok(capsys, "ls", saved, "--json")
    assert [each["step"] for each in json.loads(listed)["checkpoints"]] == [1, 2, 3, 3]
    text = ok(capsys, "ls", saved).splitlines()
    assert text[0].split() == ["step", "alone", "shared", "age", "verified", "checkpoint"] and len(text) == 5


def test_a_run_and_one_checkpoint_are_listed_too(on_disk, tmp_path, capsys):
    on_disk.ok(capsys, *on_disk.run(tmp_path / "run", steps=1))
    (row,) = rows_of(tmp_path / "run")
    assert row == rows_of(tmp_path / "run/checkpoints/step-000001")[0] and row.step == 1
    assert "is no folder" in fails(capsys, "ls", tmp_path / "absent")
    assert "no checkpoint in" in ok(capsys, "ls", on_disk.texts)


def test_a_reflink_is_shared(saved):
    """The kernel's answer for a file system with reflinks: two extents, one of them shared."""
    extents = [(0, 8192, saves._SHARED), (8192, 4096, saves._LAST)]

    def answer(handle, request, room):
        assert request == saves._FIEMAP
        head = list(saves._HEAD.unpack_from(room))
        saves._HEAD.pack_into(room, 0, *head[:3], len(extents), *head[4:])
        for number, (at, length, flags) in enumerate(extents):
            where = saves._HEAD.size + number * saves._EXTENT.size
            saves._EXTENT.pack_into(room, where, at, 0, length, 0, 0, flags, 0, 0, 0)

    path = saved / "step-000003/manifest.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves.fcntl, "ioctl", answer)
        assert saves._reflinked(str(path)) == 8192


@pytest.mark.parametrize(
    "harm",
    ["no_manifest", "no_json", "a_folder", "a_link"],
)
def test_a_list_says_what_is_wrong_and_goes_on(harm, saved):
    manifest = saved / "step-000002/manifest.json"
    manifest.unlink()
    if harm == "no_json":
        manifest.write_text("{")
    if harm == "a_folder":
        manifest.mkdir()
    if harm == "a_link":
        manifest.symlink_to(saved / "step-000001/manifest.json")
    rows = rows_of(saved)
    assert [row.step for row in rows if row.step] == [1, 3]
    if harm in ("no_json", "a_link"):
        (wrong,) = [row for row in rows if row.step is None]
        assert wrong.state.startswith("damaged: ") and wrong.path.endswith("step-000002")


def test_ages_for_people():
    assert [age(s) for s in (-3, 0, 119, 120, 7199, 7200, 172799, 172800)] == [
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "119 min",
        "2 h",
        "47 h",
        "2 days",
    ]


# --- verify -----------------------------------------------------------------------------------------------------------


def takes_notes(path) -> bool:
    try:
        os.setxattr(path, "user.overspill.trial", b"1")
    except OSError:
        return False
    return True


def test_what_was_verified_is_noted_of_this_folder_alone(saved, capsys):
    path = saved / "step-000002"
    assert "whole: step 2" in ok(capsys, "verify", path)
    if not takes_notes(path / "manifest.json"):
        assert saves.verified_at(path) is None, "a file system without attributes"
        return
    assert rows_of(path)[0].verified_at is not None
    for preserved in (shutil.copystat, None):
        copied = saved / f"copied-{preserved is None}"
        shutil.copytree(path, copied, copy_function=shutil.copy2)
        assert saves.verified_at(copied) is None, "nobody has read the copy"
    damage(saved / "step-000003")
    assert "step-000003" in fails(capsys, "verify", saved / "step-000003")
    assert saves.verified_at(saved / "step-000003") is None
    for record in (b"", b"[]", b"{}", b"{", b'{"at": "x"}', b"[" * 4000):
        os.setxattr(path / "manifest.json", "user.overspill.verified", record)
        assert saves.verified_at(path) is None


# --- rm ---------------------------------------------------------------------------------------------------------------


def test_the_last_good_one_stays_unless_told_otherwise(saved, capsys):
    one, two, three = (saved / f"step-00000{step}" for step in (1, 2, 3))
    assert "removed" in ok(capsys, "rm", two)
    damage(one)
    message = fails(capsys, "rm", three)
    assert "last good checkpoint" in message and "step-000001" in message and "--force" in message
    assert whole(three)
    ok(capsys, "rm", one)
    assert "no other complete one" in fails(capsys, "rm", three)
    ok(capsys, "rm", "--force", three)
    assert not list(saved.iterdir())


def test_several_removed_at_once_do_not_count_as_each_others_survivor(saved, capsys):
    paths = [saved / f"step-00000{step}" for step in (1, 2, 3)]
    code, out, err = ran(capsys, "rm", *paths)
    assert code == 1 and not out and err.count("last good checkpoint") == 3
    assert all(map(whole, paths))


def test_what_was_noted_is_not_read_again(saved, capsys, monkeypatch):
    if not takes_notes(saved / "step-000003/manifest.json"):
        pytest.skip("this file system takes no attributes of users")
    saves.note_verified(saved / "step-000003")
    monkeypatch.setattr(copying.tensor_file, "verify", lambda *_: pytest.fail("it was read"))
    ok(capsys, "rm", saved / "step-000001")


def test_what_is_no_checkpoint_is_not_removed(saved, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    assert "it is no checkpoint" in fails(capsys, "rm", "--force", tmp_path / "thesis")
    assert "is no folder" in fails(capsys, "rm", tmp_path / "absent")
    (tmp_path / "link").symlink_to(saved / "step-000001")
    assert "symbolic link" in fails(capsys, "rm", "--force", tmp_path / "link")
    for name in ("thesis.tex", "hf/thesis.tex", "src/main.c"):
        mine = saved / "step-000001" / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        assert "which Overspill did not write" in fails(capsys, "rm", "--force", saved / "step-000001")
        assert mine.read_text() == "mine" and whole(saved / "step-000001")
        shutil.rmtree(mine.parent) if "/" in name else mine.unlink()


def test_one_that_is_loaded_or_saved_just_now_stays(saved, start, capsys, monkeypatch):
    from overspill import checkpointing

    seen = []
    load = checkpointing._load_held

    def meanwhile(*arguments):
        seen.append(fails(capsys, "rm", "--force", saved / "step-000001"))
        load(*arguments)

    monkeypatch.setattr(checkpointing, "_load_held", meanwhile)
    start(torch.nn.Linear(64, 64)).load_checkpoint(saved / "step-000001")
    assert len(seen) == 1 and "is in use" in seen[0]
    under_way = saved / "step-000009.partial"
    shutil.copytree(saved / "step-000002", under_way)
    handle = os.open(under_way, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a save does
    assert "is in use" in fails(capsys, "rm", "--force", under_way)
    os.close(handle)
    ok(capsys, "rm", "--force", under_way)


def test_a_file_system_without_locks_lets_everyone_in(saved, capsys, monkeypatch):
    def refuses(handle, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(saves.fcntl, "flock", refuses)
    ok(capsys, "rm", saved / "step-000001")


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_whole(saved, monkeypatch):
    def killed(path, **_):
        raise RuntimeError("killed")

    monkeypatch.setattr(saves.shutil, "rmtree", killed)
    with pytest.raises(RuntimeError):
        saves.remove(saved / "step-000001")
    assert (saved / "step-000001").is_dir() and not saves.is_complete(saved / "step-000001")


# --- diff -------------------------------------------------------------------------------------------------------------


def test_a_difference_names_steps_options_and_parameters(start, tmp_path, capsys):
    engine = start(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    engine.module[1].weight.requires_grad_(True)
    engine.save_checkpoint(tmp_path / "one")
    engine.save_checkpoint(tmp_path / "same")
    assert "no difference" in ok(capsys, "diff", tmp_path / "one", tmp_path / "same")
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    engine(torch.ones(2, 8)).square().mean().backward()
    engine.step()
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.save_checkpoint(tmp_path / "two", client_state={"epoch": 3})
    code, out, _ = ran(capsys, "diff", tmp_path / "one", tmp_path / "two")
    assert code == 1 and "steps: 0 -> 1" in out and "0.01 -> 0.5" in out and "client_state" in out
    found = json.loads(ran(capsys, "diff", tmp_path / "one", tmp_path / "two", "--json")[1])
    assert found["weights_compared"] == 4 and not found["same"]
    for each in found["weights"]:
        change = (engine.state_dict()[each["name"]] - before[each["name"]]).double()
        assert each["differing"] == int((change != 0).sum()) and each["elements"] == change.numel()
        assert each["largest"] == pytest.approx(change.abs().max().item(), rel=1e-6)
        assert each["rms"] == pytest.approx(change.square().mean().sqrt().item(), rel=1e-6)
        assert each["rms_of_first"] == pytest.approx(
            before[each["name"]].double().square().mean().sqrt().item()
        )
    assert {each["name"] for each in found["weights"]} == set(before)


def test_other_shapes_and_names_are_told_apart(start, tmp_path, capsys):
    start(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))).save_checkpoint(tmp_path / "one")
    start(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 6, bias=False))).save_checkpoint(
        tmp_path / "two"
    )
    code, out, _ = ran(capsys, "diff", tmp_path / "one", tmp_path / "two")
    assert code == 1 and "F32 [4, 8] -> F32 [6, 8]" in out and "1.bias" in out and "-> none" in out
    assert "of 2 parameters differ" in out


def test_a_weight_that_is_no_number_comes_first(start, tmp_path, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    engine = start(model)
    engine.save_checkpoint(tmp_path / "one")
    with engine.gathered([model[1].weight]), torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    engine.save_checkpoint(tmp_path / "two")
    out = ran(capsys, "diff", tmp_path / "one", tmp_path / "two")[1]
    assert "1 of 4 parameters differ" in out and "1.weight: 6.2 % of 16 elements, largest nan" in out
    file = next(p for p in (tmp_path / "two").glob("*.bin") if p.name != "index.bin")
    file.write_bytes(bytes(file.stat().st_size))
    assert "corrupt" in fails(capsys, "diff", tmp_path / "one", tmp_path / "two")


# --- the line on a terminal -------------------------------------------------------------------------------------------


def test_the_bar_says_how_far_how_fast_and_how_long():
    bar = Bar("cp", clock=lambda: 10.0)
    line = bar.line(256 << 20, 1 << 30, 12.0)
    assert line.startswith("cp [#####...............] 256.0 MiB of 1.0 GiB, 128.0 MiB/s, 6 s left")
    assert "[####################] 0 B of 0 B" in bar.line(0, 0, 10.0)


def test_each_action_shows_examples(capsys):
    for action in ("ls", "verify", "cp", "mv", "rm", "diff"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", action, "--help"])
        assert (
            ended.value.code == 0
            and f"overspill checkpoint {action} " in capsys.readouterr().out.split("examples")[1]
        )
