"""A run whose stdout or stderr takes nothing goes on, saves, and ends with the code that it came to."""

import contextlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny

from overspill.cli import output


def full():
    """A file on a disk without room."""
    return Path("/dev/full").open("w")


def dead():
    """A pipe whose reader has ended, as of `| tee` that was killed."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.fixture
def unheard(monkeypatch):
    """The streams that refused a line; what Python writes at its end is then of no account."""
    monkeypatch.setattr(output, "_unheard", set())
    monkeypatch.setattr(output.atexit, "register", lambda act: None)


@pytest.mark.parametrize("make", [full, dead])
@pytest.mark.parametrize("both", [False, True])
def test_a_run_goes_on_where_nobody_hears_it(make, both, on_disk, tmp_path, capsys, monkeypatch, unheard):
    """Once the next line that was printed ended it, without a save."""
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        streams = ["stdout", "stderr"] if both else ["stdout"]
        for name in streams:
            file = make()
            stack.callback(abandon, file)
            patch.setattr(sys, name, file)
        code, _, err = on_disk.main(capsys, *on_disk.run(out, steps=3, save_every=1))
    assert code == 0, err
    assert list(tiny.losses(out)) == [1, 2, 3]
    assert (out / "checkpoints/step-000003/manifest.json").exists()
    if not both:
        assert err.count("stdout takes no lines") == 1 and "log.jsonl has its steps" in err


def test_a_save_that_fails_ends_no_run_where_stderr_is_full(on_disk, tmp_path, capsys, monkeypatch, unheard):
    from overspill.cli.session import Session

    take, out = Session._take, tmp_path / "out"

    def fails_at_first(self, path, blocking):
        if self.loop.step == 1:
            raise OSError(28, os.strerror(28), str(path))
        take(self, path, blocking)

    monkeypatch.setattr(Session, "_take", fails_at_first)
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        file = full()
        stack.callback(abandon, file)
        patch.setattr(sys, "stderr", file)
        code, _, _ = on_disk.main(capsys, *on_disk.run(out, steps=2, save_every=1))
    assert code == 0
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-000002"]


def test_lines_that_were_never_taken_change_no_exit_code(on_disk, tmp_path):
    """Python tries them once more at its end, and its own code for what it cannot write is 120."""
    with full() as file:
        ran = subprocess.run(
            [sys.executable, "-m", "overspill.cli", *map(str, on_disk.run(tmp_path / "out", steps=1))],
            env={**on_disk.env, "PYTHONUNBUFFERED": ""},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ran.returncode == 0, ran.stderr
    assert "Exception ignored" not in ran.stderr


def abandon(file) -> None:
    """Closes it; what it holds goes nowhere."""
    with contextlib.suppress(OSError):
        file.close()


class Writer:
    """As tensorboard's: its thread meets an error, and whoever calls it next gets that."""

    def __init__(self, folder: str, fails: str):
        self.fails, self.steps = fails, 0
        if fails == "at once":
            raise OSError(28, os.strerror(28), folder)

    def add_scalar(self, key: str, value: float, step: int) -> None:
        if self.fails == "later" and step >= 2:
            raise OSError(28, os.strerror(28), "events.out")

    def flush(self) -> None:
        if self.fails == "otherwise":
            raise RuntimeError("a thread of its own")


@pytest.mark.parametrize("fails", ["at once", "later", "otherwise"])
def test_a_run_goes_on_where_tensorboard_fails(fails, on_disk, tmp_path, capsys, monkeypatch):
    """Once it ended without a save, while a log.jsonl without room on the same disk was borne."""
    made = types.ModuleType("torch.utils.tensorboard")
    made.SummaryWriter = lambda folder: Writer(folder, fails)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", made)
    out = tmp_path / "out"
    code, _, err = on_disk.main(capsys, *on_disk.run(out, steps=3))
    assert code == 0, err
    assert list(tiny.losses(out)) == [1, 2, 3]
    assert err.count(f"TensorBoard's files in {out}/tensorboard are not written from here on") == 1


class Wandb(types.ModuleType):
    """As much of the package as a run uses."""

    def __init__(self, fails=False):
        super().__init__("wandb")
        self.begun, self.logged, self.ended, self.fails = [], [], 0, fails

    def init(self, **about):
        self.begun.append(about)
        return self

    def log(self, numbers, step):
        if self.fails and step >= 2:
            raise RuntimeError("no network")
        self.logged.append((step, numbers))

    def finish(self):
        self.ended += 1


def test_numbers_go_where_they_are_asked_to_go(on_disk, tmp_path, capsys, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    out = tmp_path / "out"
    assert on_disk.main(capsys, *on_disk.run(out, steps=2, report_to="wandb"))[0] == 0
    assert on_disk.main(capsys, "train", "--out", out, "--resume", "--steps", 3)[0] == 0
    assert [step for step, _ in wandb.logged] == [1, 2, 3] and wandb.ended == 2
    assert {number["loss"] for _, number in wandb.logged} == set(tiny.losses(out).values())
    first, again = wandb.begun
    assert first["id"] == again["id"] and first["name"] == "out" and first["config"]["steps"] == 2
    assert not (out / "tensorboard").exists()


def test_a_run_goes_on_where_weights_and_biases_fails(on_disk, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(fails=True))
    out = tmp_path / "out"
    code, _, err = on_disk.main(capsys, *on_disk.run(out, steps=3, report_to="wandb"))
    assert code == 0 and list(tiny.losses(out)) == [1, 2, 3]
    assert err.count("Weights & Biases' records are not written from here on (RuntimeError: no network)") == 1


def test_what_is_not_installed_is_named_before_the_run(on_disk, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as Python has a package that is not there
    code, _, err = on_disk.main(capsys, *on_disk.run(tmp_path / "out", report_to="wandb"))
    assert code != 0 and "--report-to wandb: it is not installed: pip install wandb" in err
    assert not (tmp_path / "out").exists()
    assert on_disk.main(capsys, *on_disk.run(tmp_path / "none", steps=1, report_to="none"))[0] == 0
