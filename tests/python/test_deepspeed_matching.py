"""load_checkpoint(load_module_strict=False): weights by name, of a checkpoint of another model."""

import pytest
import torch
from torch import nn

from overspill import CheckpointError, deepspeed

pytestmark = pytest.mark.usefixtures("no_group")


class Old(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, 2)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        y = self.body(x)
        with torch.no_grad():
            self.shift += 1
        return self.head(y + self.shift.to(y.dtype))


class New(Old):
    """With another head, and what follows it."""

    def __init__(self, width=4):
        super().__init__(width)
        self.head, self.last = nn.Identity(), nn.Linear(width, 3)

    def forward(self, x):
        return self.last(super().forward(x))


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def started(model, **more):
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "overspill": {"budget": {"host": "32MiB"}},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def step(engine):
    loss = engine(X.to(engine.module.body.weight.dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    engine = started(Old(), bf16={"enabled": True})
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(tmp_path, "old", {"epoch": 7})
    weights = {name: engine.weight(p, torch.float32) for name, p in engine.module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    return tmp_path, weights, buffers


def load(engine, folder, **more):
    kept = {"load_optimizer_states": False, "load_lr_scheduler_states": False, **more}
    return engine.load_checkpoint(folder, "old", load_module_strict=False, **kept)


def test_what_both_have_is_taken_exactly_and_the_rest_stays(saved):
    folder, weights, buffers = saved
    engine = started(New(), bf16={"enabled": True})
    last = engine.weight(engine.module.last.weight, torch.float32)
    with pytest.warns(
        UserWarning,
        match=r"3 weights and buffers .* as they were: last\.bias, last\.weight\. .*alone: head\.bias",
    ):
        path, state = load(engine, folder)
    assert path.endswith("old") and state == {"epoch": 7} and engine.global_steps == 3
    for name, parameter in engine.module.named_parameters():
        wanted = last if name == "last.weight" else weights.get(name)
        if wanted is not None:
            assert torch.equal(engine.weight(parameter, torch.float32), wanted), name
    assert torch.equal(engine.module.shift, buffers["shift"]) and buffers["shift"].all()
    before = engine.weight(engine.module.body.weight, torch.float32)
    step(engine)
    assert not torch.equal(engine.weight(engine.module.body.weight, torch.float32), before), "it trains on"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "old"], "nothing is left beside it"
    engine.destroy()


def test_counts_stay_where_only_the_module_is_asked_for(saved):
    engine = started(New(), bf16={"enabled": True})
    with pytest.warns(UserWarning, match="are loaded"):
        load(engine, saved[0], load_module_only=True)
    assert engine.global_steps == 0
    engine.destroy()


def test_a_checkpoint_of_this_model_is_loaded_whole(saved, recwarn):
    folder, weights, _ = saved
    engine = started(Old(), bf16={"enabled": True})
    load(engine, folder, load_optimizer_states=True)
    assert not any("are loaded" in str(each.message) for each in recwarn)
    state = engine.optimizer.state[engine.module.body.weight]
    assert state["exp_avg"].any() and torch.equal(
        engine.weight(engine.module.body.weight, torch.float32), weights["body.weight"]
    )
    engine.destroy()


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (New, {"load_optimizer_states": True}, "give load_optimizer_states=False"),
        (lambda: New(5), {}, r"body\.weight is of shape \[4, 8\] in .*, and \[5, 8\] here"),
        (
            lambda: nn.Sequential(nn.Linear(8, 2)),
            {},
            r"has body\.bias, .*shift, of which this model has none",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(saved, model, more, said):
    engine = started(model())
    before = {name: engine.weight(p, torch.float32) for name, p in engine.module.named_parameters()}
    with pytest.raises(CheckpointError, match=said):
        load(engine, saved[0], **more)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(engine.weight(parameter, torch.float32), before[name])
    engine.destroy()


def test_a_damaged_checkpoint_changes_nothing(saved):
    folder, _, _ = saved
    file = max(
        (each for each in (folder / "old").rglob("*") if each.is_file()), key=lambda each: each.stat().st_size
    )
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), 8):
        data[place] ^= 1
    file.write_bytes(data)
    engine = started(New(), bf16={"enabled": True})
    before = engine.weight(engine.module.body.weight, torch.float32)
    with pytest.raises(Exception, match=r"checksum|damaged"):
        load(engine, folder)
    assert torch.equal(engine.weight(engine.module.body.weight, torch.float32), before)
    engine.destroy()
