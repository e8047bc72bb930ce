"""One rank of test_ranks.py whose layers are divided over the ranks, by hand or by torch."""

import copy
import itertools
import os
import sys
import weakref

import torch
import torch.distributed as dist
from ranks_scene import RANK, WIDTH, batches, config, printed
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
from overspill import leases
from overspill.divided import memory_of


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = {"divided": printed(divided), "parallelized": printed(parallelized)}
    jobs[sys.argv[1]](*sys.argv[2:])
