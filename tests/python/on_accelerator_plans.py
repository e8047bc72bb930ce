"""What lives on an accelerator under PyTorch: what a plan puts there, what is updated there, what comes there from a
checkpoint. Run as on_accelerator.py is."""

import json

import pytest
import torch
from accelerator_scene import (
    ON_TESTS_OWN,
    ON_THE_DEVICE,
    expect_on_device,
    inputs,
    small_net,
    square_loss,
    train,
)
from test_zoo import assert_same
from torch import nn

import overspill
from overspill.layers import compiled

pytest_plugins = "accelerator_scene"


def traced_steps(engine, file):
    """The tracks of the spans that two steps leave."""
    train(engine, 1)
    with engine.trace(file):
        train(engine, 2)
        engine.synchronize()
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [tracks[e["tid"]] for e in events if e["ph"] == "X"]


def test_the_trace_has_what_the_device_did(on_device, tmp_path):
    engine = overspill.initialize(small_net(), on_device())[0]
    shown = traced_steps(engine, tmp_path / "trace.json")
    assert {"device: copies up", "device: copies down", "device: computes (0)"} <= set(shown)
    assert shown.count("device: copies down") == 2 * len(list(engine.module.parameters()))
    engine.close()


def test_what_lives_on_the_device_never_crosses_the_link(on_device, tmp_path):
    engine = overspill.initialize(small_net(), on_device("device"))[0]
    plan = engine._core.plan.as_dict()
    assert plan["units_on_device"] == 3 and plan["states_host_bytes"] == plan["weights_host_bytes"] == 0
    assert engine.stats()["device_bytes"] == sum(plan[f"{what}_device_bytes"] for what in ON_THE_DEVICE)
    shown = traced_steps(engine, tmp_path / "trace.json")
    assert {"device: updates", "device: computes (0)"} <= set(shown)
    assert not {"device: copies up", "device: copies down"} & set(shown)
    assert shown.count("device: updates") == 2 * 3
    engine.close()


OPTIMIZERS = (
    {"type": "Lion", "lr": 1e-3, "weight_decay": 0.1},
    {"type": "SGD", "lr": 1e-2, "momentum": 0.9, "nesterov": True},
    {"type": "Adagrad", "lr": 1e-2, "initial_accumulator_value": 0.1},
    {"type": "AdamW", "lr": 1e-2},
    {"type": "RMSprop", "lr": 1e-3},
    {"type": "RMSprop", "lr": 1e-3, "momentum": 0.9},
    {"type": "NAdam"},
    {"type": "Adamax"},
    {"type": "Adadelta", "lr": 0.5},
)


@pytest.mark.parametrize(
    "section, kept",
    [
        (section, kept)
        for section in OPTIMIZERS
        for kept in ("exact", "compact", "8bit")
        if (section["type"], kept) != ("Adamax", "8bit")  # which is refused
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else value,
)
def test_every_optimizer_updates_there_what_the_cpu_would(section, kept, on_device):
    def trained(placement):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
        engine = overspill.initialize(model, on_device(placement, section=section, format=kept, seed=5))[0]
        assert engine._core.plan.as_dict()["units_on_device"] == (2 if placement == "device" else 0)
        for i in range(4):
            engine.backward(square_loss(engine, inputs(i, 64).bfloat16()))
            engine.step()
        masters = [engine.weight(p, torch.float32) for p in engine.module.parameters()]
        states = [s for p in engine.module.parameters() for s in engine.optimizer_state(p).values()]
        engine.close()
        return masters + states

    for i, (there, here) in enumerate(zip(trained("device"), trained("host"), strict=True)):
        assert_same(f"number {i}", there, here)


def test_the_budget_decides_how_much_lives_there(on_device):
    def living(budget):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))  # 12 MiB in fp32, 48 with all else
        engine = overspill.initialize(model, on_device("auto", device=budget))[0]
        plan = engine._core.plan.as_dict()
        losses = train(engine, 2, width=512)
        engine.close()
        assert engine.stats()["device_bytes"] <= sum(plan[f"{what}_device_bytes"] for what in ON_THE_DEVICE)
        return plan["units_on_device"], losses

    found = [living(budget) for budget in ("4MiB", "14MiB", "24MiB", "96MiB")]
    assert [units for units, _ in found] == [0, 0, 3, 12]
    assert all(losses == found[0][1] for _, losses in found)


@pytest.fixture
def folder_of_a_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_straight_from_a_checkpoint(folder_of_a_model, on_device):
    """Parameters that never were on the CPU: read one by one into the engine."""
    import transformers

    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(3))
    losses = []
    for model in (None, transformers.AutoModelForCausalLM.from_pretrained(folder_of_a_model)):
        checkpoint = folder_of_a_model if model is None else None
        engine = overspill.initialize(model, on_device("half"), checkpoint=checkpoint)[0]
        engine.train()
        expect_on_device(engine)
        losses.append([])
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_two_engines_beside_each_other(on_device, config):
    """One here, one on the CPU: a teacher and its pupil."""
    host = config("half")
    host["engine"].device = "host"
    teacher = overspill.initialize(small_net().requires_grad_(False), host)[0].eval()
    pupil = overspill.initialize(small_net(), on_device("half"))[0]
    before = None
    for _ in range(20):
        with torch.no_grad():
            wanted = teacher(inputs(0))
        loss = (pupil(inputs(0)) - wanted.to(pupil.device) - 1).square().mean()
        before = before or loss.item()
        pupil.backward(loss)
        pupil.step()
    assert loss.item() < before
    teacher.close()
    pupil.close()


if ON_TESTS_OWN:

    def test_blocks_are_compiled(on_device, monkeypatch):
        """Without code for a device, which torch.compile cannot make for the tests' own."""
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
        found = []
        for compile in (False, True):
            torch.manual_seed(0)
            blocks = (nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(3))
            said = on_device("nvme", job=f"c{compile}")
            said["engine"].compile = compile
            engine, *_ = overspill.initialize(nn.Sequential(*blocks, nn.Linear(32, 1)), said)
            found.append(train(engine, 3))
            assert not compile or engine.compiled["plain_calls"] == engine.compiled["graph_breaks"] == 0
            engine.close()
        assert found[1] == pytest.approx(found[0], rel=1e-5)
