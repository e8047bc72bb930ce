"""`overspill checkpoint`: copies and moves, whole or not at all."""

import os
import resource
import shutil
import signal
import subprocess
import sys

import disks
import pytest
import tiny
import torch
from checkpoint_scene import change_manifest, change_piece, damage, fails, ok, whole

from overspill import CheckpointError, FolderError, _core, copying, saves
from overspill.cli import main
from overspill.cli.checkpoint_list import rows_of

# --- cp ---------------------------------------------------------------------------------------------------------------


def test_a_copy_has_what_belongs_to_the_checkpoint_and_no_more(saved, start, capsys):
    source, target = saved / "step-000002", saved.parent / "elsewhere/deep/copy"
    said = ok(capsys, "cp", source, target)
    assert "every byte fitted its checksum" in said
    assert whole(target) and not copying.unfinished(target).exists()
    named = _core.verify(str(source), None)["bytes"]
    files = sum(p.stat().st_size for p in target.glob("extents-*.bin"))
    assert named <= files < named + 4096 * 64 < saves.disk_bytes([source])
    assert sorted(p.name for p in target.iterdir()) == ["extents-0.bin", "index.bin", "manifest.json"]
    assert all(p.stat().st_nlink == 1 for p in target.iterdir())
    assert (target / "manifest.json").stat().st_mtime_ns == (source / "manifest.json").stat().st_mtime_ns
    there, here = start(torch.nn.Linear(64, 64), placement="nvme"), start(torch.nn.Linear(64, 64))
    there.load_checkpoint(source)
    here.load_checkpoint(target)
    assert here.global_steps == 2
    for step in range(2):
        for engine in (there, here):
            engine(torch.full((2, 64), float(step))).square().mean().backward()
            engine.step()
    assert all(torch.equal(v, here.state_dict()[k]) for k, v in there.state_dict().items())


def test_a_copy_of_a_copy_is_the_same_again(saved, tmp_path, capsys):
    ok(capsys, "cp", saved / "step-000001", tmp_path / "one")
    ok(capsys, "cp", tmp_path / "one", tmp_path / "two")
    assert tiny.tree(tmp_path / "one") == tiny.tree(tmp_path / "two")


def test_a_folder_gets_the_checkpoint_under_its_own_name(saved, tmp_path, capsys):
    (tmp_path / "archive").mkdir()
    ok(capsys, "cp", saved / "step-000001", tmp_path / "archive")
    assert whole(tmp_path / "archive/step-000001")
    before = tiny.tree(tmp_path / "archive")
    assert "is there and not empty" in fails(
        capsys, "cp", saved / "step-000002", tmp_path / "archive/step-000001"
    )
    assert "is there and not empty" in fails(capsys, "cp", saved / "step-000001", tmp_path / "archive")
    assert tiny.tree(tmp_path / "archive") == before


def test_a_copy_takes_the_models_files_and_the_adapter(on_disk, tmp_path, capsys):
    on_disk.ok(capsys, *on_disk.run(tmp_path / "run", steps=1, lora_rank=2))
    source = tmp_path / "run/checkpoints/step-000001"
    (source / "notes.txt").write_text("mine")
    ok(capsys, "cp", source, tmp_path / "copy")
    for folder in ("hf", "adapter"):
        assert tiny.tree(source / folder) == tiny.tree(tmp_path / "copy" / folder) != {}
    assert not (tmp_path / "copy/notes.txt").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from overspill import copying
def die(done, total):
    if done >= total * {share}:
        os.kill(os.getpid(), signal.{signal})
copying.copy(Path(sys.argv[1]), Path(sys.argv[2]), die)
"""


def copy_until(share, source, target, signal_name="SIGKILL", program=KILLED):
    code = program.format(share=share, signal=signal_name)
    env = {**os.environ, "PYTHONPATH": str(tiny.BINDINGS)}
    return subprocess.run(
        [sys.executable, "-c", code, source, target], env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("share", [0.3, 0.7, 1])
def test_a_killed_copy_looks_like_none_and_the_next_one_goes_on(share, big, tmp_path, capsys):
    target = tmp_path / "copy"
    assert copy_until(share, big, target).returncode == -signal.SIGKILL
    part = copying.unfinished(target)
    assert not target.exists() and not (part / "manifest.json").exists()
    assert [row.state for row in rows_of(part)] == ["unfinished"]
    copied = copying.copy(big, target)
    assert whole(target) and not part.exists()
    assert share - 0.02 < copied.kept / copied.bytes <= share + 0.02


def test_what_an_earlier_copy_left_is_believed_by_its_checksums_alone(big, saved, tmp_path):
    """Of another checkpoint, damaged, longer: the copy is whole all the same."""
    target = tmp_path / "copy"
    assert copy_until(1, big, target).returncode == -signal.SIGKILL
    file = copying.unfinished(target) / "extents-0.bin"
    with file.open("r+b") as written:
        written.seek(0, os.SEEK_END)
        written.write(b"more")
        written.seek(3)
        written.write(b"another")
    for stale in (
        "slab-7.bin",
        "extents-8.bin",
        "shared-x.txt",
        "optimizer.safetensors",
        "manifest.json.tmp",
    ):
        (file.parent / stale).write_text("stale")
    copied = copying.copy(big, target)
    assert 0 < copied.kept < copied.bytes
    assert sorted(p.name for p in target.iterdir()) == ["extents-0.bin", "index.bin", "manifest.json"]
    copying.copy(big, tmp_path / "fresh")
    assert tiny.tree(target) == tiny.tree(tmp_path / "fresh")
    other = tmp_path / "other"
    assert copy_until(0.5, big, other).returncode == -signal.SIGKILL
    copying.copy(saved / "step-000001", other)
    assert whole(other) and _core.manifest(other)["step"] == 1


def test_ctrl_c_and_sigterm_end_a_copy_that_goes_on_later(big, tmp_path):
    program = """
import os, signal, sys
from overspill import copying
from overspill.cli import checkpoint, main
from overspill.cli.progress import on_terminal
def strike(what):
    return lambda done, total: done < total * {share} or os.kill(os.getpid(), signal.{signal})
checkpoint.progress.on_terminal = strike
sys.exit(main(["checkpoint", "cp", sys.argv[1], sys.argv[2]]))
"""
    for name, code in (("SIGINT", 130), ("SIGTERM", 128 + signal.SIGTERM)):
        ended = copy_until(0.4, big, tmp_path / "copy", name, program)
        assert ended.returncode == code and "Traceback" not in ended.stderr, ended.stderr
        assert "copy.copying has what was copied: the same command goes on with it" in ended.stderr
        assert not (tmp_path / "copy").exists()
    assert copying.copy(big, tmp_path / "copy").kept > 0


def test_a_full_disk_is_found_before_the_first_byte_and_leaves_nothing(big, tmp_path, capsys):
    with disks.small(tmp_path / "disk", "4m") as disk:
        before = os.statvfs(disk).f_bfree
        message = fails(capsys, "cp", big, disk / "copy")
        assert "there is no room for" in message and "name a folder on another disk" in message
        assert os.listdir(disk) == [] and os.statvfs(disk).f_bfree == before


def test_a_limit_of_the_process_is_named(big, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        message = fails(capsys, "cp", big, tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "ulimit -f" in message and not copying.unfinished(tmp_path / "copy").exists()


def test_a_damaged_checkpoint_is_not_copied(big, tmp_path, capsys):
    file = big / "resident.bin"
    with file.open("r+b") as written:
        written.seek(9 << 20)
        written.write(b"damaged")
    message = fails(capsys, "cp", big, tmp_path / "copy")
    assert (
        f"{file.name}: " in message and "corrupt" in message and "copy.copying has what was copied" in message
    )
    assert not (tmp_path / "copy").exists()
    assert "is no folder" in fails(capsys, "cp", tmp_path / "absent", tmp_path / "copy2")
    assert "no manifest.json" in fails(capsys, "cp", tmp_path / "copy.copying", tmp_path / "copy2")


def test_the_helper_writes_manifests_that_open(big):
    change_manifest(big, lambda values: values.update(step=7))
    assert _core.manifest(big)["step"] == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "../outside.bin"),
        ("file", "/etc/passwd"),
        ("file", "link.bin"),
        ("file", "hf"),
        ("file", "manifest.json"),
        ("offset", 2**62),
        ("bytes", 2**62),
        ("elements", 2**62),
        ("begin", 2**63 - 1),
    ],
)
def test_a_hostile_manifest_copies_and_removes_nothing_else(key, value, big, tmp_path, capsys):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(16 << 20))
    (big / "link.bin").symlink_to(outside)
    (big / "hf").mkdir()

    change_piece(big, lambda piece: piece.update({key: value}))
    before = tiny.tree(tmp_path)
    for arguments in (["cp", big, tmp_path / "copy"], ["verify", big], ["diff", big, big]):
        assert "error: " in fails(capsys, *arguments)
    assert tiny.tree(tmp_path) == before and outside.exists()
    (big / "link.bin").unlink()
    ok(capsys, "rm", "--force", big)
    assert outside.exists() and not big.exists()


@pytest.mark.parametrize("name", ["hf", "adapter", "hf/tokenizer.json", "adapter/adapter_config.json"])
def test_no_link_in_a_checkpoint_is_followed(name, big, tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "tokenizer.json").write_text("secret")
    path = big / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(secret if "/" not in name else secret / "tokenizer.json")
    if name.startswith("adapter/"):
        (big / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    fails(capsys, "cp", big, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "copy.copying").exists()
    main(["checkpoint", "rm", "--force", str(big)])  # of a link in hf/ the link alone
    assert (secret / "tokenizer.json").read_text() == "secret"


def test_a_folder_of_somebody_else_is_not_copied_into(big, tmp_path, capsys):
    part = copying.unfinished(tmp_path / "copy")
    part.mkdir()
    (part / "thesis.tex").write_text("mine")
    assert "thesis.tex" in fails(capsys, "cp", big, tmp_path / "copy")
    assert (part / "thesis.tex").read_text() == "mine"
    shutil.rmtree(part)
    (tmp_path / "elsewhere").mkdir()
    part.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in fails(capsys, "cp", big, tmp_path / "copy")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "lies in" in fails(capsys, "cp", big, big / "inside")


def test_a_copy_keeps_others_from_its_source_and_its_folder(big, tmp_path, capsys):
    target = tmp_path / "copy"
    seen = []

    def meanwhile(done, total):
        if not seen:
            seen.append(fails(capsys, "rm", "--force", big))
            seen.append(fails(capsys, "mv", big, tmp_path / "moved"))
            seen.append(fails(capsys, "cp", big, target))
            seen.append(fails(capsys, "rm", copying.unfinished(target)))

    copying.copy(big, target, meanwhile)
    assert len(seen) == 4 and all("is in use" in message for message in seen)
    assert whole(target) and whole(big)


# --- mv ---------------------------------------------------------------------------------------------------------------


def test_a_move_on_one_file_system_is_a_new_name(saved, tmp_path, capsys):
    inode = (saved / "step-000002/manifest.json").stat().st_ino
    assert "renamed" in ok(capsys, "mv", saved / "step-000002", tmp_path / "moved")
    assert whole(tmp_path / "moved") and (tmp_path / "moved/manifest.json").stat().st_ino == inode
    assert not (saved / "step-000002").exists()


def test_a_move_to_another_disk_reads_the_copy_back_before_it_removes(saved, tmp_path, capsys, monkeypatch):
    source = saved / "step-000002"
    with disks.small(tmp_path / "disk", "64m") as disk:
        (source / "thesis.tex").write_text("mine")
        assert "thesis.tex" in fails(capsys, "mv", source, disk / "moved")
        (source / "thesis.tex").unlink()
        verify = copying.tensor_file.verify

        def harmed(path, progress=None):
            damage(path)
            return verify(path, progress)

        monkeypatch.setattr(copying.tensor_file, "verify", harmed)
        assert "corrupt" in fails(capsys, "mv", source, disk / "moved")
        assert whole(source)
        monkeypatch.undo()
        shutil.rmtree(disk / "moved")
        said = ok(capsys, "mv", source, disk / "moved")
        assert "copied and read back" in said and whole(disk / "moved") and not source.exists()


def test_errors_of_scripts_are_the_packages(big, tmp_path):
    with pytest.raises(FolderError, match="no complete checkpoint"):
        (tmp_path / "empty").mkdir()
        copying.copy(tmp_path / "empty", tmp_path / "copy")
    (big / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not begin with its checksum"):
        copying.copy(big, tmp_path / "copy")
