"""One rank of test_ranks.py: trains a small model on its part of fixed batches, and says what came out."""

import copy
import gc
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import overspill
from overspill import leases, ranks, residency
from overspill._testing import Options
from overspill.divided import memory_of

RANK = int(os.environ.get("RANK", "0"))
STEPS, ROWS, WIDTH = 6, 24, 24  # ROWS divide by worlds of 1 to 4, with two micro-batches


class Net(nn.Module):
    """A buffer, a tied weight, a frozen one, and dropout of nothing: enough to notice what is not shared."""

    def __init__(self, dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.layers[3].weight = self.layers[1].weight
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.register_buffer("scale", torch.rand(1, dtype=dtype) + 0.5)

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return nn.functional.mse_loss(self.norm(self.frozen(x) * self.scale).float(), y.float())


class Entering(torch.autograd.Function):
    """Of what each part of a divided layer gets whole: gradients of all parts are added up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leaving(torch.autograd.Function):
    """Parts of a sum."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Divided(nn.Module):
    """Two layers divided as in Megatron-LM (arXiv 1909.08053, section 3), and a norm that every part has whole."""

    def __init__(self, part=0, parts=1, group=None):
        super().__init__()
        torch.manual_seed(5)
        up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH // parts, bias=False)
        self.down = nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(parts)[part])
            self.down.weight.copy_(down.weight.chunk(parts, dim=1)[part])
        self.group = group

    def forward(self, x, y):
        x = self.norm(x)
        x = x if self.group is None else Entering.apply(x, self.group)
        x = self.down(torch.tanh(self.up(x)))
        x = x if self.group is None else Leaving.apply(x, self.group)
        return nn.functional.mse_loss(x, y)


def batches(dtype):
    """The same on every rank, and in one process."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
        yield x.to(dtype), y.to(dtype)


def config(folder: str, placement: str = "half", accumulation: int = 1, **more) -> dict:
    return {
        "budget": {"host": "64MiB", "nvme": [folder]},
        "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": accumulation,
        "engine": Options(placement=placement, chunk_elements=512, threads=1, poison=True),
        **more,
    }


def train(engine, dtype, accumulation: int) -> list[float]:
    """This rank's losses, by step."""
    losses = []
    for x, y in batches(dtype):
        x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in (x, y))
        total = 0.0
        for rows, wanted in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            loss = engine(rows, wanted)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
    return losses


def learn(folder: str, placement="half", precision="fp32", accumulation="1", stage="3", group=None) -> dict:
    """Losses, the norm and clip factor of the last step, weights."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(RANK)  # ranks begin with other weights: the first one's count
    model = Net(dtype)
    options = config(folder, placement, int(accumulation), zero_optimization={"stage": int(stage)})
    engine, *_ = overspill.initialize(model, options, process_group=group)
    losses = train(engine, dtype, int(accumulation))
    with engine.gathered(list(model.parameters())):
        weights = {name: p.detach().float().flatten().tolist() for name, p in model.named_parameters()}
    norm = [engine.last_step.norm, engine.last_step.clip]
    plan = engine._core.plan.as_dict()
    states_bytes = plan["states_host_bytes"] + plan["states_nvme_bytes"]
    engine.close()
    found = {"losses": losses, "norm": norm, "weights": weights, "scale": model.scale.item()}
    return found | {"states_bytes": states_bytes}


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


def two_of_three(folder: str) -> None:
    """Ranks 0 and 2 share a model; rank 1 has no part in it."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    if RANK != 1:
        print(json.dumps(learn(folder, group=group)))
    dist.barrier()


def divide_by_hand() -> tuple:
    dist.init_process_group("gloo")
    part, row = RANK % 2, RANK // 2
    same_part = [dist.new_group(range(p, dist.get_world_size(), 2)) for p in (0, 1)]
    rows = [dist.new_group([2 * r, 2 * r + 1]) for r in range(dist.get_world_size() // 2)]
    copies = ["norm.weight", "norm.bias"]
    return Divided(part, 2, rows[row]), {
        "process_group": same_part[part],
        "model_group": rows[row],
        "replicated": copies,
    }


def divide_by_torch() -> tuple:
    """With rows divided too up to the first layer: the gradients of the norm's copies are summands there."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("data", "model"))
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "down": RowwiseParallel(),
    }
    rows = PrepareModuleInput(
        input_layouts=(Replicate(), None), desired_input_layouts=(Shard(0), None), use_local_output=True
    )
    model = parallelize_module(Divided(), mesh["model"], plan)
    groups = {"process_group": mesh["data"].get_group(), "model_group": mesh["model"].get_group()}
    return parallelize_module(model, mesh["model"], rows), groups


def divided(folder: str, by: str = "") -> dict:
    """Two parts of a model, each shared by half of the ranks."""
    ways = {"": lambda: (Divided(), {}), "hand": divide_by_hand, "torch": divide_by_torch}
    model, groups = ways[by]()
    engine, *_ = overspill.initialize(model, config(folder, gradient_clipping=0.1), **groups)
    losses, norms = [], []
    for x, y in batches(torch.float32):
        x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in (x, y))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.last_step.norm)
    copy_here = memory_of(engine.weight(model.norm.weight))
    found = {"losses": losses, "norms": norms, "norm.weight": copy_here.tolist()}
    engine.close()
    return found


def parallelized(folder: str) -> dict:
    """What can be seen and done of a model of DTensors from outside."""
    model, groups = divide_by_torch()
    found = {"errors": []}
    for wrong in ({}, groups | {"model_group": groups["process_group"]}, groups | {"checkpoint": folder}):
        try:
            overspill.initialize(model, config(folder), **wrong)
        except ValueError as error:
            found["errors"].append(str(error))
    engine, *_ = overspill.initialize(model, config(folder, "nvme"), **groups)
    up = model.up.weight
    between = []  # what tanh gives, which autograd saves as its output
    model.down.register_forward_pre_hook(lambda module, args: between.append(weakref.ref(args[0])))

    def learn() -> list[float]:
        losses = []
        for x, y in itertools.islice(batches(torch.float32), 2):
            loss = engine(x, y)
            held = sum(not lease.expired() for lease, _ in leases.of_storage.values())
            assert held == 0, "forward lets the weights go"
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            del loss
        return losses

    learn()
    engine(*next(batches(torch.float32)))  # a graph that nobody runs
    assert [ref() for ref in between] == [None] * 3, "activations go with their graph"
    found["weight"] = engine.weight(up).full_tensor().tolist()
    found["copied"] = copy.deepcopy(model).up.weight.full_tensor().tolist()
    found["state_dict"] = engine.state_dict()["up.weight"].full_tensor().tolist()
    with engine.gathered(up):
        found["gathered"] = up.full_tensor().tolist()
    moments = engine.optimizer_state(up)["exp_avg"].to_local()
    found["moments"] = [list(moments.shape), moments.abs().sum().item() > 0]
    engine.save_checkpoint(f"{folder}/of{RANK}")
    found["twice"] = [learn()]
    engine.load_checkpoint(f"{folder}/of{RANK}")
    found["twice"].append(learn())
    engine.backward(engine(*next(batches(torch.float32))))
    before = up.grad.full_tensor()
    up.grad.mul_(2)
    found["grad"] = [up.grad.full_tensor().tolist(), (2 * before).tolist()]
    engine.zero_grad()
    with engine.gathered(up), torch.no_grad():
        up.zero_()
    found["zeroed"] = engine.weight(up).to_local().abs().max().item()
    engine.close()
    return found


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


def plain(value):
    if isinstance(value, list):
        return [number for tensor in value for number in plain(tensor)]
    return value.detach().float().flatten().tolist() if isinstance(value, torch.Tensor) else value


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


def printed(job):
    return lambda *arguments: print(json.dumps(job(*arguments)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = {
        "learn": printed(learn),
        "look": printed(look),
        "outside": printed(outside),
        "alone": printed(alone),
        "uncleared": printed(uncleared),
        "divided": printed(divided),
        "parallelized": printed(parallelized),
        "resume": printed(resume),
        "opened": printed(opened),
        "together": printed(together),
    }
    jobs |= {"two_of_three": two_of_three, "differ": differ, "bug": bug, "endless": endless}
    jobs |= {"collected": collected}
    jobs[sys.argv[1]](*sys.argv[2:])
