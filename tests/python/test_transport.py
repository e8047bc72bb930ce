"""The core's collectives over torch.distributed (gloo), each rank a process: what every transport has to do, and what
survivors say when one dies."""

import json
import os
import random
import re
import signal
import time

import launch
import pytest

CALLS = ("all_gather", "all_to_all", "exchange", "all_reduce_sum", "barrier")
PATIENCE_SECONDS = 20.0


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def test_conformance(world):
    ended = launch.run(world, "transport_job.py", "conformance")
    for rank, said in enumerate(json.loads(process.out) for process in ended):
        for name in (
            "move_every_slice",
            "exchange_what_each_pair_wants",
            "sum_in_rank_order_to_the_bit",
            "barrier",
        ):
            assert said.pop(name) == "", f"{name}, rank {rank}"
        assert re.match(r"all_to_all: rank \d calls|all_to_all: rank 0 sends", said.pop("sizes_that_differ"))
        if world == 1:
            assert "has room for" in json.loads(ended[0].out)["sizes_that_differ"]
            continue
        odd = said.pop("an_odd_pair")
        where = (
            "exchange" if rank < 2 else "(exchange|barrier)"
        )  # a third rank may hear of it in its next call
        assert re.fullmatch(f"{where}: rank 0 sends 8 bytes to rank 1, which has room for 16", odd)
        assert f"not a multiple of {world} ranks" in said.pop("a_size_that_is_not_a_multiple")
        assert "rank 1 calls all_to_all" in said.pop("another_call")
        assert said.pop("rank_1_aborts") == "barrier: rank 1 aborted: the disk is full"
        assert said.pop("rank_1_is_late") == "barrier: rank 1 did not join within 1 s"
        assert not said, "bodies that nobody looks at"


def kill_one(world: int, call: str, rng: random.Random, through_torchrun: bool) -> None:
    """Kills a rank at a random instant inside `call`; the others name it, and end."""
    arguments = ("repeat", call, PATIENCE_SECONDS)
    victim = rng.randrange(world)
    if through_torchrun:
        agent = launch.torchrun(world, launch.HERE / "transport_job.py", *arguments)
        ranks = launch.ranks_of(agent, world)
    else:
        agent, ranks = None, launch.start(world, "transport_job.py", *arguments)
        for process in ranks:
            assert process.stdout.readline().endswith("calls\n")
    time.sleep(rng.uniform(0.05, 0.3))
    os.kill(ranks[victim] if agent else ranks[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    errors = [p.err for p in launch.finish([agent] if agent else ranks, timeout=2 * PATIENCE_SECONDS)]
    text = "".join(errors)
    for survivor in set(range(world)) - {victim}:
        found = re.search(rf"rank {survivor} says: (\w+): rank (\d+) is gone", text)
        assert found, f"victim {victim}, rank {survivor} said nothing:\n{text}"
        assert int(found[2]) == victim, f"victim {victim}:\n{text}"
        assert found[1] in (call, "all_gather")  # of which the sum is made
    assert time.monotonic() - began < 2 * PATIENCE_SECONDS


def test_a_killed_rank_is_named():
    kill_one(3, "exchange", random.Random(3), through_torchrun=False)


@pytest.mark.parametrize("call", ["all_gather", "barrier"])
def test_a_killed_rank_is_named_under_torchrun(call):
    kill_one(3, call, random.Random(9), through_torchrun=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_fifty_killed_ranks_are_named(seed):
    rng = random.Random(1000 + seed)
    kill_one(rng.choice((2, 3, 4)), CALLS[seed % len(CALLS)], rng, through_torchrun=True)
