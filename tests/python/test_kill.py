"""kill -9 at any instant: the last complete checkpoint loads, and going on gives the same losses, bit for bit."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import tiny

STEPS = 10


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = tiny.Bench(tmp_path_factory.mktemp("kill"))
    config = {"engine": {"chunk_elements": 4096, "placement": "nvme"}}
    (made.root / "nvme.json").write_text(json.dumps(config))
    return made


def arguments(bench, out):
    return bench.train_args(
        out, steps=STEPS, accumulate=2, save_every=1, keep=2, eval_batches=0, config=bench.root / "nvme.json"
    )


@pytest.fixture(scope="module")
def straight(bench):
    """Losses of a run that nothing disturbed."""
    from overspill.cli import main

    assert main([str(a) for a in arguments(bench, bench.root / "straight")]) == 0
    return tiny.losses(bench.root / "straight")


def kill_when_saving(process, out, rng) -> bool:
    """Kills in the middle of a save, after some of them; False when the run ended before.

    The process is stopped before it is killed, so that a save that ended in between is seen, and the next one is taken.
    """
    saves = rng.randint(1, 3)
    seen: set[str] = set()
    while process.poll() is None:
        seen |= partials(out)
        if len(seen) < saves:
            continue
        process.send_signal(signal.SIGSTOP)
        while " T " not in state(process.pid) and process.poll() is None:
            pass
        if partials(out):
            process.send_signal(signal.SIGKILL)
            return True
        process.send_signal(signal.SIGCONT)
    return False


def partials(out) -> set[str]:
    return {p.name for p in (out / "checkpoints").glob("*.partial")}


def state(pid: int) -> str:
    """What /proc says of a process after its name: its state, ' T ' when it is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return ""


def kill_at_random(process, out, rng) -> bool:
    """Kills some milliseconds after some step; False when the run ended before."""
    before = len(tiny.log(out)) if (out / "log.jsonl").exists() else 0
    tiny.wait_for_step(process, out, min(STEPS, before + rng.randint(1, 3)))
    time.sleep(rng.uniform(0, 0.1))
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    return True


def run_with_kills(bench, out, kills, straight, seed) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    saves_hit = 0
    for number in range(kills):
        started = bench.start(
            ["train", "--out", out, "--resume"] if (out / "run.json").exists() else arguments(bench, out)
        )
        killed = (kill_when_saving if number % 2 else kill_at_random)(started, out, rng)
        _, err = started.communicate(timeout=240)
        left = [p.name for p in (out / "checkpoints").iterdir()]
        saves_hit += bool(partials(out))
        print(f"kill {number}: {'killed' if killed else 'ended before'}, left {sorted(left)}")
        if not killed:
            assert started.returncode == 0, err
            break
    assert saves_hit, "no save was hit, so this run tested nothing of it"
    last = bench.start(["train", "--out", out, "--resume"])
    _, err = last.communicate(timeout=240)
    assert last.returncode == 0, err
    assert tiny.losses(out) == straight
    assert not list((out / "checkpoints").glob("*.partial"))
    assert not list(bench.nvme.iterdir()), "a killed run's files stayed on the disk"


def test_kill_training_and_saving(bench, straight, tmp_path):
    run_with_kills(bench, tmp_path / "out", 2, straight, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_many_kills(bench, straight, tmp_path, seed):
    run_with_kills(bench, tmp_path / "out", 8, straight, seed)
