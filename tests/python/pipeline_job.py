"""One rank of test_deepspeed_pipe.py. Prints, as JSON, what its case found."""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from overspill import EngineFailed, OverspillError, deepspeed
from overspill.deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from overspill.deepspeed.pipe.topology import PipeDataParallelTopology

VOCABULARY, WIDTH, MICRO, LENGTH = 19, 16, 4, 5
STEPS = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def logits(embedding, x):
    return nn.functional.linear(x, embedding.weight)


def loss_of(scores, labels):
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def specs():
    """A small language model, its embedding tied to its head."""
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block, WIDTH) for _ in range(4)],
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]


class Plain(nn.Module):
    """The same in one process."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()
        for number, spec in enumerate(specs()):
            torch.manual_seed(1234 + number)
            if not isinstance(spec, TiedLayerSpec):
                self.layers[str(number)] = spec.build()
            elif number == 0:
                self.embedding = spec.build()

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return logits(self.embedding, x)


def batches(rank, world, rows=2):
    """What a rank of a stage is given: micro-batches without end."""
    number = 0
    while True:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]
        number += 1


def settings(stage=0, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "overspill": {
            "budget": {"host": "64MiB"},
            "engine": {"chunk_elements": 64, "rank_timeout_seconds": 60},
        },
        **more,
    }


def plain_losses(world, steps=STEPS, method=None):
    """And the model, as one process trains it on the micro-batches of all ranks of a stage."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    given = [batches(rank, world) for rank in range(world)]
    losses = []
    for _ in range(steps):
        whole = 0.0
        for _ in range(MICRO):
            for data in given:
                x, labels = next(data)
                loss = loss_of(model(x), labels) / MICRO / world
                loss.backward()
                whole += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole)
    return losses, model


def start(stages, stage=0, **more):
    module = PipelineModule(
        specs(),
        num_stages=stages,
        loss_fn=loss_of,
        seed_layers=True,
        partition_method="uniform",
        **more.pop("of", {}),
    )
    return deepspeed.initialize(model=module, config=settings(stage, **more))[0]


def check_weights(engine, plain):
    names = {"tied_modules.embedding.": "embedding."}
    wanted = dict(plain.named_parameters())
    for name, parameter in engine.module.named_parameters():
        theirs = next(
            (new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)),
            f"layers.{name}",
        )
        torch.testing.assert_close(
            engine.weight(parameter), wanted[theirs].detach(), rtol=2e-4, atol=2e-5, msg=name
        )


def trains(stages, stage, interval="0"):
    """Losses and weights are those of one process, evaluation too."""
    engine = start(int(stages), int(stage), pipeline={"activation_checkpoint_interval": int(interval)})
    grid = engine.grid
    data = batches(grid.data_parallel_id, grid.data_parallel_size)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    wanted, plain = plain_losses(grid.data_parallel_size)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    check_weights(engine, plain)
    x, labels = next(batches(7, 1))
    loss, scores = engine.eval_batch(iter([(x, labels)]), return_logits=True, num_micro_batches=1)
    with torch.no_grad():
        theirs = plain(x)
    torch.testing.assert_close(loss, loss_of(theirs, labels), rtol=1e-4, atol=1e-5)
    assert (scores is not None) is engine.is_last_stage()
    if scores is not None:
        torch.testing.assert_close(scores, theirs, rtol=1e-3, atol=1e-4)
    engine.destroy()
    return losses


def resumes(stages, folder, stage):
    """A run that is saved and begun anew goes on with the same bits."""
    engine = start(int(stages), int(stage))
    grid = engine.grid
    data = batches(grid.data_parallel_id, 1)
    engine.train_batch(data)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    held = [next(data) for _ in range(MICRO)]
    wanted = engine.train_batch(iter(held))
    engine.destroy()
    engine = start(int(stages), int(stage))
    path, state = engine.load_checkpoint(folder)
    assert Path(path).name == "global_step1" and state == {"epoch": 3} and engine.global_steps == 1
    assert torch.equal(engine.train_batch(iter(held)), wanted)
    engine.destroy()
    return wanted.item()


def saves(folder):
    engine = start(2)
    engine.train_batch(batches(0, 1))
    engine.save_checkpoint(folder, tag="two")
    engine.destroy()


class Pair(nn.Module):
    """Takes and gives a tuple; its mask has no gradient."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        x, mask = pair
        x *= 1.5  # in place
        return self.linear(x) * mask, mask


def shapes(dynamic):
    """Tuples between stages, a function among the layers, shapes that change; data by set_dataloader and "
    "set_batch_fn."""
    layers = [Pair(WIDTH), Pair(WIDTH), lambda pair: pair[0], nn.Linear(WIDTH, 1)]
    torch.manual_seed(0)
    module = PipelineModule(
        layers,
        topology=PipeDataParallelTopology(2, 1),
        loss_fn=nn.MSELoss(),
        dynamic_shape=dynamic == "dynamic",
    )
    engine = deepspeed.initialize(model=module, config=settings())[0]

    def batch(number):
        rows = 1 + number % 3
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(rows, WIDTH, generator=generator)
        return {"x": (x, (x > 0).float()), "y": x.sum(1, keepdim=True)}

    engine.set_dataloader([batch(number) for number in range(5)])
    engine.set_batch_fn(lambda given: (given["x"], given["y"]))
    try:
        losses = [engine.train_batch().item() for _ in range(4)]
    except OverspillError as error:
        return str(error)
    assert losses[-1] < losses[0]
    engine.destroy()
    return "trained"


def from_data(stages):
    """training_data: both ends of a pipeline have the same batches, each rank of a stage its own."""
    pairs = [
        (torch.tensor([k % VOCABULARY] * LENGTH), torch.tensor([(k * 7) % VOCABULARY] * LENGTH))
        for k in range(48)
    ]
    module = PipelineModule(specs(), num_stages=int(stages), loss_fn=loss_of, seed_layers=True)
    engine, _, loader, _ = deepspeed.initialize(model=module, config=settings(), training_data=pairs)
    seen = []
    engine.set_batch_fn(lambda batch: seen.append(batch[0][:, 0].tolist()) or batch)

    for _ in range(3):
        engine.train_batch()
    assert len(loader) == 48 // 2 // engine.world_size
    engine.destroy()
    return {"stage": engine.stage_id, "data": engine.grid.data_parallel_id, "seen": seen}


def fails(stage, how):
    """One stage fails in the middle of a batch; the other, which waits for it, says so and ends."""

    class Failing(nn.Linear):
        calls = 0

        def forward(self, x):
            Failing.calls += 1
            if Failing.calls == 3 and dist.get_rank() == int(stage):
                if how == "exits":
                    os._exit(3)
                raise ValueError("on purpose")
            return super().forward(x)

    module = PipelineModule([Failing(WIDTH, WIDTH), Failing(WIDTH, 1)], num_stages=2, loss_fn=nn.MSELoss())
    engine = deepspeed.initialize(model=module, config=settings())[0]
    try:
        while True:
            engine.train_batch(itertools.repeat((torch.ones(2, WIDTH), torch.zeros(2, 1))))
    except EngineFailed as error:
        return str(error)


def pairs(width=WIDTH, out=1):
    return itertools.repeat((torch.ones(2, width), torch.zeros(2, out)))


def two(*layers, **more):
    """An engine of a stage a layer."""
    torch.manual_seed(0)
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", **more)
    return deepspeed.initialize(model=module, config=settings())[0]


class Counting(nn.Linear):
    """Gives its count beside its output, in one buffer that it changes in place."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(4000))

    def forward(self, x):
        self.count += 1
        return super().forward(x), self.count


class Seeing(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 1)
        self.seen = []

    def forward(self, pair):
        x, count = pair
        self.seen.append(int(count[-1]))
        return super().forward(x)


def copies():
    """What is under way when a stage changes it; the script's data, which a first layer changes."""
    engine = two(Counting(), Seeing())
    for _ in range(3):
        engine.train_batch(pairs())
    seen = getattr(engine.module, "1").seen if engine.is_last_stage() else None
    engine.destroy()
    data = [next(pairs()) for _ in range(MICRO)]
    engine = two(
        nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1)
    )
    engine.train_batch(iter(data))
    engine.destroy()
    assert all(torch.equal(x, torch.ones(2, WIDTH)) for x, _ in data)
    return seen


class Many(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return tuple(y * k for k in range(5))


class Summing(nn.Linear):
    def forward(self, many):
        return super().forward(sum(many))


def many():
    """More tensors in a tuple than may be under way."""
    engine = two(Many(WIDTH, WIDTH), Summing(WIDTH, 1), dynamic_shape=True)
    losses = [engine.train_batch(pairs()).item() for _ in range(3)]
    assert len(set(losses)) == 3
    engine.destroy()
    return losses


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def closes():
    """One stage closes its engine; the other does not wait for it."""
    engine = two(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine.train_batch(pairs())
    if engine.is_first_stage():
        engine.destroy()
    return error_of(lambda: engine.train_batch(pairs()))


def saves_in_part(folder):
    """A save that one stage refuses is refused by all, and the run goes on; so is a load of what is damaged."""
    engine = start(2)
    data = batches(0, 1)
    engine.train_batch(data)
    engine.save_checkpoint(folder, tag="good")
    state = {"number": 1} if engine.is_first_stage() else {"object": object()}
    said = [error_of(lambda: engine.save_checkpoint(folder, tag="bad", client_state=state))]
    engine.train_batch(data)
    engine.save_checkpoint(folder, tag="damaged")
    if engine.is_first_stage():
        for file in Path(folder, "damaged", "stage-01").rglob("*"):
            if file.is_file() and file.name != "manifest.json":
                text = bytearray(file.read_bytes())
                text[: len(text)] = bytes(byte ^ 1 for byte in text)
                file.write_bytes(text)
    dist.barrier()
    engine.train_batch(data)
    said.append(error_of(lambda: engine.load_checkpoint(folder, tag="damaged")))
    assert engine.global_steps == 3, "no stage was loaded"
    assert Path(engine.load_checkpoint(folder, tag="good")[0]).name == "good" and engine.global_steps == 1
    engine.destroy()
    return said


def tags(folder):
    """Stages that give different tags."""
    engine = start(2)
    engine.train_batch(batches(0, 1))
    engine.save_checkpoint(folder, tag=f"tag-{engine.stage_id}")
    for _ in range(3):
        assert Path(engine.load_checkpoint(folder)[0]).name == "tag-0"
    engine.save_checkpoint(folder, tag="tag-0")
    engine.destroy()
    return sorted(path.name for path in Path(folder).iterdir())


def resumes_with_more(folder):
    """A run that was saved with other numbers of micro-batches goes on in whole batches."""
    engine = start(2, gradient_accumulation_steps=2)
    for _ in range(3):
        engine.train_batch(batches(0, 1))
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(2, gradient_accumulation_steps=4)
    engine.load_checkpoint(folder)
    for _ in range(2):
        engine.train_batch(batches(0, 1))
    assert engine.global_steps == 5 and engine.was_step_applied()
    engine.destroy()


class Position(nn.Module):
    """An embedding of words and positions, whose words alone are tied to the head."""

    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return self.word(x) + self.position(torch.arange(LENGTH))


def ties(form):
    """Of a tied layer the parameters that tied_weight_attr names."""

    def tied(**more):
        return TiedLayerSpec("e", Position, tied_weight_attr="word.weight", **more)

    layers = [tied(), LayerSpec(Block, WIDTH), tied(forward_fn=lambda e, x: logits(e.word, x))]
    module = PipelineModule(
        layers, num_stages=2, loss_fn=loss_of, seed_layers=True, partition_method="uniform"
    )
    config = settings(bf16={"enabled": True})
    config["overspill"]["format"] = form
    if form != "exact":
        return error_of(lambda: deepspeed.initialize(model=module, config=config))
    engine = deepspeed.initialize(model=module, config=config)[0]
    for _ in range(4):
        engine.train_batch(batches(0, 1))
    word = engine.weight(engine.module.tied_modules["e"].word.weight, torch.float32)
    engine.destroy()
    return word.flatten()[:200].tolist()


def shares():
    """One layer in two stages."""
    layer = nn.Linear(WIDTH, WIDTH)
    return error_of(
        lambda: PipelineModule([layer, nn.Tanh(), layer], num_stages=2, partition_method="uniform")
    )


CASES = {
    each.__name__: each
    for each in (
        trains,
        resumes,
        saves,
        shapes,
        from_data,
        fails,
        copies,
        many,
        closes,
        saves_in_part,
        tags,
        resumes_with_more,
        ties,
        shares,
    )
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    deepspeed.init_distributed()
    print(json.dumps(CASES[name](*arguments)), flush=True)
