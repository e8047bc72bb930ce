"""Checkpoints of optimizers that run their own code (own_states.py): what they save is what they load, and a run that
goes on gives the bits of one that never stopped."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from disks import lies_in_a_file
from own_states_scene import COMMAND, FILE, Odd, adamw, alike, made, net, train, weights_of
from safetensors import safe_open

import overspill
from overspill import _core, tensor_file
from overspill.retention import Keep

pytestmark = pytest.mark.filterwarnings("ignore:overspill. the engine has no update")


KINDS = [torch.optim.Muon, torch.optim.Adafactor, torch.optim.RAdam, torch.optim.ASGD, torch.optim.LBFGS, Odd]


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        (adamw, torch.float64),
    ],
)
def test_a_run_goes_on_to_the_bit(start, tmp_path, kind, dtype, placement):
    straight = made(start, kind, dtype, placement=placement)
    train(straight, range(3))
    straight.save_checkpoint(tmp_path / "saved", client_state={"at": 3})
    saved = straight.optimizer.state_dict()
    assert tensor_file.verify(tmp_path / "saved")["step"] == 3
    again = made(start, kind, dtype, placement=placement)
    again.optimizer.param_groups[0]["lr"] = 7.0
    assert again.load_checkpoint(tmp_path / "saved")["at"] == 3
    assert alike(saved, again.optimizer.state_dict())
    train(straight, range(3, 6))
    train(again, range(3, 6))
    assert again.stats()["step"] == 6
    assert alike(straight.optimizer.state_dict(), again.optimizer.state_dict())
    assert alike(weights_of(straight), weights_of(again))


def test_what_was_one_tensor_is_one_again(start, tmp_path):
    engine = made(start, Odd)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    again = made(start, Odd)
    again.load_checkpoint(tmp_path / "saved")
    state = again.optimizer.state[again.module[0].weight]
    assert state["same"] is state["twin"] and again.optimizer.user.calls == 1


def test_the_file_is_one_of_safetensors(start, tmp_path):
    engine = made(start, torch.optim.RAdam)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.optimizer.state[engine.module[0].weight]["exp_avg"]
    with safe_open(tmp_path / "saved" / FILE, "pt") as file:
        assert torch.equal(file.get_tensor("RAdam's state of 0.weight.exp_avg"), expected)


def test_an_optimizer_that_the_engine_updates_has_no_such_file(start, tmp_path):
    start(net()).save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved" / FILE).exists()
    assert "own_states" not in json.loads(_core.manifest(tmp_path / "saved")["extra_json"])


def test_large_states_go_back_into_files_where_there_is_a_disk(start, tmp_path):
    engine = made(start, torch.optim.RAdam, width=512, placement="nvme")
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    again = made(start, torch.optim.RAdam, width=512, placement="nvme")
    again.load_checkpoint(tmp_path / "saved")
    kept = again.optimizer.state[again.module[0].weight]["exp_avg"]
    assert lies_in_a_file(kept)
    train(again, range(1, 2))
    assert again.optimizer.state[again.module[0].weight]["exp_avg"] is kept


def test_no_tensor_is_copied_that_lies_dense_in_memory_and_others_one_at_a_time(start, tmp_path, monkeypatch):
    engine = made(start, torch.optim.RAdam, width=512)
    train(engine, range(1))
    whole, most, alive = torch.empty_strided, [], weakref.WeakSet()

    def counted(*args, **options):
        made = whole(*args, **options)
        if made.device.type != "meta":  # which has no memory
            alive.add(made.untyped_storage())
            most.append(len(alive))
        return made

    monkeypatch.setattr(torch, "empty_strided", counted)
    engine.save_checkpoint(tmp_path / "dense")
    assert not most
    for state in engine.optimizer.state.values():
        state["exp_avg"] = torch.stack([state["exp_avg"]] * 2, -1)[..., 0]
    engine.save_checkpoint(tmp_path / "strided")
    assert most == [1] * len(engine.optimizer.state)


def test_several_optimizers_of_both_kinds(start, tmp_path):
    def made():
        model = net(frozen=False)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return start(model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02)])

    def train(engine, steps):
        for i in steps:
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(i))
            engine.module(x).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    straight, again = made(), made()
    train(straight, range(3))
    straight.save_checkpoint(tmp_path / "saved")
    again.load_checkpoint(tmp_path / "saved")
    train(straight, range(3, 6))
    train(again, range(3, 6))
    assert alike(straight.optimizer.state_dict(), again.optimizer.state_dict())
    assert alike(weights_of(straight), weights_of(again))
    model = net(frozen=False)
    with pytest.raises(overspill.CheckpointError, match=r"2 optimizers in the checkpoint .*, 1 here"):
        start(model, torch.optim.RAdam(model.parameters())).load_checkpoint(tmp_path / "saved")


def test_an_error_while_states_are_written_leaves_no_checkpoint(start, tmp_path, monkeypatch):
    engine = made(start, Odd)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "first")

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "sync_file", full)
        with pytest.raises(OSError, match=f"No space left on device.*{FILE}"):
            engine.save_checkpoint(tmp_path / "second")
    assert not list(tmp_path.glob("second*"))
    tensor_file.verify(tmp_path / "first")
    engine.save_checkpoint(tmp_path / "second")
    tensor_file.verify(tmp_path / "second")


KILLED = """
    import os, sys, signal
    sys.path[:0] = [{tests!r}]
    import torch, overspill, own_states_scene as own
    from overspill import tensor_file
    from pathlib import Path

    root, point = Path({root!r}), {point!r}
    model = own.net()
    settings = {{"budget": {{"host": "64MiB", "nvme": [str(root / "disk")]}}, "engine": {{"placement": {placement!r}}}}}
    engine, *_ = overspill.initialize(model, settings, own.Odd(own.groups_of(model, own.Odd)))
    own.train(engine, range(2))
    engine.save_checkpoint(root / "step-000002")
    own.train(engine, range(2, 3))

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    write = tensor_file.write
    if point == "before":
        tensor_file.write = die
    if point == "between":
        tensor_file._checksum = lambda piece, seen=[]: die() if len(seen) > 3 else seen.append(1) or "0" * 16
    if point == "unsynced":
        tensor_file.sync_file = die
    if point == "behind":
        tensor_file.write = lambda *given: [write(*given), die()]
    engine.save_checkpoint(root / "step-000003")
    die()
"""


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("point", ["before", "between", "unsynced", "behind", "after"])
def test_a_kill_leaves_the_checkpoint_before_whole(start, tmp_path, point, placement):
    from overspill.cli.checkpoints import Checkpoints

    (tmp_path / "disk").mkdir()
    tests = str(Path(__file__).parent)
    script = textwrap.dedent(KILLED.format(tests=tests, root=str(tmp_path), point=point, placement=placement))
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = Checkpoints(tmp_path)
    step = 3 if point == "after" else 2
    assert [each for each, _ in found.complete()] == [2, 3][: step - 1]
    assert tensor_file.verify(found.latest())["step"] == step
    straight, again = made(start, Odd), made(start, Odd)
    train(straight, range(4))
    again.load_checkpoint(found.latest())
    train(again, range(step, 4))
    assert alike(weights_of(straight), weights_of(again))
    if point != "after":
        assert (tmp_path / "step-000003.partial").is_dir()
        again.save_checkpoint(tmp_path / "step-000003")  # in place of what is left
    found.remove_leftovers()
    found.prune(Keep(1))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000003"]


def test_the_newest_ones_are_kept(start, tmp_path):
    """checkpoints_kept, over NVMe: the extents of those that are deleted are free again."""
    engine = made(start, torch.optim.RAdam, placement="nvme", checkpoints_kept=2)
    for i in range(6):
        train(engine, range(i, i + 1))
        engine.save_checkpoint(tmp_path / f"step-{i}")
        if i >= 2:
            shutil.rmtree(tmp_path / f"step-{i - 2}")
    for i in (4, 5):
        assert tensor_file.verify(tmp_path / f"step-{i}")["step"] == i + 1


def test_merge_takes_the_weights_alone(start, tmp_path):
    from safetensors.torch import load_file

    engine = made(start, torch.optim.RAdam)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    _core.merge(tmp_path / "saved", tmp_path / "merged", "fp32")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert alike(dict(sorted(merged.items())), dict(sorted(weights_of(engine).items())))


def test_verify_counts_the_file(start, tmp_path):
    engine, saved = made(start, Odd), tmp_path / "saved"
    train(engine, range(2))
    engine.save_checkpoint(saved)
    told = subprocess.run(
        [*COMMAND, "verify", str(saved), "--json"], capture_output=True, text=True, check=True
    )
    counted = json.loads(told.stdout)
    assert counted["files"] == 2
    assert counted["bytes"] == _core.verify(str(saved))["bytes"] + (saved / FILE).stat().st_size
