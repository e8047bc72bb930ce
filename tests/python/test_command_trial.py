"""Random sequences of what people and machines do to a run: train, kill, go on, go on from an older checkpoint, a
second disk, a full disk, copy, move, delete, damage, merge. OVERSPILL_SEED repeats one."""

import os
import random

import command_server
import command_trial
import disks
import pytest
import tiny

ACTS = 6


@pytest.fixture(scope="module")
def server(on_disk, tmp_path_factory):
    return command_server.Server(tmp_path_factory.mktemp("output"), on_disk.env)


@pytest.fixture(scope="module")
def straight(on_disk, server):
    """A run that nothing disturbed and that kept all of its checkpoints."""
    out = on_disk.root / "trial-straight" / "out"
    out.parent.mkdir()
    steps = command_trial.STEPS
    run = server.start(*on_disk.run(out, accumulate=2, steps=steps, save_every=1, keep=steps))
    assert run.wait() == 0, run.output
    assert len(tiny.losses(out)) == steps
    return out


def one(seed: int, on_disk, server, straight, tmp_path) -> None:
    print(f"OVERSPILL_SEED={seed}")
    if seed % 2 and os.geteuid() == 0:
        with disks.small(tmp_path / "disk", "96m") as disk:
            command_trial.Trial(seed, on_disk, server, straight, tmp_path, disk).run(ACTS)
    else:
        command_trial.Trial(seed, on_disk, server, straight, tmp_path, None).run(ACTS)


def seeds(count: int) -> list[int]:
    """The seed that was asked for alone, or so many new ones; pytest-xdist wants the same tests in every process."""
    if "OVERSPILL_SEED" in os.environ:
        return [int(os.environ["OVERSPILL_SEED"])]
    return list(range(count))


def fresh(number: int) -> int:
    """Half of the trials are new ones every time, half are the same always."""
    if "OVERSPILL_SEED" in os.environ or number % 4 < 2:
        return number
    return 2 * random.SystemRandom().randrange(1 << 30) + number % 2


@pytest.mark.parametrize("number", seeds(10))
def test_whatever_happens_to_a_run_no_checkpoint_is_lost(number, on_disk, server, straight, tmp_path):
    one(fresh(number), on_disk, server, straight, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", seeds(200))
def test_whatever_happens_to_many_runs_no_checkpoint_is_lost(number, on_disk, server, straight, tmp_path):
    one(fresh(number), on_disk, server, straight, tmp_path)
