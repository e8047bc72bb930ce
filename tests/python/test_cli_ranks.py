"""overspill train under torchrun: two ranks take the steps of one with twice the batch, one writes and speaks, a stop
and a resume are of both."""

import json
import os
import signal
import subprocess

import pytest
import tiny

from overspill.cli.ranks import Ranks, SharedStop
from overspill.cli.run_watch import RunWatch

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


def test_each_rank_writes_metrics_of_its_own(bench):
    out, file = bench.root / "metrics", bench.root / "run.prom"
    ok(bench, bench.train_args(out, **EXACT, steps=2, metrics=file))
    assert not file.exists()
    for rank in range(2):
        text = (bench.root / f"run-rank{rank}.prom").read_text()
        assert f'overspill_steps_total{{rank="{rank}"}} 2\n' in text
        assert f'overspill_train_loss{{rank="{rank}"}} {losses(out)[-1][1]!r}\n' in text
    assert RunWatch(out).figures()["ranks"] == 2


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
    told = bench.fails(capsys, "train", "--out", twice, "--resume", "--steps", 4)
    assert "was saved by 2 ranks, and this run has 1 (torchrun's --nproc_per_node" in told
    assert "go on with as many ranks as the run began with" in told
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
    tiny.wait_for_step(process, out, 1, HANGS)  # an empty log is there before anybody listens for signals
    process.send_signal(signal.SIGTERM)
    _, said, err = finish(process)
    steps = len(tiny.log(out))
    assert f"stopped at step {steps}; saved " in err, f"{said}\n{err}"
    assert "go on with: torchrun --nproc_per_node=2 -m overspill.cli train --out" in err
    assert "after the current step" in err
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


def changed(bench, tmp_path, text, **options):
    """Exit code and stderr of two ranks, in which `text` changes the command first; `rank` is which one it is."""
    path = tmp_path / "changed.py"
    head = "import os, sys\nrank = int(os.environ['RANK'])\n"
    path.write_text(f"{head}{text}\nfrom overspill.cli import main\nsys.exit(main())\n")
    program = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--local-addr=127.0.0.1")
    arguments = bench.train_args(tmp_path / "run", **EXACT | options)
    process = bench.start(arguments, program=(*program, str(path)), start_new_session=True)
    code, _, err = finish(process)
    return code, err


FAILS = {
    "before there is an engine": ("if rank == 1: sys.argv += ['--model', 'nowhere']", "rank 1 failed: "),
    "where the first rank makes the folder": (
        "from overspill.cli.run_folder import RunFolder\n"
        "def begin(self): raise OSError(28, 'No space left on device', 'run.json')\n"
        "if rank == 0: RunFolder.begin = begin",
        "rank 0 failed: run.json: No space left on device",
    ),
    "while it trains": (
        "from overspill.cli.run_folder import RunFolder\n"
        "def log(self, record): raise KeyError('unforeseen')\n"
        "if rank == 0: RunFolder.log = log",
        "rank 0 failed: ",
    ),
}


@pytest.mark.parametrize("where", FAILS)
def test_what_one_rank_raises_ends_the_other_with_its_reason(where, bench, tmp_path):
    """A rank once waited for the other one for half an hour, and no message came out."""
    text, said = FAILS[where]
    code, err = changed(bench, tmp_path, text, steps=50)
    assert code != 0 and said in err, err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("'--warmup', '1000'", "--warmup is 1000 on rank 1 and 0 on rank 0"),
        ("'--steps', '7'", "the last step is 7 on rank 1"),
    ],
)
def test_ranks_that_are_told_otherwise_are_refused(typed, said, bench, tmp_path):
    code, err = changed(bench, tmp_path, f"if rank == 1: sys.argv += [{typed}]", steps=3)
    assert code != 0 and said in err, err
    assert not (tmp_path / "run").exists()


def test_a_long_read_of_a_checkpoint_is_no_rank_that_is_gone(bench, tmp_path):
    config = tmp_path / "impatient.json"
    config.write_text(json.dumps({"engine": {"rank_timeout_seconds": 8, "checkpoints_kept": 1}}))
    text = (
        "import time\n"
        "from overspill import _core\n"
        "from overspill.cli import ranks\n"
        "ranks.LOOK_SECONDS, ranks.PATIENCE_SECONDS, whole = 1, 8, _core.verify\n"
        "def verify(*given):\n"
        "    time.sleep(15)\n"
        "    return whole(*given)\n"
        "_core.verify = verify"
    )
    code, err = changed(bench, tmp_path, text, steps=2, save_every=1, keep=1, config=config, eval_batches=0)
    assert code == 0, err
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000002"]


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
