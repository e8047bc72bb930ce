"""Ranks whose control flow differs: experts, skipped layers, evaluation on one rank, micro-batches without a backward,
budgets of their own. Against one process that does what all of them do."""

import json

import launch
import odd_job
import pytest


def run(folder, placement: str, stage: int) -> list[dict]:
    ended = launch.run(odd_job.WORLD, "odd_job.py", folder, placement, stage)
    return [json.loads(process.out) for process in ended]


def losses(said: list[dict]) -> dict[tuple, float]:
    return {tuple(key): loss for rank in said for key, loss in rank["losses"]}


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.long)])
def test_as_one_process(tmp_path, stage):
    said = run(tmp_path, "host", stage)
    for rank in said[1:]:
        assert (rank["weights"], rank["norm"]) == (said[0]["weights"], said[0]["norm"])
    alone = odd_job.train(str(tmp_path), "host", str(stage))
    expected = losses([alone])
    assert losses(said).keys() == expected.keys() and len(expected) > 2 * odd_job.STEPS
    assert losses(said) == pytest.approx(expected, rel=1e-5)
    assert said[0]["norm"] == pytest.approx(alone["norm"], rel=1e-5)


def test_twice_the_same_bits(tmp_path):
    assert run(tmp_path, "half", 3) == run(tmp_path, "host", 3)
