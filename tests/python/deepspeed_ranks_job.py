"""One rank of test_deepspeed_ranks.py: what scripts read and set of DeepSpeed's engine where there are several. Prints
what came out, as JSON."""

import copy
import json
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn

from overspill import deepspeed
from overspill.deepspeed import fragments, zero


def made(stage=2, seed=0, model=None, **more):
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "overspill": {
            "budget": {"host": "64MiB"},
            "engine": {"chunk_elements": 16, "rank_timeout_seconds": 60},
        },
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def batch(rank, number=0):
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(2, 6, generator=generator)


def loss(model, x):
    return model(x).square().mean()


def own_gradients(numbers, rank):
    """Of plain PyTorch, added up."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3, bias=False))
    for number in numbers:
        loss(plain, batch(rank, number)).backward()
    return [p.grad for p in plain.parameters()]


def of_all(numbers, op="mean"):
    by_rank = [own_gradients(numbers, rank) for rank in range(dist.get_world_size())]
    sums = [sum(each) for each in zip(*by_rank, strict=True)]
    return sums if op == "sum" else [each / dist.get_world_size() for each in sums]


def close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def gradients(stage):
    """They are the mean, a step uses them, and what is set takes their place."""
    engine = made(stage)
    weights = list(engine.module.parameters())
    assert fragments.safe_get_full_grad(weights[0]) is None and engine.grad(weights[0]) is None
    before = [engine.weight(each) for each in weights]
    engine.backward(loss(engine, batch(dist.get_rank())))
    mean = of_all([0])
    close([fragments.safe_get_full_grad(each) for each in weights], mean)
    close([engine.grad(each) for each in weights], mean)
    engine.step()
    close([engine.weight(each) for each in weights], [w - 0.5 * g for w, g in zip(before, mean, strict=True)])
    assert fragments.safe_get_full_grad(weights[0]) is None
    try:
        fragments.safe_set_full_grad(weights[0], torch.ones(7, 6))
    except ValueError as error:
        assert "has no gradient: call backward" in str(error)
    else:
        raise AssertionError("a gradient that is not there was set")
    engine.backward(loss(engine, batch(dist.get_rank())))
    values = [torch.full(tuple(each.shape), 0.25) for each in weights]
    fragments.safe_set_full_grad(weights[0], values[0])
    fragments.safe_update_full_grad_vectorized(weights[1:], lambda _, each: torch.full_like(each, 0.25))
    close([fragments.safe_get_full_grad(each) for each in weights], values)
    before = [engine.weight(each) for each in weights]
    engine.step()
    close([engine.weight(each) for each in weights], [w - 0.125 for w in before])
    engine.destroy()


def no_sync(stage):
    """A rank's own, as DeepSpeed has them there."""
    engine = made(stage, gradient_accumulation_steps=2)
    weights = list(engine.module.parameters())
    with engine.no_sync():
        for number in range(2):
            engine.backward(loss(engine, batch(dist.get_rank(), number)), scale_wrt_gas=False)
            own = own_gradients(range(number + 1), dist.get_rank())
            close([fragments.safe_get_full_grad(each) for each in weights], own)
    close([fragments.safe_get_full_grad(each) for each in weights], of_all([0, 1]))
    engine.destroy()


def sums(stage):
    engine = made(stage, gradient_allreduce_op="SUM")
    weights = list(engine.module.parameters())
    before = [engine.weight(each) for each in weights]
    engine.backward(loss(engine, batch(dist.get_rank())))
    total = of_all([0], "sum")
    close([fragments.safe_get_full_grad(each) for each in weights], total)
    engine.step()
    close(
        [engine.weight(each) for each in weights], [w - 0.5 * g for w, g in zip(before, total, strict=True)]
    )
    engine.destroy()


def open_ended(stage):
    """Without managed_gradient_accumulation a step takes what there is."""
    engine = made(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    weights = list(engine.module.parameters())
    before = [engine.weight(each) for each in weights]
    for number in range(3):
        engine.backward(loss(engine, batch(dist.get_rank(), number)), scale_wrt_gas=False)
        assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 1
    assert engine.global_samples == 3 * 2 * dist.get_world_size()
    mean = of_all([0, 1, 2])
    close([engine.weight(each) for each in weights], [w - 0.5 * g for w, g in zip(before, mean, strict=True)])
    engine.destroy()


def states(stage):
    """`optimizer.state` has this rank's parts, which are together what all ranks read."""
    engine = made(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    weights = list(engine.module.parameters())
    assert not engine.optimizer.state
    for number in range(2):
        engine.backward(loss(engine, batch(dist.get_rank(), number)))
        engine.step()
    found = engine.optimizer.state
    assert list(found) == weights and weights[0] in found and len(found) == len(weights)
    counts = []
    for each in weights:
        whole, parts = engine.optimizer_state(each), found[each]
        assert parts.keys() == {"step", *whole} and parts["step"] == 2
        for name, state in whole.items():
            by_rank = [None] * dist.get_world_size()
            dist.all_gather_object(by_rank, parts[name].tolist())
            counts.append([len(part) for part in by_rank])
            together = by_rank[0] if stage == 0 else [each for part in by_rank for each in part]
            assert together == state.flatten().tolist(), name
    engine.destroy()
    return counts


def gathered(stage):
    """What rank 1 writes is the weight on all."""
    engine = made(stage)
    weight = engine.module[0].weight
    with zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
        if dist.get_rank() == 1:
            weight.fill_(3.0)
    found = engine.weight(weight)
    assert (found == 3.0).all(), found
    engine.destroy()


def pieces(stage):
    """Of each rank as many elements, in order; the last one's end is padding. Each sets its own."""
    rank, engine = dist.get_rank(), made(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    engine.backward(loss(engine, batch(rank)))
    engine.step()
    engine.backward(loss(engine, batch(rank, 1)))
    bias = engine.module[0].bias  # of 7 elements
    for name in ("fp32_param", "grad", "optimizer_state"):
        more = ("exp_avg",) if name == "optimizer_state" else ()
        whole = getattr(fragments, f"safe_get_full_{name}")(bias, *more)
        local = getattr(fragments, f"safe_get_local_{name}")(bias, *more)
        assert local.tolist() == [*whole.tolist(), 0.0][4 * rank : 4 * rank + 4], name
        value = torch.arange(4.0) + 10 * rank
        getattr(fragments, f"safe_set_local_{name}")(bias, value, *more)
        found = getattr(fragments, f"safe_get_full_{name}")(bias, *more)
        assert found.tolist() == [0, 1, 2, 3, 10, 11, 12], (name, found)
    assert bias.ds_tensor.shape == (4,)
    bias.ds_tensor.data = torch.full_like(bias.ds_tensor.data, 1.0 + rank)
    assert engine.weight(bias).tolist() == [1, 1, 1, 1, 2, 2, 2]
    bias.requires_grad_(False)
    assert fragments.safe_get_local_fp32_param(bias) is None
    engine.destroy()
    with zero.Init():
        made_there = nn.Linear(4, 2)
    with zero.GatheredParameters(made_there.weight, modifier_rank=1), torch.no_grad():
        made_there.weight.fill_(float(rank))
    assert (made_there.weight == 1.0).all()


def again(stage):
    """A model may be given to initialize again."""
    first = made(stage)
    first.backward(loss(first, batch(dist.get_rank())))
    first.step()
    weights = [first.weight(each) for each in first.module.parameters()]
    second = made(stage, model=first.module)
    close([second.weight(each) for each in second.module.parameters()], weights)
    second.backward(loss(second, batch(dist.get_rank())))
    second.step()
    second.destroy()


def tags(stage):
    """Ranks that give different ones."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for validation in ("FAIL", "WARN", "IGNORE"):
            engine = made(stage, checkpoint={"tag_validation": validation})
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    engine.save_checkpoint(f"{folder[0]}/{validation}", tag=f"tag-{dist.get_rank()}")
                except AssertionError as error:
                    assert validation == "FAIL" and "different tags, tag-0, tag-1" in str(error)
                else:
                    assert validation != "FAIL"
                    assert engine.load_checkpoint(f"{folder[0]}/{validation}")[0].endswith("tag-0")
            told = any("'tag-0', of rank 0, is taken" in str(each.message) for each in said)
            assert told is (validation == "WARN"), validation
            engine.destroy()
        dist.barrier()


def transforms(stage):
    """torch.func of the engine, and an update by a loss made of what it gave."""
    engine = made(stage)
    plain = copy.deepcopy(engine.module)
    x = batch(dist.get_rank())
    given, wanted = (torch.func.grad(lambda at, model=model: loss(model, at))(x) for model in (engine, plain))
    assert torch.equal(given, wanted)
    engine.backward(given.square().sum())
    wanted.square().sum().backward()
    for own, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(fragments.safe_get_full_grad(own), theirs.grad / dist.get_world_size())
    engine.destroy()


CASES = {
    each.__name__: each
    for each in (gradients, no_sync, sums, open_ended, states, gathered, pieces, again, tags, transforms)
}

if __name__ == "__main__":
    name, stage = sys.argv[1:]
    deepspeed.init_distributed()
    print(json.dumps(CASES[name](int(stage))), flush=True)
