"""One seeded trial of whole command lines: a run of `overspill train` to which things happen (test_command_trial.py).

After every act: a checkpoint verifies, once one was saved; no command removed one that is as new as it; the log has the
losses of a run that nothing disturbed.
"""

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import disks
import tiny

STEPS = 12  # of a run in all
PATIENCE_SECONDS = 120


class Failed(AssertionError):
    """A promise was broken; the message has the acts so far."""


def verifies(path: Path) -> bool:
    from overspill import CheckpointError, StoreError, _core

    try:
        _core.verify(str(path), None)
    except (CheckpointError, StoreError, OSError):
        return False
    return True


def identity(checkpoint: Path) -> str:
    """By what the manifest says: a rename changes nothing."""
    return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()


def with_manifest(folder: Path) -> list[Path]:
    items = folder.iterdir() if folder.is_dir() else ()
    return [path for path in items if (path / "manifest.json").is_file()]


def complete(folder: Path) -> dict[str, Path]:
    """Checkpoints with a manifest, by identity; of copies one."""
    return {identity(path): path for path in with_manifest(folder)}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1].split(".")[0])


def saved_at(checkpoint: Path) -> int:
    return (checkpoint / "manifest.json").stat().st_mtime_ns


class Trial:
    """`straight`: an undisturbed run that kept every checkpoint. `disk`: a small file system or None."""

    def __init__(self, seed: int, bench, server, straight: Path, root: Path, disk: Path | None):
        self.rng = random.Random(seed)
        self.bench, self.server, self.straight, self.root, self.disk = bench, server, straight, root, disk
        self.losses = tiny.losses(straight)
        where = disk or root
        self.out = where / "out"
        self.checkpoints = self.out / "checkpoints"
        # States beside the checkpoints, which are links then, or on another file system.
        first = where if self.rng.random() < 0.6 else root
        self.paths = [first / "nvme-0", root / "nvme-1"]
        for path in self.paths:
            path.mkdir()
        self.away = root / "away"
        self.away.mkdir()
        self.keep = self.rng.choice([1, 1, 2, 3])
        self.save_every = self.rng.choice([1, 1, 2, 3])
        self.bad: set[str] = set()  # ids of checkpoints that this trial has damaged
        self.gone = False  # it has taken checkpoints away
        self.saved = False
        self.before: dict[str, tuple[Path, int]] = {}
        self.branch: tuple[str, int] | None = None  # the id of what it was told to go on from, and when
        self.story: list[str] = [
            f"seed {seed}, keep {self.keep}, save every {self.save_every}, out {self.out}"
        ]

    # --- acts -------------------------------------------------------------------------------------------------

    def run(self, acts: int) -> None:
        try:
            self.act("train", lambda: self.command(self.begin(), self.rng.random() < 0.5))
            for _ in range(acts):
                name = self.rng.choice(sorted(ACTS))
                self.act(name, lambda name=name: ACTS[name](self))
            self.act("finish", self.finish)
        except Exception as error:
            story = "\n".join(self.story)
            raise Failed(f"{type(error).__name__}: {error}\n{story}") from error
        print("\n".join(self.story))

    def act(self, name: str, do) -> None:
        self.story.append(name)
        do()
        self.check()
        left = sorted(p.name for p in self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []
        self.story[-1] += f" -> {left}"

    def begin(self) -> list:
        arguments = self.bench.run(
            self.out,
            accumulate=2,
            steps=self.rng.randint(1, 4),
            nvme=self.paths[0],
            save_every=self.save_every,
            keep=self.keep,
        )
        return arguments

    def resume(self, where: Path | None = None) -> list:
        if not (self.out / "run.json").exists():
            return self.begin()
        last = max([0, *(r["step"] for r in self.log())])
        steps = min(STEPS, last + self.rng.randint(1, 3))
        return ["train", "--out", self.out, "--resume", *[where] * bool(where), "--steps", steps]

    def log(self) -> list[dict]:
        return tiny.log(self.out) if (self.out / "log.jsonl").exists() else []

    def command(
        self, arguments: list, kill: bool = False, full: bool = False, target: Path | None = None
    ) -> None:
        """Runs it, killed at some moment or to its end. It may fail only for what this trial has done."""
        began = time.time_ns()
        there = {
            path: (identity(path), saved_at(path))
            for folder in (self.checkpoints, self.away)
            for path in with_manifest(folder)
        }
        started = self.server.start(*arguments)
        if kill:
            self.kill(started)
        else:
            self.wait(started)
        code, said = started.wait(), started.output
        self.story[-1] += f" {arguments[-3:]} {'killed' if code == -signal.SIGKILL else code}"
        assert "Traceback" not in said, said
        self.check_branch(said, there, began, named=target is not None)
        if code == 0 and arguments[0] == "train":
            self.check_said(said)
        if code in (0, -signal.SIGKILL):
            return
        excused = (
            (full and "space" in said)
            or (
                self.gone
                and ("which is gone" in said or (self.none_is_left() and "holds no checkpoint" in said))
            )
            or any(str(path) in said for path in self.damaged(target))
        )
        assert code == 1 and excused, f"ended with {code}:\n{said}"
        self.story[-1] += f" ({said.strip().splitlines()[-1][:160]})"

    def none_is_left(self) -> bool:
        """Of the branch that goes on: the others are set aside, and have to be named."""
        return not any(re.fullmatch(r"step-\d+", path.name) for path in complete(self.checkpoints).values())

    def check_branch(self, said: str, there: dict[Path, tuple[str, int]], began: int, named: bool) -> None:
        """A plain --resume goes on from what the run was told to go on from, or from what was saved since."""
        found = re.search(r"^going on from (.+), step \d+$", said, re.MULTILINE)
        if found is None or "is reached already" in said:
            return
        source = Path(found[1])
        name, when = there[source]
        if named:
            self.branch = name, began
        elif self.branch is not None:
            first, since = self.branch
            assert name == first or when > since, f"went on from {source}, which is of a branch that was left"

    def check_said(self, said: str) -> None:
        """What a command calls its checkpoint is one, of the step that it reached."""
        path = Path(re.search(r"^checkpoint (.+)$", said, re.MULTILINE)[1])
        assert verifies(path), f"{path} is named and does not verify"
        last = re.findall(r"^step (\d+)(?:/| is reached)", said, re.MULTILINE)[-1]
        assert step_of(path) == int(last), f"{path} is named after step {last}"

    def damaged(self, target: Path | None) -> list[Path]:
        """Checkpoints of which a command may say that they are damaged."""
        found = [path for name, path in complete(self.checkpoints).items() if name in self.bad]
        return found + [target] * (target is not None and not verifies(target))

    def wait(self, started) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not started.ended():
            if time.monotonic() > deadline:
                started.signal(signal.SIGKILL)
                raise AssertionError(f"hangs:\n{started.output}")
            time.sleep(0.005)

    def kill(self, started) -> None:
        """At a moment of the clock, at a step, or when a file appears that is there for a moment only."""
        kind = self.rng.choice(["clock", "step", "file"])
        pattern = self.rng.choice(
            ["checkpoints/*.partial", "checkpoints/*/hf.part", "*.part*", "checkpoints/*.abandoned*"]
        )
        moment = time.monotonic() + self.rng.uniform(0, 1.2)
        lines = len(self.log()) + self.rng.randint(0, 2)
        here = set(self.out.glob(pattern)) if self.out.exists() else set()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not started.ended() and time.monotonic() < deadline:
            if (
                (kind == "clock" and time.monotonic() > moment)
                or (kind == "step" and len(self.lines()) > lines)
                or (kind == "file" and set(self.out.glob(pattern)) - here)
            ):
                break
            time.sleep(0.0005)
        started.signal(signal.SIGKILL)
        self.story[-1] += f" [{kind}{' ' + pattern if kind == 'file' else ''}]"

    def lines(self) -> list[str]:
        path = self.out / "log.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def pick(self, good: bool) -> Path | None:
        """A checkpoint of the folder, set aside or not."""
        found = complete(self.checkpoints)
        usable = [path for name, path in sorted(found.items()) if not good or name not in self.bad]
        return self.rng.choice(usable) if usable else None

    def go_on(self) -> None:
        self.command(self.resume())

    def go_on_and_kill(self) -> None:
        self.command(self.resume(), kill=True)

    def go_on_from_older(self) -> None:
        older = self.pick(good=True)
        if older is None:
            return
        steps = min(STEPS, step_of(older) + self.rng.randint(0, 3))
        arguments = ["train", "--out", self.out, "--resume", older, "--steps", max(1, steps)]
        self.command(arguments, kill=self.rng.random() < 0.4, target=older)

    def go_on_over_two_disks(self) -> None:
        disks_ = [argument for path in self.paths for argument in ("--nvme", path)]
        if (self.out / "run.json").exists():
            self.command([*self.resume(), *disks_])

    def go_on_with_a_full_disk(self) -> None:
        if self.disk is None:
            return
        ballast = self.disk / "ballast"
        disks.fill(ballast)
        size = ballast.stat().st_size
        os.truncate(ballast, max(0, size - self.rng.choice([0, 1 << 12, 1 << 18, 3 << 20, 9 << 20])))
        try:
            self.command(self.resume(), full=True)
        finally:
            ballast.unlink()

    def copy_and_go_on_there(self) -> None:
        source = self.pick(good=True)
        if source is None:
            return
        copy = self.away / f"copy-{self.rng.random()}"
        subprocess.run(["cp", "-r", source, copy], check=True)
        assert verifies(copy), "a copy is no checkpoint"
        steps = min(STEPS, step_of(source) + self.rng.randint(1, 2))
        if self.rng.random() < 0.5:
            self.gone = True  # it may be asked for again when there is no newer one
            self.command(["train", "--out", self.out, "--resume", copy, "--steps", steps], target=copy)
        if self.rng.random() < 0.5:
            shutil.rmtree(copy)

    def move_away_and_back(self) -> None:
        source = self.pick(good=False)
        if source is None or not self.another_good(source):
            return
        self.gone = True
        moved = self.away / source.name
        if moved.exists():
            return
        subprocess.run(["mv", source, moved], check=True)
        self.forget()
        if self.rng.random() < 0.5:
            self.command(self.resume())
        if not source.exists():
            subprocess.run(["mv", moved, source], check=True)
        self.forget()

    def delete(self) -> None:
        victim = self.pick(good=False)
        if victim is not None and self.another_good(victim):
            self.gone = True
            shutil.rmtree(victim)
            self.forget()

    def damage(self) -> None:
        victim = self.pick(good=True)
        if victim is None or not self.another_good(victim):
            return
        name = next(name for name, path in complete(self.checkpoints).items() if path == victim)
        if any(p.stat().st_nlink > 1 for p in victim.glob("*.bin")):
            return  # its slabs are another checkpoint's too
        (victim / "resident.bin").unlink(missing_ok=True)
        for slab in victim.glob("*.bin"):
            slab.write_bytes(bytes(slab.stat().st_size))
        assert not verifies(victim)
        self.bad.add(name)

    def merge(self) -> None:
        source = self.pick(good=True)
        if source is None or step_of(source) > STEPS:
            return
        self.compare(source)

    def another_good(self, victim: Path) -> bool:
        return any(path != victim and verifies(path) for path in complete(self.checkpoints).values())

    def finish(self) -> None:
        """To the last step, from the newest that is whole, then merged: every bit of the undisturbed run's."""
        latest = self.newest_good()
        chosen = [] if latest is None else ["--resume", latest]
        arguments = ["train", "--out", self.out, *chosen, "--steps", STEPS]
        self.branch = None
        if latest is None:
            shutil.rmtree(self.out, ignore_errors=True)
            self.before = {}
            arguments = [*self.begin(), "--steps", STEPS]
        self.command(arguments)
        if self.bad and not (self.checkpoints / f"step-{STEPS:06d}").exists():
            return  # it was there under another name already
        losses = tiny.losses(self.out)  # without the steps that a rewind dropped, if a later one then went on
        assert losses == {step: self.losses[step] for step in losses} and STEPS in losses
        last = max(complete(self.checkpoints).values(), key=lambda p: (step_of(p), verifies(p)))
        assert step_of(last) == STEPS
        self.compare(last)
        for path in self.paths:
            # Parts of checkpoints stay as long as these, and beyond where the trial deleted one by hand.
            left = [item for item in path.iterdir() if item.suffix != ".overspill"]
            assert not left, "files of a run stayed on the disk"

    def compare(self, checkpoint: Path) -> None:
        step = step_of(checkpoint)
        mine, theirs = self.root / f"merged-{len(self.story)}", self.straight.parent / f"merged-{step}"
        if not theirs.exists():
            self.command(["merge", self.straight / f"checkpoints/step-{step:06d}", theirs, "--dtype", "fp32"])
        small = [] if (checkpoint / "hf").is_dir() else ["--model", self.bench.model]
        self.command(["merge", checkpoint, mine, "--dtype", "fp32", *small])
        assert tiny.tree(mine) == tiny.tree(theirs), f"{checkpoint} has other weights"
        shutil.rmtree(mine)

    # --- what holds after every act ----------------------------------------------------------------------------

    def newest_good(self) -> Path | None:
        found = sorted(complete(self.checkpoints).values(), key=saved_at, reverse=True)
        return next((path for path in found if verifies(path)), None)

    def forget(self) -> None:
        """What the trial itself took away is not missed, nor is what it may have put back on any branch."""
        self.branch = None
        self.note()

    def note(self) -> None:
        self.before = {name: (path, saved_at(path)) for name, path in complete(self.checkpoints).items()}

    def check(self) -> None:
        now = complete(self.checkpoints)
        good = self.newest_good()
        self.saved = self.saved or bool(now)
        assert good is not None or not self.saved, "no checkpoint is left that verifies"
        for name, (path, when) in self.before.items():
            if name not in now:
                assert ".abandoned" not in path.name, f"{path.name} was set aside and is gone"
                assert when < saved_at(good), f"{path.name} is newer than {good.name}, and is gone"
        self.note()
        steps = {record["step"]: record["loss"] for record in self.parsed()}
        for step, loss in steps.items():
            assert loss == self.losses[step], f"the loss of step {step} is {loss}, not {self.losses[step]}"

    def parsed(self) -> list[dict]:
        from overspill.cli.run_folder import RunFolder

        return RunFolder(self.out).records()


ACTS = {
    "go on": Trial.go_on,
    "go on, kill": Trial.go_on_and_kill,
    "go on, kill, once more": Trial.go_on_and_kill,
    "go on from older": Trial.go_on_from_older,
    "go on from older, once more": Trial.go_on_from_older,
    "go on over two disks": Trial.go_on_over_two_disks,
    "go on with a full disk": Trial.go_on_with_a_full_disk,
    "copy": Trial.copy_and_go_on_there,
    "move away and back": Trial.move_away_and_back,
    "delete": Trial.delete,
    "damage": Trial.damage,
    "merge": Trial.merge,
}
