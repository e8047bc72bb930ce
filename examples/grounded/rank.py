"""One rank of the grounded example: trains each model for one step at each ZeRO stage, and writes what the engine
counts.

torchrun --nproc_per_node=2 examples/grounded/rank.py FILE.json
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

import overspill
from models import MODELS

STAGES = (0, 1, 2, 3)


def parameters_of(model: torch.nn.Module) -> dict[str, list[tuple[str, list[int]]]]:
    """Of each layer that has any: names and shapes."""
    return {
        name: [(its, list(p.shape)) for its, p in child.named_parameters()]
        for name, child in model.named_children()
        if any(True for _ in child.parameters())
    }


def one_step(name: str, stage: int) -> dict:
    torch.manual_seed(0)  # the same weights on every rank
    model, batch = MODELS[name]()
    found = {"layers": parameters_of(model)}
    config = {
        "budget": {"host": "256MiB"},
        "optimizer": {"type": "AdamW", "lr": 1e-3},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = overspill.initialize(model, config)
    loss = engine(batch(engine.rank)).float().square().mean()  # each rank has data of its own
    engine.backward(loss)
    engine.step()
    plan = engine.plan
    counted = {
        "weights": {unit.name: unit.weights.bytes for unit in plan.units},
        "states": {unit.name: unit.states.bytes for unit in plan.units},
        "gradients": plan.as_dict()["gradients_host_bytes"],
    }
    ranks = [None] * engine.world_size
    if engine.world_size > 1:
        distributed.all_gather_object(ranks, counted)
    else:
        ranks = [counted]
    weights = {name: value.double().sum().item() for name, value in engine.state_dict().items()}
    engine.close()
    return found | {"ranks": ranks, "weights": weights}


def main() -> None:
    torch.set_num_threads(1)
    results = {name: {str(stage): one_step(name, stage) for stage in STAGES} for name in MODELS}
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
