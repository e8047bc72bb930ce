"""kill -9 at any instant: the last complete checkpoint loads, and going on gives the same losses, bit for bit."""

import json
import random
import signal
import time

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
    """Kills in the middle of a save, after some of them; False when the run ended before."""
    saves = rng.randint(1, 3)
    seen: set[str] = set()
    while process.poll() is None:
        seen |= {p.name for p in (out / "checkpoints").glob("*.partial")}
        if len(seen) >= saves:
            process.send_signal(signal.SIGKILL)
            return True
    return False


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
    for number in range(kills):
        started = bench.start(
            ["train", "--out", out, "--resume"] if (out / "run.json").exists() else arguments(bench, out)
        )
        killed = (kill_when_saving if number % 2 else kill_at_random)(started, out, rng)
        _, err = started.communicate(timeout=240)
        left = [p.name for p in (out / "checkpoints").iterdir()]
        print(f"kill {number}: {'killed' if killed else 'ended before'}, left {sorted(left)}")
        if not killed:
            assert started.returncode == 0, err
            break
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
