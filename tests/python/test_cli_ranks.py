"""overspill train under torchrun: two ranks take the steps of one with twice the batch, one writes and speaks, a stop
and a resume are of both."""

import json
import os
import signal
import subprocess
import time

import pytest
import tiny

from overspill.cli.ranks import Ranks, SharedStop

EXACT = {"dtype": "fp32", "batch": 2, "lr": 1e-3, "save_minutes": 0, "keep": 9}
TWO = {"steps": 4, "accumulate": 2, "save_every": 2, "eval_every": 2}
HANGS = 240


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = tiny.Bench(tmp_path_factory.mktemp("ranks"))
    tiny.make_model(made.root / "model", made.texts, dropout=0.0)  # whose draws would differ
    made.env |= {"OMP_NUM_THREADS": "1"}
    return made


def start(bench, arguments, ranks=2):
    program = (
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--standalone",
        "--local-addr=127.0.0.1",
    )
    return bench.start(arguments, program=(*program, "-m", "overspill.cli"), start_new_session=True)


def finish(process):
    try:
        out, err = process.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def ok(bench, arguments, ranks=2):
    code, out, err = finish(start(bench, arguments, ranks))
    assert code == 0, f"{out}\n{err}"
    return out


def losses(out):
    return [(record["step"], record["loss"], record["tokens"]) for record in tiny.log(out)]


@pytest.fixture(scope="module")
def together(bench):
    """Two ranks' run of four steps, and what they printed."""
    out = bench.root / "together"
    return out, ok(bench, bench.train_args(out, **EXACT, **TWO, eval_batches=4))


def test_two_ranks_take_the_steps_of_one_with_twice_the_batch(together, bench, capsys):
    out, said = together
    alone = bench.root / "alone"
    bench.ok(
        capsys,
        *bench.train_args(alone, **EXACT | {"batch": 4}, **TWO, eval_batches=2),
    )
    found, wanted = losses(out), losses(alone)
    assert [(step, tokens) for step, _, tokens in found] == [(step, tokens) for step, _, tokens in wanted]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in wanted], rel=1e-5)
    measured = [json.loads((each / "run.json").read_text())["heldout"] for each in (out, alone)]
    assert measured[0].keys() == {"0", "2", "4"} and measured[0] == pytest.approx(measured[1], rel=1e-5)
    assert said.count("step 4/4") == 1 and said.count("held-out loss after") == 1, "one rank speaks"
    assert "ranks: 2; what follows is of rank 0" in said
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_a_run_that_goes_on_ends_as_one_that_never_stopped(together, bench, capsys):
    out, _ = together
    twice = bench.root / "twice"
    ok(bench, bench.train_args(twice, **EXACT, steps=2, accumulate=2))
    assert "was saved by 2 ranks, and this run has 1 (torchrun's --nproc_per_node" in bench.fails(
        capsys, "train", "--out", twice, "--resume", "--steps", 4
    )
    ok(bench, ["train", "--out", str(twice), "--resume", "--steps", "4"])
    assert losses(twice) == losses(out)
    merged = [bench.root / f"merged-{name}" for name in ("one", "other")]
    for run, folder in zip((out, twice), merged, strict=True):
        bench.ok(capsys, "merge", run / "checkpoints/step-000004", folder, "--dtype", "fp32")
    one, other = ((folder / "model.safetensors").read_bytes() for folder in merged)
    assert one == other


def test_sigterm_ends_all_ranks_with_a_checkpoint(bench):
    out = bench.root / "stopped"
    process = start(bench, bench.train_args(out, **EXACT, steps=100_000, eval_batches=0))
    deadline = time.monotonic() + HANGS
    while not (out / "log.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said, err = finish(process)
    steps = len(tiny.log(out))
    assert f"stopped at step {steps}; saved " in err, f"{said}\n{err}"
    assert (
        "after the current step" in err and "Traceback (most recent call last)" not in err.split("torch/")[0]
    )
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert (out / "checkpoints" / f"step-{steps:06d}" / "hf").is_dir()


def test_an_adapter(bench, capsys):
    pytest.importorskip("peft", reason="PEFT is not installed (requirements-dev.txt)")
    out, alone = bench.root / "lora", bench.root / "lora-alone"
    options = EXACT | {"steps": 3, "lora_rank": 4}
    ok(bench, bench.train_args(out, **options))
    bench.ok(capsys, *bench.train_args(alone, **options | {"batch": 4}))
    assert [loss for _, loss, _ in losses(out)] == pytest.approx(
        [loss for _, loss, _ in losses(alone)], rel=1e-5
    )
    bench.ok(capsys, "merge", out / "checkpoints/step-000003", bench.root / "lora-merged")


def test_a_mistake_is_told_once_and_ends_all(bench):
    code, _, err = finish(start(bench, bench.train_args(bench.root / "wrong", **EXACT, lora_targets="x")))
    assert code != 0 and "--lora-targets is of an adapter" in err


class Group:
    """What two ranks tell each other, where the other one always says `other`."""

    def __init__(self, rank, other):
        self.rank, self.world, self.other = rank, 2, other

    def gathered(self, value):
        return [value, self.other] if self.rank == 0 else [self.other, value]


class Asked:
    listening = None

    def __init__(self, number):
        self.signal = number

    def __bool__(self):
        return self.signal is not None


def test_a_stop_of_another_rank_is_seen_by_all_and_at_no_other_place():
    stop = SharedStop(Asked(None), Ranks(Group(0, signal.SIGTERM)))
    assert not stop
    stop.look()
    assert stop and stop.exit_code == 128 + signal.SIGTERM
    own = SharedStop(Asked(signal.SIGINT), Ranks(Group(1, 0)))
    assert not own, "the other rank does not know yet"
    own.look()
    assert own and own.exit_code == 128 + signal.SIGINT
    assert SharedStop(Asked(signal.SIGINT), Ranks(None)), "one rank alone leaves the step"
    assert Ranks(Group(1, "theirs")).of_first("mine") == "theirs"
