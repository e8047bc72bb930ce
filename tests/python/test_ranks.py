"""overspill.initialize over several ranks (gloo): losses and weights of one process with the same global batch."""

import json
import os
import random
import signal
import subprocess
import time

import divided_job
import launch
import pytest
import ranks_job
import torch

import overspill
from overspill import ranks
from overspill.cli import main

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # relative, of a loss


def learn(world, folder, placement="half", precision="fp32", accumulation=1):
    if world == 1:
        return [ranks_job.learn(str(folder), placement, precision, accumulation)]
    ended = launch.run(world, "ranks_job.py", "learn", folder, placement, precision, accumulation)
    return [json.loads(process.out) for process in ended]


def global_losses(said: list[dict]) -> list[float]:
    return [sum(losses) / len(said) for losses in zip(*(rank["losses"] for rank in said), strict=True)]


def check_alike(said: list[dict]) -> None:
    """Every rank has the same weights, norm and buffers, bit for bit."""
    for rank in said:
        assert {**rank, "losses": None} == {**said[0], "losses": None}


@pytest.mark.parametrize(
    "world, precision, placement, accumulation",
    [(2, "fp32", "half", 1), (3, "fp32", "nvme", 2), (2, "bf16", "nvme", 2)],
)
def test_as_one_process_with_the_same_batch(tmp_path, world, precision, placement, accumulation):
    alone = learn(1, tmp_path, placement, precision, accumulation)
    said = learn(world, tmp_path, placement, precision, accumulation)
    check_alike(said)
    assert said[0]["scale"] == alone[0]["scale"], "buffers are rank 0's"
    assert global_losses(said) == pytest.approx(alone[0]["losses"], rel=TOLERANCE[precision])


def test_placement_changes_no_bit(tmp_path):
    nvme, host = (learn(2, tmp_path, placement, "bf16") for placement in ("nvme", "host"))
    for one, other in zip(nvme, host, strict=True):
        assert {**one, "states_bytes": None} == {**other, "states_bytes": None}


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_that_pass_units_together_leave_no_rank_a_whole_gradient(tmp_path, stage):
    for process in launch.run(2, "ranks_job.py", "together", tmp_path, stage):
        apart, together = json.loads(process.out)
        assert together["losses"] == apart["losses"], "bit for bit"
        assert together["gradients"] == pytest.approx(apart["gradients"] / 2)
        assert apart["pool"] == 0 < together["pool"]


@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_that_backward_computes_again(tmp_path, stage):
    for process in launch.run(2, "ranks_job.py", "recomputed", tmp_path, stage):
        kept, again = json.loads(process.out)
        assert again["again"] == ranks_job.STEPS * 2 * 4 - 1 and kept["again"] == 0
        assert again | {"again": 0} == kept, "bit for bit"


def test_a_graph_has_the_times_of_sums_and_of_writes(tmp_path):
    for process in launch.run(2, "ranks_job.py", "graph", tmp_path):
        for seconds in json.loads(process.out):
            assert seconds and all(each > 0 for each in seconds)


def test_a_group_of_the_users(tmp_path):
    three = launch.run(3, "ranks_job.py", "two_of_three", tmp_path)
    assert three[1].out == ""
    assert [json.loads(three[rank].out) for rank in (0, 2)] == learn(2, tmp_path)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("by", ["hand", "torch"])
def test_norms_of_a_model_that_others_hold_the_rest_of(tmp_path, by, world):
    """Tensor parallelism beside the engine: the norm, and so the clipping, of one process that holds all of it."""
    alone = divided_job.divided(str(tmp_path))
    assert min(alone["norms"]) > 0.1, "clipped"
    said = [
        json.loads(process.out) for process in launch.run(world, "divided_job.py", "divided", tmp_path, by)
    ]
    for rank in said:
        assert rank["norms"] == said[0]["norms"], "one norm, bit for bit"
        assert rank["norm.weight"] == said[0]["norm.weight"], "copies stay copies"
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert rank["norm.weight"] == pytest.approx(alone["norm.weight"], rel=1e-5)
    of_rows = [sum(of) / (world / 2) for of in zip(*(rank["losses"] for rank in said[::2]), strict=True)]
    assert of_rows == pytest.approx(alone["losses"], rel=1e-5)


def test_what_can_be_done_with_a_model_of_dtensors(tmp_path):
    for process in launch.run(2, "divided_job.py", "parallelized", tmp_path):
        rank = json.loads(process.out)
        assert rank["weight"] == rank["copied"] == rank["state_dict"] == rank["gathered"]
        assert rank["moments"] == [[48, 24], True], "of this rank's half"
        assert rank["twice"][0] == rank["twice"][1], "a checkpoint has all of this rank's part"
        assert rank["grad"][0] == rank["grad"][1], "what is written into a gradient stays there"
        assert rank["zeroed"] == 0.0
        no_group, too_small, checkpoint = rank["errors"]
        assert "norm.weight is a DTensor on ranks [0, 1]: give model_group=mesh.get_group()" in no_group
        assert "model_group has [" in too_small
        assert "load them, then divide the model" in checkpoint


class Pair:
    """A group of two, whose other rank says `theirs`."""

    def __init__(self, rank, theirs):
        self.rank, self.theirs = rank, theirs

    def gathered(self, value):
        return [value, self.theirs] if self.rank == 0 else [self.theirs, value]


def test_what_is_counted_elsewhere():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first = model[0].weight
    assert ranks.counted_elsewhere(None, model, ()) == set()
    both = {first: "tied", "1.weight": "1.weight"}
    assert ranks.counted_elsewhere(Pair(0, ["1.weight", "tied"]), model, both) == set(), "rank 0 counts"
    group = Pair(1, ["tied"])
    assert ranks.counted_elsewhere(group, model, {first: "tied"}) == {id(first)}
    assert ranks.counted_elsewhere(group, model, {first: "tied"}, {"0.weight": "known"}) == {id(first)}
    with pytest.raises(ranks.RankError, match=r"tied on rank 0 .* no other"):
        ranks.counted_elsewhere(group, model, ["0.weight"])
    with pytest.raises(ValueError, match=r"'1\.scale', which is no parameter"):
        ranks.counted_elsewhere(group, model, ["1.scale"])
    with pytest.raises(ValueError, match="give model_group"):
        overspill.initialize(model, {}, replicated=["0.weight"])
    with pytest.raises(ValueError, match="needs process_group too"):
        overspill.initialize(model, {}, model_group=object())


def test_what_has_to_be_alike(tmp_path):
    ended = launch.run(2, "ranks_job.py", "differ", tmp_path)
    assert ended[0].out == ended[1].out, "all ranks say the same"
    clipping, rate, dtype, stage, steps = ended[0].out.splitlines()
    assert clipping.startswith("overspill: gradient_clipping is 1.0 on rank 1 and 0.5 on rank 0")
    assert '"lr": 0.02' in rate and "on rank 1" in rate and "on rank 0" in rate
    assert "layers.0.weight" in dtype and "bfloat16" in dtype and "on rank 1" in dtype
    assert 'zero_optimization is {"stage": 2} on rank 1' in stage
    assert steps == "6"


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_gradients_of_several_ranks_are_refused_or_zero(tmp_path, stage):
    """Once what was not cleared was dropped without a word."""
    alone = ranks_job.uncleared(str(tmp_path), stage)
    assert alone["said"] == ["", "", "None", "", ""]
    # In interpreters of their own: each has its own order of hashes, and ends by clearing its modules.
    for process in launch.run(2, "ranks_job.py", "uncleared", tmp_path, stage, popen=subprocess.Popen):
        rank = json.loads(process.out)
        read, written, cleared, added, again = rank["said"]
        assert cleared == "None", "after model.zero_grad()"
        assert "reading the gradient of norm.weight" in read and "norm is engine.last_step.norm" in read
        assert "setting the gradient of norm.weight" in written
        assert "call optimizer.zero_grad() after each step" in added and added == again
        for name, value in alone["weights"].items():
            assert torch.allclose(torch.tensor(rank["weights"][name]), torch.tensor(value), atol=2e-4), name


def test_looking_from_outside(tmp_path):
    first, second = (json.loads(process.out) for process in launch.run(2, "ranks_job.py", "look", tmp_path))
    assert first == second
    alone = ranks_job.look(str(tmp_path))
    assert first.keys() == alone.keys()
    for name, value in alone.items():
        if name.endswith("states"):
            wanted, found = (sum(map(abs, numbers)) for numbers in (value, first[name]))
            assert found == pytest.approx(wanted, rel=0.02), (
                name
            )  # with signs it would be what cancellation leaves
        else:
            assert first[name] == pytest.approx(value, rel=0.02, abs=0.02), name
    assert set(first["written"]) == {0.0}


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_outside_forward(tmp_path, stage):
    said = [json.loads(process.out) for process in launch.run(2, "ranks_job.py", "outside", tmp_path, stage)]
    alone = ranks_job.outside(str(tmp_path), str(stage))
    for found in said:
        assert all(found["right"]) and found.keys() == alone.keys()
        for name, value in alone.items():
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_reads_alone_after_all_have_edited(tmp_path, stage):
    said = [
        json.loads(process.out)
        for process in launch.run(2, "ranks_job.py", "alone", tmp_path, stage, timeout=60)
    ]
    one = ranks_job.alone(str(tmp_path), str(stage))
    assert all(one.pop("right").values())
    for found in said:
        right = found.pop("right")
        assert all(right.values()), right
        assert found.keys() == one.keys()
        for name, value in one.items():
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert said[0] == said[1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_are_one_to_the_bit(tmp_path, stage, stage_3):
    ended = launch.run(2, "ranks_job.py", "learn", tmp_path, "half", "bf16", 2, stage)
    said = [json.loads(process.out) for process in ended]
    held = [rank.pop("states_bytes") / other.pop("states_bytes") for rank, other in zip(said, stage_3)]
    assert said == stage_3
    assert held == pytest.approx([2.0 if stage == 0 else 1.0] * 2, rel=0.1), "whole at stage 0, else divided"


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return learn(2, tmp_path_factory.mktemp("stage3"), "half", "bf16", 2)


@pytest.fixture
def stage_3(learnt):
    return [dict(rank) for rank in learnt]


def test_checkpoints(tmp_path):
    said = [json.loads(process.out) for process in launch.run(2, "ranks_job.py", "resume", tmp_path)]
    for rank in said:
        assert rank["twice"][0] == rank["twice"][1], "going back changes no bit"
        assert rank["state"] == {"world": 2}
    first, second = (rank["twice"][0] for rank in said)
    assert first["drawn"] != second["drawn"], "each rank has its own random state"
    alone = ranks_job.opened(str(tmp_path))
    assert alone["weights"] == first["weights"] == second["weights"]
    both = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert alone["losses"] == pytest.approx(both, rel=1e-3)


def test_a_mistake_in_one_script_ends_all(tmp_path):
    ended = launch.finish(launch.start(3, "ranks_job.py", "bug", tmp_path))
    assert "ValueError: a mistake" in ended[1].err, launch.told(ended)
    for rank in (0, 2):
        assert ended[rank].code == 1, launch.told(ended)
        assert "rank 1 failed: ValueError: a mistake" in ended[rank].err, launch.told(ended)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.long) for s in range(1, 20))])
def test_a_rank_killed_while_training_is_named(tmp_path, seed):
    rng = random.Random(seed)
    agent = launch.torchrun(3, launch.HERE / "ranks_job.py", "endless", tmp_path, popen=subprocess.Popen)
    ids, victim = launch.ranks_of(agent, 3), rng.randrange(3)
    time.sleep(rng.uniform(0, 0.2))
    os.kill(ids[victim], signal.SIGKILL)
    (ended,) = launch.finish([agent])
    for survivor in set(range(3)) - {victim}:
        error = [line for line in ended.err.splitlines() if f"[rank{survivor}]: overspill" in line]
        assert error and f"rank {victim} is gone" in error[0], f"victim {victim}\n{ended}"


def test_a_garbage_collection_on_a_thread_of_the_core_closes_the_engine_on_another(tmp_path):
    for process in launch.run(2, "ranks_job.py", "collected", tmp_path):
        assert process.out.split() == ["collected", "True", "closed", "True"], process


def test_a_rank_that_announces_more_than_there_can_be_is_refused_by_name():
    with pytest.raises(overspill.EngineFailed, match="rank 3 announces 1099511627776 bytes"):
        ranks.Group._bounded(None, 3, (1 << 40).to_bytes(8, "little"))


def test_each_rank_gets_its_part_of_every_epoch():
    data = torch.arange(10)
    parts = [ranks.sampler(data, 2, rank, seed=4) for rank in range(2)]
    epochs = [[list(part) for part in parts] for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch[0] + epoch[1]) == list(range(10))
    assert epochs[0] != epochs[1] != epochs[2], "each epoch in an order of its own"
    again = ranks.sampler(data, 2, 0, seed=4)
    again.set_epoch(1)
    assert list(again) == epochs[1][0], "set_epoch goes back to it"
    assert list(ranks.sampler(data, 2, 0, seed=5)) != epochs[0][0]


def test_the_train_command_says_how_several_ranks_are_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--out", str(tmp_path / "run")]) != 0
    assert "WORLD_SIZE is 2 and RANK is not set: start several ranks with torchrun" in capsys.readouterr().err
