"""The core's collectives over torch.distributed (gloo), each rank a process: what every transport has to do, and what
survivors say when one dies."""

import json
import os
import random
import re
import signal
import subprocess
import time

import launch
import pytest

CALLS = ("all_gather", "all_to_all", "exchange", "all_reduce_sum", "barrier")
# No timeout helps to notice who is gone, and none strikes where ranks wait long for a core.
PATIENCE_SECONDS = 2 * launch.HANGS


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def test_conformance(world):
    ended = launch.run(world, "transport_job.py", "conformance")
    for rank, said in enumerate(json.loads(process.out) for process in ended):
        for name in (
            "move_every_slice",
            "exchange_together",
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
        assert said.pop("rank_1_is_late") == "barrier: rank 1 did not join within 2 s"
        assert not said, "bodies that nobody looks at"


def check_words(processes: list[subprocess.Popen], world: int, victim: int, call: str) -> None:
    """The processes end, and every survivor has said that the victim is gone."""
    ended = launch.finish(processes)
    everything = f"victim {victim} of {world} in {call}\n{launch.told(ended)}"
    text = "".join(process.err for process in ended)
    for survivor in set(range(world)) - {victim}:
        found = re.search(rf"rank {survivor} says: (\w+): rank (\d+) is gone", text)
        assert found, f"rank {survivor} did not say who is gone; {everything}"
        assert int(found[2]) == victim, everything
        assert found[1] in (call, "all_gather"), everything  # of which the sum is made


def start_repeating(world: int, call: str, mebibytes: int = 1) -> list[subprocess.Popen]:
    ranks = launch.start(world, "transport_job.py", "repeat", call, PATIENCE_SECONDS, mebibytes)
    for rank in ranks:
        line = launch.own_line(rank)
        assert line.endswith("calls\n"), f"{line}\n{launch.told(launch.finish(ranks))}"
    return ranks


def kill_one(world: int, call: str, rng: random.Random) -> None:
    """Kills a rank under torchrun at a random instant inside `call`; the others name it, and end."""
    victim = rng.randrange(world)
    agent = launch.torchrun(
        world, launch.HERE / "transport_job.py", "repeat", call, PATIENCE_SECONDS, popen=subprocess.Popen
    )
    ids = launch.ranks_of(agent, world)
    time.sleep(rng.uniform(0.05, 0.3))
    os.kill(ids[victim], signal.SIGKILL)
    check_words([agent], world, victim, call)


def test_a_killed_rank_is_named():
    """Rank 0, which has the store."""
    ranks = start_repeating(3, "exchange")
    time.sleep(0.2)
    ranks[0].kill()
    check_words(ranks, 3, 0, "exchange")


@pytest.mark.parametrize("call", ["exchange", "barrier"])
def test_who_leaves_because_of_it_is_not_named(call):
    """Rank 2 has what rank 0 sent and waits for rank 1, which is the first to notice, and leaves."""
    ranks = start_repeating(3, call)
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    ranks[0].kill()
    time.sleep(0.2)
    ranks[1].send_signal(signal.SIGCONT)
    check_words(ranks, 3, 0, call)


def test_the_rank_that_has_the_store_ends_when_all_have_heard():
    """Rank 1 is gone, rank 0 has noticed and ends; rank 2 asks later."""
    ended = launch.finish(launch.start(3, "transport_job.py", "hear_late"))
    assert ended[2].out == "rank 1 is gone\n", launch.told(ended)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_amid_a_transfer_is_named(victim):
    """Stopped first, so that what another rank sends to it fills what the kernel keeps: then that one, which has
    received all that it wants, waits for its own sending alone."""
    ranks = start_repeating(3, "exchange", mebibytes=32)
    time.sleep(1.5)  # memory is made before the first transfer
    ranks[victim].send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    ranks[victim].kill()
    check_words(ranks, 3, victim, "exchange")


@pytest.mark.parametrize("call", ["all_gather", "barrier"])
def test_a_killed_rank_is_named_under_torchrun(call):
    kill_one(3, call, random.Random(9))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_fifty_killed_ranks_are_named(seed):
    rng = random.Random(1000 + seed)
    kill_one(rng.choice((2, 3, 4)), CALLS[seed % len(CALLS)], rng)
