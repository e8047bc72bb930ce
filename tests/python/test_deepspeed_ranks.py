"""DeepSpeed's calls on two ranks."""

import json

import launch
import pytest


def said(case, stage, world=2):
    return [json.loads(process.out) for process in launch.run(world, "deepspeed_ranks_job.py", case, stage)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_read_and_set_whole(stage):
    said("gradients", stage)


@pytest.mark.parametrize("stage", [0, 1])
def test_inside_no_sync_a_rank_has_its_own_gradients(stage):
    said("no_sync", stage)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_summed_where_the_json_says_so(stage):
    said("sums", stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_without_managed_accumulation_takes_what_there_is(stage):
    said("open_ended", stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_are_this_ranks_parts(stage):
    one, other = said("states", stage)
    assert one == other
    assert any(0 in counts for counts in one) is (stage > 0), "of small tensors one rank has all"


def test_what_the_modifier_writes_counts_on_all_ranks():
    said("gathered", 3)


def test_a_rank_reads_and_sets_its_piece():
    said("pieces", 3)


def test_a_model_of_two_ranks_may_be_given_again():
    said("again", 2)


def test_ranks_that_give_different_tags():
    said("tags", 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_transforms_of_the_engine_train_it(stage):
    said("transforms", stage)
