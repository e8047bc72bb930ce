"""The choice of blocks that backward computes again (`engine.recompute = "auto"`)."""

import gc
import re
import types
import weakref

import pytest
import torch
from recompute_scene import ARENA, COMPUTES_AGAIN, HAVE_BLOCKS, Repeats, built, calls_again, plainly
from test_zoo import compare, step_beside

import overspill
from overspill.activations import moving, recompute_plan
from plain import Plain

pytest_plugins = "recompute_scene"


@pytest.mark.parametrize("name", HAVE_BLOCKS)
def test_bit_equal_to_plain_with_some_of_each(name, again, monkeypatch):
    """Blocks that are computed again beside others, whose tensors move."""
    monkeypatch.setattr(moving, "FROM", 1)
    monkeypatch.setattr(recompute_plan.Seen, "choice", lambda seen: (seen.blocks + 1) // 2)
    model, batch = built(name)
    plain = Plain(built(name)[0])
    engine = again(model, arena=ARENA, recompute="auto", clipping=0.5)
    for i in range(5):
        step_beside(engine, plain, i, batch(i))
    compare(engine, plain)
    chosen = name in COMPUTES_AGAIN
    assert (calls_again(engine) > 0) == chosen
    assert ("; predicted for forward and backward" in engine.plan_text) == chosen


def seen(**figures):
    """A pass of ten blocks that gives 100 bytes to an arena of 20: a second of forward, two of backward."""
    usual = {
        "blocks": 10,
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "kept_bytes": 100,
        "keep_seconds": 0.0,
        "take_seconds": 0.0,
        "block_seconds": 0.1,
        "block_bytes": 9,
        "arena_bytes": 20,
        "write_bytes_per_s": 1e9,
        "read_bytes_per_s": 1e9,
    }
    return recompute_plan.Seen(**(usual | figures))


def test_disks_that_keep_up_leave_nothing_to_compute_again():
    assert seen(write_bytes_per_s=80.0, read_bytes_per_s=40.0).choice() == 0


def test_slow_disks_leave_nothing_to_move():
    assert seen(write_bytes_per_s=1e-3, read_bytes_per_s=1e-3).choice() == 9, (
        "the arena has room for the last one's"
    )


def test_between_them_some_blocks_are_computed_again():
    """Reading k blocks less saves 9 k / 20 s; computing them costs k / 10: until both take equally long."""
    found = seen(read_bytes_per_s=20.0)
    assert found.choice() == 4
    assert found.pass_seconds(4) < min(found.pass_seconds(3), found.pass_seconds(5))


def test_blocks_that_cost_more_than_their_bytes_are_moved():
    assert seen(read_bytes_per_s=20.0, block_seconds=10.0).choice() == 0


def test_copies_cost_time_however_fast_the_disks_are():
    """Each byte's; so a block that is computed faster than it is copied is computed again."""
    copied = seen(keep_seconds=3.0, take_seconds=2.0)
    assert copied.pass_seconds(0) == 3 + 5
    assert copied.choice() == 10
    assert copied.pass_seconds(10) == pytest.approx(3 + 0.1 * 5 + 10 * 0.1)
    assert seen(keep_seconds=0.3, take_seconds=0.2).choice() == 0


def test_what_is_outside_blocks_counts():
    """A head that takes longer than all blocks: its backward hides what the disks read."""
    assert seen(read_bytes_per_s=20.0, backward_seconds=6.0).choice() == 0


def test_a_disk_that_was_not_measured_has_kept_up():
    assert recompute_plan._speed([5e8, 0.0]) == float("inf")
    assert seen(write_bytes_per_s=float("inf"), read_bytes_per_s=float("inf")).choice() == 0


def test_waiting_for_room_is_no_computing(again, monkeypatch):
    """By a clock on which a block takes a second, and the arena five for each tensor."""
    chosen, now = [], [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(recompute_plan, "time", clock)
    monkeypatch.setattr(moving, "time", clock)
    monkeypatch.setattr(moving, "FROM", 1)
    choice, keep = recompute_plan.Seen.choice, moving.Moving._keep
    monkeypatch.setattr(recompute_plan.Seen, "choice", lambda found: chosen.append(found) or choice(found))

    def waits(*given):
        now[0] += 5
        return keep(*given)

    def work(part, x):
        now[0] += 1
        return x.tanh()

    monkeypatch.setattr(moving.Moving, "_keep", waits)
    engine = again(Repeats(work), arena=1 << 20, recompute="auto")
    for _ in range(3):
        engine.backward(engine(torch.randn(64, 32)))
        engine.step()
    (found,) = chosen
    assert now[0] > 50, "the arena was asked"
    assert (found.forward_seconds, found.block_seconds, found.blocks) == (3, 1, 3)
    assert found.keep_seconds >= 15 and found.keep_seconds % 5 == 0, "copies are counted apart"
    assert (found.backward_seconds, found.take_seconds) == (0, 0), "by this clock"
    assert found.block_bytes > 0 and found.kept_bytes >= 3 * found.block_bytes


def test_a_pass_without_a_backward_is_not_chosen_by(again):
    engine = again(Repeats(plainly), arena=1 << 20, recompute="auto")
    for _ in range(3):
        engine(torch.randn(64, 32))
    assert "not chosen yet" in engine.plan_text
    for _ in range(3):
        engine.backward(engine(torch.randn(64, 32)))
        engine.step()
    assert "not chosen yet" not in engine.plan_text


def test_the_waits_of_the_arena_are_counted(again, tmp_path):
    """An arena of one tensor: each has to wait until the one before is written."""
    engine = again(Repeats(plainly), arena=1 << 20, recompute="none")
    engine.backward(engine(torch.randn(8000, 32)))
    stats = engine.stats()
    assert stats["activations_written_bytes"] > 0 and stats["activations_wait_seconds"] > 0


def test_the_chosen_blocks_are_spread():
    assert recompute_plan.spread(8, 0) == [False] * 8 and recompute_plan.spread(8, 8) == [True] * 8
    assert recompute_plan.spread(6, 3) == [False, True] * 3
    assert sum(recompute_plan.spread(7, 3)) == 3


def test_a_plan_says_what_it_has_chosen(again):
    model = Repeats(plainly)
    engine = again(model, arena=1 << 20, recompute="auto")
    assert "not chosen yet, of 3 blocks" in engine.plan_text
    for _ in range(3):
        engine.backward(engine(torch.randn(512, 32)))
        engine.step()
    assert re.search(r"again in backward: \d of 3 blocks; predicted", engine.plan_text)


def test_a_planner_that_has_not_chosen_lets_the_engine_go(config):
    model = Repeats(plainly)
    settings = config("half", recompute="auto")
    settings["budget"]["activations"] = 1 << 20
    engine = overspill.initialize(model, settings)[0]
    owner = weakref.ref(engine._residency)
    residency_of = engine._residency
    del model, engine
    gc.collect()
    assert residency_of.closed
    del residency_of
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activations": None}, "needs budget.activations"),
        ({"vertical_accumulation": True}, "not supported with vertical_accumulation"),
    ],
)
def test_what_auto_needs(change, said, config):
    settings = config("half", recompute="auto")
    settings["budget"]["activations"] = change.get("activations", 1 << 20)
    settings["vertical_accumulation"] = change.get("vertical_accumulation", False)
    with pytest.raises(overspill.ConfigError, match=f'engine.recompute = "auto": {said}'):
        overspill.initialize(Repeats(plainly), settings)
