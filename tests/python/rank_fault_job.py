"""One rank of test_rank_faults.py: builds an engine, trains, saves, loads, trains on and closes. One of the ranks fails
on the way."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

from overspill import engine as module
from overspill import extra, handover, hooks, ranks, start, state
from overspill._testing import Options
from overspill.config import Config
from overspill.optimizer import OverspillOptimizer
from overspill.residency import Residency

REASON = "this rank fails here"
# Where it is raised, or the rank killed: a function that is called at that point, on every rank.
PLACES = {
    "script": (start, "initialize"),  # the script itself, before it calls it
    "config": (Config, "read"),
    "model": (start.divided, "check"),
    "partition": (handover, "partition"),
    "broadcast": (ranks, "broadcast_model"),
    "materialise": (module, "materialise"),
    "weights": (Residency, "take_weights"),
    "hooks": (hooks, "attach"),
    "states": (OverspillOptimizer, "start_states"),
    "scheduler": (start, "_scheduler"),
    "loader": (start, "_loader"),
    "step": (OverspillOptimizer, "step"),
    "save": (state, "buffers_to_json"),  # before the ranks tell one another of their random states
    "saved": (state, "dumps"),  # after it, before the core's part
    "load": (extra.Extra, "check"),  # before the core's part
    "loaded": (OverspillOptimizer, "restore_hyper_parameters"),  # after it
    "close": (Residency, "close"),
}


def now() -> None:
    print("now", flush=True)


def by_exception() -> None:
    now()
    raise ValueError(REASON)


def by_kill() -> None:
    now()
    os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: str) -> None:
    """All of the file system but room for names, links and a manifest."""
    found = os.statvfs(folder)
    with open(f"{folder}/filled", "wb") as file:  # noqa: PTH123
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - (512 << 10))


def fail_at(place: str, fail) -> None:
    owner, name = PLACES[place]
    original = vars(owner)[name]
    bound = isinstance(original, (staticmethod, classmethod))

    def instead(*arguments, **named):
        fail()

    setattr(owner, name, staticmethod(instead) if bound else instead)


def main(point: str, by: str, victim: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    fails = rank == int(victim)
    own = f"{folder}/{'odd' if fails else 'even'}"
    options = {
        "budget": {"host": "64MiB", "nvme": [own]},
        "optimizer": {"type": "AdamW", "lr": 1e-2},
        "train_micro_batch_size_per_gpu": 2,
        "engine": Options(placement="nvme", chunk_elements=4096, threads=1, poison=True),
    }
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    dist.init_process_group("gloo")
    dist.barrier()  # how long it takes to import torch is not looked at
    if fails and by in ("exception", "kill"):
        fail_at(point, by_exception if by == "exception" else by_kill)
    if fails and (point, by) == ("construction", "budget"):
        options["budget"]["host"] = "100KiB"
    if fails and (point, by) == ("step", "budget"):
        options["budget"]["host"] = "2560KiB"
    if fails and (point, by) == ("save", "disk"):
        options["engine"].placement = "host"  # what lies in memory is written when it is saved
    if fails and (point, by) in (("construction", "disk"), ("construction", "budget")):
        now()
    data = torch.utils.data.TensorDataset(torch.zeros(64, 256))
    engine, *_ = start.initialize(model, options, training_data=data)
    learn(engine, model, fails and (point, by) == ("step", "budget"))
    if fails and by == "disk":
        now()
        fill(f"{folder}/even")
    engine.save_checkpoint(f"{folder}/even/saved")
    engine.load_checkpoint(f"{folder}/even/saved")
    learn(engine, model)
    engine.close()


def learn(engine, model, gathers: bool = False) -> None:
    for _ in range(2):
        if gathers:
            now()
        with engine.gathered(list(model.parameters())):  # all of it at once
            pass
        engine.backward(engine(torch.ones(2, 256)).square().mean())
        engine.step()
    engine.synchronize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
