"""A checkpoint as a folder of torch.distributed.checkpoint: torch opens it, and training goes on there as here."""

import json
import os
import sys
from pathlib import Path

import disks
import launch
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_scene import damage, fails, ok
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import overspill
from overspill import CheckpointError, FolderError, dcp_folder, export_dcp

sys.path.append(str(Path(__file__).with_name("data") / "deepspeed"))

import net
from net import Net, batch

ADAMW = {"type": "AdamW", "lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.01}
FORMATS = ["fp32", "exact", "compact", "8bit"]


def train(engine, steps):
    losses = []
    for number in steps:
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def model_for(format, kind=Net):
    torch.manual_seed(0)
    return kind() if format == "fp32" else kind().bfloat16()


def engine_for(start, format, kind=Net, **options):
    settings = {"section": ADAMW, "placement": "nvme"} | options
    return start(model_for(format, kind), format=None if format == "fp32" else format, **settings)


def loaded(model, optimizer, folder, flat=False, keys=("model", "optim")):
    """The model and the optimizer with what is in the folder."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    found = {keys[0]: weights, keys[1]: states} if keys[0] else {**weights, keys[1]: states}
    dcp.load(found, checkpoint_id=folder)
    weights = found[keys[0]] if keys[0] else {name: found[name] for name in weights}
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=found[keys[1]], options=options
    )


def adamw(model):
    """With options that the folder has otherwise."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=7.0)


@pytest.fixture(params=["fp32", "exact"])
def run(request, start, tmp_path):
    """Three steps, an export, and the losses of three more: (folder, losses, format)."""
    engine = engine_for(start, request.param)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path / "saved")
    done = export_dcp(tmp_path / "saved", tmp_path / "dcp")
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    return tmp_path / "dcp", train(engine, range(3, 6)), request.param


def rounded(model):
    """A copy in bf16, as an engine has it for forward."""
    copy = Net().bfloat16()
    copy.load_state_dict(model.state_dict())
    copy.zero_grad()
    return copy


@pytest.mark.parametrize("flat", [False, True])
def test_plain_torch_goes_on_as_the_engine_does(run, flat):
    folder, losses, format = run
    torch.manual_seed(9)
    model = Net()
    optimizer = adamw(model)
    loaded(model, optimizer, folder, flat)
    found = []
    for number in range(3, 6):
        used = model if format == "fp32" else rounded(model)
        loss = used(*batch(number))
        loss.backward()
        for mine, theirs in zip(model.parameters(), used.parameters(), strict=True):
            if theirs.grad is not None:
                mine.grad = theirs.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found == losses


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_fsdp2_goes_on_as_the_engine_does(run, form, tmp_path):
    folder, losses, format = run
    job, out = Path(__file__).with_name("dcp_load_job.py"), tmp_path / "losses.json"
    agent = launch.torchrun(2, job, folder, out, "fp32" if format == "fp32" else "bf16", form)
    said, err = agent.communicate(timeout=launch.HANGS)
    assert agent.returncode == 0, said + err
    assert json.loads(out.read_text()) == pytest.approx(losses, rel=1e-6)


def test_the_engine_itself_goes_on_from_it(run, start):
    folder, losses, format = run
    engine = engine_for(start, format)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 3 and train(engine, range(3, 6)) == losses


def test_a_checkpoint_of_two_ranks(tmp_path):
    agent = launch.torchrun(2, Path(__file__).with_name("dcp_export_job.py"), tmp_path)
    said, err = agent.communicate(timeout=launch.HANGS)
    assert agent.returncode == 0, said + err
    model = Net()
    optimizer = adamw(model)
    loaded(model, optimizer, tmp_path / "dcp")
    losses = net.train(model, optimizer, range(3, 6))
    assert losses == pytest.approx(json.loads((tmp_path / "losses.json").read_text()), rel=1e-6)


class Wide(nn.Module):
    """Larger than a chunk, one weight in another order of memory, two that are tied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(70, 99)
        self.a = nn.Linear(99, 101)
        self.turned = nn.Parameter(torch.randn(99, 101).T * 0.1)
        self.out = nn.Linear(99, 70, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.out(torch.tanh(self.a(self.embed(x))) @ self.turned), y)


@pytest.mark.parametrize("format", FORMATS)
def test_every_weight_and_state_is_the_engines_in_each_format(format, start, tmp_path):
    engine = engine_for(start, format, Wide)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    model = Wide()
    optimizer = adamw(model)
    loaded(model, optimizer, tmp_path / "dcp")
    assert model.out.weight is model.embed.weight
    for (name, ours), theirs in zip(engine.module.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(engine.weight(ours, dtype=torch.float32), theirs), name
        state = optimizer.state[theirs]
        assert state["step"] == 3
        for key, value in engine.optimizer_state(ours).items():
            names = {"m": "exp_avg", "v": "exp_avg_sq"}
            assert torch.equal(value, state[names.get(key, key)]) and value.any(), (name, key)


def test_tied_weights_lie_there_once(start, tmp_path):
    engine = engine_for(start, "fp32", Wide)
    engine.save_checkpoint(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    assert places["model.embed.weight"] == places["model.out.weight"]


OPTIMIZERS = [
    ("Adam", {"lr": 1e-2}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 1e-2}),
    ("RMSprop", {"lr": 1e-2}),
    ("RMSprop", {"lr": 1e-2, "momentum": 0.5}),
    ("NAdam", {"lr": 1e-2}),
    ("Adamax", {"lr": 1e-2}),
    ("Adadelta", {"lr": 1.0}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_each_optimizer_of_torchs(name, options, start, tmp_path):
    """In two groups, with a scheduler."""

    def made(model, **changes):
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:3]}, {"params": trained[3:], "weight_decay": 0.05}]
        return getattr(torch.optim, name)(groups, **options | changes)

    torch.manual_seed(0)
    model = Net()
    optimizer = made(model)
    engine = start(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), placement="nvme"
    )
    train(engine, range(3))
    engine.save_checkpoint(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    plain = Net()
    theirs = made(plain, lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, 5, gamma=0.9)
    loaded(plain, theirs, tmp_path / "dcp")
    found = {"lr_scheduler": scheduler.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    scheduler.load_state_dict(found["lr_scheduler"])
    losses = []
    for number in range(3, 6):
        loss = plain(*batch(number))
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert losses == pytest.approx(train(engine, range(3, 6)), rel=1e-6)


def test_a_configurations_optimizer_has_what_torchs_has(start, tmp_path):
    """The options of a group that Overspill's configuration does not know."""
    engine = engine_for(start, "fp32", section={"type": "Adam", "lr": 1e-2})
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=7.0)
    loaded(model, optimizer, tmp_path / "dcp")
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is False


class Numbered(nn.Module):
    """Parameters that are called as groups are."""

    def __init__(self):
        super().__init__()
        for name in ("0", "1"):
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, x):
        return getattr(self, "0").sum() * x.sum() + getattr(self, "1").square().sum()


def test_parameters_whose_names_are_numbers(start, tmp_path):
    engine = start(Numbered(), section=ADAMW)
    engine.backward(engine(torch.ones(2)))
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    model = Numbered()
    optimizer = adamw(model)
    loaded(model, optimizer, tmp_path / "dcp")
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.state[getattr(model, "0")]["step"] == 1


def test_other_names_and_weights_in_bf16(run, tmp_path):
    saved, names = tmp_path / "saved", ("", "optimizer")
    export_dcp(saved, tmp_path / "other", model=names[0], optimizer=names[1], dtype="bf16")
    model, exact = Net(), Net()
    loaded(model, adamw(model), tmp_path / "other", keys=names)
    loaded(exact, adamw(exact), tmp_path / "dcp")
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())
    properties = dcp.FileSystemReader(tmp_path / "other").read_metadata().state_dict_metadata
    assert properties["a.weight"].properties.dtype is torch.bfloat16
    assert properties["optimizer.state.a.weight.exp_avg"].properties.dtype is torch.float32


def test_the_command(saved, tmp_path, capsys):
    said = ok(capsys, "export", saved / "step-000002", tmp_path / "new/dcp", "--optimizer-key", "optimizer")
    assert "6 tensors" in said and sorted(os.listdir(tmp_path / "new")) == ["dcp"]
    model = nn.Linear(64, 64)
    loaded(model, adamw(model), tmp_path / "new/dcp", keys=("model", "optimizer"))
    assert "not empty" in fails(capsys, "export", saved / "step-000002", tmp_path / "new/dcp")
    assert "is no folder" in fails(capsys, "export", saved / "absent", tmp_path / "other")
    damage(saved / "step-000003")
    assert "step-000003" in fails(capsys, "export", saved / "step-000003", tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


def test_a_full_disk_leaves_nothing(start, tmp_path):
    engine = engine_for(start, "fp32", Wide)
    engine.save_checkpoint(tmp_path / "saved")
    with disks.small(tmp_path / "disk", "256k") as disk:
        with pytest.raises(OSError, match=r"No space left on device: .*dcp"):
            export_dcp(tmp_path / "saved", disk / "dcp")
        assert os.listdir(disk) == []


def test_ctrl_c_leaves_nothing(start, tmp_path):
    engine = engine_for(start, "fp32", Wide)
    engine.save_checkpoint(tmp_path / "saved")

    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dcp(tmp_path / "saved", tmp_path / "dcp", progress=stop)
    assert not list(tmp_path.glob("dcp*"))


def test_memory_is_that_of_the_largest_tensor(start, tmp_path, monkeypatch):
    """No tensor is in memory that was written to a file that has ended."""
    import weakref

    monkeypatch.setattr(dcp_folder, "_BATCH_BYTES", 1)
    engine = engine_for(start, "fp32", Wide)
    engine.save_checkpoint(tmp_path / "saved")
    alive, most = [], []
    filled = dcp_folder._filled

    def counted(*given):
        tensor = filled(*given)
        alive.append(weakref.ref(tensor.untyped_storage()))
        most.append(sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(dcp_folder, "_filled", counted)
    done = export_dcp(tmp_path / "saved", tmp_path / "dcp")
    assert len(alive) == done.tensors == 12 and max(most) <= 2
    model = Wide()
    loaded(model, adamw(model), tmp_path / "dcp")


class Own(torch.optim.AdamW):
    """Runs its own code."""


def test_what_cannot_be_exported_is_refused(start, tmp_path):
    model = Net()
    engine = start(model, Own([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "own")
    with pytest.raises(CheckpointError, match="ran its own code"):
        export_dcp(tmp_path / "own", tmp_path / "dcp")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    with pytest.raises(FolderError):
        export_dcp(tmp_path / "own", tmp_path / "full")
    with pytest.raises(ValueError, match="dtype = 'fp16'"):
        export_dcp(tmp_path / "own", tmp_path / "dcp", dtype="fp16")
    with pytest.raises(ValueError, match="two names are needed"):
        export_dcp(tmp_path / "own", tmp_path / "dcp", model="optim")
    assert not list(tmp_path.glob("dcp*"))


def test_weights_in_fewer_bits_are_refused(start, tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
    model[0].requires_grad_(False)
    engine = start(model, frozen={"format": "int8"})
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds frozen weights in int8"):
        overspill.export_dcp(tmp_path / "saved", tmp_path / "dcp")
