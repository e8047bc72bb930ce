"""What is refused of the states of optimizers that run their own code: values that could not come back, checkpoints of
others, harm and hostile files. Nothing is changed by it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_states_scene import COMMAND, FILE, Named, Odd, made, net, other, refused, train, unchanged
from torch import nn

import overspill
from overspill import _core, tensor_file

pytestmark = pytest.mark.filterwarnings("ignore:overspill. the engine has no update")


@pytest.fixture
def saved(start, tmp_path):
    engine = made(start, Odd)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


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
