"""One rank of test_ranks.py: trains a small model on its part of fixed batches, and says what came out."""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks_scene import RANK, STEPS, WIDTH, Net, batches, config, learn, plain, printed, train
from torch import nn

import overspill
from overspill import ranks, residency


def together(folder: str, stage: str) -> list[dict]:
    """Three micro-batches a step, one after another, then passing each unit together."""
    said = []
    for vertical in (False, True):
        torch.manual_seed(7)
        model = Net(torch.float32)
        options = config(
            folder, "nvme", 3, zero_optimization={"stage": int(stage)}, vertical_accumulation=vertical
        )
        engine, *_ = overspill.initialize(model, options)
        losses = []
        for x, y in batches(torch.float32):
            rows, wanted = (whole.chunk(engine.world_size)[engine.rank] for whole in (x, y))
            mean = engine.train_batch(zip(rows.chunk(3), wanted.chunk(3), strict=True))
            losses.append([mean.item(), engine.last_step.norm])
        plan = engine._core.plan.as_dict()
        bytes_held = plan["gradients_host_bytes"] / plan["weights_nvme_bytes"]
        said.append({"losses": losses, "gradients": bytes_held, "pool": plan["gradient_pool_bytes"]})
        engine.close()
    return said


class Deep(nn.Module):
    """Blocks whose weights are gathered again in backward, since dropout and a wide layer need the forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(4)
        )

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, y)


def recomputed(folder: str, stage: str) -> list[dict]:
    """With what forward saves kept, then computed again."""
    said = []
    for recompute in ("none", "blocks"):
        torch.manual_seed(7)
        options = config(folder, "nvme", 2, zero_optimization={"stage": int(stage)})
        options["engine"].recompute = recompute
        engine, *_ = overspill.initialize(Deep(), options)
        torch.manual_seed(8 + RANK)
        losses = train(engine, torch.float32, 2)
        said.append({"losses": losses, "norm": engine.last_step.norm, "again": 0})
        for block in engine.module.blocks:
            if "forward" in block.__dict__:
                said[-1]["again"] += block.__dict__["forward"].calls_again
        engine.close()
    return said


def graph(folder: str) -> list[list[float | None]]:
    """The seconds that the graph of a step has for the units' sums over ranks, and for their ways back to NVMe."""
    torch.manual_seed(7)
    engine, *_ = overspill.initialize(Deep(), config(folder, "nvme", 1))
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)

    def step() -> None:
        engine.backward(engine(x, y))
        engine.step()

    found = engine.graph(step)
    engine.close()
    return [[found.nodes[i].seconds for i in found.of(kind)] for kind in ("reduce", "write")]


def two_of_three(folder: str) -> None:
    """Ranks 0 and 2 share a model; rank 1 has no part in it."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    if RANK != 1:
        print(json.dumps(learn(folder, group=group)))
    dist.barrier()


def differ(folder: str) -> None:
    """Rank 1 is started with other options, one after the other; what each rank says."""
    dtype = torch.float32
    odd = RANK == 1
    made = [
        (Net(dtype), config(folder, gradient_clipping=1.0 if odd else 0.5)),
        (Net(dtype), config(folder, optimizer={"type": "AdamW", "lr": 2e-2 if odd else 1e-2})),
        (Net(torch.bfloat16 if odd else dtype), config(folder)),
        (Net(dtype), config(folder, zero_optimization={"stage": 2 if odd else 3})),
    ]
    for model, options in made:
        try:
            overspill.initialize(model, options)
            print("no error")
        except (overspill.RankError, overspill.ConfigError) as error:
            print(error)
    engine, *_ = overspill.initialize(Net(dtype), config(folder))  # nothing is left of those
    print(len(train(engine, dtype, 1)))


def look(folder: str) -> dict:
    """What can be seen of weights, states and norms from outside, after some steps; by name."""
    torch.manual_seed(0)
    model = Net(torch.bfloat16)
    engine, *_ = overspill.initialize(model, config(folder))
    train(engine, torch.bfloat16, 1)
    seen = {"norm": 0.0}
    for name, parameter in model.named_parameters():
        exact = torch.float32 if parameter.requires_grad else None
        seen[f"{name} exact"] = engine.weight(parameter, exact)
        seen[f"{name} states"] = [*engine.optimizer_state(parameter).values()]
    seen |= {f"{name} saved": tensor for name, tensor in engine.state_dict().items()}
    x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in next(batches(torch.bfloat16)))
    engine.backward(engine(x, y))
    seen["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    seen["grad"] = engine.grad(model.norm.weight)
    engine.step()
    seen["clip"] = engine.last_step.clip
    with engine.gathered(model.norm.weight), torch.no_grad():
        model.norm.weight.zero_()
    with engine.gathered(model.norm.weight):
        seen["written"] = model.norm.weight.clone()
    engine.close()
    return {name: plain(value) for name, value in seen.items()}


def uncleared(folder: str, stage: str) -> dict:
    """What `p.grad` says, and what comes of gradients that are not cleared, or cleared to zeros; the weights at the
    end, by name."""
    torch.manual_seed(0)
    model = Net(torch.float32)
    engine, optimizer, *_ = overspill.initialize(
        model, config(folder, "nvme", zero_optimization={"stage": int(stage)})
    )
    x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in next(batches(torch.float32)))
    parameter = model.norm.weight
    engine(x, y).backward()
    several = engine.world_size > 1
    said = [refusal(lambda: parameter.grad)]
    said.append(refusal(lambda: setattr(parameter, "grad", None)) if several else "")
    optimizer.step()
    model.zero_grad()
    said.append(str(parameter.grad))
    engine(x, y).backward()
    optimizer.step()
    said.append(refusal(lambda: engine(x, y).backward()))
    said.append(refusal(optimizer.step) if several else "")
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # decays
    optimizer.zero_grad(set_to_none=False)
    engine(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: value.tolist() for name, value in engine.state_dict().items()}
    engine.close()
    return {"said": said, "weights": weights}


def refusal(call: Callable) -> str:
    try:
        call()
    except overspill.RankError as error:
        return str(error)
    return ""


def outside(folder: str, stage: str) -> dict:
    """A penalty over all parameters, and after each step a clamp and a division, in which the last rank is late; rank 0
    alone keeps a view, and the last rank alone reads a norm. The weights at the end, by name, and whether the view was
    right after each step."""
    torch.manual_seed(0)
    model = Net(torch.float32)
    engine, *_ = overspill.initialize(model, config(folder, "nvme", zero_optimization={"stage": int(stage)}))
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = trained[0].data if engine.rank == 0 else None
    right = []
    for x, y in batches(torch.float32):
        x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in (x, y))
        if engine.rank == engine.world_size - 1:
            assert torch.isfinite(model.norm.weight.norm())
        engine.backward(engine(x, y) + 0.01 * sum(p.pow(2).sum() for p in trained))
        engine.step()
        for change in (lambda data: data.clamp_(-0.2, 0.2), lambda data: data.div_(1 + 0.1 * data.norm())):
            for p in trained:
                if engine.rank > 0:
                    time.sleep(0.01)  # the others go as far as they can
                change(p.data)
        now = engine.weight(trained[0])
        right.append(kept is None or torch.equal(kept, now))
    found = {name: plain(value) for name, value in engine.state_dict().items()}
    engine.close()
    return {"right": right, **found}


def alone(folder: str, stage: str) -> dict:
    """All ranks edit weights, then rank 0 alone reads while the others wait for it; what was right, and the weights at
    the end."""
    torch.manual_seed(0)
    model = Net(torch.float32)
    engine, *_ = overspill.initialize(model, config(folder, "nvme", zero_optimization={"stage": int(stage)}))
    train(engine, torch.float32, 1)
    trained = [p for p in model.parameters() if p.requires_grad]
    right = {}
    given = engine.state_dict()
    given["layers.0.bias"].fill_(0.25)
    with torch.no_grad():
        model.layers[2].bias.detach().clamp_(-100, 100)  # changes nothing
    kept = [p.data for p in trained] if engine.rank == 0 else None
    for _ in range(2):
        for p in trained:
            p.data.mul_(0.5)
            before = p.data.norm()
    if engine.rank == 0:
        norms = [p.data.norm() + p.norm() for p in model.parameters() for _ in range(2)]
        right["read"] = torch.isfinite(torch.stack(norms)).all().item()
        right["last"] = torch.equal(before, trained[-1].norm())
        right["given"] = torch.equal(model.layers[0].bias.cpu(), torch.full((WIDTH,), 0.0625))
    if engine.world_size > 1:
        dist.barrier()
    with engine.gathered([model.norm.weight]):
        right["in a block"] = torch.equal(engine.weight(model.norm.weight), model.norm.weight)
    right["weight"] = torch.equal(engine.weight(trained[-1]).norm(), before)
    found = {name: plain(value) for name, value in engine.state_dict().items()}
    train(engine, torch.float32, 1)
    del kept
    engine.close()
    return {"right": right, **found}


def endless(folder: str) -> None:
    """Trains until a rank is lost."""
    options = config(folder, "nvme")
    options["engine"].rank_timeout_seconds = 20
    engine, *_ = overspill.initialize(Net(torch.float32), options)
    while True:
        train(engine, torch.float32, 1)
        if engine.global_steps == STEPS:
            print(f"rank {RANK} calls", flush=True)


def resume(folder: str) -> dict:
    """Trains, saves, trains on, goes back to what was saved, and does it again."""
    torch.manual_seed(10 + RANK)
    model = Net(torch.bfloat16)
    engine, *_ = overspill.initialize(model, config(folder, "half"))
    train(engine, torch.bfloat16, 1)
    engine.save_checkpoint(f"{folder}/saved", {"world": engine.world_size})
    twice = []
    for _ in range(2):
        drawn = torch.rand(1).item()
        weights = {name: tensor.float().flatten().tolist() for name, tensor in engine.state_dict().items()}
        twice.append({"drawn": drawn, "weights": weights, "losses": train(engine, torch.bfloat16, 1)})
        state = engine.load_checkpoint(f"{folder}/saved")
    engine.close()
    return {"twice": twice, "state": state}


def opened(folder: str) -> dict:
    """What a checkpoint of other ranks holds."""
    model = Net(torch.bfloat16)
    engine, *_ = overspill.initialize(model, config(folder, "nvme", zero_optimization={"stage": 1}))
    engine.load_checkpoint(f"{folder}/saved")
    weights = {name: tensor.float().flatten().tolist() for name, tensor in engine.state_dict().items()}
    losses = train(engine, torch.bfloat16, 1)
    engine.close()
    return {"weights": weights, "losses": losses}


def collected(folder: str) -> None:
    """The engine is in a cycle, and the garbage collector comes by while a thread of the core's runs Python."""
    gc.disable()
    left, closed = threading.Event(), threading.Event()
    exchange, close = ranks.Group.exchange, residency.Residency.close

    def collecting(*arguments):
        if threading.current_thread() is not threading.main_thread() and left.is_set():
            left.clear()
            print("collected", gc.collect() > 0, flush=True)
        return exchange(*arguments)

    def noted(owner):
        close(owner)
        closed.set()

    ranks.Group.exchange, residency.Residency.close = collecting, noted

    def use() -> None:
        model = Net(torch.float32)
        model.engine, *_ = overspill.initialize(model, config(folder))
        train(model.engine, torch.float32, 1)

    use()
    left.set()
    print("closed", closed.wait(60), flush=True)


def bug(folder: str) -> None:
    """Rank 1 has a mistake in its script, in the third step."""
    engine, *_ = overspill.initialize(Net(torch.float32), config(folder))
    for step, (x, y) in enumerate(batches(torch.float32)):
        if RANK == 1 and step == 2:
            raise ValueError("a mistake")
        engine.backward(engine(x, y))
        engine.step()
    engine.synchronize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = {
        "learn": printed(learn),
        "look": printed(look),
        "outside": printed(outside),
        "alone": printed(alone),
        "uncleared": printed(uncleared),
        "resume": printed(resume),
        "opened": printed(opened),
        "together": printed(together),
        "recomputed": printed(recomputed),
        "graph": printed(graph),
    }
    jobs |= {"two_of_three": two_of_three, "differ": differ, "bug": bug, "endless": endless}
    jobs |= {"collected": collected}
    jobs[sys.argv[1]](*sys.argv[2:])
