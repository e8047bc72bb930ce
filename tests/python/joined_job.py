"""One rank of test_joined.py: a model divided by torch trains, and each part is saved to a folder of its own."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from joined_scene import IDS
from ranks_scene import RANK, config
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import overspill

TRAINING = {"optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1}, "gradient_clipping": 0.5}
SCALING = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}  # of fp16
LINEAR = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}


def rows_of(parts: int) -> tuple:
    """A mesh with one row of `parts` for each part of the data; the groups of an engine over it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("data", "model"))
    return mesh["model"], {
        "process_group": mesh["data"].get_group(),
        "model_group": mesh["model"].get_group(),
    }


def by_transformers(base: str, parts: int) -> tuple:
    """Its own plan of the family; one row of parts."""
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", distributed_config=DistributedConfig(tp_size=parts)
    )
    return model, rows_of(parts)[1]


def by_torch(base: str, parts: int) -> tuple:
    mesh, groups = rows_of(parts)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    layers = range(model.config.num_hidden_layers)
    plan = {f"model.layers.{n}.{name}": style() for n in layers for name, style in LINEAR.items()}
    return parallelize_module(model, mesh, plan), groups


class Uneven(nn.Module):
    """Of 5 rows over 4 parts the last one has none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 5), nn.Linear(5, 8), nn.LayerNorm(8)

    def forward(self, input_ids, labels):
        x = torch.nn.functional.one_hot(input_ids.flatten() % 8, 8).float()
        return SimpleNamespace(loss=self.down(torch.tanh(self.up(self.norm(x)))).square().mean())


def unevenly(base: str, parts: int) -> tuple:
    mesh, groups = rows_of(parts)
    return parallelize_module(
        Uneven(), mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    ), groups


def train(engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        ids = (IDS + step) % 64
        rows = ids.chunk(engine.world_size)[engine.rank]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).contiguous().clone()


def saved(root: str, name: str, how: str, parts: int, format: str) -> None:
    """ROOT/NAME has `base`, and gets of0, of1, ...: the parts after two steps; all of the weights then, and the losses
    of two further steps."""
    ways = {"transformers": by_transformers, "torch": by_torch, "unevenly": unevenly}
    model, groups = ways[how](f"{root}/{name}/base", parts)
    out = Path(root, name)
    halves = next(model.parameters()).dtype is torch.float16
    more = TRAINING | ({"loss_scaling": SCALING} if halves else {})
    engine, *_ = overspill.initialize(
        model, config(str(out), "half", format=format or None, **more), **groups
    )
    train(engine, 2)
    part = dist.get_group_rank(groups["model_group"], RANK)
    engine.save_checkpoint(out / f"of{part}", client_state={"said": "hello"})
    values = {name: whole(value) for name, value in engine.state_dict().items()}
    states = {
        f"{state} {name}": whole(value)
        for name, p in model.named_parameters()
        if how != "unevenly"  # a part without elements has no states
        for state, value in engine.optimizer_state(p).items()
        if value.dim()
    }
    losses = torch.tensor(train(engine, 2))
    dist.all_reduce(losses)
    if RANK == 0:
        save_file(values, out / "whole.safetensors")
        save_file(states, out / "states.safetensors")
        save_file({"losses": losses / dist.get_world_size()}, out / "losses.safetensors")
    engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in sys.argv[2:]:  # NAME:HOW:PARTS:FORMAT
        name, how, parts, format = job.split(":")
        saved(sys.argv[1], name, how, int(parts), format)
    dist.destroy_process_group()
