"""Checkpoints of optimizers that run their own code (own_states.py): what they save is what they load, a run that goes
on gives the bits of one that never stopped, and what could not come back so is refused before anything is written."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from disks import lies_in_a_file
from safetensors import safe_open
from torch import nn

import overspill
from overspill import _core, tensor_file

pytestmark = pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
FILE = "optimizer.safetensors"


class Odd(torch.optim.Optimizer):
    """A script's own: states of every kind, wider than the weights, and a value beside torch's two."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "words": ("a", None, 2.5)})
        self.calls = 0

    def state_dict(self):
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group["lr"])

    def _update(self, p, state, lr):
        if not state:
            state |= {"old": [], "n": 0, "kind": "odd", "none": None, "least": float("inf"), "on": True}
            state["wide"] = torch.zeros(p.shape, dtype=torch.float64)
            state["count"] = torch.zeros(3, 0), torch.tensor(0)
            state["same"] = state["twin"] = torch.zeros(p.shape)
            state["by"] = {1: "one", (2, "x"): [torch.arange(6.0).view(2, 3).t()]}
        state["n"] += 1
        state["count"][1].add_(1)
        state["least"] = min(state["least"], p.grad.abs().max().item())
        state["wide"].mul_(0.9).add_(p.grad.double())
        state["same"].add_(1)
        state["old"] = [*state["old"][-1:], p.grad.float().clone()]
        step = (
            state["wide"]
            + sum(state["old"])
            + state["twin"] * state["least"]
            + state["count"][1]
            + self.calls
        )
        p.add_(step.to(p.dtype), alpha=-lr * 1e-2)


class Named(Odd):
    """Of another name."""


def adamw(params):
    return torch.optim.AdamW(params, weight_decay=0.1)


def net(dtype=torch.float32, width=32, frozen=True):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 16)
    ).to(dtype)
    model[2].requires_grad_(not frozen)
    return model


def groups_of(model, kind):
    """With options of their own, in an order that is not the model's, frozen ones too. Muon takes matrices alone."""
    if kind is torch.optim.LBFGS:
        return [p for p in model.parameters() if p.requires_grad]
    if kind is torch.optim.Muon:
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.ndim == 2)
        return [{"params": [model[3].weight], "lr": 0.02}, {"params": [model[0].weight], "lr": 0.01}]
    last = [model[3].bias, model[3].weight]
    return [{"params": last, "lr": 0.02}, {"params": [*model[:3].parameters()], "lr": 0.01}]


def made(start, kind, dtype=torch.float32, width=32, **settings):
    model = net(dtype, width)
    return start(model, kind(groups_of(model, kind)), **settings)


def train(engine, steps):
    """An engine's steps by its number of steps."""
    optimizer, model = engine.optimizer, engine.module
    first = model[0].weight
    for i in steps:
        x = torch.randn(4, first.shape[1], generator=torch.Generator().manual_seed(i)).to(first.dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer.user, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def weights_of(engine):
    return {name: value.clone() for name, value in engine.state_dict().items()}


def alike(a, b):
    """To the kind of each value, the dtype and the memory order of each tensor."""
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is type(a) and [*a] == [*b] and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(b) is type(a) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


KINDS = [torch.optim.Muon, torch.optim.Adafactor, torch.optim.RAdam, torch.optim.ASGD, torch.optim.LBFGS, Odd]


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        (adamw, torch.float64),
    ],
)
def test_a_run_goes_on_to_the_bit(start, tmp_path, kind, dtype, placement):
    straight = made(start, kind, dtype, placement=placement)
    train(straight, range(3))
    straight.save_checkpoint(tmp_path / "saved", client_state={"at": 3})
    saved = straight.optimizer.state_dict()
    assert tensor_file.verify(tmp_path / "saved")["step"] == 3
    again = made(start, kind, dtype, placement=placement)
    again.optimizer.param_groups[0]["lr"] = 7.0
    assert again.load_checkpoint(tmp_path / "saved")["at"] == 3
    assert alike(saved, again.optimizer.state_dict())
    train(straight, range(3, 6))
    train(again, range(3, 6))
    assert again.stats()["step"] == 6
    assert alike(straight.optimizer.state_dict(), again.optimizer.state_dict())
    assert alike(weights_of(straight), weights_of(again))


def test_what_was_one_tensor_is_one_again(start, tmp_path):
    engine = made(start, Odd)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    again = made(start, Odd)
    again.load_checkpoint(tmp_path / "saved")
    state = again.optimizer.state[again.module[0].weight]
    assert state["same"] is state["twin"] and again.optimizer.user.calls == 1


def test_the_file_is_one_of_safetensors(start, tmp_path):
    engine = made(start, torch.optim.RAdam)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.optimizer.state[engine.module[0].weight]["exp_avg"]
    with safe_open(tmp_path / "saved" / FILE, "pt") as file:
        assert torch.equal(file.get_tensor("RAdam's state of 0.weight.exp_avg"), expected)


def test_an_optimizer_that_the_engine_updates_has_no_such_file(start, tmp_path):
    start(net()).save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved" / FILE).exists()
    assert "own_states" not in json.loads(_core.manifest(tmp_path / "saved")["extra_json"])


def test_large_states_go_back_into_files_where_there_is_a_disk(start, tmp_path):
    engine = made(start, torch.optim.RAdam, width=512, placement="nvme")
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    again = made(start, torch.optim.RAdam, width=512, placement="nvme")
    again.load_checkpoint(tmp_path / "saved")
    kept = again.optimizer.state[again.module[0].weight]["exp_avg"]
    assert lies_in_a_file(kept)
    train(again, range(1, 2))
    assert again.optimizer.state[again.module[0].weight]["exp_avg"] is kept


def test_no_tensor_is_copied_that_lies_dense_in_memory_and_others_one_at_a_time(start, tmp_path, monkeypatch):
    engine = made(start, torch.optim.RAdam, width=512)
    train(engine, range(1))
    whole, most, alive = torch.empty_strided, [], weakref.WeakSet()

    def counted(*args, **options):
        made = whole(*args, **options)
        if made.device.type != "meta":  # which has no memory
            alive.add(made.untyped_storage())
            most.append(len(alive))
        return made

    monkeypatch.setattr(torch, "empty_strided", counted)
    engine.save_checkpoint(tmp_path / "dense")
    assert not most
    for state in engine.optimizer.state.values():
        state["exp_avg"] = torch.stack([state["exp_avg"]] * 2, -1)[..., 0]
    engine.save_checkpoint(tmp_path / "strided")
    assert most == [1] * len(engine.optimizer.state)


def test_several_optimizers_of_both_kinds(start, tmp_path):
    def made():
        model = net(frozen=False)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return start(model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02)])

    def train(engine, steps):
        for i in steps:
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(i))
            engine.module(x).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    straight, again = made(), made()
    train(straight, range(3))
    straight.save_checkpoint(tmp_path / "saved")
    again.load_checkpoint(tmp_path / "saved")
    train(straight, range(3, 6))
    train(again, range(3, 6))
    assert alike(straight.optimizer.state_dict(), again.optimizer.state_dict())
    assert alike(weights_of(straight), weights_of(again))
    model = net(frozen=False)
    with pytest.raises(overspill.CheckpointError, match=r"2 optimizers in the checkpoint .*, 1 here"):
        start(model, torch.optim.RAdam(model.parameters())).load_checkpoint(tmp_path / "saved")


def view(tensor):
    return {"all": tensor, "part": tensor[1:]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda p: {1, 2}, r"state of 0\.weight\.bad is a builtins\.set"),
        (lambda p: print, r"0\.weight\.bad is a builtins\.builtin_function_or_method"),
        (lambda p: 1j, r"0\.weight\.bad is a builtins\.complex"),
        (lambda p: [Path()], r"0\.weight\.bad\[0\] is a pathlib"),
        (lambda p: {frozenset(): 1}, r"the key frozenset\(\) of .*0\.weight\.bad is a builtins\.frozenset"),
        (lambda p: torch.ones(2).to_sparse(), r"0\.weight\.bad is a Tensor \(torch\.sparse_coo"),
        (lambda p: torch.ones(2, device="meta"), r"0\.weight\.bad is a Tensor .*on meta"),
        (lambda p: torch.ones(2, dtype=torch.complex128), r"0\.weight\.bad is torch\.complex128"),
        (lambda p: torch.ones(2, requires_grad=True), r"0\.weight\.bad requires a gradient"),
        (lambda p: nn.Parameter(torch.ones(2), False), r"0\.weight\.bad is a Parameter"),
        (lambda p: [p], r"0\.weight\.bad\[0\] is the weight 0\.weight itself"),
        (lambda p: view(torch.ones(4)), r"0\.weight\.bad\.part shares memory with .*0\.weight\.bad\.all"),
        (lambda p: nested(), r"nested more than 100 levels deep, or holds itself"),
        (lambda p: __import__("numpy").float64(1), r"0\.weight\.bad is a numpy\.float64"),
        (
            lambda p: __import__("collections").OrderedDict(a=1),
            r"0\.weight\.bad is a collections\.OrderedDict",
        ),
    ],
)
def test_a_state_that_could_not_come_back_is_refused_by_name(start, tmp_path, value, words):
    engine = made(start, Odd)
    train(engine, range(1))
    weight = engine.module[0].weight
    engine.optimizer.state[weight]["bad"] = value(weight)
    with pytest.raises(TypeError, match=words):
        engine.save_checkpoint(tmp_path / "saved")
    assert not list(tmp_path.glob("saved*"))
    del engine.optimizer.state[weight]["bad"]
    engine.save_checkpoint(tmp_path / "saved")


def nested():
    found = []
    found.append(found)
    return found


def test_an_option_that_could_not_come_back_is_refused_by_name(start, tmp_path):
    engine = made(start, Odd)
    engine.optimizer.param_groups[1]["rule"] = print
    with pytest.raises(TypeError, match=r"Odd's state_dict\(\)\.param_groups\[1\]\.rule is a builtins"):
        engine.save_checkpoint(tmp_path / "saved")
    assert not list(tmp_path.glob("saved*"))


@contextlib.contextmanager
def unchanged(engine):
    """The block changes nothing of what the engine trains."""
    optimizer = engine.optimizer
    before = weights_of(engine), engine.stats()["step"]
    states = None if optimizer.groups.foreign is None else torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, optimizer.state_dict()
    )  # fmt: skip
    yield
    assert alike(before, (weights_of(engine), engine.stats()["step"]))
    assert states is None or alike(states, optimizer.state_dict())


def refused(engine, folder, words):
    with unchanged(engine), pytest.raises(overspill.CheckpointError, match=words):
        engine.load_checkpoint(folder)


@pytest.fixture
def saved(start, tmp_path):
    engine = made(start, Odd)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def other(start, kind=Odd, of=None, **options):
    """An engine that has stepped, so that it would be seen if a load changed anything."""
    engine = made(start, kind, **options) if of is None else of
    train(engine, range(5, 6))
    return engine


def test_a_checkpoint_of_another_optimizer_is_refused(start, saved, tmp_path):
    refused(
        other(start, torch.optim.RAdam),
        saved,
        r"states of .*\.Odd, and the optimizer here is torch\.optim\.RAdam",
    )
    refused(other(start, Named), saved, r"Odd, and the optimizer here is .*Named: .*overspill merge")
    model = net()
    updated = start(model, torch.optim.SGD(model.parameters(), lr=0.0))
    refused(
        updated, saved, r"states of .*\.Odd, whose own code makes the steps, and here the engine updates SGD"
    )
    updated.save_checkpoint(tmp_path / "sgd")
    refused(
        other(start),
        tmp_path / "sgd",
        r"an optimizer that the engine updates, and here the own code of .*Odd",
    )


def test_a_checkpoint_of_other_groups_or_shapes_is_refused(start, saved):
    model = net()
    refused(
        other(start, of=start(model, Odd(model.parameters()))),
        saved,
        "2 parameter groups in the checkpoint .*, 1",
    )
    model = net()
    swapped = [{"params": [model[3].weight, model[3].bias]}, {"params": [*model[:3].parameters()]}]
    refused(
        other(start, of=start(model, Odd(swapped))),
        saved,
        r"group 0 has \['3\.bias', .*here: give initialize the groups",
    )
    refused(other(start, width=48), saved, r"group 0 has \['3\.weight', \[16, 32\].*\[16, 48\]")
    refused(
        other(start, dtype=torch.bfloat16), saved, r"group 0 has \['3\.bias', \[16\], 'float32'\].*'bfloat16'"
    )


def test_a_script_that_is_imported_goes_on_from_one_that_was_run(start, saved, monkeypatch):
    monkeypatch.setattr(Odd, "__module__", "__main__")
    made(start, Odd).load_checkpoint(saved)
    monkeypatch.setattr(Named, "__module__", "__main__")
    refused(other(start, Named), saved, "the optimizer here is __main__.Named")


def test_a_class_that_does_not_take_its_state_changes_nothing(start, saved, monkeypatch):
    engine = other(start)

    def failing(self, state_dict):
        self.calls = 99
        self.state.clear()
        self.param_groups[0]["lr"] = 5.0
        raise KeyError("calls of another version")

    with monkeypatch.context() as patch:
        patch.setattr(Odd, "load_state_dict", failing)
        refused(
            engine,
            saved,
            r"Odd\.load_state_dict does not take the state .*KeyError: 'calls of another version'",
        )
    assert engine.optimizer.user.calls == 1


def test_weights_that_do_not_load_take_the_states_back(start, saved):
    """The states' file is whole, and a weight is not: what the optimizer was given by then is its own again."""
    engine = other(start)
    with (saved / "resident.bin").open("r+b") as file:
        file.write(bytes(64))
    refused(engine, saved, r"resident\.bin")
    train(engine, range(6, 7))


def test_harm_to_the_file_is_found_before_anything_changes(start, saved):
    whole = (saved / FILE).read_bytes()
    engine = other(start)

    def harmed(data, words):
        (saved / FILE).write_bytes(data)
        refused(engine, saved, words)
        with pytest.raises(overspill.CheckpointError, match=words):
            tensor_file.verify(saved)
        assert subprocess.run([*COMMAND, "verify", str(saved)], capture_output=True).returncode == 1

    places = (3, 20, len(whole) // 2, len(whole) - 1)
    for at in places if not os.environ.get("OVERSPILL_LONG") else range(0, len(whole), 97):
        flipped = bytearray(whole)
        flipped[at] ^= 4
        head = int.from_bytes(whole[:8], "little") + 8
        harmed(bytes(flipped), "its header is not" if at < head else "does not fit its checksum at byte")
    harmed(whole[:-1], "it has .* bytes, and its manifest says")
    harmed(whole + b"0", "it has .* bytes, and its manifest says")
    (saved / FILE).unlink()
    (saved / FILE).symlink_to("/etc/passwd")
    refused(engine, saved, "cannot be opened")
    (saved / FILE).unlink()
    refused(engine, saved, rf"{FILE}: it cannot be opened: No such file")
    (saved / FILE).write_bytes(whole)
    engine.load_checkpoint(saved)


COMMAND = [sys.executable, "-m", "overspill.cli"]


def tensors(extra):
    return extra["own_states"]["tensors"]


def one(extra):
    return extra["own_states"]["optimizers"][0]


def deep(levels):
    found = 1
    for _ in range(levels):
        found = [found]
    return found


HOSTILE = {
    "dtype": lambda e: tensors(e)[0].update(dtype="F512"),
    "kind of dtype": lambda e: tensors(e)[0].update(dtype=["F32"]),
    "another dtype": lambda e: next(t for t in tensors(e) if t["dtype"] == "F32").update(dtype="I32"),
    "negative": lambda e: tensors(e)[0].update(shape=[-1]),
    "huge": lambda e: tensors(e)[0].update(shape=[2**61, 2**61], strides=[2**61, 1]),
    "overlap": lambda e: tensors(e)[0].update(strides=[0] * len(tensors(e)[0]["strides"])),
    "no strides": lambda e: tensors(e)[0].update(strides=[]),
    "fewer sums": lambda e: tensors(e)[0].update(checksums=[]),
    "sums": lambda e: tensors(e)[0].update(checksums=[7] * len(tensors(e)[0]["checksums"])),
    "field": lambda e: tensors(e)[0].pop("device"),
    "device": lambda e: tensors(e)[0].update(device="cuda:0 or so"),
    "name": lambda e: tensors(e)[0].update(name="\ud800"),
    "twice": lambda e: tensors(e)[0].update(name=tensors(e)[1]["name"]),
    "list": lambda e: e["own_states"].update(tensors={}),
    "optimizers": lambda e: e["own_states"].update(optimizers={"0": one(e)}),
    "none": lambda e: e["own_states"].update(optimizers=[]),
    "class": lambda e: one(e).update({"class": 5}),
    "rest": lambda e: one(e).update(rest=[]),
    "no groups": lambda e: one(e).update(rest={}),
    "state twice": lambda e: one(e)["rest"].update(state={}),
    "numbers": lambda e: one(e)["rest"]["param_groups"][0].update(params=[5, 6]),
    "parameters": lambda e: one(e).update(parameters=5),
    "no such tensor": lambda e: one(e)["state"].append([0, {"a": {"__kind__": "tensor", "value": 10**6}}]),
    "tensor": lambda e: one(e)["state"].append([0, {"a": {"__kind__": "tensor", "value": {"dtype": "x"}}}]),
    "no such parameter": lambda e: one(e)["state"].append([77, {}]),
    "no dict": lambda e: one(e)["state"].append([0, 5]),
    "key": lambda e: one(e)["state"].append([[1], {}]),
    "mark": lambda e: one(e)["state"].append([0, {"__kind__": "pickle", "value": "x"}]),
    "NaN": lambda e: one(e)["rest"].update(a=float("nan")),
    "infinite": lambda e: one(e)["rest"].update(a=float("-inf")),
    "deep": lambda e: one(e)["rest"].update(a=deep(20_000)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_of_somebody_else_is_refused(start, saved, tmp_path, what):
    """Its own checksum fits: somebody wrote it so."""
    engine = other(start)
    extra = json.loads(_core.manifest(saved)["extra_json"])
    HOSTILE[what](extra)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        text = json.dumps(extra)
    finally:
        sys.setrecursionlimit(limit)
    bad = tmp_path / "bad"

    def write_beside(folder):
        shutil.copyfile(saved / FILE, folder / FILE)
        return text

    try:
        engine._core.save(bad, write_beside)
    except overspill.CheckpointError:  # the core's own reader refuses it too
        assert what in ("NaN", "infinite", "deep")
        return
    with unchanged(engine), pytest.raises(overspill.CheckpointError, match=f"{bad}"):
        engine.load_checkpoint(bad)


def test_an_error_while_states_are_written_leaves_no_checkpoint(start, tmp_path, monkeypatch):
    engine = made(start, Odd)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "first")

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "sync_file", full)
        with pytest.raises(OSError, match=f"No space left on device.*{FILE}"):
            engine.save_checkpoint(tmp_path / "second")
    assert not list(tmp_path.glob("second*"))
    tensor_file.verify(tmp_path / "first")
    engine.save_checkpoint(tmp_path / "second")
    tensor_file.verify(tmp_path / "second")


KILLED = """
    import os, sys, signal
    sys.path[:0] = [{tests!r}]
    import torch, overspill, test_own_states as own
    from pathlib import Path

    root, point = Path({root!r}), {point!r}
    model = own.net()
    settings = {{"budget": {{"host": "64MiB", "nvme": [str(root / "disk")]}}, "engine": {{"placement": {placement!r}}}}}
    engine, *_ = overspill.initialize(model, settings, own.Odd(own.groups_of(model, own.Odd)))
    own.train(engine, range(2))
    engine.save_checkpoint(root / "step-000002")
    own.train(engine, range(2, 3))

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    write = own.tensor_file.write
    if point == "before":
        own.tensor_file.write = die
    if point == "between":
        own.tensor_file._checksum = lambda piece, seen=[]: die() if len(seen) > 3 else seen.append(1) or "0" * 16
    if point == "unsynced":
        own.tensor_file.sync_file = die
    if point == "behind":
        own.tensor_file.write = lambda *given: [write(*given), die()]
    engine.save_checkpoint(root / "step-000003")
    die()
"""


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("point", ["before", "between", "unsynced", "behind", "after"])
def test_a_kill_leaves_the_checkpoint_before_whole(start, tmp_path, point, placement):
    from overspill.cli.checkpoints import Checkpoints

    (tmp_path / "disk").mkdir()
    tests = str(Path(__file__).parent)
    script = textwrap.dedent(KILLED.format(tests=tests, root=str(tmp_path), point=point, placement=placement))
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = Checkpoints(tmp_path)
    step = 3 if point == "after" else 2
    assert [each for each, _ in found.complete()] == [2, 3][: step - 1]
    assert tensor_file.verify(found.latest())["step"] == step
    straight, again = made(start, Odd), made(start, Odd)
    train(straight, range(4))
    again.load_checkpoint(found.latest())
    train(again, range(step, 4))
    assert alike(weights_of(straight), weights_of(again))
    if point != "after":
        assert (tmp_path / "step-000003.partial").is_dir()
        again.save_checkpoint(tmp_path / "step-000003")  # in place of what is left
    found.remove_leftovers()
    found.prune(1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000003"]


def test_the_newest_ones_are_kept(start, tmp_path):
    """checkpoints_kept, over NVMe: the extents of those that are deleted are free again."""
    engine = made(start, torch.optim.RAdam, placement="nvme", checkpoints_kept=2)
    for i in range(6):
        train(engine, range(i, i + 1))
        engine.save_checkpoint(tmp_path / f"step-{i}")
        if i >= 2:
            shutil.rmtree(tmp_path / f"step-{i - 2}")
    for i in (4, 5):
        assert tensor_file.verify(tmp_path / f"step-{i}")["step"] == i + 1


def test_merge_takes_the_weights_alone(start, tmp_path):
    from safetensors.torch import load_file

    engine = made(start, torch.optim.RAdam)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    _core.merge(tmp_path / "saved", tmp_path / "merged", "fp32")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert alike(dict(sorted(merged.items())), dict(sorted(weights_of(engine).items())))


def test_verify_counts_the_file(start, saved):
    told = subprocess.run(
        [*COMMAND, "verify", str(saved), "--json"], capture_output=True, text=True, check=True
    )
    counted = json.loads(told.stdout)
    assert counted["files"] == 2
    assert counted["bytes"] == _core.verify(str(saved))["bytes"] + (saved / FILE).stat().st_size
