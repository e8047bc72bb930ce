"""budget.process: a step that would not fit ends in forward, with a message, before the process has taken more."""

import json

import launch
import pytest
import torch
from torch import nn

import overspill
from overspill import memory
from overspill.activations import watch

MIB = 1 << 20


def of_run(**options):
    (process,) = launch.run(1, "watch_job.py", json.dumps(options))
    return json.loads(process.out.splitlines()[-1])


def test_a_forward_that_does_not_fit_ends_with_a_message(tmp_path):
    """Twelve layers that save 32 MiB each, where 200 MiB are left."""
    said = of_run(folder=str(tmp_path), left=200)
    assert "budget.process = " in said["error"] and "in forward, in " in said["error"]
    for way in (
        'engine.recompute = "blocks"',
        "budget.activations",
        "budget.logits",
        "a smaller budget.host than 96.0 MiB",
    ):
        assert way in said["error"], way
    assert said["peak"] <= said["limit"]
    assert said["after"] is not None, "the engine goes on with a smaller batch"


def test_a_backward_that_does_not_fit_ends_with_a_message(tmp_path):
    """Twelve layers whose backward makes 40 MiB each, which the engine is not told of, where 200 MiB are left."""
    said = of_run(folder=str(tmp_path), left=200, hoard=40)
    assert (
        "budget.process = " in said["error"] and " in backward, of which forward has saved" in said["error"]
    )
    assert said["peak"] <= said["limit"] + 40 * MIB, "one that the engine has not seen before it was there"
    assert said["after"] is not None, "the engine goes on"
    assert of_run(folder=str(tmp_path), left=700, hoard=40)["error"] is None


@pytest.mark.parametrize("way", [{"recompute": "blocks"}, {"activations": "40MiB"}])
def test_what_the_message_says_would_do_does(way, tmp_path):
    said = of_run(folder=str(tmp_path), left=330, **way)
    assert said["error"] is None and said["peak"] <= said["limit"]
    assert of_run(folder=str(tmp_path), left=330)["error"] is not None


def test_logits_are_seen_before_they_are_there(tmp_path):
    """They and their loss take three times 256 MiB, and all before them 192 MiB."""
    said = of_run(folder=str(tmp_path), left=700, head=8192)
    assert (
        "before a Linear whose result takes 256.0 MiB" in said["error"] and "budget.logits" in said["error"]
    )
    assert said["peak"] <= said["limit"]
    said = of_run(folder=str(tmp_path), left=700, head=8192, logits="16MiB")
    assert said["error"] is None and said["peak"] <= said["limit"]


def test_half_of_what_is_left_is_the_engines(config, tmp_path):
    limit = memory.own_bytes() + (1 << 30)
    said = config()
    said["budget"] = {"process": limit}
    engine, *_ = overspill.initialize(nn.Linear(4, 4), said)
    assert engine.config.budget.host == pytest.approx((limit - memory.own_bytes()) / 2, rel=0.3)
    assert engine.memory["budget_bytes"] == limit and engine.memory["resident_bytes"] > 0
    engine.close()


def test_a_process_that_has_no_room_beside_the_engine_is_refused(config):
    said = config()
    said["budget"] |= {"process": "256MiB"}
    with pytest.raises(
        overspill.ConfigError, match=r"budget\.process = 268435456: budget\.host = 268435456 is a part of it"
    ):
        overspill.initialize(nn.Linear(4, 4), said)
    said["budget"] |= {"process": "much"}
    with pytest.raises(overspill.ConfigError, match=r"budget\.process = 'much'"):
        overspill.initialize(nn.Linear(4, 4), said)


def test_a_process_that_has_taken_it_all_already_is_told(config):
    said = config()
    said["budget"] = {"process": "8MiB"}
    with pytest.raises(
        overspill.ConfigError, match=r"the process has .* already, and nothing is left of 8\.0 MiB"
    ):
        overspill.initialize(nn.Linear(4, 4), said)


def test_memory_that_is_saved_twice_counts_once():
    watching = watch.Watch(overspill.Config(budget={"process": "1TiB", "host": "1GiB"}))
    whole = torch.ones(1 << 20)
    for tensor in (whole, whole[: 1 << 19], whole.view(1024, 1024), torch.ones(1).expand(1 << 30)):
        watching.saved(tensor, nn.Linear(1, 1))
    assert watching._saved == (4 << 20) + 4
