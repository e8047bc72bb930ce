"""budget.process: a step that would not fit ends in forward, with a message, before the process has taken more."""

import json

import launch
import pytest
from torch import nn

import overspill
from overspill import memory

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
    limit = memory.rss_bytes() + (1 << 30)
    said = config()
    said["budget"] = {"process": limit}
    engine, *_ = overspill.initialize(nn.Linear(4, 4), said)
    assert engine.config.budget.host == pytest.approx((limit - memory.rss_bytes()) / 2, rel=0.3)
    assert engine.memory["budget_bytes"] == limit and engine.memory["resident_bytes"] < limit
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
